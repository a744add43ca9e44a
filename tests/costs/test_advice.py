"""The measured table, what it decides, and the advice drawn from it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import buttress as bt
from buttress.costs.advice import Advice, Option
from buttress.ops import speeds as measured
from buttress.ops.fused import operators as fused
from buttress.ops.speeds import Row, Times
from buttress.ops.strides import route
from buttress.ops.tuning import Backward, Forward, Tuning

CARD = "Test Card 9000"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "card", lambda index: CARD)
    for cached in (measured.table, measured.prefers_kernels_cached, measured.tuning):
        cached.cache_clear()


def row(structure: bt.Structure, width: int, tokens: int, triton: float, bmm: float, dense: float = 1.0) -> Row:
    way = route(structure.chain(width, width))
    assert way is not None
    times = {"triton": Times(*[triton] * 4), "bmm": Times(*[bmm] * 4)}
    how = Tuning(Forward(warps=8), Backward(stages=4))
    return Row(str(structure), width, width, tokens, "torch.bfloat16", way.signature, Times(*[dense] * 4), times, how)


def test_rows_survive_the_disk_and_later_ones_win() -> None:
    first, again = row(bt.BTT(), 1024, 64, 2.0, 1.0), row(bt.BTT(), 1024, 64, 1.0, 2.0)
    other = row(bt.BTT(rank=2), 1024, 64, 1.0, 2.0)
    measured.keep(CARD, [first, other])
    measured.keep(CARD, [again])
    path = measured.cache() / "test_card_9000.json"
    assert list(measured.table(CARD)) == [again, other]
    assert sorted(p.name for p in path.parent.iterdir()) == ["test_card_9000.json", "test_card_9000.lock"]
    assert json.loads(path.read_text())["device"] == CARD


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"rows": [{"structure": "btt"}]}', b"\xff\xfe"])
def test_a_broken_table_is_left_alone_with_a_warning(text: bytes) -> None:
    measured.keep(CARD, [])
    path = measured.cache() / "test_card_9000.json"
    path.write_bytes(text)
    measured.table.cache_clear()
    with pytest.warns(UserWarning, match="not a table of measured speeds"):
        assert measured.table(CARD) == ()
    measured.keep(CARD, [row(bt.BTT(), 1024, 64, 1.0, 2.0)])
    assert len(measured.table(CARD)) == 1
    assert path.with_suffix(".bad").read_bytes() == text, "what was in it is not lost"


def test_rows_count_even_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(measured, "_unkept", {})
    with pytest.warns(UserWarning, match="could not be kept"):
        measured.keep(CARD, [row(bt.BTT(), 1024, 64, 1.0, 2.0)])
    assert len(measured.table(CARD)) == 1


def test_several_writers_lose_nothing() -> None:
    def some(start: int) -> None:
        for tokens in range(start, start + 10):
            measured.keep(CARD, [row(bt.BTT(), 1024, tokens, 1.0, 2.0)])

    threads = [threading.Thread(target=some, args=(100 * i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured.table(CARD)) == 40


def prefers(structure: bt.Structure, width: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    way = route(structure.chain(width, width))
    assert way is not None
    return bool(measured.prefers_kernels(way.signature, dtype, 0, tokens, True, True))


def test_the_faster_one_is_taken_and_what_was_not_measured_goes_to_bmm() -> None:
    assert not prefers(bt.BTT(), 1024, 4096)
    measured.keep(CARD, [row(bt.BTT(), 1024, 32768, 1.0, 2.0), row(bt.BTT(), 1024, 64, 2.0, 1.0)])
    assert prefers(bt.BTT(), 1024, 20000)
    assert prefers(bt.BTT(), 2048, 20000)
    assert prefers(bt.BTT(rank=2), 1024, 20000)
    assert not prefers(bt.BTT(), 1024, 30)
    assert not prefers(bt.BTT(), 1 << 16, 20000), "four times the size is not near any more"
    assert not prefers(bt.BTT(), 1024, 20000, torch.float32)
    assert not prefers(bt.BTT(cores=3), 1024, 20000)
    assert not prefers(bt.Kronecker(), 1024, 20000), "the same sizes, but y is written in single numbers"


def test_the_best_way_to_launch_comes_from_the_nearest_row() -> None:
    way = route(bt.BTT().chain(2048, 2048))
    assert way is not None
    assert measured.tuning(way.signature, "torch.bfloat16", 0) is None
    measured.keep(CARD, [row(bt.BTT(), 1024, 32768, 1.0, 2.0)])
    found = measured.tuning(way.signature, "torch.bfloat16", 0)
    assert found == Tuning(Forward(warps=8), Backward(stages=4))


def test_the_shipped_table_is_sound() -> None:
    rows = measured.table("NVIDIA H200")
    assert len(rows) > 50
    for r in rows:
        chain = bt.parse(r.structure).chain(r.d_in, r.d_out)
        way = route(chain)
        assert r.signature == (None if way is None else way.signature), r.structure
        assert all(min(vars(t).values()) > 0 for t in (r.linear, *r.times.values()))
        assert r.best in ("triton", "bmm")


def test_advice_for_a_gpu_that_is_not_in_this_machine() -> None:
    wide = bt.advise(4096, 4096, 32768, device="NVIDIA H200")
    assert wide.fastest is not None
    assert wide.fastest.against_dense > 3
    assert not wide.stay_dense
    assert wide.options == tuple(sorted(wide.options, key=lambda o: o.ms))
    assert {o.basis for o in wide.options if o.structure.startswith("btt")} == {"measured"}
    assert "times faster than nn.Linear" in str(wide)
    narrow = bt.advise(512, 512, 32768, device="NVIDIA H200", candidates=["btt", bt.BTT(rank=4)])
    assert narrow.stay_dense
    assert "Stay dense" in str(narrow)


def test_sizes_in_between_are_scaled_and_say_so() -> None:
    between = bt.advise(3072, 3072, 16384, device="NVIDIA H200", candidates=[bt.BTT(rank=2)])
    (option,) = between.options
    assert option.basis.startswith("scaled from ")
    known = bt.advise(4096, 4096, 32768, device="NVIDIA H200", candidates=[bt.BTT(rank=2)]).options[0]
    assert known.ms / 8 < option.ms < known.ms


def test_advice_measured_here() -> None:
    advice = bt.advise(64, 96, 128, device="cpu", candidates=[bt.BTT(), "monarch"], training=False)
    assert {o.structure for o in advice.options} == {"btt", "monarch"}
    assert all(o.implementation == "bmm" and o.ms > 0 and o.basis == "measured" for o in advice.options)
    assert advice.dense_ms > 0
    assert not measured.table("this machine's CPU"), "a CPU's times are not kept"


def test_verdicts() -> None:
    def option(name: str, against: float, parameters: int) -> Option:
        return Option(name, "triton", 1 / against, against, parameters, 0.1, 4, "measured")

    def verdict(*options: Option) -> Advice:
        return Advice(8, 8, 8, CARD, "a training step", 1.0, options)

    mixed = verdict(option("small", 3.0, 10), option("large", 1.2, 40), option("slow", 0.5, 80))
    assert mixed.fastest is not None
    assert (mixed.fastest.structure, mixed.largest and mixed.largest.structure) == ("small", "large")
    assert "large has the most parameters" in mixed.verdict()
    even = verdict(option("even", 1.02, 10))
    assert even.stay_dense
    assert even.verdict().startswith("Stay dense")


def test_questions_without_an_answer() -> None:
    with pytest.raises(bt.ShapeError, match="tokens must be an integer >= 1, got 0"):
        bt.advise(64, 64, 0)
    with pytest.raises(bt.ButtressError, match="neither a torch device nor a GPU with a table"):
        bt.advise(64, 64, 64, device="Quantum 3")
    with pytest.raises(bt.ButtressError, match=r"nothing near 4 -> 4 in torch\.bfloat16 was measured on NVIDIA H200"):
        bt.advise(4, 4, 4, device="NVIDIA H200")
    with pytest.raises(bt.ButtressError, match="nothing to compare"):
        bt.advise(64, 64, 64, device="cpu", candidates=[])
    with pytest.raises(bt.ButtressError, match="no structured layers"):
        bt.calibrate(torch.nn.Linear(4, 4), 16)
    with pytest.raises(bt.ButtressError, match="calibrated on a GPU, but this model is on cpu"):
        bt.calibrate(bt.StructuredLinear(4, 4, bt.BTT()), 16)


@pytest.mark.gpu
def test_calibrating_a_model_fills_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "card", torch.cuda.get_device_name)
    model = torch.nn.Sequential(*(bt.StructuredLinear(512, 512, bt.BTT(rank=3), device="cuda") for _ in range(2)))
    (option,) = bt.calibrate(model, 4096, dtype=torch.bfloat16)
    assert option.structure == "btt(rank=3)"
    kept = [r for r in measured.table(torch.cuda.get_device_name()) if r.structure == "btt(rank=3)"]
    assert [(r.d_in, r.tokens, r.dtype) for r in kept] == [(512, 4096, "torch.bfloat16")]
    assert kept[0].tuning is not None


def test_tf32_has_rows_of_its_own() -> None:
    known = row(bt.BTT(), 1024, 1024, triton=1.0, bmm=2.0)
    measured.keep(CARD, [replace(known, dtype="tf32")])
    assert not prefers(bt.BTT(), 1024, 1024, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert prefers(bt.BTT(), 1024, 1024, torch.float32)
        assert not prefers(bt.BTT(), 1024, 1024, torch.bfloat16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_where_a_graph_launches_the_device_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    known = row(bt.BTT(), 1024, 4096, triton=1.0, bmm=2.0)
    eager = {"triton": replace(known.times["triton"], both_eager=5.0), "bmm": known.times["bmm"]}
    measured.keep(CARD, [replace(known, times=eager)])
    monkeypatch.setattr(fused, "TRITON", True)
    x = SimpleNamespace(device=torch.device("cuda", 0), shape=(4096, 1024), dtype=torch.bfloat16)
    chain = bt.BTT().chain(1024, 1024)
    assert not fused.preferred(chain, x)  # type: ignore[arg-type]
    with bt.graphed(), bt.graphed():
        assert fused.preferred(chain, x)  # type: ignore[arg-type]
    assert not fused.preferred(chain, x)  # type: ignore[arg-type]
