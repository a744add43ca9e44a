"""What records operations to run them later is told apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops
from buttress.ops.captures import is_exporting


class Flag(nn.Module):
    """Ones where torch.export traces it, else zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x) if is_exporting() else torch.zeros_like(x)


def test_only_export_is_exporting() -> None:
    x = torch.randn(3)
    assert not Flag()(x).any()
    assert not torch.compile(Flag(), fullgraph=True, backend="eager")(x).any()
    for strict in (True, False):
        assert torch.export.export(Flag(), (x,), strict=strict).module()(x).all()
    assert not Flag()(x).any()


def test_a_compiled_layer_uses_bmm() -> None:
    """Before torch 2.13, a compiled layer took itself for an exported one and used the einsum of the definition."""
    chain = bt.BTT(rank=2).chain(16, 16)
    ops.prepare(chain)
    chosen: list[str] = []
    graphs: list[Any] = []

    def f(x: Tensor) -> Tensor:
        chosen.append(ops.fastest(chain, x))
        return x + 1

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(f, backend=backend)(torch.randn(3, 16))
    assert chosen == ["bmm"]
    assert len(graphs) == 1
