"""The lowest error for a budget, and where two frontiers cross."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buttress.lab.analysis.frontier import Frontier, crossings, mean_log_ratio, mean_over_log
from buttress.lab.analysis.point import FitError, Point


def frontier(*pairs: tuple[float, float]) -> Frontier:
    return Frontier.of([Point(cost, error) for cost, error in pairs])


def test_models_that_a_cheaper_one_matches_are_left_out() -> None:
    line = frontier((4, 20), (1, 40), (2, 50), (3, 40), (8, 21))
    assert line.cost.tolist() == [1, 4]
    assert line.error.tolist() == [40, 20]


def test_of_two_models_of_one_cost_the_better_counts() -> None:
    assert frontier((1, 40), (1, 30)).error.tolist() == [30]


def test_straight_in_logarithms_between_models() -> None:
    line = frontier((1, 40), (100, 10))
    assert line.at(10) == pytest.approx(20)
    assert line.cost_at(20) == pytest.approx(10)


def test_a_larger_budget_buys_the_last_model_and_a_smaller_one_buys_none() -> None:
    line = frontier((2, 40), (8, 10))
    assert line.at(1000) == pytest.approx(10)
    assert line.at(1.9) == math.inf
    assert line.cost_at(9.9) is None
    assert line.cost_at(41) is None
    assert line.cost_at(10) == pytest.approx(8)


def test_time_is_another_cost() -> None:
    points = [Point(1, 40, seconds=30), Point(2, 20, seconds=50)]
    assert Frontier.of(points, "seconds").cost.tolist() == [30, 50]
    with pytest.raises(FitError, match="has no seconds"):
        Frontier.of([Point(1, 40)], "seconds")


class TestCrossings:
    def test_between_models(self) -> None:
        steep, flat = frontier((1, 80), (100, 5)), frontier((1, 40), (100, 10))
        (cost,) = crossings(steep, flat)
        assert steep.at(cost) == pytest.approx(flat.at(cost))
        assert crossings(flat, steep) == pytest.approx([cost])

    def test_at_a_model_of_both(self) -> None:
        assert crossings(frontier((1, 40), (4, 20), (16, 5)), frontier((1, 30), (4, 20), (16, 10))) == [4]

    def test_touching_is_not_crossing(self) -> None:
        assert crossings(frontier((1, 40), (4, 20), (16, 10)), frontier((1, 30), (4, 20), (16, 5))) == []

    def test_twice(self) -> None:
        found = crossings(frontier((1, 40), (4, 12), (16, 11)), frontier((1, 30), (4, 20), (16, 5)))
        assert len(found) == 2
        assert 1 < found[0] < 4 < found[1] < 16

    def test_a_frontier_that_starts_lower_has_not_crossed(self) -> None:
        assert crossings(frontier((1, 40), (100, 30)), frontier((10, 20), (100, 10))) == []

    def test_equal_frontiers_do_not_cross(self) -> None:
        line = frontier((1, 40), (4, 20))
        assert crossings(line, line) == []


def test_mean_ratio_over_common_costs() -> None:
    line = frontier((1, 40), (100, 4))
    assert mean_log_ratio(line, frontier((1, 80), (100, 8))) == pytest.approx(math.log(0.5))
    assert mean_log_ratio(line, frontier((100, 8), (200, 7))) == pytest.approx(math.log(0.5))
    assert mean_log_ratio(line, frontier((101, 8))) is None


def test_means_are_over_logarithms() -> None:
    assert mean_over_log(np.array([1.0, 10.0, 1000.0]), np.array([0.0, 3.0, 3.0])) == pytest.approx(2.5)
    assert mean_over_log(np.array([5.0]), np.array([3.0])) == 3.0


positive = st.floats(1e-3, 1e6)
models = st.lists(st.tuples(positive, positive), min_size=1, max_size=8)


@given(models)
def test_the_frontier_is_the_best_of_what_can_be_bought(pairs: list[tuple[float, float]]) -> None:
    line = frontier(*pairs)
    assert np.all(np.diff(line.cost) > 0)
    assert np.all(np.diff(line.error) < 0)
    for cost, error in pairs:
        assert line.at(cost) <= error * (1 + 1e-9)
        assert line.at(cost) >= min(e for _, e in pairs) * (1 - 1e-9)


@given(models, models)
def test_signs_change_at_crossings_alone(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    a, b = frontier(*first), frontier(*second)
    start = max(a.cost[0], b.cost[0])
    edges = [start, *crossings(a, b), 1e9]
    for low, high in pairwise(edges):
        inside = np.geomspace(low, high, 25)[1:-1]
        gaps = np.array([math.log(a.at(x) / b.at(x)) for x in inside])
        gaps = gaps[np.abs(gaps) > 1e-9]
        assert np.all(gaps > 0) or np.all(gaps < 0) or not gaps.size
