"""Running cases in forked processes: torch is imported once, and a case that ends its process ends nothing else."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz.cases import Area, Case, Traps, Verdict, judge, limit_memory, watch

CHUNK = 50
"""Number of cases of one process, unless one of them ends it."""
GRACE = 10.0
"""Seconds beyond its own limit after which a case is ended from outside."""


@dataclass(frozen=True)
class Failed:
    """A case that failed."""

    area: Area
    number: int
    verdict: Verdict


@dataclass
class Session:
    """What all cases have in common.

    Attributes:
        seed: The seed of the run.
        folder: The folder of inputs and scratch folders.
        inputs: What each area prepared, by its name.
    """

    seed: int
    folder: Path
    inputs: dict[str, Any] = field(default_factory=dict)

    def prepare(self, areas: Iterable[Area]) -> None:
        """Write the valid inputs of some areas."""
        for area in areas:
            folder = self.folder / "inputs" / area.name
            folder.mkdir(parents=True)
            self.inputs[area.name] = area.prepare(folder)

    def case(self, area: Area, number: int) -> Case:
        """A case of an area, in a new scratch folder."""
        folder = self.folder / "scratch" / f"{area.name}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "input").mkdir(parents=True)
        traps = Traps(folder / "traps")
        traps.set_up()
        random = Random(f"{self.seed} {area.name} {number}")
        return Case(random, number, folder / "input", self.inputs[area.name], traps)


def fork(work: Callable[[], None]) -> int:
    """Run a function in a child process that ends without the parent's clean-up; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@dataclass
class _Worker:
    """A child process that runs cases of one area, and what it has reported."""

    area: Area
    numbers: deque[int]
    pid: int
    pipe: int
    buffer: bytes = b""
    since: float = field(default_factory=time.monotonic)


class Pool:
    """Runs cases in a few processes at a time.

    Args:
        session: The session.
        jobs: Number of processes.
        on_done: Called for every case that has ended.
    """

    def __init__(self, session: Session, jobs: int, on_done: Callable[[Area, int, Verdict], None]) -> None:
        self.session, self.jobs, self.on_done = session, jobs, on_done
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, _Worker] = {}

    def run(self, work: Iterable[tuple[Area, Iterable[int]]], until: float) -> bool:
        """Run cases until all have ended, or until a time.

        Args:
            work: Areas with the numbers of their cases.
            until: Value of time.monotonic() after which no case is started.

        Returns:
            Whether all cases have ended.
        """
        chunks = deque(
            (area, numbers[i : i + CHUNK])
            for area, numbers in ((area, list(numbers)) for area, numbers in work)
            for i in range(0, len(numbers), CHUNK)
        )
        try:
            while chunks or self.workers:
                if time.monotonic() > until:
                    return False
                while chunks and len(self.workers) < self.jobs:
                    self._start(*chunks.popleft())
                self._wait()
            return True
        finally:
            for worker in list(self.workers.values()):
                self._end(worker)

    def _start(self, area: Area, numbers: Iterable[int]) -> None:
        remaining = deque(numbers)
        read, write = os.pipe()

        def work() -> None:
            os.close(read)
            _run_cases(self.session, area, remaining, write)

        pid = fork(work)
        os.close(write)
        self.workers[read] = _Worker(area, remaining, pid, read)
        self.selector.register(read, selectors.EVENT_READ)

    def _wait(self) -> None:
        for key, _ in self.selector.select(timeout=0.5):
            worker = self.workers[key.fd]
            data = os.read(worker.pipe, 1 << 16)
            if not data:
                self._finish(worker, "ended its process")
                continue
            *lines, worker.buffer = (worker.buffer + data).split(b"\n")
            for line in lines:
                self.on_done(worker.area, worker.numbers.popleft(), Verdict(*json.loads(line)))
                worker.since = time.monotonic()
        for worker in list(self.workers.values()):
            limit = worker.area.seconds + GRACE
            if time.monotonic() - worker.since > limit:
                self._finish(worker, f"took more than {limit:g} s and had to be ended")

    def _finish(self, worker: _Worker, problem: str) -> None:
        """End a worker; if cases remain, the first of them is the one that failed."""
        status = self._end(worker)
        if worker.numbers:
            how = f" with signal {-status}" if status < 0 else ""
            self.on_done(worker.area, worker.numbers.popleft(), Verdict(problem + how))
        if worker.numbers:
            self._start(worker.area, worker.numbers)

    def _end(self, worker: _Worker) -> int:
        self.selector.unregister(worker.pipe)
        del self.workers[worker.pipe]
        os.close(worker.pipe)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def _run_cases(session: Session, area: Area, numbers: Iterable[int], pipe: int) -> None:
    """In a worker: run cases and report each verdict as a line."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    current = Traps(Path())
    watch(lambda: current)
    limit_memory()
    for number in list(numbers):
        case = session.case(area, number)
        current = case.traps
        verdict = judge(area, case)
        shutil.rmtree(case.folder.parent, ignore_errors=True)
        os.write(pipe, json.dumps([verdict.problem, verdict.details[-2000:]]).encode() + b"\n")


def run_one(session: Session, area: Area, number: int) -> Verdict:
    """Run one case in this process, with its output, and keep its folder."""
    case = session.case(area, number)
    watch(lambda: case.traps)
    limit_memory()
    return judge(area, case)
