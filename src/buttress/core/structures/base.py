"""The base class of structures, their registry, their text form and their bounds."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar, dataclass_transform

from buttress.core.chain import Chain
from buttress.core.chain_sum import AnyChain, ChainSum
from buttress.core.structures.sizes import MAX_SIZE, check_size
from buttress.errors import StructureError, quoted
from buttress.suggestions import did_you_mean

REGISTRY: dict[str, type[Structure]] = {}
"""Structure classes by name; use `structures()` to read them."""
MAX_TEXT = 4096
"""Longest text of a structure, in characters."""

MAX_DENSE_MULTIPLE, FREE_PARAMETERS = 16, 65_536
"""A structured layer has at most this multiple of the parameters of a dense one, and this many more: small layers
may be padded or tested at ranks that add nothing, and no text can ask for more memory than its layer suggests."""


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
    takes_parts: ClassVar[bool] = False
    """Whether the structure is composed of others, its positional arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "chain" in vars(cls):
            cls.chain = _bounded(cls.chain)  # type: ignore[assignment, method-assign]

    @abstractmethod
    def chain(self, d_in: int, d_out: int) -> AnyChain:
        """The chain of this structure for a layer of `d_in` inputs and `d_out` outputs.

        Args:
            d_in: Input features, at least 1.
            d_out: Output features, at least 1.

        Returns:
            The chain, or the sum of chains. Sizes that do not split are padded, so all sizes are supported.

        Raises:
            StructureError: If a size is below 1 or beyond any memory, if the layer would have many times the
                parameters of a dense one, or if the class is not declared with `@structure` or returns no chain. This
                holds for every subclass: its method is wrapped.
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


ChainMethod = Callable[[Any, int, int], AnyChain]


def _bounded(method: ChainMethod) -> ChainMethod:
    """The `chain` method of a structure with its sizes checked before, and its result after; nothing is allocated."""

    @wraps(method)
    def chain(self: Structure, d_in: int, d_out: int) -> AnyChain:
        _check_declared(type(self))
        check_size(d_in)
        check_size(d_out)
        result = method(self, d_in, d_out)
        if not isinstance(result, Chain | ChainSum):
            raise StructureError(
                f"the chain method of {type(self).__name__} must return a Chain, such as Chain.of(...), got "
                f"{quoted(result)}"
            )
        if result.params > MAX_DENSE_MULTIPLE * d_in * d_out + FREE_PARAMETERS:
            raise _too_many_parameters(self, result)
        return result

    return chain


def _check_declared(cls: type[Structure]) -> None:
    """Raise for a class without a text form of its own: its layers could be neither printed nor saved in a plan."""
    if not {"name", "__dataclass_fields__"} <= vars(cls).keys():
        raise StructureError(f"{cls.__name__} is not declared as a structure: write @bt.structure above its class")


def _too_many_parameters(structure: Structure, chain: AnyChain) -> StructureError:
    ranks = [n for part in chain.parts for axis, n in part.sufficient_ranks.items() if part.sizes[axis] > n]
    remedy = f"a rank of {max(ranks):,} represents any matrix" if ranks else "use smaller options"
    return StructureError(
        f"{quoted(structure)} gives a {chain.d_out} × {chain.d_in} layer {chain.params:,} parameters, and a dense "
        f"layer has {chain.d_in * chain.d_out:,}: {remedy}"
    )


S = TypeVar("S", bound=Structure)


@dataclass_transform(frozen_default=True)
def structure(cls: type[S]) -> type[S]:
    """Class decorator: turn a Structure into a frozen dataclass and enter it into the registry.

    Args:
        cls: A subclass of `Structure` with a `chain` method.

    Returns:
        The dataclass. Its `name` is the class name in snake case: `LowRank` becomes "low_rank".

    Raises:
        StructureError: If it is not a subclass of `Structure` with a `chain` method, or another class has that name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Structure)):
        called = getattr(cls, "__name__", "MyStructure")
        raise StructureError(f"@structure takes a subclass of Structure, got {quoted(cls)}: write {called}(Structure)")
    if cls.__abstractmethods__:
        raise StructureError(f"{cls.__name__} lacks what every structure needs: {', '.join(cls.__abstractmethods__)}")
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


def parse(text: str | Structure) -> Structure:
    """Read a structure from its text form, the inverse of `str(structure)`.

    The text is only parsed, never evaluated.

    Args:
        text: A name, or a name with options or parts: "btt", "btt(rank=4)" or "sum(low_rank(rank=8), btt)". A
            Structure is returned as it is.

    Returns:
        The structure.

    Raises:
        StructureError: If the text names no structure or option, or if an option has an impossible value.

    Example:
        >>> parse("btt(rank=4)")
        BTT(rank=4, cores=2, split='even')
    """
    if isinstance(text, Structure):
        return text
    problem = f"{quoted(text, 80)} is not a structure"
    if not isinstance(text, str):
        remedy = class_hint(text) or ": give a Structure such as BTT(rank=4), or its text"
        raise StructureError(f"{problem}{remedy}")
    if len(text) > MAX_TEXT:
        raise StructureError(f"{problem}: a text of at most {MAX_TEXT} characters is needed")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        return _built(node, problem)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, StructureError):
            raise
        raise _not_a_call(problem) from None


def class_hint(value: object) -> str:
    """The end of an error message about a value that is not a Structure: what to write instead of a class of them.

    Args:
        value: What was given as a structure.

    Returns:
        A clause; an empty text for anything but a structure class.
    """
    if isinstance(value, type) and issubclass(value, Structure):
        return f"; that is the class: write {value.__name__}(...) for a structure"
    return ""


def _built(node: ast.expr, problem: str) -> Structure:
    """The structure that a syntax tree stands for; `problem` is the start of error messages."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _not_a_call(problem)
    name = call.func.id
    if name not in REGISTRY:
        hint = did_you_mean(name, REGISTRY, listed=True)
        raise StructureError(f"{problem}: there are {', '.join(REGISTRY)}{hint}")
    cls = REGISTRY[name]
    if call.args and not cls.takes_parts:
        raise _not_a_call(problem)
    parts = [_built(part, problem) for part in call.args]
    options = _parse_options(cls, call.keywords, problem)
    try:
        return cls(*parts, **options)
    except StructureError:
        raise
    except Exception as error:  # of any class, since structures are also declared elsewhere
        raise StructureError(f"{problem}: {quoted(str(error), 200)}") from error


def _not_a_call(problem: str) -> StructureError:
    return StructureError(f"{problem}: write name or name(option=value, ...), such as 'btt(rank=4)'")


def _parse_options(cls: type[Structure], keywords: list[ast.keyword], problem: str) -> dict[str, Any]:
    """The values of a structure's options, as literals; `problem` is the start of error messages."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg in options:
            raise StructureError(f"{problem}: {quoted(keyword.arg)} is given twice")
        if keyword.arg is None or keyword.arg not in names:
            exist = f"its options are {', '.join(names)}" if names else "it has no options"
            hint = did_you_mean(keyword.arg or "", names, listed=True)
            raise StructureError(f"{problem}: {cls.name} has no option {quoted(keyword.arg)}; {exist}{hint}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise StructureError(
                f"{problem}: the value of {keyword.arg} must be a plain number, a tuple or a word in quotes"
            ) from None
    return options


def positive(structure: Structure, **options: int | None) -> None:
    """Check that options are integers >= 1, and not beyond any size.

    Args:
        structure: The structure, named in the error.
        **options: Values by option name.

    Raises:
        StructureError: If one is not an integer between 1 and `MAX_SIZE`.
    """
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StructureError(f"{type(structure).__name__}: {name} must be an integer >= 1, got {quoted(value)}")
        if value > MAX_SIZE:
            raise StructureError(f"{type(structure).__name__}: {name} must be at most 2^40, got {quoted(value)}")


def checked_fraction(structure: Structure, **option: Any) -> float:
    """Check that an option is a number in (0, 1].

    Args:
        structure: The structure, named in the error.
        **option: The value by the option's name.

    Returns:
        The value as a float: numpy's floats have a different repr.

    Raises:
        StructureError: If it is not such a number.
    """
    ((name, value),) = option.items()
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value <= 1:
        raise StructureError(f"{type(structure).__name__}: {name} must be in (0, 1], got {quoted(value)}")
    return float(value)


def block_counts(d_in: int, d_out: int) -> Iterator[int]:
    """Numbers of blocks worth comparing for a layer of this size, descending.

    Args:
        d_in: Input features.
        d_out: Output features.

    Yields:
        Numbers of at least 2 and at most the smaller side.
    """
    yield from (n for n in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2) if n <= min(d_in, d_out))
