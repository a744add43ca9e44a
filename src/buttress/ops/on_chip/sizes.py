"""Which chains the on-chip kernels support, and the sizes that they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

from buttress.core.chain import Chain
from buttress.ops.strides import StridedChain, strided_chain


@dataclass(frozen=True)
class PairSizes:
    """Sizes of a pair of factors: x is c blocks of d numbers, y is b blocks of a; z has s numbers for each two blocks.

    Args:
        c: Blocks of x, and of the first factor.
        d: Numbers in a block of x.
        b: Blocks of y, and of the second factor.
        a: Numbers in a block of y.
        s: Numbers of z for each pair of a block of x and a block of y: the rank.
        d_in: Columns of x, at most c * d.
        d_out: Columns of y, at most b * a.
    """

    c: int
    d: int
    b: int
    a: int
    s: int
    d_in: int
    d_out: int

    @cached_property
    def transposed(self) -> PairSizes:
        """The sizes of the same pair as the gradient of x sees it: from y to x."""
        return PairSizes(c=self.b, d=self.a, b=self.c, a=self.d, s=self.s, d_in=self.d_out, d_out=self.d_in)

    @property
    def access(self) -> tuple[int, int]:
        """How many numbers of a row of x and of y can be read at a time: every block starts at a multiple of it."""
        return gcd(8, self.d, self.d_in), gcd(8, self.a, self.d_out)

    @property
    def largest_weight(self) -> int:
        """Numbers of the larger factor."""
        return self.c * self.b * self.s * max(self.d, self.a)


@lru_cache(maxsize=4096)
def on_chip_sizes(strided: StridedChain) -> PairSizes | None:
    """The sizes of a chain of two block-diagonal factors with a transposition of blocks between them.

    Args:
        strided: The strides of the chain.

    Returns:
        The sizes, or None where the chain is none: it has another number of factors, shares slices, or reads and writes
        x, z and y in another order.
    """
    if len(strided.factors) != 2:
        return None
    first, second = strided.factors
    c, d, b, a = first.blocks, first.source.size, second.blocks, second.target.size
    if first.target.size % b:
        return None
    sizes = PairSizes(c, d, b, a, first.target.size // b, strided.d_in, strided.d_out)
    return sizes if strided == _strided(sizes) else None


def _strided(sizes: PairSizes) -> StridedChain | None:
    """The strides of the chain with these sizes that the kernels compute."""
    axes = {"c": sizes.c, "d": sizes.d, "b": sizes.b, "a": sizes.a, "s": sizes.s}
    factors = {"first": "c b s d", "second": "b a c s"}
    return strided_chain(Chain.of(sizes.d_in, sizes.d_out, x="c d", factors=factors, y="b a", sizes=axes))
