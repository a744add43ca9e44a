"""Conventions by which models name parameters that are not to be decayed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from buttress.inspection.names import join, modules


def undecayed_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The parameters that a model declares as not to be decayed.

    Two conventions are respected: the methods `no_weight_decay` (names) and `no_weight_decay_keywords` (parts of
    names) of timm's and other vision models, and the attribute `_no_weight_decay` of parameters, as in state space
    models.

    Args:
        model: The model. Its submodules may have the methods too, with names relative to them.
        parameters: Its parameters by name.

    Returns:
        The reason by parameter name.
    """
    reasons = {
        name: "not decayed: marked _no_weight_decay"
        for name, parameter in parameters.items()
        if getattr(parameter, "_no_weight_decay", False)
    }
    for prefix, module in modules(model):
        declared = {join(prefix, name) for name in _declared(module, "no_weight_decay")}
        keywords = _declared(module, "no_weight_decay_keywords")
        for name in parameters if declared or keywords else ():
            inside = name.removeprefix(f"{prefix}.") if prefix else name
            is_inside = not prefix or inside != name
            # The name of a module stands for all its parameters.
            if declared & _name_and_parents(name) or (is_inside and any(keyword in inside for keyword in keywords)):
                reasons.setdefault(name, f"not decayed: {type(module).__name__}.no_weight_decay names it")
    return reasons


def _name_and_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def _declared(module: nn.Module, method: str) -> set[str]:
    declare = getattr(type(module), method, None)
    return set(declare(module)) if callable(declare) else set()
