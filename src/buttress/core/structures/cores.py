"""Cores, bonds and splits: what Kronecker, Tensor-Train and Block Tensor-Train have in common."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from buttress.core.chain import MAX_AXES, Axes
from buttress.core.structures.base import Structure, positive
from buttress.core.structures.sizes import ALIGNMENT, MAX_SIZE, RULES, split
from buttress.errors import StructureError, quoted
from buttress.suggestions import did_you_mean

MAX_CORES = (MAX_AXES + 1) // 3
"""Largest number of cores: each has an input axis, an output axis and a bond to the next."""

Split: TypeAlias = str | tuple[tuple[int, ...], tuple[int, ...]]
"""How the sizes of a layer are split into axes: the name of a rule, or the sizes of the axes of x and of y."""


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


def checked_split(structure: Structure, value: Any, parts: int) -> Split:
    """The option `split` of a structure, checked.

    Args:
        structure: The structure, named in errors.
        value: The name of a rule, or (input axes, output axes) for layers of one size: tuples or lists of integers.
        parts: Number of axes on each side.

    Returns:
        The name, or tuples of plain integers.

    Raises:
        StructureError: If it is neither, has another number of axes, or no layer is as large.
    """
    owner = type(structure).__name__
    if isinstance(value, str) and value in RULES:
        return str(value)
    if not isinstance(value, tuple | list) or [isinstance(side, tuple | list) for side in value] != [True, True]:
        hint = did_you_mean(value, RULES, listed=True) if isinstance(value, str) else ""
        raise StructureError(
            f"{owner}: split must be {', '.join(map(repr, RULES))} or ((input axes), (output axes)), "
            f"such as ((32, 24), (48, 64)), got {quoted(value)}{hint}"
        )
    inputs, outputs = value
    if not len(inputs) == len(outputs) == parts:
        raise StructureError(
            f"{owner}: split needs {parts} input axes and {parts} output axes, one for each factor, "
            f"got {len(inputs)} and {len(outputs)}"
        )
    for n in (*inputs, *outputs):
        positive(structure, **{"an axis of split": n})
    if max(prod(inputs), prod(outputs)) > MAX_SIZE:
        raise StructureError(f"{owner}: the axes of split must multiply to at most 2^40, got {quoted(value)}")
    return tuple(map(int, inputs)), tuple(map(int, outputs))


def axis_sizes(
    structure: Structure, split_by: Split, d_in: int, d_out: int, *, x: Axes, y: Axes, created: Axes
) -> dict[str, int]:
    """The lengths of the axes of x and y for one layer.

    Under a rule, the factor that acts first gets the shortest input axis and the shortest output axis: with the letters
    of the paper, d <= c and b <= a. Under "aligned", the fast axes of x and y, along which memory is contiguous, are
    multiples of 8 wherever the split has such a factor.

    Args:
        structure: The structure, named in errors.
        split_by: Its option `split`, checked.
        d_in: Input features.
        d_out: Output features.
        x: Input axes, slow to fast; the fast one is contracted first.
        y: Output axes in the order written, slow to fast.
        created: Output axes in the order in which the factors create them.

    Returns:
        The length of each axis.

    Raises:
        StructureError: If the axes of an explicit split are for layers of another size.
    """
    if isinstance(split_by, str):
        inputs, outputs = split(d_in, len(x), split_by), split(d_out, len(y), split_by)
        if split_by == "aligned":
            inputs, outputs = (
                _with_aligned(factors, axes.index(fast))
                for factors, axes, fast in ((inputs, x[::-1], x[-1]), (outputs, created, y[-1]))
            )
        return dict(zip((*reversed(x), *created), inputs + outputs, strict=True))
    inputs, outputs = split_by
    if not (_fits(d_in, inputs) and _fits(d_out, outputs)):
        raise StructureError(
            f"{type(structure).__name__}: split={quoted(split_by, 80)} is for layers of {_served(inputs)} inputs and "
            f"{_served(outputs)} outputs, got {d_in:,} and {d_out:,}: give layers of another size another split"
        )
    return dict(zip((*x, *y), inputs + outputs, strict=True))


def _with_aligned(factors: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Ascending factors, with a multiple of `ALIGNMENT` moved to a position if there is one."""
    multiples = [size for size in factors if size % ALIGNMENT == 0]
    if not multiples or factors[position] in multiples:
        return factors
    rest = list(factors)
    rest.remove(multiples[0])
    return (*rest[:position], multiples[0], *rest[position:])


def _least(axes: tuple[int, ...]) -> int:
    """The smallest size for which every one of these axes is needed at its full length.

    The rule "even" pads by no more. A larger allowance would hide that a split was meant for another layer.
    """
    size = prod(axes)
    return size - size // max(axes) + 1


def _fits(n: int, axes: tuple[int, ...]) -> bool:
    return _least(axes) <= n <= prod(axes)


def _served(axes: tuple[int, ...]) -> str:
    """The sizes that these axes fit, as errors show them."""
    least, most = _least(axes), prod(axes)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


@dataclass(frozen=True)
class CoreAxes:
    """Axes of the cores of a Tensor-Train or Block Tensor-Train.

    Core t of c contracts input axis j_t and the rank to its right, and creates output axis i_t and the
    rank to its left; the last core acts first. Two cores use the letters of the paper: y = (a, b),
    x = (c, d), rank s.

    Args:
        names: Names of the cores in order of application.
        inputs: Input axes j_1 .. j_c, slow to fast.
        outputs: Output axes i_1 .. i_c.
        bonds: Rank axes; bonds[t] joins core t + 1 to core t + 2.
    """

    names: Axes
    inputs: Axes
    outputs: Axes
    bonds: Axes

    @classmethod
    def of(cls, cores: int) -> CoreAxes:
        """The axes of this number of cores."""
        if cores == 2:
            return cls(names=("R", "L"), inputs=("c", "d"), outputs=("a", "b"), bonds=("s",))
        count = range(1, cores + 1)
        return cls(
            names=tuple(f"G{t}" for t in reversed(count)),
            inputs=tuple(f"j{t}" for t in count),
            outputs=tuple(f"i{t}" for t in count),
            bonds=tuple(f"s{t}" for t in count[:-1]),
        )

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
