"""The paper's MLP, the rates of its parameters, and the widths where a rate was tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt

RULES = ("adam", "sgd", "sign", "muon")
LR = 3e-3
SCALE = {"input*": 0.1}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """The paper's MLP for CIFAR: 3 x 32 x 32 pixels, residual blocks, 10 classes."""

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.input = nn.Linear(3072, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.input(x)))


def mlp(width: int, structure: bt.Structure | None, depth: int = 2, **options: Any) -> MLP:
    model = MLP(width, depth)
    if structure is not None:
        bt.replace_(model, structure, **options)
    return model


def multipliers(model: nn.Module, lr: float = LR, **options: Any) -> dict[str, float]:
    return {row.name: row.multiplier for row in bt.explain(model, lr, **options).rows}


def rates(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """(lr, weight decay) of every parameter that is in a group, by name."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def check(actual: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert actual.keys() >= expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-12), name


def bases() -> dict[str, Any]:
    with torch.device("meta"):
        meta = MLP(64)
    sizes = {"input": (3072, 64), "head": (64, 10)}
    for i in range(2):
        sizes |= {f"blocks.{i}.up": (64, 256), f"blocks.{i}.down": (256, 64)}
    return {
        "model": MLP(64),
        "structured model": mlp(64, bt.LowRank()),
        "meta model": meta,
        "d_in": {name: d_in for name, (d_in, _) in sizes.items()},
        "sizes": sizes,
    }


def fused(width: int) -> nn.Module:
    return nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(width, 3 * width)}), "head": nn.Linear(width, 10)})
