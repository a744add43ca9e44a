"""Structures compared at equal cost: by how much their errors differ, and where one overtakes the other.

Comparisons read the frontiers of both lines, straight between neighboring models in logarithms, and no power law. Their
uncertainty is the noise between seeds, carried through by a bootstrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from buttress.lab.analysis.frontier import Frontier, crossings
from buttress.lab.analysis.point import Against, Array, FitError, Point, columns, seed_noise

RESAMPLES = 400
"""Number of bootstrap samples of a comparison."""


@dataclass(frozen=True)
class Gap:
    """The difference between two errors at one cost."""

    cost: float
    """MACs or seconds."""
    difference: float
    """Error of the one minus error of the other."""
    standard_error: float | None
    """From the noise between seeds; None if it is unknown."""


@dataclass(frozen=True)
class Crossing:
    """The cost at which one frontier overtakes the other for good."""

    cost: float
    """MACs or seconds."""
    low: float | None
    """Lower end of its 95 % interval over seeds; None if the noise between seeds is unknown."""
    high: float | None
    """Upper end of the interval."""


@dataclass(frozen=True)
class Comparison:
    """One line of models compared with another at equal cost."""

    against: Against
    """The cost: "macs" or "seconds"."""
    gaps: tuple[Gap, ...]
    """Differences at the cost of each model of either line, within the costs that both span; rising."""
    crossing: Crossing | None
    """Where the sign of the difference changes last; None if it does not change."""

    @property
    def mean(self) -> float:
        """Mean difference over the costs that both span, on a logarithmic axis."""
        cost, difference = np.log([g.cost for g in self.gaps]), np.array([g.difference for g in self.gaps])
        if len(self.gaps) == 1:
            return float(difference[0])
        return float(((difference[1:] + difference[:-1]) / 2 * np.diff(cost)).sum() / (cost[-1] - cost[0]))

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest difference."""
        differences = [g.difference for g in self.gaps]
        return min(differences), max(differences)

    @property
    def standard_error(self) -> float | None:
        """Largest standard error of a difference; None if the noise between seeds is unknown."""
        errors = [g.standard_error for g in self.gaps if g.standard_error is not None]
        return max(errors, default=None)


def compare(
    line: Sequence[Point],
    base: Sequence[Point],
    *,
    against: Against = "macs",
    noise: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare two lines of models at equal cost.

    Args:
        line: Points of one line.
        base: Points of the line to compare it with.
        against: The cost: "macs" or "seconds".
        noise: Standard deviation of ln(error) between seeds, as `seed_noise` estimates it. Default: that of the points
            of both lines.
        seed: Seed of the bootstrap.

    Returns:
        The comparison.

    Raises:
        FitError: If no cost lies within both lines, or a point has no such cost.
    """
    noise = seed_noise([*line, *base]) if noise is None else noise
    first, second = Frontier.of(line, against), Frontier.of(base, against)
    start, end = max(first.cost[0], second.cost[0]), min(first.cost[-1], second.cost[-1])
    if start > end:
        raise FitError(
            f"no {against} lie within both lines: they span {first.cost[0]:.3g} .. {first.cost[-1]:.3g} and "
            f"{second.cost[0]:.3g} .. {second.cost[-1]:.3g}; add model sizes"
        )
    costs = sorted({float(x) for x in (*first.cost, *second.cost) if start <= x <= end})
    differences = np.array([first.at(x) - second.at(x) for x in costs])
    spread: Array | None = None
    crossed: list[float] = []
    if noise is not None:
        samples = list(_resample(line, base, against, noise, np.random.default_rng(seed)))
        spread = np.std([[a.at(x) - b.at(x) for x in costs] for a, b in samples], axis=0, ddof=1)
        crossed = [x for a, b in samples for x in _inside(crossings(a, b), start, end)[-1:]]
    gaps = tuple(
        Gap(x, float(d), None if spread is None else float(spread[i]))
        for i, (x, d) in enumerate(zip(costs, differences, strict=True))
    )
    return Comparison(against, gaps, _crossing(_inside(crossings(first, second), start, end), crossed))


def _inside(costs: Sequence[float], start: float, end: float) -> list[float]:
    """Costs within a range: beyond the last model of a line, a crossing says only that no larger one was trained."""
    return [x for x in costs if start <= x <= end]


def _crossing(costs: Sequence[float], samples: Sequence[float]) -> Crossing | None:
    if not costs:
        return None
    low, high = map(float, np.quantile(samples, [0.025, 0.975])) if samples else (None, None)
    return Crossing(costs[-1], low, high)


def _resample(
    line: Sequence[Point], base: Sequence[Point], against: Against, noise: float, rng: np.random.Generator
) -> Iterator[tuple[Frontier, Frontier]]:
    """Frontiers of both lines as other seeds might have given them."""
    columns_and_noise = [
        (*columns(points, against), noise / np.sqrt([p.seeds for p in points])) for points in (line, base)
    ]
    for _ in range(RESAMPLES):
        first, second = (
            _frontier_from(cost, error * np.exp(deviation * rng.standard_normal(error.size)), error)
            for cost, error, deviation in columns_and_noise
        )
        yield first, second


def _frontier_from(cost: Array, error: Array, original: Array) -> Frontier:
    """The frontier of resampled errors, of the models that were on the frontier before.

    With the membership fixed, a sample has the cost range of the original, and a lucky neighbor does not bias it.
    """
    kept = np.isin(cost, Frontier.through(cost, original).cost)
    order = np.argsort(cost[kept])
    return Frontier(cost[kept][order], np.minimum.accumulate(error[kept][order]))


def common_window(*lines: Sequence[Point], against: Against = "macs") -> tuple[float, float]:
    """The range of costs that all lines span, for fits whose exponents are to be compared.

    Args:
        *lines: Points of each line.
        against: The cost: "macs" or "seconds".

    Returns:
        Smallest and largest cost.

    Raises:
        FitError: If the lines have no cost in common.
    """
    ranges = [columns(points, against)[0] for points in lines]
    low, high = max(float(x.min()) for x in ranges), min(float(x.max()) for x in ranges)
    if low >= high:
        raise FitError(f"the lines have no {against} in common: add model sizes")
    return low, high
