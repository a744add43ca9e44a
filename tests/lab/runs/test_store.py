"""The run store: records, archives, locks."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import buttress as bt
from buttress.lab.runs.records import Record, write_records
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.training.loop import train
from lab_runs import SMALL


class TestArchives:
    def test_they_count_as_runs_of_the_folder(self, tmp_path: Path) -> None:
        record = train(replace(SMALL, steps=20), store=Store(tmp_path / "a"), device="cpu")
        failed = Record(replace(SMALL, seed=5), "failed", error="out of luck")
        write_records(tmp_path / "b" / "kept.jsonl", [failed, record])
        store = Store(tmp_path / "b")
        assert {r.run.key for r in store} == {record.run.key, failed.run.key}
        assert store.get(record.run) == record
        assert train(record.run, store=store, device="cpu") == record, "it is not run again"

    def test_a_run_of_the_folder_is_newer(self, tmp_path: Path) -> None:
        run = replace(SMALL, steps=20)
        write_records(tmp_path / "old.jsonl", [Record(run, "failed", error="old")])
        store = Store(tmp_path)
        store.put(Record(run, "done", {"train_error": 1.0}))
        assert [r.status for r in store] == ["done"]

    def test_a_file_without_records_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "bad.jsonl").write_text("{}\n")
        with pytest.raises(bt.ButtressError, match=r"bad\.jsonl, line 1, is not a valid run record"):
            Store(tmp_path)


class TestLocks:
    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        with store.lock(SMALL) as granted:
            assert granted
            with pytest.raises(bt.ButtressError, match="another process is training this run"):
                train(SMALL, store=store, device="cpu")

    def test_a_disk_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fcntl = pytest.importorskip("fcntl", reason="this system has no such locks")

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(
            bt.ButtressError, match=r"cannot be locked \(.*\), and two processes must not train one run"
        ):
            train(SMALL, store=Store(tmp_path), device="cpu")


def test_a_broken_record_says_what_to_do(tmp_path: Path) -> None:
    store, run = Store(tmp_path), SMALL
    store.run_folder(run).mkdir(parents=True)
    (store.run_folder(run) / "record.json").write_text("{}")
    with pytest.raises(bt.ButtressError, match="remove its folder to train the run again"):
        store.get(run)


def test_a_failure_is_not_written_over_a_run_in_training(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock(SMALL), pytest.raises(RunInUseError, match="another process is training this run"):
        store.put_unless_done(Record(SMALL, "failed", error="MemoryError: here"))
    assert store.get(SMALL) is None


@pytest.mark.parametrize("status", ["failed", "diverged"])
def test_a_failure_is_not_written_over_a_run_that_is_done(tmp_path: Path, status: Any) -> None:
    store = Store(tmp_path)
    failed = Record(SMALL, status, error="MemoryError: here")
    assert store.put_unless_done(failed) == failed == store.get(SMALL)
    assert store.put_unless_done(replace(failed, error="another")).error == "another"
    done = Record(SMALL, "done")
    store.put(done)
    assert store.put_unless_done(failed) == done == store.get(SMALL)
