"""Bonds that three factors share: exact matrices are recovered, and others are approximated better than before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from projection_cases import correlated, dense_form, matrix, outputs_off


def own_matrix(structure: bt.Structure, d_in: int, d_out: int, seed: int = 0) -> Tensor:
    """A matrix that has the structure."""
    chain = structure.chain(d_in, d_out)
    generator = torch.Generator().manual_seed(seed)
    return ops.dense(
        chain, [torch.randn(f.shape, dtype=torch.float64, generator=generator) * bt.init_std(f) for f in chain.factors]
    )


def gaussian(d_out: int, d_in: int) -> Tensor:
    return torch.randn(d_out, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def power_law(d_out: int, d_in: int) -> Tensor:
    """Singular values 1, 1/2, 1/3, ..., as trained weights roughly have them."""
    u, s, vh = torch.linalg.svd(gaussian(d_out, d_in), full_matrices=False)
    return (u / torch.arange(1, len(s) + 1, dtype=torch.float64)) @ vh


@dataclass(init=False, eq=False)
class AnyChain(bt.Structure):
    """A chain given as it is; it is not registered, so that nothing else finds it."""

    name = "any_chain"

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        return bt.Chain.of(d_in, d_out, **self.parts)


def test_coupled_bonds_are_those_of_three_factors() -> None:
    assert bt.BLAST().chain(64, 64).coupled_bonds == ("r",)
    for structure in (
        bt.BTT(rank=2, cores=4),
        bt.TensorTrain(rank=2, cores=3),
        bt.Monarch(4),
        bt.LowRank(),
        bt.Dense(),
    ):
        assert structure.chain(64, 64).coupled_bonds == ()


# ---------------------------------------------------------------- matrices that have the structure


@pytest.mark.parametrize(
    ("i", "o", "blocks", "rank"),
    [
        (64, 64, 4, 1),
        (64, 64, 4, 8),
        (64, 64, 4, 16),  # the side of a block
        (64, 64, 2, 16),
        (64, 96, 4, 12),
        (96, 64, 4, 16),
        (65, 67, 4, 12),
        (63, 62, 3, 9),
        (128, 128, 16, 8),
        (256, 256, 4, 32),
        (37, 53, 1, 9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_matrix_is_recovered_at_once(i: int, o: int, blocks: int, rank: int, dtype: torch.dtype) -> None:
    structure = bt.BLAST(blocks=blocks, rank=rank)
    for seed in range(2):
        w = own_matrix(structure, i, o, seed).to(dtype)
        projection = bt.project(structure, w, sweeps=0)
        assert projection.relative_error < (1e-9 if dtype == torch.float64 else 1e-4)
        torch.testing.assert_close(dense_form(structure, projection, w), w, rtol=0, atol=1e-3 * w.abs().max().item())


@pytest.mark.parametrize(("d", "blocks", "rank"), [(64, 4, 16), (128, 4, 32), (128, 8, 16), (120, 5, 24)])
def test_float32_at_the_largest_rank_needs_the_default_sweeps(d: int, blocks: int, rank: int) -> None:
    """There the bases are ill-conditioned, and rounding of the matrix alone changes them."""
    structure = bt.BLAST(blocks=blocks, rank=rank)
    for seed in range(2):
        assert bt.project(structure, own_matrix(structure, d, d, seed).float()).relative_error < 1e-3


@pytest.mark.parametrize(("i", "o", "blocks", "rank"), [(48, 64, 4, 8), (49, 62, 4, 8)])
def test_an_exact_matrix_is_recovered_on_correlated_inputs(i: int, o: int, blocks: int, rank: int) -> None:
    structure = bt.BLAST(blocks=blocks, rank=rank)
    w, x = own_matrix(structure, i, o), correlated(i)
    for sweeps in (0, 3):
        projection = bt.project(structure, w, moments=x.T @ x / len(x), sweeps=sweeps)
        assert outputs_off(structure, projection, w, x) < 1e-6


@pytest.mark.parametrize("noise", [1e-4, 1e-3])
def test_an_almost_exact_matrix_is_recovered_up_to_its_noise(noise: float) -> None:
    structure = bt.BLAST(blocks=4, rank=8)
    w = own_matrix(structure, 64, 64)
    noisy = w + noise * w.std() * gaussian(64, 64)
    assert bt.project(structure, noisy, sweeps=10).relative_error < 1.5 * noise


@pytest.mark.parametrize(
    ("structure", "i", "o", "sweeps"),
    [
        (bt.BTT(rank=2, cores=3), 64, 64, 0),
        (bt.BTT(rank=(2, 3), cores=3), 48, 60, 0),
        (bt.BTT(rank=2, cores=4), 81, 81, 0),
        (bt.TensorTrain(rank=4, cores=3), 64, 64, 0),
        (bt.TensorTrain(rank=3, cores=4), 81, 81, 0),
    ],
    ids=str,
)
def test_more_cores_are_recovered_at_once(structure: bt.Structure, i: int, o: int, sweeps: int) -> None:
    w = own_matrix(structure, i, o)
    assert bt.project(structure, w, sweeps=sweeps).relative_error < 1e-9


SIZES = {"b": 3, "c": 3, "a": 5, "d": 6, "r": 4, "m": 3, "g": 2, "e": 3, "n": 3, "f": 2}


@pytest.mark.parametrize(
    ("d_in", "d_out", "parts"),
    [
        (18, 15, {"x": "d c", "factors": {"V": "c r d", "S": "b c r", "U": "b a r"}, "y": "a b"}),
        # An axis of the factor in between alone: the decomposition of a three-way tensor.
        (6, 15, {"x": "d", "factors": {"V": "r d", "S": "m r", "U": "a r"}, "y": "m a"}),
        # An axis that all factors have.
        (36, 30, {"x": "g c d", "factors": {"V": "g c r d", "S": "g b c r", "U": "g b a r"}, "y": "g b a"}),
        # Two factors in between.
        (36, 30, {"x": "f c d", "factors": {"V": "f c r d", "S": "f c r", "T": "b f r", "U": "b a r"}, "y": "b a"}),
    ],
    ids=["reordered", "three-way", "independent", "two between"],
)
def test_other_chains_with_a_coupled_bond(d_in: int, d_out: int, parts: dict[str, Any]) -> None:
    names = {a for text in (parts["x"], parts["y"], *parts["factors"].values()) for a in text.split()}
    sizes = {a: SIZES[a] for a in names}
    d_out = torch.Size([sizes[a] for a in parts["y"].split()]).numel()
    structure = AnyChain(**parts, sizes=sizes)
    assert structure.chain(d_in, d_out).coupled_bonds == ("r",)
    w = own_matrix(structure, d_in, d_out)
    assert bt.project(structure, w, sweeps=0).relative_error < 1e-9


# ---------------------------------------------------------------- any matrix


@pytest.mark.parametrize(("blocks", "rank"), [(4, 4), (4, 12), (8, 12), (3, 30)])
@pytest.mark.parametrize("weight", [matrix(48, 36), gaussian(48, 36), power_law(48, 36), power_law(47, 35)])
def test_never_worse_than_low_rank(blocks: int, rank: int, weight: Tensor) -> None:
    """BLAST with all s = 1 is low rank."""
    low_rank = bt.project(bt.LowRank(rank=rank), weight).relative_error
    start, swept = (bt.project(bt.BLAST(blocks, rank), weight, sweeps=n).relative_error for n in (0, 3))
    assert start <= low_rank * (1 + 1e-9)
    assert swept < start


BEFORE = [
    (64, 4, 8, "gaussian", 0.7532, 0.7350),
    (64, 4, 16, "gaussian", 0.5125, 0.4858),
    (64, 4, 16, "power_law", 0.1562, 0.1469),
    (128, 4, 32, "gaussian", 0.5277, 0.4963),
]
"""Relative errors after 10 and 30 sweeps with SVDs by block and without steps of all factors together."""


@pytest.mark.parametrize(("d", "blocks", "rank", "kind", "at_10", "at_30"), BEFORE)
def test_sweeps_beat_one_factor_at_a_time(
    d: int, blocks: int, rank: int, kind: str, at_10: float, at_30: float
) -> None:
    weight = {"gaussian": gaussian, "power_law": power_law}[kind](d, d)
    for sweeps, before in ((10, at_10), (30, at_30)):
        assert bt.project(bt.BLAST(blocks, rank), weight, sweeps=sweeps).relative_error < before


def test_a_rank_longer_than_a_block_improves_with_sweeps() -> None:
    """No closed form is known to find these exactly; `docs/reference/limits.md` has this."""
    structure = bt.BLAST(blocks=8, rank=16)
    w = own_matrix(structure, 64, 64)
    errors = [bt.project(structure, w, sweeps=n).relative_error for n in (0, 10, 30)]
    assert errors[0] < 0.5
    assert errors[1] < 0.17
    assert errors[2] < 0.15


def test_a_rank_with_which_any_matrix_is_represented() -> None:
    assert bt.project(bt.BLAST(blocks=4, rank=24), matrix(24, 36), sweeps=0).relative_error < 1e-11
    with pytest.raises(bt.StructureError, match=r"a rank of 25 at the bond r is above 24, .* use a rank of at most 24"):
        bt.project(bt.BLAST(blocks=4, rank=25), matrix(24, 36))


@pytest.mark.parametrize("weight", [torch.zeros(24, 24), torch.eye(24), torch.ones(24, 24), torch.eye(24).flip(0)])
def test_matrices_without_a_basis(weight: Tensor) -> None:
    for rank in (1, 4, 6, 20):
        projection = bt.project(bt.BLAST(blocks=4, rank=rank), weight, sweeps=2)
        assert all(t.isfinite().all() for t in projection.factors.values())
        assert projection.relative_error <= 1
