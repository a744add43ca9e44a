"""Finding things in a model by name: canonical names, globs, and what sizes a module has."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

T = TypeVar("T")

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, without the levels that wrappers insert.

    torch.compile, DistributedDataParallel, FSDP and activation checkpointing put a module inside
    another; both then have one name, and the inner one bears it.
    """
    found: dict[str, nn.Module] = {}
    _walk(model, "", found)
    yield from found.items()


def _walk(module: nn.Module, name: str, found: dict[str, nn.Module]) -> None:
    found[name] = module
    for key, child in module._modules.items():
        if child is None:
            continue
        wrapped = key in _WRAPPERS or (key == "module" and isinstance(module, nn.parallel.DistributedDataParallel))
        _walk(child, name if wrapped else join(name, key), found)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under each of its names; one that is tied has several."""
    return {
        join(name, key): parameter
        for name, module in modules(model)
        for key, parameter in module.named_parameters(recurse=False)
    }


def join(name: str, key: str) -> str:
    """Name of what a module calls `key`; the model itself has the empty name."""
    return f"{name}.{key}" if name else key


def first_match(
    rules: Mapping[str, T], names: Iterable[str], *, by_name: Container[str] = ()
) -> tuple[dict[str, T], dict[str, str]]:
    """Value of the first glob that matches each name, and why each glob that decides nothing does not.

    Names in `by_name` are matched only by globs that end in their last part, letter by letter.
    """
    known = list(names)

    def matches(name: str, glob: str) -> bool:
        return fnmatchcase(name, glob) and (name not in by_name or last_part(name) == last_part(glob))

    chosen: dict[str, T] = {}
    deciding: dict[str, str] = {}
    for name in known:
        for glob, value in rules.items():
            if matches(name, glob):
                chosen[name], deciding[name] = value, glob
                break
    idle = {}
    for glob in rules:
        if glob not in deciding.values():
            taken = [deciding[name] for name in known if matches(name, glob)]
            idle[glob] = f"what it matches is taken by {taken[0]!r} before it" if taken else suggest(glob, known)
    return chosen, idle


def last_part(name: str) -> str:
    """What a module is called by the one that holds it."""
    return name.rpartition(".")[2]


def suggest(glob: str, names: Iterable[str], most: int = 8) -> str:
    """The names nearest to a glob that matched nothing, for an error message."""
    known = list(names)
    if not known:
        return "the model has none"
    near = difflib.get_close_matches(glob.replace("*", ""), known, n=3, cutoff=0.5)
    shown = near or known[:most]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"{'the nearest are' if near else 'there are'} {', '.join(shown)}{more}"


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is stored as (in, out)."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and isinstance(module, home.Conv1D)
