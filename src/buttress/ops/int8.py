"""Factors in int8 with one scale per row: rounding, and applying a chain to tensors with them.

A row is one output of one slice of a factor. Its weights are whole multiples of its scale, from -127 to 127.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Chain
from buttress.core.chain_sum import AnyChain
from buttress.errors import ShapeError
from buttress.ops import fused
from buttress.ops.bmm_layout import BmmLayout
from buttress.ops.framing import autocast_dtype, by_part, read_window
from buttress.ops.layouts import layouts_of

LARGEST = 127
_MAX_PACKED_ROWS = 4
_PACKED_STEP = 16
"""torch's int8 kernel reads so many columns at a time: with a rest it gives wrong numbers or ends the process."""

# An operator of our own, since torch's compiler does not accept computed scales in its rule for the kernel.
torch.library.define("buttress::int8_rows", "(Tensor x, Tensor values, Tensor scales) -> Tensor")


@torch.library.impl("buttress::int8_rows", "cpu")
def _int8_rows(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    y: Tensor = torch._weight_int8pack_mm(x, values, scales.to(x.dtype))
    return y


@torch.library.register_fake("buttress::int8_rows")  # type: ignore[untyped-decorator]
def _int8_rows_fake(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a factor to int8, with an error of at most half a scale per weight.

    Scales are rounded up to eight significant bits, so that they are the same numbers in float32 and in bfloat16.

    Args:
        weight: The factor, finite.

    Shape:
        (blocks, d_out, d_in) -> (blocks, d_out, d_in) and (blocks, d_out).

    Returns:
        The int8 values, and the scales in float32.
    """
    largest = weight.detach().float().abs().amax(-1)
    scales = ((largest / LARGEST).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (weight.detach().double() / scales.double().unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    return values.to(torch.int8), scales


def apply_int8(
    chain: AnyChain, x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """Multiply by the matrix of a chain whose factors are in int8.

    Scales multiply the results of each factor, in float16 its weights. On a GPU, the fused kernel for few tokens reads
    the int8 values themselves where `fused.serves_int8`. On a CPU, so does the step of a single token with
    torch.compile, and torch's own kernel for unblocked factors in bfloat16. Elsewhere each call converts the values to
    the dtype of x.

    Args:
        chain: The chain, or the sum of chains.
        x: The input.
        values: The int8 factors in order of application, part by part.
        scales: Their scales.
        bias: Added to the result.

    Shape:
        x (*, d_in), values (blocks, d_out, d_in) each, scales (blocks, d_out) each -> (*, d_out).

    Returns:
        The output, in the dtype of x.

    Raises:
        ShapeError: If x does not have `chain.d_in` features.
    """
    if x.dim() == 0 or x.shape[-1] != chain.d_in:
        raise ShapeError(f"this layer takes {chain.d_in} features in the last dimension, got {tuple(x.shape)}")
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    rows = x.reshape(-1, chain.d_in)
    first, *others = by_part(chain, values, scales)
    bias = None if bias is None else bias.to(x.dtype)
    y = _apply_part(first[0], rows, first[1], first[2] or (), bias)
    for part, own, own_scales in others:
        y = y + _apply_part(part, rows, own, own_scales or (), None)
    return y.reshape(*x.shape[:-1], chain.d_out)


def _apply_part(
    chain: Chain, x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """Multiply the rows of x by the matrix of one chain, and add the bias."""
    if fused.serves_int8(chain, x, bias):
        return fused.apply_int8_rows(chain, x, values, scales, bias)
    y = _converted(chain, x, values, scales)
    return y if bias is None else y + bias


def _converted(chain: Chain, x: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
    """Multiply the rows of x by the matrix of one chain in torch's own operations."""
    layout = layouts_of(chain).bmm
    pad_in, pad_out = chain.padding
    x = F.pad(x, (0, pad_in)) if pad_in else x
    if layout.plain:
        for value, scale in zip(values, scales, strict=True):
            x = _linear(x, value[0], scale[0])
        return x[:, : chain.d_out] if pad_out else x
    z = read_window(chain, x.reshape(-1, *layout.x_sizes))[0].flatten(1) if chain.window else x
    y = _blocked(layout, z, values, scales)
    return y[:, : chain.d_out] if pad_out else y


def _linear(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x times the transpose of one int8 matrix."""
    small = 0 < x.shape[0] <= _MAX_PACKED_ROWS and x.shape[1] % _PACKED_STEP == 0
    needs_gradient = torch.is_grad_enabled() and x.requires_grad  # torch's kernel has none
    if small and x.device.type == "cpu" and x.dtype == torch.bfloat16 and not needs_gradient:
        packed: Tensor = torch.ops.buttress.int8_rows(x.contiguous(), values, scales)
        return packed
    if x.dtype == torch.float16:
        return F.linear(x, _half_weight(values, scales))
    return F.linear(x, values.to(x.dtype)) * scales.to(x.dtype)


def _blocked(layout: BmmLayout, z: Tensor, values: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
    """As the matmuls of `ops.bmm`, with the scales multiplied to the rows of each result."""
    z = z.reshape(-1, *layout.read_sizes)
    for factor, value, scale in zip(layout.factors, values, scales, strict=True):
        blocks = factor.arrange(z)
        source = blocks.mT if factor.tokens_slow else blocks
        if z.dtype == torch.float16:
            product = torch.bmm(factor.repeat(_half_weight(value, scale)), source)
        else:
            weight = factor.repeat(value).to(z.dtype)
            product = torch.bmm(weight, source) * factor.repeat(scale.to(z.dtype).unsqueeze(-1))
        z = product.view(*factor.result_sizes, -1)
    return z.permute(layout.permutation).reshape(-1, layout.d_out)


def _half_weight(values: Tensor, scales: Tensor) -> Tensor:
    """A factor in float16, where sums of unscaled values would overflow."""
    return (values.float() * scales.unsqueeze(-1)).to(torch.float16)
