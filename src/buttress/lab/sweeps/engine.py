"""The interface of engines, which train a sweep's runs: jobs, events, and the base class."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from buttress.lab.data import Task, load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.training.devices import resolve_device
from buttress.lab.training.divergence import DivergenceError
from buttress.lab.training.logs import JsonLines
from buttress.lab.training.loop import Progress, Training, TrainOptions, Watch, finish, training

PROGRESS_SECONDS = 0.5
"""Minimum time between two reports of a run's progress."""
ERROR_LINES = 12
"""Maximum number of lines from a lost process's error output in its run record."""


@dataclass(frozen=True)
class SweepEvent:
    """An event in a run: its start, its progress, its end, or that another process trains it.

    At the start of a run, only `run` is set.
    """

    run: Run
    progress: Progress | None = None
    """Progress of the run, while it is trained."""
    record: Record | None = None
    """The run's record, once it ended."""
    elsewhere: bool = False
    """Whether this sweep waits for another process that trains the run."""


Listener = Callable[[SweepEvent], None]


@dataclass(frozen=True)
class Job:
    """Options for the training of a sweep's runs: plain values, which can be sent to other processes and machines."""

    device: str | None = None
    """A device such as "cpu" or "cuda". Default: a GPU if there is one."""
    data: str | None = None
    """The data folder. Default: $BUTTRESS_DATA."""
    compiled: bool = False
    """Whether to compile models."""
    modules: Sequence[str] = ()
    """Modules that a process imports before it reads its first run, such as one that declares structures."""

    def train(self, run: Run, store: Store | None, at_once: int, watch: Watch) -> Record:
        """Train a run in this process. An error of the run is recorded, not raised.

        Args:
            run: The run.
            store: The store for its record and checkpoints; None keeps none.
            at_once: Number of runs that share the device.
            watch: Called with the progress, at most every `PROGRESS_SECONDS`.

        Returns:
            The record. With a store, it has been put there, once: by `train` if the run is done or diverged, and by
            this method if it failed.

        Raises:
            RunInUseError: If another process is training the run.
        """
        return finish(self.training(run, store, at_once, watch))

    def training(self, run: Run, store: Store | None, at_once: int, watch: Watch) -> Training:
        """Train a run like `train`, a window of steps at a time."""
        try:
            options = TrainOptions(
                device=resolve_device(self.device),
                data=_load_task(run.task, self.device, self.data),
                compiled=self.compiled,
                watch=throttled(watch),
                log=JsonLines(store.run_folder(run) / "log.jsonl") if store is not None else None,
                at_once=at_once,
            )
            return (yield from training(run, options, store))
        except RunInUseError:
            raise
        except DivergenceError as error:
            return error.record(run)
        except Exception as error:
            record = Record(run, "failed", error=f"{type(error).__name__}: {error}")
            return record if store is None else store.put_unless_done(record)


@lru_cache(maxsize=1)  # reading a task's data can take longer than a small run
def _load_task(name: str, device: str | None, data: str | None) -> Task:
    return load(name, resolve_device(device), data)


def throttled(watch: Watch) -> Watch:
    """Pass on progress at most every `PROGRESS_SECONDS`."""
    last = 0.0

    def throttled_watch(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            watch(progress)

    return throttled_watch


def is_final(record: Record) -> bool:
    """Whether the run would end in the same way on any machine; lack of memory or data, for example, is not final."""
    return record.status in ("done", "diverged")


class Engine(ABC):
    """Trains a sweep's runs."""

    @abstractmethod
    def train(self, runs: Sequence[Run], job: Job, store: Store, listen: Listener) -> None:
        """Train every run, in this order as far as possible. A run that fails does not stop the others.

        Each run's record is put into the store once: by the process that trains the run, if it works in the store, and
        else by the engine.

        Args:
            runs: The runs.
            job: Options of the training.
            store: The store for their records.
            listen: Called for each run when it starts, when it progresses, and when it ends. For a run that another
                sweep trains, it is called when that run ends, and before that at most once, when the engine starts to
                wait for it.
        """
