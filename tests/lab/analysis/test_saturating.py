"""Laws with a floor, fitted to several lines at once."""

from __future__ import annotations

import numpy as np
import pytest

from buttress.lab.analysis import FitError, Point
from buttress.lab.analysis.saturating import fit_saturating


def line(
    floor: float, scale: float, exponent: float, *, sizes: int = 6, noise: float = 0.0, seeds: int = 1, rng: int = 0
) -> list[Point]:
    draws = np.random.default_rng(rng).standard_normal((sizes, seeds))
    points = []
    for i in range(sizes):
        cost = 1e5 * 3.0**i
        by_seed = tuple((floor + scale * (cost / 1e6) ** -exponent) * np.exp(noise * draws[i]))
        points.append(Point(cost, float(np.mean(by_seed)), cost / 1e4, None, by_seed))
    return points


def test_recovers_a_common_floor() -> None:
    law = fit_saturating({"a": line(20, 20, 0.3), "b": line(20, 30, 0.2)})
    assert law.floors["a"].value == pytest.approx(20, rel=1e-3)
    assert law.floors["a"] == law.floors["b"]
    assert [law.exponents[k].value for k in "ab"] == pytest.approx([0.3, 0.2], rel=1e-3)
    assert law.scatter < 1e-6
    assert law.degrees == 12 - 5


def test_recovers_a_common_exponent() -> None:
    law = fit_saturating({"a": line(20, 20, 0.3), "b": line(5, 30, 0.3)}, "exponent", against="seconds")
    assert [law.floors[k].value for k in "ab"] == pytest.approx([20, 5], rel=1e-3)
    assert law.exponents["a"].value == law.exponents["b"].value == pytest.approx(0.3, rel=1e-3)


def test_a_power_law_has_no_floor() -> None:
    law = fit_saturating({"a": line(0, 20, 0.3), "b": line(0, 30, 0.2)})
    assert law.floors["a"].value == pytest.approx(0, abs=0.05)


def test_difference_finds_what_is_there_and_no_more() -> None:
    noisy = {name: line(20, scale, e, noise=0.005, rng=i) for i, (name, scale, e) in enumerate(
        [("dense", 30, 0.2), ("same", 22, 0.2), ("steeper", 22, 0.3)])}  # fmt: skip
    law = fit_saturating(noisy)
    assert law.difference("same", "dense").p_value > 0.05
    steeper = law.difference("steeper", "dense")
    assert steeper.p_value < 0.01
    assert steeper.estimate == pytest.approx(0.1, abs=4 * steeper.standard_error)
    assert steeper.degrees == 18 - 7


def test_differences_of_floors() -> None:
    law = fit_saturating(
        {"dense": line(20, 20, 0.3, noise=0.003), "a": line(15, 20, 0.3, noise=0.003, rng=1)}, "exponent"
    )
    apart = law.difference("a", "dense")
    assert apart.estimate == pytest.approx(-5, abs=4 * apart.standard_error)


def test_equal_lines_are_rarely_called_different() -> None:
    """The test of equal exponents has about its size, 5 %, although the curve bends and the ranges differ."""
    rejected = 0
    for trial in range(60):
        dense = line(20, 30, 0.25, noise=0.01, rng=2 * trial, sizes=7)[2:]
        other = line(20, 22, 0.25, noise=0.01, rng=2 * trial + 1, sizes=7)[:5]
        rejected += fit_saturating({"dense": dense, "a": other}).difference("a", "dense").p_value < 0.05
    assert rejected <= 8  # 99 % of binomial draws with p = 0.05 are at most 8


def test_error_over_seeds() -> None:
    one = fit_saturating({"a": line(20, 20, 0.3, noise=0.01), "b": line(20, 30, 0.2, noise=0.01, rng=1)})
    assert one.exponents["a"].seed_error is None
    assert "seeds" not in str(one.exponents["a"])
    lines = {"a": line(20, 20, 0.3, noise=0.01, seeds=4), "b": line(20, 30, 0.2, noise=0.01, seeds=4, rng=1)}
    law = fit_saturating(lines)
    error = law.exponents["b"].seed_error
    assert error is not None
    assert 0.2 < error / law.exponents["b"].standard_error < 5
    assert "seeds ±" in str(law.exponents["b"])


def test_too_few_sizes() -> None:
    with pytest.raises(FitError, match="needs 3 different macs or more of b"):
        fit_saturating({"a": line(20, 20, 0.3), "b": line(20, 20, 0.3, sizes=2)})
    with pytest.raises(FitError, match="3 points do not determine 3 parameters"):
        fit_saturating({"a": line(20, 20, 0.3, sizes=3)})
