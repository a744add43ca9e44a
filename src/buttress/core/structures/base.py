"""What a structure is, the registry, the text form, and how a size is split into axes."""

from __future__ import annotations

import ast
import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeVar, dataclass_transform

from buttress.core.chain import Axes, Chain
from buttress.errors import ButtressError, StructureError

_REGISTRY: dict[str, type[Structure]] = {}

MOST_UNEVEN = 2
"""Largest ratio between the axes of one split; beyond it a size is padded."""


class Structure(ABC):
    """A family of matrices; an instance fixes its options (rank, blocks, ...), never its size.

    Subclasses are declared with `@structure`, which makes them frozen dataclasses and gives them a
    name. The one method to write is `chain`.
    """

    name: str
    """Name in texts, derived from the class: `LowRank` is "low_rank"."""

    @abstractmethod
    def chain(self, d_in: int, d_out: int) -> Chain:
        """The chain of this structure for a layer of d_in inputs and d_out outputs."""

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        """The options worth comparing where nobody asked for any: its defaults, if it has them."""
        return (cls(),) if all(f.default is not MISSING for f in fields(cls)) else ()  # type: ignore[arg-type]

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        """Members of many costs for a layer of this size; by default the default candidates."""
        yield from cls.default_candidates()

    def __str__(self) -> str:
        """The text that `parse` reads back; options at their defaults are left out."""
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)
        return f"{self.name}({options})" if options else self.name


S = TypeVar("S", bound=Structure)


@dataclass_transform(frozen_default=True)
def structure(cls: type[S]) -> type[S]:
    """Class decorator: make a frozen dataclass of a Structure and enter it into the registry."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    if (known := _REGISTRY.get(name)) and known.__qualname__ + known.__module__ != cls.__qualname__ + cls.__module__:
        raise StructureError(f"a structure named {name!r} exists already: {known.__module__}.{known.__qualname__}")
    cls.name = name
    made = dataclass(frozen=True)(cls)
    _REGISTRY[name] = made
    return made


def structures() -> dict[str, type[Structure]]:
    """Every known structure by name."""
    return dict(_REGISTRY)


def parse(text: str) -> Structure:
    """Read a structure from its text form.

    >>> parse("btt(rank=4)")
    BTT(rank=4, cores=2)
    """
    shown = text if isinstance(text, str) and len(text) < 80 else f"{str(text)[:77]}..."
    wanted = f"{shown!r} is not a structure"
    try:
        node = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise StructureError(f"{wanted}: write name or name(option=value, ...), such as 'btt(rank=4)'") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise StructureError(f"{wanted}: write name or name(option=value, ...), such as 'btt(rank=4)'")
    name = call.func.id
    if name not in _REGISTRY:
        raise StructureError(f"{wanted}: there are {', '.join(_REGISTRY)}{_nearest(name, list(_REGISTRY))}")
    cls = _REGISTRY[name]
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for word in call.keywords:
        if word.arg in options:
            raise StructureError(f"{wanted}: {word.arg} is given twice")
        if word.arg not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise StructureError(f"{wanted}: {name} has no option {word.arg!r}; {has}{_nearest(word.arg, known)}")
        try:
            options[word.arg] = ast.literal_eval(word.value)
        except (ValueError, RecursionError):
            raise StructureError(f"{wanted}: the value of {word.arg} must be a plain number or tuple") from None
    try:
        return cls(**options)
    except ButtressError:
        raise
    except TypeError as error:
        raise StructureError(f"{wanted}: {error}") from None


def _nearest(name: str | None, known: list[str]) -> str:
    near = difflib.get_close_matches((name or "").lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def positive(structure: Structure, **options: int | None) -> None:
    """Refuse options that are not integers >= 1."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StructureError(f"{type(structure).__name__}: {name} must be an integer >= 1, got {value!r}")


def split(n: int, parts: int) -> tuple[int, ...]:
    """The most even factors of n, ascending; a size that splits worse than 2:1 is padded first.

    Law: the product is n or the next larger number whose most even factors are within 2:1.

    >>> split(768, 2), split(1024, 3), split(13, 2)
    ((24, 32), (8, 8, 16), (3, 5))
    """
    if not isinstance(n, int) or n < 1:
        raise StructureError(f"a layer needs at least 1 input and 1 output, got a size of {n!r}")
    if not isinstance(parts, int) or parts < 1:
        raise StructureError(f"a size is split into 1 or more parts, got {parts!r}")
    while True:
        even = most_even(n, parts)
        if even[-1] <= MOST_UNEVEN * even[0]:
            return even
        n += 1


@cache
def most_even(n: int, parts: int) -> tuple[int, ...]:
    """The factorisation of n into `parts` factors whose largest and smallest are closest in ratio, ascending."""
    return min(_factorisations(n, parts, 1), key=lambda found: found[-1] / found[0])


def _factorisations(n: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to write n as a product of `parts` ascending factors, none below `least`."""
    if parts == 1:
        yield (n,)
        return
    first = least
    while first**parts <= n:
        if n % first == 0:
            for rest in _factorisations(n // first, parts - 1, first):
                yield (first, *rest)
        first += 1


def bonds(structure: Structure, rank: int | tuple[int, ...], cores: int) -> tuple[int, ...]:
    """The ranks between neighbouring cores: one number for all, or one for each bond."""
    positive(structure, cores=cores)
    if cores < 2:
        raise StructureError(f"{type(structure).__name__}: cores must be an integer >= 2, got {cores}")
    ranks = rank if isinstance(rank, tuple) else (rank,) * (cores - 1)
    for r in ranks:
        positive(structure, rank=r)
    if len(ranks) != cores - 1:
        raise StructureError(
            f"{type(structure).__name__}: {cores} cores have {cores - 1} bonds, "
            f"but rank={rank!r} gives {len(ranks)} ranks: give one number or {cores - 1}"
        )
    return ranks


@dataclass(frozen=True)
class Train:
    """Axes and sizes that Tensor-Train and its block form have in common.

    Core t of c takes input axis j_t and the rank to its right, and makes output axis i_t and the
    rank to its left; the last core acts first. Two cores use the letters of the paper: y = (a, b),
    x = (c, d), rank s.
    """

    names: Axes
    """Names of the cores in order of application."""
    inputs: Axes
    """Input axes j_1 .. j_c, slow to fast."""
    outputs: Axes
    """Output axes i_1 .. i_c."""
    ranks: Axes
    """Rank axes; ranks[t] joins core t + 1 to core t + 2."""
    sizes: dict[str, int]

    @classmethod
    def of(cls, d_in: int, d_out: int, ranks: tuple[int, ...]) -> Train:
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
        """Axes of core t = 1 .. c; `blocks` adds the axes of the other cores that BTT keeps apart."""
        before = self.inputs[: t - 1] if blocks else ()
        after = self.outputs[t:] if blocks else ()
        left, right = self.ranks[t - 2 : t - 1] if t > 1 else (), self.ranks[t - 1 : t]
        made = (self.outputs[t - 1], *left)
        return " ".join((*before, *after, *made, self.inputs[t - 1], *right))

    def factors(self, *, blocks: bool) -> dict[str, str]:
        cores = len(self.names)
        return {name: self.core(cores - k, blocks=blocks) for k, name in enumerate(self.names)}
