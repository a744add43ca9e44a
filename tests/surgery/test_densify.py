"""densify_: the same outputs from the dense layers that were there before."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import BODY, PLANS, TOKENS, Net, assert_unchanged, conv1d_net, encoder_net, snapshot, structured


@pytest.mark.parametrize("which", PLANS)
def test_densify(which: str) -> None:
    plan, options = PLANS[which]
    model = Net().double()
    bt.replace_(model, plan, **options)
    expected = model(TOKENS)
    assert bt.densify_(model) is model
    assert not structured(model)
    torch.testing.assert_close(model(TOKENS), expected)
    fresh = Net().double()
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in fresh.state_dict().items()}
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(TOKENS), expected)
    assert {type(model.get_submodule(n)) for n in BODY} == {nn.Linear}
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_densify_a_shared_module() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    bt.replace_(model, {"*": bt.BTT()})
    bt.densify_(model)
    assert type(model["b"]) is nn.Linear
    assert model["a"][0] is model["b"]


def test_densify_a_root_that_is_itself_a_layer() -> None:
    """It cannot be changed in place: say so, or give the dense layer back, but never do nothing."""
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)})
    bt.replace_(attention, {"*": bt.BTT()})
    for root in (bt.StructuredLinear(16, 16, bt.BTT()), attention["a"]):
        with contextlib.suppress(bt.PlanError):
            assert not structured(bt.densify_(root))
            assert type(bt.densify_(root)) in (nn.Linear, nn.MultiheadAttention)


def test_densify_without_structured_layers_does_nothing() -> None:
    model = encoder_net()
    before = snapshot(model)
    assert bt.densify_(model) is model
    assert_unchanged(model, before)


def test_densify_rejects_a_layer_compiled_by_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    bt.replace_(model, bt.BTT())
    model[0] = torch.compile(model[0], backend="eager")
    with pytest.raises(bt.PlanError, match="compiled by itself"):
        bt.densify_(model)


@pytest.mark.parametrize("split", [None, {"0": 2}], ids=["whole", "split"])
@pytest.mark.parametrize("pickled", [False, True], ids=["deepcopy", "pickle"])
def test_a_copy_still_knows_the_class_that_it_stands_for(pickled: bool, split: dict[str, int] | None) -> None:
    model = conv1d_net()
    kind, x = type(model[0]), torch.randn(3, 16)
    bt.replace_(model, {"0": bt.BTT(rank=2)}, split=split)
    twin = pickle.loads(pickle.dumps(model)) if pickled else copy.deepcopy(model)
    outputs = twin(x)
    bt.densify_(twin)
    assert type(twin[0]) is kind
    assert twin[0].weight.shape == (16, 32)
    torch.testing.assert_close(twin(x), outputs)


@pytest.mark.parametrize(
    "function", [bt.densify_, bt.merge_, bt.unadapt_, bt.fuse_, bt.quantize_], ids=lambda f: f.__name__
)
def test_parameters_in_place_of_the_model_are_refused(function):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(bt.PlanError, match="the first argument must be the model"):
        function(model.parameters())
