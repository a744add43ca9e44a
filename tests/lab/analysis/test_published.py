"""The paper's points: consistent with each other, with its text and with its exponents."""

from __future__ import annotations

import pytest

import buttress as bt
from buttress.lab.analysis import Point, difference, fit, saving
from buttress.lab.analysis import published as paper

TRAIN = {name: [Point(macs, error) for macs, error in curve] for name, curve in paper.TRAIN_ERROR.items()}


@pytest.mark.parametrize(
    ("structure", "exponent", "error"),
    [
        (bt.BTT(), 0.119, 0.004),
        (bt.Monarch(), 0.0945, 0.005),
        (bt.LowRank(), 0.094, 0.0045),
        (bt.TensorTrain(rank=16), 0.050, 0.006),
    ],
    ids=str,
)
def test_the_published_points_give_the_published_exponents(
    structure: bt.Structure, exponent: float, error: float
) -> None:
    found = fit(TRAIN[str(structure)])
    assert found.exponent == pytest.approx(exponent, abs=6e-4)
    assert found.exponent_error == pytest.approx(error, abs=5e-4)
    assert found.low < exponent < found.high


@pytest.mark.parametrize("task", ["cifar10", "cifar100"])
def test_every_published_bar_agrees_with_a_fit_of_its_points(task: str) -> None:
    study = paper.MLP[task]
    assert study.exponents.keys() == study.train_error.keys() == study.test_error.keys()
    for name, (exponent, error) in study.exponents.items():
        found = fit([Point(*point) for point in study.train_error[name]])
        assert found.exponent == pytest.approx(exponent, abs=0.0015), name
        points_missing = len(study.test_error[name]) - len(study.train_error[name])
        assert found.exponent_error == pytest.approx(error, abs=0.002 if points_missing else 0.001), name


def test_published_dense_and_btt_exponents_differ_at_five_percent_only() -> None:
    assert 0.01 < difference(TRAIN["btt"], TRAIN["dense"]).p_value < 0.05


def test_published_points_save_fifteen_times_between_the_points_and_eight_by_their_laws() -> None:
    # The points bend upward from their laws at both ends, the dense ones most: hence twice between the readings.
    found = saving(TRAIN["btt"], TRAIN["dense"])
    assert found.error == 29.2
    assert found.read == pytest.approx(15, rel=0.02)
    assert found.ratio == pytest.approx(fit(TRAIN["dense"]).x_at(29.2) / fit(TRAIN["btt"]).x_at(29.2))
    assert found.ratio == pytest.approx(8.0, abs=0.1)
    assert found.low < found.ratio < found.high < found.read


def test_published_names_are_texts_of_structures() -> None:
    tables = [paper.NAIVE_TRAIN_ERROR]
    for study in paper.MLP.values():
        tables += [study.exponents, study.train_error, study.test_error]
    for by_rates in (paper.FEATURE_UPDATES, paper.LANDSCAPE):
        assert set(by_rates) == {"aware", "naive"}
        tables += list(by_rates.values())
    for table in tables:
        for name in table:
            assert str(bt.parse(name)) == name


def test_published_tables_hang_together() -> None:
    for study in paper.MLP.values():
        for name, curve in study.train_error.items():
            all_macs = [macs for macs, _ in study.test_error[name]]
            assert all_macs == sorted(all_macs)
            assert {macs for macs, _ in curve} <= set(all_macs)
            errors = [error for _, error in curve]
            assert errors == sorted(set(errors), reverse=True), "a larger model errs less"


def test_published_naive_rates_err_more_and_most_so_in_large_models() -> None:
    for name, (first, last) in paper.NAIVE_TRAIN_ERROR.items():
        aware = paper.TRAIN_ERROR[name]
        assert (first[0], last[0]) == (aware[0][0], aware[-1][0])
        assert last[1] - aware[-1][1] > first[1] - aware[0][1] + paper.NAIVE_UNCERTAINTY, name


def test_published_best_rates_are_those_the_paper_names() -> None:
    best = {
        (rates, name): min(widths[4096], key=lambda point: point[1])
        for rates, table in paper.LANDSCAPE.items()
        for name, widths in table.items()
    }
    assert {rate for (rates, _), (rate, _) in best.items() if rates == "aware"} == {3e-3}
    assert {rate for (rates, _), (rate, _) in best.items() if rates == "naive"} == {1e-2, 3e-2}
    # Tuned, naive rates come near or, for low rank, past the aware ones.
    assert {n for r, n in best if r == "naive" and best[r, n][1] < best["aware", n][1]} == {"low_rank"}


def test_published_updates_keep_their_size_only_with_aware_rates() -> None:
    def slope(rms: dict[int, float]) -> float:
        return -fit([Point(width, value) for width, value in rms.items()]).exponent

    assert all(abs(slope(dict(rms))) < 0.1 for rms in paper.FEATURE_UPDATES["aware"].values())
    assert slope(dict(paper.FEATURE_UPDATES["naive"]["btt"])) == pytest.approx(-0.34, abs=0.01)
