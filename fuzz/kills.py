"""Kills at events of the file system: a run is killed at one, resumed, and must end as if nothing had happened.

A child process trains a tiny run and is killed by SIGKILL right before one of its events, or right after a file was
opened for writing and before anything is in it. In every third case the resumed run is killed as well. The last process
trains to the end. Then the record equals that of an uninterrupted run bit by bit, the log has the same lines, and no
checkpoint or temporary file is left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buttress.lab.data import Task
from buttress.lab.runs.store import Store
from fuzz.cases import Area, Case, Failure
from fuzz.runs import RUN, comparable, digits, train_in
from fuzz.workers import fork

CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "fcntl.flock"}
"""Audit events that change the file system, besides files that are opened for writing; fcntl.flock locks a run."""


@dataclass(frozen=True)
class Inputs:
    """The data, and what the uninterrupted run left."""

    task: Task
    result: dict[str, Any]
    log: list[tuple[int, tuple[str, ...]]]
    files: list[str]
    events: int


def prepare(folder: Path) -> Inputs:
    """Train the run to its end, in a child process that counts the events."""
    task = digits()
    counted = folder / "events"

    def work() -> None:
        count = install()
        train_in(folder / "runs", task)
        counted.write_text(str(count[0]))

    if _wait(fork(work)) != 0:
        raise AssertionError("the uninterrupted run failed")
    return Inputs(task, *_left_in(folder / "runs"), int(counted.read_text()))


def install(kill_at: int | None = None, *, opened: bool = False) -> list[int]:
    """Count events in this process, and kill it at one.

    Args:
        kill_at: Number of the event, from 0. Default: none.
        opened: Whether to carry out an opening for writing before the kill.

    Returns:
        A list whose only entry is the number of events so far.
    """
    count = [0]
    flush = os.fsync

    def event(path: object, flags: int | None) -> None:
        if count[0] == kill_at:
            count[0] += 1  # what follows is no event
            if opened and flags is not None and isinstance(path, str | os.PathLike):
                _tear(path, flags)
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1

    def fsync(descriptor: int) -> None:
        event(None, None)
        flush(descriptor)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            flags = arguments[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and arguments[0] != os.devnull:
                event(arguments[0], flags)
        elif name in CHANGING:
            event(None, None)

    os.fsync = fsync
    sys.addaudithook(hook)
    return count


def _tear(path: str | os.PathLike[str], flags: int) -> None:
    """Leave a file as a killed process does that has opened it: empty, or with half a line at its end."""
    descriptor = os.open(path, flags & ~os.O_EXCL, 0o644)
    if flags & os.O_APPEND:
        os.write(descriptor, b'{"step": 4, "lo')


def run_case(case: Case) -> None:
    inputs: Inputs = case.inputs
    runs = case.folder / "runs"
    # Spread evenly: the first cases cover every event, however many cases there are.
    first = case.number * 37 % (2 * inputs.events)
    kills = [(first // 2, bool(first % 2))]
    if case.number % 3 == 2:
        kills.append((case.random.randrange(inputs.events), case.random.random() < 0.5))
    for at, opened in kills:

        def killed(at: int = at, opened: bool = opened) -> None:
            install(at, opened=opened)
            train_in(runs, inputs.task)

        status = _wait(fork(killed))
        if status not in (0, -signal.SIGKILL):
            raise Failure(f"a run that was killed at event {at} before does not resume: exit code {status}")

    status = _wait(fork(lambda: _finish(runs, inputs.task)))
    if status != 0:
        raise Failure(f"a run that was killed at event {kills[0][0]} does not resume: exit code {status}")
    result, log, files = _left_in(runs)
    if result != inputs.result:
        raise Failure(f"killed at event {kills}: the record differs")
    if log != inputs.log:
        raise Failure(f"killed at event {kills}: the log has other lines")
    if extra := set(files) - set(inputs.files):
        raise Failure(f"killed at event {kills}: left behind {sorted(extra)[0]}")


def _finish(runs: Path, task: Task) -> None:
    train_in(runs, task)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _left_in(runs: Path) -> tuple[dict[str, Any], list[tuple[int, tuple[str, ...]]], list[str]]:
    """The record without its times, the steps and names of each line of the log, and the names of the files."""
    record = Store(runs).get(RUN)
    if record is None:
        raise Failure("there is no record")
    lines = [json.loads(line) for line in (runs / RUN.key / "log.jsonl").read_text().splitlines()]
    log = [(line["step"], tuple(sorted(line))) for line in lines]
    return comparable(record), log, sorted(str(path.relative_to(runs)) for path in runs.rglob("*"))


AREA = Area("kills", 100, 60.0, prepare, run_case)
