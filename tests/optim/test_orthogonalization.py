"""The nearest semi-orthogonal matrix, compared with the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress.optim.orthogonalization import (
    QUINTIC,
    Coefficients,
    largest_norm,
    minimax_coefficients,
    orthogonalize,
    spectral_norm_bounds,
)

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 3), (3, 5), (16, 16), (24, 32), (3, 1, 1), (4, 48, 6), (4, 6, 48), (2, 3, 9, 8)]
ERROR = 5e-3
"""Largest distance of a singular value from 1 after the default number of steps, where it was at least a thousandth."""


def polar(x: Tensor) -> Tensor:
    """U V^T over the singular values that are not zero."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u * (s > 1e-9 * s.amax(-1, keepdim=True)).unsqueeze(-2) @ vh


def conditioned(shape: tuple[int, ...], smallest: float) -> Tensor:
    """A matrix with singular values from 1 down to `smallest`, in float64."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(0, torch.tensor(smallest).log10().item(), u.shape[-1], dtype=torch.float64)
    return u * s @ vh


def spectral(x: Tensor) -> float:
    return torch.linalg.matrix_norm(x.double(), ord=2).max().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_polar_factor(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = conditioned(shape, 0.02)
    for scale in (1e-30, 1.0, 1e30):
        y = orthogonalize((scale * x).float())
        assert y.shape == shape
        assert spectral(y - polar(x)) < ERROR


@pytest.mark.parametrize(("steps", "error"), [(5, 0.18), (6, ERROR), (7, 2e-5), (9, 1e-5)])
@pytest.mark.parametrize("smallest", [2e-3, 1e-1])  # of a norm that is below twice the largest
def test_the_error_is_that_of_the_polynomials(steps: int, error: float, smallest: float) -> None:
    torch.manual_seed(0)
    x = conditioned((24, 40), smallest)
    assert spectral(orthogonalize(x, minimax_coefficients(steps)) - polar(x)) < error


@pytest.mark.parametrize(
    "coefficients",
    [minimax_coefficients(), minimax_coefficients(3), QUINTIC, ((1.5, -0.5, 0.0),) * 4, ((2.0, 0.0, 0.0),)],
)
def test_the_largest_norm(coefficients: tuple[Coefficients, ...]) -> None:
    values = x = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    bound = largest_norm(coefficients)
    assert values.max() <= bound * (1 + 1e-12)
    assert bound <= 1.05 * values.max()
    y = orthogonalize(torch.diag(x[::1000]), coefficients)
    assert spectral(y) <= bound * (1 + 1e-9)


def test_coefficients_that_oscillate_do_not_converge() -> None:
    torch.manual_seed(0)
    x = conditioned((24, 40), 1e-1)
    assert 0.1 < spectral(orthogonalize(x, QUINTIC) - polar(x)) < 0.35
    assert 0.1 < spectral(orthogonalize(x, 4 * QUINTIC) - polar(x)) < 0.35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cubic_steps(dtype: torch.dtype) -> None:
    """x -> 1.5 x - 0.5 x^3, the iteration of Newton and Schulz."""
    torch.manual_seed(0)
    x = conditioned((24, 40), 0.1)
    assert spectral(orthogonalize(x.to(dtype), ((1.5, -0.5, 0.0),) * 12) - polar(x.to(dtype))) < 0.03


@pytest.mark.parametrize("shape", [(6, 9), (3, 16, 8)], ids=str)
def test_zero_stays_zero(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(orthogonalize(torch.zeros(shape, dtype=dtype)), torch.zeros(shape, dtype=dtype))
    assert orthogonalize(torch.zeros(0, 3, 4)).shape == (0, 3, 4)


@pytest.mark.parametrize("rank", [1, 3])
def test_missing_directions_stay_missing(rank: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 12, rank, dtype=torch.float64) @ torch.randn(4, rank, 20, dtype=torch.float64)
    assert spectral(orthogonalize(x) - polar(x)) < ERROR
    assert spectral(orthogonalize(x.float()) - polar(x)) < ERROR


@pytest.mark.parametrize("shape", [(32, 1), (1, 32), (32, 32), (8, 96, 24)], ids=str)
def test_bfloat16_does_not_overshoot(shape: tuple[int, ...]) -> None:
    """Rounding must not push a singular value out of the interval of a polynomial, where it grows without limit."""
    torch.manual_seed(0)
    for x in (torch.randn(shape), torch.ones(shape), conditioned(shape, 1e-2).float()):
        assert 0.98 < spectral(orthogonalize(x.bfloat16())) < 1.02


@pytest.mark.parametrize("shape", [(2, 8), (4, 8), (16, 64), (128, 128)], ids=str)
def test_bfloat16_converges_for_any_singular_values(shape: tuple[int, int]) -> None:
    """Gradients in training have one large singular value and a few small ones, which random matrices do not have."""
    torch.manual_seed(0)
    count = max(1, 2**16 // (shape[0] * shape[1]))
    u, _, vh = torch.linalg.svd(torch.randn(count, *shape), full_matrices=False)
    spread = 7 * torch.rand(count, 1)
    x = u * torch.exp(-spread * torch.rand(count, shape[0])).unsqueeze(-2) @ vh
    assert spectral(orthogonalize(x.bfloat16())) < 1.02


def test_each_polynomial_is_the_nearest_to_one() -> None:
    """Its error has one size at four points with alternating signs, so that no odd quintic is nearer."""
    low, high = 1e-3, 1.05
    a, b, c = minimax_coefficients(1)[0]
    x = torch.linspace(low, high, 100_001, dtype=torch.float64)
    error = 1 - (a * x + b * x**3 + c * x**5)
    extrema = [error[0], *error[1:-1][(error[1:-1] - error[:-2]) * (error[2:] - error[1:-1]) < 0], error[-1]]
    assert len(extrema) == 4
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(torch.stack(extrema).float() * signs, error.abs().max().float().expand(4))


@pytest.mark.parametrize(("steps", "lower"), [(0, 1e-3), (3, 0.0), (3, 1.0), (3, float("nan"))])
def test_impossible_coefficients_are_refused(steps: int, lower: float) -> None:
    with pytest.raises(bt.RuleError, match=f"steps >= 1 and 0 < lower < 1, got steps={steps}"):
        minimax_coefficients(steps, lower)


@pytest.mark.parametrize("shape", [(1, 1), (7, 2), (5, 40, 24), (128, 128)], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_are_bounded_closely(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    for x in (torch.randn(shape), torch.eye(shape[-2], shape[-1]).expand(shape)):
        exact = torch.linalg.matrix_norm((scale * x).double(), ord=2)
        ratio = spectral_norm_bounds(scale * x).double() / exact
        assert ratio.min() > 1 - 1e-5
        assert ratio.max() <= min(shape[-2:]) ** (1 / 64) + 1e-5


def test_the_norm_of_zero_is_tiny() -> None:
    assert spectral_norm_bounds(torch.zeros(2, 3, 4)).max() < 1e-30
