"""The engine of one process: runs take turns, so that the small kernels of several runs fill one GPU together.

On a GPU each run enqueues its next window of steps on a stream of its own and does not wait for it until the others
have enqueued theirs. Processes that share a GPU take turns on it instead, unless the system runs NVIDIA's MPS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from buttress import ButtressError
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.sweeps.engine import Engine, Job, Listener, SweepEvent
from buttress.lab.sweeps.run_queue import POLL_SECONDS, RunQueue
from buttress.lab.training.devices import gpu_is_lost
from buttress.lab.training.loop import Progress, Training, Watch


@dataclass(frozen=True)
class Interleaved(Engine):
    """Several runs at a time in this process, on one device.

    Args:
        count: Maximum number of runs at a time.
    """

    count: int = 1

    def train(self, runs: Sequence[Run], job: Job, store: Store, listen: Listener) -> None:
        """Train every run, a window of steps at a time; see `Engine.train`.

        Raises:
            ConfigError: If runs that take turns are to be compiled.
            ButtressError: If the GPU cannot be used any more. The runs without a record can be trained by another
                process.
        """
        if job.compiled and self.count > 1:
            raise ConfigError(
                "runs that take turns cannot be compiled, because compiling one resets the others: leave out --compile "
                "or --interleave"
            )
        queue, never = RunQueue(runs, store), threading.Event()
        at_once = min(self.count, len(runs))
        turns: list[Turn] = []
        next_look = 0.0
        try:
            while True:
                # A slot stays free while other processes train what is left; asking for their locks takes time.
                while len(turns) < at_once and (not turns or time.monotonic() >= next_look):
                    if (item := queue.take(listen, never, wait=not turns)) is None:
                        next_look = time.monotonic() + POLL_SECONDS
                        break
                    run, claim = item
                    steps = job.training(run, store, at_once, watch=_forward(run, listen))
                    turns.append(Turn(run, claim, steps))
                if not turns:
                    return
                turns = [turn for turn in turns if turn.advance(queue, listen)]
        finally:
            for turn in turns:
                turn.close()


@dataclass(frozen=True)
class Turn:
    """A run that is being trained."""

    run: Run
    claim: ExitStack
    steps: Training

    def advance(self, queue: RunQueue, listen: Listener) -> bool:
        """Wait for the run's window of steps and enqueue the next one.

        Args:
            queue: Receives the run if another process trains it.
            listen: Called with the record at the run's end.

        Returns:
            Whether the run continues.

        Raises:
            ButtressError: If the run has failed and the GPU cannot be used any more.
        """
        record: Record | None = None
        try:
            next(self.steps)
            return True
        except StopIteration as end:
            record = end.value
        except RunInUseError:
            queue.put_back(self.run)
        self.close()
        if record is not None:
            listen(SweepEvent(self.run, record=record))
            if record.status == "failed" and gpu_is_lost():
                raise ButtressError(
                    f"the GPU cannot be used any more after {self.run} failed ({record.error}): run the same command "
                    "again to train the others"
                )
        return False

    def close(self) -> None:
        """Stop the run and release the claim on it."""
        self.steps.close()
        self.claim.close()


def _forward(run: Run, listen: Listener) -> Watch:
    def watch(progress: Progress) -> None:
        listen(SweepEvent(run, progress=progress))

    return watch
