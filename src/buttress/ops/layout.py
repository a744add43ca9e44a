"""Reading a chain's input through its window: the one gather that every implementation shares."""

from __future__ import annotations

import torch
from torch import Tensor

from buttress.chain import Axes, Chain


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
