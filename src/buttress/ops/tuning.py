"""Launch options of the fused kernels, which do not change results. No triton here."""

from __future__ import annotations

from dataclasses import dataclass

from buttress.ops.on_chip.options import OnChip
from buttress.ops.strides import Signature

TILE_TOKENS = 64
"""Tokens in a tile: the length of an intermediate's rows."""


@dataclass(frozen=True)
class Forward:
    """Launch options of the forward pass. Field names are those of the speed tables.

    Args:
        warps: Warps per program.
        stages: Tiles in flight at a time, as far as shared memory allows.
        out: Maximum number of a block's outputs that one program computes.
        programs: Programs per multiprocessor for a factor with a launch of its own.
        fuse: Whether both factors of a pair run in one launch, where that is possible.
    """

    warps: int = 4
    stages: int = 4
    out: int = 128
    programs: int = 4
    fuse: bool = True


@dataclass(frozen=True)
class Backward:
    """Launch options of the backward pass. Field names are those of the speed tables.

    Args:
        warps: Warps per program.
        stages: Tiles in flight at a time, as far as shared memory allows.
        programs: Programs per multiprocessor.
        numbers: Maximum number of entries of a weight's gradient that one program keeps in registers.
    """

    warps: int = 8
    stages: int = 3
    programs: int = 2
    numbers: int = 16384


@dataclass(frozen=True)
class Tuning:
    """Launch options of both passes. Field names are those of the speed tables.

    Args:
        forward: Options of the forward pass.
        backward: Options of the backward pass.
        on_chip: Which passes use the on-chip kernels, where these can run, and their options.
    """

    forward: Forward = Forward()
    backward: Backward = Backward()
    on_chip: OnChip | None = None


FORWARD_CANDIDATES = (
    Forward(),
    Forward(stages=3),
    Forward(warps=8, out=256),
    Forward(warps=8, stages=3, out=256, fuse=False),
    Forward(stages=3, fuse=False),
)
BACKWARD_CANDIDATES = (
    Backward(),
    Backward(stages=4),
    Backward(warps=4, programs=4),
    Backward(warps=4, stages=2, programs=4),
)
"""Launch options that are compared when a GPU is measured: each was the fastest for some layer on an H200."""


def default_tuning(signature: Signature, itemsize: int) -> Tuning:
    """Launch options for a layer without a similar measured one: those that were most often the fastest on an H200.

    Args:
        signature: Sizes of the chain; see `StridedChain.signature`.
        itemsize: Bytes per number.

    Returns:
        The launch options.
    """
    if itemsize > 2:
        return Tuning(Forward(stages=2, out=64), Backward(stages=2, numbers=4096))
    small = max(inputs * outputs for _, inputs, outputs in signature[0]) <= 2048
    return Tuning(backward=BACKWARD_CANDIDATES[2] if small else BACKWARD_CANDIDATES[0])
