"""The plan on a transformers model's config, written by surgery without transformers."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from torch import nn

import buttress as bt
from buttress.surgery.config_entry import is_ours


class Config:
    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Model(nn.Module):
    """Looks like a transformers model to surgery."""

    base_model_prefix: ClassVar[str] = "model"

    def __init__(self, config: Config, **children: nn.Module) -> None:
        super().__init__()
        self.config = config
        for name, child in children.items():
            self.add_module(name, child)


def tower(model_type: str, config: Config | None = None) -> Model:
    return Model(config or Config(model_type), up=nn.Linear(16, 16), down=nn.Linear(16, 16))


def names(config: Any) -> list[str]:
    entry = getattr(config, "quantization_config", None)
    return [] if entry is None else [row["name"] for row in entry["plan"]["layers"]]


def test_surgery_writes_updates_and_removes_the_entry() -> None:
    model = tower("text")
    bt.replace_(model, {"up": bt.BTT(rank=2)})
    assert names(model.config) == ["up"]
    bt.replace_(model, {"down": bt.BTT(rank=2)})
    assert names(model.config) == ["up", "down"]
    entry = model.config.quantization_config
    assert json.loads(json.dumps(entry)) == entry.to_dict() == entry
    assert "quant_method" not in entry
    assert bt.Plan.from_json(json.dumps(entry["plan"])) == bt.Plan.of(model)
    bt.densify_(model)
    assert not hasattr(model.config, "quantization_config")


def test_a_dry_run_writes_nothing() -> None:
    model = tower("text")
    bt.replace_(model, {"up": bt.BTT(rank=2)}, dry_run=True)
    assert not hasattr(model.config, "quantization_config")


def test_parts_with_their_own_config_get_their_own_plan() -> None:
    model = Model(Config("both"), text=tower("text"), eye=tower("eye"))
    bt.replace_(model, {"*.up": bt.BTT(rank=2), "eye.down": bt.BTT(rank=2)})
    assert names(model.config) == ["text.up", "eye.up", "eye.down"]
    assert model.config.quantization_config["parts"] == {"text": "text", "eye": "eye"}
    assert names(model.text.config) == ["up"]
    assert names(model.eye.config) == ["up", "down"]
    bt.densify_(model.text)
    assert names(model.text.config) == []


def test_a_part_can_be_any_module_with_its_own_config() -> None:
    part, config = nn.Sequential(nn.Linear(16, 16)), Config("eye")
    part.config = config
    model = Model(Config("both"), eye=part, up=nn.Linear(16, 16))
    bt.replace_(model, {"*": bt.BTT(rank=2)})
    assert names(config) == ["0"]
    assert model.config.quantization_config["parts"] == {"eye": "eye"}
    bt.densify_(part)
    assert names(config) == ["0"], "alone, it may be any layer of a model"


def test_the_outermost_of_the_models_that_share_a_config_is_described() -> None:
    config = Config("text")
    model = Model(config, model=tower("text", config))
    bt.replace_(model, {"*": bt.BTT(rank=2)})
    assert names(config) == ["model.up", "model.down"]
    assert config.quantization_config["parts"] == {}


def test_the_entry_of_another_quantization_is_left_alone() -> None:
    model = tower("text")
    model.config.quantization_config = {"quant_method": "gptq"}
    bt.replace_(model, {"up": bt.BTT(rank=2)})
    assert model.config.quantization_config == {"quant_method": "gptq"}
    bt.densify_(model)
    assert model.config.quantization_config == {"quant_method": "gptq"}


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model.config = {"a": 1}
    bt.replace_(model, {"0": bt.BTT(rank=2)})
    assert model.config == {"a": 1}
    assert model(torch.randn(2, 16)).shape == (2, 4)


def test_entries_of_this_and_earlier_versions_are_recognized() -> None:
    assert is_ours({"loader": "buttress.hf"})
    assert is_ours({"quant_method": "buttress"})
    assert not is_ours({"quant_method": "gptq"})
    assert not is_ours(None)
    assert not is_ours("buttress")
