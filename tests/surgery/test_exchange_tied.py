"""Embeddings and heads that share a weight, before and after they are replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import buttress as bt
from embedding_models import IDS, both, shared, tied_net


@pytest.mark.parametrize("init", ["mup", "project"])
@pytest.mark.parametrize("bias", [False, True])
@both
def test_tied_before_tied_after(init: str, bias: bool, normalize: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = tied_net(bias=bias)
    kept = model.head.bias
    plan = {"head": bt.BTT(rank=2), "embed": bt.BTT(rank=2), "mix": bt.BTT()}
    with caplog.at_level(logging.WARNING, logger="buttress"):
        dry = bt.replace_(model, plan, init=init, normalize=normalize, dry_run=True)
        report = bt.replace_(model, plan, init=init, normalize=normalize)
    assert not caplog.records
    assert dry == report
    assert shared(model)
    assert model.head.bias is kept
    assert [row.name for row in report.rows] == ["embed", "mix", "head"]
    assert report.rows[0].projection_error == report.rows[2].projection_error
    assert report.model_params_after == sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(model.head.to_dense(), model.embed.to_dense())
    model(IDS).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_head_that_stands_first_follows_the_embedding() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 97, bias=False)
            self.embed = nn.Embedding(97, 24)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.head.weight = self.embed.weight

    model = Turned()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    assert shared(model)
    assert model.embed.to_dense().std().item() == pytest.approx(0.02, rel=0.1)
    entries = {e.name: e.tied for e in bt.Plan.of(model).entries}
    assert entries == {"head": "embed", "embed": None}
    again = Turned()
    bt.Plan.of(model).apply_(again)
    assert shared(again)


def test_different_structures_cannot_be_tied(caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        tie_word_embeddings = True

    model = tied_net()
    model.config = Config()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=3)})
    assert "embed, head shared one weight: each has its own now" in caplog.text
    assert not model.config.tie_word_embeddings
    assert bt.Plan.of(model).entries[1].tied is None


@pytest.mark.parametrize("one", ["embed", "head"])
def test_one_of_two_that_are_tied(one: str, caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        tie_word_embeddings = True

    model = tied_net()
    model.config = Config()
    other = {"embed": "head", "head": "embed"}[one]
    weight = model.get_submodule(other).weight
    bt.replace_(model, {one: bt.BTT(rank=2)}, init="project")
    (record,) = caplog.records
    assert f"{one} shared its weight with {other}.weight: it has its own now" in record.getMessage()
    assert model.get_submodule(other).weight is weight
    assert not model.config.tie_word_embeddings


def test_two_embeddings_and_a_head() -> None:
    model = nn.ModuleDict({n: nn.Embedding(30, 12) for n in ("source", "target")} | {"head": nn.Linear(12, 30)})
    model["target"].weight = model["head"].weight = model["source"].weight
    bt.replace_(model, dict.fromkeys(model, bt.BTT(rank=2)))
    for name in ("target", "head"):
        assert model[name].factors["L"] is model["source"].factors["L"]
    assert model["target"].std == model["source"].std
    assert [e.tied for e in bt.Plan.of(model).entries] == [None, "source", "source"]
    bt.densify_(model)
    assert model["target"].weight is model["head"].weight is model["source"].weight


def test_a_tied_pair_may_be_sharded_and_replicated(tmp_path: Path) -> None:
    def trained(wrap) -> list[float]:
        torch.manual_seed(0)
        model = tied_net()
        bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
        model = wrap(nn.Sequential(model, nn.Tanh()))
        optimizer = torch.optim.Adam(bt.param_groups(model, 0.01))
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(IDS).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        alone = trained(lambda model: model)
        for wrap in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.fully_shard):
            assert trained(wrap) == pytest.approx(alone)
    finally:
        torch.distributed.destroy_process_group()
