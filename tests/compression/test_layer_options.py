"""The options of one layer: which are compared, and what each costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import buttress as bt
from buttress.compression import layer_options
from buttress.compression.layer_options import cost_function, is_below_hull, thinned
from buttress.costs import advice, layer_times
from shared_inputs import net


def test_costs_by_hand() -> None:
    """Tensor-Train uses its 512 parameters eight times each."""
    train = bt.TensorTrain(rank=4)
    for measure, expected in (("macs", 4096), ("params", 512)):
        assert cost_function(measure)(train, 64, 64) == expected  # type: ignore[arg-type]
        assert cost_function(measure)(None, 64, 32) == 64 * 32  # type: ignore[arg-type]


@pytest.mark.parametrize(("levels", "expected"), [(1, [9]), (2, [5, 9]), (4, [2, 5, 7, 9])])
def test_the_costliest_member_below_each_level_is_kept(levels: int, expected: list[int]) -> None:
    costs = {bt.LowRank(rank=rank): 10.0 * rank for rank in range(1, 10)}
    assert thinned(costs, 100.0, levels) == [bt.LowRank(rank=rank) for rank in expected]


def test_families_with_sharing_are_compared_only_if_they_are_named() -> None:
    layers = {"first": True}
    compared = [c.replacement for c in bt.curves(net(), layers=layers)["first"] if c.replacement is not None]
    assert {type(s) for s in compared} >= {bt.BTT, bt.LowRank, bt.Monarch}
    assert not any(s.chain(24, 36).shares_parameters for s in compared)
    named = bt.curves(net(), layers=layers, candidates=[bt.TensorTrain])["first"]
    assert any(c.structure.startswith("tensor_train") for c in named)


def test_what_costs_as_much_as_dense_is_no_option() -> None:
    """A rank of 14 takes 14 * 60 = 840 MACs, one of 15 takes 900, and the dense layer 24 * 36 = 864."""
    candidates = [bt.LowRank(rank=14), bt.LowRank(rank=15), bt.Dense()]
    found = bt.curves(net(), layers={"first": True}, candidates=candidates)["first"]
    assert [(c.structure, c.cost_after) for c in found] == [("dense", 864), ("low_rank(rank=14)", 840)]


def test_a_layer_that_cannot_be_compared_is_named() -> None:
    model = net()
    with torch.no_grad():
        model.q.weight[0, 0] = float("nan")
    with pytest.raises(bt.ShapeError, match=r"^q: project needs finite numbers, but the weight holds NaN or infinity"):
        bt.curves(model, candidates=["low_rank(rank=1)"])


def test_members_before_one_that_fails_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    original, drafted = layer_options.draft, list[str]()

    def failing(member: Any, target: Any) -> Any:
        drafted.append(str(member))
        if len(drafted) == 3:
            raise ValueError("not this one")
        return original(member, target)

    monkeypatch.setattr(layer_options, "draft", failing)
    found = bt.curves(net(), layers={"first": True}, candidates=[bt.LowRank])
    assert [choice.structure for choice in found["first"]] == ["dense", *drafted[:2]]
    assert found.refused == {"first": {"low_rank": "not this one"}}


class TestCosts:
    def test_bytes_are_parameters_times_the_size_of_a_number(self) -> None:
        price = cost_function("bytes", dtype=torch.bfloat16)
        assert price(None, 64, 32) == 2 * 64 * 32
        assert price(bt.TensorTrain(rank=4), 64, 64) == 2 * 512

    @pytest.mark.parametrize(("cost", "tokens"), [("decode_ms", 1), ("prefill_ms", 2048)])
    def test_times_are_measured_once_for_each_structure_and_size(
        self, cost: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured: list[tuple[str, int, int, int]] = []
        original = layer_times.layer_timings

        def counted(device: Any, candidates: Any, layer: Any, progress: Any = None) -> Any:
            measured.extend((str(c), layer.d_in, layer.d_out, layer.tokens) for c in candidates)
            return original(device, candidates, layer, progress)

        monkeypatch.setattr(advice, "layer_timings", counted)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        candidates = ["low_rank(rank=2)", "btt(rank=1)"]
        options = bt.curves(model, cost=cost, layers={"*": True}, candidates=candidates)
        assert len(measured) == len(set(measured))
        assert {m[1:] for m in measured} == {(16, 16, tokens)}
        assert options["0"][0].cost_before == options["2"][0].cost_before > 0

    def test_an_unknown_measure_names_the_known_ones(self) -> None:
        with pytest.raises(bt.PlanError, match=r"cost is 'macs', .*'prefill_ms' or a function, got 'joules'"):
            cost_function("joules")  # type: ignore[arg-type]


class TestRefining:
    """Options that cannot come near the hull stay drafts; the others have the losses of full refinement."""

    def layer(self, decay: float) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        linear = torch.nn.Linear(48, 36, bias=False)
        u, v = (torch.linalg.qr(torch.randn(48, 48, generator=generator)).Q for _ in range(2))
        with torch.no_grad():
            linear.weight.copy_(((u * decay ** torch.arange(48)) @ v)[:36])
        x = torch.randn(400, 48, generator=generator) * torch.linspace(0.2, 2, 48)
        return torch.nn.Sequential(linear), x.mT @ x / 400

    @pytest.mark.parametrize("decay", [1.0, 0.97, 0.9])
    def test_plans_are_as_good_as_with_all_options_refined(self, decay: float) -> None:
        model, moments = self.layer(decay)
        fast = bt.curves(model, moments={"0": moments}, layers={"0": True})
        weight = model[0].weight.detach()
        full = {
            "0": [
                replace(c, loss=bt.project(c.replacement, weight, moments=moments, sweeps=2).output_error ** 2)
                if c.replacement is not None
                else c
                for c in fast["0"]
            ]
        }
        losses = {c.structure: c.loss for c in full["0"]}  # a chosen draft is refined afterwards
        for keep in (0.15, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9):
            chosen, best = (bt.budget(options, keep).rows[0] for options in (fast, full))
            assert losses[chosen.structure] <= 1.02 * best.loss + 1e-9, (keep, chosen, best)
        assert all(f.loss >= (1 - 1e-4) * c.loss - 1e-9 for f, c in zip(fast["0"], full["0"], strict=True))

    def test_far_options_are_not_refined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = {}
        for slack in (layer_options.SLACK, 0.0):
            refined: list[int] = []
            original = layer_options.refined
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layer_options, "SLACK", slack)
                patch.setattr(layer_options, "refined", lambda d, t, n: refined.append(n) or original(d, t, n))  # noqa: B023
                model, moments = self.layer(0.9)
                bt.curves(model, moments={"0": moments}, layers={"0": True})
            counts[slack] = len(refined)
        assert counts[layer_options.SLACK] < 0.6 * counts[0.0]

    def test_hulls(self) -> None:
        others = [(0.0, 1.0), (1.0, 0.0)]
        assert is_below_hull((0.5, 0.4), others)
        assert not is_below_hull((0.5, 0.6), others)
        assert not is_below_hull((0.5, 0.4), [*others, (0.4, 0.3)])
        assert is_below_hull((-1.0, 5.0), others)
