"""Lines of models compared at equal cost, with the noise between seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from buttress.lab.analysis.comparison import common_window, compare
from buttress.lab.analysis.point import FitError, Point, seed_noise


def line(*pairs: tuple[float, float], noise: float = 0.0, seeds: int = 1, rng: int = 0) -> list[Point]:
    """Points at given costs, whose errors vary between seeds."""
    draws = np.random.default_rng(rng).standard_normal((len(pairs), seeds))
    points = []
    for (cost, error), row in zip(pairs, draws, strict=True):
        by_seed = tuple(error * np.exp(noise * row))
        points.append(Point(cost, float(np.mean(by_seed)), cost, None, by_seed))
    return points


class TestNoise:
    def test_unknown_from_one_seed(self) -> None:
        assert seed_noise(line((1, 40), (2, 30))) is None
        assert seed_noise([Point(1, 40)]) is None

    def test_pooled_over_points(self) -> None:
        points = line(*((2.0**i, 40.0) for i in range(400)), noise=0.02, seeds=3)
        assert seed_noise(points) == pytest.approx(0.02, rel=0.1)

    def test_two_seeds_have_one_degree_of_freedom(self) -> None:
        apart = 0.1
        assert seed_noise([Point(1, 1, by_seed=(1, math.exp(apart)))]) == pytest.approx(apart / math.sqrt(2))


class TestCompare:
    def test_differences_at_every_model_of_either_line(self) -> None:
        comparison = compare(line((1, 40), (16, 10)), line((2, 50), (8, 25), (32, 20)))
        assert [g.cost for g in comparison.gaps] == [2, 8, 16]
        first = 40 * 2**-0.5
        assert comparison.gaps[0].difference == pytest.approx(first - 50)
        assert comparison.gaps[-1].difference == pytest.approx(10 - 25 * 2 ** -math.log(1.25, 4))
        assert comparison.range == (comparison.gaps[0].difference, comparison.gaps[1].difference)
        assert comparison.standard_error is None
        assert comparison.crossing is None

    def test_mean_over_the_logarithm_of_cost(self) -> None:
        comparison = compare(
            line((1, 20), (10, 19.9999), (1000, 19.9998)), line((1, 40), (1.0001, 30), (1000, 29.9999))
        )
        assert comparison.mean == pytest.approx(-10, abs=0.01)

    def test_mean_at_one_cost(self) -> None:
        assert compare(line((4, 20)), line((1, 40), (16, 10))).mean == pytest.approx(0, abs=1e-9)

    def test_no_common_cost(self) -> None:
        with pytest.raises(FitError, match=r"no macs lie within both lines: they span 1 \.\. 2 and 3 \.\. 4"):
            compare(line((1, 20), (2, 10)), line((3, 20), (4, 10)))

    def test_crossing_within_both_lines(self) -> None:
        comparison = compare(line((1, 80), (100, 5)), line((1, 40), (100, 10)), noise=0.01)
        crossing = comparison.crossing
        assert crossing is not None
        assert crossing.low is not None
        assert crossing.high is not None
        assert crossing.low < crossing.cost < crossing.high
        assert crossing.cost == pytest.approx(10)

    def test_a_line_that_ends_is_not_overtaken(self) -> None:
        # The base reaches 10 only where the line has no model.
        assert compare(line((1, 30), (10, 15)), line((1, 40), (100, 10))).crossing is None

    def test_noise_shrinks_with_seeds(self) -> None:
        pairs, base = ((1.0, 40.0), (4.0, 20.0)), line((1, 50), (4, 30))
        errors = [compare(line(*pairs, seeds=n), base, noise=0.02).standard_error for n in (1, 16)]
        expected = [math.hypot(0.02 * 40 / math.sqrt(n), 0.02 * 50) for n in (1, 16)]
        assert errors == pytest.approx(expected, rel=0.1)

    def test_noise_is_that_of_both_lines_by_default(self) -> None:
        pairs = ((1.0, 40.0), (4.0, 20.0), (16.0, 10.0))
        noisy = [line(*pairs, noise=0.03, seeds=2, rng=i) for i in (1, 2)]
        assert compare(*noisy) == compare(*noisy, noise=seed_noise([*noisy[0], *noisy[1]]))

    def test_errors_cover_the_truth(self) -> None:
        """About 68 % of simulated differences are within one standard error of the truth."""
        truth = [((1.0, 40.0), (4.0, 20.0), (16.0, 12.0)), ((1.0, 42.0), (4.0, 25.0), (16.0, 13.0))]
        inside = total = 0
        for trial in range(60):
            lines = [line(*pairs, noise=0.02, seeds=2, rng=2 * trial + i) for i, pairs in enumerate(truth)]
            for gap, ((_, a), (_, b)) in zip(compare(*lines, noise=0.02).gaps, zip(*truth, strict=True), strict=True):
                assert gap.standard_error is not None
                inside += abs(gap.difference - (a - b)) < gap.standard_error
                total += 1
        assert 0.58 < inside / total < 0.78


@pytest.mark.parametrize(
    ("lines", "window"),
    [
        ([line((1, 9), (8, 1)), line((2, 9), (32, 1))], (2, 8)),
        ([line((1, 9), (8, 1)), line((2, 9), (32, 1)), line((4, 9), (6, 1))], (4, 6)),
    ],
)
def test_common_window(lines: Sequence[Sequence[Point]], window: tuple[float, float]) -> None:
    assert common_window(*lines) == window


def test_without_common_window() -> None:
    with pytest.raises(FitError, match="no macs in common"):
        common_window(line((1, 9), (8, 1)), line((9, 9), (32, 1)))
