"""Both factors of a pair in one launch. Imports triton."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from buttress.ops.fused import kernels
from buttress.ops.fused.availability import INTERPRETED
from buttress.ops.fused.factor_launches import FactorPlan
from buttress.ops.fused.launches import (
    Launch,
    OversizeKernelError,
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
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import TILE_TOKENS, Forward

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES, RING_GROUPS = 24 << 20, 2
"""Bytes of z in flight between the factors of a pair, about half of an L2 cache, and in how many groups of tiles."""
REFUSED_LAUNCHES = ("cooperative launch", "operation not supported")
"""What the driver's errors say if a grid cannot be resident as a whole, or a GPU has no cooperative launches."""


@dataclass(slots=True)
class PairPlan:
    """The parts of a launch that do not depend on the number of tokens.

    Args:
        tables: Offsets of the blocks of both factors.
        programs: Programs per lane, both factors together.
        resident_programs: Number of programs that the GPU holds at once, as computed; 0 once the driver refused them.
        launch: The kernel with its constants.
    """

    tables: list[Tensor]
    programs: int
    resident_programs: int
    launch: Launch


def launch_pair(
    strided: StridedChain, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None,
    y: Tensor, tuning: Forward, *, save: bool,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Write y in one launch, unless the GPU does not hold all the programs at once.

    How many it holds is computed from the sizes of the GPU. The driver may grant fewer (under MPS, in a green context):
    it then refuses the cooperative launch before anything runs, and this pair is not tried again.

    Returns:
        Whether y was written, and with `save` the intermediate.
    """
    # The interpreter runs one program after the other: producers first, and no consumers to free the ring.
    ring = not save and not INTERPRETED
    plan = _pair_plan(strided, TensorSpec.of(x), tuning, bool(scales), bias is not None, ring)
    if plan.resident_programs < plan.programs:
        return False, None
    (rows,) = strided.intermediate_rows
    tiles = cdiv(x.shape[0], TILE_TOKENS)
    lanes = lane_count(plan.programs, plan.resident_programs, tiles)
    lane_tiles = cdiv(tiles, lanes)
    group_tiles = max(1, min(lane_tiles, IN_FLIGHT_BYTES // (lanes * RING_GROUPS * rows * TILE_TOKENS * x.itemsize)))
    groups = cdiv(lane_tiles, group_tiles)
    ring_groups = min(RING_GROUPS, groups)
    slots = ring_groups * group_tiles
    z = x.new_empty(lanes * slots if ring else tiles, rows, TILE_TOKENS)
    counters = torch.zeros(lanes * groups * 2, dtype=torch.int32, device=x.device)
    scale1, scale2 = scales or (x, x)
    first, second = strided.factors
    try:
        plan.launch(
            plan.programs * lanes, x, weights[0], scale1, plan.tables[0], z, weights[1], scale2,
            x if bias is None else bias, plan.tables[1], y, counters,
            x.shape[0], tiles, lanes, group_tiles, groups, ring_groups, slots,
            strided.d_in, rows, strided.d_out, first.blocks, second.blocks,
        )  # fmt: skip
    except RuntimeError as error:
        if not any(reason in str(error) for reason in REFUSED_LAUNCHES):
            raise
        plan.resident_programs = 0
        report_refused_launch(x.device)
        return False, None
    return True, z if save else None


@lru_cache(maxsize=16)
def report_refused_launch(device: torch.device) -> None:
    """Say, once for each GPU, that pairs of factors run in two launches there."""
    log.warning(
        "%s refused a cooperative launch that needs more of it than this process gets (MPS, a green context): "
        "the factors run in two launches instead, with the same result",
        device,
    )


@lru_cache(maxsize=4096)
def _pair_plan(
    strided: StridedChain, spec: TensorSpec, tuning: Forward, scaled: bool, biased: bool, ring: bool
) -> PairPlan:
    itemsize = spec.dtype.itemsize
    tiles: list[int] = []
    stages, programs = tuning.stages, 0
    for factor in strided.factors:
        bk = tile_size(factor.source.size, MAX_ON_CHIP)
        bj = tile_size(factor.target.size, max(16, min(tuning.out, 65536 // (bk * itemsize))))
        bj = fitting_tile(spec.device, bj, partial(_shared_bytes, bk, itemsize))
        tiles += [bk, bj]
        stages = stage_count(
            spec.device, stages, bk * bj * itemsize, bk * TILE_TOKENS * itemsize, bj * TILE_TOKENS * itemsize
        )
        programs += factor.blocks * cdiv(factor.target.size, bj)
    constants: dict[str, Any] = {
        **_pair_constants(strided), **dict(zip(("BK1", "BJ1", "BK2", "BJ2"), tiles, strict=True)),
        "T": TILE_TOKENS, "SCALED": scaled, "BIASED": biased, "RING": ring, "ACTIVATION": strided.activation,
        "PRECISION": spec.precision, "num_warps": tuning.warps, "num_stages": stages,
    }  # fmt: skip
    tables = [offset_table(factor, spec.device) for factor in strided.factors]
    if spec.device.type != "cuda":
        return PairPlan(tables, programs, programs * 2, Launch(kernels.forward_pair, constants))
    launch = Launch(kernels.forward_pair, constants | {"launch_cooperative_grid": True})
    try:
        resident = _resident_programs(launch, strided, spec, tables, tuning.warps, scaled)
    except OversizeKernelError:
        resident = 0  # a launch for each factor may still fit
    return PairPlan(tables, programs, resident, launch)


def _shared_bytes(bk: int, itemsize: int, bj: int) -> int:
    """Shared memory of a program with one stage: its part of the weight, the tile it reads and the tile it writes."""
    return (bk * bj + (bk + bj) * TILE_TOKENS) * itemsize


def _resident_programs(
    launch: Launch, strided: StridedChain, spec: TensorSpec, tables: Sequence[Tensor], warps: int, scaled: bool
) -> int:
    """Compile the kernel and compute how many of its programs the GPU holds at once."""
    example = torch.empty(16, dtype=spec.dtype, device=spec.device)
    scale = torch.empty(16, dtype=torch.float32, device=spec.device) if scaled else example
    sizes = (strided.d_in, strided.intermediate_rows[0], strided.d_out, *(f.blocks for f in strided.factors))
    compiled: Any = launch.compile(
        example, example, scale, tables[0], example, example, scale, example, tables[1], example, tables[0],
        *(2,) * 7, *sizes,
    )  # fmt: skip
    limits = device_limits(spec.device)
    threads = 32 * warps
    by_registers: int = limits.registers // (-(-compiled.n_regs // 8) * 8 * threads)
    by_shared: int = limits.shared_bytes // (compiled.metadata.shared + 1024)  # each program reserves 1 KiB
    return limits.multiprocessors * min(by_registers, by_shared, limits.threads // threads)


def _pair_constants(strided: StridedChain) -> dict[str, Any]:
    first, second = strided.factors
    names = ("K1", "J1", "K2", "J2", "SRC_STRIDES1", "DST_STRIDES1", "SRC_STRIDES2", "DST_STRIDES2")
    sizes = (first.source.size, first.target.size, second.source.size, second.target.size)
    return dict(zip(names, (*sizes, *kernel_strides(first), *kernel_strides(second)), strict=True))


def launch_decode(
    strided: StridedChain,
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    bias: Tensor | None,
    y: Tensor,
    *,
    rows_scaled: bool = False,
) -> None:
    """Write y for few tokens, with a kernel whose programs do not wait for each other.

    With `rows_scaled`, the weights are int8, and the scales have one number for each row of each slice.
    """
    tile_tokens = min(1 << (x.shape[0] - 1).bit_length(), 16)
    scaled = bool(scales) and not rows_scaled
    table, parts, launch = decode_plan(strided, TensorSpec.of(x), tile_tokens, scaled, bias is not None, rows_scaled)
    scale1, scale2 = scales or (x, x)
    blocks = strided.factors[1].blocks
    launch(
        blocks * parts * cdiv(x.shape[0], tile_tokens),
        x, weights[0], scale1, table, weights[1], scale2, x if bias is None else bias, y,
        x.shape[0], strided.d_in, strided.d_out, blocks, parts,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def decode_plan(
    strided: StridedChain, spec: TensorSpec, tile_tokens: int, scaled: bool, biased: bool, rows_scaled: bool
) -> FactorPlan:
    """The plan of the second factor; `programs` are the parts of each of its blocks."""
    first, second = strided.factors
    bk1 = tile_size(first.source.size, MAX_ON_CHIP)
    bj2 = tile_size(second.target.size, 64)
    # A program multiplies at most 16384 entries of x at a time.
    bk2 = tile_size(second.source.size, max(16, 16384 // (tile_tokens * bk1)))
    shared_bytes = ((tile_tokens + 1) * bk1 + bj2) * bk2 * spec.dtype.itemsize
    # The first factor's source is contiguous and its target is never stored.
    unused = ("SRC_STRIDES1", "DST_STRIDES1")
    constants = {
        **{name: value for name, value in _pair_constants(strided).items() if name not in unused},
        "SLICE_STRIDE1": first.block_axes[0].weight_stride, "T": tile_tokens, "BK1": bk1, "BK2": bk2, "BJ2": bj2,
        "SCALED": scaled, "ROWS_SCALED": rows_scaled, "BIASED": biased, "ACTIVATION": strided.activation,
        "PRECISION": spec.precision, "num_warps": 4,
        # One stage keeps the tiles in registers.
        "num_stages": 2 if shared_bytes <= device_limits(spec.device).program_shared_bytes else 1,
    }  # fmt: skip
    launch = Launch(kernels.decode_pair, constants)
    return FactorPlan(offset_table(second, spec.device), cdiv(second.target.size, bj2), launch)
