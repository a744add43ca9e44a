"""The dense matrix as a structure: the baseline of every comparison."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure
from buttress.errors import StructureError, quoted


@structure
class Dense(Structure):
    """A general matrix with d_in * d_out parameters.

    Args:
        frozen: Whether it is not trained, as in `Sum(Dense(frozen=True), LowRank(rank=8))`, which is an adapter.

    Example:
        >>> Dense().chain(64, 64).params
        4096
    """

    frozen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.frozen, bool):
            raise StructureError(f"Dense: frozen must be True or False, got {quoted(self.frozen)}")

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return ()  # the baseline that the others are compared with

    def chain(self, d_in: int, d_out: int) -> Chain:
        sizes, frozen = {"d": d_in, "e": d_out}, ["W"] if self.frozen else []
        return Chain.of(d_in, d_out, x="d", factors={"W": "e d"}, y="e", sizes=sizes, frozen=frozen)


def unstructured() -> Dense:
    """The structure of nn.Linear: one whole matrix.

    Returns:
        The structure.

    Example:
        >>> str(unstructured())
        'dense'
    """
    return Dense()
