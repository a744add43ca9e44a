"""Projection: as near as the theory allows, exact where it can be, and clear where it cannot."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import buttress as bt
import oracles
from buttress import ops
from projection_cases import STRUCTURES, capped, dense_form, matrix

sizes = st.integers(1, 30)
few_examples = settings(deadline=None, derandomize=True, max_examples=25)


def check_lost(structure: bt.Structure, weight: Tensor, lost: float) -> None:
    """The projection loses exactly this sum of squares, and says so."""
    structure = capped(structure, weight.shape[1], weight.shape[0])
    projection = bt.project(structure, weight)
    gone = (dense_form(structure, projection, weight) - weight).square().sum().item()
    total = weight.square().sum().item()
    np.testing.assert_allclose(gone, lost, rtol=1e-9, atol=1e-22 * total)
    np.testing.assert_allclose(projection.relative_error, (lost / total) ** 0.5, rtol=1e-9, atol=1e-11)


def padded(weight: Tensor, rows: int, columns: int) -> np.ndarray:
    out = np.zeros((rows, columns))
    out[: weight.shape[0], : weight.shape[1]] = weight.numpy()
    return out


# ---------------------------------------------------------------- optimal with two factors


@given(sizes, sizes, st.integers(1, 5))
@few_examples
def test_low_rank_is_eckart_young(i: int, o: int, rank: int) -> None:
    w = matrix(o, i)
    check_lost(bt.LowRank(rank=rank), w, oracles.svd_tail(w.numpy(), rank))


@given(sizes, sizes, st.integers(1, 5))
@example(13, 29, 1)
@few_examples
def test_block_train_is_the_best_of_every_block(i: int, o: int, rank: int) -> None:
    w = matrix(o, i)
    (d, c), (b, a) = bt.split(i, 2), bt.split(o, 2)
    blocks = padded(w, b * a, c * d).reshape(b, a, c, d)
    lost = sum(oracles.svd_tail(blocks[p, :, q, :], rank) for p in range(b) for q in range(c))
    check_lost(bt.BTT(rank=rank), w, lost)


@given(sizes, sizes, st.integers(1, 6))
@example(12, 12, 4)
@example(16, 16, 4)
@example(14, 30, 4)
@few_examples
def test_monarch_is_the_best_of_every_block(i: int, o: int, blocks: int) -> None:
    w = matrix(o, i)
    g = min(blocks, i, o)
    d, e = -(-i // g), -(-o // g)
    q = min(d, e)
    whole = padded(w, g * e, g * d)
    lost = 0.0
    for p in range(g):
        columns = range(p * d, (p + 1) * d) if i % g == 0 else range(p, g * d, g)
        for h in range(g):
            rows = range(h * e, (h + 1) * e) if o % g == 0 else range(h, g * e, g)
            # Entry j of stage one, in block j div q, goes to block j mod g of stage two.
            terms = sum(j % g == h for j in range(p * q, (p + 1) * q))
            lost += oracles.svd_tail(whole[np.ix_(rows, columns)], terms)
    check_lost(bt.Monarch(blocks=blocks), w, lost)


@pytest.mark.parametrize(("i", "o"), [(6, 6), (12, 20), (20, 12), (16, 16), (1, 6), (30, 2), (36, 24)])
@pytest.mark.parametrize("rank", [1, 2, 3, 50])
def test_train_is_van_loan(i: int, o: int, rank: int) -> None:
    (d, c), (b, a) = bt.split(i, 2), bt.split(o, 2)
    assert (c * d, a * b) == (i, o)
    w = matrix(o, i)
    rearranged = w.numpy().reshape(a, b, c, d).transpose(0, 2, 1, 3).reshape(a * c, b * d)
    check_lost(bt.TensorTrain(rank=rank), w, oracles.svd_tail(rearranged, rank))
    if rank == 1:
        check_lost(bt.Kronecker(), w, oracles.svd_tail(rearranged, 1))


@given(sizes, sizes, st.integers(1, 6))
@few_examples
def test_block_diagonal_keeps_its_blocks(i: int, o: int, blocks: int) -> None:
    w = matrix(o, i)
    structure = bt.BlockDiagonal(blocks=blocks)
    chain = structure.chain(i, o)
    # Ones in every block show which entries of the matrix the structure has.
    mask = ops.dense(chain, [torch.ones(f.shape, dtype=torch.float64) for f in chain.factors])
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    check_lost(structure, w, (w * (1 - mask)).square().sum().item())


@given(sizes, sizes, st.integers(1, 6))
@few_examples
def test_convolution_takes_means_along_the_ring(i: int, o: int, kernel_size: int) -> None:
    w = matrix(o, i)
    structure = bt.Convolution(kernel_size=kernel_size)
    chain = structure.chain(i, o)
    # The map from the kernel to the matrix is linear: least squares is the oracle.
    count = chain.params
    design = np.stack(
        [
            ops.dense(chain, [torch.eye(count, dtype=torch.float64)[k].reshape(chain.factors[0].shape)]).numpy().ravel()
            for k in range(count)
        ],
        axis=1,
    )
    best = np.linalg.lstsq(design, w.numpy().ravel())[0]
    check_lost(structure, w, float(np.sum((design @ best - w.numpy().ravel()) ** 2)))


def test_rank_one_block_train_projects_like_monarch() -> None:
    w = matrix(64, 64)
    block, monarch = bt.BTT(rank=1), bt.Monarch(blocks=8)
    one, two = bt.project(block, w), bt.project(monarch, w)
    assert one.relative_error == pytest.approx(two.relative_error, rel=1e-12)
    torch.testing.assert_close(dense_form(block, one, w), dense_form(monarch, two, w), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- exact where it can be


@pytest.mark.parametrize(
    ("structure", "i", "o"),
    [
        (bt.Dense(), 13, 7),
        (bt.LowRank(rank=7), 13, 7),
        (bt.LowRank(fraction=1.0), 7, 13),
        (bt.Monarch(blocks=1), 13, 7),
        (bt.BlockDiagonal(blocks=1), 13, 7),
        (bt.BTT(rank=4), 20, 30),  # blocks of 6 x 4
        (bt.BTT(rank=3), 13, 29),
        (bt.BTT(rank=8), 64, 64),
        (bt.TensorTrain(rank=20), 20, 30),  # the smaller of 6 * 5 and 5 * 4
        (bt.BTT(rank=3, cores=3), 27, 27),  # d ** (1 / 3), the paper's bound
        (bt.BTT(rank=(2, 4, 2), cores=4), 16, 16),  # d ** (min(t, c - t) / c)
        (bt.TensorTrain(rank=(4, 16, 4), cores=4), 16, 16),  # the square of it
        (bt.Convolution(kernel_size=1), 1, 1),
    ],
    ids=str,
)
def test_any_matrix_at_full_rank(structure: bt.Structure, i: int, o: int) -> None:
    w = matrix(o, i)
    projection = bt.project(structure, w)
    assert projection.relative_error < 1e-12
    torch.testing.assert_close(dense_form(structure, projection, w), w, rtol=0, atol=1e-11 * w.abs().max().item())


@pytest.mark.parametrize(
    ("structure", "i", "o"), [(bt.BTT(rank=3), 20, 30), (bt.TensorTrain(rank=19), 20, 30), (bt.BTT(2, 3), 27, 27)]
)
def test_one_rank_less_is_not_enough(structure: bt.Structure, i: int, o: int) -> None:
    assert bt.project(structure, matrix(o, i)).relative_error > 1e-6


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize(("i", "o"), [(24, 36), (36, 24), (64, 64), (1, 1)])
def test_projecting_twice_changes_nothing(text: str, i: int, o: int) -> None:
    structure = capped(bt.parse(text), i, o)
    w = matrix(o, i)
    once = dense_form(structure, bt.project(structure, w), w)
    again = bt.project(structure, once)
    assert again.relative_error < 1e-11
    torch.testing.assert_close(dense_form(structure, again, w), once, rtol=0, atol=1e-10 * once.abs().max().item())


@pytest.mark.parametrize("text", [t for t in STRUCTURES if "train" not in t and t != "kronecker"])
@pytest.mark.parametrize(("i", "o"), [(13, 29), (29, 13), (31, 31), (2, 67)])
def test_projecting_twice_changes_nothing_with_padding(text: str, i: int, o: int) -> None:
    structure = capped(bt.parse(text), i, o)
    w = matrix(o, i)
    once = dense_form(structure, bt.project(structure, w), w)
    assert bt.project(structure, once).relative_error < 1e-11


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize(("i", "o"), [(24, 36), (13, 29), (47, 5)])
def test_never_worse_than_zero(text: str, i: int, o: int) -> None:
    for seed in range(3):
        assert bt.project(capped(bt.parse(text), i, o), matrix(o, i, seed)).relative_error <= 1


# ---------------------------------------------------------------- more cores


def tails(parts: np.ndarray, rank: int) -> float:
    """Loss of the best approximation of this rank of each matrix of a stack."""
    return float(np.sum(np.linalg.svd(parts, compute_uv=False)[..., rank:] ** 2))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_three_core_train_is_within_the_tt_svd_bound(rank: int) -> None:
    """Oseledets: the greedy recursion loses no more than the bonds lose one by one, and no less than any of them."""
    for seed in range(12):
        w = matrix(27, 27, seed)
        t = w.numpy().reshape(3, 3, 3, 3, 3, 3).transpose(0, 3, 1, 4, 2, 5)
        first, second = tails(t.reshape(9, 81), rank), tails(t.reshape(81, 9), rank)
        lost = bt.project(bt.TensorTrain(rank=rank, cores=3), w).relative_error ** 2 * w.square().sum().item()
        assert max(first, second) * (1 - 1e-9) <= lost <= (first + second) * (1 + 1e-9), seed


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_three_core_block_train_is_within_the_same_bound(ranks: tuple[int, int]) -> None:
    """As for the train, block by block: (i3, j1, j2) are fixed at the first bond, (i2, i3, j1) at the second."""
    for seed in range(40):
        w = matrix(27, 27, seed)
        # Rows are ordered (i2, i3, i1).
        t = w.numpy().reshape(3, 3, 3, 3, 3, 3)
        near_x = tails(t.transpose(1, 3, 4, 2, 0, 5).reshape(27, 9, 3), ranks[1])
        near_y = tails(t.transpose(0, 1, 3, 2, 4, 5).reshape(27, 3, 9), ranks[0])
        lost = bt.project(bt.BTT(rank=ranks, cores=3), w).relative_error ** 2 * w.square().sum().item()
        assert lost >= max(near_x, near_y) * (1 - 1e-9), seed
        assert lost <= (near_x + near_y) * (1 + 1e-9), seed


@pytest.mark.parametrize("kind", [bt.BTT, bt.TensorTrain])
@pytest.mark.parametrize(("cores", "d", "full"), [(2, 36, 36), (3, 27, 9), (4, 16, 16)])
def test_full_rank_is_exact_and_every_rank_better_than_none(kind: Any, cores: int, d: int, full: int) -> None:
    w = matrix(d, d)
    errors = [bt.project(capped(kind(rank=r, cores=cores), d, d), w).relative_error for r in (1, 2, full)]
    assert errors[0] < 1
    assert errors[-1] < 1e-11
    if cores == 2:
        assert errors[1] < errors[0]


# ---------------------------------------------------------------- chains of other people


@dataclass(init=False, eq=False)
class Declared(bt.Structure):
    """A chain given as it is; it is not registered, so that nothing else finds it."""

    name = "declared"

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        return bt.Chain.of(d_in, d_out, **self.parts)


DEALT = {"g": 2, "d": 3, "q": 3, "k": 3, "h": 2, "e": 3, "f": 3}


@pytest.mark.parametrize(
    "structure",
    [
        Declared(x="n", factors={"D": "n"}, y="n", sizes={"n": 6}),
        Declared(x="g d", factors={"A": "g q d", "B": "h e k"}, y="h e", sizes=DEALT, regroup={"B": ("g q", "k h")}),
        Declared(x="g d", factors={"A": "q d", "B": "h e k"}, y="h e", sizes=DEALT, regroup={"B": ("g q", "k h")}),
        Declared(
            x="g d",
            factors={"A": "g q d", "B": "h e k", "C": "h f e"},
            y="h f",
            sizes=DEALT,
            regroup={"B": ("g q", "k h")},
        ),
        Declared(x="m", factors={"A": "h e k"}, y="h e", sizes=DEALT | {"m": 6}, regroup={"A": ("m", "h k")}),
        Declared(
            x="n c", factors={"K": "c w", "P": "e c"}, y="n e", sizes={"n": 3, "c": 2, "w": 3, "e": 2}, window="n w"
        ),
    ],
    ids=["diagonal", "dealt", "dealt and shared", "dealt then mixed", "dealt first", "separable"],
)
def test_any_chain_finds_its_own_or_is_rejected_clearly(structure: bt.Structure) -> None:
    chain = structure.chain(6, 6)
    generator = torch.Generator().manual_seed(0)
    w = ops.dense(chain, [torch.randn(f.shape, dtype=torch.float64, generator=generator) for f in chain.factors])
    try:
        outcome = bt.project(structure, w).relative_error
    except bt.ButtressError:
        outcome = "rejected"
    assert outcome == "rejected" or outcome < 1e-11


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes(text: str, dtype: torch.dtype) -> None:
    structure = capped(bt.parse(text), 24, 36)
    w = torch.randn(36, 24, dtype=torch.float64).to(dtype)
    projection = bt.project(structure, w)
    assert {t.dtype for t in projection.factors.values()} == {dtype}
    # The arithmetic is float32 at least: the error is that of the same numbers in float64.
    exact = bt.project(structure, w.double())
    assert projection.relative_error == pytest.approx(exact.relative_error, rel=1e-4, abs=1e-5)
    near = ops.dense(structure.chain(24, 36), [t.double() for t in projection.factors.values()])
    error = ((near - w.double()).norm() / w.double().norm()).item()
    # Rounding each of k factors once costs at most eps / 2 each, relative to what they make.
    assert error == pytest.approx(exact.relative_error, abs=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", ["low_rank(rank=4)", "btt(rank=2)", "btt(cores=3)", "monarch", "tensor_train(rank=2)"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_factors_are_balanced(text: str, scale: float) -> None:
    """Each is as much larger than its initial deviation as the others, so that all of them learn alike."""
    structure = bt.parse(text)
    factors = bt.project(structure, scale * matrix(24, 36)).factors
    ratios = [factors[f.name].square().mean().sqrt().item() / bt.init_std(f) for f in structure.chain(36, 24).factors]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-6)


def test_zero_matrix() -> None:
    for text in STRUCTURES:
        structure = capped(bt.parse(text), 24, 36)
        projection = bt.project(structure, torch.zeros(36, 24))
        assert projection.relative_error == 0
        assert torch.count_nonzero(dense_form(structure, projection, torch.zeros(36, 24))) == 0
        assert all(t.isfinite().all() for t in projection.factors.values())


def test_weight_is_left_alone() -> None:
    layer = nn.Linear(24, 36)
    before = layer.weight.detach().clone()
    projection = bt.project(bt.BTT(), layer.weight)
    assert torch.equal(layer.weight, before)
    assert not any(t.requires_grad for t in projection.factors.values())


def test_strided_weight() -> None:
    w = matrix(24, 36).T
    for text in STRUCTURES:
        structure = capped(bt.parse(text), 24, 36)
        one, two = bt.project(structure, w), bt.project(structure, w.contiguous())
        assert one.relative_error == pytest.approx(two.relative_error, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize("normalize", [False, True])
def test_layer_from_dense_is_the_projection(text: str, normalize: bool) -> None:
    linear = nn.Linear(24, 36, dtype=torch.float64)
    structure = capped(bt.parse(text), 24, 36)
    layer = bt.StructuredLinear.from_dense(linear, structure, normalize=normalize)
    projection = bt.project(structure, linear.weight)
    near = dense_form(structure, projection, linear.weight)
    torch.testing.assert_close(layer.to_dense().detach(), near, rtol=1e-9, atol=1e-12)
    assert torch.equal(layer.bias, linear.bias)
    x = torch.randn(3, 24, dtype=torch.float64)
    if projection.relative_error < 1e-11:
        torch.testing.assert_close(layer(x), linear(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), ()])
def test_only_matrices(shape: tuple[int, ...]) -> None:
    with pytest.raises(bt.ShapeError, match=r"project takes a \(d_out, d_in\) matrix, got a tensor of shape"):
        bt.project(bt.BTT(), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_empty_matrices(shape: tuple[int, int]) -> None:
    for text in STRUCTURES:
        with pytest.raises(bt.ButtressError, match=r">= 1, got 0|got a size of 0"):
            bt.project(bt.parse(text), torch.zeros(shape))


@pytest.mark.parametrize(
    ("structure", "i", "o", "most"),
    [(bt.BTT(rank=5), 20, 30, 4), (bt.LowRank(rank=21), 20, 30, 20), (bt.TensorTrain(rank=21), 20, 30, 20)],
)
def test_a_rank_above_the_bound_raises_an_error_with_advice(structure: bt.Structure, i: int, o: int, most: int) -> None:
    with pytest.raises(bt.StructureError, match=f"any {o} × {i} matrix exactly: use a rank of at most {most}$"):
        bt.project(structure, matrix(o, i))
    assert bt.project(capped(structure, i, o), matrix(o, i)).relative_error < 1e-11


@pytest.mark.slow
def test_a_large_layer_takes_seconds() -> None:
    begin = time.perf_counter()
    bt.project(bt.BTT(rank=16), torch.randn(4096, 4096))
    assert time.perf_counter() - begin < 20


@pytest.mark.gpu
@pytest.mark.parametrize("structure", [bt.LowRank(rank=40), bt.Monarch(4), bt.BTT(rank=2), bt.BTT(rank=2, cores=3)])
def test_a_gpu_finds_the_same(structure: bt.Structure) -> None:
    weight, inputs = torch.randn(384, 192), torch.randn(1000, 192) * torch.linspace(0.1, 3, 192)
    input_moments = inputs.T @ inputs / 1000
    for moments in (None, input_moments):
        on_cpu = bt.project(structure, weight, moments=moments)
        on_gpu = bt.project(structure, weight.cuda(), moments=None if moments is None else moments.cuda())
        assert {f.device.type for f in on_gpu.factors.values()} == {"cuda"}
        assert on_gpu.output_error == pytest.approx(on_cpu.output_error, rel=1e-3)


def test_a_text_is_a_structure() -> None:
    weight = torch.randn(12, 8)
    by_text, by_structure = bt.project("btt(rank=2)", weight), bt.project(bt.BTT(rank=2), weight)
    assert by_text.relative_error == by_structure.relative_error
    with pytest.raises(bt.StructureError, match=r"that is the class: write BTT\(\.\.\.\)"):
        bt.project(bt.BTT, weight)
    with pytest.raises(bt.StructureError, match="did you mean 'btt'"):
        bt.project("bt", weight)
