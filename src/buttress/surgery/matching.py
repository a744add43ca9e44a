"""match: the width or rank at which a structured model costs what another model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from buttress.costs.counting import cost
from buttress.devices import local_device
from buttress.errors import ButtressError, quoted
from buttress.surgery.choosing import StructureLike
from buttress.surgery.plan import Plan
from buttress.surgery.replace import replace_
from buttress.text_table import render, show

PlanLike = StructureLike | Mapping[str, StructureLike | None] | Plan
Target = float | nn.Module
"""A cost, or a model that has it."""

COUNTS = ("macs", "params", "activation_bytes")
"""Costs that are counted on the meta device. They name attributes of `Cost`."""
PATIENCE = 3
"""Counts do not grow steadily with the width, because some sizes split less evenly than others. So the search tries the
sizes on both sides of the target, until this number of them in a row is farther from it than the nearest."""


@dataclass(frozen=True)
class Candidate:
    """A size that was tried, and its cost.

    Attributes:
        size: The width or rank.
        cost: What the structured model costs at this size.
        spread: For times, how much repetitions differ: their interquartile range divided by the median. Otherwise 0.
    """

    size: int
    cost: float
    spread: float = 0.0


@dataclass(frozen=True)
class Match:
    """The size of a structured model whose cost is nearest to a target. `str` gives a table of the sizes tried.

    Attributes:
        knob: What was varied: "width" or "rank".
        size: The width or rank with the nearest cost.
        unit: What is matched: "macs", "params", "activation_bytes" or "ms".
        target: The cost to match.
        cost: The cost at `size`.
        tried: Every size that was tried, ascending.

    Example:
        >>> matched = match(build, BTT(rank=4), macs=133e6, widths=range(64, 4097, 64), example=x)
        >>> matched.size, matched.relative_gap
    """

    knob: str
    size: int
    unit: str
    target: float
    cost: float
    tried: tuple[Candidate, ...]

    @property
    def relative_gap(self) -> float:
        """The cost relative to the target, minus 1: 0.02 is two percent above it."""
        return self.cost / self.target - 1

    @property
    def undecided(self) -> bool:
        """Whether repeated times differ by more than another size is farther from the target."""
        best = self._best
        others = [abs(c.cost - self.target) for c in self.tried if c is not best]
        return bool(others) and min(others) - abs(best.cost - self.target) < best.spread * best.cost

    @property
    def _best(self) -> Candidate:
        return next(c for c in self.tried if c.size == self.size)

    def __str__(self) -> str:
        unit = self.unit.replace("_", " ").replace("macs", "MACs")
        spreads = [] if self.unit == "ms" else ["spread"]
        lines = [
            render(self.tried, headings={"size": self.knob, "cost": unit}, omitted=spreads),
            f"{self.knob} {self.size}: {_number(self.cost)} {unit}, {100 * self.relative_gap:+.1f} % of the target of "
            f"{_number(self.target)}",
        ]
        if self.undecided:
            lines.append("Undecided: times vary by more than the next size differs. Close other programs and repeat.")
        return "\n".join(lines)


def match(
    build: Callable[..., nn.Module],
    plan: PlanLike | Callable[[int], PlanLike] | None,
    *,
    macs: Target | None = None,
    params: Target | None = None,
    activation_bytes: Target | None = None,
    ms: Target | None = None,
    widths: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
    example: Any = None,
    device: torch.device | str | None = None,
    training: bool = True,
) -> Match:
    """Find the width, or the rank, at which a structured model costs what a dense one does.

    The cost is taken to grow with the size, apart from sizes that split unevenly: the search halves the range, then
    tries the neighbors of the crossing. Counts are taken on the meta device, where nothing is computed or allocated.
    Times are measured, each as the median of repeated calls, and only where halving needs them.

    Args:
        build: With `widths`, a function from a width to the dense model; with `ranks`, a function without arguments.
        plan: What `replace_` does to the model, as it takes it; None if `build` returns the structured model. With
            `ranks`, a function from a rank to a plan.
        macs: Multiply-accumulates of a forward pass to match: a number, or a model that is counted the same way.
        params: Parameters to match, likewise.
        activation_bytes: Bytes that autograd saves for the backward pass to match, likewise.
        ms: Milliseconds to match, likewise.
        widths: The widths to choose from.
        ranks: The ranks to choose from.
        example: An input of the forward pass, a tuple of inputs, or a function from a size to either. Not needed for
            `params`.
        device: Where times are measured. Default: a GPU if there is one, else the CPU.
        training: For `ms`, whether to time forward and backward pass; otherwise the forward pass alone.

    Returns:
        The size whose cost is nearest to the target, its cost, and every size that was tried.

    Raises:
        ButtressError: If not exactly one target and one of `widths` and `ranks` are given, an argument is of the wrong
            kind, or every size costs more, or less, than the target.

    Example:
        >>> dense, x = MLP(width=512), torch.zeros(1, 784)
        >>> matched = match(lambda width: MLP(width), BTT(rank=2), macs=dense, widths=range(64, 4097, 64), example=x)
        >>> matched = match(lambda: MLP(512), lambda rank: BTT(rank=rank), params=2e5, ranks=range(1, 17))
        >>> print(matched)
    """
    unit, target = _only({"macs": macs, "params": params, "activation_bytes": activation_bytes, "ms": ms}, "target")
    range_name, sizes = _only({"widths": widths, "ranks": ranks}, "range")
    sizes, knob = _checked_sizes(range_name, sizes), range_name.removesuffix("s")
    if knob == "rank" and not callable(plan):
        raise ButtressError(f"with ranks, plan is a function such as lambda rank: BTT(rank=rank), got {quoted(plan)}")
    if example is None and unit != "params":
        raise ButtressError(f"{unit} are those of a forward pass: give example=, an input or a tuple of inputs")
    meter = _Meter(unit, local_device(device) if unit == "ms" else torch.device("meta"), training)

    def candidate(size: int) -> Candidate:
        with meter.device:
            model = build(size) if knob == "width" else build()
            chosen = plan(size) if callable(plan) else plan
            if chosen is not None:
                replace_(model, chosen)
        return Candidate(size, *meter.read(model, _inputs(example, size)))

    goal = _checked_target(unit, target, meter, example)
    tried = _search(sizes, candidate, goal, patience=0 if unit == "ms" else PATIENCE)
    best = min(tried, key=lambda c: abs(c.cost - goal))
    matched = Match(knob, best.size, unit, goal, best.cost, tried)
    _check_within(matched)
    return matched


@dataclass(frozen=True)
class _Meter:
    """How a model's cost is read.

    Attributes:
        unit: What is read.
        device: Where models are built: the meta device for what is counted.
        training: Whether times include the backward pass.
    """

    unit: str
    device: torch.device
    training: bool

    def read(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[float, float]:
        """The cost of a model, and the spread of repeated times."""
        if self.unit == "ms":
            return self._time(model.to(self.device), _moved(inputs, self.device))
        if self.unit == "params":
            return sum(p.numel() for p in model.parameters()), 0.0
        device = next((p.device for p in model.parameters()), self.device)
        return getattr(cost(model, *_moved(inputs, device)), self.unit), 0.0

    def _time(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[float, float]:
        from buttress.ops.measuring import sample_ms

        weights = [p for p in model.parameters() if p.requires_grad]

        def step() -> None:
            outputs = [t for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.grad(outputs, weights, [torch.ones_like(t) for t in outputs], allow_unused=True)

        with torch.inference_mode(False), torch.set_grad_enabled(self.training):
            sample = sample_ms(step if self.training else lambda: model(*inputs), self.device)
        return sample.ms, sample.spread


def _search(
    sizes: Sequence[int], candidate: Callable[[int], Candidate], target: float, patience: int
) -> tuple[Candidate, ...]:
    """Try the two sizes around the target by bisection, then their neighbors while these come nearer."""
    tried: dict[int, Candidate] = {}

    def costs(i: int) -> float:
        if i not in tried:
            tried[i] = candidate(sizes[i])
        return tried[i].cost

    low, high = 0, len(sizes) - 1
    if costs(low) >= target:
        high = low
    elif costs(high) <= target:
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs(middle) < target else (low, middle)
    for start, step in ((low, -1), (high, 1)):
        i, farther = start + step, 0
        while 0 <= i < len(sizes) and farther < patience:
            nearest = min(abs(c.cost - target) for c in tried.values())
            farther = 0 if abs(costs(i) - target) < nearest else farther + 1
            i += step
    return tuple(tried[i] for i in sorted(tried))


def _only(given: Mapping[str, Any], what: str) -> tuple[str, Any]:
    """The one argument that is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ButtressError(f"match needs one {what}, one of {', '.join(given)}: got {', '.join(names) or 'none'}")
    return names[0], given[names[0]]


def _checked_sizes(name: str, sizes: Iterable[int]) -> list[int]:
    chosen = list(sizes) if isinstance(sizes, Iterable) else []
    if not chosen or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in chosen):
        got = chosen or sizes
        raise ButtressError(f"{name} must be a list or range of at least one integer >= 1, got {quoted(got)}")
    return sorted(set(chosen))


def _checked_target(unit: str, target: Target, meter: _Meter, example: Any) -> float:
    if isinstance(target, nn.Module):
        if callable(example):
            raise ButtressError(f"example is a function of the size, so give {unit} as a number")
        # A copy, because a model is moved to the device where it is timed.
        model = copy.deepcopy(target) if unit == "ms" else target
        return meter.read(model, _inputs(example, 0))[0]
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < float("inf"):
        raise ButtressError(f"{unit} must be a number above 0 or a model, got {quoted(target)}")
    return float(target)


def _moved(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = tree_map_only(Tensor, lambda t: t.to(device), inputs)
    return moved


def _inputs(example: Any, size: int) -> tuple[Any, ...]:
    inputs = example(size) if callable(example) else example
    return inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)


def _check_within(matched: Match) -> None:
    """Raise if every size costs more, or every size less, than the target."""
    costs = [c.cost for c in matched.tried]
    if min(costs) <= matched.target <= max(costs):
        return
    above = min(costs) > matched.target
    which, than, remedy = ("smallest", "more", "smaller") if above else ("largest", "less", "larger")
    unit = matched.unit.replace("_", " ").replace("macs", "MACs")
    raise ButtressError(
        f"every {matched.knob} costs {than} than {_number(matched.target)} {unit}: the {which}, {matched.size}, costs "
        f"{_number(matched.cost)}; give {remedy} {matched.knob}s or another target"
    )


def _number(cost: float) -> str:
    return show(int(cost)) if cost == int(cost) else show(cost)
