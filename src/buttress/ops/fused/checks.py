"""Checks that the kernels support a chain and its operands. Does not import triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.errors import ButtressError, ShapeError
from buttress.ops.fused import availability
from buttress.ops.layouts import MAX_OFFSET, layouts_of
from buttress.ops.strides import StridedChain

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels support."""


def require_strided(chain: Chain, x: Tensor, activation: str | None = None) -> StridedChain:
    """The strides of a chain that the kernels support.

    Args:
        chain: The chain.
        x: The input.
        activation: Name of the activation that is applied to x, or None.

    Returns:
        The strides.

    Raises:
        ButtressError: If triton is missing, or the kernels do not support this chain, device, dtype or number of
            tokens.
    """
    layouts = layouts_of(chain)
    strided = layouts.strided
    if strided is None:
        raise ButtressError(f"the fused kernels {layouts.refusal}: use impl='bmm'\n{chain.equation()}")
    if not availability.TRITON:
        raise ButtressError("the fused kernels need triton, which is not installed: use impl='bmm'")
    if x.device.type != "cuda" and not availability.INTERPRETED:
        raise ButtressError(f"the fused kernels run on a CUDA device, but x is on {x.device}: use impl='bmm'")
    if x.dtype not in DTYPES:
        name = str(x.dtype).removeprefix("torch.")
        raise ButtressError(f"the fused kernels take bfloat16, float16 and float32, not {name}: use impl='bmm'")
    # A compiler may leave the number of tokens open.
    if not torch.compiler.is_compiling() and x.shape[0] > MAX_OFFSET:
        raise ButtressError(
            f"the fused kernels take at most {MAX_OFFSET:,} tokens at a time, got {x.shape[0]:,}: use impl='bmm'"
        )
    return strided if activation is None else layouts.activated[activation]


def check_operands(
    chain: Chain, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> None:
    """Check that shapes, dtypes and devices are those that the kernels need.

    Args:
        chain: The chain.
        x: The input.
        weights: The factors in order of application.
        scales: One multiplier for each factor, or none at all.
        bias: The bias.

    Raises:
        ShapeError: If a factor or the bias has the wrong shape.
        ButtressError: If dtypes or devices differ.
    """
    _check_shapes(chain, weights, bias)
    operands = [*weights, *([] if bias is None else [bias])]
    if any(t.dtype != x.dtype or t.device != x.device for t in operands) or any(s.device != x.device for s in scales):
        placements = ", ".join(sorted({f"{t.dtype} on {t.device}" for t in (*operands, *scales)}))
        raise ButtressError(
            f"x is {x.dtype} on {x.device}, but the layer's parameters are {placements}: "
            "move them to the same dtype and device"
        )


def check_int8_operands(
    chain: Chain, x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> None:
    """As `check_operands`, for int8 factors with one float32 scale per row.

    Args:
        chain: The chain.
        x: The input.
        values: The int8 factors in order of application.
        scales: Their scales.
        bias: The bias, in the dtype of x.

    Raises:
        ShapeError: If a factor, its scales or the bias have the wrong shape.
        ButtressError: If dtypes or devices are not those that the kernel needs.
    """
    _check_shapes(chain, values, bias)
    for f, s in zip(chain.factors, scales, strict=True):
        if s.shape != f.shape[:2]:
            raise ShapeError(f"the scales of factor {f.name} must have the shape {f.shape[:2]}, got {tuple(s.shape)}")
    needed = [(t, torch.int8) for t in values] + [(t, torch.float32) for t in scales]
    needed += [] if bias is None else [(bias, x.dtype)]
    if any(t.dtype != dtype or t.device != x.device for t, dtype in needed):
        placements = ", ".join(sorted({f"{t.dtype} on {t.device}" for t, _ in needed}))
        raise ButtressError(
            f"the kernel for int8 factors takes int8 values, float32 scales and a bias of {x.dtype} on {x.device}, "
            f"got {placements}"
        )


def _check_shapes(chain: Chain, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    if bias is not None and bias.shape != (chain.d_out,):
        raise ShapeError(f"the bias must have {chain.d_out} numbers, got a tensor of shape {tuple(bias.shape)}")
    for f, w in zip(chain.factors, weights, strict=True):
        if w.shape != f.shape:
            raise ShapeError(f"factor {f.name} must have the shape {f.shape}, got {tuple(w.shape)}")
