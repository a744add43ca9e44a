"""Timing on the CPU; on a GPU, that a row is complete and that the fastest launch options are those of a candidate."""

from __future__ import annotations

import time

import pytest
import torch

import buttress as bt
from buttress.ops import measuring
from buttress.ops.layouts import layouts_of
from buttress.ops.speeds import Times
from buttress.ops.tuning import BACKWARD_CANDIDATES, FORWARD_CANDIDATES

CPU = torch.device("cpu")


def test_the_median_is_in_milliseconds() -> None:
    calls = []

    def wait() -> None:
        calls.append(None)
        time.sleep(0.002)

    assert 2.0 <= measuring.time_ms(wait, CPU, seconds=0.01) < 50.0
    assert len(calls) >= 4, "one call to warm up, three at least to measure"
    assert 2.0 <= measuring.graph_time_ms(wait, CPU, seconds=0.001) < 50.0


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
