"""Padding, scales, bias and window, shared by the implementations in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain
from buttress.core.chain_sum import AnyChain

PaddedApply = Callable[[Chain, Tensor, Sequence[Tensor], bool, str | None], Tensor]
"""(chain, padded x, factors, recompute, activation) -> padded y."""
Apply = Callable[[Chain, Tensor, Sequence[Tensor], Tensor | None, Sequence[Tensor] | None, bool, str | None], Tensor]
"""(chain, x, factors, bias, scales, recompute, activation) -> y: the interface of an implementation."""


def framed(padded_apply: PaddedApply) -> Apply:
    """Add padding, scales and a bias to an implementation for padded sizes.

    Args:
        padded_apply: Maps (tokens, padded d_in) to (tokens, padded d_out).

    Returns:
        An implementation that maps (tokens, d_in) to (tokens, d_out).
    """

    @wraps(padded_apply)
    def apply(
        chain: Chain,
        x: Tensor,
        factors: Sequence[Tensor],
        bias: Tensor | None,
        scales: Sequence[Tensor] | None,
        recompute: bool,
        activation: str | None,
    ) -> Tensor:
        if scales is not None:
            factors = scaled_factors(factors, scales)
        pad_in, pad_out = chain.padding
        y = padded_apply(chain, F.pad(x, (0, pad_in)) if pad_in else x, factors, recompute, activation)
        if pad_out:
            y = y[:, : chain.d_out]
        return y if bias is None else y + bias

    return apply


def by_part(
    chain: AnyChain, factors: Sequence[Tensor], scales: Sequence[Tensor] | None = None
) -> Iterator[tuple[Chain, Sequence[Tensor], Sequence[Tensor] | None]]:
    """Each part of a sum with its own factors and scales.

    Args:
        chain: The chain, which is its only part, or the sum of chains.
        factors: The factors of all parts.
        scales: A multiplier of each factor, as a tensor with one entry.

    Yields:
        The part, its factors, and its scales where there are any.
    """
    first = 0
    for part in chain.parts:
        own = slice(first, first + len(part.factors))
        yield part, factors[own], None if scales is None else scales[own]
        first = own.stop


def scaled_factors(factors: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    """Each factor multiplied by its scale, in the factor's dtype.

    Args:
        factors: Tensors of any shape.
        scales: A multiplier of each factor, as a tensor with one entry.

    Returns:
        The scaled factors, in the same order.
    """
    return [w * s.to(w.dtype) for w, s in zip(factors, scales, strict=True)]


def read_window(chain: Chain, z: Tensor) -> tuple[Tensor, Axes]:
    """Read x through the chain's circular window: entry (n, w) = x[n + w - size(w) // 2].

    Args:
        chain: A chain with a window.
        z: The input, split into the axes of x.

    Shape:
        (tokens, *x) -> (tokens, *x, w).

    Returns:
        A strided view of one copy that is size(w) - 1 longer than x along n, and its axes without the tokens.
    """
    assert chain.window is not None
    n, w = chain.window
    dim = 1 + chain.x.index(n)
    length, size = z.shape[dim], chain.sizes[w]
    before = size // 2
    after = size - 1 - before
    ring = torch.cat((z.narrow(dim, length - before, before), z, z.narrow(dim, 0, after)), dim=dim)
    return ring.unfold(dim, size, 1), (*chain.x, w)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would convert x, or None; as in torch, float64 is not converted."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)
