"""The training loop: trains a run from its last checkpoint to its end, and builds its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch

from buttress.lab.data import Task, load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.devices import resolve_device, translate_memory_errors
from buttress.lab.training.distributed import ProcessGroup, process_group
from buttress.lab.training.divergence import DivergenceError, diagnose
from buttress.lab.training.graph import SideStream
from buttress.lab.training.history import MetricHistory
from buttress.lab.training.logs import Log
from buttress.lab.training.results import build_record, training_curve
from buttress.lab.training.state import Snapshot
from buttress.lab.training.trainer import Trainer
from buttress.lab.training.weights import save_weights

WINDOW = 100
"""Maximum number of steps between two pauses, at which losses are copied to the host."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, for display."""

    step: int
    """Number of steps done."""
    steps: int
    """Number of all steps."""
    loss: float
    """Mean training loss since the last report."""
    error: float
    """Mean training error since the last report, in percent."""
    examples_per_second: float
    """Training speed."""
    seconds_left: float
    """Estimated time to the end of the run."""


Watch = Callable[[Progress], None]
Training = Generator[None, None, Record]
"""A run in training, which yields each time that it has enqueued work on its device, and returns the run's record."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of training that do not change a run's results. `train` documents the fields."""

    device: torch.device
    data: Path | str | Task | None = None
    compiled: bool = False
    watch: Watch | None = None
    log: Log | None = None
    checkpoint_seconds: float = 30.0
    at_once: int = 1


def train(
    run: Run,
    *,
    store: Store | None = None,
    device: torch.device | str | None = None,
    data: Path | str | Task | None = None,
    compiled: bool = False,
    watch: Watch | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 30.0,
    at_once: int = 1,
    parallel: str = "ddp",
    way: str | None = None,
) -> Record:
    """Train a run to its end.

    With a store, a run that is done there is not trained again, a killed run resumes from its last checkpoint, and the
    record is put into the store, also that of a run that diverged. Under torchrun all processes train the one run; they
    must see the same store.

    Args:
        run: The run.
        store: The store for its record and checkpoints. Default: none are written.
        device: A device such as "cpu" or "cuda:1". Default: a GPU if there is one.
        data: The data folder, or the run's task if it is loaded already. Default: $BUTTRESS_DATA.
        compiled: Whether to compile the model and the augmentation with torch.compile.
        watch: Called with the progress, every few steps.
        log: Receives the run's metrics.
        checkpoint_seconds: Time between checkpoints.
        at_once: Number of runs that share the device. It is recorded, because it makes their times incomparable.
        parallel: Strategy for several processes: "ddp" (every process has the whole model) or "fsdp" (each has a
            shard of every weight).
        way: Former name of `parallel`.

    Returns:
        The run's record.

    Raises:
        ConfigError: If the run cannot be trained as configured.
        RunInUseError: If another process is training the run.
        DivergenceError: If the loss is not finite, or too large to recover.
        CheckpointError: If a checkpoint cannot be written or read, or is damaged.
        RecordError: If the run's record in the store is damaged, or that of another run.
        TooLargeError: If the run needs more memory than its device has.
        PeerLostError: If another process of the run was lost.

    Example:
        >>> record = train(Run(structure="btt(rank=2)", steps=500), store=Store("runs"))
        >>> record.results["test_error"]
    """
    options = TrainOptions(resolve_device(device), data, compiled, watch, log, checkpoint_seconds, at_once)
    return finish(training(run, options, store, way or parallel))


def finish(steps: Training) -> Record:
    """Train a run to its end.

    Args:
        steps: The run, as `training` returns it.

    Returns:
        The run's record.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def training(run: Run, options: TrainOptions, store: Store | None = None, parallel: str = "ddp") -> Training:
    """Train a run like `train`, a window of steps at a time, so that one process can train several runs at once.

    Args:
        run: The run.
        options: Options of training.
        store: The store for its record and checkpoints. Default: none are written.
        parallel: Strategy for several processes.

    Yields:
        Nothing, each time that the next steps are enqueued on the device and before waiting for them.

    Returns:
        The run's record.
    """
    with (
        process_group(parallel, options.device) as group,
        group.translate_comm_errors(),
        translate_memory_errors(options.device),
    ):
        if not group.is_main:
            options = replace(options, watch=None, log=None)
        if store is None:
            return (yield from TrainingLoop(run, options, group).steps())
        with store.lock(run) if group.is_main else nullcontext(True) as granted:
            if not granted:
                raise store.in_use(run)
            record = store.get(run)
            group.barrier()  # every process has read the record before one of them can write it
            done = record is not None and record.status == "done"
            if group.is_main:
                checkpoints.clean_up(store.run_folder(run), done=done)
            group.barrier()
            if record is not None and done:
                return record
            return (yield from _train_in_store(run, store, options, group))


def _train_in_store(run: Run, store: Store, options: TrainOptions, group: ProcessGroup) -> Training:
    """Train a run that this process has locked, and put its record into the store."""
    folder = store.run_folder(run)
    try:
        loop = TrainingLoop(run, options, group, folder)
        record = yield from loop.steps()
    except DivergenceError as error:
        if group.is_main:
            store.put(error.record(run))
        raise
    if loop.trainer.task.language:
        record = replace(record, weights=save_weights(folder, loop.trainer.model, group))
    if group.is_main:
        store.put(record)
        checkpoints.clear(folder)
    group.barrier()
    return record


def remove_leftovers(store: Store, run: Run) -> None:
    """Remove the checkpoints of a run that is done, which a process that was killed after the last step has left.

    Args:
        store: The store.
        run: The run, which has a record that it is done.
    """
    folder = store.run_folder(run)
    if checkpoints.latest(folder) is None and not any(folder.glob("*.part")):
        return
    with store.lock(run) as granted:
        if granted:
            checkpoints.clean_up(folder, done=True)


@dataclass(frozen=True)
class TimedWindow:
    """The steps between two pauses, and the time they took."""

    steps: int
    seconds: float

    @property
    def step_seconds(self) -> float:
        """Mean time per step."""
        return self.seconds / self.steps


class TrainingLoop:
    """Trains a run from its last checkpoint to its end, pausing to report, measure and save.

    Args:
        run: The run.
        options: Options of training.
        group: The processes that train it.
        folder: The run's folder, for checkpoints. Default: none are written or read.
    """

    def __init__(self, run: Run, options: TrainOptions, group: ProcessGroup, folder: Path | None = None) -> None:
        self.run, self.options, self.folder = run, options, folder
        device, data = options.device, options.data
        if device.type == "cuda":
            torch.cuda.init()  # implicit for "cuda", but not for "cuda:0"
            torch.cuda.reset_peak_memory_stats(device)
        task = data if isinstance(data, Task) else load(run.task, device, data)
        self.trainer = Trainer(run, task, device, compiled=options.compiled, group=group)
        metadata: dict[str, Any] = self.trainer.resume(folder) if folder is not None else {}
        self.seconds_before: float = metadata.get("seconds", 0.0)
        self.history = MetricHistory(metadata.get("looks", {}))
        self.windows: list[TimedWindow] = []
        """The windows that this process has trained."""
        if options.log is not None:
            # A run without a checkpoint measures again what it has logged at step 0.
            options.log.rewind(self.trainer.step if metadata else -1)
        self.started = self.last_saved = time.perf_counter()

    def steps(self) -> Training:
        """Train to the last step.

        Yields:
            Nothing, each time that a window of steps is enqueued.

        Returns:
            The run's record.

        Raises:
            DivergenceError: If the loss is not finite, or too large to recover.
        """
        stream = SideStream(self.options.device)
        try:
            yield from self._windows(stream)
        finally:
            stream.join()  # also after an error: the next model must not be allocated below kernels in flight
        record = build_record(
            self.trainer,
            seconds=self._seconds(),
            step_ms=1e3 * median([w.step_seconds for w in self.windows] or [0.0]),
            compile_seconds=self._compile_seconds(),
            at_once=self.options.at_once,
            metrics=self.history.metrics,
        )
        if not all(map(isfinite, record.results.values())):
            raise self._with_history(_not_finite(record, self.run), self.run.steps)
        return record

    def _windows(self, stream: SideStream) -> Generator[None, None, None]:
        """Train window by window, each of which ends with a pause."""
        with stream:
            self.history.measure(self.trainer, self.options.log)
        while self.trainer.step < self.run.steps:
            with stream:
                self.trainer.grow_if_due()  # before the snapshot, which has the shapes of the window's steps
                first, started, snapshot = self.trainer.step, time.perf_counter(), self.trainer.snapshot()
                self.trainer.advance(next_pause(self.run, first))
            yield
            with stream:
                self._end_window(first, started, snapshot)
                del snapshot  # as large as the state: the next one must not exist next to it
                self.history.measure(self.trainer, self.options.log)
                self._save_if_due()

    def _end_window(self, first: int, started: float, snapshot: Snapshot) -> None:
        """Wait for a window's steps, check the losses and report them.

        Args:
            first: Step at which the window started.
            started: Time of its start.
            snapshot: State at its start.
        """
        trainer = self.trainer
        tables = (trainer.losses, trainer.errors)
        losses, errors = (trainer.group.all_reduce_mean(t[first : trainer.step]).cpu() for t in tables)
        if not losses.isfinite().all():
            raise self._with_history(diagnose(trainer, snapshot), first)
        loss, error = losses.mean().item(), 100 * errors.mean().item()
        if loss > trainer.task.divergence_threshold:
            raise self._with_history(_too_large(loss, trainer), trainer.step)
        self.windows.append(TimedWindow(trainer.step - first, time.perf_counter() - started))
        self._report(first, loss, error)

    def _with_history(self, error: DivergenceError, steps: int) -> DivergenceError:
        """Add the curve of the run's first steps and its metrics to an error."""
        error.curve, error.metrics = training_curve(self.trainer, steps), self.history.metrics
        return error

    def _report(self, first: int, loss: float, error: float) -> None:
        trainer, options, seconds_per_step = self.trainer, self.options, self.windows[-1].step_seconds
        rate = trainer.batches.size / seconds_per_step
        if options.log is not None:
            norms = trainer.tables.norms[first : trainer.step]
            extra = {"norm": norms.mean().item()} if self.run.clip else {}
            options.log.write(trainer.step, loss=loss, error=error, rate=rate, **extra)
        if options.watch is not None:
            left = (self.run.steps - trainer.step) * seconds_per_step
            options.watch(Progress(trainer.step, self.run.steps, loss, error, rate, left))

    def _save_if_due(self) -> None:
        trainer, now = self.trainer, time.perf_counter()
        if self.folder is None or trainer.step == self.run.steps:
            return
        if trainer.group.any(now - self.last_saved >= self.options.checkpoint_seconds, self.options.device):
            # "looks" is the key of version 0.1, whose checkpoints can be resumed.
            trainer.save(self.folder, seconds=self._seconds(), looks=self.history.metrics)
            self.last_saved = now

    def _compile_seconds(self) -> float | None:
        """By how much the first window exceeds its steps at the median time: compilation, capture and warmup.

        Returns:
            The time, or None if it is unknown: from one window, or if other runs took turns with this one.
        """
        if len(self.windows) < 2 or self.options.at_once > 1:
            return None
        first, usual = self.windows[0], median(w.step_seconds for w in self.windows)
        return max(0.0, first.seconds - first.steps * usual)

    def _seconds(self) -> float:
        """Duration of the run, including the time before it resumed."""
        return self.seconds_before + time.perf_counter() - self.started


def next_pause(run: Run, step: int) -> int:
    """The step at which to pause next. It does not depend on where the run resumed, so that logs do not either."""
    growth = run.grow_at if step < run.grow_at else run.steps
    regular = ((step // every + 1) * every for every in (WINDOW, run.evaluate, run.trace) if every)
    return min(run.steps, growth, *regular)


def _too_large(loss: float, trainer: Trainer) -> DivergenceError:
    return DivergenceError(
        f"the loss is {loss:.3g} at step {trainer.step}, above the divergence threshold of "
        f"{trainer.task.divergence_threshold:.3g}. Try a smaller lr than {trainer.run.lr:g}"
    )


def _not_finite(record: Record, run: Run) -> DivergenceError:
    names = ", ".join(name for name, value in record.results.items() if not isfinite(value))
    return DivergenceError(f"after the last step, {names} is not finite. Try a smaller lr than {run.lr:g}")
