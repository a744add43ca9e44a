"""The default implementation: permuted views and one torch.bmm per factor.

Between factors the tokens are the fastest axis, so a permutation of the other axes moves contiguous memory. For most
structures nothing is moved, because torch.bmm accepts strided operands. With tokens as the slow axis a permutation
would move single numbers, which costs more than the matmuls. The backward pass is written out for the same reason: the
gradients that torch derives for torch.bmm do not have this layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from buttress.core.chain import Chain
from buttress.ops.activations import activated, activation_backward
from buttress.ops.bmm_layout import BmmFactor, BmmLayout
from buttress.ops.captures import is_exporting
from buttress.ops.framing import add_windows, read_window, scaled_factors
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
            no blocks.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The output.
    """
    if scales is not None:
        factors = scaled_factors(factors, scales)
    if layouts_of(chain).bmm.plain and not any(chain.padding):
        # In half precision, the bias is added before the result is rounded.
        return _apply_plain(chain, activated(x, activation), factors, bias, recompute)
    y = _apply_blocks(chain, x, factors, recompute, activation)
    if chain.padding[1]:
        y = y[:, : chain.d_out]
    return y if bias is None else y + bias


def _apply_plain(chain: Chain, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, recompute: bool) -> Tensor:
    """The output of a chain without blocks."""
    # Torch saves the inputs of the factors that learn. To recompute them takes x, which is saved for factor 1 anyway.
    width = sum(f.d_in for f, w in zip(chain.factors[1:], factors[1:], strict=True) if w.requires_grad)
    recompute = recompute and width > (0 if factors[0].requires_grad else chain.d_in)
    if _torch_derives_gradients():
        return _traced(_plain, recompute, x, bias, *factors)
    if not recompute:
        return _plain(x, bias, *factors)
    y: Tensor = PlainFunction.apply(x, bias, *factors)  # type: ignore[no-untyped-call]
    return y


def _apply_blocks(
    chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool, activation: str | None
) -> Tensor:
    """The padded output of a chain."""
    if _torch_derives_gradients():
        return _traced(partial(_padded_output, chain, activation), recompute, x, *factors)
    y: Tensor = BmmFunction.apply(chain, activation, recompute, x, *factors)  # type: ignore[no-untyped-call]
    return y


def _torch_derives_gradients() -> bool:
    """Whether gradients are off, or derived by a compiler, torch.jit.trace or a function transform."""
    return (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _traced(compute: Callable[..., Tensor], recompute: bool, *tensors: Tensor | None) -> Tensor:
    """The result of a function that torch differentiates by itself; a compiler is told what not to save."""
    if (
        recompute
        and torch.is_grad_enabled()
        and torch.compiler.is_dynamo_compiling()
        and not is_exporting()  # an exported program has no backward pass
        and not torch._C._are_functorch_transforms_active()
    ):
        y: Tensor = checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=False)
        return y
    return compute(*tensors)


def _plain(x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
    """The result of a chain without blocks."""
    return F.linear(_plain_inputs(x, weights)[-1], weights[-1][0], bias)


def _plain_inputs(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of the factors of a chain without blocks."""
    inputs = [x]
    for weight in weights[:-1]:
        inputs.append(F.linear(inputs[-1], weight[0]))
    return inputs


def _read(chain: Chain, activation: str | None, x: Tensor) -> Tensor:
    """The activation of x with its padding, read through the window."""
    x = activated(x, activation)
    if chain.padding[0]:
        x = F.pad(x, (0, chain.padding[0]))
    if chain.window:
        x = read_window(chain, x.reshape(-1, *layouts_of(chain).bmm.x_sizes))[0].flatten(1)
    return x


def _read_adjoint(chain: Chain, activation: str | None, x: Tensor | None, grad: Tensor) -> Tensor:
    """The gradient of x, from that of `_read(chain, activation, x)`; x itself matters to an activation alone."""
    if chain.window:
        grad = add_windows(chain, grad.reshape(grad.shape[0], *layouts_of(chain).bmm.read_sizes))
        grad = grad.reshape(grad.shape[0], prod(grad.shape[1:]))
    if chain.padding[0]:
        grad = grad[:, : chain.d_in]
    return grad if x is None else activation_backward(grad, x, activation)


def _first_input(chain: Chain, activation: str | None, x: Tensor) -> Tensor:
    """The arranged input of the first factor."""
    layout = layouts_of(chain).bmm
    return layout.factors[0].arrange(_read(chain, activation, x).reshape(-1, *layout.read_sizes))


def _inputs(chain: Chain, activation: str | None, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The arranged inputs of the factors that follow those of the weights; that of the first factor is not kept."""
    factors = layouts_of(chain).bmm.factors
    z = _first_input(chain, activation, x)
    inputs = []
    for factor, following, weight in zip(factors, factors[1:], weights, strict=False):
        z = _multiply(factor, weight, z)
        z = following.arrange(z)
        inputs.append(z)
    return inputs


def _multiply(factor: BmmFactor, weight: Tensor, blocks: Tensor) -> Tensor:
    """The result of a factor, with the tokens as the fastest axis."""
    z = torch.bmm(factor.repeat(weight), blocks.mT if factor.tokens_slow else blocks)
    return z.view(*factor.result_sizes, -1)


def _forward(
    chain: Chain, activation: str | None, x: Tensor, weights: Sequence[Tensor], *, direct: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The padded result, and the arranged inputs of all factors but the first."""
    layout = layouts_of(chain).bmm
    last, weight = layout.factors[-1], weights[-1]
    inputs = _inputs(chain, activation, x, weights[:-1]) if len(weights) > 1 else []
    z = inputs[-1] if inputs else _first_input(chain, activation, x)
    if last.writes_y:
        return _bmm_side_by_side(z.mT, weight.mT, direct=direct), inputs
    z = _multiply(last, weight, z)
    # Contiguous like that of a dense layer: fused attention, for one, refuses tokens as the fastest axis.
    return z.permute(layout.permutation).reshape(-1, layout.d_out).contiguous(), inputs


def _padded_output(chain: Chain, activation: str | None, x: Tensor, *weights: Tensor) -> Tensor:
    """The result of `_forward` without the inputs of the factors."""
    return _forward(chain, activation, x, weights)[0]


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

    x is saved as it comes, before the activation and without its padding or a window's copies, because other layers may
    save it too.
    """

    @staticmethod
    def forward(ctx: Any, chain: Chain, activation: str | None, recompute: bool, x: Tensor, *weights: Tensor) -> Tensor:
        y, inputs = _forward(chain, activation, x, weights, direct=x.is_cuda)
        ctx.chain, ctx.activation = chain, activation
        # The input of a factor is needed for that factor's gradient alone.
        learns = ctx.needs_input_grad[4:]
        saved = [t if needed and not recompute else None for t, needed in zip(inputs, learns[1:], strict=True)]
        # The derivative of the activation depends on x, too.
        keeps_x = any(learns) or (activation is not None and ctx.needs_input_grad[3])
        ctx.save_for_backward(x if keeps_x else None, *weights, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        activation: str | None = ctx.activation
        layout = layouts_of(chain).bmm
        count = len(layout.factors)
        x, *rest = ctx.saved_tensors
        weights, inputs = rest[:count], rest[count:]
        needed = ctx.needs_input_grad[3:]
        tokens = grad.shape[0]
        if torch.is_grad_enabled():
            # Without x only its gradient is needed, which does not depend on its value.
            x = grad.new_zeros(tokens, chain.d_in, requires_grad=True) if x is None else x
            compute = partial(_padded_output, chain, activation)
            return (None, None, None, *_differentiable_backward(compute, grad, (x, *weights), needed))
        recomputed = [i for i in range(1, count) if needed[i + 1] and inputs[i - 1] is None]
        if recomputed:
            inputs = _inputs(chain, activation, x, weights[: recomputed[-1]])
        grads: list[Tensor | None] = [None] * (count + 1)
        for i in reversed(range(count)):
            factor, weight = layout.factors[i], weights[i]
            blocks = _grad_blocks(layout, i, grad)
            if needed[i + 1]:
                grads[i + 1] = factor.sum_repeats(
                    torch.bmm(blocks, inputs[i - 1].mT if i else _first_input(chain, activation, x))
                )
            if not any(needed[: i + 1]):
                break
            if i:
                grad = factor.restore(torch.bmm(weight.mT, blocks))
            else:
                dx = _input_grad(factor, blocks, weight).reshape(tokens, prod(layout.read_sizes))
                grads[0] = _read_adjoint(chain, activation, x, dx)
        return (None, None, None, *grads)


class PlainFunction(torch.autograd.Function):
    """A chain without blocks that computes its intermediates again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias, *weights)
        return _plain(x, bias, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable_backward(_plain, grad, (x, bias, *weights), needed)
        last = max((i for i, learns in enumerate(needed[2:]) if learns), default=0)
        inputs = _plain_inputs(x, weights[: last + 1])
        grads: list[Tensor | None] = [None] * len(needed)
        if needed[1]:
            grads[1] = grad.sum(0)
        for i in reversed(range(len(weights))):
            if needed[i + 2]:
                grads[i + 2] = (grad.mT @ inputs[i])[None]
            if not (needed[0] or any(needed[2 : i + 2])):
                break
            grad = grad @ weights[i][0]
        else:
            grads[0] = grad
        return tuple(grads)


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
    compute: Callable[..., Tensor], grad: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, of aliases because the inputs may depend on each other."""
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    inputs = [t for t, is_needed in zip(aliases, needed, strict=True) if is_needed and t is not None]
    grads = iter(torch.autograd.grad(compute(*aliases), inputs, grad, create_graph=True))
    return tuple(next(grads) if is_needed else None for is_needed in needed)
