"""Rows of a speed table, for tests of what is decided from them."""

from __future__ import annotations

import buttress as bt
from buttress.ops.speeds import Row, Times
from buttress.ops.strides import strided_chain
from buttress.ops.tuning import Backward, Forward, Tuning

GPU = "Test GPU 9000"


def row(structure: bt.Structure, width: int, tokens: int, triton: float, bmm: float, dense: float = 1.0) -> Row:
    """One layer in bfloat16, with the given milliseconds for all passes."""
    strided = strided_chain(structure.chain(width, width))
    assert strided is not None
    times = {"triton": Times(*[triton] * 4), "bmm": Times(*[bmm] * 4)}
    tuning = Tuning(Forward(warps=8), Backward(stages=4))
    linear = Times(*[dense] * 4)
    return Row(str(structure), width, width, tokens, "torch.bfloat16", strided.signature, linear, times, tuning)
