"""Power laws: recovered from points, with intervals that cover, and tests that agree with other implementations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import buttress as bt
from buttress.lab.analysis import Difference, FitError, Point, PowerLaw, Saving, difference, fit, saving
from buttress.lab.analysis import published as paper

some = settings(deadline=None, derandomize=True, max_examples=50)
exponents = st.floats(0.01, 2.0)
scales = st.floats(1e-3, 1e3)
sizes = st.lists(st.floats(1e3, 1e9), min_size=3, max_size=12, unique_by=lambda x: round(math.log(x), 1))

TRAIN = {name: [Point(macs, error) for macs, error in curve] for name, curve in paper.TRAIN_ERROR.items()}
MACS = (1e5, 3e5, 1e6, 4e6, 1e7, 3e7, 1e8, 2e8)


def law(exponent: float, scale: float, macs: Sequence[float], noise: float = 0.0, seed: int = 0) -> list[Point]:
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(macs)))
    return [Point(m, scale * m**-exponent * float(e)) for m, e in zip(macs, errors, strict=True)]


def logs(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    return np.log([p.macs for p in points]), np.log([p.error for p in points])


@some
@given(exponents, scales, sizes)
def test_a_law_without_noise_is_recovered(exponent: float, scale: float, macs: list[float]) -> None:
    found = fit(law(exponent, scale, macs), resamples=20)
    assert found.exponent == pytest.approx(exponent, rel=1e-6)
    assert found.scale == pytest.approx(scale, rel=1e-5)
    assert found.exponent_error < 1e-9
    assert found.low == pytest.approx(exponent, rel=1e-5)
    assert found.high == pytest.approx(exponent, rel=1e-5)
    assert found.points == len(macs)
    assert found.window == (min(macs), max(macs))
    assert found.predict(macs[0]) == pytest.approx(scale * macs[0] ** -exponent, rel=1e-6)


@some
@given(exponents, scales, st.floats(1e3, 1e9))
def test_x_at_undoes_predict(exponent: float, scale: float, x: float) -> None:
    found = PowerLaw(exponent, 0.0, scale, exponent, exponent, 0.95, 3, (1e3, 1e9))
    assert found.x_at(found.predict(x)) == pytest.approx(x, rel=1e-6)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_slope_scale_and_standard_error_are_those_of_scipy(count: int) -> None:
    points = law(0.1, 100.0, MACS[:count], noise=0.05)
    found, expected = fit(points), stats.linregress(*logs(points))
    assert found.exponent == pytest.approx(-expected.slope, rel=1e-12)
    assert found.exponent_error == pytest.approx(expected.stderr, rel=1e-9)
    assert math.log(found.scale) == pytest.approx(expected.intercept, rel=1e-12)


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal(count)


def skewed(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.exponential(size=count) - 1


@pytest.mark.parametrize("noise", [normal, skewed])
@pytest.mark.parametrize(("count", "level"), [(3, 0.95), (5, 0.95), (8, 0.95), (8, 0.5)])
def test_the_interval_covers_the_truth_as_often_as_it_says(
    count: int, level: float, noise: Callable[[np.random.Generator, int], np.ndarray]
) -> None:
    # Standard deviation of the share: 1.1 % at 95 %, 2.5 % at 50 %. Plain percentiles would cover 60 % at 3 points.
    rng = np.random.default_rng(count)
    runs = 400
    inside = 0
    for seed in range(runs):
        errors = 100 * np.array(MACS[:count]) ** -0.1 * np.exp(0.02 * noise(rng, count))
        found = fit([Point(*p) for p in zip(MACS, errors, strict=False)], level=level, resamples=200, seed=seed)
        inside += found.low <= 0.1 <= found.high
    assert abs(inside / runs - level) < 4 * math.sqrt(level * (1 - level) / runs)


@pytest.mark.parametrize(("cheap_count", "dear_count"), [(8, 5), (8, 4), (3, 3)])
def test_the_interval_of_a_saving_covers_the_truth_as_often_as_it_says(cheap_count: int, dear_count: int) -> None:
    truth = (190 / 50) ** (1 / 0.10) / (200 / 50) ** (1 / 0.12)
    runs = 400
    inside = 0
    for seed in range(runs):
        cheap = law(0.12, 200.0, MACS[:cheap_count], noise=0.02, seed=2 * seed)
        dear = law(0.10, 190.0, MACS[:dear_count], noise=0.02, seed=2 * seed + 1)
        found = saving(cheap, dear, 50.0, resamples=200, seed=seed)
        inside += found.low <= truth <= found.high
    assert abs(inside / runs - 0.95) < 4 * math.sqrt(0.95 * 0.05 / runs)


def test_a_higher_level_is_wider_and_more_noise_too() -> None:
    points, rough = law(0.1, 100.0, MACS, noise=0.02), law(0.1, 100.0, MACS, noise=0.04)
    half, most, wild = fit(points, level=0.5), fit(points), fit(rough)
    assert most.low < half.low < half.exponent < half.high < most.high
    assert wild.high - wild.low == pytest.approx(2 * (most.high - most.low), rel=1e-6)


@some
@given(st.permutations(range(len(MACS))))
def test_the_order_of_points_does_not_matter(order: list[int]) -> None:
    points = [*law(0.1, 100.0, MACS[:6], noise=0.05), Point(MACS[0], 20.0), Point(MACS[0], 21.0)]
    other = law(0.08, 110.0, MACS, noise=0.05, seed=1)
    mixed, mixed_other = [points[i] for i in order], [other[i] for i in order]
    assert fit(mixed, resamples=50) == fit(points, resamples=50)
    assert difference(mixed, mixed_other) == difference(points, other)
    assert saving(mixed, mixed_other, resamples=50) == saving(points, other, resamples=50)


def test_same_seed_same_interval_other_seed_another() -> None:
    points = law(0.1, 100.0, MACS, noise=0.05)
    assert fit(points) == fit(points)
    first, second = fit(points, seed=1), fit(points, seed=2)
    assert first.low != second.low
    assert first.low == pytest.approx(second.low, rel=0.1)
    assert first.exponent == second.exponent


def test_only_points_inside_the_window_count_bounds_included() -> None:
    bent = [*law(0.3, 100.0, MACS[:3]), *law(0.1, 100.0, MACS[3:])]
    found = fit(bent, window=(MACS[3], MACS[6]))
    assert found.exponent == pytest.approx(0.1)
    assert found.window == (MACS[3], MACS[6])
    assert found.points == 4
    assert fit(bent).exponent != pytest.approx(0.1, abs=0.02)
    assert difference(bent, law(0.1, 50.0, MACS), window=(MACS[3], MACS[7])).estimate == pytest.approx(0, abs=1e-9)
    assert saving(bent, law(0.1, 120.0, MACS), window=(MACS[3], MACS[7])).ratio == pytest.approx(1.2**10)


def test_seconds_instead_of_macs() -> None:
    points = [Point(1.0 + i, 10 * s**-0.5, seconds=s) for i, s in enumerate((0.01, 0.1, 1.0, 20.0))]
    found = fit(points, against="seconds")
    assert found.exponent == pytest.approx(0.5)
    assert found.window == (0.01, 20.0)
    assert str(found).endswith("4 points, 1.0e-2 .. 2.0e1 s)")


def test_a_law_reads_as_the_paper_would_write_it() -> None:
    found = PowerLaw(0.11906, 0.00379, 200.0, 0.1121, 0.1259, 0.95, 8, (9.4e4, 7.7e7))
    assert str(found) == "0.119 ± 0.004 (95 %: 0.112 .. 0.126; 8 points, 9.4e4 .. 7.7e7 MACs)"
    assert str(Difference(0.0161, 0.0064, 0.0293, 11)) == "+0.016 ± 0.006 (p = 0.029, 11 degrees)"
    assert (
        str(Saving(29.2, 7.97, 4.95, 13.4, 0.95, 14.97))
        == "7.97 times fewer MACs at error 29.2 (95 %: 4.95 .. 13.4; 15 read between the points)"
    )
    assert str(Saving(25.0, 9.8, 5.2, 19.4, 0.9, None)) == "9.8 times fewer MACs at error 25 (90 %: 5.2 .. 19.4)"


def by_hand(first: Sequence[Point], second: Sequence[Point]) -> tuple[float, float, float, int]:
    """The textbook's pooled regression: intercept, group, slope and slope times group, by numpy's lstsq."""
    u, v = (np.concatenate(parts) for parts in zip(logs(first), logs(second), strict=True))
    group = np.repeat([0.0, 1.0], [len(first), len(second)])
    design = np.stack([np.ones_like(u), group, u, u * group], axis=1)
    beta, squares, _, _ = np.linalg.lstsq(design, v)
    degrees = len(u) - 4
    error = math.sqrt(np.linalg.inv(design.T @ design)[3, 3] * squares[0] / degrees)
    return beta[3], error, 2 * stats.t.sf(abs(beta[3] / error), degrees), degrees


@pytest.mark.parametrize("other", sorted(set(TRAIN) - {"btt"}))
def test_the_difference_is_the_interaction_term_of_the_pooled_regression(other: str) -> None:
    found = difference(TRAIN["btt"], TRAIN[other])
    estimate, error, p, degrees = by_hand(TRAIN["btt"], TRAIN[other])
    assert found.estimate == pytest.approx(estimate, rel=1e-6)
    assert found.standard_error == pytest.approx(error, rel=1e-6)
    assert found.p_value == pytest.approx(p, rel=1e-4)
    assert found.degrees == degrees


def test_different_slopes_are_told_apart_and_equal_ones_are_not() -> None:
    base = law(0.10, 100.0, MACS, noise=0.01)
    assert difference(base, law(0.13, 100.0, MACS, noise=0.01, seed=1)).p_value < 1e-4
    assert difference(base, law(0.10, 300.0, MACS, noise=0.01, seed=1)).p_value > 0.05
    assert difference(base, base).p_value == 1.0
    swapped = difference(law(0.13, 100.0, MACS, noise=0.01, seed=1), base)
    assert swapped.estimate > 0.02


def test_equal_slopes_are_rejected_as_often_as_the_p_value_says() -> None:
    p = [
        difference(law(0.1, 90.0, MACS, 0.02, 2 * i), law(0.1, 120.0, MACS[:5], 0.02, 2 * i + 1)).p_value
        for i in range(400)
    ]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_errors_that_never_vary_do_not_differ() -> None:
    flat = [Point(m, 1.0) for m in MACS]
    assert difference(flat, flat) == Difference(0.0, 0.0, 1.0, 12)


def test_the_saving_between_laws_without_noise_is_exact() -> None:
    found = saving(law(0.1, 100.0, MACS), law(0.1, 130.0, MACS))
    assert found.error == pytest.approx(130.0 * MACS[-1] ** -0.1)
    for ratio in (found.ratio, found.low, found.high, found.read):
        assert ratio == pytest.approx(1.3**10, rel=1e-6)


def test_a_saving_beyond_the_points_extrapolates_the_laws_and_reads_nothing() -> None:
    found = saving(TRAIN["btt"], TRAIN["dense"], 24.0)
    assert found.error == 24.0
    assert found.read is None
    assert found.ratio > 8.0


def test_the_other_way_round_the_saving_is_inverted() -> None:
    there, back = saving(TRAIN["btt"], TRAIN["dense"]), saving(TRAIN["dense"], TRAIN["btt"])
    assert there.error == back.error
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.read is not None
    assert back.read == pytest.approx(1 / there.read)


@some
@given(st.integers(1, len(MACS) - 1), st.floats(1.0, 2.0))
def test_a_model_that_costs_more_and_errs_as_often_does_not_change_the_reading(place: int, worse: float) -> None:
    cheap, costly = law(0.12, 100.0, MACS), law(0.1, 130.0, MACS)
    beaten = Point(MACS[place], cheap[place - 1].error * worse)
    target = costly[-1].error
    assert (
        saving([*cheap, beaten], costly, target, resamples=20).read == saving(cheap, costly, target, resamples=20).read
    )


def test_the_reading_may_be_over_seconds() -> None:
    cheap = [Point(1.0, error, seconds) for seconds, error in ((1.0, 0.4), (2.0, 0.3), (4.0, 0.2))]
    costly = [Point(1.0, error, 3 * seconds) for seconds, error in ((1.0, 0.4), (2.0, 0.3), (4.0, 0.2))]
    slow = Point(1.0, 0.3, 3.5)  # costs more than another that errs as often
    assert saving([*cheap, slow], costly, against="seconds").read == pytest.approx(3)


def test_the_better_of_two_models_of_equal_cost_is_read() -> None:
    cheap, costly = law(0.1, 100.0, MACS), law(0.1, 130.0, MACS)
    twins = [Point(p.macs, 1.5 * p.error) for p in cheap]
    expected = saving(cheap, costly, costly[-1].error, resamples=20).read
    assert saving([*twins, *cheap], costly, costly[-1].error, resamples=20).read == expected


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda: fit([]), "needs points at 3 different macs or more: 0 of 0 count"),
        (lambda: fit(law(0.1, 1.0, MACS[:2])), "2 of 2 count, at 2 different; add model sizes$"),
        (lambda: fit(law(0.1, 1.0, [1e5, 1e5, 1e6, 1e6])), "4 of 4 count, at 2 different"),
        (lambda: fit(law(0.1, 1.0, MACS), window=(1, 4e5)), "2 of 8 count between 1 and 400000.* widen the window"),
        (lambda: fit([*law(0.1, 1.0, MACS), Point(1e6, 0.0, width=64)]), "width=64.* above zero and finite; leave it"),
        (lambda: fit([*law(0.1, 1.0, MACS), Point(1e6, -1.0)]), "above zero and finite"),
        (lambda: fit([*law(0.1, 1.0, MACS), Point(1e6, math.nan)]), "above zero and finite"),
        (lambda: fit([*law(0.1, 1.0, MACS), Point(0.0, 1.0)]), "above zero and finite"),
        (lambda: saving([Point(1e6, math.nan)], law(0.1, 1.0, MACS)), "above zero and finite"),
        (lambda: fit(law(0.1, 1.0, MACS), against="params"), "no 'params': use against='macs' or 'seconds'"),
        (lambda: fit(law(0.1, 1.0, MACS), against="seconds"), "has no seconds: measure them"),
        (lambda: fit(law(0.1, 1.0, MACS), level=95), "level between 0 and 1"),
        (lambda: fit(law(0.1, 1.0, MACS), resamples=0), "a resample or more"),
        (lambda: fit(law(-0.1, 1.0, MACS)).x_at(1.0), "does not fall with macs"),
        (lambda: fit(law(0.1, 1.0, MACS)).x_at(0.0), "an error of 0.0: give one above zero"),
        (lambda: difference(law(0.1, 1.0, MACS), law(0.1, 1.0, MACS[:2])), "3 different macs"),
        (lambda: saving(law(0.1, 1.0, MACS), law(-0.1, 1.0, MACS)), "needs laws that fall with macs"),
        (lambda: saving(law(0.1, 1.0, MACS), law(0.1, 9.0, MACS)), "no error is reached by both: they span 0.148"),
        (lambda: saving(law(0.1, 1.0, MACS), law(0.1, 2.0, MACS), -1.0), "an error of -1.0"),
    ],
)
def test_what_cannot_be_answered_says_what_is_needed(question: Callable[[], object], message: str) -> None:
    with pytest.raises(FitError, match=message) as caught:
        question()
    assert isinstance(caught.value, bt.ButtressError)


def test_without_scipy_exponents_are_fitted_but_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)  # as if it were not installed
    points = law(0.1, 1.0, MACS)
    assert fit(points).exponent == pytest.approx(0.1)
    with pytest.raises(bt.MissingExtraError, match=r"comparing exponents needs scipy: pip install 'buttress\[lab\]'"):
        difference(points, points)
