"""SplitLinear: several layers on one input, read as one fused layer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import buttress as bt


def parts(bias: bool = True) -> list[nn.Module]:
    return [
        bt.StructuredLinear(12, 8, bt.BTT(rank=2), bias=bias, dtype=torch.float64),
        nn.Linear(12, 6, bias=bias, dtype=torch.float64),
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
def test_outputs_are_concatenated(bias: bool, leading: tuple[int, ...]) -> None:
    layers = parts(bias)
    if bias:
        nn.init.normal_(layers[0].bias)
    split = bt.SplitLinear(layers)
    x = torch.randn(*leading, 12, dtype=torch.float64)
    assert split(x).shape == (*leading, 14)
    torch.testing.assert_close(split(x), torch.cat([layer(x) for layer in layers], -1))
    torch.testing.assert_close(split(x), nn.functional.linear(x, split.weight, split.bias))


def test_sizes() -> None:
    split = bt.SplitLinear(parts())
    assert (split.in_features, split.out_features, split.sizes) == (12, 14, (8, 6))
    assert split.weight.shape == (14, 12)
    assert split.bias.shape == (14,)
    assert bt.SplitLinear(parts(bias=False)).bias is None


def test_every_part_learns() -> None:
    split = bt.SplitLinear(parts())
    split(torch.randn(4, 12, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in split.parameters())


def test_copies() -> None:
    split = bt.SplitLinear(parts())
    x = torch.randn(4, 12, dtype=torch.float64)
    for twin in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        torch.testing.assert_close(twin(x), split(x), rtol=0, atol=0)
        assert twin.sizes == split.sizes
    other = bt.SplitLinear(parts())
    other.load_state_dict(split.state_dict())
    torch.testing.assert_close(other(x), split(x), rtol=0, atol=0)
