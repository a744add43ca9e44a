"""Feature updates: how much each step changes the output of the last block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from buttress.lab.data import Task
from buttress.lab.training.distributed import ProcessGroup


class FeatureProbe:
    """Compares the last block's output on a fixed batch of test examples before and after each step.

    Args:
        model: The model, with its blocks in the submodule `blocks`.
        task: The run's task.
        device: Device of the model.
        group: The processes that train the run.
    """

    EXAMPLES = 1024

    def __init__(self, model: nn.Module, task: Task, device: torch.device, group: ProcessGroup) -> None:
        self.model, self.group = model, group
        self.inputs = next(task.test(self.EXAMPLES))[0]
        self.output = torch.zeros((), device=device)
        model.get_submodule("blocks").register_forward_hook(self._store_output)
        self.previous = self._features().clone()

    def change(self) -> Tensor:
        """RMS change of the features since the last call, averaged over the batch."""
        features = self._features()
        change = (features - self.previous).square().mean(1).sqrt().mean()
        self.previous.copy_(features)
        return change

    def _features(self) -> Tensor:
        with self.group.forward_only(self.model):
            self.model(self.inputs)
        return self.output.flatten(1).float()

    def _store_output(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.output = output.detach()
