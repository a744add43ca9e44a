"""W = L kron R: one small matrix on the slow half of the axes, one on the fast half."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, split, structure


@structure
class Kronecker(Structure):
    """The Kronecker product kron(L, R); both factors are shared along the other's axis.

    Example:
        >>> chain = Kronecker().chain(64, 64)
        >>> chain.params, chain.macs
        (128, 1024)
    """

    def chain(self, d_in: int, d_out: int) -> Chain:
        (d, c), (b, a) = split(d_in, 2), split(d_out, 2)
        return Chain.of(
            d_in,
            d_out,
            x="c d",
            factors={"R": "b d", "L": "a c"},
            y="a b",
            sizes={"a": a, "b": b, "c": c, "d": d},
        )
