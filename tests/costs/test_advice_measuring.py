"""Advice that is measured on this machine: noise, large batches, progress, and structures that refuse a size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import buttress as bt
from buttress.core.chain import Chain
from buttress.core.structures.base import REGISTRY
from buttress.costs.advice import Advice, Option
from buttress.ops import measuring
from buttress.ops.speeds import Row, Times


def advice(against_dense: float, spread: float) -> Advice:
    option = Option("btt", "bmm", 1 / against_dense, against_dense, 10, 0.1, 4, "measured")
    return Advice(8, 8, 8, "cpu", "a training step", 1.0, (option,), spread)


def test_quiet_times_decide() -> None:
    assert advice(1.2, 0.02).fastest is not None
    assert advice(0.8, 0.02).stay_dense
    for quiet in (advice(1.2, 0.02), advice(0.8, 0.02)):
        assert not quiet.undecided
        assert "vary" not in quiet.verdict()


@pytest.mark.parametrize("against_dense", [1.3, 1.0, 0.8])
def test_times_that_vary_by_more_than_they_differ_decide_nothing(against_dense: float) -> None:
    noisy = advice(against_dense, 0.4)
    assert noisy.undecided
    assert noisy.fastest is None
    assert not noisy.stay_dense
    assert noisy.verdict() == (
        "Undecided: times vary by 40 %, more than the fastest structure differs from nn.Linear. "
        "Close other programs and measure again."
    )


def test_a_large_difference_decides_in_spite_of_noise_and_says_so() -> None:
    for against_dense, expected in ((3.0, "btt is fastest"), (0.3, "Stay dense")):
        noisy = advice(against_dense, 0.4)
        assert not noisy.undecided
        assert noisy.verdict().startswith(expected)
        assert noisy.verdict().endswith("Times vary by 40 %: close other programs to compare structures.")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(Structure, tokens) of what is measured; nn.Linear takes 4 ms, and 6 ms when it is measured again."""
    layers: list[tuple[str, int]] = []

    def measure_layer(
        chain: Chain, label: str, tokens: int, dtype: torch.dtype, device: torch.device, *, linear: Times | None = None
    ) -> Row:
        layers.append((label, tokens))
        times = {"bmm": Times(1.0, 1.0, 1.0, 1.0)}
        return Row(label, chain.d_in, chain.d_out, tokens, str(dtype), None, Times(4.0, 4.0, 4.0, 4.0), times)

    monkeypatch.setattr(measuring, "measure_layer", measure_layer)
    monkeypatch.setattr(measuring, "sample_linear", lambda *_: (Times(6.0, 6.0, 6.0, 6.0), 0.0))
    return layers


@pytest.mark.parametrize(("training", "dense", "structured"), [(False, 10.0, 1.0), (True, 20.0, 2.0)])
def test_timed_is_the_time_of_the_structure_or_of_nn_linear(
    training: bool, dense: float, structured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_layer(chain: Chain, label: str, tokens: int, dtype: torch.dtype, *_: Any, **__: Any) -> Row:
        times = {"reference": Times(5.0, 6.0, 7.0, 8.0), "bmm": Times(1.0, 2.0, 3.0, 4.0)}
        linear = Times(10.0, 20.0, 30.0, 40.0)
        return Row(label, chain.d_in, chain.d_out, tokens, str(dtype), None, linear, times)

    monkeypatch.setattr(measuring, "measure_layer", measure_layer)
    milliseconds = bt.timed(64, device="cpu", training=training)
    assert milliseconds(None, 64, 64) == dense
    assert milliseconds(bt.BTT(), 64, 64) == structured
    many = bt.timed(64 * 2**15, device="cpu", training=training)
    ratio = 64 * 2**15 * 64 * 64 / 2**31  # a CPU measures as many tokens as make 2^31 MACs
    assert (many(None, 64, 64), many(bt.BTT(), 64, 64)) == pytest.approx((ratio * dense, ratio * structured))


def test_a_large_batch_is_measured_with_fewer_tokens_on_a_cpu_and_says_so(measured: list[tuple[str, int]]) -> None:
    large = bt.advise(1024, 1024, 32768, device="cpu", candidates=["btt"])
    assert measured == [("btt", 2048)]
    assert [o.basis for o in large.options] == ["scaled from 2,048 tokens"]
    assert large.options[0].ms == 16.0
    assert large.dense_ms == 64.0
    small = bt.advise(64, 64, 512, device="cpu", candidates=["btt"])
    assert [o.basis for o in small.options] == ["measured"]
    huge = bt.advise(1 << 15, 1 << 15, 32768, device="cpu", candidates=["btt"])
    assert measured[1:] == [("btt", 512), ("btt", 64)]
    assert huge.options[0].basis == "scaled from 64 tokens"


def test_a_change_of_load_meanwhile_counts_as_spread(measured: list[tuple[str, int]]) -> None:
    assert bt.advise(64, 64, 64, device="cpu", candidates=["btt", "monarch"]).spread == 0.5


def test_progress_names_what_is_measured_next(measured: list[tuple[str, int]]) -> None:
    calls: list[tuple[Any, ...]] = []
    bt.advise(64, 64, 64, device="cpu", candidates=["btt", "monarch"], progress=lambda *args: calls.append(args))
    assert calls == [("btt", 0, 2), ("monarch", 1, 2)]


@pytest.fixture
def powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure of the user that takes powers of two only."""
    monkeypatch.setattr("buttress.core.structures.base.REGISTRY", dict(REGISTRY))

    @bt.structure
    class Hadamard(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> Chain:
            if d_in & (d_in - 1):
                raise ArithmeticError(f"{d_in} is no power of two")
            return bt.BTT().chain(d_in, d_out)


def test_a_structure_that_refuses_a_size_is_left_out_and_named(
    measured: list[tuple[str, int]], powers_of_two: None
) -> None:
    assert not bt.advise(64, 64, 64, device="cpu").skipped
    odd = bt.advise(96, 64, 64, device="cpu")
    assert odd.skipped == ("hadamard (ArithmeticError: 96 is no power of two)",)
    assert "left out: hadamard (ArithmeticError: 96 is no power of two)" in str(odd)
    assert "hadamard" not in {o.structure for o in odd.options}
    with pytest.raises(bt.ButtressError, match=r"no structure takes a layer of 96 -> 64: hadamard \(ArithmeticError"):
        bt.advise(96, 64, 64, device="cpu", candidates=["hadamard"])
