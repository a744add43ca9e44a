"""An optimizer whose parameters are replaced by larger ones in mid-training: state, groups and learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from buttress.core.chain_sum import AnyChain
from buttress.core.growth import FactorGrowth
from buttress.errors import PlanError
from buttress.ops.enlarging import with_means, with_zeros
from buttress.optim.facts import ParameterFacts
from buttress.optim.rates import kappa

SUMS = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
"""State that averages gradients: zero for new entries, which have had none."""
SIZES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum", "acc_delta"})
"""State by whose size updates are divided, or which has their size: for new entries the mean of the old ones along the
bond. With zeros and the step count of the old entries, the bias correction of Adam would be too small, and the first
updates of new entries several times too large."""
RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})
"""Keys of a group that are learning rates, here and in schedulers."""
PER_PARAMETER = frozenset({"layers", "param_names"})
"""Keys of a group with one value per parameter: the layers of `param_groups`, and torch's names."""
SCHEDULED_RATES = frozenset({"base_lrs", "max_lrs", "min_lrs", "_last_lr"})
"""Attributes of torch's schedulers with one rate per group."""
SCHEDULED_OPTIONS = frozenset({"lr_lambdas", "base_momentums", "max_momentums"})
"""Other attributes of torch's schedulers with one value per group."""


@dataclass(frozen=True)
class GrowingParameter:
    """A factor that is replaced by a larger one.

    Attributes:
        name: Its name in the model.
        old: The parameter before.
        growth: How the factor grows.
        facts: Facts about it, before.
        chain: The chain that it belongs to afterwards.
    """

    name: str
    old: nn.Parameter
    growth: FactorGrowth
    facts: ParameterFacts
    chain: AnyChain

    def rate_ratio(self, group: Mapping[str, Any]) -> float:
        """The new learning rate over the old one; 1 in a group that `param_groups` did not build with such rates."""
        if not {"lr_multiplier", "rule"} <= group.keys() or not group.get("structure_aware", True):
            return 1.0
        assert self.facts.chain is not None
        rule = group["rule"]
        return kappa(self.facts, self.chain, rule)[0] / kappa(self.facts, self.facts.chain, rule)[0]


def check_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, growing: Sequence[GrowingParameter]
) -> None:
    """Check that an optimizer and its scheduler can follow their parameters.

    Args:
        optimizer: The optimizer.
        scheduler: Its scheduler, or None.
        growing: The factors that are to grow.

    Raises:
        PlanError: If a trainable factor is not one of its parameters, its state cannot be enlarged, or its rates
            change below a scheduler that is not given or unknown.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    _check_no_other_references(optimizer, growing)
    for g in growing:
        if g.old.requires_grad and id(g.old) not in groups:
            raise PlanError(f"the optimizer does not have {g.name}: give the optimizer that trains the model")
        for slot, value in optimizer.state.get(g.old, {}).items():
            _check_slot(optimizer, g, slot, value)
    rates_change = any(g.rate_ratio(groups[id(g.old)]) != 1 for g in growing if id(g.old) in groups)
    if rates_change and scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        raise PlanError("learning rates change, and a scheduler would set the old ones again: give scheduler=, too")
    for part in _parts(scheduler):
        if type(part).__module__ != "torch.optim.lr_scheduler" or part.optimizer is not optimizer:
            raise PlanError(
                f"{type(part).__name__} is not a scheduler of torch for this optimizer: create it afterwards"
            )


def _check_no_other_references(optimizer: torch.optim.Optimizer, growing: Sequence[GrowingParameter]) -> None:
    """Raise for an optimizer that has the parameters outside of its groups, too, such as LBFGS."""
    old = {id(g.old) for g in growing}
    for name, value in vars(optimizer).items():
        if name != "param_groups" and isinstance(value, list | tuple) and old & set(map(id, value)):
            raise PlanError(
                f"{type(optimizer).__name__} keeps its parameters in {name!r}, too, so they cannot be enlarged: grow "
                "without optimizer=, and create the optimizer again"
            )


def _check_slot(optimizer: torch.optim.Optimizer, growing: GrowingParameter, slot: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        known = value is None or isinstance(value, int | float)
    else:
        known = value.dim() == 0 or (value.shape == growing.old.shape and slot in SUMS | SIZES)
    if not known:
        raise PlanError(
            f"the state {slot!r} of {type(optimizer).__name__} for {growing.name} cannot be enlarged: grow without "
            "optimizer=, and create the optimizer again"
        )


@torch.no_grad()
def grow_optimizer_(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    growing: Sequence[GrowingParameter],
    new: Mapping[str, nn.Parameter],
    order: Iterable[nn.Parameter],
) -> None:
    """Put larger parameters into an optimizer, with their state and learning rates, after `check_optimizer`.

    The groups afterwards are those of `param_groups` for the new model, in the same order, so that the state can be
    saved and loaded. Groups that do not come from `param_groups` keep their rates.

    Args:
        optimizer: The optimizer.
        scheduler: Its scheduler, or None.
        growing: The factors that grew.
        new: Their new parameters by name.
        order: Every parameter of the new model, in its order.
    """
    for g in growing:
        if (state := optimizer.state.pop(g.old, None)) is not None:
            optimizer.state[new[g.name]] = {slot: _grown_slot(g, slot, value) for slot, value in state.items()}
    exchanges = {id(g.old): (new[g.name], g) for g in growing}
    members = [
        _Member(index, place, *exchanges.get(id(p), (p, None)))
        for index, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    ]
    if any(m.ratio(optimizer.param_groups) != 1 for m in members):
        _regroup(optimizer, scheduler, members, order)
    else:
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [m.parameter for m in members if m.group == index]


@dataclass(frozen=True)
class _Member:
    """A parameter of an optimizer, the number of its group, its place in there, and how it grew."""

    group: int
    place: int
    parameter: nn.Parameter
    grown: GrowingParameter | None

    def ratio(self, groups: Sequence[Mapping[str, Any]]) -> float:
        return 1.0 if self.grown is None else self.grown.rate_ratio(groups[self.group])


def _grown_slot(growing: GrowingParameter, slot: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return with_means(growing.growth, value) if slot in SIZES else with_zeros(growing.growth, value)


def _regroup(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    members: Iterable[_Member],
    order: Iterable[nn.Parameter],
) -> None:
    """Group parameters again: one group per distinct rate and options, in the order of the model."""
    old_groups = list(optimizer.param_groups)
    positions: dict[int, int] = {}
    for i, p in enumerate(order):
        positions.setdefault(id(p), i)  # a tied parameter is where it appears first
    groups: list[dict[str, Any]] = []
    sources: list[tuple[int, float]] = []
    for m in sorted(members, key=lambda m: positions.get(id(m.parameter), len(positions))):
        ratio = m.ratio(old_groups)
        options = _scaled_options(old_groups[m.group], ratio)
        lists = {key for key in PER_PARAMETER if old_groups[m.group].get(key)}
        group = next((g for g in groups if _same_options(g, options) and lists <= g.keys()), None)
        if group is None:
            group = options | {key: [] for key in ("params", *sorted(lists))}
            groups.append(group)
            sources.append((m.group, ratio))
        group["params"].append(m.parameter)
        for key in lists:
            group[key].append(old_groups[m.group][key][m.place])
    optimizer.param_groups[:] = groups  # in place: others hold the list
    for part in _parts(scheduler):
        _regroup_scheduler(part, sources)


def _scaled_options(group: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params" and not (key in PER_PARAMETER and value)}
    if ratio == 1:
        return options
    scaled = {key: ratio * value for key, value in options.items() if key in RATES and value is not None}
    return options | scaled | {"lr_multiplier": float(f"{ratio * group['lr_multiplier']:.14g}")}


def _same_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether two groups differ in their parameters alone; equal rates may differ by rounding."""

    def same(key: str) -> bool:
        a, b = group[key], options[key]
        if isinstance(a, Tensor) or isinstance(b, Tensor) or key in RATES or key == "lr_multiplier":
            return a is b or (None not in (a, b) and isclose(float(a), float(b), rel_tol=1e-6))
        return bool(a == b)

    own = {key for key, value in group.items() if key != "params" and not (key in PER_PARAMETER and value)}
    return own == options.keys() and all(map(same, options))


def _parts(scheduler: Any) -> list[Any]:
    """A scheduler with those that it consists of."""
    if scheduler is None:
        return []
    return [scheduler, *(p for part in getattr(scheduler, "_schedulers", ()) for p in _parts(part))]


def _regroup_scheduler(scheduler: Any, sources: Sequence[tuple[int, float]]) -> None:
    """Give a scheduler the values of the new groups, each from an old group and scaled if it is a rate."""
    for name, values in vars(scheduler).items():
        if name in SCHEDULED_RATES:
            setattr(scheduler, name, [values[i] * ratio for i, ratio in sources])
        elif name in SCHEDULED_OPTIONS:
            setattr(scheduler, name, [values[i] for i, _ in sources])
