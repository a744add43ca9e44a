"""The speed table: on disk, when it is broken, and what is decided from it."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress import files
from buttress.ops import speeds
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, OnChip
from buttress.ops.strides import strided_chain
from buttress.ops.tuning import Backward, Forward, Tuning
from speed_rows import GPU, row


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "gpu_name", lambda index: GPU)
    speeds.clear_caches()


def test_rows_survive_the_disk_and_later_ones_win() -> None:
    first, again = row(bt.BTT(), 1024, 64, 2.0, 1.0), row(bt.BTT(), 1024, 64, 1.0, 2.0)
    other = row(bt.BTT(rank=2), 1024, 64, 1.0, 2.0)
    speeds.store_rows(GPU, [first, other])
    speeds.store_rows(GPU, [again])
    path = files.cache_folder() / "test_gpu_9000.json"
    assert list(speeds.table(GPU)) == [again, other]
    assert sorted(p.name for p in path.parent.iterdir()) == ["test_gpu_9000.json", "test_gpu_9000.lock"]
    assert json.loads(path.read_text())["device"] == GPU


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"rows": [{"structure": "btt"}]}', b"\xff\xfe"])
def test_a_broken_table_is_left_alone_with_a_warning(text: bytes) -> None:
    speeds.store_rows(GPU, [])
    path = files.cache_folder() / "test_gpu_9000.json"
    path.write_bytes(text)
    speeds.table.cache_clear()
    with pytest.warns(UserWarning, match="not a speed table"):
        assert speeds.table(GPU) == ()
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 64, 1.0, 2.0)])
    assert len(speeds.table(GPU)) == 1
    assert path.with_suffix(".bad").read_bytes() == text, "what was in it is not lost"


def test_rows_count_even_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(speeds, "unwritten_rows", {})
    with pytest.warns(UserWarning, match="could not be stored"):
        speeds.store_rows(GPU, [row(bt.BTT(), 1024, 64, 1.0, 2.0)])
    assert len(speeds.table(GPU)) == 1


def test_several_writers_lose_nothing() -> None:
    def add_ten(start: int) -> None:
        for tokens in range(start, start + 10):
            speeds.store_rows(GPU, [row(bt.BTT(), 1024, tokens, 1.0, 2.0)])

    threads = [threading.Thread(target=add_ten, args=(100 * i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(speeds.table(GPU)) == 40


def prefers(structure: bt.Structure, width: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    strided = strided_chain(structure.chain(width, width))
    assert strided is not None
    return speeds.prefers_kernels(strided.signature, dtype, 0, tokens, True, True)


def test_the_faster_one_is_taken_and_what_was_not_measured_goes_to_bmm() -> None:
    assert not prefers(bt.BTT(), 1024, 4096)
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 32768, 1.0, 2.0), row(bt.BTT(), 1024, 64, 2.0, 1.0)])
    assert prefers(bt.BTT(), 1024, 20000)
    assert prefers(bt.BTT(), 2048, 20000)
    assert prefers(bt.BTT(rank=2), 1024, 20000)
    assert not prefers(bt.BTT(), 1024, 30)
    assert not prefers(bt.BTT(), 1 << 16, 20000), "four times the size is not near any more"
    assert not prefers(bt.BTT(), 1024, 20000, torch.float32)
    assert not prefers(bt.BTT(cores=3), 1024, 20000)
    assert not prefers(bt.Kronecker(), 1024, 20000), "the same sizes, but y is written in single numbers"


def test_the_best_way_to_launch_comes_from_the_nearest_row() -> None:
    strided = strided_chain(bt.BTT().chain(2048, 2048))
    assert strided is not None
    assert speeds.measured_tuning(strided.signature, "torch.bfloat16", 0) is None
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 32768, 1.0, 2.0)])
    tuning = speeds.measured_tuning(strided.signature, "torch.bfloat16", 0)
    assert tuning == Tuning(Forward(warps=8), Backward(stages=4))


def test_the_shipped_table_is_sound() -> None:
    rows = speeds.table("NVIDIA H200")
    assert len(rows) > 50
    for r in rows:
        chain = bt.parse(r.structure).chain(r.d_in, r.d_out)
        strided = strided_chain(chain)
        assert r.signature == (None if strided is None else strided.signature), r.structure
        assert all(min(vars(t).values()) > 0 for t in (r.linear, *r.times.values()))
        assert r.best in ("triton", "bmm")


def test_tf32_has_rows_of_its_own() -> None:
    base = row(bt.BTT(), 1024, 1024, triton=1.0, bmm=2.0)
    speeds.store_rows(GPU, [replace(base, dtype="tf32")])
    assert not prefers(bt.BTT(), 1024, 1024, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert prefers(bt.BTT(), 1024, 1024, torch.float32)
        assert not prefers(bt.BTT(), 1024, 1024, torch.bfloat16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_time_is_chosen_by_what_is_run_and_who_launches() -> None:
    times = speeds.Times(forward=1.0, both=2.0, forward_eager=3.0, both_eager=4.0)
    assert times.of(training=False, compiled=True) == 1.0
    assert times.of(training=True, compiled=True) == 2.0
    assert times.of(training=False, compiled=False) == 3.0
    assert times.of(training=True, compiled=False) == 4.0


def test_a_row_is_the_same_after_it_was_json() -> None:
    plain = row(bt.BTT(), 1024, 64, 1.0, 2.0)
    with_options = replace(plain, tuning=Tuning(on_chip=OnChip(ApplyOptions(tiles=4), None, GradientOptions(2))))
    for original in (plain, replace(plain, tuning=None), replace(plain, spread=0.25), with_options):
        again = speeds.Row.from_json(json.loads(json.dumps(original.as_json())))
        assert again == original
        assert again.key == original.key
        assert again.best == "triton"


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, 1 << 40])
def test_impossible_launch_options_are_refused(value: object) -> None:
    """They would fail, or divide by zero, in the first layer that uses them."""
    data = replace(
        row(bt.BTT(), 1024, 64, 1.0, 2.0), tuning=Tuning(on_chip=OnChip(ApplyOptions(), None, GradientOptions()))
    ).as_json()
    options = data["tuning"]
    for part in (options["forward"], options["backward"], *filter(None, options["on_chip"].values())):
        good = part["warps"]
        part["warps"] = value
        with pytest.raises(ValueError, match="launch option warps must be a whole number from 1"):
            speeds.Row.from_json(json.loads(json.dumps(data)))
        part["warps"] = good
    assert speeds.Row.from_json(data)


def test_a_gpu_without_measured_speeds_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", GPU]
    monkeypatch.setattr(speeds, "gpu_name", names.__getitem__)
    speeds.store_rows(GPU, [row(bt.BTT(), 1024, 32768, 1.0, 2.0)])
    speeds.report_unmeasured_gpu.cache_clear()
    with caplog.at_level(logging.WARNING):
        for width in (256, 1024, 4096):
            strided = strided_chain(bt.BTT().chain(width, width))
            assert strided is not None
            for index in (0, 1, 2):
                speeds.prefers_kernels(strided.signature, torch.bfloat16, index, 64, True, True)
    messages = [r.getMessage() for r in caplog.records]
    assert [name in message for name, message in zip(names, messages, strict=False)] == [True, True]
    assert len(messages) == 2
    for message in messages:
        assert "structured layers use torch.bmm. bt.calibrate(model, tokens) measures" in message
        assert "\n" not in message
