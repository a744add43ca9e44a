"""The advice drawn from the speed table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress.costs.advice import Advice, Option
from buttress.costs.alignment import alignment_note
from buttress.ops import speeds
from speed_rows import GPU


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "gpu_name", lambda index: GPU)
    speeds.clear_caches()


def test_advice_for_a_gpu_that_is_not_in_this_machine() -> None:
    wide = bt.advise(4096, 4096, 32768, device="NVIDIA H200")
    assert wide.fastest is not None
    assert wide.fastest.against_dense > 3
    assert not wide.stay_dense
    assert wide.options == tuple(sorted(wide.options, key=lambda o: o.ms))
    assert {o.basis for o in wide.options if o.structure.startswith("btt")} == {"measured"}
    assert "× as fast as nn.Linear" in str(wide)
    narrow = bt.advise(512, 512, 32768, device="NVIDIA H200", candidates=["btt", bt.BTT(rank=4)])
    assert narrow.stay_dense
    assert "Stay dense" in str(narrow)


def test_sizes_in_between_are_scaled_and_say_so() -> None:
    between = bt.advise(3072, 3072, 16384, device="NVIDIA H200", candidates=[bt.BTT(rank=2)])
    (option,) = between.options
    assert option.basis.startswith("scaled from ")
    known = bt.advise(4096, 4096, 32768, device="NVIDIA H200", candidates=[bt.BTT(rank=2)]).options[0]
    assert known.ms / 8 < option.ms < known.ms


def test_a_measured_time_of_a_dense_layer_counts_for_all_structures() -> None:
    advice = bt.advise(512, 512, 32768, device="NVIDIA H200")
    row = next(r for r in speeds.table("NVIDIA H200") if r.key[:4] == ("btt", 512, 512, 32768))
    assert advice.dense_ms == row.linear.of(training=True, compiled=True)
    assert {o.basis.split()[0] for o in advice.options} == {"measured", "scaled"}
    for option in advice.options:
        assert option.against_dense == pytest.approx(advice.dense_ms / option.ms)
    assert advice.fastest is not None
    assert advice.fastest.basis.startswith("scaled")
    assert advice.verdict().endswith(f"is {advice.fastest.basis}: measure before relying on it.")


def test_advice_measured_here() -> None:
    advice = bt.advise(64, 96, 128, device="cpu", candidates=[bt.BTT(), "monarch"], training=False)
    assert {o.structure for o in advice.options} == {"btt", "monarch"}
    assert all(o.implementation == "bmm" and o.ms > 0 and o.basis == "measured" for o in advice.options)
    assert advice.dense_ms > 0
    assert not speeds.table("this machine's CPU"), "a CPU's times are not kept"


def test_notes_on_slices_that_another_split_would_align() -> None:
    note = 'btt(rank=4): slices of 38 outputs are not multiples of 8: split="aligned" gives 32 at +8.6 % MACs'
    aligned = bt.BTT(rank=4, split="aligned")
    chain, other = bt.BTT(rank=4).chain(1216, 1216), aligned.chain(1216, 1216)
    assert (chain.sizes["a"], other.sizes["a"]) == (38, 32)
    assert round(100 * (other.macs / chain.macs - 1), 1) == 8.6
    candidates = [bt.BTT(rank=4), aligned, bt.LowRank(rank=8), bt.BTT(split="greedy")]
    advice = bt.advise(1216, 1216, 8, device="cpu", candidates=candidates, training=False)
    assert advice.notes == (note,)
    assert f"note: {note}\n" in str(advice)
    assert alignment_note(bt.BTT(), 768, 3072) is None, "32 and 64 numbers"
    assert alignment_note(bt.BTT(), 12, 12) is None, "nothing aligned is near"
    assert alignment_note(bt.BTT(), 100, 110) is None, "39 % more MACs"
    one = alignment_note(bt.BTT(), 1216, 4864)
    assert one is not None
    assert "slices of 76 outputs are" in one
    assert alignment_note(bt.Sum(bt.BTT(), bt.LowRank(rank=2)), 1216, 1216) is None
    both = alignment_note(bt.BTT(split=((40, 25), (30, 50))), 1000, 1500)
    assert both is not None
    assert "slices of 25 inputs and 50 outputs" in both
    assert "gives 40 and 32 at -6.0 % MACs" in both


def test_verdicts() -> None:
    def option(name: str, against: float, parameters: int) -> Option:
        return Option(name, "triton", 1 / against, against, parameters, 0.1, 4, "measured")

    def verdict(*options: Option) -> Advice:
        return Advice(8, 8, 8, GPU, "a training step", 1.0, options)

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
    with pytest.raises(bt.ButtressError, match=r"is not a device.*or the name of a GPU with measured speeds"):
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
    monkeypatch.setattr(speeds, "gpu_name", torch.cuda.get_device_name)
    model = torch.nn.Sequential(*(bt.StructuredLinear(512, 512, bt.BTT(rank=3), device="cuda") for _ in range(2)))
    (option,) = bt.calibrate(model, 4096, dtype=torch.bfloat16)
    assert option.structure == "btt(rank=3)"
    kept = [r for r in speeds.table(torch.cuda.get_device_name()) if r.structure == "btt(rank=3)"]
    assert [(r.d_in, r.tokens, r.dtype) for r in kept] == [(512, 4096, "torch.bfloat16")]
    assert kept[0].tuning is not None


@pytest.mark.parametrize("single", ["btt(rank=2)", bt.BTT(rank=2)], ids=repr)
def test_a_single_candidate_is_a_list_of_one(single: bt.Structure | str) -> None:
    advice = bt.advise(1024, 1024, 32768, device="NVIDIA H200", candidates=single)
    assert [option.structure for option in advice.options] == ["btt(rank=2)"]


def test_what_names_no_candidate() -> None:
    with pytest.raises(bt.StructureError, match=r"'bt' is not a structure: there are .*; did you mean 'btt'"):
        bt.advise(1024, 1024, 32768, device="NVIDIA H200", candidates="bt")
    with pytest.raises(bt.StructureError, match=r"that is the class: write BTT\(\.\.\.\) for a structure"):
        bt.advise(1024, 1024, 32768, device="NVIDIA H200", candidates=[bt.BTT])
