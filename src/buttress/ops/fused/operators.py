"""The kernels as torch operators, for compilers and dispatch modes: implementations, fake tensors and gradients.

`autograd.py` states the autograd policy. triton is not imported until a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from buttress.ops.fused import autograd
from buttress.ops.fused.autograd import Saved, Tensors
from buttress.ops.fused.selection import keeps_intermediates_on_chip
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import TILE_TOKENS

DEVICES = ("cpu", "cuda")

# Not with torch.library.custom_op, whose checks take host time on every call.
torch.library.define(
    "buttress::chain",
    "(Tensor x, Tensor[] weights, Tensor[] scales, Tensor? bias, int[] numbers, bool learns, bool save) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "buttress::chain_backward",
    "(Tensor dy, Tensor x, Tensor z, Tensor[] weights, Tensor[] scales, int[] numbers, bool biased, bool learns) "
    "-> Tensor[]",
)


def apply_operator(
    strided: StridedChain, x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, *, recompute: bool
) -> Tensor:
    """Apply a chain through the registered operator."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, *scales))
    numbers = strided.to_ints()
    kept_on_chip = partial(_keeps_intermediates_on_chip, tuple(numbers), x.dtype, x.device)
    saves = autograd.saves_intermediates(learns=learns, recompute=recompute, kept_on_chip=kept_on_chip)
    outputs: tuple[Tensor, Tensor] = torch.ops.buttress.chain(x, weights, scales, bias, numbers, learns, saves)
    return outputs[0]


@lru_cache(maxsize=1024)
def _strided(numbers: tuple[int, ...]) -> StridedChain:
    return StridedChain.from_ints(numbers)


def _keeps_intermediates_on_chip(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return keeps_intermediates_on_chip(_strided(numbers), dtype, device)


# A compiler calls it once and does not trace it: torch.compiler.assume_constant_result, without importing it.
_keeps_intermediates_on_chip._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.impl("buttress::chain", DEVICES)
def _chain(
    x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, numbers: Sequence[int], learns: bool, save: bool
) -> tuple[Tensor, Tensor]:
    y, z = autograd.forward(_strided(tuple(numbers)), x, weights, scales, bias, save=save)
    return y, x.new_empty(0) if z is None else z  # an operator cannot return None in place of a tensor


@torch.library.register_fake("buttress::chain")  # type: ignore[untyped-decorator]
def _chain_fake(
    x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, numbers: Sequence[int], learns: bool, save: bool
) -> tuple[Tensor, Tensor]:
    strided = StridedChain.from_ints(numbers)
    tiles = (x.shape[0] + TILE_TOKENS - 1) // TILE_TOKENS
    z = x.new_empty(tiles, strided.total_rows, TILE_TOKENS) if save else x.new_empty(0)
    return x.new_empty(x.shape[0], strided.d_out), z


@torch.library.impl("buttress::chain_backward", DEVICES)
def _chain_backward(
    dy: Tensor, x: Tensor, z: Tensor, weights: Tensors, scales: Tensors, numbers: Sequence[int],
    biased: bool, learns: bool,
) -> list[Tensor]:  # fmt: skip
    saved = Saved(x, None, z if z.dim() == 3 else None, weights, scales)
    grads = autograd.backward(_strided(tuple(numbers)), dy, saved, learns=learns, needs_bias=biased)
    return [t for t in (grads.x, *grads.weights, *grads.scales, grads.bias) if t is not None]


@torch.library.register_fake("buttress::chain_backward")  # type: ignore[untyped-decorator]
def _chain_backward_fake(
    dy: Tensor, x: Tensor, z: Tensor, weights: Tensors, scales: Tensors, numbers: Sequence[int],
    biased: bool, learns: bool,
) -> list[Tensor]:  # fmt: skip
    bias = [dy.new_empty(dy.shape[1])] if biased else []
    if not learns:
        return [dy.new_empty(dy.shape[0], StridedChain.from_ints(numbers).d_in), *bias]
    return [*(torch.empty_like(t) for t in (x, *weights, *scales)), *bias]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, scales, bias, numbers, learns, _ = inputs
    autograd.save(ctx, _strided(tuple(numbers)), learns, x, bias, output[1], (*weights, *scales), needs_x=True)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    saved = autograd.load(ctx)
    needs_x, _weights, _scales, needs_bias, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # For a list, torch only reports whether any of its tensors needs a gradient.
        needed = [needs_x, needs_bias, *(t.requires_grad for t in (*saved.weights, *saved.scales))]
        grads = autograd.differentiable_backward(ctx, dy, saved, needed)
    else:
        grads = autograd.operator_backward(ctx, dy.contiguous(), saved, needs_bias=needs_bias)
    return grads.x, grads.weights, grads.scales, grads.bias, None, None, None


torch.library.register_autograd("buttress::chain", _backward, setup_context=_setup_context)
