"""The autograd policy of the kernels, and their eager entry point. triton is not imported until a kernel runs.

Both entry points, the `torch.autograd.Function` below and the operators of `operators.py`, follow one policy:

- The chain *learns* if a weight or a scale needs a gradient. Only then are the intermediates needed.
- The forward pass saves the weights, the scales and the bias. If the chain learns, it also saves x and, unless
  `recompute` is set or the on-chip kernels need none, the intermediates.
- An activation is applied to x where the kernels load it, in both passes, so its result is never saved. Its derivative
  depends on x: with an activation, x is also saved if the chain does not learn but x needs a gradient.
- If the chain learns, the backward pass computes all gradients, after recomputing intermediates that were not saved.
  Otherwise it computes those of x and of the bias only.
- A second derivative differentiates the same function in torch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from buttress.ops import flops
from buttress.ops.fused.composite import apply_strided
from buttress.ops.fused.selection import keeps_intermediates_on_chip, tuning_for
from buttress.ops.strides import StridedChain

Tensors = Sequence[Tensor]


class Gradients(NamedTuple):
    """Gradients of x, the bias, the weights and the scales; None for those that were not needed."""

    x: Tensor | None
    bias: Tensor | None
    weights: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]


class Saved(NamedTuple):
    """Tensors that the forward pass saves for the backward pass."""

    x: Tensor | None
    bias: Tensor | None
    z: Tensor | None
    weights: Tensors
    scales: Tensors


def saves_intermediates(*, learns: bool, recompute: bool, kept_on_chip: Callable[[], bool]) -> bool:
    """Whether the forward pass saves the intermediates for the backward pass."""
    return learns and not recompute and not kept_on_chip()


def save(
    ctx: Any,
    strided: StridedChain,
    learns: bool,
    x: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    parameters: Tensors,
    *,
    needs_x: bool,
) -> None:
    """Store the tensors for the backward pass on an autograd context; `parameters` are the weights, then the scales."""
    keeps_x = learns or (needs_x and strided.activation is not None)
    ctx.save_for_backward(x if keeps_x else None, bias, z, *parameters)
    ctx.strided, ctx.learns, ctx.x_shape = strided, learns, x.shape


def load(ctx: Any) -> Saved:
    """The tensors that `save` stored."""
    x, bias, z, *parameters = ctx.saved_tensors
    count = len(ctx.strided.factors)
    return Saved(x, bias, z, parameters[:count], parameters[count:])


def forward(
    strided: StridedChain, x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, *, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Apply the chain with the kernels; with `save`, the intermediates are returned, too."""
    from buttress.ops.fused import passes

    return passes.forward(strided, x, weights, scales, bias, tuning_for(strided, x), save=save)


def backward(
    strided: StridedChain, dy: Tensor, saved: Saved, *, learns: bool, needs_x: bool = True, needs_bias: bool
) -> Gradients:
    """Compute the gradients with the kernels; dy is contiguous."""
    from buttress.ops.fused import passes

    x, _, z, weights, scales = saved
    if not learns:
        dx = passes.backward_input(strided, dy, x, weights, scales, tuning_for(strided, dy)) if needs_x else None
        return Gradients(dx, dy.sum(0) if needs_bias else None, [None] * len(weights), [None] * len(scales))
    assert x is not None
    tuning = tuning_for(strided, x)
    dx, dws, dss, db = passes.backward(strided, dy, x, z, weights, scales, tuning, biased=needs_bias, needs_x=needs_x)
    return Gradients(dx, db, dws, dss)


def operator_backward(ctx: Any, dy: Tensor, saved: Saved, *, needs_bias: bool) -> Gradients:
    """As `backward`, through the operator that compilers and dispatch modes see."""
    x, _, z, weights, scales = saved
    # An operator does not accept None in place of a tensor; the placeholders are not read.
    dx, *rest = torch.ops.buttress.chain_backward(
        dy,
        dy if x is None else x,
        dy.new_empty(0) if z is None else z,
        weights,
        scales,
        ctx.strided.to_ints(),
        needs_bias,
        ctx.learns,
    )
    db = rest.pop() if needs_bias else None
    if not ctx.learns:
        rest = [None] * (len(weights) + len(scales))
    return Gradients(dx, db, rest[: len(weights)], rest[len(weights) :])


def differentiable_backward(ctx: Any, dy: Tensor, saved: Saved, needed: Sequence[bool]) -> Gradients:
    """Gradients that can be differentiated again, of aliases because the inputs may depend on each other.

    `needed` states which of x, the bias, the weights and the scales need one, in this order.
    """
    x, bias, _, weights, scales = saved
    if x is None:
        # Then no gradient that is needed depends on its value.
        x = dy.new_zeros(ctx.x_shape, requires_grad=True)
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in (x, bias, *weights, *scales)]
    count = len(weights)
    y = apply_strided(ctx.strided, aliases[0], aliases[2 : 2 + count], aliases[2 + count :], aliases[1])
    inputs = [t for t, is_needed in zip(aliases, needed, strict=True) if is_needed]
    grads = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    dx, db, *rest = [next(grads) if is_needed else None for is_needed in needed]
    return Gradients(dx, db, rest[:count], rest[count:])


class FusedFunction(torch.autograd.Function):
    """The kernels without the registered operator, which takes host time on every call."""

    @staticmethod
    def forward(
        ctx: Any, strided: StridedChain, recompute: bool, x: Tensor, bias: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        count = len(strided.factors)
        learns = any(ctx.needs_input_grad[4:])
        kept_on_chip = partial(keeps_intermediates_on_chip, strided, x.dtype, x.device)
        saves = saves_intermediates(learns=learns, recompute=recompute, kept_on_chip=kept_on_chip)
        y, z = forward(strided, x, parameters[:count], parameters[count:], bias, save=saves)
        save(ctx, strided, learns, x, bias, z, parameters, needs_x=ctx.needs_input_grad[2])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = load(ctx)
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            grads = differentiable_backward(ctx, dy, saved, needed)
        elif torch._C._len_torch_dispatch_stack():
            flops.register_if_imported()
            grads = operator_backward(ctx, dy.contiguous(), saved, needs_bias=needed[1])
        else:
            grads = backward(
                ctx.strided, dy.contiguous(), saved, learns=ctx.learns, needs_x=needed[0], needs_bias=needed[1]
            )
        return (None, None, grads.x, grads.bias, *grads.weights, *grads.scales)
