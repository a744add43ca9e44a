"""Sizes of tiles, lanes and stages, and tables of offsets."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress.ops.fused.launches import (
    MAX_SHARED_BYTES,
    DeviceLimits,
    Launch,
    OversizeKernelError,
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


def test_a_capture_before_the_first_use_is_refused_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = bt.BTT(rank=2).chain(20, 46)
    strided = strided_chain(chain)
    assert strided is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for build in (lambda: offset_table(strided.factors[0], CPU), lambda: Launch(None, {}).compile()):
        with pytest.raises(bt.ButtressError, match=r"run the same step once before the capture, .* bt\.graphed\(\)"):
            build()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table = offset_table(strided.factors[0], CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert offset_table(strided.factors[0], CPU) is table, "what is there already may be captured"


def test_a_kernel_that_the_gpu_has_no_room_for_is_refused_with_advice() -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="the kernels are written in triton")

    class Compiled:
        def _init_handles(self) -> None:
            raise errors.OutOfResources(120_000, 101_376, "shared memory")

    class Kernel:
        arg_names = ()

        def warmup(self, *args: object, **kwargs: object) -> Compiled:
            return Compiled()

    launch = Launch(Kernel(), {})
    for _ in range(2):
        with pytest.raises(OversizeKernelError, match=r"120,000 needed, 101,376 there\): bt\.calibrate"):
            launch.compile()
