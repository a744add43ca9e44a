"""Optimizers whose updates have the sizes that the learning-rate rules assume."""

from __future__ import annotations

from functools import partial

import torch

PRECISE_ADAM = partial(torch.optim.Adam, eps=1e-30)
"""Adam with updates of size 1 however small the gradients are: behind factors that start at zero they are tiny."""


class Plain(torch.optim.Optimizer):
    """Muon and sign descent without momentum: the nearest orthogonal matrix to a slice's gradient, or its sign."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"lr": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["rule"] == "muon":
                    u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
                    p.sub_(group["lr"] * (u @ vh))
                else:
                    p.sub_(group["lr"] * p.grad.sign())
