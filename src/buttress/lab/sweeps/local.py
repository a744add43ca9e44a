"""The engine of one machine: runs are trained in worker processes, several at a time where they are small.

A worker receives its runs one line at a time, so that Python and torch start once. If it dies, its run is recorded as
failed and another worker is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.sweeps.engine import ERROR_LINES, Engine, Job, Listener, SweepEvent
from buttress.lab.sweeps.run_queue import RunQueue
from buttress.lab.training.loop import Progress


@dataclass(frozen=True)
class Local(Engine):
    """Worker processes on this machine.

    Args:
        workers: Maximum number of runs at a time.
    """

    workers: int = 1

    def train(self, runs: Sequence[Run], job: Job, store: Store, listen: Listener) -> None:
        """Train every run in a worker process; see `Engine.train`."""
        queue = RunQueue(runs, store)
        count = max(1, min(self.workers, len(runs)))
        pool = WorkerPool(store, job, count)
        errors: list[BaseException] = []

        def serve() -> None:
            try:
                serve_runs(queue, store, pool.start, listen, pool.stopping)
            except BaseException as error:
                errors.append(error)
                pool.kill()  # the other threads end as well

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # with a timeout, so that Ctrl-C is noticed
        finally:
            pool.kill()
            for thread in threads:
                thread.join()
            pool.close()
        if errors:
            raise errors[0]


class WorkerPool:
    """Starts worker processes until it is stopped, and ends all of them.

    Args:
        store: The sweep's store.
        job: Options of the training.
        count: Number of workers at a time, which share the machine's CPUs.
    """

    def __init__(self, store: Store, job: Job, count: int) -> None:
        self.store, self.job, self.count = store, job, count
        self.stopping = threading.Event()
        self._workers: list[WorkerProcess] = []
        self._guard = threading.Lock()

    def start(self) -> WorkerProcess | None:
        """Start a worker; None once the pool is stopped."""
        with self._guard:
            if self.stopping.is_set():
                return None
            self._workers.append(WorkerProcess(self.store, self.job, self.count))
            return self._workers[-1]

    def kill(self) -> None:
        """Stop the pool and kill its workers."""
        with self._guard:
            self.stopping.set()
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        """Wait for the workers to end."""
        for worker in self._workers:
            worker.close()


class WorkerProcess:
    """A process that trains runs, one at a time; `buttress.lab.sweeps.worker` is its program.

    Args:
        store: The sweep's store.
        job: Options of the training.
        count: Number of workers that share the machine.
    """

    def __init__(self, store: Store, job: Job, count: int) -> None:
        arguments = (str(store.folder), json.dumps(vars(job)), str(count))
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, usable_cpus() // count)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "buttress.lab.sweeps.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self._error_lines: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._error_lines.append(line.rstrip())
            del self._error_lines[:-ERROR_LINES]

    def train(self, run: Run, listen: Listener) -> dict[str, bool] | None:
        """Train a run in the process.

        Args:
            run: The run.
            listen: Called with its progress.

        Returns:
            Whether another process was training the run ("in_use"), and whether the worker ends because it can train
            no more runs ("exits"); None if the worker died.
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
            listen(SweepEvent(run, progress=Progress(**message["progress"])))
        return None

    def close(self) -> str:
        """Wait for the process to end, and describe how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with suppress(BrokenPipeError):  # it may have died before it could read
            self.process.stdin.close()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return f"the worker died with status {self.process.returncode}: " + " | ".join(self._error_lines)


def usable_cpus() -> int:
    """CPUs that this process may use, which a scheduler can have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve_runs(
    queue: RunQueue,
    store: Store,
    start: Callable[[], WorkerProcess | None],
    listen: Listener,
    stopping: threading.Event,
) -> None:
    """Hand queued runs to a worker, and start another one when it dies.

    Args:
        queue: The runs.
        store: The sweep's store. Workers put their records there; this function does so for workers that died.
        start: Starts a worker, or returns None when the sweep is stopped.
        listen: Called with the events of the runs.
        stopping: An event that is set before workers are killed.
    """
    worker: WorkerProcess | None = None
    while (item := queue.take(listen, stopping)) is not None:
        run, claim = item
        with claim:
            worker = worker or start()
            if worker is None:
                return
            answer = worker.train(run, listen)
            if answer is None and stopping.is_set():
                return  # the worker was killed because the sweep ends
            if answer is None:
                with suppress(RunInUseError):
                    store.put_unless_done(Record(run, "failed", error=worker.close()))
                worker = None
            elif answer["exits"]:
                worker.close()
                worker = None
            record = store.get(run)
            if record is None or (answer is not None and answer["in_use"]):
                queue.put_back(run)
                continue
        listen(SweepEvent(run, record=record))
    if worker is not None:
        worker.close()
