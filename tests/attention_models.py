"""Sizes and random parameters for the tests of attention."""

from __future__ import annotations

import torch
from torch import nn

import buttress as bt

EMBED, HEADS, BATCH, TARGET, SOURCE = 8, 2, 3, 5, 7
FULL = bt.LowRank(fraction=1.0)
"""Holds any matrix of the sizes used here."""


def randomized(module: nn.Module) -> nn.Module:
    """Every parameter drawn again: biases and normalizations start at values that hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.4)
    return module
