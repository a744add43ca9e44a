"""Projection onto sums: alternation, remainders, and adapters."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops
from buttress.projection.closed_form import Target, draft, finished, refined
from chain_strategies import random_factors

PAIR = bt.Sum(bt.LowRank(rank=6), bt.BTT())


def matrix_of(structure: bt.Structure, d_in: int, d_out: int) -> Tensor:
    chain = structure.chain(d_in, d_out)
    return ops.dense(chain, random_factors(chain))


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def some_moments(d: int) -> Tensor:
    root = gaussian(d, d) * torch.logspace(0, -1, d, dtype=torch.float64)
    return root @ root.mT


@pytest.mark.parametrize(
    "text",
    ["sum(low_rank(rank=6), btt)", "sum(block_diagonal(blocks=8), low_rank(rank=5))", "sum(kronecker, low_rank)"],
)
@pytest.mark.parametrize(("d_in", "d_out"), [(64, 64), (128, 64)])
def test_a_matrix_of_the_structure_is_recovered(text: str, d_in: int, d_out: int) -> None:
    structure = bt.parse(text)
    projection = bt.project(structure, matrix_of(structure, d_in, d_out), sweeps=100)
    assert projection.relative_error < 1e-5


def test_the_convergence_that_the_theory_page_states() -> None:
    structure = bt.Sum(bt.LowRank(rank=16), bt.BTT())
    assert bt.project(structure, matrix_of(structure, 256, 256), sweeps=20).relative_error < 1e-5


@pytest.mark.parametrize("with_moments", [False, True])
def test_a_sum_is_nearer_than_each_of_its_parts_and_every_round_helps(with_moments: bool) -> None:
    weight, moments = gaussian(48, 64), some_moments(64) if with_moments else None
    target = Target.of(weight, moments)
    errors = [finished(refined(draft(PAIR, target), target, n), target).output_error for n in (0, 1, 2, 5, 10)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.98 * errors[0]
    alone = [bt.project(part, weight, moments=moments).output_error for part in PAIR.parts]
    assert errors[-1] < 0.95 * min(alone)
    by_default = bt.project(PAIR, weight, moments=moments)
    assert by_default.output_error == errors[-1], "ten rounds are the default"


@pytest.mark.parametrize("with_moments", [False, True])
def test_rounds_can_be_added_later(with_moments: bool) -> None:
    target = Target.of(gaussian(24, 30), some_moments(30) if with_moments else None)
    start = draft(PAIR, target)
    twice = refined(refined(start, target, 2), target, 5)
    once = refined(start, target, 5)
    assert all(torch.equal(a, b) for a, b in zip(twice.tensors, once.tensors, strict=True))


def test_each_part_is_balanced_by_itself() -> None:
    factors = bt.project(PAIR, gaussian(64, 64)).factors
    for part in PAIR.chain(64, 64).parts:
        one, two = (factors[f.name].square().mean().sqrt() / bt.init_std(f) for f in part.factors)
        torch.testing.assert_close(one, two, rtol=1e-6, atol=0)


@pytest.mark.parametrize("text", ["sum(dense(frozen=True), btt)", "sum(low_rank(rank=2), dense(frozen=True))"])
@pytest.mark.parametrize("normalize", [False, True])
def test_an_adapter_starts_as_the_layer_and_can_learn(text: str, normalize: bool) -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).double()
    model.requires_grad_(False)
    before, x = copy.deepcopy(model), gaussian(7, 12)
    report = bt.replace_(model, {"0": bt.parse(text), "*": None}, init="project", normalize=normalize)
    assert report.rows[0].projection_error == 0
    torch.testing.assert_close(model(x), before(x), rtol=1e-12, atol=1e-12)
    layer = model[0]
    assert isinstance(layer, bt.StructuredLinear)
    torch.testing.assert_close(layer.factors["dense_W"][0], before[0].weight, rtol=1e-12, atol=1e-12)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not any("dense_W" in n or n.endswith("bias") for n in trained)
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=1e-2))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n in trained)
    merged = copy.deepcopy(model)
    bt.densify_(merged)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(merged[0].weight, before[0].weight)
    assert merged[0].weight.requires_grad


def test_the_frozen_layer_stays_frozen_unless_the_structure_says_what_is_trained() -> None:
    for text, trains in (("sum(low_rank(rank=2), btt)", False), ("sum(dense(frozen=True), btt)", True)):
        model = nn.Sequential(nn.Linear(12, 12)).requires_grad_(False)
        bt.replace_(model, {"0": text}, init="project")
        assert any(p.requires_grad for p in model.parameters()) == trains


def test_a_zero_weight_gives_a_zero_start() -> None:
    linear = nn.Linear(16, 16)
    nn.init.zeros_(linear.weight)
    layer = bt.StructuredLinear.from_dense(linear, PAIR)
    assert not layer.to_dense().any()
    layer(torch.randn(3, 16)).sum().backward()
    assert all(layer.factors[part.factors[-1].name].grad.any() for part in layer.chain.parts)


def test_plans_and_saved_weights_keep_sums() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 4))
    bt.replace_(model, {"0": PAIR, "1": bt.Sum(bt.Dense(frozen=True), "btt")}, init="project")
    text = bt.Plan.of(model).to_json()
    assert "sum(low_rank(rank=6), btt)" in text
    again = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 4))
    bt.Plan.from_json(text).apply_(again)
    again.load_state_dict(model.state_dict())
    x = torch.randn(5, 12)
    assert torch.equal(again(x), model(x))
    frozen = [{n for n, p in m.named_parameters() if not p.requires_grad} for m in (model, again)]
    assert frozen[0] == frozen[1] == {"1.factors.dense_W"}


def test_an_embedding_is_projected_onto_a_sum() -> None:
    table = nn.Embedding(50, 24, padding_idx=3)
    structured = bt.StructuredEmbedding.from_dense(table, bt.Sum(bt.LowRank(rank=12), bt.BTT(rank=2)))
    error = torch.linalg.norm(structured.to_dense() - table.weight) / torch.linalg.norm(table.weight)
    alone = [bt.project(part, table.weight).relative_error for part in structured.structure.parts]
    assert error < min(alone)
    fresh = bt.StructuredEmbedding(50, 24, bt.Sum(bt.LowRank(rank=4), bt.BTT()), padding_idx=3)
    rows = fresh(torch.arange(50))
    assert not rows[3].any()
    assert rows[2].any()
