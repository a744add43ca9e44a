"""Worker processes: their threads, their deaths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from buttress.lab.runs.store import Store
from buttress.lab.sweeps.local import usable_cpus
from buttress.lab.sweeps.sweep import sweep
from lab_runs import SMALL
from processes import before_training


class TestWorker:
    def test_a_worker_that_dies_takes_only_its_run_along(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before_training(
            tmp_path,
            monkeypatch,
            "if run.seed == 1: print('struck by lightning', file=sys.stderr, flush=True), os._exit(7)",
        )
        store = Store(tmp_path / "runs")
        records = sweep([replace(SMALL, steps=20, seed=s) for s in range(3)], store, device="cpu")
        assert [r.status for r in records] == ["done", "failed", "done"]
        assert "status 7" in records[1].error
        assert "struck by lightning" in records[1].error

    def test_threads_of_a_worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        (record,) = sweep([replace(SMALL, steps=5)], Store(tmp_path), device="cpu")
        assert record.environment["threads"] == "1"
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
        assert usable_cpus() == 3
