"""Divergence: a loss that is not finite or too large, and the first layer with non-finite output."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor, nn

from buttress import ButtressError
from buttress.inspection.hooks import removing
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Curve, Metrics, Record
from buttress.lab.training.precision import matmul_precision
from buttress.lab.training.state import Snapshot
from buttress.lab.training.trainer import Trainer


class DivergenceError(ButtressError, ArithmeticError):
    """The loss is not finite or above the task's divergence threshold. The message names the step and the layer."""

    curve: Curve = ()
    """Training curve until the divergence."""
    metrics: Metrics = MappingProxyType({})
    """Metrics until the divergence."""

    def record(self, run: Run) -> Record:
        """Build the record of the run."""
        return Record(run, "diverged", curve=self.curve, error=str(self), metrics=dict(self.metrics))


def diagnose(trainer: Trainer, snapshot: Snapshot) -> DivergenceError:
    """Repeat the steps since a snapshot, to find the first layer with non-finite output.

    Args:
        trainer: A trainer whose loss became non-finite.
        snapshot: An earlier state of it.

    Returns:
        The error to raise. The trainer is left at the step that the error names.
    """
    end = trainer.step
    trainer.restore(snapshot)
    with torch.compiler.set_stance("force_eager"):
        while trainer.step < end:
            cause = first_nonfinite_layer(trainer)
            # All processes must stop at the same step, even if only one of them has the non-finite output.
            if trainer.group.any(bool(cause), trainer.device):
                cause = cause or "another process has the first non-finite output"
                advice = f"Try a smaller lr than {trainer.run.lr:g}"
                return DivergenceError(f"the loss is not finite at step {trainer.step}: {cause}. {advice}")
            trainer.advance(trainer.step + 1)
    return DivergenceError(
        f"the loss was not finite before step {trainer.step}, but is finite when the steps are repeated"
    )


def first_nonfinite_layer(trainer: Trainer) -> str:
    """Find the first layer with non-finite output on the next batch, without training on it.

    Args:
        trainer: The trainer; it is not changed.

    Returns:
        The end of an error message; empty if all outputs and the loss are finite.
    """
    layers: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, inputs: object, output: object) -> None:
            if not layers and isinstance(output, Tensor) and not output.isfinite().all():
                layers.append(name)

        return check

    leaves = [(n, m) for n, m in trainer.model.named_modules() if not any(m.children())]
    with (
        removing(*(m.register_forward_hook(hook(n)) for n, m in leaves)),
        matmul_precision(trainer.run),
        trainer.group.forward_only(trainer.model),
    ):
        loss, _ = trainer.loss(trainer.batches.peek(trainer.step))
    if layers:
        return f"the first non-finite output is that of {layers[0]}"
    return "" if loss.isfinite() else "the output of every layer is finite, but the loss of the logits is not"
