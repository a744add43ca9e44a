"""Power losses and kills: the order in which checkpoints reach the disk, and what is left of them."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.sweep import sweep
from buttress.lab.training import checkpoints
from buttress.lab.training.checkpoints import CheckpointError
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from lab_runs import RESULTS, SMALL

RUN = replace(SMALL, steps=40)


def trainer() -> Trainer:
    return Trainer(RUN, load("digits"), torch.device("cpu"))


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the disk, in order: "flush NAME", "rename NAME", "remove NAME"."""
    events: list[str] = []
    fsync, rename, replace_file, rmtree = os.fsync, os.rename, os.replace, shutil.rmtree

    def name(path: Any) -> str:
        return Path(path).name.partition(".json.")[0]

    def flush(descriptor: int) -> None:
        events.append(f"flush {name(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def renaming(old: Any, new: Any, **options: Any) -> None:
        events.append(f"rename {name(new)}")
        rename(old, new, **options)

    def replacing(old: Any, new: Any, **options: Any) -> None:
        events.append(f"rename {name(new)}")
        replace_file(old, new, **options)

    def removing(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).is_dir():
            events.append(f"remove {name(path)}")
        rmtree(path, *args, **options)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(shutil, "rmtree", removing)
    return events


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds the names of open files in /proc")
def test_a_checkpoint_is_on_disk_before_the_older_one_goes(tmp_path: Path, events: list[str]) -> None:
    one = trainer()
    one.save(tmp_path / "run")
    one.advance(3)
    del events[:]
    one.save(tmp_path / "run")
    order = [
        "flush shard-00001-model-00001-of-00001.safetensors",
        "flush run",  # run.json, whose temporary name ends otherwise
        "rename run.json",
        "flush checkpoint-3.part",
        "rename checkpoint-3",
        "flush run",
        "remove checkpoint-0",
    ]
    positions, start = [], 0
    for event in order:
        assert event in events[start:], (event, events)
        start = events.index(event, start) + 1
        positions.append(start)
    assert positions == sorted(positions)
    assert [e for e in events if e.startswith("remove")] == ["remove checkpoint-0"]


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    one.advance(2)
    one.save(tmp_path)
    one.advance(3)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left on device\); that of step 2 is complete"):
            one.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    trainer().resume(tmp_path)


class TestLeftovers:
    """A process that was killed after it wrote the record, and before it removed the checkpoints."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store = Store(tmp_path)
        trainer().save(store.run_folder(RUN))
        (store.run_folder(RUN) / "record.json.0123.part").touch()
        store.put(Record(RUN, "done", RESULTS))
        return store

    def test_training_removes_them(self, store: Store) -> None:
        assert train(RUN, store=store, device="cpu").results == RESULTS
        assert sorted(path.name for path in store.run_folder(RUN).iterdir()) == ["lock", "record.json"]

    def test_a_sweep_removes_them(self, store: Store) -> None:
        assert [r.status for r in sweep([RUN], store, device="cpu")] == ["done"]
        assert sorted(path.name for path in store.run_folder(RUN).iterdir()) == ["lock", "record.json"]

    def test_a_run_in_training_keeps_its_own(self, store: Store) -> None:
        with Store(store.folder).lock(RUN):
            sweep([RUN], store, device="cpu")
        assert checkpoints.latest(store.run_folder(RUN)) is not None
