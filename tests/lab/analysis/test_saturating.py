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


def test_with_nothing_in_common() -> None:
    law = fit_saturating({"a": line(20, 20, 0.3), "b": line(5, 30, 0.2)}, "nothing")
    assert [law.floors[k].value for k in "ab"] == pytest.approx([20, 5], rel=1e-2)
    assert [law.exponents[k].value for k in "ab"] == pytest.approx([0.3, 0.2], rel=1e-2)
    assert law.degrees == 12 - 6


def test_scatter_is_the_noise_where_the_law_holds() -> None:
    lines = {name: line(20, scale, 0.2, sizes=12, noise=0.01, rng=i) for i, (name, scale) in enumerate(
        [("a", 30), ("b", 22), ("c", 15)])}  # fmt: skip
    assert fit_saturating(lines).scatter == pytest.approx(0.01, rel=0.35)


def test_error_over_seeds() -> None:
    one = fit_saturating({"a": line(20, 20, 0.3, noise=0.01), "b": line(20, 30, 0.2, noise=0.01, rng=1)})
    assert one.exponents["a"].standard_error is None
    lines = {"a": line(20, 20, 0.3, noise=0.01, seeds=4), "b": line(20, 30, 0.2, noise=0.01, seeds=4, rng=1)}
    error = fit_saturating(lines).exponents["b"].standard_error
    assert error is not None
    others = []
    for i in range(2, 42, 2):
        a, b = (line(20, *ab, noise=0.01, seeds=4, rng=i + j) for j, ab in enumerate(((20, 0.3), (30, 0.2))))
        others.append(fit_saturating({"a": a, "b": b}).exponents["b"].value)
    assert error == pytest.approx(float(np.std(others)), rel=0.5)


def test_unknown_parameter() -> None:
    with pytest.raises(FitError, match="lines share 'floor' or 'exponent' or 'nothing', not 'flor'"):
        fit_saturating({"a": line(20, 20, 0.3)}, "flor")  # type: ignore[arg-type]


def test_too_few_sizes() -> None:
    with pytest.raises(FitError, match="needs 3 different macs or more of b"):
        fit_saturating({"a": line(20, 20, 0.3), "b": line(20, 20, 0.3, sizes=2)})
    with pytest.raises(FitError, match="3 points do not determine 3 parameters"):
        fit_saturating({"a": line(20, 20, 0.3, sizes=3)})
