"""match: the nearest width or rank, found with few models, and all of them on the meta device where counts suffice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import buttress as bt
from buttress.ops import measuring
from buttress.ops.measuring import Sample

X = torch.zeros(3, 64)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def brute_force(sizes: range, cost_at: Callable[[int], float], target: float) -> float:
    return min((cost_at(n) for n in sizes), key=lambda c: abs(c - target))


@cache
def structured_cost(width: int) -> bt.Cost:
    with torch.device("meta"):
        model = mlp(width)
        bt.replace_(model, bt.BTT(rank=2))
    return bt.cost(model, X.to("meta"))


@pytest.mark.parametrize("unit", ["macs", "params", "activation_bytes"])
def test_the_nearest_width_by_brute_force(unit: str) -> None:
    widths = range(32, 1025, 32)

    def cost_at(width: int) -> float:
        return getattr(structured_cost(width), unit)

    for dense in (100, 160, 256):
        target = getattr(bt.cost(mlp(dense), X), unit)
        matched = bt.match(mlp, bt.BTT(rank=2), widths=widths, example=X, **{unit: target})
        assert matched.cost == brute_force(widths, cost_at, target) == cost_at(matched.size)
        assert matched.relative_gap == matched.cost / target - 1
        assert len(matched.tried) <= 14  # of 32


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 200), st.integers(1, 60), st.data())
def test_the_nearest_of_any_increasing_costs(count: int, step: int, data: st.DataObject) -> None:
    calls: list[int] = []

    def build(width: int) -> nn.Module:
        calls.append(width)
        return nn.Linear(width, 1, bias=False)

    widths = range(step, step * count + 1, step)
    target = data.draw(st.integers(widths[0], widths[-1]))
    matched = bt.match(build, None, params=target, widths=widths)
    assert matched.cost == brute_force(widths, float, target)
    assert len(calls) == len(set(calls)) <= 2 + count.bit_length() + 2 * 3 + 1


def test_uneven_costs_do_not_hide_the_nearest() -> None:
    costs = {1: 10, 2: 20, 3: 41, 4: 38, 5: 35, 6: 45, 7: 60}  # 3 and 4 are out of order
    matched = bt.match(lambda n: nn.Linear(costs[n], 1, bias=False), None, params=40.5, widths=costs)
    assert matched.size == 3


def test_rank_at_a_given_width() -> None:
    matched = bt.match(
        lambda: mlp(256), lambda rank: {"2": bt.BTT(rank=rank)}, params=mlp(200), ranks=range(1, 17), example=X
    )
    counts = {rank: 64 * 256 + 256 + 2 * rank * 16**3 + 256 + 2570 for rank in range(1, 17)}
    assert matched.knob == "rank"
    assert matched.cost == brute_force(range(1, 17), counts.__getitem__, sum(p.numel() for p in mlp(200).parameters()))


def test_counts_build_on_the_meta_device() -> None:
    devices: list[torch.device] = []

    def build(width: int) -> nn.Module:
        devices.append(nn.Linear(1, 1).weight.device)
        return mlp(width)

    dense = mlp(128)
    bt.match(build, "btt", macs=dense, widths=range(64, 2049, 64), example=X)
    assert {d.type for d in devices} == {"meta"}
    assert {p.device.type for p in dense.parameters()} == {"cpu"}


def test_inputs_that_depend_on_the_width() -> None:
    matched = bt.match(
        lambda width: nn.Linear(width, width),
        None,
        macs=40_000,
        widths=range(50, 401, 50),
        example=lambda n: (X[0, :1].expand(n),),
    )
    assert matched.size == 200


def fake_clock(monkeypatch: pytest.MonkeyPatch, spread: float) -> list[int]:
    """Times that are proportional to the width, without running anything."""
    timed: list[int] = []

    def sample_ms(function: Callable[[], object], device: torch.device) -> Sample:
        function()
        timed.append(SEEN[-1])
        return Sample(SEEN[-1] / 100, spread)

    monkeypatch.setattr(measuring, "sample_ms", sample_ms)
    return timed


SEEN: list[int] = []


class Watched(nn.Linear):
    backward_passes = 0
    moved = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.out_features)
        assert x.device.type == self.weight.device.type == "cpu"
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(Watched.count)
        return y

    def to(self, *args: Any, **kwargs: Any) -> Watched:
        self.moved = True
        return super().to(*args, **kwargs)

    @staticmethod
    def count(_: torch.Tensor) -> None:
        Watched.backward_passes += 1


@pytest.mark.parametrize("training", [True, False])
def test_times_are_measured_where_bisection_needs_them(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    timed = fake_clock(monkeypatch, spread=0.01)
    monkeypatch.setattr(Watched, "backward_passes", 0)
    matched = bt.match(
        lambda n: Watched(64, n), None, ms=5.25, widths=range(16, 1025, 16), example=X, device="cpu", training=training
    )
    assert (matched.size, matched.cost, matched.undecided) == (528, 5.28, False)
    assert len(timed) == len(set(timed)) <= 8  # of 64: the ends, and six by halving
    assert Watched.backward_passes == (len(timed) if training else 0)


def test_times_of_a_model_and_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, spread=0.3)
    dense = Watched(64, 200)
    matched = bt.match(lambda n: Watched(64, n), None, ms=dense, widths=range(16, 513, 16), example=X, device="cpu")
    assert not dense.moved, "a copy is moved to where it is timed"
    assert (matched.target, matched.size) == (2.0, 192)
    assert matched.undecided
    assert "Undecided" in str(matched)


def test_real_times() -> None:
    matched = bt.match(mlp, "btt", ms=mlp(512), widths=[32, 4096], example=torch.zeros(64, 64), device="cpu")
    assert [c.size for c in matched.tried] == [32, 4096]
    assert all(c.cost > 0 for c in matched.tried)


def test_text() -> None:
    text = str(bt.match(mlp, "btt", macs=20_000, widths=range(64, 1025, 64), example=X[:1]))
    assert text.splitlines()[0].split() == ["width", "MACs"]
    assert text.splitlines()[-1].endswith("of the target of 20,000")
    assert "Undecided" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": [1]}, "needs one target, one of macs, params, activation_bytes, ms: got none"),
        ({"macs": 1, "ms": 1, "widths": [1]}, "got macs, ms"),
        ({"params": 1}, "needs one range, one of widths, ranks: got none"),
        ({"params": 1, "widths": [1], "ranks": [1]}, "got widths, ranks"),
        ({"params": 1, "widths": []}, "widths must be a list or range of at least one integer >= 1"),
        ({"params": 1, "widths": [0, 8]}, "widths must be a list or range of at least one integer >= 1"),
        ({"params": 1, "widths": 64}, "widths must be a list or range of at least one integer >= 1, got 64"),
        ({"params": 1, "widths": [8, "a"]}, "widths must be a list or range of at least one integer >= 1"),
        ({"params": -1, "widths": [8]}, "params must be a number above 0 or a model, got -1"),
        ({"params": float("nan"), "widths": [8]}, "number above 0"),
        ({"macs": 1, "widths": [8]}, "give example="),
        ({"params": 1, "ranks": [8]}, r"lambda rank: BTT\(rank=rank\)"),
        ({"macs": mlp(8), "widths": [8], "example": lambda n: X}, "give macs as a number"),
        (
            {"params": 10, "widths": range(64, 1025, 64)},
            "every width costs more than 10 params: the smallest, 64, costs",
        ),
        ({"params": 1e9, "widths": [64, 128]}, "every width costs less than 1,000,000,000 params: the largest, 128"),
    ],
)
def test_errors(arguments: dict, message: str) -> None:
    with pytest.raises(bt.ButtressError, match=message):
        bt.match(mlp, "btt", **arguments)
