"""Cores and bonds: what Tensor-Train and Block Tensor-Train have in common."""

from __future__ import annotations

from dataclasses import dataclass

from buttress.core.chain import MAX_AXES, Axes
from buttress.core.structures.base import Structure, positive
from buttress.core.structures.sizes import split
from buttress.errors import StructureError, quoted

MAX_CORES = (MAX_AXES + 1) // 3
"""Largest number of cores: each has an input axis, an output axis and a bond to the next."""


def bond_ranks(structure: Structure, rank: int | tuple[int, ...], cores: int) -> tuple[int, ...]:
    """The ranks of the bonds between neighboring cores, checked.

    Args:
        structure: The structure, named in errors.
        rank: One number for all bonds, or one for each.
        cores: Number of cores.

    Returns:
        One rank for each bond.

    Raises:
        StructureError: If a value is not a positive integer, there are fewer than 2 cores or too many, or the ranks do
            not match the number of bonds.
    """
    positive(structure, cores=cores)
    if cores < 2:
        raise StructureError(f"{type(structure).__name__}: cores must be an integer >= 2, got {cores}")
    if cores > MAX_CORES:
        raise StructureError(f"{type(structure).__name__}: cores must be at most {MAX_CORES}, got {cores}")
    ranks = rank if isinstance(rank, tuple) else (rank,) * (cores - 1)
    if len(ranks) != cores - 1:
        raise StructureError(
            f"{type(structure).__name__}: {cores} cores have {cores - 1} bonds, "
            f"but rank={quoted(rank)} gives {len(ranks)} ranks: give one number or {cores - 1}"
        )
    for r in ranks:
        positive(structure, rank=r)
    return ranks


@dataclass(frozen=True)
class CoreAxes:
    """Axes and sizes of the cores of a Tensor-Train or Block Tensor-Train.

    Core t of c contracts input axis j_t and the rank to its right, and creates output axis i_t and the
    rank to its left; the last core acts first. Two cores use the letters of the paper: y = (a, b),
    x = (c, d), rank s.

    Args:
        names: Names of the cores in order of application.
        inputs: Input axes j_1 .. j_c, slow to fast.
        outputs: Output axes i_1 .. i_c.
        bonds: Rank axes; bonds[t] joins core t + 1 to core t + 2.
        sizes: Length of each axis.
    """

    names: Axes
    inputs: Axes
    outputs: Axes
    bonds: Axes
    sizes: dict[str, int]

    @classmethod
    def of(cls, d_in: int, d_out: int, ranks: tuple[int, ...]) -> CoreAxes:
        """The axes for a layer of these sizes, with one rank for each pair of neighboring cores."""
        cores = len(ranks) + 1
        if cores == 2:
            letters: tuple[Axes, Axes, Axes, Axes] = ("R", "L"), ("c", "d"), ("a", "b"), ("s",)
        else:
            count = range(1, cores + 1)
            letters = (
                tuple(f"G{t}" for t in reversed(count)),
                tuple(f"j{t}" for t in count),
                tuple(f"i{t}" for t in count),
                tuple(f"s{t}" for t in count[:-1]),
            )
        names, inputs, outputs, bonds = letters
        sizes = dict(zip(bonds, ranks, strict=True))
        # The core that acts first gets the smallest input and output axes: d <= c and b <= a.
        sizes |= zip(reversed(inputs), split(d_in, cores), strict=True)
        sizes |= zip(reversed(outputs), split(d_out, cores), strict=True)
        return cls(names, inputs, outputs, bonds, sizes)

    def core(self, t: int, *, blocks: bool) -> str:
        """Axes of core t = 1 .. c; `blocks` adds the axes of the other cores along which BTT does not share it."""
        before = self.inputs[: t - 1] if blocks else ()
        after = self.outputs[t:] if blocks else ()
        left, right = self.bonds[t - 2 : t - 1] if t > 1 else (), self.bonds[t - 1 : t]
        created = (self.outputs[t - 1], *left)
        return " ".join((*before, *after, *created, self.inputs[t - 1], *right))

    def factors(self, *, blocks: bool) -> dict[str, str]:
        """Axes of every core by name, in order of application."""
        cores = len(self.names)
        return {name: self.core(cores - k, blocks=blocks) for k, name in enumerate(self.names)}
