"""Tensor-Train: with two cores, a sum of `rank` Kronecker matrices."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure
from buttress.core.structures.cores import CoreAxes, Split, axis_sizes, bond_ranks, checked_split


@structure
class TensorTrain(Structure):
    """Tensor-Train in the TT-matrix format, which tensorly-torch calls BlockTT.

    Every core is shared along the axes of the others.

    Args:
        rank: Size of the bonds between neighboring cores: one number, or one for each bond.
        cores: Number of cores, at least 2.
        split: How sizes are split into axes: "even", "greedy", "aligned" (see `split`), or for layers of one size the
            axes themselves, ((input axes, slow first), (output axes in the order written)).

    Example:
        >>> chain = TensorTrain(rank=4).chain(64, 64)
        >>> chain.params, chain.macs
        (512, 4096)
    """

    rank: int | tuple[int, ...] = 1
    cores: int = 2
    split: Split = "even"

    def __post_init__(self) -> None:
        bond_ranks(self, self.rank, self.cores)
        object.__setattr__(self, "split", checked_split(self, self.split, self.cores))

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        sizes = cls().chain(d_in, d_out).sizes
        max_rank = min(sizes["b"] * sizes["d"], sizes["a"] * sizes["c"])
        yield from (cls(rank=2**i) for i in range(max_rank.bit_length()))

    def chain(self, d_in: int, d_out: int) -> Chain:
        axes = CoreAxes.of(self.cores)
        sizes = axis_sizes(self, self.split, d_in, d_out, x=axes.inputs, y=axes.outputs, created=axes.outputs[::-1])
        sizes |= zip(axes.bonds, bond_ranks(self, self.rank, self.cores), strict=True)
        factors = axes.factors(blocks=False)
        return Chain.of(d_in, d_out, x=" ".join(axes.inputs), factors=factors, y=" ".join(axes.outputs), sizes=sizes)
