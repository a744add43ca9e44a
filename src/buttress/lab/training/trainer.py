"""A run in the making: one step after the other, on a CPU or replayed from one CUDA graph, and its checkpoints.

A step draws its examples, augments them, and updates the weights on the device; losses and errors are written
into a table there, so that the host neither waits nor copies. All that a step depends on is in tensors that a
checkpoint holds, so a run that was killed goes on where it was, to the same bits on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ButtressError, cost, graphed
from buttress.lab.data import Task
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record
from buttress.lab.training import checkpoints
from buttress.lab.training import metrics as trace
from buttress.lab.training.building import compiled_, groups_of, model_of
from buttress.lab.training.distributed import ALONE, Team

PROBED = 8
"""Sequences, or PROBED * 128 other examples, on which the sizes of activations are looked at."""
WARM = 3
"""Steps before a graph is captured: allocations and autotuning happen in them."""

Curve = tuple[tuple[int, float, float], ...]
"""(step, loss, error in percent), averaged over stretches of a run."""


class Diverged(ButtressError, ArithmeticError):
    """A loss that is no number, or beyond hope, with the step and the layer where that began."""

    curve: Curve = ()
    """Of the steps that went before."""
    looks: Mapping[str, list[tuple[int, float]]] = MappingProxyType({})
    """What was seen on the way."""

    def record(self, run: Run) -> Record:
        error = f"{type(self).__name__}: {self}"
        return Record(run, "failed", curve=self.curve, error=error, looks=dict(self.looks))

    @classmethod
    def ended(cls, record: Record) -> bool:
        """Whether it is this that a record tells of."""
        return record.error.startswith(f"{cls.__name__}: ")


class Trainer:
    """A run in the making: model, optimizer, data and where they have got to."""

    def __init__(
        self, run: Run, task: Task, device: torch.device, *, compiled: bool = False, team: Team = ALONE
    ) -> None:
        self.run, self.task, self.device, self.team, self.compiled = run, task.at(run), device, team, compiled
        task = self.task
        _check(run, task, team)
        self.model = model_of(run, task, device)
        self.params = sum(p.numel() for p in self.model.parameters())
        self.macs = cost(self.model, task.example(device)).macs
        self.head_macs = 0
        """Of one sequence of text."""
        if task.language:
            alone = torch.zeros(run.context, run.width, device=device)
            self.head_macs = cost(self.model.get_submodule("head"), alone).macs
        self.forward: Callable[..., Any] = team.wrap(self.model, device)
        if compiled:
            self.forward = compiled_(self.model, self.forward)
        self.optimizer = _optimizer(run, self.model, task, device)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.full = torch.tensor(self.rates, device=device)
        self.now = self.full.clone()
        self._tie()
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
        self.norms = torch.zeros(run.steps, device=device)
        self.schedule = _schedule(run, device)
        self.shares = _shares(run, device)
        self.certain = torch.eye(task.classes, device=device) if run.mixup else None
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
            self.probe = Probe(self.model, task, device, team) if run.probe else None

    @property
    def count(self) -> int:
        """Examples of a step: a batch, or all there are where that is less."""
        return len(self.places)

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
        """Whether steps are replayed from a CUDA graph; torch's SGD, what comes from disk and teams cannot be."""
        alone = self.team.size == 1 and not self.team.way
        return self.device.type == "cuda" and self.run.optimizer != "sgd" and not self.task.streams and alone

    def _tie(self) -> None:
        """Let the groups' rates be places of one tensor on the device: a graph replays their change."""
        if self.replays:
            for i, group in enumerate(self.optimizer.param_groups):
                group["lr"] = self.now[i]

    def _feed(self) -> None:
        """Tell a task that reads from disk what is wanted for the rest of the epoch."""
        epoch, first = divmod(self.step, self.per_epoch)
        batches = enumerate(self.order.view(self.per_epoch, -1)[first:], self.step)
        # A batch's chances depend on its step alone, so they are the same when a run goes on in the middle. One at a
        # time: a task that need not know is not made to wait for a list of all examples.
        wanted = (((self.run.seed, step), batch.tolist()) for step, batch in batches)
        self.task.prefetch(wanted, self.team.mine(self.count))
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
        """Inputs, targets, the targets of what was mixed in, and the first ones' share: this process's part of a step.

        What lies on the device is drawn and mixed whole and then shared out, so that a run is the same on any number of
        processes; what is read from disk is read by one process alone, and mixed with its own neighbours.
        """
        index = self.order[(self.cursor % self.per_epoch) * len(self.places) + self.places]
        if self.task.streams:
            index = index[self.team.mine(len(index))]
        x, y = self.task.draw(index, self.generator)
        other, share = y, self.shares
        if self.run.mixup:
            share = self._now(self.shares)
            x, other = torch.lerp(x.roll(1, 0), x, share), y.roll(1, 0)
        if not self.task.streams:
            x, y, other = self.team.part(x, y, other)
        return x, y, other, share

    def loss(self, x: Tensor, y: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The training loss, and the error as the paper counts it: of the better of the two sets of targets."""
        with self._autocast():
            if self.task.language:
                loss, error = self.forward(x, y)
                return loss, error
            logits = self.forward(x).float()
        guess = logits.detach().argmax(1)
        right = (guess == y).float().mean()
        if self.certain is None:
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
        loss, error = self._gradients()
        if self.run.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            self.norms.index_copy_(0, self.cursor.view(1), trace.whole(norm).view(1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        at = self.cursor.view(1)
        if self.probe is not None:
            self.changes.index_copy_(0, at, self.probe.change().view(1))
        self.losses.index_copy_(0, at, loss.view(1))
        self.errors.index_copy_(0, at, error.view(1))
        self.cursor += 1

    def _gradients(self) -> tuple[Tensor, Tensor]:
        """Loss and error of this process's part of the batch, piece by piece, with the gradients left in place."""
        x, y, other, share = self.batch()
        count = self.run.accumulate
        pieces = zip(*(t.chunk(count) for t in (x, y, other)), strict=True)
        losses, errors = [], []
        for i, (x, y, other) in enumerate(pieces):
            with self.team.waiting(self.forward, i < count - 1):
                loss, error = self.loss(x, y, other, share)
                (loss if count == 1 else loss / count).backward()
            losses.append(loss.detach())
            errors.append(error.detach())
        return (losses[0], errors[0]) if count == 1 else (torch.stack(losses).mean(), torch.stack(errors).mean())

    def test(self) -> tuple[float, float]:
        """Loss and error in percent on the test set, as it is."""
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        size = self.run.batch // self.run.accumulate if self.task.language else max(self.run.batch, 1000)
        eager = torch.compiler.set_stance("force_eager")
        with _matmuls(self.run), self._autocast(), eager, self.team.evaluating(self.model):
            for batch in self.task.test(size):
                x, y = self.team.part(*batch)
                if self.task.language:
                    loss, wrong = (mean * y.numel() for mean in self.model(x, y))
                else:
                    logits = self.model(x).float()
                    loss = F.cross_entropy(logits, y, label_smoothing=self.run.smoothing, reduction="sum")
                    wrong = (logits.argmax(1) != y).sum()
                if y.numel():
                    totals += torch.stack((loss.double(), wrong.double(), wrong.new_tensor(y.numel()).double()))
        self.model.train()
        losses, errors, count = self.team.sum(totals).tolist()
        return losses / count, 100 * errors / count

    def look(self) -> dict[str, float]:
        """Sizes of activations, factors and gradients on a few examples of the test set."""
        # The same ones in every process, so that what is seen does not depend on their number.
        x, y = next(self.task.test(PROBED * (1 if self.task.language else 128)))

        def loss() -> Tensor:
            with self._autocast():
                if self.task.language:
                    made: Tensor = self.model(x, y)[0]
                    return made
                return F.cross_entropy(self.model(x).float(), y)

        with _matmuls(self.run), torch.compiler.set_stance("force_eager"):
            return trace.look(self.model, loss)

    def tensors(self) -> dict[str, Tensor]:
        """All that the rest of the run depends on, but for the generator: the tensors themselves, by name."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        made = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for p, slots in self.optimizer.state.items():
            made |= {f"optimizer.{names[p]}.{slot}": t for slot, t in slots.items()}
        own = {"order": self.order, "losses": self.losses, "errors": self.errors, "norms": self.norms}
        return made | own | {"changes": self.changes}

    def copied(self) -> tuple[int, dict[str, Tensor], Tensor]:
        """A state that further steps do not change, to `go_back` to."""
        return self.step, {name: t.clone() for name, t in self.tensors().items()}, self.generator.get_state()

    def go_back(self, state: tuple[int, dict[str, Tensor], Tensor]) -> None:
        step, kept, generator = state
        self._settle()
        for name, t in self.tensors().items():
            # What the optimizer had not made yet was zero.
            t.copy_(kept[name]) if name in kept else t.zero_()
        self._at(step, generator)

    def save(self, folder: Path, **facts: Any) -> None:
        """Write a checkpoint."""
        about = {
            "run": self.run.to_json(),
            "device": self.device.type,
            "step": self.step,
            "data": self.task.fingerprint,
        }
        tensors = self.tensors() | {"generator": self.generator.get_state()}
        checkpoints.save(folder, self.step, tensors, about | facts, self.team)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Take up the last checkpoint, if there is one, and return what was saved with it."""
        path = checkpoints.latest(folder)
        if path is None:
            return {}
        facts = checkpoints.facts_of(path)
        if facts["run"] != self.run.to_json():
            raise ButtressError(f"{path} belongs to another run: {facts['run']}")
        if facts["device"] != self.device.type:
            raise ButtressError(
                f"this run was begun on {facts['device']} and cannot go on on {self.device.type}: use the same kind of "
                "device, or remove the run's folder to begin anew"
            )
        if facts["data"] != self.task.fingerprint:
            raise ButtressError(
                f"this run was begun on other data ({facts['data']}, now {self.task.fingerprint}): give that, or "
                f"remove {folder} to begin anew"
            )
        self._settle()
        generator = self.generator.get_state()
        checkpoints.load(path, self.tensors() | {"generator": generator})
        self._at(facts["step"], generator)
        return facts

    def _settle(self) -> None:
        """Let the optimizer make its state: a step of length zero changes nothing else."""
        if self.optimizer.state:
            return
        groups = self.optimizer.param_groups
        kept = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, lr in zip(groups, kept, strict=True):
            group["lr"] = lr

    def _at(self, step: int, generator: Tensor) -> None:
        """Everything that follows from the step. A graph is captured anew."""
        self.step = step
        self.generator.set_state(generator.cpu())
        self.cursor.fill_(step)
        self.shuffled = (step - 1) // self.per_epoch
        self.fed = 0
        if self.probe is not None:
            with _matmuls(self.run):
                self.probe.change()
        self.graph = None
        self.eager = 0

    def blame(self, state: tuple[int, dict[str, Tensor], Tensor]) -> Diverged:
        """Repeat the steps since `state`, to find the first layer whose output is no number."""
        end = self.step
        self.go_back(state)
        advice = f"Try a smaller lr than {self.run.lr:g}"
        with torch.compiler.set_stance("force_eager"):
            while self.step < end:
                found = self._look()
                # All processes must stop at the same step, whichever of them saw it.
                if self.team.sum(torch.tensor(float(bool(found)), device=self.device)):
                    found = found or "another process saw the first output that is not finite"
                    return Diverged(f"the loss is no number at step {self.step}: {found}. {advice}")
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
        with _matmuls(self.run), self.team.evaluating(self.model):
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

    def __init__(self, model: nn.Module, task: Task, device: torch.device, team: Team) -> None:
        self.model, self.team = model, team
        self.x = next(task.test(self.COUNT))[0]
        self.made = torch.zeros((), device=device)
        model.get_submodule("blocks").register_forward_hook(self._keep)
        self.before = self._features().clone()

    def _keep(self, module: nn.Module, given: object, made: Tensor) -> None:
        self.made = made.detach()

    def _features(self) -> Tensor:
        with self.team.evaluating(self.model):
            self.model(self.x)
        return self.made.flatten(1).float()

    def change(self) -> Tensor:
        """Mean over the batch of the distance from the features before, over the square root of their number."""
        now = self._features()
        moved = (now - self.before).square().mean(1).sqrt().mean()
        self.before.copy_(now)
        return moved


def _check(run: Run, task: Task, team: Team) -> None:
    """Refuse what a run cannot be."""
    if task.language and (run.model != "gpt" or run.smoothing or run.mixup or run.probe):
        raise ConfigError(
            f"text is read by model=gpt, without smoothing, mixup and probe, but this run has model={run.model}, "
            f"smoothing={run.smoothing:g}, mixup={run.mixup:g}, probe={run.probe}"
        )
    batch = min(run.batch, task.epoch or run.batch)
    if batch % (team.size * run.accumulate):
        fewer = "" if batch == run.batch else f", which is all there is of {task.name},"
        raise ConfigError(
            f"a batch of {batch}{fewer} does not divide among {team.size} processes in {run.accumulate} pieces each: "
            "choose a batch that is a multiple of both"
        )


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
    factor = run.final + (1 - run.final) * factor
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


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """The default stream of a GPU cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
