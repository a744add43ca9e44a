"""Lines of models compared at equal cost: by how much their errors differ, and where one overtakes the other.

Comparisons read the frontiers of both lines, straight between neighboring models in logarithms, and no power law. Their
uncertainty is the noise between seeds, carried through by a bootstrap; it contains neither the noise of measured times
nor the error of interpolating between model sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from buttress.lab.analysis.frontier import Frontier, common_range, crossings, mean_over_log
from buttress.lab.analysis.point import Against, Array, FitError, Point, columns, is_comparable, seed_noise

Key = TypeVar("Key", bound=Hashable)

RESAMPLES = 400
"""Number of bootstrap samples of a comparison."""
GRID = 41
"""Number of costs at which the trend of a ratio is fitted."""


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error from the noise between seeds; None if that is unknown."""

    value: float
    standard_error: float | None


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
    """Upper end of the interval; None if that is unknown, or beyond the costs that both lines span."""


@dataclass(frozen=True)
class Comparison:
    """One line of models compared with another at equal cost."""

    against: Against
    """The cost: "macs" or "seconds"."""
    gaps: tuple[Gap, ...]
    """Differences at the cost of each model of either line, within the costs that both span; rising."""
    crossing: Crossing | None
    """Where the sign of the difference changes last; None if it does not change."""
    sign_changes: int
    """How often it changes."""
    first_ratio: Estimate
    """Ratio of the errors at the smallest cost that both span."""
    last_ratio: Estimate
    """Ratio of the errors at the largest cost that both span."""
    trend: Estimate | None
    """Slope of ln(ratio) on ln(cost): the exponent of the base minus that of the line, both on the same costs. None if
    they have only one cost in common."""

    @property
    def mean(self) -> float:
        """Mean difference over the costs that both span, on a logarithmic axis."""
        return mean_over_log(np.array([g.cost for g in self.gaps]), np.array([g.difference for g in self.gaps]))

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
        FitError: If no cost lies within both lines, a point has no such cost, or the noise is not a number from 0 up.
    """
    noise = _checked_noise(seed_noise([*line, *base]) if noise is None else noise)
    pair = Frontier.of(line, against), Frontier.of(base, against)
    span = common_range(*pair)
    if span is None:
        spans = " and ".join(f"{frontier.cost[0]:.3g} .. {frontier.cost[-1]:.3g}" for frontier in pair)
        raise FitError(f"no {against} lie within both lines: they span {spans}; add model sizes")
    start, end = span
    costs = sorted({float(x) for frontier in pair for x in frontier.cost if start <= x <= end})
    knots, ends = np.array(costs), np.array([start, end])
    samples = [] if noise is None else list(_resample(line, base, against, noise, np.random.default_rng(seed)))
    differences = _estimates(pair, samples, lambda a, b: a.errors_at(knots) - b.errors_at(knots))
    ratios = _estimates(pair, samples, lambda a, b: a.errors_at(ends) / b.errors_at(ends))
    trend = None if start == end else _estimates(pair, samples, lambda a, b: _trend(a, b, start, end))[0]
    crossed = [x for x in crossings(*pair) if start <= x <= end]
    return Comparison(
        against=against,
        gaps=tuple(Gap(x, e.value, e.standard_error) for x, e in zip(costs, differences, strict=True)),
        crossing=_crossing(crossed[-1], pair, samples, start, end) if crossed else None,
        sign_changes=len(crossed),
        first_ratio=ratios[0],
        last_ratio=ratios[1],
        trend=trend,
    )


def compare_all(
    lines: Mapping[Key, Sequence[Point]], base: Key, *, against: Against = "macs", noise: float | None = None
) -> dict[Key, Comparison]:
    """Compare every line with one of them.

    Args:
        lines: Points of each line. Those without a cost, or whose cost or error has no logarithm, are left out.
        base: The line to compare with.
        against: The cost: "macs" or "seconds".
        noise: Standard deviation of ln(error) between seeds. Default: that of all lines together.

    Returns:
        The comparisons; lines that have no cost in common with the base are left out.

    Raises:
        FitError: If the noise is not a number from 0 up.
    """
    noise = _checked_noise(seed_noise(p for line in lines.values() for p in line) if noise is None else noise)
    usable = {key: [p for p in line if is_comparable(p, against)] for key, line in lines.items()}
    frontiers = {key: Frontier.of(line, against) for key, line in usable.items() if line}
    return {
        key: compare(usable[key], usable[base], against=against, noise=noise)
        for key in frontiers
        if key != base and base in frontiers and common_range(frontiers[key], frontiers[base]) is not None
    }


Pair = tuple[Frontier, Frontier]
Measure = Callable[[Frontier, Frontier], Array]


def _checked_noise(noise: float | None) -> float | None:
    if noise is not None and not 0 <= noise < math.inf:
        raise FitError(f"the noise between seeds is a number from 0 up, got {noise}")
    return noise


def _trend(first: Frontier, second: Frontier, start: float, end: float) -> Array:
    """Least-squares slope of ln(ratio) on ln(cost), at costs that are evenly spaced in logarithms; shape (1,)."""
    costs = np.geomspace(start, end, GRID)
    u = np.log(costs) - np.log(costs).mean()
    return np.array([(u @ np.log(first.errors_at(costs) / second.errors_at(costs))) / (u @ u)])


def _estimates(pair: Pair, samples: Sequence[Pair], quantity: Measure) -> list[Estimate]:
    """Values of a quantity of two frontiers, with their standard errors over samples of both."""
    values = quantity(*pair)
    if not samples:
        return [Estimate(float(value), None) for value in values]
    spread = np.std([quantity(*sample) for sample in samples], axis=0, ddof=1)
    return [Estimate(float(value), float(error)) for value, error in zip(values, spread, strict=True)]


def _crossing(cost: float, pair: Pair, samples: Sequence[Pair], start: float, end: float) -> Crossing:
    """The last crossing, with its interval over samples in which the same line ends ahead or does not."""
    if not samples:
        return Crossing(cost, None, None)

    def ahead(first: Frontier, second: Frontier) -> bool:
        return first.at(end) < second.at(end)

    crossed = []
    for sample in samples:
        inside = [x for x in crossings(*sample) if start <= x <= end]
        if ahead(*sample) != ahead(*pair):
            crossed.append(math.inf)  # not within the costs that both lines span
        else:
            crossed.append(inside[-1] if inside else start)
    low, high = map(float, np.quantile(crossed, [0.025, 0.975], method="inverted_cdf"))
    return Crossing(cost, low, high if high < math.inf else None)


def _resample(
    line: Sequence[Point], base: Sequence[Point], against: Against, noise: float, rng: np.random.Generator
) -> Iterator[Pair]:
    """Frontiers of both lines as other seeds might have given them."""
    models = [_on_frontier(points, against, noise) for points in (line, base)]
    for _ in range(RESAMPLES):
        first, second = (
            Frontier(cost, np.minimum.accumulate(error * np.exp(deviation * rng.standard_normal(error.size))))
            for cost, error, deviation in models
        )
        yield first, second


def _on_frontier(points: Sequence[Point], against: Against, noise: float) -> tuple[Array, Array, Array]:
    """Cost, error and noise of the models on a frontier.

    A sample keeps the models of the frontier. So it spans the same costs, and a neighbor's luck does not bias it.
    """
    frontier = Frontier.of(points, against)
    pairs = list(zip(*columns(points, against), strict=True))
    models = [points[pairs.index(pair)] for pair in zip(frontier.cost, frontier.error, strict=True)]
    # Beyond this, samples would overflow; no two seeds of a model that can be compared differ by e^10.
    return frontier.cost, frontier.error, np.minimum(noise / np.sqrt([p.seeds for p in models]), 10.0)
