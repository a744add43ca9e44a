"""Layouts: axis orders and strides that the implementations derive from a chain, once per chain.

Chains are immutable, and so are their layouts. They are stored in the chain's `cache`, which a compiler that traces
`apply` reads as a plain attribute.
"""

from __future__ import annotations

from dataclasses import dataclass

from buttress.core.chain import Chain
from buttress.ops.bmm_layout import BmmLayout, bmm_layout
from buttress.ops.lookup_layout import LookupLayout, lookup_layout
from buttress.ops.strides import Signature, StridedChain, strided_chain


@dataclass(frozen=True)
class Layouts:
    """The layouts of one chain.

    Args:
        bmm: Axis orders for torch.bmm.
        strided: Strides for the fused kernels, or None where they do not support the chain.
        signature: Sizes on which the speed of the kernels depends; None where they do not support the chain.
        lookup: How rows of the matrix are looked up.
    """

    bmm: BmmLayout
    strided: StridedChain | None
    signature: Signature | None
    lookup: LookupLayout


def layouts_of(chain: Chain) -> Layouts:
    """The layouts of a chain, derived on first use."""
    cached = chain.cache
    return cached if isinstance(cached, Layouts) else _derive_layouts(chain)


def _derive_layouts(chain: Chain) -> Layouts:
    """Derive the layouts of a chain and store them in its cache."""
    _ = chain.padding, chain.sizes  # cached properties, so that a compiler does not have to trace them
    strided = strided_chain(chain)
    layouts = Layouts(
        bmm=bmm_layout(chain),
        strided=strided,
        signature=None if strided is None else strided.signature,
        lookup=lookup_layout(chain),
    )
    object.__setattr__(chain, "cache", layouts)
    return layouts
