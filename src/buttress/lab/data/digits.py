"""scikit-learn's digits: 1797 images of 8 × 8 pixels that the library includes, so that no file is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress import MissingExtraError
from buttress.lab.data.base import Task, task

TRAINING = 1297
"""Number of training examples; the other 500 are the test set."""


@task("digits")
class Digits(Task):
    """Handwritten digits, augmented by shifts of up to one pixel and by noise."""

    shape = (1, 8, 8)
    classes = 10
    epoch = TRAINING

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtraError("the digits need scikit-learn: pip install 'buttress[lab]'") from None
        images, labels = load_digits(return_X_y=True)
        # One fixed shuffle, because the file is ordered by writer and the test set should not be.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = (torch.tensor(images, dtype=torch.float32)[order] / 8 - 1).view(-1, 1, 8, 8).to(device)
        y = torch.tensor(labels)[order].to(device)
        self.x, self.y = x[:TRAINING], y[:TRAINING]
        self.test_x, self.test_y = x[TRAINING:], y[TRAINING:]
        self.pixels = torch.arange(8, device=device)

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = len(index)
        padded = F.pad(self.x[index, 0], (1, 1, 1, 1), value=-1.0)
        shift = torch.randint(0, 3, (2, count, 1, 1), generator=generator, device=index.device)
        rows, columns = self.pixels.view(1, 8, 1) + shift[0], self.pixels.view(1, 1, 8) + shift[1]
        each = torch.arange(count, device=index.device).view(-1, 1, 1)
        noise = torch.randn(count, 8, 8, generator=generator, device=index.device)
        return (padded[each, rows, columns] + 0.3 * noise).unsqueeze(1), self.y[index]

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.test_x.split(batch), self.test_y.split(batch), strict=True)
