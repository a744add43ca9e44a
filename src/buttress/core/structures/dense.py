"""The dense matrix as a structure: the baseline of every comparison."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, structure


@structure
class Dense(Structure):
    """A general matrix with d_in * d_out parameters.

    Example:
        >>> Dense().chain(64, 64).params
        4096
    """

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return ()  # the baseline that the others are compared with

    def chain(self, d_in: int, d_out: int) -> Chain:
        return Chain.of(d_in, d_out, x="d", factors={"W": "e d"}, y="e", sizes={"d": d_in, "e": d_out})
