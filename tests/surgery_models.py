"""Small models for the tests of surgery, and what is compared before and after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import buttress as bt

FULL = bt.LowRank(fraction=1.0)
"""Holds any matrix of up to 64 inputs or outputs."""


class Block(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.tanh(q) * k + v)


class Net(nn.Module):
    """Embedding, blocks, an MLP and a head, the head optionally tied."""

    def __init__(self, width: int = 16, words: int = 12, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, bias) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mlp(x))


BODY = ["blocks.0.qkv", "blocks.0.out", "blocks.1.qkv", "blocks.1.out", "mlp.0", "mlp.2"]
TOKENS = torch.arange(10).reshape(2, 5)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def structured(model: nn.Module) -> dict[str, bt.StructuredLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear)}


def snapshot(model: nn.Module) -> tuple[dict, dict, dict]:
    """Modules, parameters and buffers by identity, and all values."""
    tensors = {n: id(p) for n, p in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    values = {n: t.clone() for n, t in model.state_dict().items()}
    return {n: id(m) for n, m in model.named_modules(remove_duplicate=False)}, tensors, values


def assert_unchanged(model: nn.Module, before: tuple[dict, dict, dict]) -> None:
    modules, tensors, values = snapshot(model)
    assert modules == before[0]
    assert tensors == before[1]
    torch.testing.assert_close(values, before[2], rtol=0, atol=0, equal_nan=True)


def encoder_net() -> nn.Sequential:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 16), nn.Linear(16, 4))


def conv1d_net() -> nn.Module:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(pytorch_utils.Conv1D(32, 16), pytorch_utils.Conv1D(16, 32), nn.Linear(16, 4))


def conv1d_tied() -> nn.Module:
    model = conv1d_net()
    model.insert(1, type(model[0])(32, 16))
    model[1].weight = model[0].weight
    return model


def two_sharing() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[1].weight = model[0].weight
    return model


def two_attentions_sharing() -> nn.Module:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2), "b": nn.MultiheadAttention(16, 2)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    return model


PLANS = {
    "plain": (bt.BTT(rank=2), {}),
    "split": (bt.BTT(rank=2), {"split": {"*.qkv": 3}}),
    "uneven": (bt.BTT(rank=2), {"split": {"*.qkv": (16, 20, 12)}, "normalize": True}),
    "cores": (bt.BTT(rank=(2, 3), cores=3), {}),
    "greedy": (bt.BTT(rank=2, split="greedy"), {"split": {"*.qkv": 3}}),
    "mixed": (
        {
            "blocks.0.*": bt.TensorTrain(rank=(3, 2), cores=3),
            "blocks.1.*": bt.LowRank(fraction=0.5),
            "mlp.0": bt.Monarch(blocks=4),
            "mlp.2": bt.Kronecker(),
            "head": bt.BTT(rank=3),
        },
        {"split": {"blocks.1.qkv": 3}},
    ),
}


def rebuilt(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """From the plan and the weights alone, without a dense weight in memory."""
    assert all(p.is_meta for p in fresh.parameters())
    bt.Plan.from_json(bt.Plan.of(model).to_json()).apply_(fresh)
    assert all(p.is_meta for p in fresh.parameters())
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert not any(p.is_meta for p in fresh.parameters())
    return fresh
