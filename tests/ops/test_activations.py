"""Activations in torch, and what a chain with one keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops.activations import ACTIVATIONS, activated, activation_backward

MEANINGS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def test_every_activation_has_a_meaning() -> None:
    assert MEANINGS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_and_derivatives(name: str) -> None:
    x = torch.linspace(-4, 4, 64, dtype=torch.float64, requires_grad=True)  # not 0, where relu has no derivative
    dy = torch.randn(64, dtype=torch.float64)
    assert torch.equal(activated(x, name), MEANINGS[name](x))
    (expected,) = torch.autograd.grad(MEANINGS[name](x), x, dy)
    torch.testing.assert_close(activation_backward(dy, x.detach(), name), expected)
    assert torch.equal(activated(torch.zeros(3), name), torch.zeros(3))


def test_no_activation_is_the_tensor_itself() -> None:
    x, dy = torch.randn(3), torch.randn(3)
    assert activated(x, None) is x
    assert activation_backward(dy, x, None) is dy


@pytest.mark.parametrize("impl", [None, "reference", "bmm", "triton"])
def test_an_unknown_name_is_refused(impl: Any) -> None:
    chain = bt.BTT().chain(4, 4)
    factors = [torch.zeros(f.shape) for f in chain.factors]
    with pytest.raises(bt.ButtressError, match="unknown activation 'gleu': there are gelu, gelu_tanh, silu, relu"):
        ops.apply(chain, torch.zeros(1, 4), factors, impl=impl, activation="gleu")


def saved_bytes(run: Any) -> tuple[Tensor, int]:
    """A result, and the bytes that its backward pass keeps, each storage once."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run()
    return y, sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_activated_is_not_saved(recompute: bool) -> None:
    layer = bt.StructuredLinear(64, 36, bt.BTT(rank=2))
    layer.recompute = recompute
    x = torch.randn(10, 64, requires_grad=True)
    inner = x * 1  # what the layer before it returns
    _, separate = saved_bytes(lambda: layer(F.gelu(inner)))
    layer.input_activation = "gelu"
    y, together = saved_bytes(lambda: layer(inner))
    assert separate - together == x.nbytes
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("needs_x", [False, True])
def test_frozen_factors_keep_x_for_its_own_gradient_alone(needs_x: bool) -> None:
    layer = bt.StructuredLinear(64, 36, bt.BTT(rank=2)).requires_grad_(False)
    layer.bias.requires_grad_()
    layer.input_activation = "silu"
    x = torch.randn(10, 64, requires_grad=needs_x)
    y, count = saved_bytes(lambda: layer(x))
    assert count == needs_x * (sum(f.nbytes for f in layer.factors.values()) + x.nbytes)
    y.sum().backward()


def test_autocast_converts_before_the_activation() -> None:
    layer = bt.StructuredLinear(36, 24, bt.BTT(rank=2))
    x = torch.randn(5, 36)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(F.gelu(x.bfloat16()))
        layer.input_activation = "gelu"
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # in torch's own derivative of gelu
@pytest.mark.parametrize(
    "structure", [bt.BTT(rank=2), bt.LowRank(rank=3), bt.Sum(bt.BTT(), bt.LowRank(rank=2))], ids=str
)
def test_function_transforms_and_compilers(structure: bt.Structure) -> None:
    chain = structure.chain(12, 20)
    factors = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    x = torch.randn(5, 12, dtype=torch.float64)

    def fused(x: Tensor) -> Tensor:
        return ops.apply(chain, x, factors, activation="gelu")

    def meaning(x: Tensor) -> Tensor:
        return F.gelu(x) @ ops.dense(chain, factors).mT

    for transform in (
        lambda f: f(x),
        lambda f: torch.func.vmap(f)(x.unsqueeze(1)),
        lambda f: torch.func.vmap(torch.func.grad(lambda row: f(row).sin().sum()))(x),
        lambda f: torch.func.jvp(f, (x,), (x.flip(0),))[1],
        lambda f: torch.func.jacrev(torch.func.grad(lambda row: f(row).sin().sum()))(x[0]),
    ):
        torch.testing.assert_close(transform(fused), transform(meaning), rtol=1e-10, atol=1e-10)
    ops.prepare(chain)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), meaning(x), rtol=1e-10, atol=1e-10)
