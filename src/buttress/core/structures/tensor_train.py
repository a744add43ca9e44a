"""Tensor-Train: a sum of Kronecker products over a rank, and its form with more cores."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, Train, bonds, structure


@structure
class TensorTrain(Structure):
    """Tensor-Train in the TT-matrix format, which tensorly-torch calls BlockTT.

    Every core is shared along the axes of the others.

    Args:
        rank: Size of the bonds between neighbouring cores: one number, or one for each bond.
        cores: Number of cores, at least 2.

    Example:
        >>> chain = TensorTrain(rank=4).chain(64, 64)
        >>> chain.params, chain.macs
        (512, 4096)
    """

    rank: int | tuple[int, ...] = 1
    cores: int = 2

    def __post_init__(self) -> None:
        bonds(self, self.rank, self.cores)

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        sizes = cls().chain(d_in, d_out).sizes
        most = min(sizes["b"] * sizes["d"], sizes["a"] * sizes["c"])
        yield from (cls(rank=2**i) for i in range(most.bit_length()))

    def chain(self, d_in: int, d_out: int) -> Chain:
        train = Train.of(d_in, d_out, bonds(self, self.rank, self.cores))
        return Chain.of(
            d_in,
            d_out,
            x=" ".join(train.inputs),
            factors=train.factors(blocks=False),
            y=" ".join(train.outputs),
            sizes=train.sizes,
        )
