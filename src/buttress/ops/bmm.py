"""The default implementation: permuted views and one torch.bmm per factor.

Between factors the tokens are the fastest axis, so a permutation of the other axes moves contiguous memory. For most
structures nothing is moved, because torch.bmm accepts strided operands. With tokens as the slow axis a permutation
would move single numbers, which costs more than the matmuls. The backward pass is written out for the same reason: the
gradients that torch derives for torch.bmm do not have this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from buttress.core.chain import Chain
from buttress.ops.activations import activated, activation_backward
from buttress.ops.bmm_layout import BmmFactor, BmmLayout
from buttress.ops.framing import framed, read_window, scaled_factors
from buttress.ops.layouts import layouts_of


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
    activation: str | None,
) -> Tensor:
    """Apply a chain with one torch.bmm per factor, or with F.linear where there is nothing to rearrange.

    Args:
        chain: The chain.
        x: The input.
        factors: The factors in order of application.
        bias: Added to the result.
        scales: A multiplier of each factor, as a tensor with one entry.
        recompute: Compute the intermediates again in the backward pass instead of saving them.
        activation: Name of the activation that is applied to x, or None. Its result is saved only where the chain has
            nothing to rearrange, or a window.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The output.
    """
    if not layouts_of(chain).bmm.plain or any(chain.padding):
        return _apply_blocks(chain, x, factors, bias, scales, recompute, activation)
    x = activated(x, activation)
    *first, last = factors if scales is None else scaled_factors(factors, scales)
    for weight in first:
        x = F.linear(x, weight[0])
    return F.linear(x, last[0], bias)  # in half precision, the bias is added before the result is rounded


@framed
def _apply_blocks(
    chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool, activation: str | None
) -> Tensor:
    """The padded output of a chain for a padded input."""
    layout = layouts_of(chain).bmm
    z = x
    if chain.window:
        # Through the window, every number is read several times.
        z, activation = activated(x, activation), None
        z = read_window(chain, z.reshape(-1, *layout.x_sizes))[0].flatten(1)
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        # Compilers, torch.jit.trace and function transforms derive their own gradients.
        return _forward(layout, activated(z, activation), factors)[0]
    y: Tensor = BmmFunction.apply(layout, recompute, activation, z, *factors)  # type: ignore[no-untyped-call]
    return y


def _forward(
    layout: BmmLayout, z: Tensor, weights: Sequence[Tensor], *, direct: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The result, and the arranged inputs of all factors but the first."""
    inputs = []
    z = z.reshape(-1, *layout.read_sizes)
    for factor, weight in zip(layout.factors, weights, strict=True):
        blocks = factor.arrange(z)
        inputs.append(blocks)
        if factor.writes_y:
            return _bmm_side_by_side(blocks.mT, weight.mT, direct=direct), inputs[1:]
        z = torch.bmm(factor.repeat(weight), blocks.mT if factor.tokens_slow else blocks).view(*factor.result_sizes, -1)
    return z.permute(layout.permutation).reshape(-1, layout.d_out), inputs[1:]


def _bmm_side_by_side(left: Tensor, right: Tensor, *, direct: bool) -> Tensor:
    """torch.bmm with the blocks of the result side by side: (tokens, blocks * columns).

    With `direct`, torch.bmm writes this layout itself, which is not possible on a CPU.
    """
    blocks, tokens, columns = left.shape[0], left.shape[1], right.shape[2]
    if direct:
        y = left.new_empty(tokens, blocks, columns)
        torch.bmm(left, right, out=y.transpose(0, 1))
        return y.view(tokens, blocks * columns)
    return torch.bmm(left, right).transpose(0, 1).reshape(tokens, blocks * columns)


class BmmFunction(torch.autograd.Function):
    """A whole chain as one node of the autograd graph. It saves x and the inputs of the later factors.

    With an activation it saves x as it is before the activation.
    """

    @staticmethod
    def forward(
        ctx: Any, layout: BmmLayout, recompute: bool, activation: str | None, z: Tensor, *weights: Tensor
    ) -> Tensor:
        y, inputs = _forward(layout, activated(z, activation), weights, direct=z.is_cuda)
        ctx.layout, ctx.activation = layout, activation
        ctx.shape = z.shape
        # The input of a factor is needed for that factor's gradient alone.
        learns = ctx.needs_input_grad[4:]
        saved = [t if needed and not recompute else None for t, needed in zip(inputs, learns[1:], strict=True)]
        # The derivative of the activation depends on x, too.
        keeps_z = any(learns) or (activation is not None and ctx.needs_input_grad[3])
        ctx.save_for_backward(z if keeps_z else None, *weights, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: BmmLayout = ctx.layout
        activation: str | None = ctx.activation
        count = len(layout.factors)
        z, *rest = ctx.saved_tensors
        weights, inputs = rest[:count], rest[count:]
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            # Without z only its gradient is needed, which does not depend on its value.
            z = grad.new_zeros(ctx.shape, requires_grad=True) if z is None else z
            return (None, None, None, *_differentiable_backward(layout, activation, grad, (z, *weights), needed))
        learns = needed[1:]
        recomputes = any(factor_learns and t is None for factor_learns, t in zip(learns[1:], inputs, strict=True))
        if learns[0] or recomputes:
            h = activated(z, activation)
        if recomputes:
            inputs = _forward(layout, h, weights)[1]
        grads: list[Tensor | None] = [None] * (count + 1)
        for i in reversed(range(count)):
            factor, weight = layout.factors[i], weights[i]
            blocks = _grad_blocks(layout, i, grad)
            if learns[i]:
                source = inputs[i - 1].mT if i else factor.arrange(h.reshape(-1, *layout.read_sizes))
                grads[i + 1] = factor.sum_repeats(torch.bmm(blocks, source))
            if i:
                grad = factor.restore(torch.bmm(weight.mT, blocks))
            elif needed[0]:
                dh = _input_grad(factor, blocks, weight).reshape(ctx.shape)
                grads[0] = activation_backward(dh, z, activation)
        return (None, None, None, *grads)


def _grad_blocks(layout: BmmLayout, i: int, grad: Tensor) -> Tensor:
    """The gradient of factor i's result as (blocks, out, tokens), for any layout of the result."""
    factor = layout.factors[i]
    if factor.writes_y:
        return grad.reshape(-1, factor.blocks, factor.d_out).permute(1, 2, 0)
    if i == len(layout.factors) - 1:
        grad = grad.reshape(-1, *layout.y_sizes).permute(layout.inverse)
    return grad.reshape(factor.blocks, factor.d_out, -1)


def _input_grad(first: BmmFactor, grad_blocks: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x, from that of the first factor's result."""
    if first.reads_x:
        return _bmm_side_by_side(grad_blocks.mT, first.repeat(weight), direct=grad_blocks.is_cuda)
    return first.restore(torch.bmm(grad_blocks.mT, first.repeat(weight)))


def _differentiable_backward(
    layout: BmmLayout, activation: str | None, grad: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, of aliases because the inputs may depend on each other."""
    aliases = [t.view_as(t) for t in tensors]
    inputs = [t for t, is_needed in zip(aliases, needed, strict=True) if is_needed]
    y = _forward(layout, activated(aliases[0], activation), aliases[1:])[0]
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return tuple(next(grads) if is_needed else None for is_needed in needed)
