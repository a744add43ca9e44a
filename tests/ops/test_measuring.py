"""Timing on the CPU; on a GPU, that a row is complete and that the fastest launch options are those of a candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.ops import measuring, speeds
from buttress.ops.fused import availability
from buttress.ops.layouts import layouts_of
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, OnChip, apply_candidates, gradient_candidates
from buttress.ops.on_chip.sizes import PairSizes, on_chip_sizes
from buttress.ops.speeds import Row, Times
from buttress.ops.tuning import BACKWARD_CANDIDATES, FORWARD_CANDIDATES, Tuning
from emulated_gpu import emulate
from speed_rows import GPU, row

CPU = torch.device("cpu")


def test_the_median_is_in_milliseconds() -> None:
    calls = []

    def wait() -> None:
        calls.append(None)
        time.sleep(0.002)

    assert 2.0 <= measuring.sample_ms(wait, CPU, seconds=0.01).ms < 50.0
    assert len(calls) >= 4, "one call to warm up, three at least to measure"
    assert 2.0 <= measuring.graph_sample_ms(wait, CPU, seconds=0.001).ms < 50.0


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert measuring.Sample.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2 / 3)
    assert measuring.Sample.of([2.0, 2.0, 2.0]) == (2.0, 0.0)


def test_calls_that_take_turns_being_slow_have_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = [0.0], iter([1.0, *[0.010, 0.014] * 20])

    def call() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    sample = measuring.sample_ms(call, CPU, seconds=0.2)
    assert 10 <= sample.ms <= 14, "the first call does not count"
    assert sample.spread == pytest.approx(0.4, abs=0.1)


def test_all_four_times_are_measured_whether_gradients_are_enabled_or_not() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with torch.no_grad():
        times = measuring.time_passes(lambda x: x @ weight, torch.randn(4, 8), [weight])
    assert all(ms > 0 for ms in vars(times).values())
    assert weight.grad is None


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Convolution(3)], ids=str)
def test_a_row_on_the_cpu_has_bmm_alone(structure: bt.Structure) -> None:
    chain = structure.chain(16, 16)
    linear = Times(1.0, 2.0, 3.0, 4.0)
    row = measuring.measure_layer(chain, str(structure), 4, torch.float32, CPU, linear=linear)
    assert row.key == (str(structure), 16, 16, 4, "torch.float32")
    assert row.linear == linear
    assert set(row.times) == {"bmm"}
    assert row.tuning is None
    assert row.signature == layouts_of(chain).signature


@pytest.mark.gpu
def test_a_row_on_a_gpu_has_the_kernels_at_their_best() -> None:
    chain = bt.BTT(rank=2).chain(1024, 1024)
    row = measuring.measure_layer(chain, "btt(rank=2)", 2048, torch.bfloat16, torch.device("cuda", 0))
    assert set(row.times) == {"bmm", "triton"}
    assert row.tuning is not None
    assert row.tuning.forward in FORWARD_CANDIDATES
    assert row.tuning.backward in BACKWARD_CANDIDATES


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(Sizes, tokens) of the layers that are measured, on a GPU that is not there."""
    layers: list[tuple[int, int]] = []

    def measure_layer(chain: Any, label: str, tokens: int, dtype: torch.dtype, device: torch.device) -> Row:
        layers.append((chain.d_in, tokens))
        torch.rand(1)
        base = row(bt.BTT(), chain.d_in, tokens, triton=1.0, bmm=2.0)
        return replace(base, structure=label, dtype=str(dtype))

    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(speeds, "gpu_name", lambda index: GPU)
    monkeypatch.setattr(measuring, "gpu_name", lambda index: GPU)
    monkeypatch.setattr(measuring, "measure_layer", measure_layer)
    monkeypatch.setattr(measuring, "used_layers", set())
    monkeypatch.setattr(availability, "TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fork_rng = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork_rng(devices=[]))
    speeds.clear_caches()
    yield layers
    speeds.clear_caches()


def on_gpu(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), shape=(tokens, width), dtype=dtype)


def test_nothing_is_measured_at_first_use_unless_asked_for(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = bt.BTT().chain(1024, 1024)
    assert ops.fastest(chain, on_gpu(5000, 1024)) == "bmm"
    assert not measured
    monkeypatch.setattr(speeds, "MEASURES_ON_FIRST_USE", True)
    for _ in range(3):
        assert ops.fastest(chain, on_gpu(5000, 1024)) == "triton"
    assert measured == [(1024, 4096)], "once, for the tokens rounded down to a power of two"
    assert len(speeds.table(GPU)) == 1, "and stored"


def test_only_layers_unlike_the_measured_ones_are_measured(measured: list[tuple[int, int]]) -> None:
    for width, tokens in ((1024, 4096), (2048, 8192), (1024, 64), (1 << 16, 4096)):
        measuring.measure_at_first_use(bt.BTT().chain(width, width), on_gpu(tokens, width))
    assert measured == [(1024, 4096), (1024, 64), (1 << 16, 4096)]


def test_what_cannot_be_measured_is_left_alone(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring.measure_at_first_use(bt.Convolution(3).chain(64, 64), on_gpu(64, 64))
    measuring.measure_at_first_use(bt.BTT().chain(64, 64), on_gpu(64, 64, torch.float64))
    measuring.measure_at_first_use(bt.BTT().chain(64, 64), on_gpu(0, 64))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    measuring.measure_at_first_use(bt.BTT().chain(64, 64), on_gpu(64, 64))
    assert not measured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measuring.measure_at_first_use(bt.BTT().chain(64, 64), on_gpu(64, 64))
    assert measured == [(64, 64)], "after the capture it may be"


def test_measuring_leaves_random_numbers_alone(measured: list[tuple[int, int]]) -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        measuring.measure_at_first_use(bt.BTT().chain(64, 64), on_gpu(64, 64))
    assert measured
    assert torch.equal(torch.get_rng_state(), before)


def test_without_memory_a_layer_is_named_and_left_to_bmm(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(*_: Any) -> Row:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measuring, "measure_layer", out_of_memory)
    monkeypatch.setattr(speeds, "MEASURES_ON_FIRST_USE", True)
    assert ops.fastest(bt.BTT().chain(64, 96), on_gpu(64, 64)) == "bmm"
    assert "a layer of 64 -> 96 was not measured: no memory is left for it" in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_a_layer_is_measured_at_its_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, for which the package has no speeds."""
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(speeds, "MEASURES_ON_FIRST_USE", True)
    monkeypatch.setattr(measuring, "used_layers", set())
    speeds.clear_caches()
    name = torch.cuda.get_device_name()
    before = len(speeds.table(name))
    layer = bt.StructuredLinear(512, 512, bt.BTT(rank=2), device="cuda")
    x = torch.randn(1500, 512, device="cuda")
    state = torch.cuda.get_rng_state()
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    rows = speeds.table(name)
    speeds.clear_caches()
    assert len(rows) == before + 1
    assert rows[-1].tokens == 1024
    assert set(rows[-1].times) == {"bmm", "triton"}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Emulated kernels, of which every second one is faster: the times that were measured."""
    emulate(monkeypatch, tmp_path)
    times: list[float] = []

    def sample(function: Any, device: torch.device, seconds: float) -> measuring.Sample:
        times.append(3.0 - len(times) % 2)
        return measuring.Sample(times[-1], 0.0)

    monkeypatch.setattr(measuring, "graph_sample_ms", sample)
    return times


def test_options_of_the_on_chip_kernels_are_the_fastest_that_fit(timed: list[float]) -> None:
    chain = bt.BTT(rank=2).chain(32, 48)
    sizes = on_chip_sizes(layouts_of(chain).strided)
    best = measuring.tune_on_chip(chain, torch.randn(20, 32).half(), candidates=2)
    assert timed == [3.0, 2.0] * 3, "two options for each of three passes, of which the second is the faster one"
    assert best.forward == list(islice(apply_candidates(sizes), 2))[1]
    assert best.input_gradient == list(islice(apply_candidates(sizes.transposed), 2))[1]
    assert best.weight_gradients == list(islice(gradient_candidates(sizes), 2))[1]


def test_only_options_that_fit_the_gpu_are_tried(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ApplyOptions | GradientOptions] = []
    for name in ("apply", "weight_gradients"):
        run = getattr(measuring.on_chip_launches, name)

        def recorded(sizes: PairSizes, options: Any, *args: Any, run: Any = run, **kwargs: Any) -> Any:
            tried.append(options)
            assert options.fits(sizes, 12_000)
            return run(sizes, options, *args, **kwargs)

        monkeypatch.setattr(measuring.on_chip_launches, name, recorded)
    monkeypatch.setattr(measuring.on_chip_launches, "shared_limit", lambda _: 12_000)
    chain = bt.BTT(rank=2).chain(32, 48)
    sizes = on_chip_sizes(layouts_of(chain).strided)
    firsts = [next(c(s)) for c, s in ((apply_candidates, sizes), (apply_candidates, sizes.transposed))]
    assert not any(o.fits(s, 12_000) for o, s in zip(firsts, (sizes, sizes.transposed), strict=True))
    measuring.tune_on_chip(chain, torch.randn(20, 32).half(), candidates=1)
    assert len(tried) == 3


Milliseconds = Callable[[OnChip | None], float]


@pytest.fixture
def on_chip_only(monkeypatch: pytest.MonkeyPatch) -> OnChip:
    """Options of all passes that fit; nothing is compiled."""
    sizes = on_chip_sizes(layouts_of(bt.BTT(rank=2).chain(32, 48)).strided)
    options = OnChip(
        next(apply_candidates(sizes)), next(apply_candidates(sizes.transposed)), next(gradient_candidates(sizes))
    )
    monkeypatch.setattr(measuring, "tune_on_chip", lambda chain, x: options)
    return options


def tuned_with(monkeypatch: pytest.MonkeyPatch, step: Milliseconds, frozen: Milliseconds) -> OnChip | None:
    """The choice of `tune` where a training step and one with frozen factors take these times."""
    learns: list[bool] = []
    current: list[Tuning] = []
    real = ops.apply

    @contextmanager
    def tuned(tuning: Tuning) -> Iterator[None]:
        current.append(tuning)
        yield
        current.pop()

    def apply(chain: bt.Chain, x: torch.Tensor, factors: Any, **_: Any) -> torch.Tensor:
        learns.append(factors[0].requires_grad)
        return real(chain, x, factors, impl="bmm")

    def sample(function: Any, device: torch.device, seconds: float) -> measuring.Sample:
        function()
        times = step if learns[-1] else frozen
        return measuring.Sample(times(current[-1].on_chip), 0.0)

    monkeypatch.setattr(measuring, "tuned", tuned)
    monkeypatch.setattr(measuring.ops, "apply", apply)
    monkeypatch.setattr(measuring, "graph_sample_ms", sample)
    chain = bt.BTT(rank=2).chain(32, 48)
    factors = [torch.randn(f.shape, requires_grad=True, dtype=torch.float16) for f in chain.factors]
    return measuring.tune(chain, torch.randn(20, 32).half(), factors).on_chip


def test_a_training_step_that_is_faster_decides(monkeypatch: pytest.MonkeyPatch, on_chip_only: OnChip) -> None:
    def step(o: OnChip | None) -> float:
        return 5.0 if o is None else 4.0 - bool(o.forward) + 2 * bool(o.input_gradient)

    assert tuned_with(monkeypatch, step, lambda _: 1.0) == replace(on_chip_only, input_gradient=None)


def test_passes_without_gradients_of_the_weights_are_chosen_by_themselves(
    monkeypatch: pytest.MonkeyPatch, on_chip_only: OnChip
) -> None:
    def frozen(o: OnChip | None) -> float:
        assert o is None or o.weight_gradients is None
        return 5.0 if o is None else 5.0 - bool(o.forward) + bool(o.input_gradient)

    choice = tuned_with(monkeypatch, lambda o: 1.0 if o is None else 2.0, frozen)
    assert choice == OnChip(forward=on_chip_only.forward)
    assert tuned_with(monkeypatch, lambda o: 1.0 if o is None else 2.0, lambda o: 1.0 if o is None else 2.0) is None


@pytest.mark.parametrize("change", [lambda y: y + 1, lambda y: y * float("nan")], ids=["another", "NaN"])
def test_options_that_are_wrong_on_this_gpu_are_not_used(
    timed: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    chain = bt.BTT(rank=2).chain(32, 48)
    apply = measuring.on_chip_launches.apply
    wrong = list(islice(apply_candidates(on_chip_sizes(layouts_of(chain).strided)), 2))[1]

    def broken(sizes: PairSizes, options: ApplyOptions, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = apply(sizes, options, *args, **kwargs)
        return change(y) if options == wrong and not kwargs else y

    monkeypatch.setattr(measuring.on_chip_launches, "apply", broken)
    best = measuring.tune_on_chip(chain, torch.randn(20, 32).half(), candidates=2)
    assert best.forward == next(apply_candidates(on_chip_sizes(layouts_of(chain).strided)))
    assert "wrong numbers" in caplog.text


def test_options_that_the_gpu_refuses_are_not_used(
    timed: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise bt.ButtressError("cuda:0 does not load this")

    monkeypatch.setattr(measuring.on_chip_launches, "apply", refused)
    options = measuring.tune_on_chip(bt.BTT(rank=2).chain(32, 48), torch.randn(20, 32).half(), candidates=2)
    assert options.forward is None
    assert options.weight_gradients is not None
    assert "does not load this" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_options_where_the_on_chip_kernels_cannot_run(dtype: torch.dtype) -> None:
    assert measuring.tune_on_chip(bt.BTT().chain(32, 32), torch.randn(4, 32).to(dtype)) == OnChip()
