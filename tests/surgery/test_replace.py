"""replace_: all or nothing, in wrapped models too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import BODY, TOKENS, Net, assert_unchanged, size, snapshot, structured


def test_root_that_is_itself_a_layer() -> None:
    for root in (nn.Linear(8, 8), nn.MultiheadAttention(8, 2)):
        before = snapshot(root)
        with pytest.raises(bt.PlanError, match=r"itself one layer.*(from_dense|Sequential)"):
            bt.replace_(root, {"*": bt.BTT()})
        assert_unchanged(root, before)


@pytest.mark.parametrize("init", ["muP", "zero", None])
def test_unknown_init(init: object) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="init must be 'mup' or 'project'"):
        bt.replace_(model, bt.BTT(), init=init)
    assert_unchanged(model, before)


def test_a_failing_layer_in_the_middle_changes_nothing() -> None:
    model = Net()
    model.blocks[1].qkv = torch.compile(model.blocks[1].qkv, backend="eager")
    before = snapshot(model)
    for plan in (bt.BTT(), {"*": bt.BTT()}):
        with pytest.raises(bt.PlanError, match=r"blocks\.1\.qkv: it was compiled by itself.*model is unchanged"):
            bt.replace_(model, plan)
        assert_unchanged(model, before)
    report = bt.replace_(model, {"blocks.1.qkv": None, "*": bt.BTT()})
    assert [row.name for row in report.rows] == [*(n for n in BODY if n != "blocks.1.qkv"), "head"]
    assert report.model_params_after == size(model)


def test_a_failing_layer_after_attention_changes_nothing() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 2))
    nn.init.constant_(model[1].weight, float("nan"))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="model is unchanged"):
        bt.replace_(model, bt.BTT(), init="project")
    assert_unchanged(model, before)
    assert model[0].activation_relu_or_gelu == 1


def test_replace_in_a_compiled_model() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    compiled(TOKENS)
    report = bt.replace_(compiled, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY
    assert list(structured(model)) == BODY
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))
    with torch.no_grad():
        for f in model.mlp[2].factors.values():
            f.zero_()
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))


def test_replace_a_layer_that_is_compiled_by_itself() -> None:
    """A wrapper calls what it wrapped: the new layer must be what runs, or the request be rejected."""
    model = nn.Sequential(torch.compile(nn.Linear(16, 16), backend="eager"), nn.Linear(16, 4))
    x = torch.randn(3, 16)
    model(x)
    try:
        bt.replace_(model, bt.BTT(rank=2))
    except bt.PlanError:
        assert not structured(model)
        return
    (layer,) = structured(model).values()
    before = model(x)
    with torch.no_grad():
        for f in layer.factors.values():
            f.zero_()
    assert not torch.allclose(model(x), before)


def test_a_compiled_root_that_is_itself_a_layer() -> None:
    root = torch.compile(nn.Linear(16, 16), backend="eager")
    with pytest.raises(bt.PlanError, match="itself one layer"):
        bt.replace_(root, {"*": bt.BTT()})


def test_replace_inside_a_checkpoint_wrapper() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = Net()
    model.mlp = wrapper.checkpoint_wrapper(model.mlp)
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY
    plain = Net()
    bt.Plan.of(model).apply_(plain)
    assert list(structured(plain)) == BODY
    model(TOKENS).sum().backward()
    inner = model.mlp._checkpoint_wrapped_module
    assert all(f.grad.any() for f in inner[0].factors.values())
