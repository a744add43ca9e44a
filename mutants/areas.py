"""The list of all mutations, by area."""

from __future__ import annotations

from importlib import import_module

from mutants.mutation import Mutation, MutationError

AREAS = (
    "core",
    "ops",
    "kernels",
    "on_chip",
    "optim",
    "nn",
    "surgery",
    "fusing",
    "readers",
    "growing",
    "projection",
    "compression",
    "costs",
    "training",
    "analysis",
    "files",
    "serving",
)
"""The modules with the mutations of each area."""


def mutations_of(area: str) -> tuple[Mutation, ...]:
    """The mutations of one area."""
    return tuple(import_module(f"mutants.{area}").MUTATIONS)


def by_name(areas: tuple[str, ...] = AREAS) -> dict[str, Mutation]:
    """The mutations of these areas by name.

    Raises:
        MutationError: If two have the same name.
    """
    mutations: dict[str, Mutation] = {}
    for mutation in (m for area in areas for m in mutations_of(area)):
        if mutation.name in mutations:
            raise MutationError(f"two mutations are called {mutation.name!r}")
        mutations[mutation.name] = mutation
    return mutations
