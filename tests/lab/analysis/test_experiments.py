"""Experiments: which runs belong together, and headings that tell them apart."""

from __future__ import annotations

from dataclasses import replace

from buttress.lab.analysis.experiments import experiments
from synthetic_records import record, study


def headings(*changes: dict[str, object]) -> list[str]:
    return [e.heading for e in experiments([r for change in changes for r in study(**change)])]


def test_runs_of_other_structures_sizes_and_seeds_are_one_experiment() -> None:
    [e] = experiments([*study(), *study(seed=1)])
    assert len(e.done) == 24
    assert e.heading == "digits, mlp: error against compute"


def test_the_precision_distinguishes_two_experiments() -> None:
    ours, other = headings({"precision": "tf32"}, {"precision": "bfloat16", "warmup": 5})
    assert ours == "digits, mlp: error against compute (tf32)"
    assert other == "digits, mlp: error against compute (bfloat16)"


def test_one_field_suffices_where_it_differs_everywhere() -> None:
    assert headings({"warmup": 5, "batch": 32}, {"steps": 2000, "warmup": 6}, {"steps": 500, "warmup": 6}) == [
        f"digits, mlp: error against compute ({n:,} steps)" for n in (1000, 2000, 500)
    ]


def test_all_differing_fields_where_none_suffices() -> None:
    assert headings({}, {"warmup": 5}, {"mixup": 0.5}) == [
        f"digits, mlp: error against compute (warmup {warmup}, mixup {mixup})"
        for warmup, mixup in ((0, 0.0), (5, 0.0), (0, 0.5))
    ]


def test_other_topics_need_no_distinction() -> None:
    assert headings({"precision": "tf32"}, {"task": "cifar10"}) == [
        "digits, mlp: error against compute",
        "cifar10, mlp: error against compute",
    ]


def test_an_experiment_without_a_finished_run_is_left_out() -> None:
    failed = replace(record(precision="tf32"), status="failed", error="no")
    assert [e.setting.precision for e in experiments([failed, *study()])] == ["float32"]
