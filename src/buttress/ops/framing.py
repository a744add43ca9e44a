"""Parts of a sum, scales, windows and autocast, shared by the implementations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from buttress.core.chain import Axes, Chain
from buttress.core.chain_sum import AnyChain


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


def add_windows(chain: Chain, z: Tensor) -> Tensor:
    """The adjoint of `read_window`: each entry of x gets the sum of all that was read from it.

    Args:
        chain: A chain with a window.
        z: The gradient of what `read_window` returns.

    Shape:
        (tokens, *x, w) -> (tokens, *x).

    Returns:
        The gradient of x.
    """
    assert chain.window is not None
    n, w = chain.window
    dim, before = 1 + chain.x.index(n), chain.sizes[w] // 2
    total = torch.zeros_like(z[..., 0])
    for k in range(chain.sizes[w]):
        total = total + z[..., k].roll(k - before, dim)
    return total


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would convert x, or None; as in torch, float64 is not converted."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)
