"""One bent law for all structures: error = floor + scale * x ** -exponent, with the floor or the exponent in common.

The error of larger and larger models approaches a floor, so in logarithms its curve bends, and the slope of a straight
line depends on where it was fitted. A law with a floor describes curves of different ranges at once. Floor and exponent
are nearly interchangeable within two or three decades, so one of them has to be common to all lines for the other to be
compared.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from buttress import MissingExtraError
from buttress.lab.analysis.fits import MIN_SIZES, Difference
from buttress.lab.analysis.point import Against, Array, FitError, Point, columns, seed_noise

Key = TypeVar("Key", bound=Hashable)
Shared = Literal["floor", "exponent"]

RESAMPLES = 200
"""Number of fits to errors as other seeds might have given them."""
STARTING_FLOORS = (0.0, 0.2, 0.4, 0.6)
"""Floors from which fits start, relative to the lowest error; the best fit counts."""


@dataclass(frozen=True)
class Estimate:
    """A fitted parameter."""

    value: float
    standard_error: float
    """From the scatter about the law, which includes what the law does not describe."""
    seed_error: float | None
    """From the noise between seeds alone; None if it is unknown."""

    def __str__(self) -> str:
        seeds = "" if self.seed_error is None else f", seeds ± {self.seed_error:.2g}"
        return f"{self.value:.3f} ± {self.standard_error:.2g}{seeds}"


@dataclass(frozen=True)
class SaturatingLaw(Generic[Key]):
    """A law with a floor, fitted to several lines at once."""

    shared: Shared
    """The parameter that all lines have in common."""
    floors: Mapping[Key, Estimate]
    exponents: Mapping[Key, Estimate]
    scatter: float
    """Standard deviation of ln(error) about the law."""
    degrees: int
    """Number of points minus number of parameters."""
    _covariance: Array
    _own: Mapping[Key, int]
    """Index of each line's own floor or exponent among the parameters."""

    def difference(self, first: Key, second: Key) -> Difference:
        """Test whether two lines have the same value of the parameter that is not shared.

        Args:
            first: One line.
            second: The other line.

        Returns:
            The value of `first` minus that of `second`, and the t-test that it is zero.
        """
        values = self.exponents if self.shared == "floor" else self.floors
        i, j = self._own[first], self._own[second]
        variance = self._covariance[i, i] + self._covariance[j, j] - 2 * self._covariance[i, j]
        return Difference.test(values[first].value - values[second].value, math.sqrt(variance), self.degrees)


def fit_saturating(
    lines: Mapping[Key, Sequence[Point]], shared: Shared = "floor", *, against: Against = "macs", seed: int = 0
) -> SaturatingLaw[Key]:
    """Fit error = floor + scale * x ** -exponent to several lines at once, by least squares in ln(error).

    Args:
        lines: Points of each line, at three costs or more.
        shared: Which parameter all lines have in common: "floor" or "exponent".
        against: The cost x: "macs" or "seconds".
        seed: Seed of the resampling.

    Returns:
        The law.

    Raises:
        FitError: If a line has too few points, or the points do not determine the law.
        MissingExtraError: If scipy is not installed.
    """
    problem = _Problem.of(lines, shared, against)
    best = problem.solve(problem.log_error)
    degrees = problem.log_error.size - best.x.size
    if degrees < 1:
        raise FitError(f"{problem.log_error.size} points do not determine {best.x.size} parameters: add model sizes")
    scatter = math.sqrt(2 * best.cost / degrees)
    covariance = np.linalg.pinv(best.jac.T @ best.jac) * scatter**2
    errors = np.sqrt(np.diag(covariance))
    seed_errors = problem.seed_errors(best.x, seed_noise(p for line in lines.values() for p in line), seed)

    def estimate(index: int) -> Estimate:
        return Estimate(
            float(best.x[index]), float(errors[index]), None if seed_errors is None else float(seed_errors[index])
        )

    return SaturatingLaw(
        shared=shared,
        floors={key: estimate(problem.floor_index(i)) for i, key in enumerate(lines)},
        exponents={key: estimate(problem.exponent_index(i)) for i, key in enumerate(lines)},
        scatter=scatter,
        degrees=degrees,
        _covariance=covariance,
        _own={key: 1 + i for i, key in enumerate(lines)},
    )


@dataclass(frozen=True)
class _Problem:
    """Least squares for one vector of parameters: the shared one, then each line's own, then each ln(scale).

    Scales are those at the mean of ln(x), which makes them nearly independent of the exponents.
    """

    shared: Shared
    count: int
    """Number of lines."""
    line: NDArray[np.intp]  # (points,): the line of each point
    log_cost: Array  # (points,), about its mean
    log_error: Array  # (points,)
    seeds: Array  # (points,)

    @classmethod
    def of(cls, lines: Mapping[Key, Sequence[Point]], shared: Shared, against: Against) -> _Problem:
        for key, points in lines.items():
            if len({getattr(p, against) for p in points}) < MIN_SIZES:
                raise FitError(f"a law with a floor needs {MIN_SIZES} different {against} or more of {key}")
        every = [p for points in lines.values() for p in points]
        cost, error = columns(every, against)
        line = np.concatenate([np.full(len(points), i) for i, points in enumerate(lines.values())])
        log_cost = np.log(cost) - np.log(cost).mean()
        return cls(shared, len(lines), line, log_cost, np.log(error), np.array([p.seeds for p in every], np.float64))

    def floor_index(self, line: int) -> int:
        return 0 if self.shared == "floor" else 1 + line

    def exponent_index(self, line: int) -> int:
        return 1 + line if self.shared == "floor" else 0

    def predict(self, parameters: Array) -> Array:
        """ln(error) of every point, (points,)."""
        own = parameters[1 + self.line]
        common = np.broadcast_to(parameters[0], own.shape)
        floor, exponent = (common, own) if self.shared == "floor" else (own, common)
        return np.log(floor + np.exp(parameters[1 + self.count + self.line] - exponent * self.log_cost))

    def solve(self, log_error: Array, start: Array | None = None) -> Any:
        """The best fit to errors, from a start or from several floors."""
        try:
            from scipy.optimize import least_squares  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtraError("fitting a law with a floor needs scipy: pip install 'buttress[lab]'") from None
        starts = [start] if start is not None else [self._start(share) for share in STARTING_FLOORS]
        lower = np.full(1 + 2 * self.count, -np.inf)
        lower[[self.floor_index(i) for i in range(self.count)]] = 0.0
        fits = [least_squares(lambda p: self.predict(p) - log_error, s, bounds=(lower, np.inf)) for s in starts]
        return min(fits, key=lambda fit: fit.cost)

    def _start(self, share: float) -> Array:
        """Parameters with floors at a share of the lowest error."""
        lowest = float(np.exp(self.log_error.min()))
        start = np.full(1 + 2 * self.count, math.log(lowest))
        for i in range(self.count):
            start[self.exponent_index(i)] = 0.2
            start[self.floor_index(i)] = share * lowest + 1e-3
        return start

    def seed_errors(self, best: Array, noise: float | None, seed: int) -> Array | None:
        """Standard deviations of the parameters over errors as other seeds might have given them."""
        if noise is None:
            return None
        rng = np.random.default_rng(seed)
        draws = self.log_error + noise / np.sqrt(self.seeds) * rng.standard_normal((RESAMPLES, self.log_error.size))
        deviations: Array = np.std([self.solve(draw, best + 1e-6).x for draw in draws], axis=0, ddof=1)
        return deviations
