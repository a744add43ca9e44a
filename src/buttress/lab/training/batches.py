"""Training batches: the order of examples, drawing, mixing, prefetching, and this process's shard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buttress.lab.data import Task
from buttress.lab.data.augment import mix
from buttress.lab.runs.config import Run
from buttress.lab.training.distributed import ProcessGroup
from buttress.lab.training.tables import StepTables


class MixedBatch(NamedTuple):
    """Inputs and targets of a step, mixed with a second set of examples where the run uses mixup."""

    inputs: Tensor
    targets: Tensor
    second_targets: Tensor
    """Targets of the examples that were mixed in; those of `targets` without mixup."""
    share: Tensor
    """Weight of `targets`, between 0 and 1; one number for the whole batch."""


class Batches:
    """Draws the batches of a run, in an order that depends on its seed alone.

    Args:
        run: The run.
        task: Its task.
        device: Device of the batches.
        group: The processes that train the run.
        tables: The run's tables, whose cursor is the step to draw the batch for.
    """

    def __init__(self, run: Run, task: Task, device: torch.device, group: ProcessGroup, tables: StepTables) -> None:
        self.run, self.task, self.group, self.tables = run, task, group, tables
        # The model was initialized from the run's seed; the data must not repeat the same random numbers.
        self.generator = torch.Generator(device).manual_seed(run.seed + 1)
        self.per_epoch = max(1, (task.epoch or 0) // run.batch)
        """Batches per epoch."""
        self.size = min(run.batch, task.epoch or run.batch)
        """Examples per step: a batch, or all examples if they are fewer."""
        self.order = torch.zeros(self.per_epoch * self.size, dtype=torch.long, device=device)
        """The current epoch's examples, in order."""
        self._offsets = torch.arange(self.size, device=device)
        self._shares = mixup_shares(run, device)
        self._shuffled_epoch = -1
        self._prefetched_until = 0

    def prepare(self, step: int) -> None:
        """Prepare `draw` for the batch of `step`: shuffle the epoch and prefetch from disk, if needed."""
        self._shuffle(step)
        if self.task.streams and self._prefetched_until <= step:
            self._prefetch(step)

    def draw(self) -> MixedBatch:
        """Draw this process's shard of the current step's batch.

        A batch that is drawn on the device is mixed and then divided into shards, so that a run is the same on any
        number of processes. Of a batch that is read from disk, each process reads its shard alone and mixes within it.
        """
        index = self.order[(self.tables.cursor % self.per_epoch) * self.size + self._offsets]
        if self.task.streams:
            index = index[self.group.shard_slice(len(index))]
        share = self.tables.at_cursor(self._shares) if self.run.mixup else self._shares
        if self.run.mixup_on == "pixels":
            x, y = self.task.draw_mixed(index, self.generator, share)
        else:
            x, y = self.task.draw(index, self.generator)
            x = mix(x, share) if self.run.mixup else x
        second = y.roll(1, 0) if self.run.mixup else y
        if not self.task.streams:
            x, y, second = self.group.shard(x, y, second)
        return MixedBatch(x, y, second, share)

    def peek(self, step: int) -> MixedBatch:
        """Draw the batch of `step`, the current one, without consuming it: the next `draw` returns it again."""
        self._shuffle(step)
        state = self.generator.get_state()
        if self.task.streams:
            self._prefetch(step)
        batch = self.draw()
        self.generator.set_state(state)
        self._prefetched_until = 0
        return batch

    def seek(self, step: int, generator_state: Tensor) -> None:
        """Continue at `step`; `order` must already be the order of its epoch."""
        self.generator.set_state(generator_state.cpu())
        self._shuffled_epoch = (step - 1) // self.per_epoch
        self._prefetched_until = 0

    def _shuffle(self, step: int) -> None:
        """Draw the order of an epoch, once, before its first step."""
        epoch = step // self.per_epoch
        if self.task.epoch and self._shuffled_epoch < epoch:
            permutation = torch.randperm(self.task.epoch, generator=self.generator, device=self.order.device)
            self.order.copy_(permutation[: len(self.order)])
            self._shuffled_epoch = epoch

    def _prefetch(self, step: int) -> None:
        """Prefetch the rest of the epoch, for a task that reads from disk."""
        epoch, first = divmod(step, self.per_epoch)
        batches = enumerate(self.order.view(self.per_epoch, -1)[first:], step)
        # Augmentation is seeded by the step, so that it is the same when a run resumes in the middle of an epoch. A
        # generator, so that a task that does not prefetch need not wait for a list of all examples.
        seeded = (((self.run.seed, number), batch.tolist()) for number, batch in batches)
        self.task.prefetch(seeded, self.group.shard_slice(self.size))
        self._prefetched_until = (epoch + 1) * self.per_epoch


def mixup_shares(run: Run, device: torch.device) -> Tensor:
    """Draw the weight of the original examples in each step's mixture.

    Shape:
        Returns (steps,), or a scalar without mixup.
    """
    if not run.mixup:
        return torch.ones((), device=device)
    shares = np.random.default_rng(run.seed).beta(run.mixup, run.mixup, run.steps)
    return torch.tensor(shares, dtype=torch.float32, device=device)
