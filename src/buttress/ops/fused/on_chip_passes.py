"""Passes of a pair of factors with the on-chip kernels. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from buttress.ops.fused.factor_launches import FactorGradients, reduce_lanes
from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.strides import StridedChain

Tensors = Sequence[Tensor]


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors start at multiples of 16 bytes, as nearly all do and the kernels assume."""
    return not any(t is not None and t.data_ptr() % 16 for t in tensors)


def forward(
    strided: StridedChain, x: Tensor, weights: Tensors, scales: Tensors, bias: Tensor | None, options: ApplyOptions
) -> Tensor:
    """Apply a pair of factors."""
    sizes = on_chip_sizes(strided)
    assert sizes is not None
    return launches.apply(sizes, options, x, weights, scales, bias)


def input_gradient(
    strided: StridedChain, dy: Tensor, weights: Tensors, scales: Tensors, options: ApplyOptions
) -> Tensor:
    """Compute the gradient of x."""
    sizes = on_chip_sizes(strided)
    assert sizes is not None
    return launches.apply(sizes.transposed, options, dy, weights[::-1], scales[::-1], None, transposed=True)


def weight_gradients(
    strided: StridedChain, dy: Tensor, x: Tensor, weights: Tensors, scales: Tensors, options: GradientOptions,
    *, biased: bool,
) -> list[FactorGradients]:  # fmt: skip
    """Compute the gradients of both factors, of their scales, and with `biased` of the bias."""
    sizes = on_chip_sizes(strided)
    assert sizes is not None
    *sums, bias_sums = launches.weight_gradients(sizes, options, x, dy, weights, scales, biased=biased)
    bias_sums_by_factor = (None, bias_sums)
    return [
        reduce_lanes(factor, sums[i], weights[i], scales[i] if scales else None, bias_sums_by_factor[i])
        for i, factor in enumerate(strided.factors)
    ]
