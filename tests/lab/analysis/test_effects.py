"""Effects of changed choices, against partners of the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buttress.lab.analysis.effects import describe_changes, effects, without_changes
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from synthetic_records import record


def trained(error: float, **fields: object) -> Record:
    return record(error=error, **{"structure": "btt", "mixup": 0.8, **fields})  # type: ignore[arg-type]


def test_an_effect_is_the_mean_over_pairs_of_equal_seeds() -> None:
    records = [trained(30.0 + seed, seed=seed) for seed in (0, 1, 2)]
    records += [trained(29.0 + 2 * seed, seed=seed, schedule="cosine_epochs") for seed in (2, 0)]
    (effect,) = effects(records, "train_error")
    assert effect.change == "schedule=cosine_epochs"
    assert sorted(effect.by_seed) == [-1.0, 1.0]
    assert effect.mean == 0
    assert effect.error == pytest.approx(1.0)  # standard deviation sqrt(2) of two values
    assert effect.model == replace(records[0].run, seed=0)
    (on_test,) = effects(records, "test_error")
    assert sorted(on_test.by_seed) == pytest.approx([-0.9, 0.9])


def test_runs_without_a_partner_are_left_out() -> None:
    changed = trained(29.0, resample="bilinear")
    others = [trained(30.0, seed=1), trained(30.0, width=128), trained(30.0, structure="monarch")]
    assert effects([changed, *others], "train_error") == []
    assert effects([changed, Record(without_changes(changed.run), "failed", error="no")], "train_error") == []
    (one,) = effects([changed, trained(30.0)], "train_error")
    assert (one.mean, one.error) == (-1.0, None), "one seed says nothing about noise"


def test_options_of_a_structure_are_changes_too() -> None:
    run = Run(structure="btt(rank=2, split='greedy')", mixup=0.8, mixup_on="pixels", schedule="cosine_epochs", seed=3)
    assert describe_changes(run) == "rank=2, split='greedy'\nschedule=cosine_epochs\nmixup_on=pixels"
    assert without_changes(run) == Run(structure="btt", mixup=0.8, seed=3)
    assert describe_changes(Run()) == ""
    assert without_changes(Run(resample="bilinear")) == Run()
