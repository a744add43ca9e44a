"""A warning when something gives all groups of `param_groups` one learning rate, which loses the multipliers."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_warned: WeakSet[torch.optim.Optimizer] = WeakSet()


@cache
def watch_optimizers() -> None:
    """Check the groups of every optimizer before each step, from the first call on."""
    register_optimizer_step_pre_hook(_warn_if_flattened)


def _warn_if_flattened(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warn once for an optimizer whose groups have different multipliers and one nonzero rate."""
    if torch.compiler.is_compiling():
        return
    groups = [g for g in optimizer.param_groups if {"lr_multiplier", "rule"} <= g.keys()]  # of param_groups
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
            stacklevel=2,
        )
