"""Structures: the paper's formulas by hand, and laws between structures."""

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import buttress as bt
import oracles
from chain_strategies import dense_form, random_factors

sizes = st.integers(1, 24)
small_settings = settings(deadline=None, derandomize=True, max_examples=20)


def check_oracle(chain: bt.Chain, expected: Any) -> None:
    stored = random_factors(chain)
    w = expected(*(t.numpy() for t in stored))
    assert w.shape == (chain.size(chain.y), chain.size(chain.x))
    np.testing.assert_allclose(dense_form(chain, stored), w[: chain.d_out, : chain.d_in], rtol=0, atol=1e-12)


@given(sizes, sizes)
@small_settings
def test_dense_by_hand(i: int, o: int) -> None:
    check_oracle(bt.Dense().chain(i, o), oracles.dense)


@given(sizes, sizes, st.integers(1, 5))
@small_settings
def test_low_rank_by_hand(i: int, o: int, rank: int) -> None:
    check_oracle(bt.LowRank(rank=rank).chain(i, o), oracles.low_rank)


@given(sizes, sizes)
@small_settings
def test_kronecker_by_hand(i: int, o: int) -> None:
    check_oracle(bt.Kronecker().chain(i, o), oracles.kronecker)


@given(sizes, sizes, st.integers(1, 4))
@small_settings
def test_tensor_train_by_hand(i: int, o: int, rank: int) -> None:
    b, c = bt.split(o, 2)[0], bt.split(i, 2)[1]
    check_oracle(bt.TensorTrain(rank=rank).chain(i, o), lambda r, l: oracles.tensor_train_two(r, l, b, c))


@given(sizes, sizes, st.integers(1, 4))
@small_settings
def test_btt_by_hand(i: int, o: int, rank: int) -> None:
    check_oracle(bt.BTT(rank=rank).chain(i, o), oracles.btt_two)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("d_in", "d_out", "rank"), [(8, 12, (2, 3)), (12, 8, (3, 1)), (7, 8, (2, 2)), (8, 16, (1, 2, 2)), (6, 6, (2,))]
)
def test_more_cores_by_hand(blocks: bool, d_in: int, d_out: int, rank: tuple[int, ...]) -> None:
    cores = len(rank) + 1
    structure = (bt.BTT if blocks else bt.TensorTrain)(rank=rank, cores=cores)
    # The first axis is the slow and large one: split() is ascending.
    n, m = bt.split(d_in, cores)[::-1], bt.split(d_out, cores)[::-1]
    rows = "last made last" if blocks else "natural"
    check_oracle(
        structure.chain(d_in, d_out), lambda *g: oracles.train(list(g[::-1]), m, n, rank, blocks=blocks, rows=rows)
    )


@given(sizes, sizes, st.integers(1, 6))
@small_settings
def test_block_diagonal_by_hand(i: int, o: int, blocks: int) -> None:
    chain = bt.BlockDiagonal(blocks=blocks).chain(i, o)

    def expected(w: np.ndarray) -> np.ndarray:
        return in_our_order(oracles.block_diagonal(w), chain.factors[0].blocks, i, o)

    check_oracle(chain, expected)


@given(sizes, sizes, st.integers(1, 6))
@example(140, 56, 4)
@example(16, 16, 4)
@small_settings
def test_monarch_by_hand(i: int, o: int, blocks: int) -> None:
    chain = bt.Monarch(blocks=blocks).chain(i, o)

    def expected(right: np.ndarray, left: np.ndarray) -> np.ndarray:
        return in_our_order(oracles.monarch(right, left), chain.factors[0].blocks, i, o)

    check_oracle(chain, expected)


def in_our_order(w: np.ndarray, blocks: int, d_in: int, d_out: int) -> np.ndarray:
    """Blocks are slow on a side that they divide, and fast on one that is padded."""
    placed = np.zeros_like(w)
    rows, columns = (list(range(n)) for n in w.shape)
    if d_out % blocks:
        rows = oracles.interleave(blocks, w.shape[0] // blocks)
    if d_in % blocks:
        columns = oracles.interleave(blocks, w.shape[1] // blocks)
    placed[np.ix_(rows, columns)] = w
    return placed


@given(sizes, sizes, st.integers(1, 6))
@small_settings
def test_convolution_by_hand(i: int, o: int, kernel_size: int) -> None:
    n = min(i, o)
    c = -(-i // n)
    check_oracle(bt.Convolution(kernel_size=kernel_size).chain(i, o), lambda k: oracles.convolution(k, n, c))


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_weight_normalization_by_hand(scale: float) -> None:
    layer = bt.StructuredLinear(16, 24, bt.BTT(rank=2), normalize=True, dtype=torch.float64)
    nominal = {f.name: bt.init_std(f) for f in layer.chain.factors}
    with torch.no_grad():
        for k, (name, w) in enumerate(layer.factors.items()):
            w.mul_(scale)
            layer.gains[name].fill_(1.0 + k)
    expected = [
        oracles.weight_normalized(w.detach().numpy(), nominal[name], 1.0 + k)
        for k, (name, w) in enumerate(layer.factors.items())
    ]
    for actual, exact in zip(layer.effective_factors(), expected, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), exact, rtol=1e-12)
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), oracles.btt_two(*expected), rtol=1e-10, atol=1e-14)


def test_weight_normalization_caps_the_scale_and_passes_what_is_below() -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=2), normalize=True, dtype=torch.float64)
    stored = [w.detach().clone() for w in layer.factors.values()]

    def effective(scale: float) -> list[torch.Tensor]:
        with torch.no_grad():
            for w, old in zip(layer.factors.values(), stored, strict=True):
                w.copy_(scale * old)
        return [w.detach() for w in layer.effective_factors()]

    for f, at_ten, at_hundred in zip(layer.chain.factors, effective(10.0), effective(100.0), strict=True):
        assert at_ten.square().mean().sqrt().item() == pytest.approx(bt.init_std(f), rel=1e-6)
        torch.testing.assert_close(at_ten, at_hundred, rtol=1e-6, atol=0)
    for old, passed in zip(stored, effective(0.1), strict=True):
        assert torch.equal(passed, 0.1 * old)


def test_zero_start_of_the_paper() -> None:
    layer = bt.StructuredLinear(1024, 1024, bt.BTT(rank=2), zero_init=True)
    y = layer(torch.randn(4, 1024))
    assert torch.count_nonzero(y) == 0
    y.sum().backward()
    assert torch.count_nonzero(layer.factors["R"].grad) == 0
    assert torch.count_nonzero(layer.factors["L"].grad) > 0
    assert layer.factors["R"].std().item() == pytest.approx(1 / sqrt(32), rel=0.02)


@given(sizes, sizes)
@small_settings
def test_kronecker_is_the_rank_one_train(i: int, o: int) -> None:
    one, two = bt.Kronecker().chain(i, o), bt.TensorTrain(rank=1).chain(i, o)
    stored = random_factors(one)
    assert [f.shape for f in one.factors] == [f.shape for f in two.factors]
    np.testing.assert_allclose(dense_form(one, stored), dense_form(two, stored), atol=1e-13)


@given(sizes, sizes, st.integers(1, 3))
@small_settings
def test_block_train_with_equal_blocks_is_the_train(i: int, o: int, rank: int) -> None:
    plain, block = bt.TensorTrain(rank=rank).chain(i, o), bt.BTT(rank=rank).chain(i, o)
    right, left = random_factors(plain)
    tied = [w.expand(f.blocks, -1, -1) for w, f in zip((right, left), block.factors, strict=True)]
    # The whole of both matrices, so that the order of rows, (a, b) and (b, a), can be compared.
    a, b = plain.sizes["a"], plain.sizes["b"]
    c, d = plain.sizes["c"], plain.sizes["d"]
    whole_plain, whole_block = bt.TensorTrain(rank=rank).chain(c * d, a * b), bt.BTT(rank=rank).chain(c * d, a * b)
    one = dense_form(whole_plain, [right, left]).reshape(a, b, -1).swapaxes(0, 1).reshape(a * b, -1)
    np.testing.assert_allclose(one, dense_form(whole_block, tied), atol=1e-13)


@pytest.mark.parametrize("root", [1, 2, 3, 5, 8])
def test_rank_one_block_train_is_monarch_with_root_d_blocks(root: int) -> None:
    d = root * root
    block, monarch = bt.BTT(rank=1).chain(d, d), bt.Monarch(blocks=root).chain(d, d)
    stored = random_factors(block)
    assert [f.shape for f in block.factors] == [f.shape for f in monarch.factors]
    np.testing.assert_allclose(dense_form(block, stored), dense_form(monarch, stored), atol=1e-13)


def test_low_rank_rounding() -> None:
    def rank(structure: bt.LowRank, d: int) -> int:
        return structure.chain(d, d).factors[0].d_out

    # Roots are taken exactly: floating point would give 94 for 8649 = 93 ** 2.
    for root in (1, 2, 93, 99, 105, 117, 123):
        assert rank(bt.LowRank(), root**2) == root
        assert rank(bt.LowRank(), root**2 + 1) == root + 1
    assert [rank(bt.LowRank(fraction=0.1), d) for d in (1, 5, 10, 11, 30, 64)] == [1, 1, 1, 2, 3, 7]
    assert rank(bt.LowRank(fraction=1.0), 12) == 12
    assert rank(bt.LowRank(fraction=0.07), 100) == 7  # 0.07 * 100 is 7.000000000000001
