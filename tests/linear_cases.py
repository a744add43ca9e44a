"""Structured linear layers of every kind, and what they should compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops

# Structure and sizes: with and without padding, with one factor and with three, with sharing, regroup and window.
CASES = [
    (bt.Dense(), 20, 30),
    (bt.LowRank(rank=3), 20, 30),
    (bt.Kronecker(), 20, 30),
    (bt.Monarch(4), 32, 48),
    (bt.Monarch(3), 20, 31),
    (bt.TensorTrain(rank=2, cores=3), 20, 30),
    (bt.BTT(rank=2), 20, 30),
    (bt.BTT(cores=3), 24, 30),
    (bt.BTT(rank=2, split="greedy"), 22, 30),
    (bt.BTT(rank=2, split=((3, 7), (2, 15))), 20, 30),
    (bt.BlockDiagonal(4), 20, 30),
    (bt.Convolution(3), 20, 30),
    (bt.BLAST(blocks=4, rank=3), 20, 30),
]
each = pytest.mark.parametrize(("structure", "d_in", "d_out"), CASES, ids=[str(c[0]) for c in CASES])
both = pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])


def oracle(layer: bt.StructuredLinear, x: Tensor) -> Tensor:
    """x W^T + b with W from the one einsum that defines the chain."""
    y = x @ ops.dense(layer.chain, layer.effective_factors(), impl="reference").mT
    return y if layer.bias is None else y + layer.bias


def randomized(layer: bt.StructuredLinear) -> bt.StructuredLinear:
    """Bias and gains away from their special starting values."""
    with torch.no_grad():
        for p in [*layer.gains.values(), *([] if layer.bias is None else [layer.bias])]:
            p.copy_(torch.randn_like(p))
    return layer


def double(structure: bt.Structure, d_in: int, d_out: int, **options: bool) -> bt.StructuredLinear:
    return randomized(bt.StructuredLinear(d_in, d_out, structure, dtype=torch.float64, **options))


def gradients(layer: nn.Module, y: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    names = [n for n, _ in layer.named_parameters()]
    return dict(zip(names, torch.autograd.grad(y, list(layer.parameters()), cotangent), strict=True))
