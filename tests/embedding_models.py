"""Structured embeddings of every kind, and small models with an embedding and a head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops

# Structure, rows and width: with and without padding, one factor and three, sharing, regroup and window, and each way
# to read a factor.
CASES = [
    (bt.Dense(), 30, 20),
    (bt.LowRank(rank=3), 30, 20),
    (bt.Kronecker(), 31, 22),
    (bt.Monarch(4), 48, 32),
    (bt.Monarch(2), 50, 24),
    (bt.Monarch(3), 31, 20),
    (bt.TensorTrain(rank=2, cores=3), 30, 20),
    (bt.BTT(rank=2), 30, 20),
    (bt.BTT(rank=3), 97, 23),
    (bt.BTT(rank=(3, 2), cores=3), 30, 24),
    (bt.BlockDiagonal(4), 30, 22),
    (bt.Convolution(3), 30, 20),
    (bt.BTT(rank=2, split="greedy"), 97, 22),
    (bt.BTT(rank=2, split=((2, 12), (7, 5))), 34, 23),
    (bt.BLAST(blocks=3, rank=4), 31, 21),
]
each = pytest.mark.parametrize(("structure", "number", "width"), CASES, ids=[f"{s}-{n}x{w}" for s, n, w in CASES])
both = pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
A_FEW = [CASES[i] for i in (2, 5, 8, 11)]
few = pytest.mark.parametrize(("structure", "number", "width"), A_FEW, ids=[str(c[0]) for c in A_FEW])
FULL = bt.LowRank(fraction=1.0)
IDS = torch.arange(1, 17).reshape(2, 8)


def random_factors(chain: bt.Chain) -> list[Tensor]:
    return [torch.randn(f.shape, dtype=torch.float64, requires_grad=True) for f in chain.factors]


def dense_of(module: bt.StructuredEmbedding) -> Tensor:
    """The matrix by the one einsum that defines the chain."""
    return ops.dense(module.chain, module.effective_factors(), impl="reference")


def double(structure: bt.Structure, number: int, width: int, **options: object) -> bt.StructuredEmbedding:
    module = bt.StructuredEmbedding(number, width, structure, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


class Net(nn.Module):
    def __init__(self, number: int = 97, width: int = 24, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(number, width, padding_idx=0)
        self.places = nn.Embedding(8, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, number, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[-1], device=ids.device))
        return self.head(torch.tanh(self.mix(x)))


def tied_net(**options: object) -> Net:
    model = Net(**options)
    model.head.weight = model.embed.weight
    return model


def kinds(model: nn.Module) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in model.named_children()}


def shared(model: nn.Module) -> bool:
    pairs = zip(model.embed.parameters(), (p for n, p in model.head.named_parameters() if n != "bias"), strict=True)
    return all(a is b for a, b in pairs)
