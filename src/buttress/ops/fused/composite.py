"""A strided chain in torch's own operations, which can be differentiated repeatedly. Does not import triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.ops.activations import activated
from buttress.ops.captures import forbid_in_capture
from buttress.ops.framing import scaled_factors
from buttress.ops.strides import StridedChain, StridedFactor, Strides


def apply_strided(
    strided: StridedChain, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """Compute the same as the kernels, for second derivatives.

    Args:
        strided: The chain.
        x: The input.
        weights: The factors in order of application.
        scales: One multiplier for each factor, or none at all.
        bias: Added to the result.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The result.
    """
    z = activated(x, strided.activation)
    for factor, weight in zip(strided.factors, scaled_factors(weights, scales) if scales else weights, strict=True):
        source, order, slices = _indices(factor, x.device)
        z = F.pad(z, (0, factor.source_extent - z.shape[1])) if z.shape[1] < factor.source_extent else z
        z = torch.einsum("ngk,gjk->ngj", z[:, source], weight[slices]).flatten(1)[:, order]
    z = z[:, : strided.d_out]
    return z if bias is None else z + bias


@lru_cache(maxsize=1024)
def _indices(factor: StridedFactor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The columns that each block reads, the order of the outputs in the target, and each block's slice."""

    def positions(strides: Strides) -> Tensor:
        i = torch.arange(strides.size, device=device)
        return i // strides.inner_size * strides.outer_stride + i % strides.inner_size * strides.inner_stride

    forbid_in_capture()
    offsets = torch.tensor(factor.block_offsets, device=device)
    source = offsets[:, :1] + positions(factor.source)
    target = (offsets[:, 1:2] + positions(factor.target)).flatten()
    return source, torch.argsort(target), offsets[:, 2]
