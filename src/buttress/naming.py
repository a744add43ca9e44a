"""Finding things in a model by name: canonical names, globs, and what sizes a module has."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
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
        _walk(child, name if wrapped else f"{name}.{key}" if name else key, found)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under each of its names; one that is tied has several."""
    return {
        f"{name}.{key}" if name else key: parameter
        for name, module in modules(model)
        for key, parameter in module.named_parameters(recurse=False)
    }


def first_match(rules: Mapping[str, T], names: Iterable[str]) -> tuple[dict[str, T], list[str]]:
    """Value of the first glob that matches each name, and the globs that match no name at all."""
    known = list(names)
    chosen = {}
    for name in known:
        for glob, value in rules.items():
            if fnmatchcase(name, glob):
                chosen[name] = value
                break
    unused = [glob for glob in rules if not any(fnmatchcase(name, glob) for name in known)]
    return chosen, unused


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
