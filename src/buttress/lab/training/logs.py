"""Logs of a run in progress: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from buttress import ButtressError, MissingExtraError
from buttress.files import FileWarning, leaves, replacing
from buttress.lab.runs import json_values
from buttress.lab.runs.json_values import JsonError
from buttress.lab.runs.records import SHOWN_LINES


class Log(ABC):
    """Receives a run's metrics, in the order of steps."""

    @abstractmethod
    def write(self, step: int, **values: float) -> None:
        """Log the values of a step, by name."""

    def rewind(self, step: int) -> None:  # noqa: B027  (optional)
        """Remove all values after `step`, at which the run resumes; -1 if it starts from the beginning."""


class JsonLines(Log):
    """A file with one JSON object per line.

    Args:
        path: The file; lines are appended to it.

    Raises:
        ButtressError: If it is a link that leaves its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if leaves(path.parent, path):
            raise ButtressError(f"{path} is a link that leaves its folder: remove it")

    def write(self, step: int, **values: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def rewind(self, step: int) -> None:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            lines = file.readlines()
        # A killed process may leave its last line incomplete; it is written again.
        steps = [_step(line) for line in (lines if lines and lines[-1].endswith(b"\n") else lines[:-1])]
        damaged = [number for number, at in enumerate(steps, 1) if at is None]
        if damaged:
            numbers = ", ".join(map(str, damaged[:SHOWN_LINES])) + (" ..." if len(damaged) > SHOWN_LINES else "")
            warnings.warn(
                f"{self.path}: {len(damaged)} damaged lines were removed ({numbers}); the run does not need them",
                FileWarning,
                stacklevel=2,
            )
        kept = (line for line, at in zip(lines, steps, strict=False) if at is not None and at <= step)
        with replacing(self.path) as part:
            part.write_bytes(b"".join(kept))


def _step(line: bytes) -> int | None:
    """The step of a line; None if the line is damaged."""
    try:
        return json_values.integer(json_values.parse_object(line).get("step"), "step")
    except JsonError:
        return None


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
        self.writer: Any = None  # opened when the run starts: a run that is rejected leaves no files

    def rewind(self, step: int) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = self.open(purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        self.writer = self.writer or self.open()
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
