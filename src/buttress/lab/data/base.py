"""The interface of a task, and the registry of tasks."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from buttress import ButtressError
from buttress.lab.runs.config import Run
from buttress.suggestions import did_you_mean

Batch = tuple[tuple[int, ...], Sequence[int]]
"""The seed of a batch's random numbers, and the indices of its examples."""

_REGISTRY: dict[str, type[Task]] = {}


class DataError(ButtressError, FileNotFoundError):
    """Data that is missing, damaged or unsuitable."""


class Task(ABC):
    """A data set on a device, with the inputs and targets that a model trains on.

    Random numbers are drawn from generators or seeds that the caller passes, so that a run can be repeated and resumed.
    A subclass registers itself with the decorator `task`.

    Args:
        device: Device of inputs and targets.
        folder: The data folder, or None.

    Example:
        >>> data = load("digits")
        >>> x, y = data.draw(torch.arange(32), torch.Generator())
        >>> x.shape
        torch.Size([32, 1, 8, 8])
    """

    name: ClassVar[str]
    """The name in the registry, which is also `Run.task`."""
    language: ClassVar[bool] = False
    """Whether inputs are tokens and targets are the next tokens. The model then computes its own loss."""
    streams: bool = False
    """Whether examples are read on the host during training. `draw` then returns the batches in the order that was
    passed to `prefetch`, and cannot be captured in a CUDA graph."""
    follows_augmentation: ClassVar[bool] = False
    """Whether the task follows the `AUGMENTATION_FIELDS` of a run."""
    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """Number of classes, or the vocabulary's size where the task is a language."""
    epoch: int | None
    """Number of training examples; None if they are unlimited."""

    @abstractmethod
    def __init__(self, device: torch.device, folder: Path | None) -> None: ...

    def at(self, run: Run) -> Task:
        """The task with the settings of a run, such as its corpus and context. Default: the task itself.

        Args:
            run: The run that trains on the task.

        Returns:
            A task whose `shape`, `classes`, `epoch` and `streams` hold for this run.
        """
        return self

    def compile(self) -> None:  # noqa: B027  (optional)
        """Compile the augmentation in place, if the task has one; inputs stay the same."""

    def example(self, device: torch.device) -> Tensor:
        """One input of zeros, for counting a model's cost.

        Shape:
            `(1, *shape)`.
        """
        return torch.zeros(1, *self.shape, device=device)

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a run resumes only on data with the same fingerprint."""
        return ""

    @property
    def divergence_threshold(self) -> float:
        """A mean loss above which a run counts as diverged. Default: infinity."""
        return math.inf

    @abstractmethod
    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw augmented inputs and targets of training examples.

        Args:
            index: Indices of the examples, on the task's device.
            generator: Random number generator of the augmentation. A task that `streams` uses the seeds that were
                passed to `prefetch` instead.

        Shape:
            `index` is `(count,)`, inputs are `(count, *shape)`, targets `(count,)`; those of a language are
            `(count, *shape)`.
        """

    def draw_mixed(self, index: Tensor, generator: torch.Generator, share: Tensor) -> tuple[Tensor, Tensor]:
        """Draw like `draw`, with the pixels of each example mixed with those of the previous one, then normalized.

        Only for tasks that follow the fields about augmentation.

        Args:
            index: Indices of the examples, on the task's device.
            generator: Random number generator of the augmentation.
            share: Weight of each example in its mixture, a scalar.

        Returns:
            Mixed inputs, and the targets of the examples themselves.
        """
        raise NotImplementedError(f"the task {self.name} cannot mix pixels")

    def prefetch(self, batches: Iterable[Batch], shard: slice = slice(None)) -> None:  # noqa: B027  (optional)
        """Start to read the next batches, if the task `streams`; `draw` then returns them in order.

        Args:
            batches: Seed and example indices of each batch.
            shard: This process's slice of each batch. The random numbers of an example do not depend on it.
        """

    @abstractmethod
    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Read the test set, without augmentation.

        Args:
            batch: Examples per batch; the last batch may have fewer.

        Yields:
            Inputs and targets of each batch.
        """


T = TypeVar("T", bound=Task)


def task(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that registers a task under a name."""

    def register(cls: type[T]) -> type[T]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return register


def load(name: str, device: torch.device | str = "cpu", folder: Path | str | None = None) -> Task:
    """Load a task's data onto a device.

    Args:
        name: A registered name, such as "digits", "cifar10" or "text".
        device: Device of inputs and targets.
        folder: The data folder. Default: $BUTTRESS_DATA.

    Returns:
        The task.

    Raises:
        DataError: If there is no such task, or its files are missing or damaged.
        MissingExtraError: If a library that the task needs is not installed.
    """
    if name not in _REGISTRY:
        raise DataError(f"no task is called {name!r}{did_you_mean(name, _REGISTRY)}")
    path = folder or os.environ.get("BUTTRESS_DATA")
    return _REGISTRY[name](torch.device(device), Path(path) if path else None)
