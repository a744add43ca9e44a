"""Folders of runs: a damaged checkpoint, record or log gives an error, or the same result as the undamaged run.

A log is not needed to resume, so damage to it alone must not stop a run.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from buttress.lab.data import Task
from buttress.lab.training.loop import Progress
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import dump_json, mutate_bytes, mutate_json, mutate_safetensors
from fuzz.runs import OTHER, RUN, comparable, digits, train_in

STOP = 6
"""The step after which the interrupted runs end; their checkpoint is that of an earlier one."""


class Interruption(Exception):
    """Ends a run like a kill, between two pauses."""


@dataclass(frozen=True)
class Inputs:
    """Stores with an interrupted run, the same run done, and another run, interrupted; and the result."""

    task: Task
    interrupted: Path
    done: Path
    other: Path
    result: dict[str, Any]


def prepare(folder: Path) -> Inputs:
    """Train the runs."""
    task = digits()
    result = comparable(train_in(folder / "done", task))
    train_in(folder / "other", task, OTHER)
    for name, run in (("interrupted", RUN), ("other-interrupted", OTHER)):
        try:
            train_in(folder / name, task, run, watch=_interrupt)
        except Interruption:
            continue
        raise AssertionError("the run was not interrupted")
    return Inputs(task, folder / "interrupted", folder / "done", folder, result)


def _interrupt(progress: Progress) -> None:
    if progress.step == STOP:
        raise Interruption


def run_case(case: Case) -> None:
    damage = case.random.choice(DAMAGES)
    store = case.folder / "runs"
    inputs: Inputs = case.inputs
    shutil.copytree(inputs.done if damage in OF_RECORDS else inputs.interrupted, store)
    damage(case, store / RUN.key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            record = train_in(store, inputs.task)
        except Exception as error:
            if damage is damage_log:
                raise Failure(f"a damaged log stops a run: {type(error).__name__}: {error}") from error
            raise
    if comparable(record) != inputs.result and not caught:
        raise Failure(f"another result without a word, after {damage.__name__}")


def _checkpoint(folder: Path) -> Path:
    return next(folder.glob("checkpoint-*"))


def damage_shard(case: Case, folder: Path) -> None:
    """Damage the tensors of the checkpoint: header, length, or any bit."""
    path = next(_checkpoint(folder).glob("*.safetensors"))
    change = case.random.choice((mutate_safetensors, mutate_bytes, flip_bit))
    path.write_bytes(change(path.read_bytes(), case.random))


def flip_bit(data: bytes, random: Random) -> bytes:
    """Flip one bit among the numbers."""
    at = random.randrange(len(data) // 2, len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def damage_metadata(case: Case, folder: Path) -> None:
    """Change values of the checkpoint's metadata, or the text."""
    path = _checkpoint(folder) / "run.json"
    data = mutate_json(json.loads(path.read_text()), case.random, case.random.choice((0, 1, 1, 2)))
    if case.random.random() < 0.1:
        data = case.random.choice(({}, [], None, 3, "run"))
    path.write_bytes(dump_json(data, case.random))


def damage_log(case: Case, folder: Path) -> None:
    """Damage the log in any way."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = case.random.randrange(len(lines))
    if case.random.random() < 0.5:
        lines[at] = dump_json(mutate_json(json.loads(lines[at]), case.random), case.random) + b"\n"
        path.write_bytes(b"".join(lines))
    else:
        path.write_bytes(mutate_bytes(b"".join(lines), case.random))


def damage_names(case: Case, folder: Path) -> None:
    """Add or rename folders so that they look like checkpoints, or no longer do."""
    names = ("²", "99", "-3", "1e3", "007", "4.part", "6", "9" * 30, "x", "", " 4", "٣")
    name = f"checkpoint-{case.random.choice(names)}"
    kind = case.random.random()
    if (folder / name).exists():
        return
    if kind < 0.4:
        _checkpoint(folder).rename(folder / name)
    elif kind < 0.6:
        shutil.copytree(_checkpoint(folder), folder / name)
    elif kind < 0.8:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(case.random.randbytes(10))


def remove_file(case: Case, folder: Path) -> None:
    """Remove a file, or put a folder or a link that leaves the store in its place."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    path = case.random.choice(files)
    path.unlink()
    kind = case.random.random()
    if kind < 0.3:
        path.mkdir()
    elif kind < 0.6:
        path.symlink_to(case.traps.secret)


def swap_runs(case: Case, folder: Path) -> None:
    """Put the checkpoint of another run in place of this one's."""
    own = _checkpoint(folder)
    name = own.name
    shutil.rmtree(own)
    other = _checkpoint(case.inputs.other / "other-interrupted" / OTHER.key)
    shutil.copytree(other, folder / name)
    if case.random.random() < 0.5:
        inputs = _checkpoint(case.inputs.interrupted / RUN.key)
        shutil.copy(inputs / "run.json", folder / name / "run.json")


def damage_record(case: Case, folder: Path) -> None:
    """Change values or bytes of the record of a run that is done."""
    path = folder / "record.json"
    data = mutate_json(json.loads(path.read_text()), case.random, case.random.choice((0, 1, 1, 2)))
    path.write_bytes(dump_json(data, case.random))


def swap_records(case: Case, folder: Path) -> None:
    """Put the record of another run in place of this one's."""
    shutil.copy(case.inputs.other / "other" / OTHER.key / "record.json", folder / "record.json")


OF_RECORDS: tuple[Callable[[Case, Path], None], ...] = (damage_record, swap_records)
DAMAGES = (
    damage_shard, damage_shard, damage_metadata, damage_metadata, damage_log, damage_names, remove_file, swap_runs,
    damage_record, swap_records,
)  # fmt: skip

AREA = Area("checkpoints", 700, 60.0, prepare, run_case, allowed=(OSError,))
