"""The fused kernels: a chain's factors with the shuffles between them folded into loads and stores.

Does not import triton until a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.ops import flops
from buttress.ops.fused.autograd import FusedFunction
from buttress.ops.fused.checks import check_operands, require_strided
from buttress.ops.fused.operators import apply_operator
from buttress.ops.fused.selection import graphed, preferred, tuned

__all__ = ["apply", "graphed", "preferred", "tuned"]


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
) -> Tensor:
    """Apply a chain with the kernels, or refuse.

    Compilers and dispatch modes see one operator, `torch.ops.buttress.chain`. Otherwise the kernels are called without
    it, which costs less host time.

    Args:
        chain: The chain.
        x: The input.
        factors: The factors in order of application.
        bias: What is added to the result.
        scales: One number for each factor, by which it is multiplied.
        recompute: Compute the intermediates again in the backward pass instead of saving them.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The result.

    Raises:
        ButtressError: If the kernels cannot run here, or do not take this chain, device or dtype.
    """
    strided = require_strided(chain, x)
    weights = [w.contiguous() for w in factors]
    gains = [s.float() for s in scales or ()]
    bias = None if bias is None else bias.contiguous()
    check_operands(chain, x, weights, gains, bias)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return apply_operator(strided, x, weights, gains, bias, recompute=recompute)
    if torch._C._len_torch_dispatch_stack():
        flops.register_if_imported()
        return apply_operator(strided, x, weights, gains, bias, recompute=recompute)
    y: Tensor = FusedFunction.apply(strided, recompute, x, bias, *weights, *gains)  # type: ignore[no-untyped-call]
    return y
