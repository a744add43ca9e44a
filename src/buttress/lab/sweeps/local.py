"""Many runs: those that have a record are skipped, one that crashes does not stop the others.

What a sweep is stands here once; where its runs are trained is the affair of an engine. The one below is `Local`: runs
go to worker processes, several at a time where they are small. A worker is told its runs one line at a time, so that
starting Python and torch is paid once; if it dies, the run that it had is recorded as failed and another takes its
place. Several sweeps can share a store, on one machine or many: a run that one of them trains is left to it.
`lab/ray.py` is the engine of a cluster. Killing everything loses no more than what was done since the last checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from buttress.lab.data import Task, load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Held, Record, Store
from buttress.lab.training.logs import Lines
from buttress.lab.training.loop import Progress, Watch, device_of, train
from buttress.lab.training.trainer import Diverged

LAST_LINES = 12
"""Lines of a dead worker's error output that go into its run's record."""
BETWEEN = 0.5
"""Seconds, at least, between two words about a run's progress."""
HELD = 2.0
"""Seconds until a sweep that has nothing else to do looks again at runs that another one trains."""


@dataclass(frozen=True)
class News:
    """What a sweep has to say: a run began, got further, or ended; or another sweep trains it, and this one waits."""

    run: Run
    progress: Progress | None = None
    record: Record | None = None
    elsewhere: bool = False


Listener = Callable[[News], None]


@dataclass(frozen=True)
class Job:
    """How all runs of a sweep are trained: plain values, which travel to other processes and other machines."""

    device: str | None = None
    data: str | None = None
    compiled: bool = False

    def train(self, run: Run, store: Store | None, at_once: int, watch: Watch) -> Record:
        """Train a run in this process, in a store if there is one. What goes wrong is a record too: that it failed.

        Only that another process has the run is no record: it is raised.
        """
        try:
            return train(
                run,
                store=store,
                device=self.device,
                data=_task(run.task, self.device, self.data),
                compiled=self.compiled,
                watch=_seldom(watch),
                log=Lines(store.place(run) / "log.jsonl") if store is not None else None,
                at_once=at_once,
            )
        except Held:
            raise
        except Diverged as trouble:
            return trouble.record(run)
        except Exception as error:
            return Record(run, "failed", error=f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)  # reading a task's data can take longer than a small run
def _task(name: str, device: str | None, data: str | None) -> Task:
    return load(name, device_of(device), data)


def _seldom(watch: Watch) -> Watch:
    last = 0.0

    def watch_now_and_then(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > BETWEEN:
            last = time.monotonic()
            watch(progress)

    return watch_now_and_then


def keep(store: Store, record: Record) -> Record | None:
    """Put a record into the store, unless the run was finished all the same; the record that stands.

    None if somebody is training the run: what comes of that is its record.
    """
    with store.lock(record.run) as mine:
        if not mine:
            return None
        known = store.get(record.run)
        if known is not None and (known.status == "done" or known == record):
            return known
        store.put(record)
        return record


def final(record: Record) -> bool:
    """Whether the run would end like that anywhere, and not for lack of memory, say, or of data."""
    return record.status == "done" or Diverged.ended(record)


class Engine(ABC):
    """Where the runs of a sweep are trained."""

    @abstractmethod
    def train(self, todo: Sequence[Run], job: Job, store: Store, tell: Listener) -> None:
        """Have each run trained, the first ones first, put its record into the store, and tell of it.

        Of each run it tells once that it began, then how far it got, then its record; of one that another sweep
        trained, only its record, and before that perhaps that it waits for it. A run that fails stops no other.
        """


def sweep(
    runs: Iterable[Run],
    store: Store,
    *,
    workers: int = 1,
    on: Engine | None = None,
    device: str | None = None,
    data: Path | str | None = None,
    compiled: bool = False,
    listen: Listener | None = None,
    retry: bool = True,
) -> list[Record]:
    """Train every run that has no record yet and return all records, in the runs' order.

    They are trained in `workers` processes of this machine, or `on` another engine. With `retry`, runs that failed
    before are tried again. Largest first, so that none is left alone at the end. Sweeps of the same runs in the same
    store share them out; each ends when all of them have records.
    """
    wanted = list(dict.fromkeys(runs))
    tell = listen or (lambda news: None)
    todo = []
    for run in sorted(wanted, key=lambda r: (-r.steps * r.width * r.batch, r.key)):
        known = store.get(run)
        if known is None or (known.status == "failed" and retry):
            todo.append(run)
        else:
            tell(News(run, record=known))
    if todo:
        job = Job(device, str(Path(data).absolute()) if data else None, compiled)
        (on or Local(workers)).train(todo, job, store, tell)
    records = (store.get(run) for run in wanted)
    return [record for record in records if record is not None]


@dataclass(frozen=True)
class Local(Engine):
    """Worker processes on this machine."""

    workers: int = 1

    def train(self, todo: Sequence[Run], job: Job, store: Store, tell: Listener) -> None:
        left = _Left(todo, store)
        count = max(1, min(self.workers, len(todo)))
        alive: list[_Worker] = []
        troubles: list[BaseException] = []
        stopping = threading.Event()
        starting = threading.Lock()

        def start() -> _Worker | None:
            with starting:
                if stopping.is_set():
                    return None
                alive.append(_Worker(store, job, count))
                return alive[-1]

        def serve() -> None:
            try:
                _serve(left, store, start, tell, stopping)
            except BaseException as trouble:
                troubles.append(trouble)

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in pieces, so that Ctrl-C is heard
        finally:
            # Nothing is started any more, and nothing is left behind.
            with starting:
                stopping.set()
            for worker in alive:
                worker.process.kill()
            for thread in threads:
                thread.join()
            for worker in alive:
                worker.close()
        if troubles:
            raise troubles[0]


class _Worker:
    """One process that trains runs, one after the other."""

    def __init__(self, store: Store, job: Job, workers: int) -> None:
        arguments = (str(store.folder), json.dumps(vars(job)), str(workers))
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, _cpus() // workers)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "buttress.lab.sweeps.local", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.errors: list[str] = []
        self.reader = threading.Thread(target=self._drain, daemon=True)
        self.reader.start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip())
            del self.errors[:-LAST_LINES]

    def train(self, run: Run, tell: Listener) -> dict[str, bool] | None:
        """Have a run trained; None if the process died over it.

        Else whether another process held the run, and whether this one leaves because it can do no more.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(run.to_json() + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if "progress" not in message:
                return message
            tell(News(run, progress=Progress(**message["progress"])))
        return None

    def close(self) -> str:
        """End the process and say how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with suppress(BrokenPipeError):  # it may have died before it could read
            self.process.stdin.close()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return f"the worker died with status {self.process.returncode}: " + " | ".join(self.errors)


def _cpus() -> int:
    """Those that this process may use, which a scheduler can have made fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Left:
    """The runs that no worker has taken yet. What another sweep in the same store trains is left to it."""

    def __init__(self, runs: Sequence[Run], store: Store) -> None:
        self.runs, self.store = list(runs), store
        self.written = {run: store.written(run) for run in runs}
        self.begun: set[Run] = set()
        self.awaited: set[Run] = set()
        self.guard = threading.Lock()

    def take(self, tell: Listener, stopping: threading.Event) -> tuple[Run, ExitStack] | None:
        """The first run that nobody sees to, once there is one, with the claim on it; None if there will be none."""
        while self.runs and not stopping.is_set():
            with self.guard:
                for run in list(self.runs):
                    with ExitStack() as claim:
                        if not claim.enter_context(self.store.claim(run)) or self._trained(run):
                            continue
                        self.runs.remove(run)
                        if (record := self._news_of(run)) is not None:
                            tell(News(run, record=record))
                            continue
                        self._begin(run, tell)
                        return run, claim.pop_all()
                for run in self.runs:
                    if run not in self.awaited:
                        self.awaited.add(run)
                        tell(News(run, elsewhere=True))
            stopping.wait(HELD if self.runs else 0)
        return None

    def give_back(self, run: Run) -> None:
        with self.guard:
            self.runs.append(run)

    def _trained(self, run: Run) -> bool:
        """Whether somebody is at it who needs no claim: `buttress train`, or what a sweep that was killed left."""
        with self.store.lock(run) as free:
            return not free

    def _news_of(self, run: Run) -> Record | None:
        """A record that another sweep has put since this one began, if there is no use in another attempt."""
        written = self.store.written(run)
        if written == self.written[run]:
            return None
        self.written[run] = written
        record = self.store.get(run)
        return record if record is not None and final(record) else None

    def _begin(self, run: Run, tell: Listener) -> None:
        if run not in self.begun:
            self.begun.add(run)
            tell(News(run))


def _serve(
    left: _Left, store: Store, start: Callable[[], _Worker | None], tell: Listener, stopping: threading.Event
) -> None:
    """Feed one worker after another until no run is left."""
    worker: _Worker | None = None
    while (found := left.take(tell, stopping)) is not None:
        run, claim = found
        with claim:
            worker = worker or start()
            if worker is None:
                return
            answer = worker.train(run, tell)
            if answer is None and stopping.is_set():
                return  # it was ended, it did not die
            if answer is None:
                keep(store, Record(run, "failed", error=worker.close()))
                worker = None
            elif answer["leaves"]:
                worker.close()
                worker = None
            record = store.get(run)
            if record is None or (answer is not None and answer["held"]):
                left.give_back(run)
                continue
        tell(News(run, record=record))
    if worker is not None:
        worker.close()


def work(store: Store, job: Job, at_once: int) -> None:
    """A worker: runs come in as lines, news goes out as lines."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not pass for news

    def say(message: dict[str, object]) -> None:
        try:
            print(json.dumps(message), file=out, flush=True)
        except BrokenPipeError:
            os._exit(1)  # whoever asked for it is gone; the last checkpoint stays

    asked: Queue[str | None] = Queue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line)
        # The sweep is gone, or has no more: in the middle of a run there is nobody left to train it for.
        asked.put(None)
        if busy.is_set():
            os._exit(1)

    busy = threading.Event()
    threading.Thread(target=read, daemon=True).start()
    while (line := asked.get()) is not None:
        run = Run.from_json(line)
        busy.set()
        try:
            made = job.train(run, store, at_once, lambda progress: say({"progress": vars(progress)}))
            held = keep(store, made) is None
        except Held:
            held = True
        busy.clear()
        leaves = _card_is_lost()
        say({"held": held, "leaves": leaves})
        if leaves:
            return


def _card_is_lost() -> bool:
    """After some errors, such as an illegal access, nothing runs on a GPU any more in the process that made them."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(arguments: Sequence[str]) -> None:
    folder, job, at_once = arguments
    work(Store(folder), Job(**json.loads(job)), int(at_once))


if __name__ == "__main__":
    main(sys.argv[1:])
