"""Modules that share their weights: which they are, and what transformers is told about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from buttress.inspection.sites import unique
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.structured import Structured

T = TypeVar("T")


def leaders(model: nn.Module) -> dict[str, str]:
    """For each structured module that shares its factors with an earlier one: the name of the one that leads.

    That is an embedding where there is one, because its rows, not the head's features, have a size of their own.
    """
    found = {name: m for name, m in unique(model) if isinstance(m, Structured)}
    keys = {name: tuple(map(id, m.factors.values())) for name, m in found.items()}
    return followers(keys, (name for name, m in found.items() if isinstance(m, StructuredEmbedding)))


def followers(keys: Mapping[str, T], first: Iterable[str]) -> dict[str, str]:
    """Names whose key another name has, too, mapped to that name: one of `first` if possible, else the earliest."""
    groups: dict[T, list[str]] = {}
    for name in (*first, *keys):
        group = groups.setdefault(keys[name], [])
        if name not in group:
            group.append(name)
    return {name: group[0] for group in groups.values() for name in group[1:]}


def declare(model: nn.Module) -> None:
    """Tell the models of transformers in here which of their parameters are tied now; others are left alone.

    They keep pairs by name, which say what is saved once and shared again after loading.
    """
    for module in model.modules():
        expanded: Any = getattr(module, "get_expanded_tied_weights_keys", None)
        known = getattr(type(module), "_tied_weights_keys", None)
        if expanded is None or not isinstance(known, dict | None):
            continue
        pairs = _left(known or {}, dict(module.named_parameters(remove_duplicate=False)))
        for name, leader in leaders(module).items():
            parts = ("factors", "gains") if module.get_submodule(name).gains else ("factors",)
            pairs |= {f"{name}.{part}.": f"{leader}.{part}." for part in parts}
        if pairs != (module._tied_weights_keys or {}):
            vars(module)["_tied_weights_keys"] = pairs
            vars(module)["all_tied_weights_keys"] = expanded(all_submodels=True)


def _left(pairs: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The pairs of names that still stand for one parameter."""

    def hold(second: str, first: str) -> bool:
        # transformers reads names as regular expressions for how parameters begin.
        if not all(any(re.match(name, n) for n in parameters) for name in (second, first)):
            return False
        one, other = parameters.get(second), parameters.get(first)
        # On the meta device nothing is tied yet: a model is tied once it is loaded.
        return one is other or one is None or other is None or one.is_meta

    return {second: first for second, first in pairs.items() if hold(second, first)}


def declared(model: nn.Module) -> bool:
    """Whether a model of transformers in here has tied parameters left."""
    return any(getattr(module, "_tied_weights_keys", None) for module in model.modules())
