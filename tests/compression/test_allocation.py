"""Curves and budgets: what options cost and lose, and which are chosen."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import buttress as bt
from buttress.compression import layer_options
from buttress.compression.allocation import allocate
from buttress.compression.layer_options import Choice
from shared_inputs import net


def net_answer(x: Tensor) -> Tensor:
    model = net()
    with torch.no_grad():
        model.head.weight[:, 5:] = 0
    return model(x).detach()


class TestChoice:
    def test_it_carries_the_structure(self) -> None:
        choice = Choice("layer", "btt(rank=2)", 10, 5, 0.1, bt.BTT(rank=2))
        assert choice == Choice("layer", "btt(rank=2)", 10, 5, 0.1), "the text is enough"
        assert choice.replacement == Choice("layer", "btt(rank=2)", 10, 5, 0.1).replacement == bt.BTT(rank=2)
        assert dataclasses.replace(choice, loss=0.2).replacement is choice.replacement
        assert Choice("layer", "dense", 10, 10, 0.0).replacement is None
        assert Choice("layer", "dense", 10, 10, 0.0, bt.Dense()).replacement is None, "it stays nn.Linear"
        with pytest.raises(bt.StructureError):
            Choice("layer", "bbt", 10, 5, 0.1)

    def test_texts_are_not_parsed_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(text: str) -> bt.Structure:
            raise AssertionError(text)

        monkeypatch.setattr(layer_options, "parse", refuse)
        x = torch.randn(64, 24)
        found = bt.budget(bt.curves(net(), candidates=[bt.BTT, "low_rank"], batches=[x]), 0.5)
        assert found.plan.entries
        assert all(r.replacement is None or str(r.replacement) == r.structure for r in found.rows)

    def test_the_table_shows_the_text_alone(self) -> None:
        head = str(bt.budget(bt.curves(net(), candidates=[bt.BTT(rank=2)]), 0.9)).splitlines()[0]
        assert [part.strip() for part in head.split("  ") if part.strip()] == [
            "name", "structure", "cost before", "cost after", "loss",
        ]  # fmt: skip


options = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 1)), min_size=1, max_size=4)


class TestBudget:
    @given(st.lists(options, min_size=1, max_size=4), st.floats(0.3, 1))
    @settings(deadline=None, derandomize=True, max_examples=200)
    def test_it_fits_and_is_near_the_best(self, layers: list[list[tuple[int, float]]], keep: float) -> None:
        """Against every combination. Greedy over hulls is at most one step of one layer behind."""
        found = {
            str(i): [
                Choice(str(i), "dense", 10, 10, 0.0),
                *(Choice(str(i), f"low_rank(rank={j + 1})", 10, c, e) for j, (c, e) in enumerate(o)),
            ]
            for i, o in enumerate(layers)
        }
        limit = keep * 10 * len(layers)
        every = [c for c in itertools.product(*found.values()) if sum(x.cost_after for x in c) <= limit + 1e-9]
        if not every:
            with pytest.raises(bt.PlanError, match=r"keep .* already"):
                allocate(found, keep)
            return
        chosen = allocate(found, keep).values()
        assert sum(c.cost_after for c in chosen) <= limit + 1e-6
        best = min(sum(x.loss for x in c) for c in every)
        assert sum(c.loss for c in chosen) <= best + max(c.loss for o in found.values() for c in o) + 1e-9
        if keep == 1:
            assert sum(c.loss for c in chosen) == 0

    @pytest.mark.parametrize(
        ("layers", "costs"),
        [
            # The second option of both layers saves most per cost; the third of one takes the same and saves less.
            ({"a": [(1, 0.10), (2, 0.04), (3, 0.03)], "b": [(1, 0.10), (2, 0.08), (3, 0.075)]}, [2, 2]),
            # Options above the hulls: the rest of the budget is enough for one of them.
            ({"a": [(1, 0.10), (3, 0.09)], "b": [(1, 0.10), (3, 0.09)]}, [3, 1]),
        ],
        ids=["the hull", "the rest"],
    )
    def test_two_layers_share_a_budget(self, layers: dict[str, list[tuple[int, float]]], costs: list[int]) -> None:
        found = {
            name: [Choice(name, "dense", 10, 10, 0.0), *(Choice(name, f"low_rank(rank={c})", 10, c, e) for c, e in o)]
            for name, o in layers.items()
        }
        assert [c.cost_after for c in allocate(found, 0.2).values()] == costs

    def test_a_plan_for_a_model(self) -> None:
        model = net()
        found = bt.budget(bt.curves(model), 0.5)
        assert found.kept <= 0.5
        assert {r.name for r in found.rows} == {"first", "q", "k"}, "the head stays"
        report = bt.Plan.from_json(found.plan.to_json()).apply_(model, init="project")
        by_name = {r.name: r for r in found.rows}
        for row in report.rows:
            assert by_name[row.name].structure == row.structure
            assert by_name[row.name].loss == pytest.approx(row.projection_error**2, rel=1e-4, abs=1e-6)
        assert "keeps" in str(found)

    def test_layers_that_are_easy_pay_for_those_that_are_not(self) -> None:
        model = net()
        with torch.no_grad():
            model.q.weight.copy_(torch.outer(torch.randn(30), torch.randn(36)))
        rows = {r.name: r for r in bt.budget(bt.curves(model, candidates=[bt.LowRank], levels=20), 0.7).rows}
        assert rows["q"].structure == "low_rank(rank=1)"
        assert rows["k"].cost_after / rows["k"].cost_before > 0.7

    def test_a_mix_is_no_worse_than_any_one_structure(self) -> None:
        kinds = ["low_rank", "btt", "monarch"]
        alone = [sum(r.loss for r in bt.budget(bt.curves(net(), candidates=[kind]), 0.4).rows) for kind in kinds]
        mixed = bt.budget(bt.curves(net(), candidates=kinds), 0.4)
        assert sum(r.loss for r in mixed.rows) <= min(alone) * 1.02

    def test_other_costs_and_choices(self) -> None:
        model = net()
        seen: list[str] = []
        by_params = bt.curves(
            model,
            cost="params",
            candidates=[bt.BTT(rank=2), "low_rank(rank=3)"],
            layers={"first": True, "*": False},
            watch=lambda name, i, n: seen.append(name),
        )
        assert list(by_params) == seen == ["first"]
        assert {c.structure for c in by_params["first"]} == {"dense", "btt(rank=2)", "low_rank(rank=3)"}
        free = bt.budget(bt.curves(model, cost=lambda s, i, o: 1.0 if s is None else 2.0), 1.0)
        assert all(r.structure == "dense" for r in free.rows)
        assert free.plan.entries == ()

    def test_losses_as_the_answer_shows_them(self) -> None:
        """A layer whose outputs are hardly used may lose them."""
        model = net()
        with torch.no_grad():
            model.head.weight[:, 5:] = 0
        data = [torch.randn(64, 24), torch.randn(64, 24)]
        known = bt.moments(model, data)
        before = model(data[0])
        plain, scaled = (bt.curves(model, moments=known, batches=some) for some in ([], data))
        assert torch.equal(model(data[0]), before), "the model is as it was"
        assert model.training
        for name in plain:
            ratios = [b.loss / a.loss for a, b in zip(plain[name], scaled[name], strict=True) if a.loss > 0]
            assert max(ratios) == pytest.approx(min(ratios)), "one scale for a layer"
        # For one option the scaled loss is what the answer loses when it alone is taken.
        option = min((c for c in plain["q"] if c.loss > 0), key=lambda c: abs(c.loss - 0.05))
        scale = next(b.loss / a.loss for a, b in zip(plain["q"], scaled["q"], strict=True) if a.loss > 0)
        report = bt.replace_(model, {"q": bt.parse(option.structure)}, init="project", moments=known, sweeps=2)
        lost = [((model(x) - net_answer(x)).square().mean() / net_answer(x).square().mean()).item() for x in data]
        assert sum(lost) / 2 / report.rows[0].output_error ** 2 == pytest.approx(scale, rel=0.05)

    def test_levels_thin_out_a_family(self) -> None:
        for levels in (2, 5, 10):
            options = bt.curves(net(), candidates=["low_rank"], levels=levels, layers={"first": True})["first"]
            assert 2 <= len(options) <= levels + 1
            assert all(c.cost_after <= c.cost_before for c in options)

    def test_what_cannot_be_is_told(self) -> None:
        options = bt.curves(net(), candidates=[bt.Monarch(2)])
        with pytest.raises(bt.PlanError, match="above 0 and at most 1"):
            bt.budget(options, 0)
        with pytest.raises(bt.PlanError, match=r"keep \d+.\d% already"):
            bt.budget(options, 0.05)
        with pytest.raises(bt.PlanError, match="cost is"):
            bt.curves(net(), cost="time")  # type: ignore[arg-type]


def test_time_as_a_cost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 8, bias=False))
    price = bt.timed(32768, device="NVIDIA H200")
    assert price(bt.BTT(), 4096, 4096) < price(None, 4096, 4096) / 5
    assert price(bt.BTT(rank=63), 4096, 4096) == float("inf"), "it was not measured"
    assert bt.timed(64, device="NVIDIA H200")(None, 4096, 4096) > 0, "measured next to BTT alone"
    found = bt.curves(model, cost=price, candidates=[bt.BTT(), bt.BTT(rank=63)])["0"]
    assert [c.structure for c in found] == ["dense", "btt"]
    with pytest.raises(bt.ButtressError, match="nothing near"):
        price(None, 3, 5)


def test_time_measured_now() -> None:
    """A layer with a 64th of the MACs takes less than half of the time, also on a busy machine."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 8))
    dense, diagonal = bt.curves(model, cost=bt.timed(64, device="cpu"), candidates=[bt.BlockDiagonal(64)])["0"]
    assert (dense.structure, diagonal.structure) == ("dense", "block_diagonal(blocks=64)")
    assert dense.cost_after == dense.cost_before == diagonal.cost_before
    assert 0 < diagonal.cost_after < dense.cost_after / 2


@pytest.mark.gpu
def test_time_measured_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 8, bias=False)).cuda()
    found = bt.curves(model, cost=bt.timed(16384, device="cuda"), candidates=[bt.BTT()])["0"]
    assert [c.structure for c in found] == ["dense", "btt"]
    assert found[1].cost_after < found[1].cost_before / 2


@pytest.mark.parametrize("name", list(bt.structures()))
def test_families_grow(name: str) -> None:
    """None is refused by projection for its rank, and there is one that costs less than dense if anything can."""
    for d_in, d_out in ((24, 36), (64, 64), (13, 7), (1, 1)):
        members = list(bt.structures()[name].family(d_in, d_out))
        costs = [m.chain(d_in, d_out).macs for m in members]
        assert len(set(members)) == len(members)
        assert not members or d_in < 20 or min(costs) < d_in * d_out
        for member in members:
            bt.project(member, torch.randn(d_out, d_in))


@pytest.mark.parametrize("structure", [bt.LowRank, bt.TensorTrain, bt.BTT])
@pytest.mark.parametrize("sizes", [(64, 64), (64, 16)], ids=str)
def test_families_reach_any_matrix(structure: type[bt.Structure], sizes: tuple[int, int]) -> None:
    """Of the structures with a rank, the last of a family is exact, and the one before it is not."""
    weight = torch.randn(*sizes, dtype=torch.float64)
    *_, below, top = structure.family(sizes[1], sizes[0])
    assert bt.project(below, weight).relative_error > 1e-4
    assert bt.project(top, weight).relative_error < 1e-10


@pytest.mark.parametrize("single", ["low_rank", "low_rank(rank=2)", bt.LowRank(rank=2), bt.LowRank], ids=str)
def test_a_single_candidate_is_a_list_of_one(single: layer_options.Candidate) -> None:
    expected = bt.curves(net(), candidates=[single])
    assert bt.curves(net(), candidates=single) == expected == bt.curves(net(), candidates=iter([single]))
    assert all(len(choices) > 1 for choices in expected.values())
    assert [bt.CompressOptions(candidates=c).to_row()["candidates"] for c in (single, iter([single]))] == [
        [single.name if isinstance(single, type) else str(single)]
    ] * 2


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (["bt"], "'bt' is not a structure: there are .*; did you mean 'btt'"),
        ("bt", "'bt' is not a structure: there are .*; did you mean 'btt'"),
        (["btt", "btt(rank=0)"], "rank must be an integer >= 1, got 0"),
        ([3], "a candidate is a Structure, its text or a class of them, got 3"),
        ([int], "a candidate is a Structure, its text or a class of them, got <class 'int'>"),
    ],
    ids=str,
)
def test_what_names_no_candidate_raises_before_anything_is_compared(candidates: object, message: str) -> None:
    watched: list[str] = []
    for function in (lambda c: bt.curves(net(), candidates=c, watch=watched.append), as_options):
        with pytest.raises(bt.StructureError, match=message):
            function(candidates)
    assert not watched


def as_options(candidates: object) -> bt.CompressOptions:
    return bt.CompressOptions(candidates=candidates)  # type: ignore[arg-type]


def test_no_candidate_at_all() -> None:
    for function in (lambda c: bt.curves(net(), candidates=c), as_options):
        with pytest.raises(bt.PlanError, match="there is nothing to choose from"):
            function([])
