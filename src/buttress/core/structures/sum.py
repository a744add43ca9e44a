"""Sums of structures: several matrices of different structure, added up."""

from collections.abc import Iterable, Iterator
from itertools import count

from buttress.core.chain_sum import AnyChain, ChainSum
from buttress.core.structures.base import Structure, parse, structure
from buttress.core.structures.btt import BTT
from buttress.core.structures.dense import Dense
from buttress.core.structures.low_rank import LowRank
from buttress.errors import StructureError, quoted


@structure
class Sum(Structure):
    """The sum of several structures, such as low rank plus BTT, or an adapter: a frozen dense matrix plus low rank.

    Factors are named after their part: "btt_R", and "btt_2_R" in a second part of that name.

    Args:
        *structures: 2 to 16 parts, as structures or texts, one by one. Default: LowRank() and BTT().

    Example:
        >>> Sum(LowRank(rank=16), BTT()).chain(1024, 1024).params
        98304
    """

    parts: tuple[Structure, ...] = (LowRank(), BTT())
    takes_parts = True

    def __init__(self, *structures: Structure | str, parts: Iterable[Structure | str] = ()) -> None:
        if any(isinstance(part, list | tuple) for part in structures):
            raise StructureError("Sum: give the parts one by one, such as Sum(LowRank(), BTT()), not as a list")
        given = [parse(part) for part in (*structures, *parts)] or [LowRank(), BTT()]
        flat = tuple(p for part in given for p in (part.parts if isinstance(part, Sum) else (part,)))
        if not 2 <= len(flat) <= 16:
            raise StructureError(f"Sum: 2 to 16 parts are needed, got {quoted(', '.join(map(str, flat)))}")
        object.__setattr__(self, "parts", flat)

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.parts))})"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parts))})"

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return ()  # which parts to add up is the user's choice

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        for part in BTT.family(d_in, d_out):
            if part in (BTT(), BTT(rank=2), BTT(rank=4), BTT(rank=8)):
                yield from (cls(low_rank, part) for low_rank in LowRank.family(d_in, d_out))

    def chain(self, d_in: int, d_out: int) -> ChainSum:
        chains: dict[str, AnyChain] = {}
        for part in self.parts:
            prefixes = (f"{part.name}_{n}" if n > 1 else part.name for n in count(1))
            chains[next(p for p in prefixes if p not in chains)] = part.chain(d_in, d_out)
        return ChainSum.of(chains)


def adapter(structure: Structure) -> Sum:
    """An adapter: a frozen dense matrix, which comes first, plus the structure that is trained.

    Args:
        structure: What is added to the matrix. A sum that has the frozen matrix already keeps the one.

    Returns:
        The sum.

    Raises:
        StructureError: If the structure is the frozen matrix alone, which trains nothing, or has too many parts.

    Example:
        >>> str(adapter(LowRank(rank=8)))
        'sum(dense(frozen=True), low_rank(rank=8))'
    """
    base = Dense(frozen=True)
    trained = [part for part in (structure.parts if isinstance(structure, Sum) else (structure,)) if part != base]
    if not trained:
        raise StructureError(f"{structure} trains nothing: give the structure that is added, such as LowRank(rank=8)")
    return Sum(base, *trained)
