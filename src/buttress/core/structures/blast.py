"""BLAST: blocks with their own diagonal between bases that rows and columns of blocks share."""

from collections.abc import Iterator
from math import isqrt, sqrt

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, positive, structure


@structure
class BLAST(Structure):
    """Block-Level Adaptive Structured matrix: block (i, j) is U_i diag(s_ij) V_j^T.

    All blocks of a row share U_i and all blocks of a column share V_j, so a rank costs 2 d + blocks^2 parameters. With
    one block, or with all s_ij = 1, it is low rank.
    (Lee et al., "BLAST: Block-Level Adaptive Structured Matrices for Efficient Deep Neural Network Inference", 2024.)

    Args:
        blocks: Number of blocks along each side; limited to the size of the smaller side.
        rank: Length of each s_ij. Default: the square root of the smaller side.

    Example:
        >>> BLAST(blocks=4, rank=8).chain(64, 64).params
        1152
    """

    blocks: int = 4
    rank: int | None = None

    def __post_init__(self) -> None:
        positive(self, blocks=self.blocks, rank=1 if self.rank is None else self.rank)

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return ()  # it takes far longer to project than structures of two factors

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        for blocks in (b for b in (4, 16) if b <= min(d_in, d_out)):
            most = max(1, d_in * d_out // (d_in + d_out + blocks**2))  # with which it costs as much as dense
            # Up to 12 ranks, closer together where they are small.
            ranks = sorted({max(1, round(most * (i / 12) ** 1.5)) for i in range(1, 13)})
            yield from (cls(blocks=blocks, rank=rank) for rank in ranks)

    def chain(self, d_in: int, d_out: int) -> Chain:
        b = max(1, min(self.blocks, d_in, d_out))
        d, a = -(-d_in // b), -(-d_out // b)
        rank = isqrt(max(min(d_in, d_out), 1) - 1) + 1 if self.rank is None else self.rank
        return Chain.of(
            d_in,
            d_out,
            # As in BlockDiagonal: with padding, the block axis is the fast one.
            x="c d" if d_in % b == 0 else "d c",
            factors={"V": "c r d", "S": "b c r", "U": "b a r"},
            y="b a" if d_out % b == 0 else "a b",
            sizes={"b": b, "c": b, "d": d, "a": a, "r": rank},
            # As in LowRank: the rule's sqrt(r) / d would vanish as the width grows.
            std={"V": 1 / sqrt(d)},
        )
