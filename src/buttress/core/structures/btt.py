"""Block Tensor-Train, the structure of the paper: Tensor-Train without the sharing."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, Train, bonds, structure


@structure
class BTT(Structure):
    """Block Tensor-Train, whose parameters equal its MACs per token.

    Rank 1 is Monarch with sqrt(d) blocks; two cores of rank sqrt(d) represent any matrix. The output is
    ordered as the last core leaves it, (b, a), the paper's up to a fixed permutation. Not TedNet's
    block-term Tucker, not tensorly-torch's BlockTT.

    Args:
        rank: Size of the bonds between neighbouring cores: one number, or one for each bond.
        cores: Number of cores, at least 2.

    Example:
        >>> BTT(rank=4).chain(1024, 4096).params
        786432
    """

    rank: int | tuple[int, ...] = 1
    cores: int = 2

    def __post_init__(self) -> None:
        bonds(self, self.rank, self.cores)

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return tuple(cls(rank=rank) for rank in (1, 2, 4, 8))

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        sizes = cls().chain(d_in, d_out).sizes
        yield from (cls(rank=rank) for rank in range(1, min(sizes["d"], sizes["a"]) + 1))

    def chain(self, d_in: int, d_out: int) -> Chain:
        train = Train.of(d_in, d_out, bonds(self, self.rank, self.cores))
        return Chain.of(
            d_in,
            d_out,
            x=" ".join(train.inputs),
            factors=train.factors(blocks=True),
            y=" ".join((*train.outputs[1:], train.outputs[0])),
            sizes=train.sizes,
        )
