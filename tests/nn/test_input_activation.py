"""Layers that apply an activation to their input, and what cannot be done with them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import buttress as bt
from buttress.nn.fused_activation import FusedActivation


def test_a_layer_applies_it_and_shows_it() -> None:
    layer = bt.StructuredLinear(12, 20, bt.BTT(rank=2), normalize=True)
    x = torch.randn(3, 12)
    expected, keys = layer(F.silu(x)), list(layer.state_dict())
    assert layer.input_activation is None
    assert "activation" not in repr(layer)
    layer.input_activation = "silu"
    torch.testing.assert_close(layer(x), expected)
    assert ", input_activation=silu\n" in repr(layer)
    assert list(layer.state_dict()) == keys
    dense = layer.to_dense()
    torch.testing.assert_close(layer(x), F.silu(x) @ dense.mT + layer.bias)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(again(x), expected)


def test_a_convolution_applies_it() -> None:
    layer = bt.StructuredPointwiseConv(6, 8, bt.BTT(rank=2), stride=(2, 2))
    x = torch.randn(2, 6, 5, 5)
    expected = layer(F.gelu(x))
    layer.input_activation = "gelu"
    torch.testing.assert_close(layer(x), expected)


def test_growing_and_tying_keep_it() -> None:
    model = nn.Sequential(bt.StructuredLinear(16, 16, bt.BTT()))
    model[0].input_activation = "relu"
    x = torch.randn(3, 16)
    expected = model(x)
    bt.grow_(model, bt.BTT(rank=2))
    assert model[0].input_activation == "relu"
    torch.testing.assert_close(model(x), expected)
    other = bt.StructuredLinear(16, 16, bt.BTT(rank=2))
    other.tie_(model[0])
    assert other.input_activation is None
    torch.testing.assert_close(other(x), F.linear(x, model[0].to_dense(), other.bias))


def test_what_would_lose_it_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    bt.replace_(model, {"0": bt.BTT(), "2": bt.BTT()})
    bt.fuse_(model)
    x = torch.randn(3, 16)
    expected = model(x)
    with pytest.raises(bt.PlanError, match=r"2 applies gelu to its input, .* call bt.unfuse_\(model\) first"):
        bt.densify_(model)
    with pytest.raises(bt.StructureError, match=r"cannot apply gelu to its input: call bt.unfuse_\(model\) first"):
        bt.quantize_(model, "*")
    assert torch.equal(model(x), expected)
    bt.densify_(bt.unfuse_(model))
    torch.testing.assert_close(model(x), expected)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_an_adapter_that_is_fused_is_not_merged_without_its_activation() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    bt.adapt_(model, {"*": bt.LowRank(rank=2)})
    bt.fuse_(model)
    for undo in (bt.merge_, bt.unadapt_):
        with pytest.raises(bt.PlanError, match=r"call bt\.unfuse_"):
            undo(model)
    bt.merge_(bt.unfuse_(model))
    assert isinstance(model[2], nn.Linear)


def test_the_place_of_the_activation_notices_when_it_is_lost() -> None:
    layer = bt.StructuredLinear(4, 4, bt.BTT())
    layer.input_activation = "gelu"
    place = FusedActivation("gelu", nn.GELU(), layer)
    x = torch.randn(2, 4)
    assert place(x) is x
    layer.input_activation = None
    with pytest.raises(bt.ButtressError, match="no longer applies gelu: its input_activation is None"):
        place(x)
    assert not list(place.parameters())
    assert not list(place.children())
