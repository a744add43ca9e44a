"""A run in training: its model, optimizer and data, advanced step by step, and its checkpoints.

A step draws its examples, augments them and updates the weights on the device. On a GPU it is replayed from one CUDA
graph. Everything that a step depends on is in tensors that a checkpoint holds, so a killed run resumes where it
stopped, bit-identically on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buttress import cost, grow_
from buttress.lab.data import Task
from buttress.lab.runs.config import AUGMENTATION_FIELDS, ConfigError, Run
from buttress.lab.training import checkpoints
from buttress.lab.training.batches import Batches
from buttress.lab.training.building import build_model, build_optimizer, compile_model
from buttress.lab.training.distributed import SINGLE_PROCESS, ProcessGroup
from buttress.lab.training.evaluation import Evaluator
from buttress.lab.training.graph import GraphReplay
from buttress.lab.training.precision import matmul_precision
from buttress.lab.training.probe import FeatureProbe
from buttress.lab.training.rates import LearningRates, schedule_factors
from buttress.lab.training.state import Snapshot, TrainingState, check_metadata, checkpoint_metadata
from buttress.lab.training.step import TrainingLoss, TrainingStep
from buttress.lab.training.tables import StepTables

GROWTH_SEED = 1 << 32
"""Added to a run's seed for the entries that are new when it grows, so that they differ from the initial ones."""


class Trainer:
    """A run in training, at some step.

    Args:
        run: The run.
        task: Its task.
        device: Device to train on.
        compiled: Whether to compile the model and the task's augmentation.
        group: The processes that train the run.

    Raises:
        ConfigError: If the run does not fit its task or the number of processes.

    Example:
        >>> trainer = Trainer(run, load("digits"), torch.device("cpu"))
        >>> trainer.advance(100)
        >>> trainer.losses[:100]
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        device: torch.device,
        *,
        compiled: bool = False,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        if compiled:
            task.compile()
        self.run, self.task, self.device, self.group, self.compiled = run, task.at(run), device, group, compiled
        check_run(run, self.task, group)
        self.step = 0
        """Steps trained."""
        self.model = build_model(run, self.task, device)
        if run.grow_to:
            grow_(self.model, run.grow_to, dry_run=True)  # what cannot grow is refused now, not after half of the steps
        self.grown = False
        """Whether the model has grown to the run's `grow_to`."""
        self.params, self.macs, self.head_macs = self._count()
        self.start_macs = self.macs
        forward: Callable[..., Any] = group.wrap(self.model, device)
        if compiled:
            forward = compile_model(self.model, forward)
        self.optimizer = build_optimizer(run, self.model, self.task, device)
        self.tables = StepTables(run.steps, device)
        self.batches = Batches(run, self.task, device, group, self.tables)
        self.schedule = schedule_factors(run, device, self.batches.per_epoch)
        self.loss = TrainingLoss(run, self.task, forward, device)
        self.state = TrainingState(self.model, self.optimizer, self.batches, self.tables)
        self.evaluator = Evaluator(run, self.task, self.model, group, device)
        with matmul_precision(run):
            self.probe = FeatureProbe(self.model, self.task, device, group) if run.probe else None
        self.rates = LearningRates(self.optimizer, self.schedule, on_device=self.uses_graph)
        update = TrainingStep(
            run=run,
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            rates=self.rates,
            batches=self.batches,
            tables=self.tables,
            group=group,
            probe=self.probe,
            replayed=self.uses_graph,
        )
        self.replay = GraphReplay(update, device, self.batches.generator) if self.uses_graph else None
        self._update: Callable[[], None] = self.replay or update

    def _count(self) -> tuple[int, int, int]:
        """Parameters of the model, its multiply-accumulates per example and, for text, those of its head."""
        params = sum(p.numel() for p in self.model.parameters())
        macs = cost(self.model, self.task.example(self.device)).macs
        if not self.task.language:
            return params, macs, 0
        hidden = torch.zeros(self.run.context, self.run.width, device=self.device)
        return params, macs, cost(self.model.get_submodule("head"), hidden).macs

    @property
    def mean_macs(self) -> float:
        """MACs per example, averaged over the run's steps: less than at the end for a run that grows."""
        share = self.run.grow_at / self.run.steps
        return share * self.start_macs + (1 - share) * self.macs

    @property
    def uses_graph(self) -> bool:
        """Whether steps are replayed from a CUDA graph.

        torch's SGD, data that is read on the host, and several processes do not allow it.
        """
        single = self.group.size == 1 and not self.group.strategy
        return self.device.type == "cuda" and self.run.optimizer != "sgd" and not self.task.streams and single

    @property
    def losses(self) -> Tensor:
        """Training loss of every step, (steps,); zero for steps to come."""
        return self.tables.losses

    @property
    def errors(self) -> Tensor:
        """Fraction of wrong predictions of every step, (steps,); zero for steps to come."""
        return self.tables.errors

    def advance(self, until: int) -> None:
        """Train until `until` steps are done."""
        while self.step < until:
            self.grow_if_due()
            self.batches.prepare(self.step)
            self._update()
            self.step += 1

    def grow_if_due(self) -> None:
        """Grow the model if the next step is the first after `grow_at`. Until then a checkpoint has the small model."""
        if self.run.grow_to and self.step == self.run.grow_at and not self.grown:
            self._grow()

    def _grow(self) -> None:
        """Raise the ranks of the model, with the same result whenever the run was resumed."""
        self.rates.restore_peaks()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.run.seed + GROWTH_SEED)
            grow_(self.model, self.run.grow_to, optimizer=self.optimizer)
        self.rates.read_peaks()
        self.params, self.macs, self.head_macs = self._count()
        self.grown = True
        if self.replay is not None:
            self.replay.reset()

    def snapshot(self) -> Snapshot:
        """Copy the state, to `restore` it later."""
        return self.state.snapshot(self.step)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to the state of a snapshot."""
        self.state.restore(snapshot)
        self._seek(snapshot.step, snapshot.generator_state)

    def save(self, folder: Path, **metadata: Any) -> None:
        """Write a checkpoint into a run's folder, with further metadata for `resume` to return.

        Raises:
            CheckpointError: If it cannot be written.
        """
        tensors = self.state.tensors() | {"generator": self.batches.generator.get_state()}
        metadata = checkpoint_metadata(self.run, self.task, self.device, self.step) | metadata
        checkpoints.save(folder, self.step, tensors, metadata, self.group)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Load the last checkpoint in a run's folder, if there is one.

        Returns:
            The checkpoint's metadata; empty if there is no checkpoint.

        Raises:
            ButtressError: If it belongs to another run, device type or data set, or cannot be read.
        """
        path = checkpoints.latest(folder)
        if path is None:
            return {}
        metadata = checkpoints.read_metadata(path)
        check_metadata(metadata, self.run, self.task, self.device, path)
        checkpoints.verify(path, metadata, self.group, self.device)
        if self.run.structure_after(metadata["step"]) != self.run.structure:
            self._grow()
        self.state.initialize_optimizer()
        generator_state = self.batches.generator.get_state()
        checkpoints.load(path, self.state.tensors() | {"generator": generator_state})
        try:
            self._seek(metadata["step"], generator_state)
        except RuntimeError as error:  # the generator's state is none
            raise checkpoints.unreadable(path, error) from error
        return metadata

    def _seek(self, step: int, generator_state: Tensor) -> None:
        """Move to a step: set the cursor, the batches, the probe and the CUDA graph accordingly."""
        self.step = step
        self.tables.cursor.fill_(step)
        self.batches.seek(step, generator_state)
        if self.probe is not None:
            with matmul_precision(self.run):
                self.probe.change()
        if self.replay is not None:
            self.replay.reset()


def check_run(run: Run, task: Task, group: ProcessGroup) -> None:
    """Check that a run fits its task and the number of processes.

    Args:
        run: The run.
        task: Its task.
        group: The processes that train it.

    Raises:
        ConfigError: If it does not fit.
    """
    if task.language and (run.model != "gpt" or run.smoothing or run.mixup or run.probe):
        raise ConfigError(
            f"text is read by model=gpt, without smoothing, mixup and probe, but this run has model={run.model}, "
            f"smoothing={run.smoothing:g}, mixup={run.mixup:g}, probe={run.probe}"
        )
    if run.grow_to and (group.size > 1 or group.strategy):
        raise ConfigError("a run that grows is trained by one process: start it without torchrun")
    for name in AUGMENTATION_FIELDS:
        if getattr(run, name) != getattr(Run, name) and not task.follows_augmentation:
            raise ConfigError(f"{name}={getattr(run, name)} is not for the task {task.name}: leave it out")
    batch = min(run.batch, task.epoch or run.batch)
    if batch % (group.size * run.accumulate):
        whole_task = "" if batch == run.batch else f" (all of {task.name})"
        raise ConfigError(
            f"a batch of {batch}{whole_task} does not divide among {group.size} processes in {run.accumulate} "
            "microbatches each: choose a batch that is a multiple of both"
        )
