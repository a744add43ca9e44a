"""Lines of models compared at equal cost, with the noise between seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from buttress.lab.analysis.comparison import compare, compare_all
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

    @pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf])
    def test_impossible_noise(self, noise: float) -> None:
        with pytest.raises(FitError, match="noise between seeds is a number from 0 up"):
            compare(line((1, 40), (4, 20)), line((1, 50), (4, 30)), noise=noise)

    def test_no_points(self) -> None:
        with pytest.raises(FitError, match="there are no points"):
            compare([], line((1, 50), (4, 30)))

    def test_samples_that_never_cross_open_the_interval(self) -> None:
        # The line ends ahead by a hair: in half of the samples it ends behind.
        comparison = compare(line((1, 40), (2, 29.999)), line((1, 39), (2, 30)), noise=0.1)
        crossing = comparison.crossing
        assert crossing is not None
        assert crossing.high is None
        assert crossing.low is not None
        assert crossing.low <= crossing.cost

    def test_crossings_in_both_directions_are_counted(self) -> None:
        comparison = compare(line((1, 40), (4, 12), (16, 11)), line((1, 30), (4, 20), (16, 5)))
        assert comparison.sign_changes == 2

    def test_trend_is_the_difference_of_exponents(self) -> None:
        steep = line(*((10.0**i, 50 * 10 ** (-0.15 * i)) for i in range(4)))
        flat = line(*((3 * 10.0**i, 60 * (3 * 10.0**i) ** -0.10) for i in range(3)))
        comparison = compare(steep, flat)
        assert comparison.trend is not None
        assert comparison.trend.value == pytest.approx(-0.05)
        assert comparison.first_ratio.value == pytest.approx(50 / 60 * 3**-0.05)
        assert comparison.last_ratio.value == pytest.approx(50 / 60 * 300**-0.05)

    def test_a_bent_curve_has_no_trend_against_itself_at_other_sizes(self) -> None:
        def bent(costs: Sequence[float]) -> list[Point]:
            return line(*((x, 20 + 30 * x**-0.3) for x in costs))

        comparison = compare(bent(np.geomspace(1, 1000, 60)), bent(np.geomspace(7, 9000, 55)))
        assert comparison.trend is not None
        assert comparison.trend.value == pytest.approx(0, abs=1e-4)

    def test_a_single_common_cost_has_no_trend(self) -> None:
        assert compare(line((4, 20)), line((1, 40), (16, 10))).trend is None

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

    def test_intervals_of_crossings_cover_the_truth(self) -> None:
        """About 95 % of simulated crossings are within their intervals."""
        truth = [((1.0, 60.0), (10.0, 20.0), (100.0, 8.0)), ((1.0, 40.0), (10.0, 22.0), (100.0, 14.0))]
        expected = compare(*(line(*pairs) for pairs in truth)).crossing
        assert expected is not None
        inside = 0
        for trial in range(100):
            lines = [line(*pairs, noise=0.05, seeds=2, rng=1000 + 2 * trial + i) for i, pairs in enumerate(truth)]
            crossing = compare(*lines, noise=0.05).crossing
            assert crossing is not None
            assert crossing.low is not None
            assert crossing.high is not None
            inside += crossing.low <= expected.cost <= crossing.high
        assert inside >= 88


class TestCompareAll:
    LINES = {"dense": line((1, 50), (16, 20)), "btt": line((1, 40), (16, 10)), "far": line((100, 1))}  # noqa: RUF012

    def test_every_line_with_common_costs(self) -> None:
        comparisons = compare_all(self.LINES, "dense")
        assert list(comparisons) == ["btt"]
        assert comparisons["btt"] == compare(self.LINES["btt"], self.LINES["dense"])

    def test_points_that_cannot_be_compared_are_left_out(self) -> None:
        bad = [Point(4, 0.0), Point(8, math.nan), Point(math.inf, 5)]
        lines = {key: [*points, *bad] for key, points in self.LINES.items()}
        assert compare_all(lines, "dense") == compare_all(self.LINES, "dense")

    def test_noise_is_that_of_all_lines(self) -> None:
        lines = {**self.LINES, "noisy": line((1, 40), (16, 10), noise=0.1, seeds=3)}
        error = compare_all(lines, "dense")["btt"].standard_error
        assert error is not None
        assert error > 1

    def test_impossible_noise(self) -> None:
        with pytest.raises(FitError, match="from 0 up"):
            compare_all(self.LINES, "dense", noise=-1)

    def test_without_the_base(self) -> None:
        assert compare_all({"btt": self.LINES["btt"]}, "dense") == {}
