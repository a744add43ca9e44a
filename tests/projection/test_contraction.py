"""The matrix by contraction, decompositions that ranks share, and both forms of the normal equations."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.core.structures import Structure
from buttress.projection import refinement, splitting
from buttress.projection.closed_form import Target, draft, refined
from buttress.projection.contraction import is_contractible, matrix
from buttress.projection.splitting import shared_svds, truncated_svd

STRUCTURES = [
    bt.LowRank(rank=3), bt.Kronecker(), bt.TensorTrain(rank=2), bt.TensorTrain(rank=2, cores=3), bt.BTT(rank=2),
    bt.BTT(rank=2, cores=3), bt.Monarch(blocks=3), bt.Monarch(blocks=4), bt.BlockDiagonal(blocks=3), bt.Dense(),
    bt.Convolution(kernel_size=3), bt.BLAST(blocks=3, rank=2), bt.Sum(bt.LowRank(rank=2), bt.BTT(rank=1)),
]  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize(("d_in", "d_out"), [(24, 36), (23, 31), (16, 16)])
def test_it_is_the_matrix_of_the_chain(structure: Structure, d_in: int, d_out: int) -> None:
    chain = structure.chain(d_in, d_out)
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(f.shape, generator=generator, dtype=torch.float64) for f in chain.factors]
    torch.testing.assert_close(matrix(chain, factors), ops.dense(chain, factors))


def test_axes_of_inputs_and_outputs_and_regroups_are_left_to_the_definition() -> None:
    assert is_contractible(bt.BTT(rank=2).chain(24, 36))
    assert not is_contractible(bt.BlockDiagonal(blocks=3).chain(24, 36))
    assert not is_contractible(bt.Convolution(kernel_size=3).chain(24, 24))


@pytest.mark.parametrize("structure", [bt.BTT(rank=3), bt.Monarch(blocks=4), bt.TensorTrain(rank=4)], ids=str)
def test_both_forms_of_the_equations_give_the_same_factors(
    structure: Structure, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (32, 200))
    target = Target.of(weight, x.mT @ x / 200)
    results = []
    for by_matrix in (True, False):
        monkeypatch.setattr(refinement, "_is_cheaper_by_matrix", lambda *_, answer=by_matrix: answer)
        results.append(refined(draft(structure, target), target, 3).tensors)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


class TestSharedSvds:
    def test_ranks_of_a_family_share_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decomposed: list[tuple[int, ...]] = []
        svd = torch.linalg.svd

        def counted(blocks: torch.Tensor, **options: bool) -> object:
            decomposed.append(tuple(blocks.shape))
            return svd(blocks, **options)

        monkeypatch.setattr(torch.linalg, "svd", counted)
        target = Target.of(torch.randn(36, 24, generator=torch.Generator().manual_seed(0)), torch.eye(24))
        members = [bt.BTT(rank=rank) for rank in (1, 2, 3)]
        with shared_svds():
            shared = [draft(member, target).tensors for member in members]
        assert len(decomposed) == 2  # with and without the moments
        alone = [draft(member, target).tensors for member in members]
        assert len(decomposed) == 2 + 6
        assert all(torch.equal(a, b) for x, y in zip(shared, alone, strict=True) for a, b in zip(x, y, strict=True))

    def test_other_numbers_are_decomposed(self) -> None:
        one, other = torch.eye(3)[None], 2 * torch.eye(3)[None]
        with shared_svds():
            roots = [truncated_svd(blocks, 2)[2] for blocks in (one, other, one)]
        assert torch.equal(roots[0], roots[2])
        assert not torch.equal(roots[0], roots[1])

    def test_nothing_is_kept_afterwards(self) -> None:
        with shared_svds():
            truncated_svd(torch.eye(3)[None], 2)
        assert splitting.LATEST.get() is None


def test_very_many_outputs_keep_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over a vocabulary of 49,152 would need 10 GB for its equations alone."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((1 << 14) + 1, 8, generator=generator)
    target = Target.of(weight, torch.eye(8) + 0.5)
    start = draft(bt.Monarch(blocks=2), target)
    monkeypatch.setattr("buttress.projection.closed_form.refine", None)
    after = refined(start, target, 2)
    assert after.sweeps == 2
    assert all(torch.equal(a, b) for a, b in zip(after.tensors, start.tensors, strict=True))
