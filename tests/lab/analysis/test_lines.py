"""Which runs form a line, what it is called, and the points they give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buttress.lab.analysis.lines import (
    BASELINE,
    LineKey,
    alone,
    feature_updates,
    ordered,
    points,
    training_seconds,
    tuned,
)
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from synthetic_records import record, study

BTT = LineKey("btt")


def test_of_several_rates_the_best_counts() -> None:
    lines = points([record("btt", 64, 10.0, lr=1e-3), record("btt", 64, 60.0, lr=1e-1)])
    assert [p.error for p in lines[BTT]] == [10.0]


def test_seeds_are_averaged() -> None:
    lines = points([record("btt", 64, 10.0, seed=0), record("btt", 64, 20.0, seed=1)])
    assert [p.error for p in lines[BTT]] == [15.0]


@pytest.mark.parametrize(
    ("run", "label"),
    [
        (Run(), "dense"),
        (Run(layers="hidden"), "dense"),
        (Run(aware=False), "dense, naive rates"),
        (Run(structure="dense"), "dense"),
        (Run(structure="btt(rank=2, cores=3)"), "btt(rank=2, cores=3)"),
        (Run(structure="low_rank", layers="hidden"), "low_rank, hidden"),
        (Run(structure="btt", layers="ffn", aware=False, normalize=True), "btt, ffn, naive rates, normalized"),
    ],
    ids=str,
)
def test_labels(run: Run, label: str) -> None:
    assert LineKey.of(run).label == label
    assert LineKey.of(run).rates == ("aware" if run.aware else "naive")


def test_size_rate_and_seed_do_not_part_a_line() -> None:
    runs = [Run(structure="btt", width=w, lr=lr, seed=s) for w in (16, 32) for lr in (1e-3, 1e-2) for s in (0, 1)]
    assert {LineKey.of(run) for run in runs} == {BTT}


def test_the_baseline_comes_first_and_points_carry_their_width() -> None:
    lines = points(study()[::-1])
    assert list(lines) == [BASELINE, BTT, LineKey("kronecker")]
    assert [p.width for p in lines[BTT]] == [64, 128, 256, 512]
    assert ordered([LineKey("a"), BASELINE, LineKey("a")]) == [BASELINE, LineKey("a")]


def test_failed_runs_give_no_points() -> None:
    assert points([Record(Run(), "failed", error="it broke")]) == {}


def test_times_count_where_a_run_had_its_device_to_itself() -> None:
    one = record("btt", 64, 10.0)
    shared = Record(one.run, "done", one.results, one.params, one.macs, one.curve, "", {"at_once": "2"})
    assert alone(one)
    assert not alone(shared)
    assert points([one])[BTT][0].seconds == 6.4
    assert points([shared])[BTT][0].seconds is None


def test_training_time_is_that_of_the_steps() -> None:
    one = record("btt", 64, 10.0, steps=500)
    timed = replace(one, results=one.results | {"step_ms": 2.0, "seconds": 9.0})
    assert training_seconds(one) == 6.4
    assert training_seconds(timed) == 1.0
    shared = replace(timed, run=replace(timed.run, seed=1), environment={"at_once": "2"})
    faster = replace(timed, run=replace(timed.run, seed=2), results=timed.results | {"step_ms": 1.0})
    (point,) = points([timed, shared, faster])[BTT]
    assert point.seconds == 0.75
    assert point.by_seed == (10.0, 10.0, 10.0)
    assert point.seeds == 3


@pytest.mark.parametrize(("versions", "seconds"), [
    (("0.1.0", "0.2.0.dev0"), 1.0), (("0.10.0", "0.2.0"), 2.0), (("", "0.1.0"), 1.0), (("0.2.0", "0.2.0.dev0"), 1.5),
])  # fmt: skip
def test_times_are_those_of_the_newest_version(versions: tuple[str, str], seconds: float) -> None:
    one = record("btt", 64, 10.0, steps=1000)
    timed = [
        replace(
            one, run=replace(one.run, seed=i), results=one.results | {"step_ms": 2.0 - i}, environment={"buttress": v}
        )
        for i, v in enumerate(versions)
    ]
    assert points(timed)[BTT][0].seconds == seconds


def test_times_are_of_the_device_that_trained_the_most_runs() -> None:
    """Another machine's times do not enter a mean, or stand next to those of the others."""
    one = record("btt", 64, 10.0, steps=1000)

    def trained(seed: int, device: str, step_ms: float, width: int = 64) -> Record:
        run, macs = replace(one.run, seed=seed, width=width), one.macs * width
        return replace(
            one, run=run, macs=macs, results=one.results | {"step_ms": step_ms}, environment={"device": device}
        )

    gpus = [trained(seed, "NVIDIA H200", 1.0 + seed) for seed in range(3)]
    small, large = points([*gpus, trained(3, "x86_64", 100.0), trained(0, "x86_64", 300.0, width=128)])[BTT]
    assert (small.seconds, small.seeds) == (2.0, 4)
    assert (large.seconds, large.seeds) == (None, 1)


def test_a_repeated_record_is_no_further_seed() -> None:
    one = record("btt", 64, 10.0)
    failed = Record(one.run, "failed", error="it broke when it was trained again")
    assert points([one, one, failed])[BTT][0].by_seed == (10.0,)


def test_feature_updates_are_means_over_seeds() -> None:
    one = record("btt", 64, 10.0)
    seeds = [
        replace(one, run=replace(one.run, seed=i), results=one.results | {"feature_update": 1.0 + i}) for i in range(2)
    ]
    assert feature_updates([*seeds, record("", 64)]) == {BTT: {64: 1.5}}


def test_a_line_is_tuned_at_more_than_two_rates() -> None:
    two = [record("btt", 64, 10.0, lr=lr) for lr in (1e-3, 1e-2)]
    assert tuned(two) == {}
    assert tuned([*two, record("btt", 128, 10.0, lr=1e-1)]) == {}
    assert list(tuned([*two, record("btt", 64, 10.0, lr=1e-1), record("", 64, 10.0)])) == [BTT]
