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


def canonical(name: str) -> str:
    """A name without the levels that torch.compile, FSDP and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its canonical names, the inner module where one wraps another."""
    root = "module." if isinstance(model, nn.parallel.DistributedDataParallel) else ""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[canonical(name.removeprefix(root))] = module
    yield from found.items()


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
