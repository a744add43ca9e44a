"""The conventions by which models name what is not to be decayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from optim_models import LR

DECAY = 0.1


def rows(model: nn.Module) -> dict[str, bt.optim.ParameterRow]:
    return {r.name: r for r in bt.explain(model, LR, weight_decay=DECAY).rows}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.tables = nn.ParameterDict({"relative_position_bias_table": nn.Parameter(torch.zeros(9, 2))})
        self.cpb_mlp = nn.Sequential(nn.Linear(8, 8))
        self.proj = nn.Linear(8, 8)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cpb_mlp"}

    def no_weight_decay_keywords(self) -> set[str]:
        return {"relative_position"}


@pytest.mark.parametrize("prefix", ["", "tower."])
def test_what_a_model_or_a_part_of_it_names_is_not_decayed(prefix):
    tower = Tower()
    table = rows(nn.ModuleDict({"tower": tower}) if prefix else tower)
    undecayed = ("pos_embed", "tables.relative_position_bias_table", "cpb_mlp.0.weight")
    for name in undecayed:
        assert table[prefix + name].weight_decay == 0.0
        assert table[prefix + name].why.endswith("; not decayed: Tower.no_weight_decay names it")
    assert table[f"{prefix}proj.weight"].weight_decay == DECAY
    assert "decay" not in table[f"{prefix}proj.weight"].why


def test_names_count_inside_the_module_that_gives_them():
    model = nn.ModuleDict({"tower": Tower(), "pos_embed": nn.Linear(8, 8), "relative_position": nn.Linear(8, 8)})
    table = rows(model)
    assert table["pos_embed.weight"].weight_decay == table["relative_position.weight"].weight_decay == DECAY


def test_marked_parameters_are_not_decayed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight._no_weight_decay = True
    table = rows(model)
    assert table["0.weight"].weight_decay == 0.0
    assert table["0.weight"].why == "dense; not decayed: marked _no_weight_decay"
    assert table["1.weight"].weight_decay == DECAY


def test_a_factor_that_is_named_is_not_decayed():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cpb = bt.StructuredLinear(8, 8, bt.BTT())

        def no_weight_decay(self) -> set[str]:
            return {"cpb"}

    assert {r.weight_decay for r in rows(Net()).values()} == {0.0}


def test_vectors_with_axes_of_length_one_and_logarithms_are_not_decayed():
    model = nn.Module()
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
    model.logit_scale = nn.Parameter(torch.zeros(4, 1, 1))
    model.A_log = nn.Parameter(torch.zeros(8, 4))
    model.up_proj_bias = nn.Parameter(torch.zeros(3, 8))
    model.position = nn.Parameter(torch.zeros(1, 5, 8))
    table = rows(model)
    assert {name for name, row in table.items() if row.weight_decay} == {"position"}
    assert table["cls_token"].why == "vector: one number per feature"


def test_vision_models_of_timm():
    timm = pytest.importorskip("timm")
    vit = timm.create_model("vit_tiny_patch16_224", embed_dim=16, depth=1, num_heads=2, img_size=32)
    swin = timm.create_model(
        "swinv2_tiny_window8_256", embed_dim=16, depths=(1,), num_heads=(2,), img_size=32, window_size=4
    )
    for model in (vit, swin):
        bt.replace_(model, bt.BTT())
        for name, row in rows(model).items():
            spared = any(part in name for part in ("cls_token", "pos_embed", "cpb_mlp", "logit_scale"))
            if spared:
                assert row.weight_decay == 0.0, name
        groups = bt.param_groups(model, LR, weight_decay=DECAY)
        assert sum(len(g["params"]) for g in groups if g["weight_decay"]) == sum(
            r.weight_decay > 0 for r in rows(model).values()
        )


def test_mamba_of_transformers():
    hf = pytest.importorskip("transformers")
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4))
    table = rows(model)
    assert table["backbone.layers.0.mixer.A_log"].weight_decay == table["backbone.layers.0.mixer.D"].weight_decay == 0.0
