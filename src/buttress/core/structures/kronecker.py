"""Kronecker: W = kron(L, R), with L acting on the slow input axis and R on the fast one."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure
from buttress.core.structures.sizes import split


@structure
class Kronecker(Structure):
    """The matrix kron(L, R); each factor is shared along the other's axis.

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
