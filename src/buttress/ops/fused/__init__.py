"""The fused kernels: a chain's factors with the permutations between them folded into loads and stores.

triton is not imported until a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.ops import flops
from buttress.ops.fused.autograd import FusedFunction
from buttress.ops.fused.checks import check_operands, require_strided
from buttress.ops.fused.int8 import apply_int8_rows, serves_int8
from buttress.ops.fused.operators import apply_operator
from buttress.ops.fused.selection import graphed, preferred, tuned

__all__ = ["apply", "apply_int8_rows", "graphed", "preferred", "serves_int8", "tuned"]


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
    activation: str | None,
) -> Tensor:
    """Apply a chain with the kernels.

    Compilers and dispatch modes see one operator, `torch.ops.buttress.chain`. Otherwise the kernels are called without
    it, which takes less host time.

    Args:
        chain: The chain.
        x: The input.
        factors: The factors in order of application.
        bias: Added to the result.
        scales: A multiplier of each factor, as a tensor with one entry.
        recompute: Compute the intermediates again in the backward pass instead of saving them.
        activation: Name of the activation that the kernels apply to x, or None.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The result.

    Raises:
        ShapeError: If a factor or the bias has the wrong shape.
        ButtressError: If triton is missing, or the kernels do not support this chain, device or dtype.
    """
    strided = require_strided(chain, x, activation)
    weights = [w.contiguous() for w in factors]
    scales = [s.float() for s in scales or ()]
    bias = None if bias is None else bias.contiguous()
    check_operands(chain, x, weights, scales, bias)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return apply_operator(strided, x, weights, scales, bias, recompute=recompute)
    if torch._C._len_torch_dispatch_stack():
        flops.register_if_imported()
        return apply_operator(strided, x, weights, scales, bias, recompute=recompute)
    # Without gradients nothing is saved, and few tokens use a kernel that has no intermediates.
    recompute = recompute or not torch.is_grad_enabled()
    y: Tensor = FusedFunction.apply(strided, recompute, x, bias, *weights, *scales)  # type: ignore[no-untyped-call]
    return y
