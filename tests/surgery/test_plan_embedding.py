"""Plans with embeddings and tied heads."""

from __future__ import annotations

import json

import pytest
import torch

import buttress as bt
from embedding_models import FULL, IDS, Net, both, kinds, shared, tied_net


@pytest.mark.parametrize("build", [Net, tied_net])
@both
def test_plan_round_trip(build, normalize: bool) -> None:
    model = build()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "places": bt.Kronecker(), "head": bt.BTT(rank=2)}, normalize=normalize)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    plan = bt.Plan.of(model)
    text = plan.to_json()
    assert bt.Plan.from_json(text) == plan
    with torch.device("meta"):
        fresh = Net()  # not tied: the plan says so where it is
    bt.Plan.from_json(text).apply_(fresh)
    assert all(p.is_meta for p in fresh.parameters())
    assert shared(fresh) == (build is tied_net)
    fresh.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(fresh(IDS), model(IDS), rtol=0, atol=0)
    assert bt.Plan.of(fresh).entries[0].std == model.embed.std
    other = build()
    bt.Plan.from_json(text).apply_(other)
    assert bt.Plan.of(other) == plan
    assert other.embed.std == model.embed.std


def test_an_untied_plan_is_followed_to_the_letter() -> None:
    model = Net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    other = tied_net()
    bt.Plan.of(model).apply_(other)
    assert not shared(other)


def test_a_plan_from_before_there_were_embeddings() -> None:
    model = Net()
    bt.replace_(model, {"mix": bt.BTT()})
    data = json.loads(bt.Plan.of(model).to_json())
    for row in data["layers"]:
        del row["std"], row["tied"]
    assert bt.Plan.from_json(json.dumps(data)) == bt.Plan.of(model)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("head", {"tied": "nowhere"}, "ties 'head' to 'nowhere'"),
        ("head", {"tied": "head"}, "ties 'head' to 'head'"),
        ("head", {"tied": "mix"}, "ties 'head' to 'mix'|head: only modules of one structure, size"),
        ("head", {"structure": "btt(rank=3)"}, "head: only modules of one structure, size"),
        ("head", {"normalize": True}, "head: only modules of one structure, size"),
        ("embed", {"std": -1}, "'embed': std must be a number >= 0"),
        ("embed", {"std": "wide"}, "cannot be read"),
        ("places", {"split": [4, 4]}, "places: the plan splits it, which is for fused linear layers"),
        ("embed", {"split": [50, 47]}, "ties 'head' to 'embed': both must be whole layers"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(name: str, change: dict, says: str) -> None:
    model = tied_net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "places": bt.BTT(), "mix": bt.BTT(), "head": bt.BTT(rank=2)})
    data = json.loads(bt.Plan.of(model).to_json())
    next(row for row in data["layers"] if row["name"] == name).update(change)
    fresh = Net()
    with pytest.raises(bt.PlanError, match=says):
        bt.Plan.from_json(json.dumps(data)).apply_(fresh)
    assert kinds(fresh) == kinds(Net())


def test_a_tied_plan_is_not_projected_onto_weights_that_differ() -> None:
    model = tied_net()
    bt.replace_(model, {"embed": FULL, "head": FULL})
    plan = bt.Plan.of(model)
    apart = Net()
    with pytest.raises(bt.PlanError, match=r"head: the plan ties it to embed, but their weights differ"):
        plan.apply_(apart, init="project")
    assert kinds(apart) == kinds(Net())
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    expected = apart(IDS)
    plan.apply_(apart, init="project")
    torch.testing.assert_close(apart(IDS), expected, rtol=1e-4, atol=1e-4)
