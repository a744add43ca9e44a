"""The choice of a structure and rank for each layer, so that the model fits a budget with the least loss.

Each layer has a few options, each with a cost and a loss: the fraction of its output's energy that is lost. The sum of
the losses is minimized. On a layer's lower convex hull, the step from one option to the next has a price: loss per
cost. Taking all steps below one common price gives the best plan for its cost (Everett, 1963). Steps are taken in order
of their price while they fit, so only the last step can leave a little of the budget unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from buttress.compression.judgement import DenseLayer, reason_not_to_judge
from buttress.compression.layer_options import (
    Candidate,
    Choice,
    CostFunction,
    CostMeasure,
    LayerOptions,
    as_family,
    cost_function,
)
from buttress.compression.observing import observable
from buttress.compression.output_effect import OutputEffect
from buttress.compression.projection_store import ProjectionStore
from buttress.compression.running import evaluating
from buttress.core.structures import Structure
from buttress.errors import PlanError, StructureError, quoted
from buttress.inspection.sites import Site, tied_embeddings
from buttress.surgery import Plan, PlanEntry, chosen_layers
from buttress.text_table import render, show


class LayerMemory(Protocol):
    """Keeps what is known of the layers that were compared."""

    layers: dict[str, dict[str, Any]]
    """Plain data by layer name."""

    def add_layer(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep what is known of one more layer."""


class Curves(dict[str, list[Choice]]):
    """The result of `curves`: the options of each layer by name, and what was left out.

    Args:
        options: The options of each layer; the first is to stay dense.
        unjudged: Layers whose loss cannot be told. They have no options, so they stay dense.
        refused: Why candidates cannot be used at a layer, by layer and candidate.

    Example:
        >>> options = bt.curves(model, moments=inputs)
        >>> [layer.name for layer in options.unjudged]
    """

    def __init__(
        self,
        options: Mapping[str, list[Choice]],
        unjudged: Iterable[DenseLayer] = (),
        refused: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(options)
        self.unjudged = tuple(unjudged)
        """Layers whose loss cannot be told, each with the reason."""
        self.refused = dict(refused or {})
        """Why candidates cannot be used at a layer, by layer and candidate."""


@dataclass(frozen=True)
class Budget:
    """A plan that fits a budget, with the cost and the loss of each layer. `str` gives a table."""

    plan: Plan
    """The plan for the layers that do not stay dense."""
    rows: tuple[Choice, ...]
    """The choice for every layer, those that stay dense by choice included."""
    unjudged: tuple[DenseLayer, ...] = ()
    """Layers that stay dense because their loss cannot be told. They are not part of the cost."""
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Why candidates cannot be used at a layer, by layer and candidate."""

    @property
    def kept(self) -> float:
        """The fraction of the cost that is left."""
        return sum(r.cost_after for r in self.rows) / sum(r.cost_before for r in self.rows)

    def __str__(self) -> str:
        sums = [show(sum(getattr(r, n) for r in self.rows)) for n in ("cost_before", "cost_after", "loss")]
        table = render(self.rows, total=[f"{len(self.rows)} layers", f"keeps {self.kept:.1%}", *sums])
        return "\n".join([table, *(f"{d.name} stays dense, not judged: {d.reason}" for d in self.unjudged)])


def curves(
    model: nn.Module,
    *,
    candidates: Iterable[Candidate] | Candidate | None = None,
    moments: Mapping[str, Tensor] | None = None,
    cost: CostMeasure | CostFunction = "macs",
    layers: Mapping[str, bool] | None = None,
    levels: int = 10,
    batches: Sequence[Any] = (),
    watch: Callable[[str, int, int], None] | None = None,
    projections: ProjectionStore | None = None,
    memory: LayerMemory | None = None,
) -> Curves:
    """Compute the cost and the loss of every option for each layer, from which `budget` chooses.

    Every option is projected, with two sweeps if the layer's moments are given.
    A layer whose loss cannot be told has no options, so that it stays dense: one that no calibration data reached, that
    fewer tokens reached than it has inputs, that does not change the compared output, or that cannot be replaced.

    Args:
        model: The model. It is not changed.
        candidates: Structures, their texts, or structure classes, which stand for their whole families; or one of
            them. Default: all families without sharing.
        moments: Second moments of layers' inputs, from `moments()`. With them, losses are those of the outputs on real
            inputs.
        cost: "macs", "params", "bytes", the measured times "decode_ms" (of one token) or "prefill_ms" (of many), or a
            function of a structure (None for nn.Linear), d_in and d_out, such as `timed()`.
        layers: Maps globs of layer names to whether they are included; the first match wins. A 1 × 1 convolution is
            included only by a glob that ends in its own name. Default: all linear layers but the output head.
        levels: Families are thinned to about this number of costs.
        batches: A few batches on which to measure the effect of each layer's loss on the model's output, by the
            distance that `heal` uses. The layer's losses are scaled by it: some layers tolerate more than others.
        watch: Called with a layer's name, its number and the number of layers, before each layer.
        projections: A store for projections, so that those of the chosen plan need not be computed again.
        memory: Keeps what is known of each layer, such as a `WorkFolder`. Layers that it knows are not compared again.

    Returns:
        The options of each layer, by name; the first is to stay dense. `unjudged` lists the layers that are left out,
        and `refused` the candidates that do not fit a layer's sizes.

    Raises:
        PlanError: If a glob matches no layer, no layer can be replaced or judged, there is no candidate, or `cost` is
            unknown.
        ShapeError: If a layer's weight is not finite, or its moments do not fit it; the error names the layer.
        StructureError: If a candidate is neither a structure nor a class of them, or its text names none.

    Example:
        >>> options = bt.curves(model, moments=bt.moments(model, batches))
        >>> plan = bt.budget(options, keep=0.5).plan
    """
    candidates = None if candidates is None else checked_candidates(candidates)
    sites = chosen_layers(model, layers)
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    price = cost_function(cost, device=example.device, dtype=example.dtype)
    comparison = _Comparison({} if moments is None else moments, price, projections)
    with evaluating(model), observable(sites.values()) as modules:
        effect = OutputEffect(model, batches) if batches else None
        for index, (name, site) in enumerate(sites.items()):
            if watch:
                watch(name, index, len(sites))
            if memory is not None and comparison.restore(memory.layers.get(name)):
                continue
            layer = comparison.options_of(site, candidates, levels)
            if effect and layer is not None and layer.typical:
                embeddings = list(tied_embeddings(model, site).values())
                comparison.weigh(site, effect.of(site, modules[name], *layer.typical, embeddings))
            if memory is not None:
                memory.add_layer(name, comparison.row(name))
    return comparison.curves()


def checked_candidates(candidates: Iterable[Candidate] | Candidate) -> Sequence[Candidate]:
    """Candidates as a sequence, checked before the first layer is compared.

    Args:
        candidates: Structures, their texts or structure classes, or a single one.

    Returns:
        The candidates as they are given.

    Raises:
        PlanError: If there are none.
        StructureError: If one is neither a structure nor a class of them, or its text names none.
    """
    if isinstance(candidates, Structure | str | type):
        candidates = [candidates]
    chosen = candidates if isinstance(candidates, Sequence) else list(candidates)
    if not chosen:
        raise PlanError("there is nothing to choose from: give at least one candidate, such as 'btt'")
    for candidate in chosen:
        family = as_family(candidate)
        if not (isinstance(family, Structure) or (isinstance(family, type) and issubclass(family, Structure))):
            raise StructureError(f"a candidate is a Structure, its text or a class of them, got {quoted(candidate)}")
    return chosen


class _Comparison:
    """The options of all layers, each layer's effect on the output, and the layers that cannot be judged."""

    def __init__(self, moments: Mapping[str, Tensor], price: CostFunction, projections: ProjectionStore | None) -> None:
        self.moments, self.price, self.projections = moments, price, projections
        self.options: dict[str, list[Choice]] = {}
        self.effects: dict[str, float] = {}
        self.unjudged: list[DenseLayer] = []
        self.refused: dict[str, dict[str, str]] = {}

    def options_of(self, site: Site, candidates: Sequence[Candidate] | None, levels: int) -> LayerOptions | None:
        """Compare the options of a layer; None if it cannot be judged."""
        if reason := reason_not_to_judge(site, self.moments):
            self.unjudged.append(DenseLayer.of(site, reason, self.moments))
            return None
        layer = LayerOptions(site, self.moments.get(site.name), self.price, self.projections)
        layer.add(candidates, levels)
        self.options[site.name] = layer.choices
        if layer.refused:
            self.refused[site.name] = layer.refused
        return layer

    def weigh(self, site: Site, effect: float | None) -> None:
        """Note the effect of a layer's loss on the output; None if it was not seen."""
        if effect is None:
            return  # the few batches did not reach it, though calibration did: the median of the others is used
        if effect > 0 and math.isfinite(effect):
            self.effects[site.name] = effect
            return
        del self.options[site.name]
        reason = "the output that is compared does not depend on it" if effect == 0 else "the output is not finite"
        self.unjudged.append(DenseLayer.of(site, reason, self.moments))

    def row(self, name: str) -> dict[str, Any]:
        """What is known of a layer, as plain data."""
        choices = [[c.structure, c.cost_before, c.cost_after, c.loss] for c in self.options.get(name, ())]
        unjudged = [asdict(layer) for layer in self.unjudged if layer.name == name]
        refused = self.refused.get(name, {})
        row = {"name": name, "choices": choices, "unjudged": unjudged, "refused": refused}
        return row | {"effect": self.effects.get(name)}

    def restore(self, row: Mapping[str, Any] | None) -> bool:
        """Take over what was known of a layer; False if nothing was, or it cannot be read."""
        try:
            assert row is not None
            choices = [Choice(row["name"], *values) for values in row["choices"]]
            unjudged = [DenseLayer(**values) for values in row["unjudged"]]
            effect, refused = row["effect"], dict(row["refused"])
        except (AssertionError, KeyError, TypeError, ValueError):
            return False
        self.unjudged += unjudged
        if choices:
            self.options[row["name"]] = choices
        if effect is not None:
            self.effects[row["name"]] = float(effect)
        if refused:
            self.refused[row["name"]] = refused
        return True

    def curves(self) -> Curves:
        if not self.options:
            reason = self.unjudged[0].reason
            raise PlanError(f"no layer can be judged: {reason}; give data that the layers see, or other layers")
        median = sorted(self.effects.values())[len(self.effects) // 2] if self.effects else 1.0
        options = {
            name: [replace(c, loss=c.loss * self.effects.get(name, median)) for c in choices]
            if self.effects
            else choices
            for name, choices in self.options.items()
        }
        return Curves(options, self.unjudged, self.refused)


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
    rows = tuple(chosen.values())
    if not isinstance(options, Curves):
        return Budget(Plan(entries), rows)
    return Budget(Plan(entries), rows, options.unjudged, options.refused)


def check_keep(keep: object) -> None:
    """Check that a value can be the fraction of the cost to keep.

    Raises:
        PlanError: If it is not a number above 0 and at most 1.
    """
    if not isinstance(keep, Real) or not 0 < float(keep) <= 1:
        raise PlanError(f"keep is the fraction of the cost to keep, above 0 and at most 1; got {keep!r}")


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
    for _, name, option in sorted(steps, key=lambda s: (s[0], s[1])):
        increase = option.cost_after - chosen[name].cost_after
        if increase <= remaining:  # if not, the layer's later steps, which cost more, do not fit either
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
