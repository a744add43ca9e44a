"""The default implementation's own backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops


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
    layer.recompute = False
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
