"""What a task is, and the registry of tasks."""

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
"""What a batch's random numbers are seeded with, and the numbers of its examples."""

_REGISTRY: dict[str, type[Task]] = {}


class DataError(ButtressError, FileNotFoundError):
    """Data that is not where it was looked for, or is not what it should be."""


class Task(ABC):
    """Data on a device, drawn and augmented there. `shape` is one input's, `classes` how many there are to tell apart.

    Whatever is random comes from generators given by the caller, so that a run can be repeated and resumed.
    """

    name: ClassVar[str]
    language: ClassVar[bool] = False
    """Whether inputs are tokens, targets the ones that follow, and the model makes its loss itself."""
    streams: bool = False
    """Whether examples are read on the host as training goes on, in the order that `prefetch` was given."""
    shape: tuple[int, ...]
    classes: int
    epoch: int | None
    """Examples in one pass; None where data never runs out."""

    @abstractmethod
    def __init__(self, device: torch.device, folder: Path | None) -> None: ...

    def at(self, run: Run) -> Task:
        """The task as a run wants it."""
        return self

    def example(self, device: torch.device) -> Tensor:
        """An input of the right kind, to count what a model does with it."""
        return torch.zeros(1, *self.shape, device=device)

    @property
    def fingerprint(self) -> str:
        """Tells one set of data from another of the same name; a run is not gone on with on other data."""
        return ""

    @property
    def hopeless(self) -> float:
        """A mean loss that training does not come back from, where there is one."""
        return math.inf

    @abstractmethod
    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Augmented inputs and targets of the training examples at `index`."""

    def prefetch(self, batches: Iterable[Batch], shard: slice = slice(None)) -> None:  # noqa: B027  (optional)
        """What is wanted next, where examples are read as training goes on; `draw` is called for each in turn.

        Of each batch this process wants the part `shard`; its chances are those that it has in the whole.
        """

    @abstractmethod
    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set as it is."""


T = TypeVar("T", bound=Task)


def task(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: enter a task into the registry."""

    def enter(cls: type[T]) -> type[T]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return enter


def tasks() -> dict[str, type[Task]]:
    """Every known task by name."""
    return dict(_REGISTRY)


def load(name: str, device: torch.device | str = "cpu", folder: Path | str | None = None) -> Task:
    """A task's data, on a device. Looks for files in `folder`, or in $BUTTRESS_DATA."""
    if name not in _REGISTRY:
        raise DataError(f"no task is called {name!r}{did_you_mean(name, _REGISTRY)}")
    place = folder or os.environ.get("BUTTRESS_DATA")
    return _REGISTRY[name](torch.device(device), Path(place) if place else None)
