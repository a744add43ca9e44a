"""The one training loop: every task, every model, on a CPU or replayed from one CUDA graph.

A step draws its examples, augments them, and updates the weights on the device; losses and errors are written
into a table there, so that the host neither waits nor copies. All that a step depends on is in tensors that a
checkpoint holds, so a run that was killed goes on where it was, to the same bits on a CPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ButtressError, cost, graphed
from buttress.lab.build import groups_of, model_of
from buttress.lab.config import ConfigError, Run
from buttress.lab.data import Task, load
from buttress.lab.logs import Log
from buttress.lab.records import Record, Store, machine

WINDOW = 100
"""Steps between looks at the table of losses."""
POINTS = 200
"""Points of a recorded curve."""
TAIL = 10
"""Epochs over which the training error is averaged: the last ones, as in the paper."""


class Diverged(ButtressError, ArithmeticError):
    """A loss that is no number, with the step and the layer where that began."""


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


class Trainer:
    """A run in the making: model, optimizer, data and where they have got to."""

    def __init__(self, run: Run, task: Task, device: torch.device, *, compiled: bool = False) -> None:
        self.run, self.task, self.device = run, task, device
        self.model = model_of(run, task, device)
        self.params = sum(p.numel() for p in self.model.parameters())
        self.macs = cost(self.model, torch.zeros(1, *task.shape, device=device)).macs
        self.optimizer = _optimizer(run, self.model, task, device)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.full = torch.tensor(self.rates, device=device)
        self.now = self.full.clone()
        self._tie()
        self.forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        # Initialisation came from the run's seed; data must not repeat its numbers.
        self.generator = torch.Generator(device).manual_seed(run.seed + 1)
        self.per_epoch = max(1, (task.epoch or 0) // run.batch)
        self.order = torch.zeros(
            self.per_epoch * min(run.batch, task.epoch or run.batch), dtype=torch.long, device=device
        )
        self.step = 0
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.losses = torch.zeros(run.steps, device=device)
        self.errors = torch.zeros(run.steps, device=device)
        self.schedule = _schedule(run, device)
        self.shares = _shares(run, device)
        self.certain = torch.eye(task.classes, device=device)
        self.places = torch.arange(min(run.batch, len(self.order)), device=device)
        self.shuffled = -1
        """The epoch whose order was drawn."""
        self.fed = 0
        """The step up to which a task that reads from disk knows what is wanted."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0
        """Steps since the last time that there was no graph: kernels are compiled in them, which a capture forbids."""
        self.changes = torch.zeros(run.steps, device=device)
        with _matmuls(run):
            self.probe = Probe(self.model, task, device) if run.probe else None

    def advance(self, until: int) -> None:
        """Train up to, but not including, step `until`."""
        while self.step < until:
            self._shuffle()
            if self.task.streams and self.fed <= self.step:
                self._feed()
            self._once()
            self.step += 1

    def _shuffle(self) -> None:
        """Draw the epoch's order, once, when its first step comes up."""
        epoch = self.step // self.per_epoch
        if self.task.epoch and self.shuffled < epoch:
            whole = torch.randperm(self.task.epoch, generator=self.generator, device=self.device)
            self.order.copy_(whole[: len(self.order)])
            self.shuffled = epoch

    @property
    def replays(self) -> bool:
        """Whether steps are replayed from a CUDA graph; torch's SGD and what comes from disk cannot be."""
        return self.device.type == "cuda" and self.run.optimizer != "sgd" and not self.task.streams

    def _tie(self) -> None:
        """Let the groups' rates be places of one tensor on the device: a graph replays their change."""
        if self.replays:
            for i, group in enumerate(self.optimizer.param_groups):
                group["lr"] = self.now[i]

    def _feed(self) -> None:
        """Tell a task that reads from disk what is wanted for the rest of the epoch."""
        epoch, first = divmod(self.step, self.per_epoch)
        batches = self.order.view(self.per_epoch, -1)[first:].tolist()
        # A batch's chances depend on its step alone, so they are the same when a run goes on in the middle.
        self.task.follow([((self.run.seed, self.step + i), batch) for i, batch in enumerate(batches)])
        self.fed = (epoch + 1) * self.per_epoch

    def _once(self) -> None:
        if not self.replays:
            self._update()
        elif self.graph is not None:
            self.graph.replay()
        elif self.eager < WARM:
            self._update()
            self.eager += 1
        else:
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
                self._update()
            self.graph = graph
            graph.replay()

    def _now(self, table: Tensor) -> Tensor:
        """This step's entry. Not table[cursor], which would ask the device for a number."""
        return table.index_select(0, self.cursor.view(1)).squeeze(0)

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, targets, the targets of what was mixed in, and the first ones' share, at this step."""
        index = self.order[(self.cursor % self.per_epoch) * len(self.places) + self.places]
        x, y = self.task.draw(index, self.generator)
        if not self.run.mixup:
            return x, y, y, self.shares
        share = self._now(self.shares)
        return torch.lerp(x.roll(1, 0), x, share), y, y.roll(1, 0), share

    def loss(self, x: Tensor, y: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The training loss, and the error as the paper counts it: of the better of the two sets of targets."""
        with self._autocast():
            logits = self.forward(x).float()
        guess = logits.detach().argmax(1)
        right = (guess == y).float().mean()
        if not self.run.mixup:
            return F.cross_entropy(logits, y, label_smoothing=self.run.smoothing), 1 - right
        # The loss is linear in the targets, so the mixture of two losses is the loss of the mixed targets.
        mixed = torch.lerp(self.certain[other], self.certain[y], share)
        right = torch.maximum(right, (guess == other).float().mean())
        return F.cross_entropy(logits, mixed, label_smoothing=self.run.smoothing), 1 - right

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision == "bfloat16")

    def _update(self) -> None:
        with _matmuls(self.run), graphed() if self.replays else nullcontext():
            self._update_now()

    def _update_now(self) -> None:
        factor = self._now(self.schedule)
        if self.replays:
            torch.mul(self.full, factor, out=self.now)
        else:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor.item()
        loss, error = self.loss(*self.batch())
        loss.backward()
        if self.run.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        at = self.cursor.view(1)
        if self.probe is not None:
            self.changes.index_copy_(0, at, self.probe.change().view(1))
        self.losses.index_copy_(0, at, loss.detach().view(1))
        self.errors.index_copy_(0, at, error.view(1))
        self.cursor += 1

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Loss and error in percent on the test set, as it is."""
        self.model.eval()
        losses, wrong, count = 0.0, 0, 0
        with _matmuls(self.run), self._autocast():
            for x, y in self.task.test(max(self.run.batch, 1000)):
                logits = self.model(x).float()
                losses += F.cross_entropy(logits, y, label_smoothing=self.run.smoothing, reduction="sum").item()
                wrong += int((logits.argmax(1) != y).sum())
                count += len(y)
        self.model.train()
        return losses / count, 100 * wrong / count

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        return {
            "run": self.run.to_json(),
            "device": self.device.type,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "order": self.order,
            "losses": self.losses,
            "errors": self.errors,
            "changes": self.changes,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state. A graph is captured anew, because the optimizer's tensors are new ones."""
        if state["device"] != self.device.type:
            raise ButtressError(
                f"this run was begun on {state['device']} and cannot go on on {self.device.type}: use the same kind of "
                "device, or remove the run's folder to begin anew"
            )
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._tie()
        self.generator.set_state(state["generator"].cpu())
        for name in ("order", "losses", "errors", "changes"):
            getattr(self, name).copy_(state[name])
        self.cursor.fill_(self.step)
        self.shuffled = (self.step - 1) // self.per_epoch
        self.fed = 0
        if self.probe is not None:
            with _matmuls(self.run):
                self.probe.change()
        self.graph = None
        self.eager = 0

    def blame(self, state: dict[str, Any]) -> Diverged:
        """Repeat the steps since `state`, to find the first layer whose output is no number."""
        self.restore(state)
        self.forward = self.model
        while self.step < self.run.steps:
            found = self._look()
            if found:
                return Diverged(
                    f"the loss is no number at step {self.step}: {found}. Try a smaller lr than {self.run.lr:g}"
                )
            self.advance(self.step + 1)
        return Diverged(f"the loss was no number before step {self.step}, but is one when the steps are repeated")

    def _look(self) -> str:
        """The first layer whose output is not finite on the batch to come, if any."""
        self._shuffle()
        kept = self.generator.get_state()
        wrong: list[str] = []

        def hook(name: str) -> Callable[..., None]:
            def check(module: nn.Module, given: Any, made: Any) -> None:
                if not wrong and isinstance(made, Tensor) and not made.isfinite().all():
                    wrong.append(name)

            return check

        if self.task.streams:
            self._feed()
        leaves = [(n, m) for n, m in self.model.named_modules() if not any(m.children())]
        handles = [m.register_forward_hook(hook(n)) for n, m in leaves]
        with torch.no_grad():
            loss, _ = self.loss(*self.batch())
        for handle in handles:
            handle.remove()
        self.generator.set_state(kept)
        self.fed = 0  # the batch was taken to look at it, and is wanted again
        if wrong:
            return f"the first output that is not finite is that of {wrong[0]}"
        return "" if loss.isfinite() else "every layer's output is finite, but not the loss of the logits"


class Probe:
    """A fixed batch of test examples, and what the last block made of it before the last step."""

    COUNT = 1024

    def __init__(self, model: nn.Module, task: Task, device: torch.device) -> None:
        self.model = model
        self.x = next(task.test(self.COUNT))[0]
        self.made = torch.zeros((), device=device)
        model.get_submodule("blocks").register_forward_hook(self._keep)
        self.before = self._features().clone()

    def _keep(self, module: nn.Module, given: object, made: Tensor) -> None:
        self.made = made.detach()

    @torch.no_grad()
    def _features(self) -> Tensor:
        self.model(self.x)
        return self.made.flatten(1).float()

    def change(self) -> Tensor:
        """Mean over the batch of the distance from the features before, over the square root of their number."""
        now = self._features()
        moved = (now - self.before).square().mean(1).sqrt().mean()
        self.before.copy_(now)
        return moved


WARM = 3
"""Steps before a graph is captured: allocations and autotuning happen in them."""


def _optimizer(run: Run, model: nn.Module, task: Task, device: torch.device) -> torch.optim.Optimizer:
    groups = groups_of(run, model, task)
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups)
    kind = torch.optim.AdamW if run.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, betas=(0.9, run.beta2), fused=True, capturable=device.type == "cuda")


def _schedule(run: Run, device: torch.device) -> Tensor:
    """The factor of the learning rate at each step."""
    steps = torch.arange(run.steps, dtype=torch.float64)
    done = (steps - run.warmup).clamp(min=0) / max(1, run.steps - run.warmup)
    factor = 0.5 * (1 + torch.cos(math.pi * done)) if run.schedule == "cosine" else torch.ones_like(steps)
    if run.warmup:
        factor *= ((steps + 1) / run.warmup).clamp(max=1)
    return factor.float().to(device)


def _shares(run: Run, device: torch.device) -> Tensor:
    """The part of its own image in each step's mixture; one number for a whole batch."""
    if not run.mixup:
        return torch.ones((), device=device)
    drawn = np.random.default_rng(run.seed).beta(run.mixup, run.mixup, run.steps)
    return torch.tensor(drawn, dtype=torch.float32, device=device)


@contextmanager
def _matmuls(run: Run) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the run says so, backward too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if run.precision == "float32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
) -> Record:
    """Train a run to its end and return its record; with a store, go on from where it was and keep the record.

    A run that has a record is not run again. One that was killed continues from its last checkpoint. `data` is the
    folder to look in, or the run's task if it is loaded already; `at_once` says how many runs share the device, for the
    record: the times of such runs are not to be compared.
    """
    if store is None:
        return _train(run, None, device_of(device), data, compiled, watch, log, checkpoint_seconds, at_once)
    with store.lock(run) as mine:
        if not mine:
            raise ButtressError(f"another process is training this run, in {store.place(run)}")
        if (known := store.get(run)) is not None and known.status == "done":
            return known
        return _train(run, store, device_of(device), data, compiled, watch, log, checkpoint_seconds, at_once)


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
) -> Record:
    task = data if isinstance(data, Task) else load(run.task, where, data)
    trainer = Trainer(run, task, where, compiled=compiled)
    path = store.place(run) / "checkpoint.pt" if store is not None else None
    spent = _resume(trainer, path)
    if log is not None:
        log.rewind(trainer.step)
    begin = saved = time.perf_counter()
    paces: list[float] = []
    with _side_stream(where):
        while trainer.step < run.steps:
            before = _copied(trainer.state())
            first, started = trainer.step, time.perf_counter()
            # Windows end at fixed steps, wherever a run was resumed, so that logs do not depend on that.
            trainer.advance(min(run.steps, (first // WINDOW + 1) * WINDOW))
            losses, errors = (t[first : trainer.step].cpu() for t in (trainer.losses, trainer.errors))
            if not losses.isfinite().all():
                raise trainer.blame(before)
            paces.append((time.perf_counter() - started) / (trainer.step - first))
            rate = len(trainer.places) / paces[-1]
            if log is not None:
                log.write(trainer.step, loss=losses.mean().item(), error=100 * errors.mean().item(), rate=rate)
            if watch is not None:
                left = (run.steps - trainer.step) * paces[-1]
                watch(Progress(trainer.step, run.steps, losses.mean().item(), 100 * errors.mean().item(), rate, left))
            now = time.perf_counter()
            if path is not None and trainer.step < run.steps and now - saved >= checkpoint_seconds:
                _save(path, trainer.state() | {"seconds": spent + now - begin})
                saved = now
    record = _record(trainer, spent + time.perf_counter() - begin, 1e3 * median(paces or [0.0]), at_once)
    if store is not None and path is not None:
        store.put(record)
        path.unlink(missing_ok=True)
    return record


def device_of(name: torch.device | str | None) -> torch.device:
    """A device by its name; by default a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is no device: use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{name!r} was asked for, but torch sees no GPU here")
    return device


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """The default stream of a GPU cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state that further steps do not change."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_copied(v) for v in state]
    return state


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    torch.save(state, part)
    part.replace(path)


def _resume(trainer: Trainer, path: Path | None) -> float:
    """Take up a checkpoint if there is one; seconds spent before it."""
    if path is None or not path.is_file():
        return 0.0
    try:
        state = torch.load(path, map_location=trainer.device, weights_only=True)
    except Exception as error:
        raise ButtressError(f"{path} cannot be read ({error}): remove it to begin this run anew") from error
    if state["run"] != trainer.run.to_json():
        raise ButtressError(f"{path} belongs to another run: {state['run']}")
    trainer.restore(state)
    return float(state["seconds"])


def _record(trainer: Trainer, seconds: float, step_ms: float, at_once: int) -> Record:
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
        "examples_per_second": run.steps * len(trainer.places) / max(seconds, 1e-9),
    }
    if trainer.task.epoch:
        results["examples"] = trainer.task.epoch
    if run.probe:
        results["feature_update"] = trainer.changes.mean().item()
    made_on = machine(trainer.device) | {"at_once": str(at_once)}
    edges = sorted({round(i * run.steps / POINTS) for i in range(1, POINTS + 1)} - {0})
    starts = [0, *edges[:-1]]
    curve = tuple(
        (end, round(losses[start:end].mean().item(), 4), round(errors[start:end].mean().item(), 3))
        for start, end in zip(starts, edges, strict=True)
    )
    return Record(run, "done", results, trainer.params, trainer.macs, curve, "", made_on)
