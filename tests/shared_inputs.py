"""A small model with two layers that read the same input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 36)
        self.q, self.k = nn.Linear(36, 30, bias=False), nn.Linear(36, 30)
        self.head = nn.Linear(30, 5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.first(x).relu()
        return self.head(self.q(h) * self.k(h))


def net() -> Net:
    torch.manual_seed(0)
    return Net()
