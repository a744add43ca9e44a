"""What a block may do to a module without leaving a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt
from buttress.surgery.preserving import Snapshot, preserved
from fusable import Block, structured


class Shrinks(Block):
    """Changes its parameters when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def step(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.5)
        return self.down(self.act(self.up(x))) * self.scale


def test_parameters_are_restored() -> None:
    model = structured(Shrinks())
    (row,) = bt.fuse_(model).rows
    assert row.verified
    assert torch.equal(model.scale, torch.ones(8))


def test_parameters_are_left_alone_on_request() -> None:
    model = Shrinks()
    with preserved(model, True, parameters=False):
        model(torch.randn(2, 8))
    assert torch.equal(model.scale, torch.full((8,), 0.5))


def test_a_list_that_contains_lists_in_lists() -> None:
    innermost: list[Any] = []
    nested: list[Any] = [innermost]
    for _ in range(3000):
        nested = [nested]
    module = nn.Module()
    module.nested = nested
    snapshot = Snapshot(module, False)
    assert not snapshot.is_changed()
    innermost.append(1)
    assert snapshot.is_changed()
    snapshot.restore()
    assert innermost == []
