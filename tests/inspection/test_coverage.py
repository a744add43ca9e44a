"""What share of a model a plan reaches, each parameter counted once."""

from __future__ import annotations

import torch
from torch import nn

import buttress as bt
from buttress.inspection.coverage import coverage
from buttress.inspection.sites import find_sites
from surgery_models import Net, encoder_net, size


def covered(model: nn.Module, *replaced: str, kept: dict[str, str] | None = None):
    return coverage(model, find_sites(model, embeddings=True), replaced, kept or {})


def test_sites_that_stay_have_the_reason_given_or_are_not_named_by_the_plan() -> None:
    result = covered(Net(), "mlp.0", kept={"head": "output head"})
    reasons = {u.name: u.reason for u in result.unreached}
    assert reasons["head"] == "output head"
    assert reasons["mlp.2"] == "not named by the plan"
    assert reasons["embed"] == "embedding, not named by the plan"
    assert "mlp.0" not in reasons


def test_reached_and_unreached_add_up_to_the_model() -> None:
    model = encoder_net()
    vectors = sum(p.numel() for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    for replaced in ((), ("1",), ("0.self_attn.q_proj", "0.linear1"), ("0.self_attn.out_proj",)):
        result = covered(model, *replaced)
        assert result.params_reached + sum(u.params for u in result.unreached) + vectors == size(model)


def test_a_tied_weight_is_counted_once_and_not_reached_while_one_of_its_layers_stays() -> None:
    model = Net(tied=True)
    result = covered(model, "head")
    assert result.params_reached == 0
    assert {u.name: u.params for u in result.unreached}["embed"] == model.embed.weight.numel()
    both = covered(model, "head", "embed")
    assert both.params_reached == model.embed.weight.numel()
    neither = {u.name: u.params for u in covered(model).unreached}
    assert (neither["embed"], neither["head"]) == (model.embed.weight.numel(), 0)


def test_attention_that_shares_its_packed_weight_is_counted_once() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    assert sum(u.params for u in covered(model).unreached) == size(model)


def test_a_lazy_layer_counts_nothing() -> None:
    assert [u.params for u in covered(nn.Sequential(nn.LazyLinear(4))).unreached] == [0]


def test_quantized_weights_outside_of_parameters_count_in_the_share() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features = self.out_features = 16
            self.register_buffer("qweight", torch.zeros(2, 16, dtype=torch.int32))

    model = nn.Sequential(Packed(), nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    report = bt.replace_(model, {"1": bt.BTT()})
    assert {u.name: u.params for u in report.unreached} == {"0": 256, "2": 256}
    assert report.share_reached == 1 / 3


def test_layers_that_are_structured_already_are_named() -> None:
    model = Net()
    bt.replace_(model, {"blocks.0.*": bt.BTT()}, split={"blocks.0.qkv": 3})
    report = bt.replace_(model, bt.BTT(), dry_run=True)
    before = {u.name: (u.kind, u.params) for u in report.unreached if u.reason == "structured already"}
    assert before == {
        name: (kind, size(model.get_submodule(name)))
        for name, kind in (("blocks.0.qkv", "SplitLinear"), ("blocks.0.out", "StructuredLinear"))
    }
