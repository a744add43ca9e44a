"""The two sentences that answer an experiment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buttress.lab.analysis.verdict import verdict
from buttress.lab.runs.records import Record
from synthetic_records import record


def model(structure: str, width: int, error: float, ms: float, seed: int = 0, **fields: object) -> Record:
    """A run of 1000 steps, so that a step's milliseconds are the run's seconds."""
    made = record(structure, width, error, seed=seed, steps=1000, **fields)
    return replace(made, results=made.results | {"step_ms": ms, "test_error": error - 10})


DENSE = [model("", 64, 50, 10), model("", 128, 40, 20), model("", 256, 36, 80)]
BTT = [model("btt", 64, 45, 15), model("btt", 128, 38, 40), model("btt", 256, 30, 80)]


def test_both_costs() -> None:
    answer = verdict([*DENSE, *BTT])
    assert answer is not None
    assert answer.text == (
        "At equal MACs, btt has the lowest train error, 2.0 to 6.0 points below dense; "
        "btt has the lowest test error, 2.0 to 6.0 points below dense. "
        "At equal training time, dense has the lower train error up to 40 s and btt beyond, by 6.0 points at 80 s; "
        "dense has the lower test error up to 40 s and btt beyond, by 6.0 points at 80 s."
    )
    assert answer.certainty == "One seed per model: the noise between seeds is not known."


def test_the_best_of_several_structures_is_named() -> None:
    worse = [model("kronecker", width, 60, 70) for width in (64, 256)]
    answer = verdict([*DENSE, *worse, *BTT])
    assert answer is not None
    assert "kronecker" not in answer.text


def test_dense_ahead() -> None:
    worse = [model("btt", 64, 60, 15), model("btt", 256, 37, 80)]
    answer = verdict([*DENSE, *worse], ["train_error"])
    assert answer is not None
    assert answer.text == (
        "At equal MACs, dense has the lowest train error (btt comes nearest, 1.0 to 10.0 points above dense). "
        "At equal training time, dense has the lowest train error (btt comes nearest, behind by 1.0 points at 80 s)."
    )


def test_a_structure_that_is_overtaken_is_behind() -> None:
    answer = verdict([*DENSE, model("btt", 64, 45, 10), model("btt", 256, 39, 80)], ["train_error"])
    assert answer is not None
    assert answer.text.endswith("dense has the lowest train error (btt comes nearest, behind by 3.0 points at 80 s).")


def test_ahead_on_average_only() -> None:
    answer = verdict([*DENSE, model("btt", 64, 51, 10), model("btt", 256, 30, 80)], ["train_error"])
    assert answer is not None
    assert "btt has the lowest train error, 6.0 points below to 1.0 points above dense." in answer.text


def test_ahead_throughout() -> None:
    answer = verdict([*DENSE, *(model("btt", w, e - 10, ms) for w, e, ms in ((64, 50, 10), (256, 36, 80)))])
    assert answer is not None
    assert "btt has the lower train error from 10 s on, ahead of dense by 10.0 points at 80 s" in answer.text


def test_uncertainty_from_seeds() -> None:
    seeds = [
        model(r.run.structure, r.run.width, 1.01 * r.results["train_error"], r.results["step_ms"], seed=1) for r in BTT
    ]
    answer = verdict([*DENSE, *BTT, *seeds])
    assert answer is not None
    assert "points below dense (± 0." in answer.text
    assert "the noise between seeds alone" in answer.certainty
    assert "s (95 %: " in answer.text
    assert answer.certainty.startswith("1 to 2 seeds per model.")


def test_lines_are_ranked_on_common_costs() -> None:
    """Two small models that are far ahead of small dense ones do not beat a line that is below them."""
    small = [model("monarch", 64, 43, 15), model("monarch", 80, 41, 20)]
    better = [model("btt", 64, 42, 15), model("btt", 128, 39, 40), model("btt", 256, 35.5, 80)]
    answer = verdict([*DENSE, *small, *better], ["train_error"])
    assert answer is not None
    assert answer.text.startswith("At equal MACs, btt has the lowest train error")


def test_lines_that_change_places_twice() -> None:
    ahead_first = [model("btt", 64, 45, 10), model("btt", 128, 41, 30), model("btt", 256, 30, 80)]
    answer = verdict([*DENSE, *ahead_first], ["train_error"])
    assert answer is not None
    assert "btt has the lower train error for good beyond" in answer.text


def test_a_crossing_that_other_seeds_may_not_have() -> None:
    close = [model("btt", 64, 60, 15), model("btt", 256, 35.9, 80)]
    seeds = [model("btt", 64, 65, 15, seed=1), model("btt", 256, 35.9, 80, seed=1)]
    answer = verdict([*DENSE, *close, *seeds], ["train_error"])
    assert answer is not None
    assert "to longer than any run)" in answer.text


def test_an_error_of_zero_is_left_out_and_named() -> None:
    answer = verdict([*DENSE, *BTT, model("btt", 512, 0.0, 160)], ["train_error"])
    assert answer is not None
    assert answer.text == verdict([*DENSE, *BTT], ["train_error"]).text  # type: ignore[union-attr]
    assert "undefined, such as an error of zero: 1." in answer.certainty


def test_times_that_do_not_overlap() -> None:
    slow = [model("btt", 64, 40, 200), model("btt", 256, 30, 400)]
    answer = verdict([*DENSE, *slow])
    assert answer is not None
    assert answer.text.endswith(
        "At equal training time there is no comparison: dense models took 10 to 80 s, the others 200 to 400 s."
    )


def test_times_that_were_not_measured() -> None:
    shared = [replace(r, environment={"at_once": "4"}) for r in [*DENSE, *BTT]]
    answer = verdict(shared)
    assert answer is not None
    assert "training time" not in answer.text


def test_losses_are_in_nats() -> None:
    losses = [replace(r, results=r.results | {"test_loss": r.results["train_error"] / 10}) for r in [*DENSE, *BTT]]
    answer = verdict(losses, ["test_loss"])
    assert answer is not None
    assert "the lowest validation loss, 0.20 to 0.60 nats below dense" in answer.text


@pytest.mark.parametrize("records", [[], DENSE, BTT, [*DENSE[:1], *BTT[1:]]], ids=["none", "dense", "btt", "apart"])
def test_nothing_to_compare(records: list[Record]) -> None:
    assert verdict(records) is None
