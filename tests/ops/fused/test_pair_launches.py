"""Both factors in one launch: for few tokens, and what happens where the driver refuses a cooperative launch."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in triton")

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.fused import kernels, launches, pair_launches
from buttress.ops.fused.launches import Launch
from buttress.ops.fused.pair_launches import report_refused_launch
from buttress.ops.tuning import Forward, Tuning
from kernel_cases import DEVICE, GPU, LIMIT, check, poison_new_buffers, relative
from processes import ENV, HERE

TOO_LARGE = "Triton Error [CUDA]: too many blocks in cooperative launch"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Errors of the driver, which the next cooperative launches raise; each launch takes one from the end."""
    errors: list[str] = []
    launch = Launch.__call__

    def call(self: Launch, programs: int, *args: Any) -> None:
        if self.kernel is kernels.forward_pair and errors:
            raise RuntimeError(errors.pop())
        launch(self, programs, *args)

    monkeypatch.setattr(Launch, "__call__", call)
    report_refused_launch.cache_clear()
    yield errors
    report_refused_launch.cache_clear()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("buttress")]


def test_a_refused_launch_falls_back_with_the_same_result(refused: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for d_out in (22, 26):
            refused[:] = [TOO_LARGE] * (2 if GPU else 1)  # a GPU has one more launch, which keeps no intermediate
            check(bt.BTT(rank=2), 21, d_out, 70, scaled=True)
            assert not refused
    (message,) = messages(caplog)
    assert "two launches instead, with the same result" in message
    assert "\n" not in message


def test_a_refused_pair_is_not_tried_again(refused: list[str], caplog: pytest.LogCaptureFixture) -> None:
    chain = bt.BTT(rank=2).chain(21, 34)
    x = torch.randn(70, 21, device=DEVICE)
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    refused[:] = [TOO_LARGE] * 2
    runs = [ops.apply(chain, x, factors, impl="triton") for _ in range(3)]
    assert len(refused) == 1, "the first call alone tried"
    assert all(torch.equal(y, runs[0]) for y in runs)


def test_other_errors_of_the_driver_are_not_hidden(refused: list[str]) -> None:
    refused[:] = ["Triton Error [CUDA]: an illegal memory access was encountered"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check(bt.BTT(rank=2), 21, 38, 70)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of the kernel for few tokens."""
    launched: list[Launch] = []
    launch = Launch.__call__

    def call(self: Launch, programs: int, *args: Any) -> None:
        if self.kernel is kernels.decode_pair:
            launched.append(self)
        launch(self, programs, *args)

    monkeypatch.setattr(Launch, "__call__", call)
    poison_new_buffers(monkeypatch)
    return launched


@pytest.mark.parametrize("tokens", [1, 5, 35])
@pytest.mark.parametrize(
    ("structure", "d_in", "d_out"),
    [
        (bt.BTT(rank=3), 67, 71),  # padded to 70 = 10 × 7 and 72 = 8 × 9
        (bt.BTT(rank=8), 67, 64),  # more inputs of a second block than are read at a time
        (bt.TensorTrain(rank=2), 67, 71),  # both weights are shared
        (bt.Monarch(8), 64, 556),  # more outputs of a second block than a program has
    ],
    ids=str,
)
def test_few_tokens(structure: bt.Structure, d_in: int, d_out: int, tokens: int, decoded: list[Launch]) -> None:
    check(structure, d_in, d_out, tokens, scaled=True)
    assert len(decoded) == 1, "the call with frozen operands alone"


def test_few_tokens_of_a_normalized_layer(decoded: list[Launch]) -> None:
    layer = bt.StructuredLinear(67, 71, bt.BTT(rank=2), normalize=True, device=DEVICE)
    layer.requires_grad_(False)
    for factor, gain, size in zip(layer.factors.values(), layer.gains.values(), (3.0, 0.5), strict=True):
        factor.mul_(size)  # the larger one is scaled down to its initial size
        gain.mul_(1.5 * size)
    x = torch.randn(3, 67, device=DEVICE)
    y = ops.apply(layer.chain, x, layer.stored_factors(), layer.bias, scales=layer.scales(), impl="triton")
    exact = x.double() @ layer.double().weight.T + layer.bias
    assert len(decoded) == 1
    assert relative(y, exact) < LIMIT[torch.float32]


@pytest.mark.parametrize(("tokens", "d_out", "launches"), [(64, 64, 1), (65, 64, 0), (64, 49, 0)])
def test_more_tokens_or_fewer_blocks_are_not_decoded(
    tokens: int, d_out: int, launches: int, decoded: list[Launch]
) -> None:
    check(bt.BTT(), 64, d_out, tokens)
    assert len(decoded) == launches


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("scenario", ["two_streams", "beside_spinning_kernels"])
    def test_cooperative_launches_end_whatever_else_runs(self, scenario: str) -> None:
        """In a process of its own: a deadlock is a failure after two minutes."""
        program = [sys.executable, str(HERE / "concurrent_launches.py"), scenario]
        done = subprocess.run(program, env=ENV, timeout=120, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    def test_a_grid_beyond_the_gpu_falls_back(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The estimate of how many programs are resident is made 64 times too high."""
        limits = launches.device_limits(torch.device("cuda", 0))
        too_high = replace(limits, multiprocessors=64 * limits.multiprocessors)
        monkeypatch.setattr(pair_launches, "device_limits", lambda device: too_high)
        report_refused_launch.cache_clear()
        with fused.tuned(Tuning(Forward(fuse=True))), caplog.at_level(logging.WARNING):
            check(bt.BTT(rank=2), 1008, 992, 40_000, torch.bfloat16)
        (message,) = messages(caplog)
        assert "two launches instead" in message


def test_few_tokens_without_gradients_of_weights_that_have_them(decoded: list[Launch]) -> None:
    chain = bt.BTT(rank=3).chain(67, 71)
    x = torch.randn(2, 67, device=DEVICE)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    exact = ops.apply(chain, x.double(), [f.double() for f in factors], impl="reference")
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            y = ops.apply(chain, x, factors, impl="triton")
        assert len(decoded) == 1, "only the call that needs no intermediates"
        assert (y.double() - exact).norm() < 1e-5 * exact.norm()
