"""Warnings before an optimizer's step: parameters that surgery took out of a model, and rates that lose their meaning.

The rates of `param_groups` lose it if all groups get one rate, or if the groups were made for another optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_warned: WeakSet[torch.optim.Optimizer] = WeakSet()
_of_checked_rule: WeakSet[torch.optim.Optimizer] = WeakSet()
_of_checked_parameters: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that were checked since parameters were last taken out of a model."""

_TAKEN_OUT = "_taken_out_by_buttress"
"""Attribute of parameters that surgery took out of a model."""

_RULES = {"Adam": "adam", "AdamW": "adam", "SGD": "sgd", "Lion": "sign", "Muon": "muon"}
"""The rule for which an optimizer's groups should be made, by the name of its class; others are not judged."""


@cache
def watch_optimizers() -> None:
    """Check the groups of every optimizer before each step, from the first call on."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    groups = [g for g in optimizer.param_groups if {"lr_multiplier", "rule"} <= g.keys()]  # of param_groups
    if optimizer not in _of_checked_parameters:
        _of_checked_parameters.add(optimizer)
        _warn_of_parameters_taken_out(optimizer)
    if optimizer not in _of_checked_rule:
        _of_checked_rule.add(optimizer)
        _warn_if_of_another_rule(optimizer, groups)
    _warn_if_flattened(optimizer, groups)


@contextmanager
def noting_what_is_taken_out(model: nn.Module) -> Iterator[None]:
    """Note which parameters a model loses while the block runs: an optimizer that still has them trains nothing.

    Args:
        model: The model.
    """
    watch_optimizers()
    before = list(model.parameters())
    yield
    after = {id(p) for p in model.parameters()}
    for p in before:
        if id(p) not in after:
            setattr(p, _TAKEN_OUT, True)
    _of_checked_parameters.clear()


def _warn_of_parameters_taken_out(optimizer: torch.optim.Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if lost := sum(hasattr(p, _TAKEN_OUT) for p in params):
        warnings.warn(
            f"{lost} of the {len(params)} parameters of this optimizer were taken out of their model when layers were "
            "replaced or grown, and the new ones are not in it: create it afterwards, or pass it to bt.grow_",
            stacklevel=4,
        )


def _warn_if_of_another_rule(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Warn for an optimizer that was given groups with the rates of another one."""
    kind = type(optimizer).__name__
    expected, given = _RULES.get(kind), {g["rule"] for g in groups}
    if all(g["lr_multiplier"] == 1 for g in groups) and expected != "muon":
        return  # the rates of a dense model are the same for all rules
    # Next to the rule "muon", which trains matrices alone, the rest has the rule "adam".
    if expected is None or not given or given == {expected} or (expected == "muon" and "muon" in given):
        return
    made_for = "muon" if "muon" in given else " and ".join(sorted(given))
    warnings.warn(
        f"{kind} steps with groups whose learning rates are for the rule {made_for!r}: make them with "
        f'param_groups(model, lr, rule="{expected}")',
        stacklevel=3,
    )


def _warn_if_flattened(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Warn once for an optimizer whose groups have different multipliers and one nonzero rate."""
    if len({g["lr_multiplier"] for g in groups}) < 2 or optimizer in _warned:
        return
    rates = [g["lr"] for g in groups]
    if any(isinstance(rate, torch.Tensor) for rate in rates):
        return  # to read them would wait for the device
    if len(set(rates)) == 1 and rates[0] != 0:
        _warned.add(optimizer)
        warnings.warn(
            f"every group has the learning rate {rates[0]:.4g}, which loses the multipliers of param_groups: set "
            'group["lr"] = rate * group["lr_multiplier"], and give OneCycleLR, CyclicLR and SWALR one rate per group',
            stacklevel=3,
        )
