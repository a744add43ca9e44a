"""One bent law for all structures: error = floor + scale * x ** -exponent, with the floor or the exponent in common.

The error of larger and larger models approaches a floor, so in logarithms its curve bends, and the slope of a straight
line depends on where it was fitted. A law with a floor describes curves of different ranges at once. Floor and exponent
are nearly interchangeable within two or three decades: which of them differs between lines depends on which of them is
held in common, so a law describes the points and proves neither.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from buttress import MissingExtraError
from buttress.lab.analysis.comparison import Estimate
from buttress.lab.analysis.fits import MIN_SIZES
from buttress.lab.analysis.point import Against, Array, FitError, Point, columns, seed_noise

Key = TypeVar("Key", bound=Hashable)
Shared = Literal["floor", "exponent", "nothing"]

RESAMPLES = 200
"""Number of fits to errors as other seeds might have given them."""
STARTING_FLOORS = (0.0, 0.2, 0.4, 0.6)
"""Floors from which fits start, relative to the lowest error; the best fit counts."""


@dataclass(frozen=True)
class SaturatingLaw(Generic[Key]):
    """A law with a floor, fitted to several lines at once. Standard errors are those of the noise between seeds."""

    shared: Shared
    """The parameter that all lines have in common."""
    floors: Mapping[Key, Estimate]
    exponents: Mapping[Key, Estimate]
    scatter: float
    """Standard deviation of ln(error) about the law. Where it is larger than the noise between seeds, the curves have
    another shape than the law."""
    degrees: int
    """Number of points minus number of parameters."""


def fit_saturating(
    lines: Mapping[Key, Sequence[Point]], shared: Shared = "floor", *, against: Against = "macs", seed: int = 0
) -> SaturatingLaw[Key]:
    """Fit error = floor + scale * x ** -exponent to several lines at once, by least squares in ln(error).

    Args:
        lines: Points of each line, at three costs or more.
        shared: Which parameter all lines have in common: "floor", "exponent" or "nothing".
        against: The cost x: "macs" or "seconds".
        seed: Seed of the resampling.

    Returns:
        The law.

    Raises:
        FitError: If a line has too few points, or the points do not determine the law.
        MissingExtraError: If scipy is not installed.
    """
    if shared not in get_args(Shared):
        raise FitError(f"lines share {' or '.join(map(repr, get_args(Shared)))}, not {shared!r}")
    problem = _Problem.of(lines, shared, against)
    best = problem.solve(problem.log_error)
    degrees = problem.log_error.size - best.x.size
    if degrees < 1:
        raise FitError(f"{problem.log_error.size} points do not determine {best.x.size} parameters: add model sizes")
    noise = seed_noise(p for line in lines.values() for p in line)
    errors = problem.seed_errors(best.x, noise, seed)

    def estimate(index: int) -> Estimate:
        return Estimate(float(best.x[index]), None if errors is None else float(errors[index]))

    return SaturatingLaw(
        shared=shared,
        floors={key: estimate(problem.floor_index(i)) for i, key in enumerate(lines)},
        exponents={key: estimate(problem.exponent_index(i)) for i, key in enumerate(lines)},
        scatter=math.sqrt(2 * best.cost / degrees),
        degrees=degrees,
    )


@dataclass(frozen=True)
class _Problem:
    """Least squares for one vector of parameters: the floors, the exponents, and ln(scale) of each line.

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

    @property
    def floors(self) -> int:
        """Number of floors."""
        return 1 if self.shared == "floor" else self.count

    @property
    def exponents(self) -> int:
        """Number of exponents."""
        return 1 if self.shared == "exponent" else self.count

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.floors + self.exponents + self.count

    def floor_index(self, line: int) -> int:
        return line % self.floors

    def exponent_index(self, line: int) -> int:
        return self.floors + line % self.exponents

    def predict(self, parameters: Array) -> Array:
        """ln(error) of every point, (points,)."""
        floors, exponents, scales = np.split(parameters, [self.floors, self.floors + self.exponents])
        floor, exponent = floors[self.line % self.floors], exponents[self.line % self.exponents]
        return np.log(floor + np.exp(scales[self.line] - exponent * self.log_cost))

    def solve(self, log_error: Array, start: Array | None = None) -> Any:
        """The best fit to errors, from a start or from several floors."""
        try:
            from scipy.optimize import least_squares  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtraError("fitting a law with a floor needs scipy: pip install 'buttress[lab]'") from None
        starts = [start] if start is not None else [self._start(share) for share in STARTING_FLOORS]
        lower = np.full(self.size, -np.inf)
        lower[: self.floors] = 0.0
        fits = [least_squares(lambda p: self.predict(p) - log_error, s, bounds=(lower, np.inf)) for s in starts]
        return min(fits, key=lambda fit: fit.cost)

    def _start(self, share: float) -> Array:
        """Parameters with floors at a share of the lowest error."""
        lowest = float(np.exp(self.log_error.min()))
        start = np.full(self.size, math.log(lowest))
        start[: self.floors] = share * lowest + 1e-3
        start[self.floors : self.floors + self.exponents] = 0.2
        return start

    def seed_errors(self, best: Array, noise: float | None, seed: int) -> Array | None:
        """Standard deviations of the parameters over errors as other seeds might have given them."""
        if noise is None:
            return None
        rng = np.random.default_rng(seed)
        draws = self.log_error + noise / np.sqrt(self.seeds) * rng.standard_normal((RESAMPLES, self.log_error.size))
        start = best + 1e-6  # a floor of zero is at its bound, where a solution cannot start
        deviations: Array = np.std([self.solve(draw, start).x for draw in draws], axis=0, ddof=1)
        return deviations
