"""Optimizers whose updates have the sizes that the learning-rate rules assume."""

from __future__ import annotations

from functools import partial

import torch

PRECISE_ADAM = partial(torch.optim.Adam, eps=1e-30)
"""Adam with updates of size 1 however small the gradients are: behind factors that start at zero they are tiny."""


class SignDescent(torch.optim.Optimizer):
    """Steps along the signs of the gradient, without momentum."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"lr": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())
