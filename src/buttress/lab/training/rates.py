"""Learning rates of a run: their schedule, and their update in the optimizer at each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from buttress.lab.runs.config import Run
from buttress.lab.training.tables import StepTables


def schedule_factors(run: Run, device: torch.device, per_epoch: int = 1) -> Tensor:
    """The multiplier of all learning rates at each step: linear warmup, then cosine or constant.

    Args:
        run: The run.
        device: Device of the result.
        per_epoch: Steps per epoch, for a cosine that falls once per epoch.

    Shape:
        Returns (steps,), float32.
    """
    steps = torch.arange(run.steps, dtype=torch.float64)
    held = steps - steps % per_epoch if run.schedule == "cosine_epochs" else steps
    progress = (held - run.warmup).clamp(min=0) / max(1, run.steps - run.warmup)
    factors = torch.ones_like(steps) if run.schedule == "constant" else 0.5 * (1 + torch.cos(math.pi * progress))
    factors = run.final + (1 - run.final) * factors
    if run.warmup:
        factors *= ((steps + 1) / run.warmup).clamp(max=1)
    return factors.float().to(device)


class LearningRates:
    """Sets the learning rates of an optimizer's parameter groups to their scheduled values.

    Args:
        optimizer: The optimizer; the current rates of its groups are the peak rates. Its list of groups is kept.
        factors: The schedule, as `schedule_factors` returns it.
        on_device: Whether rates are entries of a tensor on the device, so that a CUDA graph can replay their update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factors: Tensor, *, on_device: bool) -> None:
        self.groups, self.factors, self.on_device = optimizer.param_groups, factors, on_device
        self.read_peaks()

    def read_peaks(self) -> None:
        """Take the current rates of the groups for the peak rates."""
        self.peak = [float(group["lr"]) for group in self.groups]
        self.peak_tensor = torch.tensor(self.peak, device=self.factors.device)
        self.current_tensor = self.peak_tensor.clone()
        if self.on_device:
            self.bind_rates_to_tensor()

    def restore_peaks(self) -> None:
        """Set the rates of the groups to the peak rates, for whoever changes the groups."""
        for group, rate in zip(self.groups, self.peak, strict=True):
            group["lr"] = rate

    def bind_rates_to_tensor(self) -> None:
        """Make each group's rate an entry of `current_tensor`."""
        for i, group in enumerate(self.groups):
            group["lr"] = self.current_tensor[i]

    def update(self, tables: StepTables) -> None:
        """Set the rates of the step at the tables' cursor."""
        factor = tables.at_cursor(self.factors)
        if self.on_device:
            torch.mul(self.peak_tensor, factor, out=self.current_tensor)
        else:
            for group, rate in zip(self.groups, self.peak, strict=True):
                group["lr"] = rate * factor.item()
