"""What experiments say in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buttress.lab.analysis.answers import answer, feature_updates, learning_rates, stability
from buttress.lab.analysis.experiments import experiments
from buttress.lab.runs.records import Record
from synthetic_records import record, study


def update(structure: str, width: int, size: float, **fields: object) -> Record:
    made = record(structure, width, **fields)
    return replace(made, results=made.results | {"feature_update": size})


UPDATES = [
    *(update("", width, 0.1) for width in (64, 512)),
    *(update("btt", width, size) for width, size in ((64, 0.1), (512, 0.12))),
    *(update("btt", width, size, aware=False) for width, size in ((64, 0.1), (512, 0.025))),
]
SWEEP = [
    record(structure, width, 30 + abs(lr - best), lr=lr)
    for structure, width, best in (("", 64, 0.003), ("", 256, 0.003), ("btt", 64, 0.01), ("btt", 256, 0.001))
    for lr in (1e-3, 3e-3, 1e-2)
]
TRACED = [
    replace(record("btt", normalize=norm, lr=1e-3, trace=1), metrics={"activation/a": [(0, 1.0), (9, rms)]})
    for norm, rms in ((False, 21_000.0), (True, 2.5))
]


def test_feature_updates_change_by_the_largest_ratio_of_a_line() -> None:
    assert feature_updates(UPDATES) == (
        "Between widths 64 and 512, the size of feature updates changes by a factor of at most 1.2 with "
        "structure-aware learning rates (btt) and by a factor of at most 4 with naive ones (btt)."
    )
    assert "not at all with structure-aware" in (feature_updates(UPDATES[:2]) or "")


def test_the_best_learning_rate_moves_with_width() -> None:
    assert learning_rates(SWEEP, "train_error") == (
        "Between widths 64 and 256, the best learning rate moves by a factor of at most 10 with structure-aware "
        "learning rates (btt)."
    )
    one_width = [r for r in SWEEP if r.run.width == 64]
    assert learning_rates(one_width, "test_error") == "The best learning rate is 0.003 for dense and 0.01 for btt."


def test_stability_names_the_calmest_and_the_wildest_run() -> None:
    assert stability(TRACED) == (
        "At the end of training, the largest RMS among the blocks' outputs is 2.5 for btt, normalized, lr 0.001, "
        "and 21,000 for btt, lr 0.001."
    )


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (UPDATES, "updates"),
        (SWEEP, "rate moves"),
        (TRACED, "largest RMS"),
        (study(), "At equal MACs"),
    ],
)
def test_an_experiment_answers_what_it_varied(records: list[Record], says: str) -> None:
    [e] = experiments(records)
    finding = answer(e)
    assert finding is not None
    assert says in finding.text


def test_too_few_records_say_nothing() -> None:
    assert feature_updates(study()) is None
    assert feature_updates([update("btt", 64, 0.0), update("btt", 128, 0.1)]) is None
    assert learning_rates(study(), "train_error") is None
    assert stability(TRACED[:1]) is None
