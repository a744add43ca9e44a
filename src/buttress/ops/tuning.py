"""What can be chosen about a launch without changing a result. No triton here."""

from __future__ import annotations

from dataclasses import dataclass

from buttress.ops.strides import Signature

TOKENS = 64
"""Tokens in a tile: rows of z are this long."""


@dataclass(frozen=True)
class Forward:
    """How the forward pass is launched."""

    warps: int = 4
    stages: int = 4
    out: int = 128
    """Most outputs of a block that one program makes."""
    programs: int = 4
    """Programs wanted of a hop by itself, for each multiprocessor."""
    fuse: bool = True
    """Whether both hops of a pair go in one launch, where that is possible."""


@dataclass(frozen=True)
class Backward:
    """How the backward pass is launched."""

    warps: int = 8
    stages: int = 3
    programs: int = 2
    numbers: int = 16384
    """Most numbers of a weight's gradient that one program keeps in registers."""


@dataclass(frozen=True)
class Tuning:
    forward: Forward = Forward()
    backward: Backward = Backward()


FORWARD = (
    Forward(),
    Forward(stages=3),
    Forward(warps=8, out=256),
    Forward(warps=8, stages=3, out=256, fuse=False),
    Forward(stages=3, fuse=False),
)
BACKWARD = (Backward(), Backward(stages=4), Backward(warps=4, programs=4), Backward(warps=4, stages=2, programs=4))
"""What is tried when a card is measured: each was the best somewhere on one H200."""


def default(signature: Signature, itemsize: int) -> Tuning:
    """A choice for what was never measured: what did well most often on one H200."""
    if itemsize > 2:
        return Tuning(Forward(stages=2, out=64), Backward(stages=2, numbers=4096))
    small = max(inputs * outputs for _, inputs, outputs in signature[0]) <= 2048
    return Tuning(backward=BACKWARD[2] if small else BACKWARD[0])
