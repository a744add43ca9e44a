"""The cost of a lookup."""

from __future__ import annotations

import torch
from torch import nn

import buttress as bt
from embedding_models import each


@each
def test_cost_counts_what_is_multiplied(structure, number, width) -> None:
    model = nn.Sequential(bt.StructuredEmbedding(number, width, structure))
    for device in ("cpu", "meta"):
        found = bt.cost(model.to(device), torch.zeros(4, 6, dtype=torch.int64, device=device))
        assert found.params == model[0].chain.params
        assert found.macs == 24 * model[0].macs
        (row,) = found.rows
        assert (row.name, row.kind) == ("0", f"StructuredEmbedding({structure})")
        assert (row.params, row.macs) == (found.params, found.macs)


def test_cost_by_hand() -> None:
    def macs(structure: bt.Structure, number: int, width: int) -> int:
        return bt.StructuredEmbedding(number, width, structure, device="meta").macs

    assert macs(bt.Dense(), 1000, 64) == 0
    assert macs(bt.BTT(rank=4), 50257, 768) == 4 * 768
    assert macs(bt.BTT(rank=3, cores=3), 1000, 512) == 3 * 64 * 3 + 3 * 512
    assert macs(bt.LowRank(rank=10), 1000, 64) == 10 * 64
    assert macs(bt.Kronecker(), 1024, 64) == 64
    assert macs(bt.TensorTrain(rank=5), 1024, 64) == 5 * 64
