"""Low rank: W = U V, where U has few columns."""

from collections.abc import Iterator
from math import ceil, isqrt, sqrt

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, checked_fraction, positive, structure
from buttress.errors import StructureError, quoted


@structure
class LowRank(Structure):
    """A matrix U V of limited rank.

    Args:
        rank: The rank. Default: the square root of the smaller side, as in the paper.
        fraction: The rank as a fraction of the smaller side, in (0, 1]; not together with `rank`.

    Example:
        >>> LowRank(rank=8).chain(64, 64).params
        1024
    """

    rank: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.fraction is not None:
            raise StructureError(
                f"LowRank: give rank or fraction, not both (rank={quoted(self.rank)}, fraction={quoted(self.fraction)})"
            )
        if self.rank is not None:
            positive(self, rank=self.rank)
        if self.fraction is not None:
            object.__setattr__(self, "fraction", checked_fraction(self, fraction=self.fraction))

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        max_rank = min(d_in, d_out)
        # Up to 36 ranks, closer together where they are small.
        ranks = sorted({max(1, round(max_rank * (i / 36) ** 1.5)) for i in range(1, 37)})
        yield from (cls(rank=rank) for rank in ranks)

    def chain(self, d_in: int, d_out: int) -> Chain:
        small = min(d_in, d_out)
        rank = isqrt(max(small, 1) - 1) + 1 if self.rank is None else self.rank
        if self.fraction is not None:
            # Rounded up, but 0.07 * 100 = 7.000000000000001 is seven.
            rank = max(1, ceil(self.fraction * small - 1e-9))
        return Chain.of(
            d_in,
            d_out,
            x="d",
            factors={"V": "r d", "U": "e r"},
            y="e",
            sizes={"d": d_in, "r": rank, "e": d_out},
            # The paper's exception: with a zero-started U and r = sqrt(d), the rule's sqrt(r) / d_in would vanish.
            std={"V": 1 / sqrt(max(d_in, 1))},
        )
