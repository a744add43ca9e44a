"""The run store: records, archives, locks."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import buttress as bt
from buttress.files import FileWarning
from buttress.lab.runs.records import Record, RecordError, write_records
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.training.loop import train
from lab_runs import RESULTS, SMALL


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
        store.put(Record(run, "done", RESULTS))
        assert [r.status for r in store] == ["done"]

    def test_a_damaged_line_is_named_and_hides_no_other_run(self, tmp_path: Path) -> None:
        record = Record(SMALL, "done", RESULTS)
        (tmp_path / "bad.jsonl").write_text("null\n" + record.to_json() + "\n" + record.to_json()[:50])
        with pytest.warns(FileWarning) as caught:
            store = Store(tmp_path)
        assert [str(w.message).partition(" (")[0] for w in caught] == [
            f"skipped: {tmp_path / 'bad.jsonl'}, lines 1, 3, are not valid run records"
        ]
        assert len(store.skipped) == 1
        assert list(store) == [record]

    def test_records_without_a_checksum_are_used_with_one_warning(self, tmp_path: Path) -> None:
        for seed in range(3):
            old = json.loads(Record(replace(SMALL, seed=seed), "done", RESULTS).to_json())
            del old["checksum"]
            (tmp_path / old["key"]).mkdir()
            (tmp_path / old["key"] / "record.json").write_text(json.dumps(old))
            with (tmp_path / f"{seed}.jsonl").open("w") as file:
                file.write(json.dumps(old) + "\n")
        with pytest.warns(FileWarning) as caught:
            store = Store(tmp_path)
        assert len(list(store)) == 3, "no second warning, which would be an error"
        assert store.get(SMALL) is not None
        (warning,) = caught
        assert (
            str(warning.message) == f"{tmp_path}: 3 records have no checksum, as version 0.1 wrote them: not verified"
        )

    def test_the_warning_about_one_record_counts_it(self, tmp_path: Path) -> None:
        old = json.loads(Record(SMALL, "done", RESULTS).to_json())
        del old["checksum"]
        store = Store(tmp_path)
        store.run_folder(SMALL).mkdir()
        (store.run_folder(SMALL) / "record.json").write_text(json.dumps(old))
        with pytest.warns(FileWarning, match=": 1 record has no checksum"):
            store.get(SMALL)


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
    done = Record(SMALL, "done", RESULTS)
    store.put(done)
    assert store.put_unless_done(failed) == done == store.get(SMALL)


class TestOwnRecords:
    """A record in a run's folder is that run's, or it is refused."""

    def test_the_record_of_another_seed_is_refused(self, tmp_path: Path) -> None:
        store, other = Store(tmp_path), Record(replace(SMALL, seed=1), "done", RESULTS)
        store.put(other).rename((store.run_folder(SMALL)).with_suffix(".moved"))
        store.run_folder(SMALL).mkdir()
        (tmp_path / f"{SMALL.key}.moved").rename(store.run_folder(SMALL) / "record.json")
        says = f"is the record of another run, {other.run.key}, and not of {SMALL.key}: remove its folder"
        with pytest.raises(RecordError, match=says):
            store.get(SMALL)
        with pytest.raises(RecordError, match=says):
            train(SMALL, store=store, device="cpu")
        with pytest.warns(FileWarning, match=f"skipped: .*the record of another run, {other.run.key}"):
            assert list(store) == []

    def test_a_changed_number_is_noticed(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        path = store.put(Record(SMALL, "done", RESULTS))
        path.write_text(path.read_text().replace('"train_error": 1.0', '"train_error": 0.9'))
        with pytest.raises(RecordError, match=r"its content does not match its checksum.*remove its folder"):
            store.get(SMALL)

    def test_links_out_of_the_folder_are_not_followed(self, tmp_path: Path) -> None:
        store, elsewhere = Store(tmp_path / "runs"), tmp_path / "elsewhere.jsonl"
        elsewhere.write_text(Record(SMALL, "done", RESULTS).to_json() + "\n")
        store.run_folder(SMALL).mkdir(parents=True)
        (store.run_folder(SMALL) / "record.json").symlink_to(elsewhere)
        (tmp_path / "runs" / "archive.jsonl").symlink_to(elsewhere)
        with pytest.raises(RecordError, match="it is a link that leaves its folder"):
            store.get(SMALL)
        with pytest.warns(FileWarning, match=r"archive\.jsonl cannot be read \(it is a link that leaves"):
            assert not Store(tmp_path / "runs").archived
        (tmp_path / "linked").symlink_to(tmp_path / "runs")
        (tmp_path / "runs" / "archive.jsonl").unlink()
        elsewhere.rename(tmp_path / "runs" / "archive.jsonl")
        assert Store(tmp_path / "linked").archived, "the folder itself may be a link"


def test_a_rejected_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(bt.ButtressError):
        train(replace(SMALL, model="gpt"), store=Store(tmp_path / "runs"), device="cpu")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    with pytest.raises(bt.ButtressError):
        train(replace(SMALL, model="gpt"), store=Store(tmp_path / "runs"), device="cpu")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    store, precious = Store(tmp_path / "runs"), tmp_path / "precious"
    precious.write_text("content")
    store.run_folder(SMALL).mkdir(parents=True)
    (store.run_folder(SMALL) / "lock").symlink_to(precious)
    with pytest.raises(bt.ButtressError, match="cannot be locked"), store.lock(SMALL):
        pass
    assert precious.read_text() == "content"


def test_a_folder_that_cannot_be_created_is_not_blamed_on_locks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in ("file", "file/below", "link"):
        with (
            pytest.raises(bt.ButtressError, match=r"cannot be created or written .*: choose another folder") as caught,
            Store(tmp_path / folder).lock(SMALL),
        ):
            pass
        assert "lock" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOENT])
def test_a_folder_that_cannot_be_written_is_named(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    store = Store(tmp_path / "runs")
    with pytest.raises(bt.ButtressError, match=f"{store.run_folder(SMALL)} cannot be created"), store.lock(SMALL):
        pass
