"""The implementations against each other on chains nobody chose, and the default one's own backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops.fused import operators as fused
from chain_strategies import chains


def instance(chain: bt.Chain, tokens: int = 3) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(tokens, chain.d_in, dtype=torch.float64, requires_grad=True)
    return x, [torch.randn(f.shape, dtype=torch.float64, requires_grad=True) for f in chain.factors]


@settings(deadline=None, max_examples=400, derandomize=True)
@given(chains())
def test_any_chain_gives_the_same_both_ways(chain: bt.Chain) -> None:
    x, factors = instance(chain)
    ours, meaning = (ops.apply(chain, x, factors, impl=impl) for impl in ("bmm", "reference"))
    torch.testing.assert_close(ours, meaning)
    dy = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, [x, *factors], dy), torch.autograd.grad(meaning, [x, *factors], dy), strict=True
    ):
        torch.testing.assert_close(a, b)
    if (way := fused.prepare(chain)) is not None:
        torch.testing.assert_close(fused.plain(way, x, factors, [], None), meaning)
    flops = FlopCounterMode(display=False)
    with flops:
        ops.apply(chain, x, factors)
    assert flops.get_total_flops() == 2 * chain.macs * len(x)


def test_second_derivative_when_the_inputs_depend_on_each_other() -> None:
    chain = bt.Kronecker().chain(9, 9)
    core = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    y = ops.apply(chain, x, [core, core]).square().sum()
    once = torch.autograd.grad(y, [x, core], retain_graph=True)
    again = torch.autograd.grad(y, [x, core], create_graph=True)
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradgradcheck(lambda x, w: ops.apply(chain, x, [w, w * x.sum()]), (x, core))


@pytest.mark.parametrize("frozen", [(), ("R",), ("L",), ("R", "L")], ids=str)
def test_only_what_a_gradient_needs_is_saved(frozen: tuple[str, ...]) -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=4), bias=False)
    for name in frozen:
        layer.factors[name].requires_grad_(False)
    x = torch.randn(16, 64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    weights = sum(p.numel() for p in layer.parameters())
    learns = {n for n in ("R", "L") if n not in frozen}
    middle = 16 * layer.chain.factors[1].d_in * layer.chain.factors[1].blocks
    expected = weights + (x.numel() if learns else 0) + (middle if "L" in learns else 0)
    assert sum(storages.values()) == 4 * expected
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dense = layer.to_dense().detach()
    torch.testing.assert_close(dx, 2 * (x @ dense.T) @ dense)
    torch.autograd.grad(dx.square().sum(), x)


def test_a_changed_chain_is_laid_out_anew() -> None:
    chain = bt.BTT().chain(6, 6)
    ops.prepare(chain)
    turned = replace(chain, y=chain.y[::-1])
    x, factors = instance(turned)
    torch.testing.assert_close(ops.apply(turned, x, factors), ops.apply(turned, x, factors, impl="reference"))


def test_dense_form_keeps_its_precision_under_autocast() -> None:
    layer = bt.StructuredLinear(32, 32, bt.BTT(rank=2))
    exact = layer.to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 32)).dtype == torch.bfloat16
        torch.testing.assert_close(layer.to_dense(), exact, rtol=0, atol=0)
        assert bt.project(bt.BTT(rank=2), exact).relative_error < 1e-5


def test_unknown_implementation() -> None:
    chain = bt.Dense().chain(2, 2)
    wrong: Any = "fast"
    with pytest.raises(bt.ButtressError, match="unknown implementation 'fast': there are reference, bmm"):
        ops.apply(chain, torch.zeros(1, 2), [torch.zeros(1, 2, 2)], impl=wrong)
