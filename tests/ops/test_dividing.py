"""Parts of a tensor that is divided along an axis."""

from __future__ import annotations

import pytest
import torch

from buttress.core.partition import Division
from buttress.ops.dividing import part_of


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_slices_of_the_unfolded_axis(dim: int) -> None:
    axes = [2, 2, 2]
    axes[dim] = 3 * 4 * 5
    whole = torch.arange(240).reshape(axes)
    unfolded = whole.unflatten(dim, (3, 4, 5))
    for rank in range(2):
        expected = torch.stack([unfolded.select(dim + 1, i) for i in (2 * rank, 2 * rank + 1)], dim + 1)
        part = part_of(whole, Division(dim, before=3, size=4), rank, processes=2)
        assert torch.equal(part, expected.flatten(dim, dim + 2))


def test_contiguous_parts_are_views_and_undivided_tensors_stay() -> None:
    whole = torch.zeros(4, 2, 2)
    part_of(whole, Division(0, before=1, size=4), rank=1, processes=2).fill_(1)
    assert whole.sum((1, 2)).tolist() == [0, 0, 4, 4]
    assert part_of(whole, None, rank=1, processes=2) is whole
