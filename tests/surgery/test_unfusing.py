"""What fuse_ undoes by itself, and unfuse_."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.surgery import fusing
from fusable import ffn, note


def test_a_change_of_the_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = bt.StructuredLinear._multiply
    monkeypatch.setattr(
        bt.StructuredLinear, "_multiply", lambda self, x: multiply(self, x) + (self.input_activation is not None)
    )
    assert note(ffn()) == "the outputs of the model would change"


def test_an_error_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = bt.StructuredLinear._multiply
    monkeypatch.setattr(
        bt.StructuredLinear, "_multiply", lambda self, x: multiply(self, x if self.input_activation is None else None)
    )
    assert note(ffn()).startswith("the model would fail: ")


def test_unfusing_needs_both_parts() -> None:
    model = ffn()
    bt.fuse_(model)
    for parts in (nn.Sequential(*map(copy.deepcopy, model)), model[:2], model[2:]):
        with pytest.raises(bt.PlanError, match=r"Call bt\.unfuse_ on the whole model, before copying"):
            bt.unfuse_(parts)
    assert bt.unfuse_(model)[2].input_activation is None


@pytest.mark.parametrize("place", ["_values", "used_from_outside"])
def test_an_interruption_is_undone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(ffn(), ffn())
    original, calls = getattr(fusing, place), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        # The fourth comparison is that of the second activation, after it was fused.
        if calls == 4 or place != "_values":
            assert sum(layer.input_activation is not None for layer in layers) == 2
            raise KeyboardInterrupt
        return original(*arguments)

    layers = [module for module in model.modules() if isinstance(module, bt.StructuredLinear)]
    monkeypatch.setattr(fusing, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bt.fuse_(model)
    assert [type(part[1]) for part in model] == [nn.GELU, nn.GELU]
    assert all(layer.input_activation is None for layer in layers)


def test_a_restored_activation_is_in_the_mode_of_the_model() -> None:
    model = ffn()
    bt.fuse_(model)
    model.eval()
    bt.unfuse_(model)
    assert not model[1].training


def test_nothing_is_left_on_the_layer() -> None:
    model = ffn()
    before = set(vars(model[2]))
    assert bt.fuse_(model).fused
    bt.unfuse_(model)
    assert set(vars(model[2])) == before


def test_a_layer_that_was_exchanged_by_hand() -> None:
    model = ffn()
    bt.fuse_(model)
    model[2] = nn.Linear(12, 8)
    with pytest.raises(bt.PlanError, match=r"the activation 1 was taken into a layer.*, or assign an activation to 1"):
        bt.unfuse_(model)
    model[1] = nn.GELU()
    assert bt.unfuse_(model)(torch.randn(2, 8)).shape == (2, 8)


def test_a_layer_alone() -> None:
    model = ffn()
    bt.fuse_(model)
    part = nn.Sequential(model[2])
    with pytest.raises(bt.PlanError, match=r"0 applies an activation.*, or set 0\.input_activation to None"):
        bt.unfuse_(part)
    part[0].input_activation = None
    bt.unfuse_(part)
