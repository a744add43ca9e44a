"""Learning rates of structured embeddings: rows change as much at every width and vocabulary."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import buttress as bt
from buttress.core.scaling import lookup_slices
from embedding_models import tied_net


def test_multipliers_by_hand() -> None:
    embedding = nn.ModuleDict({"wte": bt.StructuredEmbedding(50257, 768, bt.BTT(rank=4), std=0.5)})
    rows = {row.name: row for row in bt.explain(embedding, 1.0, weight_decay=0.1).rows}
    assert rows["wte.factors.L"].multiplier == 1 / 2
    assert rows["wte.factors.R"].multiplier == pytest.approx(1 / (4 * 0.5 * 2))
    assert (rows["wte.factors.L"].fan_in, rows["wte.factors.R"].fan_in) == (1, 4)
    assert (rows["wte.factors.L"].std, rows["wte.factors.R"].std) == (0.5, 0.5)
    assert {row.weight_decay for row in rows.values()} == {0.1}
    assert "read as it is, 1 of 2" in rows["wte.factors.L"].why
    assert "adds up 4 numbers of size 0.5, 1 of 2" in rows["wte.factors.R"].why
    naive = bt.explain(embedding, 1.0, structure_aware=False).rows
    assert {row.multiplier for row in naive} == {1.0}


def test_transfer_is_that_of_a_dense_embedding() -> None:
    def model(width: int, structure: bt.Structure | None) -> nn.Module:
        network = nn.ModuleDict({"wte": nn.Embedding(100, width), "fc": nn.Linear(width, width)})
        if structure is not None:
            bt.replace_(network, {"wte": structure})
        return network

    for rule, expected in (("adam", 1.0), ("muon", 1.0), ("sgd", 4.0)):
        for base in (model(16, None), model(16, bt.Dense()), model(16, bt.BTT())):
            (row,) = (r for r in bt.explain(model(64, bt.Dense()), 1.0, base=base, rule=rule).rows if "wte" in r.name)
            assert row.multiplier == pytest.approx(expected)
            (row,) = (r for r in bt.explain(model(64, None), 1.0, base=base, rule=rule).rows if "wte" in r.name)
            assert row.multiplier == pytest.approx(expected)
    network = model(64, bt.BTT())
    rules = {n: g["rule"] for g in bt.param_groups(network, 1.0, rule="muon") for n, p in network.named_parameters()
             for q in g["params"] if p is q}  # fmt: skip
    assert rules["wte.factors.L"] == rules["wte.factors.R"] == "adam"
    assert rules["fc.weight"] == "muon"


def test_a_tied_head_is_trained_as_the_embedding() -> None:
    model = tied_net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    rows = {row.name: row for row in bt.explain(model, 1.0).rows}
    assert not any(name.startswith("head") for name in rows)
    assert rows["embed.factors.L"].multiplier == 1 / 2
    assert "shared with head.factors.L" in rows["embed.factors.L"].why


def test_a_step_of_sgd_changes_rows_alike_whatever_their_size() -> None:
    def change(std: float) -> float:
        torch.manual_seed(0)
        module = bt.StructuredEmbedding(256, 64, bt.BTT(rank=4), std=std)
        ids, upstream = torch.arange(0, 256, 8), torch.randn(32, 64)
        before = module(ids).detach()
        (module(ids) * upstream).sum().backward()
        module.factors["L"].grad = None  # the factor that is copied
        torch.optim.SGD(bt.param_groups(module, 1e-6, rule="sgd")).step()
        return (module(ids).detach() - before).norm().item()

    assert change(0.1) == pytest.approx(change(1.0), rel=0.05)


# Rank and number of blocks fixed, or growing with the width, with one and several ways to share.
SCALED = [
    bt.Dense(), bt.LowRank(), bt.LowRank(rank=8), bt.Kronecker(), bt.Monarch(4), bt.TensorTrain(rank=4),
    bt.BTT(), bt.BTT(rank=4), bt.BTT(rank=2, cores=3),
]  # fmt: skip
WIDTHS = (64, 256, 1024)
NUMBERS = (256, 4096, 65536)
TOLERANCE = 0.35
"""As in the coordinate check of layers; most slopes below are smaller than 0.05."""


@cache
def changes(
    structure: bt.Structure, number: int, width: int, std: float, structure_aware: bool = True
) -> dict[str, float]:
    """RMS change of 32 rows in one step of Adam, over the learning rate: by all factors, and by each alone."""
    torch.manual_seed(0)
    module = bt.StructuredEmbedding(number, width, structure, std=std)
    ids = torch.randperm(number)[:32]
    before = module(ids).detach()
    old = {n: p.detach().clone() for n, p in module.factors.items()}
    lr = 0.01 * std
    optimizer = torch.optim.Adam(bt.param_groups(module, lr, structure_aware=structure_aware), eps=1e-30)
    (module(ids) * torch.randn(before.shape)).sum().backward()
    optimizer.step()
    new = {n: p.detach().clone() for n, p in module.factors.items()}

    def moved() -> float:
        return (module(ids) - before).square().mean().sqrt().item() / lr

    with torch.no_grad():
        changes_by_name = {"all": moved()}
        for name in new:
            for other, p in module.factors.items():
                p.copy_(new[other] if other == name else old[other])
            changes_by_name[name] = moved()
    return changes_by_name


def slopes(sizes: tuple[int, ...], measurements: list[dict[str, float]]) -> dict[str, float]:
    return {n: float(np.polyfit(np.log(sizes), np.log([f[n] for f in measurements]), 1)[0]) for n in measurements[0]}


@pytest.mark.parametrize("std", [1.0, 0.02])
@pytest.mark.parametrize("structure", SCALED, ids=str)
def test_rows_change_as_much_at_every_width_and_vocabulary(structure: bt.Structure, std: float) -> None:
    by_width = slopes(WIDTHS, [changes(structure, 4096, w, std) for w in WIDTHS])
    by_number = slopes(NUMBERS, [changes(structure, n, 128, std) for n in NUMBERS])
    assert max(map(abs, by_width.values())) < TOLERANCE, by_width
    assert max(map(abs, by_number.values())) < 0.1, by_number
    # And about as much as in a dense embedding, whatever the size of its rows, each factor having its part.
    measured = changes(structure, 4096, 256, std)
    k = len(structure.chain(256, 4096).factors)
    assert 0.3 < measured["all"] < 1.1
    assert all(0.2 / k < part < 1.2 / k for name, part in measured.items() if name != "all"), measured


@pytest.mark.parametrize("structure", [bt.LowRank(), bt.Monarch(4)], ids=str)
def test_the_check_fails_without_the_multipliers(structure: bt.Structure) -> None:
    """Where what is added up grows with the width."""
    first = structure.chain(64, 4096).factors[0].name
    aware, naive = (
        slopes(WIDTHS, [changes(structure, 4096, w, 1.0, how) for w in WIDTHS])[first] for how in (True, False)
    )
    narrow, wide = (lookup_slices(structure.chain(width, 4096))[first].fan_in for width in (64, 1024))
    growth = np.log(wide / narrow)
    assert naive == pytest.approx(aware + growth / np.log(16), abs=0.01)
    assert naive > 0.25
