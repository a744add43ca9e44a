"""Layouts: axis orders and strides that the implementations derive from a chain, once per chain.

Chains are immutable, and so are their layouts. They are stored in the chain's `cache`, which a compiler that traces
`apply` reads as a plain attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from buttress.core.chain import Chain
from buttress.ops.activations import ACTIVATIONS
from buttress.ops.bmm_layout import BmmLayout, bmm_layout
from buttress.ops.lookup_layout import LookupLayout, lookup_layout
from buttress.ops.strides import Signature, StridedChain, Strides, largest_offset, strided_chain
from buttress.ops.tuning import TILE_TOKENS

MAX_OFFSET = (1 << 31) - (1 << 16)
"""Offsets of the fused kernels are 32 bits wide; the rest is for the entries of the last tile that are masked."""
MAX_ON_CHIP = 256
"""Longest side of a slice that a program of the fused kernels keeps on the chip as a whole."""
MAX_DECODE_TOKENS = 64
"""Most tokens for which the kernel for few tokens is used."""


@dataclass(frozen=True)
class Layouts:
    """The layouts of one chain.

    Args:
        bmm: Axis orders for torch.bmm.
        strided: Strides for the fused kernels, or None where they do not support the chain.
        activated: As `strided`, by the activation that the first factor applies to x; empty where it is None.
        signature: Sizes on which the speed of the kernels depends; None where they do not support the chain.
        refusal: Why the fused kernels do not support the chain, or None where they do.
        decodable: Whether the kernel for few tokens supports the chain.
        intermediates: Numbers per token of all intermediates between the factors.
        lookup: How rows of the matrix are looked up.
    """

    bmm: BmmLayout
    strided: StridedChain | None
    activated: Mapping[str, StridedChain]
    signature: Signature | None
    refusal: str | None
    decodable: bool
    intermediates: int
    lookup: LookupLayout


def layouts_of(chain: Chain) -> Layouts:
    """The layouts of a chain, derived on first use."""
    cached = chain.cache
    return cached if isinstance(cached, Layouts) else _derive_layouts(chain)


def _derive_layouts(chain: Chain) -> Layouts:
    """Derive the layouts of a chain and store them in its cache."""
    _ = chain.padding, chain.sizes  # cached properties, so that a compiler does not have to trace them
    strided = strided_chain(chain)
    refusal = _refusal(chain, strided)
    if refusal is not None:
        strided = None
    layouts = Layouts(
        bmm=bmm_layout(chain),
        strided=strided,
        activated={} if strided is None else {name: replace(strided, activation=name) for name in ACTIVATIONS},
        signature=None if strided is None else strided.signature,
        refusal=refusal,
        decodable=strided is not None and is_decodable(strided),
        intermediates=sum(chain.size(f.batch_axes + f.shared_axes + f.out_axes) for f in chain.factors[:-1]),
        lookup=lookup_layout(chain),
    )
    object.__setattr__(chain, "cache", layouts)
    return layouts


def _refusal(chain: Chain, strided: StridedChain | None) -> str | None:
    """Why the fused kernels do not support a chain, or None where they do."""
    if strided is None:
        return "take factors that read and write at regular places, which this chain's do not"
    if (offset := largest_offset(chain, strided, TILE_TOKENS)) > MAX_OFFSET:
        return f"count at most {MAX_OFFSET:,} numbers in a slice, a token or a tile, and this chain has {offset:,}"
    return None


@lru_cache(maxsize=4096)
def is_pair(strided: StridedChain) -> bool:
    """Whether a chain has two factors, each with blocks whose inputs fit on the chip."""
    return len(strided.factors) == 2 and max(f.source.size for f in strided.factors) <= MAX_ON_CHIP


@lru_cache(maxsize=4096)
def is_decodable(strided: StridedChain) -> bool:
    """Whether the kernel for few tokens supports a chain."""
    if not is_pair(strided):
        return False
    first, second = strided.factors
    contiguous = Strides(first.source.size, first.source.size, 0, 1)
    return (
        first.source == contiguous
        and len(first.block_axes) == 1
        and first.block_axes[0].source_stride == first.source.size
        and second.blocks >= 8
        and first.slices * first.source.size * first.target.size <= MAX_OFFSET  # addressed as a whole
    )
