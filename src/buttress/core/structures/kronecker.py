"""Kronecker: W = kron(L, R), with L acting on the slow input axis and R on the fast one."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure
from buttress.core.structures.cores import Split, axis_sizes, checked_split


@structure
class Kronecker(Structure):
    """The matrix kron(L, R); each factor is shared along the other's axis.

    Args:
        split: How sizes are split into axes: "even", "greedy", "aligned" (see `split`), or for layers of one size the
            axes themselves, ((columns of L, columns of R), (rows of L, rows of R)).

    Example:
        >>> chain = Kronecker().chain(64, 64)
        >>> chain.params, chain.macs
        (128, 1024)
    """

    split: Split = "even"

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", checked_split(self, self.split, 2))

    def chain(self, d_in: int, d_out: int) -> Chain:
        sizes = axis_sizes(self, self.split, d_in, d_out, x=("c", "d"), y=("a", "b"), created=("b", "a"))
        return Chain.of(d_in, d_out, x="c d", factors={"R": "b d", "L": "a c"}, y="a b", sizes=sizes)
