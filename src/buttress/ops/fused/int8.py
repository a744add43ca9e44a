"""Int8 factors in the kernel for few tokens: when it is used, its entry point, and it as a torch operator.

The kernel reads the int8 values themselves. It is for inference: there is no gradient. triton is not imported until it
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.errors import ButtressError
from buttress.ops import flops
from buttress.ops.captures import is_exporting
from buttress.ops.fused import availability
from buttress.ops.fused.checks import DTYPES, check_int8_operands, require_strided
from buttress.ops.fused.selection import needs_torch_operations
from buttress.ops.layouts import MAX_DECODE_TOKENS, is_decodable, layouts_of
from buttress.ops.strides import StridedChain

Tensors = Sequence[Tensor]

torch.library.define(
    "buttress::chain_int8", "(Tensor x, Tensor[] values, Tensor[] scales, Tensor? bias, int[] numbers) -> Tensor"
)


def serves_int8(chain: Chain, x: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer with int8 factors uses the kernel rather than torch's own operations.

    It does for few tokens on a GPU, without gradients, if the kernel supports the chain and the dtype. The speed
    tables are of floating-point factors, so they are not asked: torch's operations would write a copy of every factor
    in the dtype of x and read it again.

    Args:
        chain: The chain.
        x: The input.
        bias: The bias.

    Shape:
        x is (tokens, d_in).

    Returns:
        True if the kernel is used.
    """
    return x.device.type == "cuda" and availability.TRITON and takes(chain, x, bias)


def takes(chain: Chain, x: Tensor, bias: Tensor | None) -> bool:
    """As `serves_int8`, on a GPU with triton."""
    if x.dtype not in DTYPES or not layouts_of(chain).decodable:
        return False
    # An exported program runs without this package, and leaves the number of tokens open.
    if needs_torch_operations() or is_exporting():
        return False
    learns = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    return x.shape[0] <= MAX_DECODE_TOKENS and not learns


def apply_int8_rows(chain: Chain, x: Tensor, values: Tensors, scales: Tensors, bias: Tensor | None) -> Tensor:
    """Apply a chain whose factors are int8 with the kernel for few tokens.

    The values are converted on the chip, sums are in float32, and each row is multiplied by its scale before the
    intermediate is rounded. More than `MAX_DECODE_TOKENS` tokens have the right result, too.

    Args:
        chain: The chain.
        x: The input.
        values: The int8 factors in order of application.
        scales: One float32 multiplier for each row of each factor.
        bias: Added to the result; in the dtype of x.

    Shape:
        x (tokens, d_in), values (blocks, d_out, d_in) each, scales (blocks, d_out) each -> (tokens, d_out).

    Returns:
        The result, which has no gradient.

    Raises:
        ShapeError: If a factor, its scales or the bias have the wrong shape.
        ButtressError: If triton is missing, or the kernel does not support this chain, device or dtype.
    """
    strided = require_strided(chain, x)
    values, scales = [v.contiguous() for v in values], [s.float().contiguous() for s in scales]
    bias = None if bias is None else bias.contiguous()
    check_int8_operands(chain, x, values, scales, bias)
    x = x.contiguous()
    if not torch.compiler.is_compiling():
        if not torch._C._len_torch_dispatch_stack():
            return _forward(strided, x, values, scales, bias)
        flops.register_if_imported()
    y: Tensor = torch.ops.buttress.chain_int8(x, values, scales, bias, strided.to_ints())
    return y


def _forward(strided: StridedChain, x: Tensor, values: Tensors, scales: Tensors, bias: Tensor | None) -> Tensor:
    if not is_decodable(strided):
        raise ButtressError(
            "the kernel for int8 factors takes two factors whose slices have at most 256 inputs, the first of which "
            "reads x in order: other chains are applied with torch's own operations"
        )
    from buttress.ops.fused import passes

    return passes.forward_int8(strided, x, values, scales, bias)


@lru_cache(maxsize=1024)
def _strided(numbers: tuple[int, ...]) -> StridedChain:
    return StridedChain.from_ints(numbers)


@torch.library.impl("buttress::chain_int8", ("cpu", "cuda"))
def _chain_int8(x: Tensor, values: Tensors, scales: Tensors, bias: Tensor | None, numbers: Sequence[int]) -> Tensor:
    return _forward(_strided(tuple(numbers)), x, values, scales, bias)


@torch.library.register_fake("buttress::chain_int8")  # type: ignore[untyped-decorator]
def _chain_int8_fake(
    x: Tensor, values: Tensors, scales: Tensors, bias: Tensor | None, numbers: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape[0], StridedChain.from_ints(numbers).d_out)
