"""The options of one layer: to stay dense, or a structure with its cost and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from buttress.compression.projection_store import ProjectionStore
from buttress.core.structures import Structure, parse, structures
from buttress.errors import ButtressError, PlanError, StructureError
from buttress.inspection.sites import Site
from buttress.projection.closed_form import Draft, Projection, Target, default_sweeps, draft, finished, refined

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


def thinned(costs: Mapping[Structure, float], dense: float, levels: int) -> list[Structure]:
    """The costliest member below each of `levels` equally spaced fractions of the dense cost, without duplicates."""
    ordered = sorted(costs, key=lambda member: costs[member])
    members: dict[Structure, None] = {}
    for level in range(1, levels + 1):
        fits = [m for m in ordered if costs[m] <= dense * level / levels]
        members |= dict.fromkeys(fits[-1:])
    return list(members)


class LayerOptions:
    """The options of one layer: to stay dense, and structures that cost less.

    Args:
        site: The layer.
        moments: Second moments of its input; None to compare by the weights alone.
        price: The cost of a structure.
        projections: Where to keep projections, so that they need not be computed again.
    """

    def __init__(
        self, site: Site, moments: Tensor | None, price: CostFunction, projections: ProjectionStore | None
    ) -> None:
        linear = site.read()
        self.name, self.price, self.projections = site.name, price, projections
        self.sizes = linear.in_features, linear.out_features
        self.target = Target.of(linear.weight, moments)
        dense = price(None, *self.sizes)
        self.choices = [Choice(site.name, DENSE, dense, dense, 0.0)]
        self.refused: dict[str, str] = {}
        """Why candidates cannot be used at this layer, by candidate."""
        self.typical: tuple[Draft, Projection] | None = None
        """The option whose loss is nearest to `TYPICAL_LOSS`."""
        self._typical_distance = math.inf

    def add(self, candidates: Sequence[Candidate] | None, levels: int) -> None:
        """Project what the candidates stand for at this layer's sizes, and add what costs less than the dense layer.

        Args:
            candidates: Structures, their texts, or structure classes. None stands for all classes without sharing.
            levels: Families are thinned to about this number of costs.
        """
        for candidate in structures().values() if candidates is None else candidates:
            try:
                members = self._members(candidate, levels, only_unshared=candidates is None)
                for member in members:
                    self._add(member)
            except (ButtressError, ValueError, ArithmeticError) as error:
                # A registered structure of the user's may not take every size.
                self.refused[candidate.name if isinstance(candidate, type) else str(candidate)] = str(error)

    def _members(self, candidate: Candidate, levels: int, *, only_unshared: bool) -> list[Structure]:
        family = as_family(candidate)
        if not isinstance(family, type):
            return [family]
        if only_unshared:
            members = family.default_candidates()
            if not members or members[0].chain(*self.sizes).shares_parameters:
                return []
        costs = {member: self.price(member, *self.sizes) for member in family.family(*self.sizes)}
        return thinned(costs, self.price(None, *self.sizes), levels)

    def _add(self, member: Structure) -> None:
        dense, after = self.choices[0].cost_before, self.price(member, *self.sizes)
        if after >= dense:
            return
        try:
            start = draft(member, self.target)
        except StructureError:
            return  # its rank is above the bound: a cheaper one is exact
        refinable = refined(start, self.target, default_sweeps(start.chain, self.target, COMPARING_SWEEPS))
        projection = finished(refinable, self.target)
        choice = Choice(self.name, str(member), dense, after, projection.output_error**2, member)
        self.choices.append(choice)
        self._compare_with_typical(choice.loss, refinable, projection)
        if self.projections is not None:
            self.projections.offer(self.name, member, after, choice.loss, refinable)

    def _compare_with_typical(self, loss: float, refinable: Draft, projection: Projection) -> None:
        if loss > 0 and (distance := abs(math.log(loss / TYPICAL_LOSS))) < self._typical_distance:
            self._typical_distance, self.typical = distance, (refinable, projection)
