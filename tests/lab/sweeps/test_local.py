"""Sweeps in worker processes: skipping, failures, sharing a store, being killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps import run_queue
from buttress.lab.sweeps.engine import SweepEvent
from buttress.lab.sweeps.local import serve_runs
from buttress.lab.sweeps.run_queue import RunQueue
from buttress.lab.sweeps.sweep import sweep
from lab_runs import DIVERGING, RESULTS, SMALL
from processes import before_training


class TestSweep:
    def test_a_damaged_record_stops_no_other_run(self, tmp_path: Path) -> None:
        store, run, other = Store(tmp_path), replace(SMALL, steps=5), replace(SMALL, steps=6)
        store.put(Record(other, "done", RESULTS))
        path = store.put(Record(run, "done", RESULTS))
        path.write_text("null\n")
        records = sweep([run, other], store, device="cpu")
        assert [r.status for r in records] == ["failed", "done"]
        assert f"{path} is not a valid run record" in records[0].error
        assert path.read_text() == "null\n", "it is for the user to remove"

    def test_runs_are_skipped_recorded_and_survive_each_other(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        good = [replace(SMALL, steps=30, seed=s) for s in range(3)]
        bad = DIVERGING
        news: list[SweepEvent] = []
        records = sweep([*good, bad, good[0]], store, workers=2, device="cpu", listen=news.append)
        assert [r.run for r in records] == [*good, bad]
        assert [r.status for r in records] == ["done"] * 3 + ["diverged"]
        assert "the loss is not finite" in records[-1].error
        assert sum(n.record is not None for n in news) == 4
        later: list[SweepEvent] = []
        again = sweep([*good, bad], store, device="cpu", listen=later.append, retry=False)
        assert again == records
        assert not [n for n in later if n.record is None], "nothing was run twice"

    def test_trouble_in_a_thread_is_not_swallowed(self, tmp_path: Path) -> None:
        def listen(news: SweepEvent) -> None:
            raise RuntimeError("the listener fell over")

        with pytest.raises(RuntimeError, match="fell over"):
            sweep([replace(SMALL, steps=20)], Store(tmp_path), device="cpu", listen=listen)

    def test_sweeps_share_a_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the tasks of a SLURM job do: each run is trained once, and each sweep ends with all records."""
        monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.1)
        before_training(tmp_path, monkeypatch, f"open({str(tmp_path / 'trained')!r}, 'a').write(run.key + chr(10))")
        runs = [replace(SMALL, steps=40, seed=s) for s in range(6)]
        runs.append(DIVERGING)
        news: dict[int, list[SweepEvent]] = {0: [], 1: [], 2: []}
        results: dict[int, list[Record]] = {}

        def one(i: int) -> None:
            # One that is late must not try again what failed before it began.
            results[i] = sweep(runs, Store(tmp_path / "runs"), device="cpu", listen=news[i].append, retry=False)

        threads = [threading.Thread(target=one, args=(i,)) for i in news]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert results[0] == results[1] == results[2]
        assert [r.status for r in results[0]] == ["done"] * 6 + ["diverged"]
        keys = sorted(r.key for r in runs)
        assert sorted((tmp_path / "trained").read_text().split()) == keys
        plain = [n for events in news.values() for n in events if n.progress is None and not n.elsewhere]
        assert sorted(n.run.key for n in plain if n.record is None) == keys, "each began once, in one of the sweeps"
        for events in news.values():
            assert sorted(n.run.key for n in events if n.record is not None) == keys

    def test_nothing_is_started_once_it_is_stopped(self, tmp_path: Path) -> None:
        """Ctrl-C comes when a thread has taken a run and not yet started a worker for it."""
        store, events, stopping = Store(tmp_path), [], threading.Event()
        queue = RunQueue([SMALL], store)
        serve_runs(queue, store, lambda: None, events.append, stopping)
        with store.claim(SMALL) as free:
            assert free
        assert store.get(SMALL) is None

    def test_what_a_killed_sweep_held_is_taken_up_by_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.1)
        run = replace(SMALL, steps=40)
        events: list[SweepEvent] = []
        with Store(tmp_path).lock(run) as granted:  # as a sweep on another machine has it
            assert granted
            thread = threading.Thread(
                target=lambda: sweep([run], Store(tmp_path), device="cpu", listen=events.append), daemon=True
            )
            thread.start()
            thread.join(1)
            assert thread.is_alive()
            assert events == [SweepEvent(run, elsewhere=True)], "it says so once"
        thread.join(60)
        assert [n.record.status for n in events if n.record is not None] == ["done"]

    def test_a_killed_sweep_leaves_nothing_running_and_goes_on(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "buttress.cli.app", "sweep", "digits", "steps=3000", "width=16", "--runs"]
        command += [str(tmp_path), "--device", "cpu", "--workers", "2"]
        victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/log.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        victim.kill()
        victim.wait()
        time.sleep(2)
        with suppress(FileNotFoundError):
            left = subprocess.run(
                ["pgrep", "-f", f"buttress.lab.sweeps.worker {tmp_path}"], capture_output=True, check=False
            )
            assert left.stdout == b"", "workers continued without their sweep"
        assert not [r for r in Store(tmp_path) if r.status != "done"]
