"""One training step: draws a batch, computes gradients, updates the weights, and writes its results to tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import graphed
from buttress.lab.data import Task
from buttress.lab.runs.config import Run
from buttress.lab.training.batches import Batches, MixedBatch
from buttress.lab.training.distributed import ProcessGroup
from buttress.lab.training.metrics import full_tensor
from buttress.lab.training.precision import autocast, matmul_precision
from buttress.lab.training.probe import FeatureProbe
from buttress.lab.training.rates import LearningRates
from buttress.lab.training.tables import StepTables


class TrainingLoss:
    """The loss that a run minimizes, and its training error.

    Args:
        run: The run.
        task: Its task.
        forward: The model, wrapped and compiled as it is trained.
        device: Device of the model.
    """

    def __init__(self, run: Run, task: Task, forward: Callable[..., Any], device: torch.device) -> None:
        self.run, self.task, self.forward, self.device = run, task, forward, device
        self.one_hot = torch.eye(task.classes, device=device) if run.mixup else None

    def __call__(self, batch: MixedBatch) -> tuple[Tensor, Tensor]:
        """Loss, and fraction of wrong predictions.

        With mixup the error is defined as in the paper: of the two sets of targets, the one with fewer errors counts.
        """
        x, y, second, share = batch
        with autocast(self.run, self.device):
            if self.task.language:
                loss, error = self.forward(x, y)
                return loss, error
            logits = self.forward(x).float()
        guess = logits.detach().argmax(1)
        right = (guess == y).float().mean()
        if self.one_hot is None:
            return F.cross_entropy(logits, y, label_smoothing=self.run.smoothing), 1 - right
        # The loss is linear in the targets, so the mixture of two losses is the loss of the mixed targets.
        mixed = torch.lerp(self.one_hot[second], self.one_hot[y], share)
        right = torch.maximum(right, (guess == second).float().mean())
        return F.cross_entropy(logits, mixed, label_smoothing=self.run.smoothing), 1 - right


@dataclass(frozen=True)
class TrainingStep:
    """One step of training, as a function without arguments that only enqueues work on the device.

    Everything that differs between steps is in tensors on the device, so that a CUDA graph can replay it.
    """

    run: Run
    model: nn.Module
    loss: TrainingLoss
    optimizer: torch.optim.Optimizer
    rates: LearningRates
    batches: Batches
    tables: StepTables
    group: ProcessGroup
    probe: FeatureProbe | None
    replayed: bool
    """Whether the step is captured in a CUDA graph."""

    def __call__(self) -> None:
        with matmul_precision(self.run), graphed() if self.replayed else nullcontext():
            self._update()

    def _update(self) -> None:
        tables = self.tables
        self.rates.update(tables)
        loss, error = self._backward()
        if self.run.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            tables.write(tables.norms, full_tensor(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.probe is not None:
            tables.write(tables.changes, self.probe.change())
        tables.write(tables.losses, loss)
        tables.write(tables.errors, error)
        tables.advance()

    def _backward(self) -> tuple[Tensor, Tensor]:
        """Loss and error of this process's shard of the batch; gradients are accumulated over its microbatches."""
        batch = self.batches.draw()
        count = self.run.accumulate
        losses, errors = [], []
        for i, (x, y, second) in enumerate(zip(*(t.chunk(count) for t in batch[:3]), strict=True)):
            with self.group.no_sync(self.loss.forward, i < count - 1):
                loss, error = self.loss(MixedBatch(x, y, second, batch.share))
                (loss if count == 1 else loss / count).backward()
            losses.append(loss.detach())
            errors.append(error.detach())
        return (losses[0], errors[0]) if count == 1 else (torch.stack(losses).mean(), torch.stack(errors).mean())
