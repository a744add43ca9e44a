"""The frontier of a set of models: the lowest error that a budget of MACs or of training time reaches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from buttress.lab.analysis.point import Against, Array, FitError, Point, columns


@dataclass(frozen=True)
class Frontier:
    """Models that no cheaper model matches, and straight lines between them where both axes are logarithmic.

    A larger budget than that of the last model still buys that model, so the frontier continues flat. A budget below
    that of the first model buys nothing.
    """

    cost: Array  # (points,), rising
    error: Array  # (points,), falling; in a sample of other seeds' errors, not rising

    @classmethod
    def of(cls, points: Sequence[Point], against: Against = "macs") -> Frontier:
        """The frontier of points.

        Args:
            points: One point or more.
            against: The cost: "macs" or "seconds".

        Returns:
            The frontier.

        Raises:
            FitError: If there is no point, a point has no such cost, or a cost or error has no logarithm.
        """
        if not points:
            raise FitError("there are no points: add models")
        return cls.through(*columns(points, against))

    @classmethod
    def through(cls, cost: Array, error: Array) -> Frontier:
        """The frontier of models with these costs and errors, both of shape (models,), in any order."""
        order = np.lexsort((error, cost))
        before = np.minimum.accumulate(np.concatenate([[np.inf], error[order]]))[:-1]
        optimal = order[error[order] < before]
        return cls(cost[optimal], error[optimal])

    def at(self, cost: float) -> float:
        """The lowest error for a budget; infinity if it is below the first model's cost."""
        return float(self.errors_at(np.array([cost]))[0])

    def errors_at(self, costs: Array) -> Array:
        """The lowest error for each budget, (costs,); see `at`."""
        errors = np.exp(np.interp(np.log(costs), np.log(self.cost), np.log(self.error)))
        return np.where(costs < self.cost[0], np.inf, errors)

    def cost_at(self, error: float) -> float | None:
        """The budget at which the frontier reaches an error, or None if it does not, or only before its first model."""
        if not self.error[-1] <= error <= self.error[0]:
            return None
        return float(np.exp(np.interp(-math.log(error), -np.log(self.error), np.log(self.cost))))


def common_range(first: Frontier, second: Frontier) -> tuple[float, float] | None:
    """Smallest and largest cost that both frontiers span, or None if there is none."""
    start, end = max(first.cost[0], second.cost[0]), min(first.cost[-1], second.cost[-1])
    return (float(start), float(end)) if start <= end else None


def mean_log_ratio(first: Frontier, second: Frontier) -> float | None:
    """Mean of ln(error of the first / error of the second) over the costs that both span, on a logarithmic axis.

    Returns:
        The mean, or None if they have no cost in common.
    """
    span = common_range(first, second)
    if span is None:
        return None
    knots = np.array(sorted({float(x) for x in (*first.cost, *second.cost) if span[0] <= x <= span[1]}))
    ratios = np.log(first.errors_at(knots) / second.errors_at(knots))
    return mean_over_log(knots, ratios)


def mean_over_log(x: Array, y: Array) -> float:
    """Mean of a function that is straight between its points, over the logarithm of its argument.

    Args:
        x: Arguments, rising, (points,).
        y: Values, (points,).

    Returns:
        The mean; the value itself if there is one point.
    """
    if len(x) == 1:
        return float(y[0])
    u = np.log(x)
    return float((y[1:] + y[:-1]) / 2 @ np.diff(u) / (u[-1] - u[0]))


def crossings(first: Frontier, second: Frontier) -> list[float]:
    """Costs at which one frontier passes the other, rising.

    A frontier that starts below the other has not crossed it there: before, there was nothing to compare.
    """
    start = max(first.cost[0], second.cost[0])
    knots = [start, *sorted({*first.cost, *second.cost} - {start})]
    knots = [float(x) for x in knots if x >= start]
    ratios = first.errors_at(np.array(knots)) / second.errors_at(np.array(knots))
    return list(_sign_changes(knots, np.log(ratios).tolist()))


def _sign_changes(knots: Sequence[float], gaps: Sequence[float]) -> Iterator[float]:
    """Where a function that is piecewise linear in the logarithm of its argument changes its sign."""
    last = 0  # the last knot whose gap is not zero
    for i, gap in enumerate(gaps):
        if gap * gaps[last] < 0:
            share = gaps[i - 1] / (gaps[i - 1] - gap)
            yield float(np.exp(math.log(knots[i - 1]) + share * math.log(knots[i] / knots[i - 1])))
        if gap:
            last = i
