"""The one training loop: every task, every model, from where it was to its record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from buttress.lab.data import Task, load
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Held, Record, Store, machine, write_weights
from buttress.lab.training import checkpoints
from buttress.lab.training import metrics as trace
from buttress.lab.training.distributed import Team, assembled
from buttress.lab.training.logs import Log
from buttress.lab.training.trainer import Curve, Diverged, Trainer, side_stream

WINDOW = 100
"""Steps between looks at the table of losses."""
POINTS = 200
"""Points of a recorded curve."""
TAIL = 10
"""Epochs over which the training error is averaged: the last ones, as in the paper."""


PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""FLOP/s of bf16 products that the makers of a card promise: what the use of it is measured against."""


@dataclass(frozen=True)
class Progress:
    """What a caller may show while a run goes on."""

    step: int
    steps: int
    loss: float
    error: float
    examples_per_second: float
    seconds_left: float


Watch = Callable[[Progress], None]


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
    way: str = "ddp",
) -> Record:
    """Train a run to its end and return its record; with a store, go on from where it was and keep the record.

    A run that has a record is not run again. One that was killed continues from its last checkpoint. `data` is the
    folder to look in, or the run's task if it is loaded already; `at_once` says how many runs share the device, for the
    record: the times of such runs are not to be compared. Under torchrun all its processes work on the one run, each
    with the whole model (`way` "ddp") or with a part of each weight ("fsdp"); they must see the same store.
    """
    where = device_of(device)
    with assembled(way, where) as team, team.talking():
        if store is None:
            return _train(run, None, where, data, compiled, watch, log, checkpoint_seconds, at_once, team)
        with store.lock(run) if team.first else nullcontext(True) as mine:
            if not mine:
                raise Held(f"another process is training this run, in {store.place(run)}")
            known = store.get(run)
            team.agree()  # all have looked before one can write
            if known is not None and known.status == "done":
                return known
            try:
                return _train(run, store, where, data, compiled, watch, log, checkpoint_seconds, at_once, team)
            except Diverged as trouble:
                if team.first:
                    store.put(trouble.record(run))
                raise


def _train(
    run: Run,
    store: Store | None,
    where: torch.device,
    data: Path | str | Task | None,
    compiled: bool,
    watch: Watch | None,
    log: Log | None,
    checkpoint_seconds: float,
    at_once: int,
    team: Team,
) -> Record:
    if where.type == "cuda":
        torch.cuda.init()  # which comes by itself for "cuda", but not for "cuda:0"
        torch.cuda.reset_peak_memory_stats(where)
    task = data if isinstance(data, Task) else load(run.task, where, data)
    trainer = Trainer(run, task, where, compiled=compiled, team=team)
    folder = store.place(run) if store is not None else None
    before: dict[str, Any] = trainer.resume(folder) if folder is not None else {}
    spent: float = before.get("seconds", 0.0)
    looks = Looks(before.get("looks", {}))
    if not team.first:
        watch = log = None
    if log is not None:
        log.rewind(trainer.step)
    begin = saved = time.perf_counter()
    paces: list[float] = []
    with side_stream(where):
        looks.take(trainer, log)
        while trainer.step < run.steps:
            state = trainer.copied()
            first, started = trainer.step, time.perf_counter()
            trainer.advance(_pause(run, first))
            losses, errors = (team.mean(t[first : trainer.step]).cpu() for t in (trainer.losses, trainer.errors))
            if not losses.isfinite().all():
                trouble = trainer.blame(state)
                trouble.curve, trouble.looks = _curve(trainer, first), looks.found
                raise trouble
            loss, error = losses.mean().item(), 100 * errors.mean().item()
            if loss > trainer.task.divergence_threshold:
                trouble = Diverged(
                    f"the loss is {loss:.3g} at step {trainer.step}, beyond "
                    f"{trainer.task.divergence_threshold:.3g}, from where training does not come back. "
                    f"Try a smaller lr than {run.lr:g}"
                )
                trouble.curve, trouble.looks = _curve(trainer, trainer.step), looks.found
                raise trouble
            paces.append((time.perf_counter() - started) / (trainer.step - first))
            del state  # or there would be two when the next is made
            rate = trainer.count / paces[-1]
            if log is not None:
                extra = {"norm": trainer.norms[first : trainer.step].mean().item()} if run.clip else {}
                log.write(trainer.step, loss=loss, error=error, rate=rate, **extra)
            if watch is not None:
                left = (run.steps - trainer.step) * paces[-1]
                watch(Progress(trainer.step, run.steps, loss, error, rate, left))
            looks.take(trainer, log)
            now = time.perf_counter()
            late = now - saved >= checkpoint_seconds
            if folder is not None and trainer.step < run.steps and team.any(late, where):
                trainer.save(folder, seconds=spent + now - begin, looks=looks.found)
                saved = now
    record = _record(trainer, spent + time.perf_counter() - begin, 1e3 * median(paces or [0.0]), at_once, looks)
    if store is not None and folder is not None:
        if trainer.task.language:
            # One at a time, and kept by one process alone: all of it may be more than a GPU holds.
            weights = {}
            for name, t in trainer.model.state_dict().items():
                whole = trace.whole(t)
                if team.first:
                    weights[name] = whole.cpu()
            if team.first:
                write_weights(folder / "weights.safetensors", weights)
        if team.first:
            store.put(record)
            checkpoints.clear(folder)
        team.agree()
    return record


def _pause(run: Run, step: int) -> int:
    """The next step to stop at and look. Fixed ones, wherever a run was resumed, so that logs do not depend on that."""
    return min(run.steps, *((step // every + 1) * every for every in (WINDOW, run.evaluate, run.trace) if every))


class Looks:
    """What was seen of a run on the way: by name, pairs of a step and a number."""

    def __init__(self, found: Mapping[str, list[tuple[int, float]]]) -> None:
        self.found = {name: list(pairs) for name, pairs in found.items()}

    def take(self, trainer: Trainer, log: Log | None) -> None:
        """Look, if the run wants that at the step it is at."""
        run, step = trainer.run, trainer.step
        seen: dict[str, float] = {}
        if run.trace and (step % run.trace == 0 or step == run.steps):
            seen = trainer.look()
        kept = trace.summary(seen) if seen else {}
        if run.evaluate and step and (step % run.evaluate == 0 or step == run.steps):
            test_loss, test_error = trainer.test()
            kept |= (tested := {"test_loss": test_loss, "test_error": test_error})
            seen |= tested
        if not kept or any(s == step for s, _ in self.found.get(next(iter(kept)), [])):
            return  # nothing to see, or seen before the run was killed
        for name, value in kept.items():
            self.found.setdefault(name, []).append((step, value))
        if log is not None:
            log.write(step, **seen)


def device_of(name: torch.device | str | None) -> torch.device:
    """A device by its name; by default a GPU where there is one."""
    local = os.environ.get("LOCAL_RANK")  # torchrun tells each process on a machine which of its GPUs to take
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"{name!r} is no device: use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{name!r} was asked for, but torch sees no GPU here")
    return torch.device("cuda", int(local)) if device == torch.device("cuda") and local else device


def _record(trainer: Trainer, seconds: float, step_ms: float, at_once: int, looks: Looks) -> Record:
    run = trainer.run
    losses, errors = trainer.losses.cpu(), 100 * trainer.errors.cpu()
    tail = max(1, min(TAIL * trainer.per_epoch, run.steps // 5))
    test_loss, test_error = trainer.test()
    results = {
        "train_error": errors[-tail:].mean().item(),
        "train_loss": losses[-tail:].mean().item(),
        "test_error": test_error,
        "test_loss": test_loss,
        "seconds": seconds,
        "step_ms": step_ms,
        "examples_per_second": run.steps * trainer.count / max(seconds, 1e-9),
    }
    if trainer.task.epoch:
        results["examples"] = trainer.task.epoch
    if trainer.task.language:
        results["head_macs"] = trainer.head_macs
        results["tokens_per_second"] = trainer.count * run.context / max(step_ms / 1e3, 1e-9)
    if trainer.device.type == "cuda":
        results["peak_gib"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30
        name = torch.cuda.get_device_name(trainer.device)
        peak = next((p for card, p in PEAKS.items() if card in name), None)
        if peak and run.precision == "bfloat16":
            flops = 6 * trainer.macs * trainer.count / max(step_ms / 1e3, 1e-9)
            results["mfu"] = flops / (peak * trainer.team.size)
    if run.probe:
        results["feature_update"] = trainer.changes.mean().item()
    made_on = machine(trainer.device) | {"at_once": str(at_once), "compiled": "yes" if trainer.compiled else "no"}
    if trainer.team.size > 1:
        made_on |= {"processes": f"{trainer.team.size}, {trainer.team.way}"}
    if trainer.task.fingerprint:
        made_on |= {"data": trainer.task.fingerprint}
    return Record(
        run, "done", results, trainer.params, trainer.macs, _curve(trainer, run.steps), "", made_on, looks.found
    )


def _curve(trainer: Trainer, steps: int) -> Curve:
    """Loss and error of the first steps, averaged over stretches."""
    losses, errors = trainer.losses[:steps].cpu(), 100 * trainer.errors[:steps].cpu()
    edges = sorted({round(i * steps / POINTS) for i in range(1, POINTS + 1)} - {0})
    return tuple(
        (end, round(losses[start:end].mean().item(), 4), round(errors[start:end].mean().item(), 3))
        for start, end in zip([0, *edges][:-1], edges, strict=True)
    )
