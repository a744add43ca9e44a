"""Runs that take turns in one process: the same results as one by one, and independent ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from buttress import ButtressError
from buttress.lab.data import write_manifest
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps import interleaved, run_queue
from buttress.lab.sweeps.engine import SweepEvent
from buttress.lab.sweeps.interleaved import Interleaved
from buttress.lab.sweeps.sweep import sweep
from buttress.lab.training import checkpoints
from buttress.lab.training.loop import train
from lab_runs import DIVERGING, SMALL
from packed_images import write_folder

RUNS = [replace(SMALL, structure="btt"), replace(SMALL, seed=1, steps=350), replace(SMALL, width=24, mixup=0.5)]
TIMES = {"seconds", "step_ms", "compile_seconds", "examples_per_second", "peak_gib"}


def outcome(record: Record) -> tuple[Mapping[str, float], object]:
    """What a record says apart from times and memory."""
    return {name: value for name, value in record.results.items() if name not in TIMES}, record.curve


def test_the_same_bits_as_one_by_one(tmp_path: Path) -> None:
    together = sweep(RUNS, Store(tmp_path), on=Interleaved(2), device="cpu")
    assert [r.run for r in together] == RUNS
    for run, record in zip(RUNS, together, strict=True):
        assert outcome(record) == outcome(train(run, device="cpu"))
        assert record.environment["at_once"] == "2"
        assert checkpoints.latest(Store(tmp_path).run_folder(run)) is None


def test_runs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buttress.lab.sweeps.engine.PROGRESS_SECONDS", -1.0)
    events: list[SweepEvent] = []
    runs = [replace(SMALL, seed=s, steps=300) for s in range(3)]
    sweep(runs, Store(tmp_path), on=Interleaved(2), device="cpu", listen=events.append)
    first = [e.run for e in events if e.progress is not None][:6]
    assert len(set(first)) == 2
    assert first == first[:2] * 3
    ended = next(i for i, e in enumerate(events) if e.record is not None)
    third = [i for i, e in enumerate(events) if e.run not in first]
    assert min(third) > ended, "a third run starts when one of the first two has ended"


def test_one_that_diverges_and_one_that_fails_stop_no_other(tmp_path: Path) -> None:
    bad = Run(task="cifar10", steps=20)
    records = sweep([RUNS[0], DIVERGING, bad], Store(tmp_path), on=Interleaved(3), device="cpu", data=tmp_path)
    assert [r.status for r in records] == ["done", "diverged", "failed"]
    assert "DataError" in records[2].error
    assert outcome(records[0]) == outcome(train(RUNS[0], device="cpu"))


def test_a_run_that_another_process_trains_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.05)
    store, events = Store(tmp_path), []
    busy, free = replace(SMALL, steps=50), replace(SMALL, steps=60)
    with store.lock(busy) as granted:
        assert granted
        release = threading.Event()

        def listen(event: SweepEvent) -> None:
            events.append(event)
            if event.elsewhere:
                release.set()

        worker = threading.Thread(target=sweep, args=([busy, free], store), kwargs={
            "on": Interleaved(2), "device": "cpu", "listen": listen,
        })  # fmt: skip
        worker.start()
        assert release.wait(60)
        assert [e.run for e in events if e.record is not None] == [free], "it does not wait while it has work"
    worker.join(60)
    assert not worker.is_alive()
    assert [e.run for e in events if e.record is not None] == [free, busy]


class RacingStore(Store):
    """A store in which another process locks a run just after the queue has looked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.looks = 0

    @contextmanager
    def lock(self, run: Run) -> Iterator[bool]:
        self.looks += 1
        if self.looks == 1:
            yield True
        else:
            with super().lock(run) as granted:
                yield granted


def test_a_run_that_another_process_takes_first_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.05)
    store, busy = RacingStore(tmp_path), replace(SMALL, steps=50)
    records: list[Record] = []
    with Store(tmp_path).lock(busy):
        worker = threading.Thread(target=lambda: records.extend(sweep([busy], store, on=Interleaved(2), device="cpu")))
        worker.start()
        while store.looks < 4 and worker.is_alive():
            time.sleep(0.01)
    worker.join(60)
    assert not worker.is_alive()
    assert [r.status for r in records] == ["done"]


def test_an_interruption_releases_the_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def interrupt(event: SweepEvent) -> None:
        if event.progress is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(RUNS, store, on=Interleaved(2), device="cpu", listen=interrupt)
    for run in RUNS:
        with store.lock(run) as granted, store.claim(run) as claimed:
            assert granted
            assert claimed
    assert [r.status for r in sweep(RUNS, store, on=Interleaved(2), device="cpu")] == ["done"] * 3


def test_a_lost_gpu_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "gpu_is_lost", lambda: True)
    bad = Run(task="cifar10", steps=20)
    with pytest.raises(ButtressError, match=r"the GPU cannot be used any more after .* failed"):
        sweep([bad, RUNS[0]], Store(tmp_path), on=Interleaved(1), device="cpu", data=tmp_path)


def test_runs_that_take_turns_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be compiled, because compiling one resets the others"):
        sweep(RUNS, Store(tmp_path), on=Interleaved(2), device="cpu", compiled=True)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Runs start while others replay their graphs, end early, run without a graph, or pause every few steps."""
    small = replace(SMALL, width=256, steps=300, precision="tf32")
    runs = [replace(small, structure=s, mixup=m) for s, m in (("btt", 0.0), ("monarch", 0.5), ("", 0.0))]
    runs += [replace(small, evaluate=2, steps=60), replace(small, optimizer="sgd", lr=1e-3, steps=100)]
    alone = [train(run, device="cuda") for run in runs]
    together = sweep([*runs, DIVERGING], Store(tmp_path), on=Interleaved(2), device="cuda")
    assert [r.status for r in together] == ["done"] * len(runs) + ["diverged"]
    for one, other in zip(alone, together, strict=False):
        for name in ("train_loss", "test_loss"):
            assert other.results[name] == pytest.approx(one.results[name], rel=1e-3)
        assert not {"peak_gib", "mfu", "compile_seconds"} & set(other.results)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_packed_images_on_a_gpu(tmp_path: Path) -> None:
    """The augmentation is compiled once for each way to resample and to mix, while other runs replay their graphs."""
    data = tmp_path / "data"
    write_folder(data)
    write_manifest(data)
    start = Run(task="cifar10", width=64, depth=1, batch=6, steps=200, mixup=0.8, precision="tf32")
    runs = [start, replace(start, mixup_on="pixels"), replace(start, resample="bilinear"), replace(start, seed=1)]
    alone = [train(run, device="cuda", data=data) for run in runs]
    together = sweep(runs, Store(tmp_path / "runs"), on=Interleaved(2), device="cuda", data=data)
    for one, other in zip(alone, together, strict=True):
        assert other.results["train_loss"] == pytest.approx(one.results["train_loss"], rel=1e-3)
