"""Bases in which many matrices are diagonal at once."""

import pytest
import torch

from buttress.projection import diagonalization
from buttress.projection.diagonalization import diagonalizing_bases


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("g", "b", "c", "m", "rank"), [(1, 2, 2, 1, 5), (1, 3, 4, 1, 6), (2, 3, 2, 2, 4), (1, 1, 1, 3, 6)]
)
def test_the_bases_are_those_of_the_blocks(g: int, b: int, c: int, m: int, rank: int) -> None:
    """Up to the order of the rows, which all blocks share, and their signs."""
    left, middle = draw(g, b, 7, rank, seed=1), draw(g, b, c, m, rank, seed=2)
    right = torch.nn.functional.normalize(draw(g, c, rank, 6, seed=3), dim=-1)
    blocks = torch.einsum("gbhr,gbcmr,gcrw->gbcmhw", left, middle, right)
    bases = diagonalizing_bases(blocks, rank)
    assert bases is not None
    for problem in range(g):
        cosines = torch.einsum("crw,csw->crs", bases[problem], right[problem]).abs()
        order = cosines[0].argmax(-1)
        assert sorted(order.tolist()) == list(range(rank))
        matched = cosines[:, torch.arange(rank), order]
        torch.testing.assert_close(matched, torch.ones_like(matched), rtol=0, atol=1e-8)


def test_eigenvectors_that_are_no_basis_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = draw(1, 2, 2, 1, 4, 4, seed=4)
    defective = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64).expand(1, 2, 2, 2)
    monkeypatch.setattr(diagonalization, "_random_solution", lambda *_: defective)
    assert diagonalizing_bases(blocks, 2) is None


def test_blocks_without_a_common_basis_end_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonalization, "MAX_STEPS", 100)
    assert diagonalizing_bases(draw(1, 4, 4, 1, 16, 16, seed=5), 12) is None


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps give a finite result; so few that it would be useless, none."""
    blocks = torch.einsum(
        "gbhr,gbcmr,gcrw->gbcmhw", draw(1, 3, 8, 6, seed=5), draw(1, 3, 3, 1, 6, seed=6), draw(1, 3, 6, 8, seed=7)
    )
    step = 4 * 9 * 6**3
    for steps, exist in ((49, False), (50, True)):
        monkeypatch.setattr(diagonalization, "WORK", step * (steps + 0.5))
        bases = diagonalizing_bases(blocks, 6)
        assert (bases is not None) == exist
        assert bases is None or bases.isfinite().all()
