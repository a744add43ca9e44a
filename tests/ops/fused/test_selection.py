"""When the kernels are chosen by themselves, and with which launch options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import buttress as bt
from buttress.ops import fused, speeds
from buttress.ops.fused import availability
from buttress.ops.fused.selection import tuning_for
from buttress.ops.layouts import layouts_of
from buttress.ops.tuning import Backward, Forward, Tuning, default_tuning
from speed_rows import GPU, row


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "gpu_name", lambda index: GPU)
    speeds.clear_caches()


def test_the_cpu_is_left_to_bmm() -> None:
    assert not fused.preferred(bt.BTT().chain(64, 64), torch.zeros(1, 64, dtype=torch.bfloat16))


def test_where_a_graph_launches_the_device_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    base = row(bt.BTT(), 1024, 4096, triton=1.0, bmm=2.0)
    eager = {"triton": replace(base.times["triton"], both_eager=5.0), "bmm": base.times["bmm"]}
    speeds.store_rows(GPU, [replace(base, times=eager)])
    monkeypatch.setattr(availability, "TRITON", True)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(4096, 1024), dtype=torch.bfloat16)
    chain = bt.BTT().chain(1024, 1024)
    assert not fused.preferred(chain, x)
    with bt.graphed(), bt.graphed():
        assert fused.preferred(chain, x)
    assert not fused.preferred(chain, x)


def test_dispatch_modes_see_torchs_own_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 4096, triton=1.0, bmm=2.0)])
    monkeypatch.setattr(availability, "TRITON", True)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(4096, 1024), dtype=torch.bfloat16)
    chain = bt.BTT().chain(1024, 1024)
    assert fused.preferred(chain, x)
    with TorchDispatchMode():
        assert not fused.preferred(chain, x)


def test_launch_options_are_forced_measured_or_the_defaults() -> None:
    strided = layouts_of(bt.BTT().chain(1024, 1024)).strided
    assert strided is not None
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, itemsize=2)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, itemsize=2)
    assert tuning_for(strided, on_gpu) == default_tuning(strided.signature, 2)
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 4096, triton=1.0, bmm=2.0)])
    assert tuning_for(strided, on_gpu) == Tuning(Forward(warps=8), Backward(stages=4))
    assert tuning_for(strided, on_cpu) == default_tuning(strided.signature, 2)
    outer, inner = Tuning(Forward(warps=1)), Tuning(Forward(warps=2))
    with fused.tuned(outer):
        with fused.tuned(inner):
            assert tuning_for(strided, on_gpu) == inner
        assert tuning_for(strided, on_cpu) == outer


@pytest.mark.gpu
def test_chosen_by_the_measured_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    speeds.clear_caches()
    speeds.gpu_name.cache_clear()
    gpu = torch.cuda.get_device_name()
    if not speeds.table(gpu):
        pytest.skip(f"no speed table for {gpu}")
    half = torch.zeros(32768, 4096, device="cuda", dtype=torch.bfloat16)
    assert fused.preferred(bt.BTT(rank=2).chain(4096, 4096), half)
    assert not fused.preferred(bt.BTT(rank=2).chain(4096, 4096), half.double())
    assert not fused.preferred(bt.BTT().chain(4, 4), half[:, :4])
