"""The choice of a structure and rank for each layer, so that the model fits a budget with the least loss.

Each layer has a few options, each with a cost and a loss: the fraction of its output's energy that is lost. The sum of
the losses is minimized. On a layer's lower convex hull, the step from one option to the next has a price: loss per
cost. Taking all steps below one common price gives the best plan for its cost (Everett, 1963). Steps are taken in order
of their price while they fit, so only the last step can leave a little of the budget unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ops
from buttress.compression.distillation import distance_for
from buttress.compression.projection_store import ProjectionStore
from buttress.compression.running import call, evaluating
from buttress.core.structures import Structure, parse, structures
from buttress.errors import PlanError, StructureError
from buttress.inspection.hooks import removing
from buttress.inspection.sites import Site
from buttress.projection.closed_form import Draft, Projection, Target, draft, finished, refined
from buttress.surgery import Plan, PlanEntry, chosen_layers
from buttress.text_table import render, show

CostMeasure = Literal["macs", "params"]
CostFunction = Callable[[Structure | None, int, int], float]
"""The cost of a structure, or of nn.Linear for None, from d_in inputs to d_out outputs."""
Candidate = Structure | type[Structure] | str

DENSE = "dense"
"""Value of `Choice.structure` for a layer that stays as it is."""
COMPARING_SWEEPS = 2
"""Sweeps of alternating least squares while options are compared; the chosen one can be refined further."""
TYPICAL_LOSS = 0.05
"""The effect of a layer's loss on the model's output is measured with the option whose loss is nearest to this one."""


@dataclass(frozen=True)
class Choice:
    """One option for one layer, with its cost and its loss."""

    name: str
    """Name of the layer."""
    structure: str
    """The structure as text; "dense" if the layer stays as it is."""
    cost_before: float
    """Cost of the dense layer."""
    cost_after: float
    """Cost with this structure."""
    loss: float
    """Fraction of the output's energy that is lost, the square of the relative error; `curves` may scale it."""
    replacement: Structure | None = field(default=None, repr=False, compare=False)
    """The structure itself, None for dense. Default: parsed from the text."""

    def __post_init__(self) -> None:
        if self.structure == DENSE:
            object.__setattr__(self, "replacement", None)
        elif self.replacement is None:
            object.__setattr__(self, "replacement", parse(self.structure))


@dataclass(frozen=True)
class Budget:
    """A plan that fits a budget, with the cost and the loss of each layer. `str` gives a table."""

    plan: Plan
    """The plan for the layers that do not stay dense."""
    rows: tuple[Choice, ...]
    """The choice for every layer, those that stay dense included."""

    @property
    def kept(self) -> float:
        """The fraction of the cost that is left."""
        return sum(r.cost_after for r in self.rows) / sum(r.cost_before for r in self.rows)

    def __str__(self) -> str:
        sums = [show(sum(getattr(r, n) for r in self.rows)) for n in ("cost_before", "cost_after", "loss")]
        return render(self.rows, total=[f"{len(self.rows)} layers", f"keeps {self.kept:.1%}", *sums])


def curves(
    model: nn.Module,
    *,
    candidates: Iterable[Candidate] | None = None,
    moments: Mapping[str, Tensor] | None = None,
    cost: CostMeasure | CostFunction = "macs",
    layers: Mapping[str, bool] | None = None,
    levels: int = 10,
    batches: Sequence[Any] = (),
    watch: Callable[[str, int, int], None] | None = None,
    projections: ProjectionStore | None = None,
) -> dict[str, list[Choice]]:
    """Compute the cost and the loss of every option for each layer, from which `budget` chooses.

    Every option is projected, with two sweeps if the layer's moments are given.

    Args:
        model: The model. It is not changed.
        candidates: Structures, their texts, or structure classes, which stand for their whole families.
            Default: all families without sharing.
        moments: Second moments of layers' inputs, from `moments()`. With them, losses are those of the outputs on real
            inputs.
        cost: "macs", "params", or a function of a structure (None for nn.Linear), d_in and d_out, such as `timed()`.
        layers: Maps globs of layer names to whether they are included; the first match wins. Default: all linear layers
            but the output head.
        levels: Families are thinned to about this number of costs.
        batches: A few batches on which to measure the effect of each layer's loss on the model's output, by the
            distance that `heal` uses. The layer's losses are scaled by it: some layers tolerate more than others.
        watch: Called with a layer's name, its number and the number of layers, before each layer.
        projections: A store for projections, so that those of the chosen plan need not be computed again.

    Returns:
        The options of each layer, by name; the first is to stay dense.

    Raises:
        PlanError: If a glob matches no layer, a layer cannot be replaced, or `cost` is unknown.
        StructureError: If a candidate's text names no structure.

    Example:
        >>> options = bt.curves(model, moments=bt.moments(model, batches))
        >>> plan = bt.budget(options, keep=0.5).plan
    """
    sites = chosen_layers(model, layers)
    price = cost_function(cost)
    families = None if candidates is None else list(candidates)
    options: dict[str, list[Choice]] = {}
    effects: dict[str, float] = {}
    with evaluating(model):
        effect = _OutputEffect(model, batches) if batches else None
        for index, (name, site) in enumerate(sites.items()):
            if watch:
                watch(name, index, len(sites))
            layer = _LayerOptions(site, (moments or {}).get(name), price, projections)
            layer.add(_expanded(families, site, price, levels))
            options[name] = layer.choices
            if effect and layer.typical and not isinstance(site.owner, nn.MultiheadAttention):
                effects[name] = effect.of(site, *layer.typical)
    if not batches:
        return options
    median = sorted(effects.values())[len(effects) // 2] if effects else 1.0
    return {
        name: [replace(c, loss=c.loss * effects.get(name, median)) for c in choices]
        for name, choices in options.items()
    }


def budget(options: Mapping[str, Sequence[Choice]], keep: float) -> Budget:
    """Choose one option for each layer so that the cost fits and the total loss is least.

    Args:
        options: The options of each layer, from `curves`.
        keep: Most of the layers' total cost that may be left, as a fraction.

    Returns:
        The plan, and the choice for every layer.

    Raises:
        PlanError: If `keep` is not above 0 and at most 1, or the cheapest options cost more than that.

    Example:
        >>> options = bt.curves(model, moments=inputs)
        >>> bt.replace_(model, bt.budget(options, 0.5).plan, init="project", moments=inputs)
    """
    check_keep(keep)
    chosen = allocate(options, keep)
    entries = tuple(PlanEntry(n, c.replacement) for n, c in chosen.items() if c.replacement is not None)
    return Budget(Plan(entries), tuple(chosen.values()))


def check_keep(keep: object) -> None:
    """Check that a value can be the fraction of the cost to keep.

    Raises:
        PlanError: If it is not a number above 0 and at most 1.
    """
    if not isinstance(keep, Real) or not 0 < float(keep) <= 1:
        raise PlanError(f"keep is the fraction of the cost to keep, above 0 and at most 1; got {keep!r}")


def cost_function(cost: CostMeasure | CostFunction) -> CostFunction:
    """Turn the name of a cost measure into a function.

    Args:
        cost: "macs", "params", or a function, which is returned as it is.

    Returns:
        The cost as a function of a structure (None for nn.Linear), d_in and d_out.

    Raises:
        PlanError: If it is neither a function nor the name of a measure.
    """
    if callable(cost):
        return cost
    if cost not in ("macs", "params"):
        raise PlanError(f"cost is 'macs', 'params' or a function, got {cost!r}")

    def count(structure: Structure | None, d_in: int, d_out: int) -> float:
        total: int = d_in * d_out if structure is None else getattr(structure.chain(d_in, d_out), cost)
        return total

    return count


def as_family(candidate: Candidate) -> type[Structure] | Structure:
    """A candidate as a structure class, which stands for its whole family, or as a single structure."""
    if isinstance(candidate, str):
        return structures().get(candidate) or parse(candidate)
    return candidate


def _expanded(candidates: Sequence[Candidate] | None, site: Site, price: CostFunction, levels: int) -> list[Structure]:
    """The structures that candidates stand for at a layer's sizes."""
    linear = site.read()
    sizes = linear.in_features, linear.out_features
    if candidates is None:
        candidates = [
            cls
            for cls in structures().values()
            if (members := cls.default_candidates()) and not members[0].chain(*sizes).shares_parameters
        ]
    expanded: list[Structure] = []
    for family in map(as_family, candidates):
        if isinstance(family, type):
            costs = {member: price(member, *sizes) for member in family.family(*sizes)}
            expanded += _thinned(costs, price(None, *sizes), levels)
        else:
            expanded.append(family)
    return expanded


def _thinned(costs: Mapping[Structure, float], dense: float, levels: int) -> list[Structure]:
    """The costliest member below each of `levels` equally spaced fractions of the dense cost, without duplicates."""
    ordered = sorted(costs, key=lambda member: costs[member])
    members: dict[Structure, None] = {}
    for level in range(1, levels + 1):
        fits = [m for m in ordered if costs[m] <= dense * level / levels]
        members |= dict.fromkeys(fits[-1:])
    return list(members)


class _LayerOptions:
    """The options of one layer: to stay dense, and structures that cost less."""

    def __init__(
        self, site: Site, moments: Tensor | None, price: CostFunction, projections: ProjectionStore | None
    ) -> None:
        if site.unsupported_reason:
            raise PlanError(f"{site.name}: {site.unsupported_reason}")
        linear = site.read()
        self.name, self.price, self.projections = site.name, price, projections
        self.sizes = linear.in_features, linear.out_features
        self.sweeps = 0 if moments is None else COMPARING_SWEEPS
        self.target = Target.of(linear.weight, moments)
        dense = price(None, *self.sizes)
        self.choices = [Choice(site.name, DENSE, dense, dense, 0.0)]
        self.typical: tuple[Draft, Projection] | None = None
        """The option whose loss is nearest to `TYPICAL_LOSS`."""
        self._typical_distance = math.inf

    def add(self, members: Iterable[Structure]) -> None:
        """Project the structures that cost less than the dense layer, and add them as options."""
        dense = self.choices[0].cost_before
        for member in members:
            after = self.price(member, *self.sizes)
            if after >= dense:
                continue
            try:
                start = draft(member, self.target)
            except StructureError:
                continue  # its rank is above the bound: a cheaper one is exact
            refinable = refined(start, self.target, self.sweeps)
            projection = finished(refinable, self.target)
            choice = Choice(self.name, str(member), dense, after, projection.output_error**2, member)
            self.choices.append(choice)
            self._compare_with_typical(choice.loss, refinable, projection)
            if self.projections is not None:
                self.projections.offer(self.name, member, after, choice.loss, refinable)

    def _compare_with_typical(self, loss: float, refinable: Draft, projection: Projection) -> None:
        if loss > 0 and (distance := abs(math.log(loss / TYPICAL_LOSS))) < self._typical_distance:
            self._typical_distance, self.typical = distance, (refinable, projection)


class _OutputEffect:
    """The effect of a layer's loss on the model's output, measured with one option in place of that layer alone."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches, self.loss = model, batches, distance_for(model)
        self.references = [call(model, batch) for batch in batches]

    @torch.no_grad()
    def of(self, site: Site, option: Draft, projection: Projection) -> float:
        """Distance of the model's output from the original output, divided by the layer's loss."""
        weight, bias = ops.dense(option.chain, list(projection.factors.values())), site.read().bias

        def replaced(_: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], __: Any) -> Tensor:
            return F.linear(arguments[0] if arguments else keywords["input"], weight, bias)

        with removing(site.owner.register_forward_hook(replaced, with_kwargs=True)):
            distances = [
                float(self.loss(call(self.model, x), y, x)) for x, y in zip(self.batches, self.references, strict=True)
            ]
        return sum(distances) / len(distances) / max(projection.output_error**2, 1e-12)


def allocate(options: Mapping[str, Sequence[Choice]], keep: float) -> dict[str, Choice]:
    """Choose one option for each layer, as `budget` does.

    Args:
        options: The options of each layer; the first one gives the cost before.
        keep: Most of the layers' total cost that may be left, as a fraction.

    Returns:
        The choice for each layer, by name.

    Raises:
        PlanError: If the cheapest options cost more than that.
    """
    hulls = {name: _hull(choices) for name, choices in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    remaining = keep * sum(choices[0].cost_before for choices in options.values())
    remaining -= sum(c.cost_after for c in chosen.values())
    if remaining < -1e-9:
        least = sum(c.cost_after for c in chosen.values()) / sum(c.cost_before for c in chosen.values())
        raise PlanError(f"the cheapest options keep {least:.1%} already: set a larger keep, or add candidates")
    steps = [(_slope(a, b), name, b) for name, hull in hulls.items() for a, b in pairwise(hull)]
    stuck: set[str] = set()
    for _, name, option in sorted(steps, key=lambda s: (s[0], s[1])):
        increase = option.cost_after - chosen[name].cost_after
        # A layer whose next step does not fit stays; its later steps would skip one.
        if name in stuck or increase > remaining:
            stuck.add(name)
            continue
        chosen[name] = option
        remaining -= increase
    for name, choices in options.items():  # the rest of the budget goes to options above the hull
        fits = [
            c for c in choices if c.cost_after - chosen[name].cost_after <= remaining and c.loss < chosen[name].loss
        ]
        if fits:
            best = min(fits, key=lambda c: c.loss)
            remaining -= best.cost_after - chosen[name].cost_after
            chosen[name] = best
    return chosen


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of loss against cost, from the cheapest option to the costliest."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda c: (c.cost_after, c.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(cheaper: Choice, costlier: Choice) -> float:
    return (costlier.loss - cheaper.loss) / (costlier.cost_after - cheaper.cost_after)
