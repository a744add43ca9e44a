"""Modules that share their weights, and how they are declared to transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from buttress.inspection.names import unique_modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.structured import Structured

T = TypeVar("T")


def tied_modules(model: nn.Module) -> dict[str, str]:
    """Structured modules that share their factors: followers, each with its leader.

    The leader is an embedding if there is one, because its rows have a standard deviation that a head does not store.

    Args:
        model: The model.

    Returns:
        Names of the followers, each with the name of its leader.
    """
    structured = {name: m for name, m in unique_modules(model) if isinstance(m, Structured)}
    factor_ids = {name: tuple(map(id, m.factors.values())) for name, m in structured.items()}
    embeddings = (name for name, m in structured.items() if isinstance(m, StructuredEmbedding))
    return followers_by_key(factor_ids, embeddings)


def followers_by_key(keys: Mapping[str, T], preferred: Iterable[str]) -> dict[str, str]:
    """Group names by key: followers, each with the leader of its group.

    Args:
        keys: The key of every name.
        preferred: Names that lead the others with the same key; otherwise the first name leads.

    Returns:
        Names of the followers, each with the name of its leader.

    Example:
        >>> followers_by_key({"head": 1, "embed": 1, "mix": 2}, ["embed"])
        {'head': 'embed'}
    """
    groups: dict[T, list[str]] = {}
    for name in (*preferred, *keys):
        group = groups.setdefault(keys[name], [])
        if name not in group:
            group.append(name)
    return {name: group[0] for group in groups.values() for name in group[1:]}


def declare_tied_weights(model: nn.Module) -> None:
    """Update the declarations of tied parameters in transformers models; other models stay as they are.

    Each transformers model inside `model` declares pairs of names. Such a pair is saved once and tied again after
    loading.

    Args:
        model: The model.
    """
    for module in model.modules():
        expanded: Any = getattr(module, "get_expanded_tied_weights_keys", None)
        class_pairs = getattr(type(module), "_tied_weights_keys", None)
        if expanded is None or not isinstance(class_pairs, dict | None):
            continue
        pairs = _still_tied(class_pairs or {}, dict(module.named_parameters(remove_duplicate=False)))
        for name, leader in tied_modules(module).items():
            parts = ("factors", "gains") if module.get_submodule(name).gains else ("factors",)
            pairs |= {f"{name}.{part}.": f"{leader}.{part}." for part in parts}
        if pairs != (module._tied_weights_keys or {}):
            vars(module)["_tied_weights_keys"] = pairs
            vars(module)["all_tied_weights_keys"] = expanded(all_submodels=True)


def _still_tied(pairs: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The pairs whose two names still refer to one parameter."""

    def tied(second: str, first: str) -> bool:
        # transformers treats these names as regular expressions for the start of a parameter's name.
        if not all(any(re.match(name, n) for n in parameters) for name in (second, first)):
            return False
        one, other = parameters.get(second), parameters.get(first)
        # On the meta device nothing is tied yet: a model is tied once it is loaded.
        return one is other or one is None or other is None or one.is_meta

    return {second: first for second, first in pairs.items() if tied(second, first)}


def declares_tied_weights(model: nn.Module) -> bool:
    """Whether any transformers model inside `model` declares tied parameters."""
    return any(getattr(module, "_tied_weights_keys", None) for module in model.modules())
