"""Embeddings replaced and turned back: their scale, their outputs, and training in between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import buttress as bt
from embedding_models import FULL, IDS, Net, both, kinds, tied_net


def test_a_new_one_has_the_size_of_the_old() -> None:
    model = Net(number=2000, width=64)
    nn.init.normal_(model.embed.weight, std=0.03)
    bt.replace_(model, {"embed": bt.BTT(rank=4)})
    assert model.embed.std == pytest.approx(0.03, rel=0.02)
    assert model.embed(torch.arange(2000)).std().item() == pytest.approx(0.03, rel=0.1)
    assert model.embed.padding_idx == 0
    assert not model.embed(torch.tensor([0])).any()
    model = Net()
    nn.init.zeros_(model.embed.weight)
    (row,) = bt.replace_(model, {"embed": bt.BTT()}).rows
    assert row.zero_start
    assert not model.embed.to_dense().any()


def test_a_root_that_is_an_embedding() -> None:
    with pytest.raises(bt.PlanError, match=r"itself one layer.*StructuredEmbedding\.from_dense"):
        bt.replace_(nn.Embedding(10, 8), {"": bt.BTT()})
    with pytest.raises(bt.PlanError, match="itself one structured layer"):
        bt.densify_(bt.StructuredEmbedding(10, 8, bt.BTT()))


@pytest.mark.parametrize("tied", [False, True])
@both
def test_full_rank_there_and_back(tied: bool, normalize: bool) -> None:
    model = (tied_net if tied else Net)().double().eval()
    model.embed.weight.requires_grad_(tied)
    expected, names = model(IDS), [n for n, _ in model.named_parameters()]
    report = bt.replace_(model, {"embed": FULL, "head": FULL}, init="project", normalize=normalize)
    assert kinds(model)["embed"] == "StructuredEmbedding"
    assert all(row.projection_error < 1e-12 for row in report.rows)
    assert all(p.requires_grad == tied for p in model.embed.parameters())
    assert not model.embed.training
    torch.testing.assert_close(model(IDS), expected)
    bt.densify_(model)
    assert [n for n, _ in model.named_parameters()] == names
    assert (model.head.weight is model.embed.weight) == tied
    assert (type(model.embed), model.embed.padding_idx, model.embed.training) == (nn.Embedding, 0, False)
    assert model.embed.weight.requires_grad == tied
    torch.testing.assert_close(model(IDS), expected)


def test_from_dense_to_structured_and_back_in_the_middle_of_training() -> None:
    model = tied_net(number=60, width=20)
    ids = torch.randint(1, 60, (16, 8))

    def train(steps: int, lr: float = 3e-3) -> float:
        optimizer = torch.optim.AdamW(bt.param_groups(model, lr))
        for _ in range(steps):
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    first = train(30)
    dense = model(ids).detach()
    # Rank 4 holds any table of this size.
    report = bt.replace_(model, {"embed": bt.BTT(rank=4), "head": bt.BTT(rank=4)}, init="project")
    assert all(row.projection_error < 1e-5 for row in report.rows)
    torch.testing.assert_close(model(ids), dense, rtol=1e-4, atol=1e-4)
    second = train(30)
    assert second < first
    structured = model(ids).detach()
    bt.densify_(model)
    torch.testing.assert_close(model(ids), structured, rtol=1e-4, atol=1e-4)
    assert model.head.weight is model.embed.weight
    assert train(30) < second
