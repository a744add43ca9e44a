"""Small models with activations before structured layers, for the tests of fuse_."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt


def ffn(activation: nn.Module | None = None, *between: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(8, 12), activation or nn.GELU(), *between, nn.Linear(12, 8)]
    return structured(nn.Sequential(*layers))


def structured(model: Any, *globs: str) -> Any:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    bt.replace_(model, dict.fromkeys(globs or linear, bt.BTT(rank=2)))
    return model


def note(model: nn.Module) -> str:
    """The reason why the only activation is not fused."""
    state = {name: type(m) for name, m in model.named_modules()}
    report = bt.fuse_(model)
    (row,) = report.rows
    assert not row.layer
    assert not report.fused
    assert not row.verified
    assert {name: type(m) for name, m in model.named_modules()} == state
    assert all(m.input_activation is None for m in model.modules() if isinstance(m, bt.StructuredLinear))
    return row.note


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that the backward pass of a model needs."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())


def check_left_as_it_was(model: nn.Module, reason: str) -> None:
    """Check that the only activation is not fused for a reason, and that nothing else happens to the model."""
    structured(model).eval()
    x = torch.randn(3, 8)
    before = model(x)
    attributes = [copy.copy(vars(m)) for m in model.modules()]
    assert reason in note(model)
    assert all(vars(m)[key] is old[key] for m, old in zip(model.modules(), attributes, strict=True) for key in old)
    assert "Proxy" not in str([vars(m) for m in model.modules()])
    assert torch.equal(model(x), before)


class Block(nn.Module):
    """A residual block whose parts `step` puts together."""

    def __init__(self, activation: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = activation or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class ByAttribute(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Halves(nn.Module):
    """Activation and layer in two submodules, as in BERT."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.act = nn.Linear(8, 12), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.dense(x))

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(12, 8), nn.LayerNorm(8)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return self.norm(self.dense(h) + x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(), self.Second()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.second(self.first(x), x)
        return y if scale is None else y * scale
