"""Looking up rows of a chain's matrix, as an embedding does, without computing the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from operator import mul

import torch
from torch import Tensor

from buttress.core.chain_sum import AnyChain
from buttress.errors import ShapeError
from buttress.ops.framing import autocast_dtype, by_part
from buttress.ops.layouts import layouts_of
from buttress.ops.lookup_layout import LookupLayout


def rows(chain: AnyChain, factors: Sequence[Tensor], ids: Tensor, *, scales: Sequence[Tensor] | None = None) -> Tensor:
    """Look up rows of a chain's matrix without computing it: dense(chain, factors)[ids].

    Autocast has no effect, as for F.embedding.

    Args:
        chain: The chain, or the sum of chains.
        factors: Its factors in order of application, part by part.
        ids: Row numbers, int64 or int32. An id outside the matrix raises the same error as in F.embedding.
        scales: A multiplier of each factor, as a tensor with one entry.

    Shape:
        ids of any shape (*) -> (*, d_in).

    Returns:
        The rows.

    Raises:
        ShapeError: If `ids` are not integers of 32 or 64 bits.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"rows are looked up by int64 or int32 numbers, got {ids.dtype}")
    autocasts = autocast_dtype(factors[0]) is not None
    flat = ids.reshape(-1).long()
    entries = None
    with torch.autocast(ids.device.type, enabled=False) if autocasts else nullcontext():
        for part, own, own_scales in by_part(chain, factors, scales):
            part_entries = _rows(layouts_of(part).lookup, own, flat)
            if own_scales is not None:
                # The rows are scaled rather than the factors, which are larger.
                part_entries = part_entries * reduce(mul, own_scales).to(part_entries.dtype)
            entries = part_entries if entries is None else entries + part_entries.to(entries.dtype)
    assert entries is not None
    return entries.reshape(*ids.shape, chain.d_in)


def row_macs(chain: AnyChain) -> int:
    """Multiply-accumulates of looking up one row.

    Args:
        chain: The chain.

    Returns:
        The number of multiply-accumulates.
    """
    return sum(layouts_of(part).lookup.macs for part in chain.parts)


def _rows(layout: LookupLayout, weights: Sequence[Tensor], ids: Tensor) -> Tensor:
    indices = [ids // stride % size for stride, size in layout.radix]
    valid = (ids >= 0) & (ids < layout.d_out)
    z = ids
    for factor, weight in zip(layout.factors, reversed(weights), strict=True):
        table = factor.table(weight)
        if factor.left is None:
            z = factor.gather(table, indices, valid)
        elif factor.gathered:
            z = torch.bmm(factor.left(z, indices), factor.gather(table, indices).reshape(factor.slice_shape))
        else:
            z = torch.bmm(factor.left(z, indices), table).reshape(factor.bmm_shape).transpose(0, 1)
        z = z.reshape(factor.result_shape)
        if factor.regroup is not None:
            z = factor.regroup(z, indices)
    if layout.window is not None:
        z = layout.window(z, indices)
    x = layout.output(z, indices)
    return x if x.shape[1] == layout.d_in else x[:, : layout.d_in].contiguous()
