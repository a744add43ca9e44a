"""Sizes of tiles, lanes and stages, and tables of offsets."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress.ops.fused.launches import (
    MAX_SHARED_BYTES,
    DeviceLimits,
    TensorSpec,
    cdiv,
    device_limits,
    kernel_strides,
    lane_count,
    offset_table,
    stage_count,
    tile_size,
)
from buttress.ops.strides import strided_chain

CPU = torch.device("cpu")


def test_sizes() -> None:
    assert [cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [tile_size(n, 256) for n in (1, 16, 17, 100, 256, 300)] == [16, 16, 32, 128, 256, 256]
    assert [lane_count(8, target, 5) for target in (4, 8, 16, 400)] == [1, 1, 2, 5]


def test_stages_are_limited_by_shared_memory() -> None:
    assert stage_count(CPU, 4, 0, 1024, 0) == 4
    assert stage_count(CPU, 4, MAX_SHARED_BYTES - 2048, 1024, 0) == 2
    assert stage_count(CPU, 4, MAX_SHARED_BYTES, 1024, 1024) == 1
    assert device_limits(CPU) == DeviceLimits()


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32")]
)
def test_float32_is_exact_unless_tf32_was_asked_for(dtype: torch.dtype, precision: str) -> None:
    x = torch.zeros(1, dtype=dtype)
    assert TensorSpec.of(x) == (CPU, dtype, precision)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert TensorSpec.of(x).precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_offsets_are_in_units_of_their_alignment() -> None:
    strided = strided_chain(bt.BTT(rank=2).chain(20, 30))
    assert strided is not None
    right = strided.factors[0]
    table = offset_table(right, CPU)
    assert table.dtype == torch.int32
    units = torch.tensor([*right.alignment, 1])
    assert (table * units).tolist() == [list(offsets) for offsets in right.block_offsets]
    assert torch.equal(offset_table(right, CPU, True), table[:, [1, 0, 2]])
    source, target = kernel_strides(right)
    assert source == (4, 0, 1, 4)
    assert target == (10, 0, 1, 2)
