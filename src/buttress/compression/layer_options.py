"""The options of one layer: to stay dense, or a structure with its cost and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from buttress.compression.projection_store import ProjectionStore
from buttress.core.structures import Structure, parse, structures
from buttress.costs.advice import timed
from buttress.errors import ButtressError, PlanError, StructureError
from buttress.inspection.sites import Site
from buttress.projection.closed_form import Draft, Projection, Target, default_sweeps, draft, finished, refined
from buttress.projection.splitting import shared_svds

CostMeasure = Literal["macs", "params", "bytes", "decode_ms", "prefill_ms"]
CostFunction = Callable[[Structure | None, int, int], float]
"""The cost of a structure, or of nn.Linear for None, from d_in inputs to d_out outputs."""
Candidate = Structure | type[Structure] | str

PREFILL_TOKENS = 2048
"""Tokens of a forward pass whose time "prefill_ms" is."""
MEASURED_TOKENS = {"decode_ms": 1, "prefill_ms": PREFILL_TOKENS}
"""Tokens at a time of the measured costs."""
DENSE = "dense"
"""Value of `Choice.structure` for a layer that stays as it is."""
COMPARING_SWEEPS = 2
"""Sweeps of alternating least squares while options are compared; the chosen one can be refined further."""
SLACK = 0.85
"""What an option may gain beyond the largest gain of its family so far, as a ratio of losses, to be worth refining."""
LATER_RATIO = 0.95
"""Expected ratio of losses after and before a second sweep, with which no option has gained more yet."""
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


def cost_function(
    cost: CostMeasure | CostFunction, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> CostFunction:
    """Turn the name of a cost measure into a function.

    Args:
        cost: "macs" per token, "params", "bytes" of the weights, "decode_ms" or "prefill_ms": milliseconds of the
            forward pass for one token and for `PREFILL_TOKENS`, measured once for each structure and size. Or a
            function, which is returned as it is.
        device: Where times are measured. Default: a GPU if there is one.
        dtype: dtype of the weights, for bytes and times.

    Returns:
        The cost as a function of a structure (None for nn.Linear), d_in and d_out.

    Raises:
        PlanError: If it is neither a function nor the name of a measure.
    """
    if callable(cost):
        return cost
    if cost not in get_args(CostMeasure):
        *names, last = (repr(name) for name in get_args(CostMeasure))
        raise PlanError(f"cost is {', '.join(names)}, {last} or a function, got {cost!r}")
    if cost in MEASURED_TOKENS:
        return timed(MEASURED_TOKENS[cost], device=device, dtype=dtype)
    unit = dtype.itemsize if cost == "bytes" else 1

    def count(structure: Structure | None, d_in: int, d_out: int) -> float:
        if structure is None:
            return unit * d_in * d_out
        chain = structure.chain(d_in, d_out)
        return unit * (chain.macs if cost == "macs" else chain.params)

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


def is_below_hull(point: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Whether a point of cost and loss is below every mixture of a cheaper and a costlier point, and above none.

    Args:
        point: Cost and loss.
        others: The other points.

    Returns:
        Whether it would be on the lower convex hull of all points.
    """
    cost, loss = point
    if any(c <= cost and other <= loss for c, other in others):
        return False
    cheaper, costlier = [p for p in others if p[0] < cost], [p for p in others if p[0] > cost]
    return all(
        loss < low + (high - low) * (cost - left) / (right - left) for left, low in cheaper for right, high in costlier
    )


@dataclass(eq=False)
class _Option:
    """A structure at one layer, as far as it is refined."""

    structure: Structure
    cost: float
    draft: Draft
    projection: Projection

    @property
    def loss(self) -> float:
        return self.projection.output_error**2

    def refine(self, target: Target, sweeps: int) -> None:
        """Refine to this number of sweeps in all."""
        self.draft = refined(self.draft, target, sweeps)
        self.projection = finished(self.draft, target)


class LayerOptions:
    """The options of one layer: to stay dense, and structures that cost less.

    Args:
        site: The layer.
        moments: Second moments of its input; None to compare by the weights alone.
        price: The cost of a structure.
        projections: Where to keep projections, so that they need not be computed again.

    Raises:
        ShapeError: If the weight is not finite, or the moments do not fit it; the error names the layer.
    """

    def __init__(
        self, site: Site, moments: Tensor | None, price: CostFunction, projections: ProjectionStore | None
    ) -> None:
        linear = site.read()
        self.name, self.price, self.projections = site.name, price, projections
        self.sizes = linear.in_features, linear.out_features
        try:
            self.target = Target.of(linear.weight, moments)
        except ButtressError as error:
            raise type(error)(f"{site.name}: {error}") from error
        dense = price(None, *self.sizes)
        self.choices = [Choice(site.name, DENSE, dense, dense, 0.0)]
        self.refused: dict[str, str] = {}
        """Why candidates cannot be used at this layer, by candidate."""
        self.typical: tuple[Draft, Projection] | None = None
        """The option whose loss is nearest to `TYPICAL_LOSS`."""
        self._typical_distance = math.inf

    def add(self, candidates: Sequence[Candidate] | None, levels: int) -> None:
        """Project what the candidates stand for at this layer's sizes, and add what costs less than the dense layer.

        Every option is projected in closed form. Then those that could come near the best of their cost are refined.

        Args:
            candidates: Structures, their texts, or structure classes. None stands for all classes without sharing.
            levels: Families are thinned to about this number of costs.
        """
        families: list[list[_Option]] = []
        for candidate in structures().values() if candidates is None else candidates:
            family: list[_Option] = []
            families.append(family)  # members before one that fails stay
            try:
                members = self._members(candidate, levels, only_unshared=candidates is None)
                with shared_svds():
                    for member in members:
                        if (option := self._draft(member)) is not None:
                            family.append(option)
            except (ButtressError, ValueError, ArithmeticError) as error:
                # A registered structure of the user's may not take every size.
                self.refused[candidate.name if isinstance(candidate, type) else str(candidate)] = str(error)
        self._refine(families)
        for option in (option for family in families for option in family):
            self._add(option)

    def _members(self, candidate: Candidate, levels: int, *, only_unshared: bool) -> list[Structure]:
        family = as_family(candidate)
        if not isinstance(family, type):
            return [family]
        if only_unshared:
            members = family.default_candidates()
            if not members or members[0].chain(*self.sizes).shares_parameters:
                return []
        # By MACs, which take no measurement: a family may have hundreds of members.
        costs = {member: float(member.chain(*self.sizes).macs) for member in family.family(*self.sizes)}
        return thinned(costs, float(self.sizes[0] * self.sizes[1]), levels)

    def _draft(self, member: Structure) -> _Option | None:
        """The closed form of a structure; None if it costs as much as the dense layer, or a cheaper one is exact."""
        cost = self.price(member, *self.sizes)
        if cost >= self.choices[0].cost_before:
            return None
        try:
            start = draft(member, self.target)
        except StructureError:
            return None  # its rank is above the bound
        return _Option(member, cost, start, finished(start, self.target))

    def _refine(self, families: Sequence[Sequence[_Option]]) -> None:
        """Refine the options that could come near the best of their cost, one sweep after the other.

        How much an option gains is known only afterwards, but members of a family gain alike. So the family's cheapest
        is refined, and any other if it would be near the best with the family's largest gain and `SLACK` more.
        """
        for sweep in range(1, COMPARING_SWEEPS + 1):
            for family in families:
                ratio = 1.0 if sweep == 1 else LATER_RATIO
                for index, option in enumerate(sorted(family, key=lambda o: o.cost)):
                    if sweep > default_sweeps(option.draft.chain, self.target, COMPARING_SWEEPS):
                        continue
                    is_first = index == 0 and sweep == 1
                    if option.draft.converged or is_first or self._is_near(option, families, ratio * SLACK):
                        before = option.loss
                        option.refine(self.target, sweep)
                        ratio = min(ratio, option.loss / before if before > 0 else 1.0)

    def _is_near(self, option: _Option, families: Sequence[Sequence[_Option]], ratio: float) -> bool:
        """Whether an option would be on the lower convex hull of all options if its loss were multiplied by a ratio."""
        if option.draft.sweeps and option.draft.converged:
            return False
        points = [(o.cost, o.loss) for family in families for o in family if o is not option]
        dense = self.choices[0].cost_before, 0.0
        return is_below_hull((option.cost, ratio * option.loss), [*points, dense])

    def _add(self, option: _Option) -> None:
        dense = self.choices[0].cost_before
        choice = Choice(self.name, str(option.structure), dense, option.cost, option.loss, option.structure)
        self.choices.append(choice)
        self._compare_with_typical(choice.loss, option.draft, option.projection)
        if self.projections is not None:
            self.projections.offer(self.name, option.structure, option.cost, choice.loss, option.draft)

    def _compare_with_typical(self, loss: float, refinable: Draft, projection: Projection) -> None:
        if loss > 0 and (distance := abs(math.log(loss / TYPICAL_LOSS))) < self._typical_distance:
            self._typical_distance, self.typical = distance, (refinable, projection)
