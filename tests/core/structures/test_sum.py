"""Sums of structures: names, counts, scales, rates, texts."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import buttress as bt
from buttress import ops
from chain_strategies import random_factors

SUM = bt.Sum(bt.LowRank(rank=3), bt.BTT(rank=2))


def test_the_matrix_is_the_sum_of_the_parts_matrices() -> None:
    for d_in, d_out in [(12, 20), (13, 29)]:
        chain = SUM.chain(d_in, d_out)
        low, btt = (part.chain(d_in, d_out) for part in SUM.parts)
        factors = random_factors(chain)
        expected = ops.dense(low, factors[:2]) + ops.dense(btt, factors[2:])
        torch.testing.assert_close(ops.dense(chain, factors), expected)
        ids = torch.tensor([[0, d_out - 1], [3, 1]])
        torch.testing.assert_close(ops.rows(chain, factors, ids), expected[ids])
        scales = [torch.tensor([s], dtype=torch.float64) for s in (2.0, 0.5, 3.0, 0.25)]
        scaled = ops.dense(low, factors[:2]) + 0.75 * ops.dense(btt, factors[2:])
        x = torch.randn(5, d_in, dtype=torch.float64)
        torch.testing.assert_close(ops.apply(chain, x, factors, scales=scales), x @ scaled.mT)
        torch.testing.assert_close(ops.rows(chain, factors, ids, scales=scales), scaled[ids])


def test_counts_and_bounds_add_up() -> None:
    chain, parts = SUM.chain(64, 48), [p.chain(64, 48) for p in SUM.parts]
    assert chain.params == sum(p.params for p in parts)
    assert chain.macs == sum(p.macs for p in parts)
    assert bt.Sum(bt.LowRank(rank=3), bt.LowRank(rank=4)).chain(64, 48).max_rank == 7
    assert chain.max_rank == 48
    assert bt.Sum("kronecker", "low_rank").chain(16, 16).shares_parameters
    assert not chain.shares_parameters
    # Of 13 inputs BTT pads 2, and low rank none.
    assert SUM.chain(13, 64).padding == (2, 0)
    assert ops.row_macs(chain) == sum(map(ops.row_macs, parts))


def test_factors_are_named_after_their_part() -> None:
    names = [f.name for f in bt.Sum("btt", "low_rank", "btt").chain(16, 16).factors]
    assert names == ["btt_R", "btt_L", "low_rank_V", "low_rank_U", "btt_2_R", "btt_2_L"]


def test_no_prefix_is_used_twice() -> None:
    @bt.structure
    class Btt_2(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.BTT().chain(d_in, d_out)

    try:
        names = [f.name for f in bt.Sum("btt", "btt", Btt_2()).chain(16, 16).factors]
    finally:
        from buttress.core.structures.base import REGISTRY

        del REGISTRY[Btt_2.name]
    assert len(set(names)) == 6


def test_the_output_keeps_its_variance() -> None:
    """Two BTTs, each of unit variance, sum to unit variance: only the last-applied factors are scaled."""
    one, two = bt.BTT().chain(64, 64), bt.Sum("btt", "btt").chain(64, 64)
    right, left = (bt.init_std(f) for f in one.factors)
    assert [bt.init_std(f) for f in two.factors] == pytest.approx([right, left / 2**0.5] * 2)
    torch.manual_seed(0)
    variances = [bt.StructuredLinear(256, 256, s)(torch.randn(500, 256)).var().item() for s in ("btt", "sum(btt, btt)")]
    assert variances[1] == pytest.approx(variances[0], rel=0.1)
    rows = bt.StructuredEmbedding(4096, 64, "sum(btt, low_rank)", std=0.5)(torch.arange(4096))
    assert rows.std().item() == pytest.approx(0.5, rel=0.1)


def test_rates_are_shared_by_all_factors_that_are_trained() -> None:
    btt = bt.BTT().chain(64, 64)
    kappa = bt.lr_multiplier(btt.factors[0], btt)
    for text, share in (("sum(btt, low_rank)", 0.5), ("sum(btt, dense)", 2 / 3), ("sum(btt, dense(frozen=True))", 1)):
        chain = bt.parse(text).chain(64, 64)
        assert bt.lr_multiplier(chain.factors[0], chain) == pytest.approx(share * kappa)
        groups = bt.param_groups(bt.StructuredLinear(64, 64, text, bias=False), lr=1.0)
        assert groups[0]["lr"] == pytest.approx(share * kappa)


def test_a_frozen_part_is_not_trained() -> None:
    layer = bt.StructuredLinear(8, 8, bt.Sum(bt.Dense(frozen=True), bt.LowRank(rank=2)), normalize=True)
    trained = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"bias", "factors.low_rank_V", "factors.low_rank_U", "gains.low_rank_V", "gains.low_rank_U"}
    assert str(layer.structure) == "sum(dense(frozen=True), low_rank(rank=2))"
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.factors["dense_W"].grad is None
    assert layer.factors["low_rank_U"].grad is not None


def test_texts_and_values() -> None:
    text = "sum(low_rank(rank=3), btt(rank=2))"
    assert str(SUM) == text
    assert repr(SUM) == "Sum(LowRank(rank=3, fraction=None), BTT(rank=2, cores=2, split='even'))"
    assert bt.parse(text) == SUM == bt.Sum("low_rank(rank=3)", bt.BTT(rank=2))
    assert bt.parse("sum") == bt.Sum() == bt.Sum(bt.LowRank(), bt.BTT())
    assert bt.Sum(bt.Sum("btt", "dense"), "low_rank") == bt.Sum("btt", "dense", "low_rank"), "nested sums are flat"
    assert replace(SUM, parts=(bt.Dense(), bt.BTT())) == bt.parse("sum(dense, btt)")
    assert bt.Sum(bt.BTT(rank=2), bt.LowRank(rank=3)) != SUM, "the order names the factors"


def test_copies_and_pickles_are_equal() -> None:
    chain = SUM.chain(16, 16)
    assert chain.factors
    assert copy.deepcopy(chain) is chain
    assert pickle.loads(pickle.dumps(chain)) == chain
    layer = bt.StructuredLinear(16, 16, SUM)
    x = torch.randn(2, 16)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sum(btt)", "2 to 16 parts are needed, got 'btt'"),
        (f"sum({', '.join(['btt'] * 17)})", "2 to 16 parts are needed"),
        ("sum(btt, 3)", "write name or name(option=value, ...)"),
        ("sum(btt, nothing)", "there are "),
        ("sum(btt, btt(rank=0))", "rank must be an integer >= 1"),
        ("btt(btt)", "write name or name(option=value, ...)"),
        ("dense(frozen=2)", "frozen must be True or False, got 2"),
        ("sum(" * 400 + "btt" + ")" * 400, ""),
    ],
)
def test_impossible_sums_are_rejected(text: str, message: str) -> None:
    with pytest.raises(bt.StructureError) as caught:
        bt.parse(text)
    assert message in str(caught.value)


def test_a_list_and_classes_are_refused_with_advice() -> None:
    for parts in ([bt.BTT(), bt.LowRank()], (bt.BTT(), bt.LowRank())):
        with pytest.raises(bt.StructureError, match=r"give the parts one by one, such as Sum\(LowRank\(\), BTT\(\)\)"):
            bt.Sum(parts)  # type: ignore[arg-type]
    with pytest.raises(bt.StructureError, match=r"that is the class: write BTT\(\.\.\.\) for a structure"):
        bt.Sum(bt.BTT, bt.LowRank)  # type: ignore[arg-type]


def test_chains_of_different_sizes_cannot_be_added() -> None:
    with pytest.raises(bt.ChainError, match="got 4 -> 4, 4 -> 6"):
        bt.ChainSum.of({"a": bt.Dense().chain(4, 4), "b": bt.Dense().chain(4, 6)})
    with pytest.raises(bt.ChainError, match="got none"):
        bt.ChainSum.of({})
    with pytest.raises(bt.ChainError, match="but b is a sum: list its parts singly"):
        bt.ChainSum.of({"a": bt.Dense().chain(4, 4), "b": bt.Sum().chain(4, 4)})
    with pytest.raises(bt.ChainError, match="would be called a_b_W: choose other prefixes"):
        bt.ChainSum.of({"a": replace(bt.Dense().chain(4, 4), factors=_named("b_W")), "a_b": bt.Dense().chain(4, 4)})


def _named(name: str) -> tuple[bt.Factor, ...]:
    return (replace(bt.Dense().chain(4, 4).factors[0], name=name),)
