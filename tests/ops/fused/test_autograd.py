"""What the kernels save, recompute and differentiate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from kernel_cases import DEVICE, poison_new_buffers

pytest.importorskip("triton", reason="the kernels are written in triton")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_buffers(monkeypatch)


def test_frozen_factors_cost_no_memory_between_them() -> None:
    chain = bt.BTT(rank=2).chain(36, 36)
    x = torch.randn(70, 36, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    bias = torch.zeros(36, device=DEVICE, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = ops.apply(chain, x, factors, bias, impl="triton")
    assert sum(t.numel() for t in saved) == bias.numel() + sum(f.numel() for f in factors)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(ops.apply(chain, x, factors, bias, impl="reference"), [x, bias], dy)
    for a, b in zip(torch.autograd.grad(y, [x, bias], dy), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_frozen_factors_let_x_be_changed_in_place() -> None:
    chain = bt.BTT().chain(36, 36)
    x = torch.randn(9, 36, device=DEVICE, requires_grad=True)
    inner = x * 1
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    y = ops.apply(chain, inner, factors, impl="triton")
    inner.add_(1)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("impl", ["triton", "bmm"])
def test_recomputing_gives_the_same_and_saves_less(impl: Any) -> None:
    chain = bt.BTT(rank=3, cores=3).chain(60, 40)
    x = torch.randn(70, 60, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    runs, sizes = [], []
    for recompute in (False, True):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]  # noqa: B023
            y = ops.apply(chain, x, factors, impl=impl, recompute=recompute)
        sizes.append(sum(t.numel() for t in saved))
        runs.append([y, *torch.autograd.grad(y.square().sum(), [x, *factors])])
    assert sizes[1] == x.numel() + sum(f.numel() for f in factors) < sizes[0]
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)
