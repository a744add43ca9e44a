"""New modules in a model: shared modules and weights, hooks, and memory that is released."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import TOKENS, Net, conv1d_tied, size, two_attentions_sharing, two_sharing


def test_shared_module_is_replaced_once_under_both_names() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "head": nn.Linear(16, 4)})
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == ["a.0"]
    assert model["a"][0] is model["b"]
    assert isinstance(model["b"], bt.StructuredLinear)
    assert report.model_params_after == size(model)


def test_head_tied_to_the_embedding(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    table, values = model.embed.weight, model.embed.weight.detach().clone()
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"head": bt.BTT(rank=2)}, dry_run=True)
        assert not caplog.records
        bt.replace_(model, {"head": bt.BTT(rank=2)})
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "head" in caplog.text
    assert "embed.weight" in caplog.text
    assert model.embed.weight is table
    torch.testing.assert_close(table.detach(), values, rtol=0, atol=0)
    model(TOKENS).square().sum().backward()
    assert table.grad is not None
    assert table.grad.any()
    assert all(f.grad.any() for f in model.head.factors.values())
    shared = {f.untyped_storage().data_ptr() for f in model.head.factors.values()}
    assert table.untyped_storage().data_ptr() not in shared


def test_head_left_out_stays_tied(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, bt.BTT(rank=2))
    assert not caplog.records
    assert model.head.weight is model.embed.weight


def test_config_no_longer_says_tied() -> None:
    class Config:
        tie_word_embeddings = True

    model = Net(tied=True)
    model.config = Config()
    bt.replace_(model, {"mlp.*": bt.BTT()})
    assert model.config.tie_word_embeddings is True
    bt.replace_(model, {"head": bt.BTT()})
    assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize("build", [two_sharing, conv1d_tied], ids=["Linear", "Conv1D"])
def test_two_layers_that_share_a_weight(build, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"[01]": bt.BTT(rank=2)})
    (record,) = caplog.records
    assert "0, 1 shared one weight" in record.getMessage()
    assert model[0] is not model[1]
    assert not torch.equal(model[0].to_dense(), model[1].to_dense())


def test_one_of_two_layers_that_share_a_weight(caplog: pytest.LogCaptureFixture) -> None:
    model = two_sharing()
    weight = model[1].weight
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"0": bt.BTT(rank=2)})
    (record,) = caplog.records
    assert "1.weight" in record.getMessage()
    assert model[1].weight is weight


def test_attention_that_shares_its_weight_lets_go_of_it() -> None:
    model = two_attentions_sharing()
    expected = model["b"].in_proj_weight.detach().clone()
    bt.replace_(model, {"a.q_proj": bt.BTT()})
    with torch.no_grad():
        for p in model["a"].parameters():
            p.zero_()
    torch.testing.assert_close(model["b"].in_proj_weight.detach(), expected, rtol=0, atol=0)


def test_a_replaced_part_of_attention_is_not_held_any_longer() -> None:
    """A view of the packed weight would keep all of it in memory and in every saved file."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(64, 2)})

    def saved() -> int:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        return file.tell()

    before = saved()
    bt.replace_(model, {"a.[qv]_proj": bt.BTT(rank=1)})
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
    assert sum(storages.values()) == 4 * size(model)
    assert saved() < before


def test_hooks_do_not_go_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda *_: None)
    bt.replace_(model, bt.BTT())
    assert "0 had forward hooks" in caplog.text
