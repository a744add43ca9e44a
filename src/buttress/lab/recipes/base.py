"""The definition of a recipe, and the registry of recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from buttress.lab.runs.config import ConfigError, Run
from buttress.suggestions import did_you_mean

_REGISTRY: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Recipe:
    """A named set of runs."""

    name: str
    make: Callable[[], Iterable[Run]]
    """Returns the runs; its docstring states what they show, what they cost and what to expect."""

    @property
    def summary(self) -> str:
        """The first line of its text."""
        return self.text.split("\n")[0]

    @property
    def text(self) -> str:
        """The docstring."""
        return inspect.getdoc(self.make) or ""

    def runs(self) -> list[Run]:
        """Its runs, without duplicates."""
        return list(dict.fromkeys(self.make()))


def recipe(make: Callable[[], Iterable[Run]]) -> Callable[[], Iterable[Run]]:
    """Decorator that registers a function under its name, with dashes for underscores.

    Example:
        >>> @recipe
        ... def two_widths() -> Iterator[Run]:
        ...     '''Digits at two widths. A few seconds. The wider model errs less.'''
        ...     for width in (32, 64):
        ...         yield Run(width=width)
    """
    name = make.__name__.replace("_", "-")
    _REGISTRY[name] = Recipe(name, make)
    return make


def recipes() -> dict[str, Recipe]:
    """All registered recipes by name."""
    return dict(_REGISTRY)


def find(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        ConfigError: If there is none; the message suggests the nearest name.
    """
    if name not in _REGISTRY:
        raise ConfigError(f"no recipe is called {name!r}{did_you_mean(name, _REGISTRY)}")
    return _REGISTRY[name]
