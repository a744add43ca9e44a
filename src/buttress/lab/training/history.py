"""Metrics of a run over its steps."""

from __future__ import annotations

from buttress.lab.runs.records import Metrics
from buttress.lab.training.logs import Log
from buttress.lab.training.metrics import summarize
from buttress.lab.training.trainer import Trainer


class MetricHistory:
    """The metrics of a run: pairs of step and value, by name.

    Args:
        metrics: Metrics from before the run resumed.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = {name: list(pairs) for name, pairs in metrics.items()}

    def measure(self, trainer: Trainer, log: Log | None) -> None:
        """Measure norms and evaluate, if either is due at the trainer's step.

        All norms are logged; the history keeps a summary of them.

        Args:
            trainer: The trainer.
            log: Receives the values.
        """
        run, step = trainer.run, trainer.step
        norms: dict[str, float] = {}
        if run.trace and (step % run.trace == 0 or step == run.steps):
            norms = trainer.evaluator.measure_norms()
        metrics = summarize(norms) if norms else {}
        test: dict[str, float] = {}
        if run.evaluate and step and (step % run.evaluate == 0 or step == run.steps):
            loss, error = trainer.evaluator.test()
            test = {"test_loss": loss, "test_error": error}
        metrics |= test
        if not metrics or any(s == step for s, _ in self.metrics.get(next(iter(metrics)), [])):
            return  # nothing is due, or it was measured before the run was killed
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append((step, value))
        if log is not None:
            log.write(step, **norms, **test)
