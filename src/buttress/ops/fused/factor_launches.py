"""Launches of one factor at a time, forward and backward. Imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from buttress.ops.fused import kernels
from buttress.ops.fused.buffers import Buffer, tokens_and_tiles
from buttress.ops.fused.launches import (
    Launch,
    TensorSpec,
    cdiv,
    device_limits,
    fitting_tile,
    kernel_strides,
    lane_count,
    offset_table,
    stage_count,
    tile_size,
)
from buttress.ops.layouts import MAX_ON_CHIP
from buttress.ops.strides import StridedChain, StridedFactor
from buttress.ops.tuning import TILE_TOKENS, Backward, Forward, Tuning

REDUCED_ENTRIES = 1024
"""Entries of a gradient that one program sums over lanes."""

BufferLayout = tuple[int, bool]
"""Width of a buffer, and whether tokens are its fastest axis."""


class FactorPlan(NamedTuple):
    """The parts of a launch that do not depend on the number of tokens.

    Args:
        table: Offsets of the blocks.
        programs: Programs per lane.
        launch: The kernel with its constants.
    """

    table: Tensor
    programs: int
    launch: Launch


class FactorGradients(NamedTuple):
    """Gradients of a weight, of its scale and of the bias."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None


@dataclass(slots=True)
class FactorLauncher:
    """Launches the factors of one chain, one by one.

    Args:
        strided: The chain.
        weights: The factors in order of application, contiguous.
        scales: One float32 multiplier for each factor, or none at all.
        spec: Device, dtype and precision of the tensors.
        tuning: Launch options.
    """

    strided: StridedChain
    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    spec: TensorSpec
    tuning: Tuning

    def forward(
        self,
        i: int,
        source: Buffer,
        target: Buffer,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        x: Tensor | None = None,
    ) -> None:
        """Apply factor i, or its transpose, to `source` and write to `target`.

        The transpose of a first factor with an activation needs x, the chain's input.
        """
        factor, weight, tuning = self.strided.factors[i], self.weights[i], self.tuning.forward
        scale = self.scales[i] if self.scales else None
        table, programs, launch = _forward_plan(
            factor, self.spec, tuning, transposed, source[1:], target[1:], scale is not None, bias is not None,
            self._activation(i),
        )  # fmt: skip
        # A transposed factor has no bias; the kernel reads x in its place.
        added = x if transposed and self._activation(i) is not None else bias
        tokens, tiles = tokens_and_tiles(source, target)
        lanes = lane_count(programs, tuning.programs * device_limits(self.spec.device).multiprocessors, tiles)
        launch(
            programs * lanes, source.tensor, weight, weight if scale is None else scale,
            weight if added is None else added, target.tensor, table,
            tokens, tiles, lanes, source.width, target.width, factor.blocks,
        )  # fmt: skip

    def backward(self, i: int, grad: Buffer, source: Buffer, source_grad: Buffer, *, biased: bool) -> FactorGradients:
        """The gradients of factor i, from that of its target; that of its source is written to `source_grad`."""
        factor, weight, tuning = self.strided.factors[i], self.weights[i], self.tuning.backward
        scale = self.scales[i] if self.scales else None
        table, programs, launch = _backward_plan(
            factor, self.spec, tuning, source[1:], grad[1:], scale is not None, biased, self._activation(i)
        )
        if not launch.constants["WITH_DSRC"]:
            # Too many outputs to keep them all on the chip: the source's gradient needs its own launch.
            self.forward(i, grad, source_grad, transposed=True, x=source.tensor)
        tokens, tiles = tokens_and_tiles(source, grad)
        lanes = lane_count(programs, tuning.programs * device_limits(self.spec.device).multiprocessors, tiles)
        weight_parts = weight.new_empty(
            lanes, factor.blocks, factor.target.size, factor.source.size, dtype=torch.float32
        )
        bias_parts = weight.new_empty(lanes, grad.width, dtype=torch.float32) if biased else None
        launch(
            programs * lanes, grad.tensor, source.tensor, weight, weight if scale is None else scale,
            source_grad.tensor, weight_parts, weight_parts if bias_parts is None else bias_parts, table,
            tokens, tiles, lanes, source.width, grad.width, factor.blocks,
        )  # fmt: skip
        return reduce_lanes(factor, weight_parts, weight, scale, bias_parts)

    def _activation(self, i: int) -> str | None:
        """What factor i applies to its source."""
        return None if i else self.strided.activation


@lru_cache(maxsize=4096)
def _forward_plan(
    factor: StridedFactor, spec: TensorSpec, tuning: Forward, transposed: bool, source: BufferLayout,
    target: BufferLayout, scaled: bool, biased: bool, activation: str | None,
) -> FactorPlan:  # fmt: skip
    itemsize = spec.dtype.itemsize
    source_strides, target_strides = kernel_strides(factor)[:: -1 if transposed else 1]
    inputs, outputs = (factor.source.size, factor.target.size)[:: -1 if transposed else 1]
    on_chip = inputs <= MAX_ON_CHIP
    bk = tile_size(inputs, MAX_ON_CHIP if on_chip else 64)
    bj = tile_size(outputs, max(16, min(tuning.out, 65536 // (bk * itemsize))))
    weights = 1 if on_chip else 2
    bj = fitting_tile(spec.device, bj, lambda n: (weights * bk * n + bk * TILE_TOKENS + n * TILE_TOKENS) * itemsize)
    tile = (bk * TILE_TOKENS + (0 if on_chip else bk * bj)) * itemsize
    constants = {
        "K": inputs, "J": outputs, "SRC_STRIDES": source_strides, "DST_STRIDES": target_strides,
        "T": TILE_TOKENS, "BK": bk, "BJ": bj, "W_ON_CHIP": on_chip, "TRANSPOSED": transposed,
        "SRC_TOKENS_FAST": source[1], "DST_TOKENS_FAST": target[1], "SCALED": scaled, "BIASED": biased,
        "ACTIVATION": None if transposed else activation, "DERIVATIVE": activation if transposed else None,
        "PRECISION": spec.precision, "num_warps": tuning.warps,
        "num_stages": stage_count(
            spec.device, tuning.stages, bk * bj * itemsize, tile, bj * TILE_TOKENS * itemsize
        ),
    }  # fmt: skip
    table = offset_table(factor, spec.device, transposed)
    return FactorPlan(table, factor.blocks * cdiv(outputs, bj), Launch(kernels.forward, constants))


@lru_cache(maxsize=4096)
def _backward_plan(
    factor: StridedFactor, spec: TensorSpec, tuning: Backward, source: BufferLayout, target: BufferLayout,
    scaled: bool, biased: bool, activation: str | None,
) -> FactorPlan:  # fmt: skip
    itemsize = spec.dtype.itemsize
    inputs, outputs = factor.source.size, factor.target.size
    all_outputs = outputs <= MAX_ON_CHIP
    bj = tile_size(outputs, MAX_ON_CHIP) if all_outputs else 64
    bk = tile_size(inputs, max(16, min(MAX_ON_CHIP, tuning.numbers // bj)))
    bk = fitting_tile(spec.device, bk, lambda n: (n * bj + (n + bj + max(n, bj)) * TILE_TOKENS) * itemsize)
    source_strides, target_strides = kernel_strides(factor)
    constants = {
        "K": inputs, "J": outputs, "SRC_STRIDES": source_strides, "DST_STRIDES": target_strides,
        "T": TILE_TOKENS, "BK": bk, "BJ": bj,
        "SRC_TOKENS_FAST": source[1], "DST_TOKENS_FAST": target[1], "WITH_DSRC": all_outputs,
        "SCALED": scaled, "BIASED": biased, "ACTIVATION": activation, "PRECISION": spec.precision,
        "num_warps": tuning.warps,
        "num_stages": stage_count(
            spec.device, tuning.stages, bk * bj * itemsize, (bk + bj) * TILE_TOKENS * itemsize,
            max(bk, bj) * TILE_TOKENS * itemsize,
        ),
    }  # fmt: skip
    parts = cdiv(inputs, bk) * (1 if all_outputs else cdiv(outputs, bj))
    return FactorPlan(offset_table(factor, spec.device), factor.blocks * parts, Launch(kernels.backward, constants))


@lru_cache(maxsize=16)
def _reduce_launch(device: torch.device, dtype: torch.dtype, scaled: bool, wide: bool) -> Launch:
    # A launch is compiled for one device, one dtype and one width of the number of entries, so all are cache keys.
    return Launch(kernels.reduce_gradients, {"SCALED": scaled, "B": REDUCED_ENTRIES, "num_warps": 4, "num_stages": 1})


def reduce_lanes(
    factor: StridedFactor, weight_parts: Tensor, weight: Tensor, scale: Tensor | None, bias_parts: Tensor | None
) -> FactorGradients:
    """The gradients of the weight, its scale and the bias, from the sums of each lane and block."""
    dw = torch.empty_like(weight)
    lanes, shared = weight_parts.shape[0], factor.blocks // factor.slices
    width = 0 if bias_parts is None else bias_parts.shape[1]
    dbias = None if bias_parts is None else weight.new_empty(width)
    launch = _reduce_launch(weight.device, weight.dtype, scale is not None, weight.numel() >= 1 << 31)
    launch(
        cdiv(weight.numel(), REDUCED_ENTRIES) + cdiv(width, REDUCED_ENTRIES),
        weight_parts, weight if scale is None else scale, dw,
        weight_parts if bias_parts is None else bias_parts, dw if dbias is None else dbias,
        weight.numel(), factor.source.size * factor.target.size, lanes, shared, width,
    )  # fmt: skip
    if scale is None:
        return FactorGradients(dw, None, dbias)
    # The scale's gradient is the sum of the weight times its gradient before scaling.
    unscaled = weight_parts.unflatten(1, (factor.slices, shared)).sum((0, 2))
    return FactorGradients(dw, (unscaled * weight).sum().to(scale.dtype).reshape(scale.shape), dbias)
