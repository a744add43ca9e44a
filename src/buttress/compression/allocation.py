"""Which structure and rank for each layer, so that the whole fits a budget and loses the least.

Each layer has a few options, each with a cost and a loss: the part of its output's energy that is lost. What is to be
small is their sum. Between neighbouring options on a layer's lower convex hull lies a price, loss for cost; taking all
steps that cost less than one common price is the best plan for what it costs (Everett), and prices are tried by taking
steps in their order while they fit. Only the last step can leave a little of the budget unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ops
from buttress.compression.distillation import distance_for
from buttress.compression.input_moments import call, evaluating
from buttress.core.structures import Structure, parse, structures
from buttress.errors import PlanError, StructureError
from buttress.inspection.sites import Site
from buttress.projection.closed_form import Projection, project
from buttress.surgery import Plan, PlanEntry, chosen_layers
from buttress.text_table import render, show

Cost = Literal["macs", "params"]


@dataclass(frozen=True)
class Choice:
    """What becomes of one layer."""

    name: str
    structure: str
    """"dense" where it stays as it is."""
    cost_before: float
    cost_after: float
    loss: float
    """Part of the output's energy that is lost: the square of the relative error; or what that does to the answer."""


@dataclass(frozen=True)
class Budget:
    """A plan, what it costs and what each layer loses; `str` gives a table."""

    plan: Plan
    rows: tuple[Choice, ...]

    @property
    def kept(self) -> float:
        """The part of the cost that is left."""
        return sum(r.cost_after for r in self.rows) / sum(r.cost_before for r in self.rows)

    def __str__(self) -> str:
        sums = [show(sum(getattr(r, n) for r in self.rows)) for n in ("cost_before", "cost_after", "loss")]
        return render(self.rows, total=[f"{len(self.rows)} layers", f"keeps {self.kept:.1%}", *sums])


Candidate = Structure | type[Structure] | str
Price = Callable[[Structure | None, int, int], float]


def curves(
    model: nn.Module,
    *,
    candidates: Iterable[Candidate] | None = None,
    moments: Mapping[str, Tensor] | None = None,
    cost: Cost | Price = "macs",
    layers: Mapping[str, bool] | None = None,
    levels: int = 10,
    batches: Sequence[Any] = (),
    watch: Callable[[str, int, int], None] | None = None,
) -> dict[str, list[Choice]]:
    """For each layer what every option costs and loses, staying dense among them: what `budget` chooses from.

    Candidates are structures, texts, or classes of structures, which stand for their families, thinned to about so many
    `levels` of cost; by default all families without sharing. `cost` is "macs", "params", or a function of a
    structure (None for nn.Linear), d_in and d_out, such as measured time. Layers are all but the output head, or those
    whose name matches a glob that maps to True, first match wins. With `moments` losses are those of the outputs on
    real inputs. With a few `batches`, too, a layer's losses are scaled to what they do to the model's answer
    (`heal`'s distance): some layers forgive more than others.
    """
    sites = chosen_layers(model, layers)
    price = _price(cost)
    asked = None if candidates is None else list(candidates)
    found: dict[str, list[Choice]] = {}
    for done, (name, site) in enumerate(sites.items()):
        if watch:
            watch(name, done, len(sites))
        found[name] = _options(site, _members(asked, site, price, levels), (moments or {}).get(name), price)
    if not batches:
        return found
    with evaluating(model):
        effects = _effects(model, sites, found, moments or {}, batches)
    middle = sorted(effects.values())[len(effects) // 2] if effects else 1.0
    return {
        name: [replace(c, loss=c.loss * effects.get(name, middle)) for c in options] for name, options in found.items()
    }


def budget(options: Mapping[str, Sequence[Choice]], keep: float) -> Budget:
    """The plan that keeps at most the part `keep` of the layers' cost and loses the least, out of their `curves`.

    >>> options = curves(model, moments=moments(model, batches))
    >>> replace_(model, budget(options, 0.5).plan, init="project")
    """
    if not 0 < keep <= 1:
        raise PlanError(f"keep is the part of the cost that is left, above 0 and at most 1; got {keep!r}")
    chosen = _spend(options, keep)
    plan = Plan(tuple(PlanEntry(n, parse(c.structure)) for n, c in chosen.items() if c.structure != DENSE))
    return Budget(plan, tuple(chosen.values()))


DENSE = "dense"


def _price(cost: Cost | Price) -> Price:
    if callable(cost):
        return cost
    if cost not in ("macs", "params"):
        raise PlanError(f"cost is 'macs', 'params' or a function, got {cost!r}")

    def count(structure: Structure | None, d_in: int, d_out: int) -> float:
        found: int = d_in * d_out if structure is None else getattr(structure.chain(d_in, d_out), cost)
        return found

    return count


def _members(candidates: Sequence[Candidate] | None, site: Site, price: Price, levels: int) -> list[Structure]:
    linear = site.read()
    sizes = linear.in_features, linear.out_features
    if candidates is None:
        kinds = structures().values()
        candidates = [cls for cls in kinds if (some := cls.default_candidates()) and not _shares(some[0], *sizes)]
    found: list[Structure] = []
    for candidate in candidates:
        kind = structures().get(candidate) if isinstance(candidate, str) else candidate
        if isinstance(kind, type):
            found += _thinned(
                list(kind.family(*sizes)), lambda member: price(member, *sizes), price(None, *sizes), levels
            )
        else:
            found.append(parse(candidate) if isinstance(candidate, str) else candidate)  # type: ignore[arg-type]
    return found


def _thinned(
    members: Sequence[Structure], cost: Callable[[Structure], float], dense: float, levels: int
) -> list[Structure]:
    """For each of some levels of cost the dearest member that it pays for, each once."""
    ordered = sorted(members, key=cost)
    found: dict[Structure, None] = {}
    for level in range(1, levels + 1):
        fits = [m for m in ordered if cost(m) <= dense * level / levels]
        found |= dict.fromkeys(fits[-1:])
    return list(found)


def _shares(structure: Structure, d_in: int, d_out: int) -> bool:
    return structure.chain(d_in, d_out).shares_parameters


def _near(member: Structure, linear: nn.Linear, moments: Tensor | None) -> Projection:
    return project(member, linear.weight, moments=moments, sweeps=None if moments is None else SWEEPS)


@torch.no_grad()
def _options(site: Site, members: Sequence[Structure], moments: Tensor | None, price: Price) -> list[Choice]:
    """Every option of a layer that is cheaper than dense, and dense itself."""
    if site.refusal_reason:
        raise PlanError(f"{site.name}: {site.refusal_reason}")
    linear = site.read()
    sizes = linear.in_features, linear.out_features
    dense = price(None, *sizes)
    found = [Choice(site.name, DENSE, dense, dense, 0.0)]
    for member in members:
        after = price(member, *sizes)
        if after >= dense:
            continue
        try:
            loss = _near(member, linear, moments)
        except StructureError:
            continue  # its rank is above the bound: a cheaper one is exact
        found.append(Choice(site.name, str(member), dense, after, loss.output_error**2))
    return found


@torch.no_grad()
def _effects(
    model: nn.Module,
    sites: Mapping[str, Site],
    options: Mapping[str, list[Choice]],
    moments: Mapping[str, Tensor],
    batches: Sequence[Any],
) -> dict[str, float]:
    """How much of a layer's loss shows in the model's answer, from one option put in its place alone."""
    loss = distance_for(model)
    wanted = [call(model, batch) for batch in batches]
    effects: dict[str, float] = {}
    for name, found in options.items():
        some = min((c for c in found if c.loss > 0), key=lambda c: abs(math.log(c.loss / TYPICAL)), default=None)
        if some is None or isinstance(sites[name].owner, nn.MultiheadAttention):
            continue
        linear = sites[name].read()
        chain = parse(some.structure).chain(linear.in_features, linear.out_features)
        near = _near(parse(some.structure), linear, moments.get(name))
        weight = ops.dense(chain, list(near.factors.values()))

        def instead(
            _: nn.Module,
            given: tuple[Any, ...],
            named: Mapping[str, Any],
            __: Any,
            w: Tensor = weight,
            b: Any = linear.bias,
        ) -> Tensor:
            return F.linear(given[0] if given else named["input"], w, b)

        handle = sites[name].owner.register_forward_hook(instead, with_kwargs=True)
        try:
            apart = [float(loss(call(model, x), y, x)) for x, y in zip(batches, wanted, strict=True)]
        finally:
            handle.remove()
        effects[name] = sum(apart) / len(apart) / max(near.output_error**2, 1e-12)
    return effects


TYPICAL = 0.05
"""The loss at which a layer's effect on the answer is measured, or what comes nearest to it."""
SWEEPS = 2
"""Enough to compare options by; the plan that is chosen may be projected with more."""


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """From cheapest to dearest, those that no mixture of two others beats."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda c: (c.cost_after, c.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(cheap: Choice, dear: Choice) -> float:
    return (dear.loss - cheap.loss) / (dear.cost_after - cheap.cost_after)


def _spend(options: Mapping[str, Sequence[Choice]], keep: float) -> dict[str, Choice]:
    hulls = {name: _hull(found) for name, found in options.items()}
    left = keep * sum(found[0].cost_before for found in options.values())
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left -= sum(c.cost_after for c in chosen.values())
    if left < -1e-9:
        least = sum(c.cost_after for c in chosen.values()) / sum(c.cost_before for c in chosen.values())
        raise PlanError(f"the cheapest options keep {least:.1%} already: ask for more than that, or add candidates")
    steps = [(_slope(a, b), name, b) for name, hull in hulls.items() for a, b in pairwise(hull)]
    stuck: set[str] = set()
    for _, name, option in sorted(steps, key=lambda s: (s[0], s[1])):
        more = option.cost_after - chosen[name].cost_after
        # A layer whose next step does not fit stays; its later steps would skip one.
        if name in stuck or more > left:
            stuck.add(name)
            continue
        chosen[name] = option
        left -= more
    for name, found in options.items():  # what is left over, where a step between the hull's corners fits
        fits = [c for c in found if c.cost_after - chosen[name].cost_after <= left and c.loss < chosen[name].loss]
        if fits:
            best = min(fits, key=lambda c: c.loss)
            left -= best.cost_after - chosen[name].cost_after
            chosen[name] = best
    return chosen
