"""The bound on the change of a layer's matrix in one step."""

from __future__ import annotations

import copy
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress.optim.orthogonalization import QUINTIC

STRUCTURES = [
    bt.Dense(), bt.LowRank(rank=4), bt.Kronecker(), bt.Monarch(4), bt.BlockDiagonal(4), bt.Convolution(3),
    bt.TensorTrain(rank=2), bt.BTT(rank=2), bt.BTT(rank=2, cores=3), bt.Sum(bt.LowRank(rank=4), bt.BTT()),
]  # fmt: skip
LR = 0.2


def layer_of(structure: bt.Structure, scale: float, zero_init: bool = False) -> bt.StructuredLinear:
    torch.manual_seed(0)
    layer = bt.StructuredLinear(64, 36, structure, bias=False, zero_init=zero_init)
    with torch.no_grad():
        for p in layer.factors.values():
            p.mul_(scale)
    return layer


def step(layer: bt.StructuredLinear, bound: float | None, **options: Any) -> bt.StructuredLinear:
    """A copy of the layer after one step with random gradients."""
    layer = copy.deepcopy(layer)
    optimizer = bt.optim.Muon(bt.param_groups(layer, LR, rule="muon"), bound=bound, **options)
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    return layer


def change(layer: bt.StructuredLinear, bound: float | None, **options: Any) -> float:
    difference = step(layer, bound, **options).to_dense() - layer.to_dense()
    return torch.linalg.matrix_norm(difference, ord=2).item()


def norm(factor: Tensor) -> float:
    return torch.linalg.matrix_norm(factor.detach(), ord=2).max().item()


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("bound", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_the_matrix_changes_by_no_more(structure: bt.Structure, bound: float, scale: float) -> None:
    """`lr` is what a dense layer's matrix changes by, and that is the unit of the bound."""
    for zero_init in (False, True):
        layer = layer_of(structure, scale, zero_init)
        assert change(layer, bound) <= bound * LR * 1.0001  # rounding


def test_coefficients_that_overshoot_count() -> None:
    layer = layer_of(bt.Dense(), 1.0)
    assert change(layer, None, coefficients=QUINTIC) > 1.1 * LR
    assert change(layer, 1.0, coefficients=QUINTIC) <= LR


@pytest.mark.parametrize("structure", [bt.LowRank(rank=4), bt.BTT(rank=2)], ids=str)
def test_without_it_the_change_grows_with_the_factors(structure: bt.Structure) -> None:
    sizes = [change(layer_of(structure, scale), None) for scale in (1.0, 5.0)]
    assert sizes[1] > 2 * sizes[0]
    assert sizes[1] > LR


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_step_that_is_small_enough_is_not_shortened(structure: bt.Structure) -> None:
    layer = layer_of(structure, 1.0)
    bound = 100.0
    for p, q in zip(step(layer, bound).parameters(), step(layer, None).parameters(), strict=True):
        assert torch.equal(p, q)


def test_one_scale_serves_all_factors() -> None:
    """It is the largest change of the product of norms over the nominal one, written out for two factors."""
    layer = layer_of(bt.BTT(rank=2), 3.0)
    free, bounded = step(layer, None), step(layer, 1.0)
    ratios = [((bounded.factors[n] - p).norm() / (free.factors[n] - p).norm()).item() for n, p in layer.factors.items()]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-4)
    rates = [LR * bt.lr_multiplier(f, layer.chain, rule="muon") for f in layer.chain.factors]
    norms = [norm(p) for p in layer.factors.values()]
    largest = prod(s + u for s, u in zip(norms, rates, strict=True)) - prod(norms)
    nominal = [sqrt(f.d_out / f.d_in) for f in layer.chain.factors]
    assert rates[0] * nominal[1] + rates[1] * nominal[0] == pytest.approx(LR)
    assert ratios[0] == pytest.approx(LR / largest, rel=0.1)  # norms are bounded to a few percent


def test_layers_are_bounded_one_by_one() -> None:
    large, small = layer_of(bt.BTT(), 5.0), layer_of(bt.BTT(), 0.1)
    model = torch.nn.ModuleDict({"large": copy.deepcopy(large), "small": copy.deepcopy(small)})
    optimizer = bt.optim.Muon(bt.param_groups(model, LR, rule="muon"), bound=1.0)
    for layer in model.values():
        generator = torch.Generator().manual_seed(1)
        for p in layer.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    for name, layer in (("large", large), ("small", small)):
        for p, q in zip(model[name].parameters(), step(layer, 1.0).parameters(), strict=True):
            torch.testing.assert_close(p, q)
