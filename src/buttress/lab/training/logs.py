"""Where numbers go while a run is under way: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from buttress import MissingExtraError
from buttress.lab.runs.records import write_text


class Log(ABC):
    """Receives numbers by step, in order."""

    @abstractmethod
    def write(self, step: int, **numbers: float) -> None: ...

    def rewind(self, step: int) -> None:  # noqa: B027  (most need not care)
        """Forget what lies after `step`: a run goes on from there."""


class Lines(Log):
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, **numbers: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def rewind(self, step: int) -> None:
        if self.path.is_file():
            write_text(self.path, "".join(line for line in _whole(self.path) if json.loads(line)["step"] <= step))


def _whole(path: Path) -> list[str]:
    """Lines of a log but for one that a killed process left unfinished."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.startswith("{") and line.endswith("}\n")]


class TensorBoard(Log):
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard logs need it installed: pip install tensorboard") from None
        self.open: Callable[..., Any] = partial(SummaryWriter, str(folder))
        self.writer = self.open()

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = self.open(purge_step=step + 1)

    def write(self, step: int, **numbers: float) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WeightsAndBiases(Log):
    """A run of Weights & Biases, under the run's key, so that it resumes as the same one."""

    def __init__(self, project: str, key: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("Weights & Biases needs its package: pip install 'buttress[wandb]'") from None
        self.run = wandb.init(project=project, id=key, config=config, resume="allow")

    def write(self, step: int, **numbers: float) -> None:
        self.run.log(numbers, step=step)


class Several(Log):
    """Everything to each of them."""

    def __init__(self, *logs: Log) -> None:
        self.logs = logs

    def write(self, step: int, **numbers: float) -> None:
        for log in self.logs:
            log.write(step, **numbers)

    def rewind(self, step: int) -> None:
        for log in self.logs:
            log.rewind(step)
