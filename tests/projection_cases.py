"""Matrices, inputs and structures on which projections are tested."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import buttress as bt
from buttress import ops

STRUCTURES = [
    "dense",
    "low_rank(rank=3)",
    "kronecker",
    "tensor_train(rank=3)",
    "tensor_train(rank=2, cores=3)",
    "btt",
    "btt(rank=2)",
    "btt(rank=(2, 3), cores=3)",
    "btt(cores=4)",
    "btt(rank=2, split='greedy')",
    "kronecker(split='greedy')",
    "monarch(blocks=3)",
    "monarch(blocks=2)",
    "block_diagonal(blocks=3)",
    "convolution",
    "blast(blocks=3, rank=2)",
    "blast(blocks=2, rank=6)",
]


def matrix(d_out: int, d_in: int, seed: int = 0) -> Tensor:
    """Entries of very different sizes, so that singular values are too."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(size=(d_out, d_in)) * np.exp(2 * generator.normal(size=(d_out, d_in))))


def dense_form(structure: bt.Structure, projection: bt.Projection, weight: Tensor) -> Tensor:
    chain = structure.chain(weight.shape[1], weight.shape[0])
    return ops.dense(chain, list(projection.factors.values()))


def capped(structure: bt.Structure, d_in: int, d_out: int) -> Any:
    """The structure with no rank above its bound, as the error messages advise."""
    while True:
        try:
            bt.project(structure, torch.eye(d_out, d_in))
        except bt.StructureError as error:
            advice = re.search(r"at the bond [a-z]+(\d*) is above .* use a rank of at most (\d+)$", str(error))
            if advice is None:
                raise
            most, rank = int(advice[2]), structure.rank  # type: ignore[attr-defined]
            less: int | tuple[int, ...] = most
            if advice[1]:
                ranks = rank if isinstance(rank, tuple) else (rank,) * (structure.cores - 1)  # type: ignore[attr-defined]
                less = tuple(most if i == int(advice[1]) else r for i, r in enumerate(ranks, 1))
            assert less != rank
            structure = replace(structure, rank=less)  # type: ignore[type-var]
        else:
            return structure


def correlated(d: int, seed: int = 0, count: int = 400) -> Tensor:
    """Inputs as networks have them: few strong directions, many weak ones."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, d, dtype=torch.float64)
    return torch.randn(count, d, generator=generator, dtype=torch.float64) @ mix.T


def outputs_off(structure: bt.Structure, projection: bt.Projection, w: Tensor, x: Tensor) -> float:
    return ((x @ (dense_form(structure, projection, w) - w).T).norm() / (x @ w.T).norm()).item()
