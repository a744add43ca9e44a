"""Block Tensor-Train, the structure of the paper: Tensor-Train without parameter sharing."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure
from buttress.core.structures.cores import CoreAxes, Split, axis_sizes, bond_ranks, checked_split


@structure
class BTT(Structure):
    """Block Tensor-Train, whose parameters equal its MACs per token.

    Rank 1 is Monarch with sqrt(d) blocks; two cores of rank sqrt(d) represent any matrix. The output axes are
    in the order in which the last core writes them, (b, a): the paper's order up to a fixed permutation. This is
    neither TedNet's block-term Tucker nor tensorly-torch's BlockTT.

    Args:
        rank: Size of the bonds between neighboring cores: one number, or one for each bond.
        cores: Number of cores, at least 2.
        split: How sizes are split into axes: "even", "greedy", "aligned" (see `split`), or for layers of one size the
            axes themselves, ((input axes, slow first), (output axes in the order written)).

    Example:
        >>> BTT(rank=4).chain(1024, 4096).params
        786432
    """

    rank: int | tuple[int, ...] = 1
    cores: int = 2
    split: Split = "even"

    def __post_init__(self) -> None:
        bond_ranks(self, self.rank, self.cores)
        object.__setattr__(self, "split", checked_split(self, self.split, self.cores))

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return tuple(cls(rank=rank) for rank in (1, 2, 4, 8))

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        sizes = cls().chain(d_in, d_out).sizes
        yield from (cls(rank=rank) for rank in range(1, min(sizes["d"], sizes["a"]) + 1))

    def chain(self, d_in: int, d_out: int) -> Chain:
        axes = CoreAxes.of(self.cores)
        y = (*axes.outputs[1:], axes.outputs[0])
        sizes = axis_sizes(self, self.split, d_in, d_out, x=axes.inputs, y=y, created=axes.outputs[::-1])
        sizes |= zip(axes.bonds, bond_ranks(self, self.rank, self.cores), strict=True)
        factors = axes.factors(blocks=True)
        return Chain.of(d_in, d_out, x=" ".join(axes.inputs), factors=factors, y=" ".join(y), sizes=sizes)
