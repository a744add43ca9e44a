"""What is common to all engines: a run's record is put into the store once, and progress is reported now and then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from buttress.lab.runs.records import Record
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.sweeps import engine
from buttress.lab.sweeps.engine import Job, is_final, throttled
from buttress.lab.sweeps.sweep import sweep
from buttress.lab.training.loop import Progress
from lab_runs import DIVERGING, SMALL, CountingStore


def ignore(progress: Progress) -> None:
    pass


class TestRecordsArePutOnce:
    @pytest.mark.parametrize(
        ("run", "status"),
        [
            (replace(SMALL, steps=5), "done"),
            (replace(DIVERGING, steps=50), "diverged"),
            (replace(SMALL, task="cifar10"), "failed"),
            (replace(SMALL, model="mlpp"), "failed"),
        ],
    )
    def test_by_the_process_that_trains(
        self, run: engine.Run, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("BUTTRESS_DATA", raising=False)
        store = CountingStore(tmp_path)
        record = Job("cpu").train(run, store, 1, ignore)
        assert record.status == status
        assert [r.status for r in store.puts] == [status]
        assert store.get(run) == record
        assert Job("cpu").train(run, None, 1, ignore).status == status, "also without a store"

    def test_and_not_by_the_sweep(self, tmp_path: Path) -> None:
        store = CountingStore(tmp_path)
        runs = [replace(SMALL, steps=5), replace(DIVERGING, steps=50), replace(SMALL, model="mlpp")]
        records = sweep(runs, store, device="cpu")
        assert [r.status for r in records] == ["done", "diverged", "failed"]
        assert not store.puts
        assert [store.get(run) for run in runs] == records

    def test_nor_where_another_process_trains_the_run(self, tmp_path: Path) -> None:
        store = CountingStore(tmp_path)
        with Store(tmp_path).lock(SMALL), pytest.raises(RunInUseError, match="another process is training"):
            Job("cpu").train(SMALL, store, 1, ignore)
        assert not store.puts


def test_what_is_final() -> None:
    assert is_final(Record(SMALL, "done"))
    assert is_final(Record(SMALL, "diverged"))
    assert not is_final(Record(SMALL, "failed", error="MemoryError"))


def test_progress_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 10.1, 10.2, 10.7, 10.7])
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(clock))
    steps: list[int] = []
    watch = throttled(lambda progress: steps.append(progress.step))
    for step in range(4):
        watch(Progress(step, 4, 1.0, 1.0, 1.0, 1.0))
    assert steps == [0, 3]
