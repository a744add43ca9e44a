"""Evaluation of a model during training: error on the test set, and norms on a few test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.lab.data import Task
from buttress.lab.runs.config import Run
from buttress.lab.training.distributed import ProcessGroup
from buttress.lab.training.metrics import measure_norms
from buttress.lab.training.precision import autocast, matmul_precision

NORM_SEQUENCES = 8
"""Sequences on which norms are measured."""
NORM_EXAMPLES = 1024
"""Examples on which norms are measured, where the task is not text."""
MIN_TEST_BATCH = 1000
"""Smallest batch on the test set, where the task is not text."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on its task's test set, uncompiled."""

    run: Run
    task: Task
    model: nn.Module
    group: ProcessGroup
    device: torch.device

    def test(self) -> tuple[float, float]:
        """Loss, and error in percent, on the whole test set."""
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        size = self.run.batch // self.run.accumulate if self.task.language else max(self.run.batch, MIN_TEST_BATCH)
        eager = torch.compiler.set_stance("force_eager")
        with matmul_precision(self.run), autocast(self.run, self.device), eager, self.group.forward_only(self.model):
            for batch in self.task.test(size):
                x, y = self.group.shard(*batch)
                loss, wrong = self._sums(x, y)
                if y.numel():
                    totals += torch.stack((loss.double(), wrong.double(), wrong.new_tensor(y.numel()).double()))
        self.model.train()
        losses, errors, count = self.group.all_reduce_sum(totals).tolist()
        return losses / count, 100 * errors / count

    def _sums(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses, and number of wrong answers."""
        if self.task.language:
            loss, error = self.model(x, y)
            return loss * y.numel(), error * y.numel()
        logits = self.model(x).float()
        loss = F.cross_entropy(logits, y, label_smoothing=self.run.smoothing, reduction="sum")
        return loss, (logits.argmax(1) != y).sum()

    def measure_norms(self) -> dict[str, float]:
        """Norms of activations, factors, gains and gradients on a few test examples, by name."""
        # The same examples in every process, so that the result does not depend on the number of processes.
        x, y = next(self.task.test(NORM_SEQUENCES if self.task.language else NORM_EXAMPLES))

        def loss() -> Tensor:
            with autocast(self.run, self.device):
                if self.task.language:
                    mean: Tensor = self.model(x, y)[0]
                    return mean
                return F.cross_entropy(self.model(x).float(), y)

        with matmul_precision(self.run), torch.compiler.set_stance("force_eager"):
            return measure_norms(self.model, loss)
