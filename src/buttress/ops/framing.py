"""What the implementations in plain torch share: padding, scales and bias around a chain, and its window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain

Bare = Callable[[Chain, Tensor, Sequence[Tensor], bool], Tensor]
Whole = Callable[[Chain, Tensor, Sequence[Tensor], Tensor | None, Sequence[Tensor] | None, bool], Tensor]


def framed(run: Bare) -> Whole:
    """From (tokens, padded d_in) -> (tokens, padded d_out) to the layer's own sizes, with scales and bias."""

    @wraps(run)
    def apply(
        chain: Chain,
        x: Tensor,
        factors: Sequence[Tensor],
        bias: Tensor | None,
        scales: Sequence[Tensor] | None,
        recompute: bool,
    ) -> Tensor:
        if scales is not None:
            factors = [w * s.to(w.dtype) for w, s in zip(factors, scales, strict=True)]
        pad_in, pad_out = chain.padding
        y = run(chain, F.pad(x, (0, pad_in)) if pad_in else x, factors, recompute)
        if pad_out:
            y = y[:, : chain.d_out]
        return y if bias is None else y + bias

    return apply


def read_window(chain: Chain, z: Tensor) -> tuple[Tensor, Axes]:
    """(tokens, *x) -> (tokens, *x, w) with entry (n, w) = x[n + w - size(w) // 2], circular in n.

    The result is a strided view of one copy that is size(w) - 1 longer than x along n.
    """
    assert chain.window is not None
    n, w = chain.window
    at = 1 + chain.x.index(n)
    length, size = z.shape[at], chain.sizes[w]
    before = size // 2
    after = size - 1 - before
    ring = torch.cat((z.narrow(at, length - before, before), z, z.narrow(at, 0, after)), dim=at)
    return ring.unfold(at, size, 1), (*chain.x, w)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would turn x into, where it is on; as in torch, float64 is left alone."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
