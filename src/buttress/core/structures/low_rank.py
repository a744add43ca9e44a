"""W = U V with few columns in U."""

from collections.abc import Iterator
from math import ceil, isqrt, sqrt

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, positive, structure
from buttress.errors import StructureError


@structure
class LowRank(Structure):
    """The matrix product U V of rank `rank`; without options, the square root of the smaller side, as in the paper.

    Args:
        rank: The rank.
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
                f"LowRank: give rank or fraction, not both (rank={self.rank}, fraction={self.fraction})"
            )
        if self.rank is not None:
            positive(self, rank=self.rank)
        if self.fraction is not None and not (isinstance(self.fraction, float | int) and 0 < self.fraction <= 1):
            raise StructureError(f"LowRank: fraction must be in (0, 1], got {self.fraction!r}")
        if self.fraction is not None:
            object.__setattr__(self, "fraction", float(self.fraction))  # numpy's floats have another text

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        most = min(d_in, d_out)
        # About three dozen ranks, closer together where they are small.
        yield from (cls(rank=rank) for rank in sorted({max(1, round(most * (i / 36) ** 1.5)) for i in range(1, 37)}))

    def chain(self, d_in: int, d_out: int) -> Chain:
        small = min(d_in, d_out)
        if self.rank is not None:
            rank = self.rank
        elif self.fraction is not None:
            # Rounded up, but 0.1 * 30 = 3.0000000000000004 is three.
            rank = max(1, ceil(self.fraction * small - 1e-9))
        else:
            rank = isqrt(max(small, 1) - 1) + 1
        return Chain.of(
            d_in,
            d_out,
            x="d",
            factors={"V": "r d", "U": "e r"},
            y="e",
            sizes={"d": d_in, "r": rank, "e": d_out},
            # The rule's sqrt(r) / d_in vanishes with a zero-started U when r = sqrt(d): the paper's exception.
            std={"V": 1 / sqrt(max(d_in, 1))},
        )
