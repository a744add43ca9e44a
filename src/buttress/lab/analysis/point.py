"""The points that fits and comparisons work on: what a model costs, and how far it errs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from buttress import ButtressError

Against = Literal["macs", "seconds"]
Array = NDArray[np.float64]

UNITS: dict[str, str] = {"macs": "MACs", "seconds": "s"}


class FitError(ButtressError, ValueError):
    """Points that no power law fits, or a value that a law does not reach."""


@dataclass(frozen=True)
class Point:
    """One model: its cost and its error, averaged over seeds as in the paper."""

    macs: float
    """Multiply-accumulates of the forward pass."""
    error: float
    """Error or loss: the mean over seeds."""
    seconds: float | None = None
    """Seconds of all training steps; None if they were not measured."""
    width: int | None = None
    """Width of the model; None if it has none."""
    by_seed: tuple[float, ...] = ()
    """Error of each seed; empty if they are not known one by one."""

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return max(1, len(self.by_seed))


def columns(points: Sequence[Point], against: Against) -> tuple[Array, Array]:
    """Costs and errors of points.

    Args:
        points: The points.
        against: The cost: "macs" or "seconds".

    Shape:
        Returns two arrays of shape (points,).

    Raises:
        FitError: If a point has no such cost, or a cost or error has no logarithm.
    """
    if against not in get_args(Against):
        raise FitError(f"points have no {against!r}: use against={' or '.join(map(repr, get_args(Against)))}")
    for p in points:
        x = getattr(p, against)
        if x is None:
            raise FitError(f"{p} has no {against}: measure them, leave the point out, or use against='macs'")
        if not is_comparable(p, against):
            raise FitError(f"{p} has no logarithm: {against} and error must be above zero and finite; leave it out")
    x = np.array([getattr(p, against) for p in points], dtype=np.float64)
    return x, np.array([p.error for p in points], dtype=np.float64)


def is_comparable(point: Point, against: Against) -> bool:
    """Whether a point has a cost, and a cost and an error that have logarithms."""
    x = getattr(point, against)
    return x is not None and 0 < x < math.inf and 0 < point.error < math.inf


def short_cost(cost: float, against: Against) -> str:
    """A cost for people: "43 s", "9.9e6 MACs"."""
    return f"{cost:.0f} s" if against == "seconds" else f"{short(cost)} MACs"


def short(x: float) -> str:
    """9.4e4 for 94321."""
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}e{int(power)}"


def seed_noise(points: Iterable[Point]) -> float | None:
    """Standard deviation of ln(error) between seeds, pooled over all points with two seeds or more.

    It is pooled because two or three seeds of one model say little about their spread, while many models together do;
    relative noise is about the same for all sizes.

    Args:
        points: Points of any lines.

    Returns:
        The standard deviation, or None if no point has two seeds. Points with an error of zero have no logarithm and do
        not count.
    """
    logs = [np.log(p.by_seed) for p in points if p.seeds > 1 and min(p.by_seed) > 0]
    degrees = sum(len(values) - 1 for values in logs)
    if not degrees:
        return None
    squares = sum(float(np.square(values - values.mean()).sum()) for values in logs)
    return math.sqrt(squares / degrees)
