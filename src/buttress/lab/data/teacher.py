"""A synthetic task with unlimited data: predict which output of a fixed random network is largest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from buttress.lab.data.base import Task, task

FEATURES, HIDDEN, CLASSES, TEST = 64, 256, 10, 4096


@task("teacher")
class Teacher(Task):
    """Standard normal inputs, labelled by a fixed random two-layer network; no example occurs twice."""

    shape = (FEATURES,)
    classes = CLASSES
    epoch = None

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        # Drawn on the CPU, so that the teacher is the same on every device.
        fixed = torch.Generator().manual_seed(0)
        self.first = (torch.randn(HIDDEN, FEATURES, generator=fixed) * FEATURES**-0.5).to(device)
        self.second = (torch.randn(CLASSES, HIDDEN, generator=fixed) * HIDDEN**-0.5).to(device)
        self.test_x = torch.randn(TEST, FEATURES, generator=fixed).to(device)

    def label(self, x: Tensor) -> Tensor:
        """The teacher's classes.

        Shape:
            `x` is `(count, 64)`, the result `(count,)`.
        """
        hidden = torch.tanh(2 * x @ self.first.T)
        return (hidden @ self.second.T).argmax(1)

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(index), FEATURES, generator=generator, device=index.device)
        return x, self.label(x)

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x in self.test_x.split(batch):
            yield x, self.label(x)
