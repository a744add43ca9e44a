"""Forward and backward passes of a whole chain with the kernels. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from buttress.ops.fused import on_chip_passes
from buttress.ops.fused.buffers import buffers, new_intermediate
from buttress.ops.fused.factor_launches import FactorGradients, FactorLauncher
from buttress.ops.fused.launches import TensorSpec, on_device_of_x
from buttress.ops.fused.on_chip_passes import are_aligned
from buttress.ops.fused.pair_launches import launch_decode, launch_pair
from buttress.ops.layouts import MAX_DECODE_TOKENS, is_decodable, is_pair
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import Tuning

Tensors = Sequence[Tensor]


class ChainGradients(NamedTuple):
    """Gradients of x, the weights, the scales and the bias; None for those that were not asked for."""

    x: Tensor | None
    weights: list[Tensor]
    scales: list[Tensor]
    bias: Tensor | None


@on_device_of_x
def forward(
    strided: StridedChain, x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, tuning: Tuning,
    *, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Apply a chain to x, or to the chain's activation of x.

    Args:
        strided: The chain.
        x: The input, contiguous like all other tensors.
        weights: The factors in order of application.
        scales: One float32 multiplier for each factor, or none at all.
        bias: Added to the result.
        tuning: Launch options.
        save: Whether to return the intermediates.

    Shape:
        (tokens, d_in) -> (tokens, d_out); intermediates are (tiles, rows, TILE_TOKENS).

    Returns:
        The result, and with `save` the intermediates.
    """
    y = x.new_empty(x.shape[0], strided.d_out)
    if not x.shape[0]:
        return y, new_intermediate(strided, x) if save else None
    if not save and x.shape[0] <= MAX_DECODE_TOKENS and is_decodable(strided):
        launch_decode(strided, x, weights, scales, bias, y)
        return y, None
    if not save and tuning.on_chip is not None and tuning.on_chip.forward is not None and are_aligned(x):
        return on_chip_passes.forward(strided, x, weights, scales, bias, tuning.on_chip.forward), None
    # The number of programs that the GPU holds at once is computed for aligned tensors.
    if tuning.forward.fuse and is_pair(strided) and are_aligned(x, *weights, *scales, bias):
        written, z = launch_pair(strided, x, weights, scales, bias, y, tuning.forward, save=save)
        if written:
            return y, z
    z = new_intermediate(strided, x)
    launcher = FactorLauncher(strided, weights, scales, TensorSpec.of(x), tuning)
    ends = buffers(strided, x, z, y)
    last = len(strided.factors) - 1
    for i in range(last + 1):
        launcher.forward(i, ends[i], ends[i + 1], bias if i == last else None)
    return y, z if save else None


@on_device_of_x
def forward_int8(strided: StridedChain, x: Tensor, values: Tensors, scales: Tensors, bias: Tensor | None) -> Tensor:
    """Apply a chain whose factors are int8, with the kernel for few tokens.

    Args:
        strided: The chain, which `is_decodable`.
        x: The input, contiguous like all other tensors.
        values: The int8 factors in order of application.
        scales: One float32 multiplier for each row of each slice of a factor.
        bias: Added to the result.

    Shape:
        x (tokens, d_in), values (slices, j, k) each, scales (slices, j) each -> (tokens, d_out).

    Returns:
        The result.
    """
    y = x.new_empty(x.shape[0], strided.d_out)
    if x.shape[0]:
        launch_decode(strided, x, values, scales, bias, y, rows_scaled=True)
    return y


@on_device_of_x
def intermediates(strided: StridedChain, x: Tensor, weights: Tensors, scales: Tensors, tuning: Tuning) -> Tensor:
    """Compute only the intermediates that `forward` returns with `save`."""
    z = new_intermediate(strided, x)
    if x.shape[0]:
        launcher = FactorLauncher(strided, weights, scales, TensorSpec.of(x), tuning)
        ends = buffers(strided, x, z, x)
        for i in range(len(strided.factors) - 1):
            launcher.forward(i, ends[i], ends[i + 1])
    return z


@on_device_of_x
def backward(
    strided: StridedChain, dy: Tensor, x: Tensor, z: Tensor | None, weights: Tensors, scales: Tensors, tuning: Tuning,
    *, biased: bool, needs_x: bool = True,
) -> ChainGradients:  # fmt: skip
    """Compute the gradients of x, the weights, the scales and, with `biased`, the bias.

    Unless `needs_x`, that of x is left out where it would take a launch of its own.

    Intermediates that were not saved, z, are computed again. Sums over tokens are divided into a fixed number of lanes,
    which are added in order: the result is deterministic.
    """
    if not x.shape[0]:
        db = dy.new_zeros(strided.d_out) if biased else None
        weight_gradients, scale_gradients = ([torch.zeros_like(t) for t in tensors] for tensors in (weights, scales))
        return ChainGradients(torch.empty_like(x), weight_gradients, scale_gradients, db)
    on_chip = None if tuning.on_chip is None else tuning.on_chip.weight_gradients
    if z is None and on_chip is not None and are_aligned(x, dy):
        gradients = on_chip_passes.weight_gradients(strided, dy, x, weights, scales, on_chip, biased=biased)
        dx = backward_input(strided, dy, x, weights, scales, tuning) if needs_x else None
        return _chain_gradients(dx, gradients)
    if z is None:
        z = intermediates(strided, x, weights, scales, tuning)
    dx = torch.empty_like(x)
    launcher = FactorLauncher(strided, weights, scales, TensorSpec.of(x), tuning)
    values = buffers(strided, x, z, dy)
    grads = buffers(strided, dx, torch.empty_like(z), dy)
    last = len(strided.factors) - 1
    gradients = [
        launcher.backward(i, grads[i + 1], values[i], grads[i], biased=biased and i == last)
        for i in range(last, -1, -1)
    ]
    return _chain_gradients(dx, gradients[::-1])


def _chain_gradients(dx: Tensor | None, gradients: Sequence[FactorGradients]) -> ChainGradients:
    """The gradients of all factors together; the last factor's is that of the bias."""
    dws, dss, dbs = zip(*gradients, strict=True)
    return ChainGradients(dx, list(dws), [ds for ds in dss if ds is not None], dbs[-1])


@on_device_of_x
def backward_input(
    strided: StridedChain, dy: Tensor, x: Tensor | None, weights: Tensors, scales: Tensors, tuning: Tuning
) -> Tensor:
    """Compute the gradient of x only: the transposed factors in reverse order, without saved intermediates.

    Only an activation needs x itself.
    """
    on_chip = None if tuning.on_chip is None else tuning.on_chip.input_gradient
    if on_chip is not None and dy.shape[0] and are_aligned(dy):
        return on_chip_passes.input_gradient(strided, dy, weights, scales, on_chip)
    dx = dy.new_empty(dy.shape[0], strided.d_in)
    if dy.shape[0]:
        launcher = FactorLauncher(strided, weights, scales, TensorSpec.of(dy), tuning)
        ends = buffers(strided, dx, new_intermediate(strided, dy), dy)
        for i in reversed(range(len(strided.factors))):
            launcher.forward(i, ends[i + 1], ends[i], transposed=True, x=x)
    return dx
