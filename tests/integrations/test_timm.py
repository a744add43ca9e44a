"""timm: structured models saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

timm = pytest.importorskip("timm")
from buttress import vision  # noqa: E402

ARGS: dict[str, Any] = {"depth": 1, "img_size": 32, "patch_size": 8}
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **ARGS).eval()


def test_names() -> None:
    assert vision.__all__ == ["fill", "load", "model_args", "save"]


@pytest.mark.parametrize("structure", [None, bt.BTT(rank=2), bt.LowRank(rank=4)], ids=str)
def test_saved_and_loaded(structure: bt.Structure | None, tmp_path: Path) -> None:
    model = vit()
    if structure is not None:
        bt.replace_(model, structure)
    assert vision.save(model, tmp_path / "m", **ARGS) == tmp_path / "m"
    loaded = vision.load(tmp_path / "m")
    assert torch.equal(loaded(X), model(X))
    assert bt.Plan.of(loaded) == bt.Plan.of(model)
    assert vision.model_args(tmp_path / "m") == ARGS
    plan = json.loads((tmp_path / "m" / "buttress-plan.json").read_text())
    assert len(plan["layers"]) == len(bt.Plan.of(model).entries)


def test_a_folder_of_timm_itself_has_no_plan(tmp_path: Path) -> None:
    model = vit()
    timm.models.save_for_hf(model, str(tmp_path / "m"), model_args=ARGS, safe_serialization=True)
    assert torch.equal(vision.load(tmp_path / "m")(X), model(X))


def test_refusals(tmp_path: Path) -> None:
    vision.save(vit(), tmp_path / "m", **ARGS)
    with pytest.raises(bt.PlanError, match="exists already"):
        vision.save(vit(), tmp_path / "m", **ARGS)
    with pytest.raises(bt.PlanError, match="does not hold a timm model in safetensors"):
        vision.load(tmp_path / "nothing")
    (tmp_path / "m" / "buttress-plan.json").write_text("[]")
    with pytest.raises(bt.PlanError, match="not a buttress plan"):
        vision.load(tmp_path / "m")
