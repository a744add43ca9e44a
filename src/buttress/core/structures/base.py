"""The base class of structures, their registry and text form, and how a size is split into axes."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeVar, dataclass_transform

from buttress.core.chain import Chain
from buttress.errors import ButtressError, StructureError
from buttress.suggestions import did_you_mean

REGISTRY: dict[str, type[Structure]] = {}
"""Structure classes by name; use `structures()` to read them."""

MAX_AXIS_RATIO = 2
"""Largest ratio between the axes of one split; a size that splits less evenly is padded."""


class Structure(ABC):
    """A family of matrices; an instance fixes its options (rank, blocks, ...), never its size.

    Subclasses are declared with `@structure`, which turns them into frozen dataclasses and gives them a
    name. The one method to write is `chain`.

    Example::

        @structure
        class Diagonal(Structure):
            def chain(self, d_in, d_out):
                n = max(d_in, d_out)
                return Chain.of(d_in, d_out, x="n", factors={"D": "n"}, y="n", sizes={"n": n})
    """

    name: str
    """Name in texts, derived from the class: `LowRank` is "low_rank"."""

    @abstractmethod
    def chain(self, d_in: int, d_out: int) -> Chain:
        """The chain of this structure for a layer of `d_in` inputs and `d_out` outputs.

        Args:
            d_in: Input features, at least 1.
            d_out: Output features, at least 1.

        Returns:
            The chain. Sizes that do not split are padded, so all sizes are supported.
        """

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        """Structures to compare where the user lists none: by default the one without options, if that is possible."""
        return (cls(),) if all(f.default is not MISSING for f in fields(cls)) else ()  # type: ignore[arg-type]

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        """Structures of this class at many different costs; by default the default candidates.

        Args:
            d_in: Input features.
            d_out: Output features.

        Yields:
            Structures of this class.
        """
        yield from cls.default_candidates()

    def __str__(self) -> str:
        """The text that `parse` reads back; options at their defaults are left out."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed)
        return f"{self.name}({options})" if options else self.name


S = TypeVar("S", bound=Structure)


@dataclass_transform(frozen_default=True)
def structure(cls: type[S]) -> type[S]:
    """Class decorator: turn a Structure into a frozen dataclass and enter it into the registry.

    Args:
        cls: A subclass of `Structure` with a `chain` method.

    Returns:
        The dataclass. Its `name` is the class name in snake case: `LowRank` becomes "low_rank".

    Raises:
        StructureError: If another class has that name.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    if (other := REGISTRY.get(name)) and other.__qualname__ + other.__module__ != cls.__qualname__ + cls.__module__:
        raise StructureError(f"a structure named {name!r} exists already: {other.__module__}.{other.__qualname__}")
    cls.name = name
    REGISTRY[name] = registered = dataclass(frozen=True)(cls)
    return registered


def structures() -> dict[str, type[Structure]]:
    """Every registered structure class by name.

    Returns:
        A new dict; changing it does not change the registry.
    """
    return dict(REGISTRY)


def parse(text: str) -> Structure:
    """Read a structure from its text form, the inverse of `str(structure)`.

    The text is only parsed, never evaluated.

    Args:
        text: A name, or a name with options: "btt" or "btt(rank=4)".

    Returns:
        The structure.

    Raises:
        StructureError: If the text names no structure or option, or if an option has an impossible value.

    Example:
        >>> parse("btt(rank=4)")
        BTT(rank=4, cores=2)
    """
    shown = text if isinstance(text, str) and len(text) < 80 else f"{str(text)[:77]}..."
    problem = f"{shown!r} is not a structure"
    call = _parse_call(text)
    if call is None:
        raise StructureError(f"{problem}: write name or name(option=value, ...), such as 'btt(rank=4)'")
    name, keywords = call
    if name not in REGISTRY:
        hint = did_you_mean(name, REGISTRY, listed=True)
        raise StructureError(f"{problem}: there are {', '.join(REGISTRY)}{hint}")
    cls = REGISTRY[name]
    options = _parse_options(cls, keywords, problem)
    try:
        return cls(**options)
    except ButtressError:
        raise
    except TypeError as error:
        raise StructureError(f"{problem}: {error}") from None


def _parse_call(text: str) -> tuple[str, list[ast.keyword]] | None:
    """The name and the keyword options of a text, or None where it is not `name` or `name(option=value)`."""
    try:
        node = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        return None
    return call.func.id, call.keywords


def _parse_options(cls: type[Structure], keywords: list[ast.keyword], problem: str) -> dict[str, Any]:
    """The values of a structure's options, as literals; `problem` is the start of error messages."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg in options:
            raise StructureError(f"{problem}: {keyword.arg} is given twice")
        if keyword.arg is None or keyword.arg not in names:
            exist = f"its options are {', '.join(names)}" if names else "it has no options"
            hint = did_you_mean(keyword.arg or "", names, listed=True)
            raise StructureError(f"{problem}: {cls.name} has no option {keyword.arg!r}; {exist}{hint}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, RecursionError):
            raise StructureError(f"{problem}: the value of {keyword.arg} must be a plain number or tuple") from None
    return options


def positive(structure: Structure, **options: int | None) -> None:
    """Check that options are integers >= 1.

    Args:
        structure: The structure, named in the error.
        **options: Values by option name.

    Raises:
        StructureError: If one is not an integer >= 1.
    """
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StructureError(f"{type(structure).__name__}: {name} must be an integer >= 1, got {value!r}")


def split(n: int, parts: int) -> tuple[int, ...]:
    """The most even factors of n, ascending; a size whose factors are less even than 2:1 is padded.

    The factors multiply to n, or to the next larger number whose most even factors are within 2:1.

    Args:
        n: The size to split, at least 1.
        parts: The number of factors, at least 1.

    Returns:
        `parts` factors, ascending.

    Raises:
        StructureError: If `n` or `parts` is not an integer >= 1.

    Example:
        >>> split(768, 2), split(1024, 3), split(13, 2)
        ((24, 32), (8, 8, 16), (3, 5))
    """
    if not isinstance(n, int) or n < 1:
        raise StructureError(f"a layer needs at least 1 input and 1 output, got a size of {n!r}")
    if not isinstance(parts, int) or parts < 1:
        raise StructureError(f"a size is split into 1 or more parts, got {parts!r}")
    while True:
        factors = most_even(n, parts)
        if factors[-1] <= MAX_AXIS_RATIO * factors[0]:
            return factors
        n += 1


def block_counts(d_in: int, d_out: int) -> Iterator[int]:
    """Numbers of blocks worth comparing for a layer of this size, descending.

    Args:
        d_in: Input features.
        d_out: Output features.

    Yields:
        Numbers of at least 2 and at most the smaller side.
    """
    yield from (n for n in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2) if n <= min(d_in, d_out))


@cache
def most_even(n: int, parts: int) -> tuple[int, ...]:
    """The factorization of n into `parts` factors whose largest and smallest are closest in ratio, ascending."""
    return min(_factorizations(n, parts, 1), key=lambda factors: factors[-1] / factors[0])


def _factorizations(n: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every factorization of n into `parts` ascending factors, none below `least`."""
    if parts == 1:
        yield (n,)
        return
    first = least
    while first**parts <= n:
        if n % first == 0:
            for rest in _factorizations(n // first, parts - 1, first):
                yield (first, *rest)
        first += 1
