"""What a recipe is, and the registry of recipes."""

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

    @property
    def summary(self) -> str:
        return self.text.split("\n")[0]

    @property
    def text(self) -> str:
        return inspect.getdoc(self.make) or ""

    def runs(self) -> list[Run]:
        """Its runs, each once."""
        return list(dict.fromkeys(self.make()))


def recipe(make: Callable[[], Iterable[Run]]) -> Callable[[], Iterable[Run]]:
    """Decorator: enter a function that returns runs into the registry, under its name."""
    name = make.__name__.replace("_", "-")
    _REGISTRY[name] = Recipe(name, make)
    return make


def recipes() -> dict[str, Recipe]:
    """Every known recipe by name."""
    return dict(_REGISTRY)


def find(name: str) -> Recipe:
    """A recipe by name, or an error that says which name is nearest."""
    if name not in _REGISTRY:
        raise ConfigError(f"no recipe is called {name!r}{did_you_mean(name, _REGISTRY)}")
    return _REGISTRY[name]
