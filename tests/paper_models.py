"""Counts of the paper's models, and models without zeros."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import buttress as bt

PER_ELEMENT = 5
"""What the paper's counter adds to the MACs for each number that passes through a LayerNorm."""


def counts(build: Callable[[], nn.Module], structure: bt.Structure | None = None, image: int = 32) -> tuple[int, int]:
    """Parameters and MACs for one image; on the meta device, for the widest would fill the memory."""
    with torch.device("meta"):
        model = build()
        if structure:
            bt.replace_(model, structure)
        cost = bt.cost(model, torch.empty(1, 3, image, image))
    return cost.params, cost.macs


def stirred(model: nn.Module) -> nn.Module:
    """The model with every parameter drawn again, so that no zero start hides anything."""
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model
