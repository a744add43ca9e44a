"""The default implementation's own backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

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


def backward_macs(chain: bt.Chain, learns: set[str], *, needs_x: bool, recompute: bool) -> float:
    """MACs per token of a backward pass in which these factors learn."""
    x = torch.randn(8, chain.d_in, requires_grad=needs_x)
    factors = [torch.randn(f.shape, requires_grad=f.name in learns) for f in chain.factors]
    y = ops.apply(chain, x, factors, recompute=recompute, impl="bmm")
    flops = FlopCounterMode(display=False)
    with flops:
        y.backward(torch.ones_like(y))
    return flops.get_total_flops() / (2 * 8)


@pytest.mark.parametrize(
    "structure",
    [bt.BTT(rank=4), bt.BTT(cores=3), bt.LowRank(rank=8), bt.Monarch(4), bt.TensorTrain(rank=2, cores=3)],
    ids=str,
)
def test_the_backward_pass_computes_what_is_needed_alone(structure: bt.Structure) -> None:
    """Above the lowest gradient that is needed, and again up to the input of the last factor that learns."""
    chain = structure.chain(64, 64)
    names = [f.name for f in chain.factors]
    macs = [f.macs for f in chain.factors]
    for needs_x in (False, True):
        for learns in ({names[0]}, {names[1]}, {names[-1]}, set(names)):
            indices = [i for i, name in enumerate(names) if name in learns]
            own = sum(macs[i] for i in indices)
            below = sum(macs[0 if needs_x else indices[0] + 1 :])
            saved = backward_macs(chain, learns, needs_x=needs_x, recompute=False)
            assert saved == own + below
            again = 0 if isinstance(structure, bt.LowRank) and names[0] not in learns else sum(macs[: indices[-1]])
            assert backward_macs(chain, learns, needs_x=needs_x, recompute=True) == saved + again


class Watch(TorchDispatchMode):
    """The operations, and at each torch.bmm whether an activated or padded tensor is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[StorageWeakRef] = []
        self.alive: list[bool] = []
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        if "bmm" in str(func):
            self.alive.append(not all(ref.expired() for ref in self.copies))
        result = func(*args, **(kwargs or {}))
        if str(func) in ("aten.gelu.default", "aten.constant_pad_nd.default"):
            self.copies.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_copy_of_the_input_is_freed_after_the_first_factor(activation: str | None) -> None:
    chain = bt.BTT(rank=2, cores=3).chain(61, 64)
    assert chain.padding[0]
    x = torch.randn(8, 61, requires_grad=True)
    factors = [torch.randn(f.shape, requires_grad=True) for f in chain.factors]
    with (watch := Watch()):
        y = ops.apply(chain, x, factors, recompute=True, activation=activation, impl="bmm")
        assert watch.alive == [True, False, False]
        del watch.alive[:]
        y.backward(torch.ones_like(y))
    # Factors 1 and 2 again; the gradients of factor 3 and its input, of factor 2 and its input, of factor 1 and x.
    assert watch.alive == [True, False, *[False] * 4, True, False]


def test_the_gradient_of_a_padded_input_pads_nothing() -> None:
    chain = bt.BTT(rank=2).chain(61, 64)
    assert chain.padding[0]
    x = torch.randn(8, 61, requires_grad=True)
    factors = [torch.randn(f.shape) for f in chain.factors]
    y = ops.apply(chain, x, factors, impl="bmm")
    with (watch := Watch()):
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not any("pad" in name for name in watch.operations)
    torch.testing.assert_close(dx, ops.dense(chain, factors).sum(0).expand(8, 61))
