"""Names of modules and parameters, and the globs that select them."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import nn

from buttress.suggestions import closest_names

T = TypeVar("T")

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, without the levels that wrappers insert.

    torch.compile, DataParallel, DistributedDataParallel, FSDP and activation checkpointing put a module inside
    another. Both then have the same name, and the inner module is the one yielded.

    Args:
        model: The model, wrapped or not.

    Yields:
        Pairs of a name and a module, parents before their children. The model itself has the empty name.
    """
    by_name: dict[str, nn.Module] = {}
    _collect(model, "", by_name)
    yield from by_name.items()


def _collect(module: nn.Module, name: str, by_name: dict[str, nn.Module]) -> None:
    by_name[name] = module
    for key, child in module._modules.items():
        if child is None:
            continue
        wrapped = key in _WRAPPERS or (key == "module" and isinstance(module, _PARALLEL))
        _collect(child, name if wrapped else join(name, key), by_name)


def unique_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under the first of its names."""
    visited: set[int] = set()
    for name, module in modules(model):
        if id(module) not in visited:
            visited.add(id(module))
            yield name, module


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under each of its names; a tied parameter has several."""
    return {
        join(name, key): parameter
        for name, module in modules(model)
        for key, parameter in module.named_parameters(recurse=False)
    }


def join(name: str, key: str) -> str:
    """Full name of the child or parameter `key` of a module; the model itself has the empty name."""
    return f"{name}.{key}" if name else key


def last_part(name: str) -> str:
    """The last part of a dotted name, which the parent module uses."""
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class GlobMatches(Generic[T]):
    """Which names an ordered mapping of globs selects."""

    values: dict[str, T]
    """For each matched name, the value of the first glob that matches it."""
    unmatched: dict[str, str]
    """For each glob that selects no name, the reason."""


def first_match(rules: Mapping[str, T], names: Iterable[str], *, by_name: Container[str] = ()) -> GlobMatches[T]:
    """Assign to each name the value of the first glob that matches it.

    Args:
        rules: Globs in order of priority, each with a value.
        names: The names to match.
        by_name: Names that only a glob with the same last part matches, with no wildcard in that part.

    Returns:
        The value of each matched name, and a reason for each glob that selects nothing.

    Example:
        >>> first_match({"*.mlp.*": 1, "*": 2}, ["h.0.mlp.fc", "head"]).values
        {'h.0.mlp.fc': 1, 'head': 2}
    """
    every_name = list(names)

    def matches(name: str, glob: str) -> bool:
        return fnmatchcase(name, glob) and (name not in by_name or last_part(name) == last_part(glob))

    values: dict[str, T] = {}
    deciding_glob: dict[str, str] = {}
    for name in every_name:
        for glob, value in rules.items():
            if matches(name, glob):
                values[name], deciding_glob[name] = value, glob
                break
    unmatched = {}
    for glob in rules:
        if glob not in deciding_glob.values():
            earlier = [deciding_glob[name] for name in every_name if matches(name, glob)]
            unmatched[glob] = (
                f"what it matches is taken by {earlier[0]!r} before it" if earlier else suggest(glob, every_name)
            )
    return GlobMatches(values, unmatched)


def suggest(glob: str, names: Iterable[str]) -> str:
    """The names closest to a glob or name that matched nothing, as a clause for an error message."""
    every_name = list(names)
    return closest_names(glob.replace("*", ""), every_name) if every_name else "the model has none"


def conv1d_class() -> type[nn.Module] | None:
    """transformers' Conv1D, a linear layer whose weight is stored as (in, out); None if it was never imported."""
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return None if pytorch_utils is None else pytorch_utils.Conv1D


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer whose weight is stored as (in, out)."""
    conv1d = conv1d_class()
    return conv1d is not None and isinstance(module, conv1d)
