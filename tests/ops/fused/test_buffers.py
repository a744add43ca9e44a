"""What the factors of a chain read and write."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress.ops.fused.buffers import Buffer, buffers, new_intermediate, tokens_and_tiles
from buttress.ops.strides import strided_chain
from buttress.ops.tuning import TILE_TOKENS


def test_intermediates_follow_each_other_in_one_tensor() -> None:
    chain = bt.BTT(rank=2, cores=3).chain(60, 40)
    strided = strided_chain(chain)
    assert strided is not None
    x, y = torch.zeros(TILE_TOKENS + 1, 60), torch.zeros(TILE_TOKENS + 1, 40)
    z = new_intermediate(strided, x)
    assert z.shape == (2, sum(strided.intermediate_rows), TILE_TOKENS)
    ends = buffers(strided, x, z, y)
    assert [(b.width, b.tokens_fast) for b in ends] == [(60, False), *[(z.shape[1], True)] * 2, (40, False)]
    assert ends[0].tensor is x
    assert ends[-1].tensor is y
    starts = [(b.tensor.data_ptr() - z.data_ptr()) // (4 * TILE_TOKENS) for b in ends[1:-1]]
    assert starts == [0, strided.intermediate_rows[0]]


@pytest.mark.parametrize(
    ("fast", "expected"), [((False, True), (65, 2)), ((True, False), (65, 2)), ((True, True), (128, 2))]
)
def test_tokens_come_from_the_end_that_has_no_tiles(fast: tuple[bool, bool], expected: tuple[int, int]) -> None:
    ends = [Buffer(torch.zeros(2, 3, TILE_TOKENS) if f else torch.zeros(65, 3), 3, f) for f in fast]
    assert tokens_and_tiles(*ends) == expected
