"""Logs of a run in progress: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from buttress import MissingExtraError
from buttress.files import write_text


class Log(ABC):
    """Receives a run's metrics, in the order of steps."""

    @abstractmethod
    def write(self, step: int, **values: float) -> None:
        """Log the values of a step, by name."""

    def rewind(self, step: int) -> None:  # noqa: B027  (optional)
        """Remove all values after `step`, at which the run resumes."""


class JsonLines(Log):
    """A file with one JSON object per line.

    Args:
        path: The file; lines are appended to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, **values: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def rewind(self, step: int) -> None:
        if self.path.is_file():
            lines = _complete_lines(self.path)
            write_text(self.path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file, without one that a killed process left incomplete."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.startswith("{") and line.endswith("}\n")]


class TensorBoard(Log):
    """Scalars for TensorBoard.

    Args:
        folder: The folder for event files.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard logs need tensorboard: pip install tensorboard") from None
        self.open: Callable[..., Any] = partial(SummaryWriter, str(folder))
        self.writer = self.open()

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = self.open(purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WeightsAndBiases(Log):
    """A Weights & Biases run, identified by the run's key, so that it resumes as the same run.

    Args:
        project: The project to log to.
        key: The run's key.
        config: The run's fields.

    Raises:
        MissingExtraError: If wandb is not installed.
    """

    def __init__(self, project: str, key: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("Weights & Biases needs its package: pip install 'buttress[wandb]'") from None
        self.run = wandb.init(project=project, id=key, config=config, resume="allow")

    def write(self, step: int, **values: float) -> None:
        self.run.log(values, step=step)


class CombinedLog(Log):
    """Several logs that receive the same values."""

    def __init__(self, *logs: Log) -> None:
        self.logs = logs

    def write(self, step: int, **values: float) -> None:
        for log in self.logs:
            log.write(step, **values)

    def rewind(self, step: int) -> None:
        for log in self.logs:
            log.rewind(step)
