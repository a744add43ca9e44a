"""The state of a run: all tensors that its remaining steps depend on, in snapshots and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from buttress import ButtressError
from buttress.lab.data import Task
from buttress.lab.runs.config import Run
from buttress.lab.training.batches import Batches
from buttress.lab.training.checkpoints import CheckpointError, unreadable
from buttress.lab.training.tables import StepTables


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state that further steps do not change."""

    step: int
    tensors: dict[str, Tensor]
    generator_state: Tensor


class TrainingState:
    """The tensors of a run by their names in a checkpoint.

    They are "model.*", "optimizer.<parameter>.<slot>", "order" (the epoch's order of examples), and the tables
    "losses", "errors", "norms" and "changes". A checkpoint has "generator" too, the random number generator's state.

    Args:
        model: The model.
        optimizer: Its optimizer.
        batches: Its batches.
        tables: Its tables.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, tables: StepTables
    ) -> None:
        self.model, self.optimizer, self.batches, self.tables = model, optimizer, batches, tables

    def tensors(self) -> dict[str, Tensor]:
        """The tensors themselves, without the generator's state."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for p, slots in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[p]}.{slot}": t for slot, t in slots.items()}
        return tensors | {"order": self.batches.order} | self.tables.tensors()

    def snapshot(self, step: int) -> Snapshot:
        """Copy the state after `step` steps."""
        tensors = {name: t.clone() for name, t in self.tensors().items()}
        return Snapshot(step, tensors, self.batches.generator.get_state())

    def restore(self, snapshot: Snapshot) -> None:
        """Set the tensors to those of a snapshot; the generator is not changed."""
        self.initialize_optimizer()
        for name, t in self.tensors().items():
            # Optimizer state that did not exist yet was zero.
            t.copy_(snapshot.tensors[name]) if name in snapshot.tensors else t.zero_()

    def initialize_optimizer(self) -> None:
        """Make the optimizer create its state, by a step with learning rates and gradients of zero."""
        if self.optimizer.state:
            return
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def checkpoint_metadata(run: Run, task: Task, device: torch.device, step: int) -> dict[str, Any]:
    """Metadata by which a checkpoint identifies its run."""
    return {"key": run.key, "run": run.to_json(), "device": device.type, "step": step, "data": task.fingerprint}


def check_metadata(metadata: dict[str, Any], run: Run, task: Task, device: torch.device, path: Path) -> None:
    """Check that a checkpoint belongs to this run, device type and data set.

    Args:
        metadata: Metadata of the checkpoint.
        run: The run.
        task: Its task.
        device: The device to resume on.
        path: The checkpoint, for error messages.

    Raises:
        CheckpointError: If its run or its step does not fit.
        ButtressError: If the device type or the data do not.
    """
    own_key = _key_of(metadata, path)
    if own_key != run.key:
        raise CheckpointError(
            f"{path} belongs to another run, {own_key}, and not to {run.key}: remove it to start over"
        )
    if metadata["step"] > run.steps:
        raise unreadable(path, ValueError(f"it is at step {metadata['step']} of {run.steps}"))
    if metadata["device"] != device.type:
        raise ButtressError(
            f"this run was started on {metadata['device']} and cannot resume on {device.type}: use the same device "
            "type, or remove the run's folder to start over"
        )
    # Empty in checkpoints from before the task identified its data.
    if metadata["data"] not in ("", task.fingerprint):
        raise ButtressError(
            f"this run was started on other data ({metadata['data']}, now {task.fingerprint}): use the same data, or "
            f"remove {path.parent} to start over"
        )


def _key_of(metadata: dict[str, Any], path: Path) -> str:
    """The key of a checkpoint's run, which version 0.1 did not store."""
    try:
        key = Run.from_json(metadata["run"]).key
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable(path, error) from error
    if metadata.get("key", key) != key:
        raise unreadable(path, ValueError("its key is not that of its run"))
    return key
