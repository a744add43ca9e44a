"""BLAST: the matrix by its definition, its counts, and what it is at special options."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import buttress as bt
import oracles
from chain_strategies import dense_form, random_factors

sizes = st.integers(1, 24)


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 4))
@example(12, 20, 4, 3)
@example(13, 20, 4, 3)
@example(12, 19, 3, 2)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_by_hand(i: int, o: int, blocks: int, rank: int) -> None:
    chain = bt.BLAST(blocks=blocks, rank=rank).chain(i, o)
    stored = random_factors(chain)
    w = oracles.blast(*(t.numpy() for t in stored))
    count = min(blocks, i, o)
    # Blocks are slow on a side that they divide, and fast on one that is padded.
    rows, columns = (list(range(n)) for n in w.shape)
    if o % count:
        rows = oracles.interleave(count, w.shape[0] // count)
    if i % count:
        columns = oracles.interleave(count, w.shape[1] // count)
    placed = np.zeros_like(w)
    placed[np.ix_(rows, columns)] = w
    np.testing.assert_allclose(dense_form(chain, stored), placed[:o, :i], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("d", "blocks", "rank"), [(64, 4, 8), (256, 16, 24), (60, 3, 7)])
def test_a_rank_costs_both_sides_and_the_blocks(d: int, blocks: int, rank: int) -> None:
    chain = bt.BLAST(blocks=blocks, rank=rank).chain(d, d)
    assert chain.params == chain.macs == 2 * d * rank + blocks**2 * rank
    assert [f.shape for f in chain.factors] == [
        (blocks, rank, d // blocks),
        (rank, blocks, blocks),
        (blocks, d // blocks, rank),
    ]


@pytest.mark.parametrize(("blocks", "rank", "bound"), [(4, 3, 12), (4, 40, 64), (1, 5, 5)])
def test_rank_of_the_matrix(blocks: int, rank: int, bound: int) -> None:
    chain = bt.BLAST(blocks=blocks, rank=rank).chain(64, 64)
    assert chain.max_rank == bound
    assert np.linalg.matrix_rank(dense_form(chain, random_factors(chain))) == bound


def test_multipliers_and_scales() -> None:
    v, s, u = (chain := bt.BLAST(blocks=4, rank=8).chain(64, 128)).factors
    assert [bt.lr_multiplier(f, chain) for f in (v, s, u)] == pytest.approx([64 / 16 / 3, 64 / 4 / 3, 64 / 8 / 3])
    assert [bt.init_std(f) for f in (v, s, u)] == pytest.approx([1 / sqrt(16), 1 / sqrt(4), 1 / sqrt(8)])


@pytest.mark.parametrize(("d_in", "d_out", "blocks", "rank"), [(256, 256, 4, 16), (256, 512, 8, 32), (1024, 256, 4, 8)])
def test_outputs_have_the_variance_of_the_inputs(d_in: int, d_out: int, blocks: int, rank: int) -> None:
    """At any width: the rule alone would give V a scale that vanishes."""
    structure = bt.BLAST(blocks=blocks, rank=rank)
    outputs = [bt.StructuredLinear(d_in, d_out, structure)(torch.randn(64, d_in)) for _ in range(20)]
    assert torch.stack(outputs).square().mean().item() == pytest.approx(1, rel=0.15)


def test_one_block_is_low_rank() -> None:
    chain, low_rank = bt.BLAST(blocks=1, rank=3).chain(20, 12), bt.LowRank(rank=3).chain(20, 12)
    v, s, u = random_factors(chain)
    np.testing.assert_allclose(dense_form(chain, [v, s, u]), dense_form(low_rank, [v, u * s.reshape(1, 1, 3)]))


def test_more_blocks_than_the_smaller_side() -> None:
    assert bt.BLAST(blocks=100, rank=2).chain(12, 5) == bt.BLAST(blocks=5, rank=2).chain(12, 5)


def test_the_default_rank_is_the_root_of_the_smaller_side() -> None:
    assert bt.BLAST().chain(256, 1024).sizes["r"] == 16
    assert bt.BLAST().chain(300, 257).sizes["r"] == 17


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"blocks": 0}, {"blocks": None}, {"rank": True}])
def test_impossible_options(options: dict) -> None:
    with pytest.raises(bt.StructureError, match=r"BLAST: (rank|blocks) must be an integer >= 1, got"):
        bt.BLAST(**options)


def test_the_family_covers_the_costs_below_dense() -> None:
    chains = [member.chain(256, 256) for member in bt.BLAST.family(256, 256)]
    costs = sorted(chain.macs / 256**2 for chain in chains)
    assert costs[0] < 0.03
    assert 0.97 < costs[-1] <= 1
    assert len({chain.sizes["b"] for chain in chains}) == 2
    assert max(b / a for a, b in pairwise(costs)) < 3.1
