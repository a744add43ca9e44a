"""Sizes of tiles, lanes and stages, and tables of offsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import buttress as bt
from buttress.ops.fused import launches
from buttress.ops.fused.launches import (
    MAX_SHARED_BYTES,
    DeviceLimits,
    Launch,
    OversizeKernelError,
    TensorSpec,
    cdiv,
    device_limits,
    fitting_tile,
    kernel_strides,
    lane_count,
    offset_table,
    stage_count,
    tile_size,
)
from buttress.ops.strides import strided_chain
from kernel_cases import DEVICE, check

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


def test_tiles_are_halved_until_they_fit() -> None:
    assert fitting_tile(CPU, 128, lambda n: n * 1024) == 128
    assert fitting_tile(CPU, 128, lambda n: n * MAX_SHARED_BYTES // 32) == 32
    assert fitting_tile(CPU, 128, lambda n: MAX_SHARED_BYTES + 1) == 16


@pytest.mark.parametrize(("shared_kib", "width", "outputs"), [(200, 200, 64), (75, 204, 32), (24, 208, 16)])
def test_a_gpu_with_less_shared_memory_gets_smaller_tiles_and_the_same_result(
    shared_kib: int, width: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each limit has a width of its own, because launches are cached by size."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    launched: list[dict[str, Any]] = []
    call = Launch.__call__

    def record(self: Launch, programs: int, *args: Any) -> None:
        launched.append(self.constants)
        call(self, programs, *args)

    monkeypatch.setattr(Launch, "__call__", record)
    limits = replace(device_limits(torch.device(DEVICE)), program_shared_bytes=shared_kib << 10)
    monkeypatch.setattr(launches, "device_limits", lambda device: limits)
    check(bt.BlockDiagonal(2), width, width, 3)
    forward = [constants for constants in launched if "W_ON_CHIP" in constants]
    assert {constants["BJ"] for constants in forward} == {outputs}


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
