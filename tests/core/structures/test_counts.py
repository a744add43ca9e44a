"""Structures: the numbers of the paper, counts and ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buttress as bt
from chain_strategies import dense_form, random_factors
from paper_table import TABLE


def numbers(structure: bt.Structure, d_in: int, d_out: int) -> tuple[int, int, list[float], list[float]]:
    chain = structure.chain(d_in, d_out)
    rates = [bt.lr_multiplier(f, chain) for f in chain.factors]
    return chain.params, chain.macs, rates, [bt.init_std(f) for f in chain.factors]


@pytest.mark.parametrize(
    ("structure", "d_in", "d_out", "params", "macs", "rates", "stds"),
    TABLE,
    ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in TABLE],
)
def test_the_papers_numbers(
    structure: bt.Structure, d_in: int, d_out: int, params: int, macs: int, rates: list[float], stds: list[float]
) -> None:
    actual = numbers(structure, d_in, d_out)
    assert actual[:2] == (params, macs)
    assert actual[2] == pytest.approx(rates, rel=1e-12)
    # The table is written to six places.
    assert actual[3] == pytest.approx(stds, abs=5.1e-7)


def test_the_papers_kronecker_example() -> None:
    right, left = bt.Kronecker().chain(20, 30).factors
    assert (left.name, left.shape) == ("L", (1, 6, 5))
    assert (right.name, right.shape) == ("R", (1, 5, 4))


def test_the_papers_core_shapes() -> None:
    right, left = bt.BTT(rank=4).chain(1024, 4096).factors
    # The authors store (32, 32, 256) and (64, 128, 64), that is (block, in, out).
    assert (right.shape, left.shape) == ((32, 256, 32), (64, 64, 128))


@pytest.mark.parametrize(("wide", "narrow"), [(1024, 256), (16384, 2048)])
def test_widths_of_equal_compute(wide: int, narrow: int) -> None:
    assert bt.BTT(rank=1).chain(wide, wide).macs == bt.Dense().chain(narrow, narrow).macs


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_asymptotic_counts(cores: int, rank: int) -> None:
    d = 4**cores
    factor = 2 * rank + (cores - 2) * rank**2
    block = bt.BTT(rank=rank, cores=cores).chain(d, d)
    plain = bt.TensorTrain(rank=rank, cores=cores).chain(d, d)
    assert block.params == block.macs == plain.macs == factor * d * 4
    assert plain.params == factor * 4 * 4


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 4), st.integers(2, 3))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_block_train_costs_what_it_holds_and_what_the_train_costs(i: int, o: int, rank: int, cores: int) -> None:
    block, plain = bt.BTT(rank, cores).chain(i, o), bt.TensorTrain(rank, cores).chain(i, o)
    assert block.params == block.macs == plain.macs
    assert not block.shares_parameters


def test_families_of_trains_and_blocks_by_hand() -> None:
    # 64 = 8 * 8: each core is a matrix of 64 numbers for each index of the bond, so a rank of 64 is enough.
    assert [m.rank for m in bt.TensorTrain.family(64, 64)] == [1, 2, 4, 8, 16, 32, 64]
    for cls in (bt.Monarch, bt.BlockDiagonal):
        assert [m.blocks for m in cls.family(13, 40)] == [12, 8, 6, 4, 3, 2]
        assert [m.blocks for m in cls.family(40, 7)] == [6, 4, 3, 2]


@pytest.mark.parametrize(
    ("structure", "rank"), [(bt.BTT(), 1024), (bt.LowRank(rank=32), 32), (bt.Monarch(), 1024)], ids=str
)
def test_rank_of_a_random_matrix(structure: bt.Structure, rank: int) -> None:
    chain = structure.chain(1024, 1024)
    assert chain.max_rank == rank
    small = structure.chain(256, 256)
    assert np.linalg.matrix_rank(dense_form(small, random_factors(small))) == min(rank, 256)
