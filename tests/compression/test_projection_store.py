"""Projections kept from choosing: the right ones, within the limit, finished to the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import buttress as bt
from buttress.compression.projection_store import ProjectionStore
from buttress.core.chain import Chain
from buttress.inspection.sites import find_sites
from buttress.projection import closed_form
from buttress.projection.closed_form import Draft, Target, draft, refined
from shared_inputs import net

WEIGHT = torch.randn(36, 24, generator=torch.Generator().manual_seed(0))
INPUTS = torch.randn(100, 24, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 2, 24)
MOMENTS = INPUTS.T @ INPUTS / 100


def start(structure: bt.Structure, sweeps: int = 2) -> Draft:
    target = Target.of(WEIGHT, MOMENTS)
    return refined(draft(structure, target), target, sweeps)


@pytest.mark.parametrize("structure", [bt.LowRank(rank=3), bt.BTT(rank=2), bt.Monarch(4)], ids=str)
@pytest.mark.parametrize("sweeps", [2, 4, 10])
def test_what_was_kept_is_finished_to_the_same_bits(structure: bt.Structure, sweeps: int) -> None:
    store = ProjectionStore()
    store.offer("layer", structure, 1.0, 0.5, start(structure))
    projection = store.finish("layer", structure, WEIGHT, MOMENTS, sweeps)
    expected = bt.project(structure, WEIGHT, moments=MOMENTS, sweeps=sweeps)
    assert projection is not None
    assert projection.output_error == expected.output_error
    assert projection.relative_error == expected.relative_error
    assert all(torch.equal(projection.factors[name], factor) for name, factor in expected.factors.items())
    assert store.nbytes == 0
    assert "layer" not in store


def test_fewer_sweeps_and_other_structures_are_not_kept() -> None:
    store = ProjectionStore()
    assert store.finish("layer", bt.BTT(), WEIGHT, MOMENTS, 4) is None
    store.offer("layer", bt.BTT(), 1.0, 0.5, start(bt.BTT()))
    assert store.finish("layer", bt.BTT(), WEIGHT, MOMENTS, 1) is None, "it has two sweeps already"
    store.offer("layer", bt.BTT(), 1.0, 0.5, start(bt.BTT()))
    assert store.finish("layer", bt.BTT(rank=2), WEIGHT, MOMENTS, 4) is None


def test_options_that_others_beat_are_dropped() -> None:
    store, options = ProjectionStore(), {rank: start(bt.LowRank(rank=rank)) for rank in (1, 2, 3, 4)}
    store.offer("layer", bt.LowRank(rank=2), 2.0, 0.5, options[2])
    store.offer("layer", bt.LowRank(rank=4), 4.0, 0.5, options[4])
    assert store.nbytes == options[2].nbytes, "dearer and no better"
    store.offer("layer", bt.LowRank(rank=3), 3.0, 0.3, options[3])
    assert store.nbytes == options[2].nbytes + options[3].nbytes
    store.offer("layer", bt.LowRank(rank=1), 1.0, 0.3, options[1])
    assert store.nbytes == options[1].nbytes, "cheaper and as good as both"


def test_the_limit_is_kept() -> None:
    first, second = start(bt.LowRank(rank=1)), start(bt.LowRank(rank=4))
    store = ProjectionStore(limit=first.nbytes + second.nbytes - 1)
    store.offer("a", bt.LowRank(rank=1), 1.0, 0.5, first)
    store.offer("b", bt.LowRank(rank=4), 4.0, 0.2, second)
    assert "a" in store
    assert "b" not in store
    assert store.nbytes <= store.limit


@pytest.mark.parametrize("batches", [False, True])
def test_a_chosen_plan_is_in_the_store(batches: bool) -> None:
    model, x = net(), torch.randn(64, 24)
    inputs = bt.moments(model, [x])
    store = ProjectionStore()
    options = bt.curves(model, moments=inputs, batches=[x] if batches else [], projections=store)
    plan = bt.budget(options, 0.6).plan
    sites = find_sites(model)
    projections = {
        e.name: store.finish(e.name, e.structure, sites[e.name].read().weight, inputs[e.name], 4) for e in plan.entries
    }
    assert plan.entries
    assert None not in projections.values()
    resumed, anew = net(), net()
    report = bt.replace_(resumed, plan, init="project", moments=inputs, sweeps=4, projections=projections)
    assert report == bt.replace_(anew, plan, init="project", moments=inputs, sweeps=4)
    for a, b in zip(resumed.parameters(), anew.parameters(), strict=True):
        assert torch.equal(a, b)


def test_factors_of_another_structure_are_refused() -> None:
    model = net()
    projection = bt.project(bt.BTT(rank=3), model.first.weight)
    with pytest.raises(bt.PlanError, match=r"first: the projection given for it has other factors than btt\(rank=2\)"):
        bt.replace_(model, {"first": bt.BTT(rank=2)}, init="project", projections={"first": projection})
    with pytest.raises(bt.PlanError, match="for init='project'"):
        bt.replace_(model, {"first": bt.BTT(rank=3)}, projections={"first": projection})


class TestPipeline:
    @pytest.fixture
    def projected(self, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, Chain]]:
        """How often each weight is projected onto each chain, whoever asks."""
        counts: Counter[tuple[int, Chain]] = Counter()
        original = closed_form.closed_form

        def counted(chain: Chain, target: Target) -> list[Tensor]:
            counts[target.weight.data_ptr(), chain] += 1
            return original(chain, target)

        monkeypatch.setattr(closed_form, "closed_form", counted)
        return counts

    def test_no_layer_is_projected_onto_a_structure_twice(
        self, gpt2: Path, text: Path, tmp_path: Path, projected: Counter[tuple[int, Chain]]
    ) -> None:
        outcome = bt.compress(gpt2, tmp_path / "m", 0.5, text=text, length=24)
        assert outcome.plan.entries
        assert set(projected.values()) == {1}
        projected.clear()
        bt.compress(gpt2, tmp_path / "again", text=text, length=24, plan=outcome.plan)
        assert sum(projected.values()) == len(outcome.plan.entries), "a plan that is given is projected once"
        a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "again"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), "resumed sweeps give the same bits"

    def test_it_is_the_same_where_nothing_can_be_kept(
        self, gpt2: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = bt.compress(gpt2, tmp_path / "kept", 0.5, text=text, length=24, candidates=["btt", "low_rank"])
        monkeypatch.setattr(ProjectionStore, "offer", lambda self, *option: None)
        again = bt.compress(gpt2, tmp_path / "not", 0.5, text=text, length=24, candidates=["btt", "low_rank"])
        assert again.report == kept.report
        assert again.quality == kept.quality
