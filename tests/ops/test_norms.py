"""Sizes of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from buttress.ops.norms import balanced, mean_square, rms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_against_numpy_in_single_precision_at_least(dtype: torch.dtype) -> None:
    t = torch.randn(7, 5).to(dtype)
    exact = np.mean(t.double().numpy() ** 2)
    assert mean_square(t).dtype == rms(t).dtype == torch.promote_types(dtype, torch.float32)
    assert mean_square(t).shape == ()
    np.testing.assert_allclose(mean_square(t).item(), exact, rtol=1e-5)
    np.testing.assert_allclose(rms(t).item(), np.sqrt(exact), rtol=1e-5)


def test_large_half_precision_entries_do_not_overflow() -> None:
    assert rms(torch.full((4,), 30000.0, dtype=torch.float16)).item() == pytest.approx(30000.0)


def test_gradients_pass() -> None:
    t = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms, (t,))


def test_balanced_factors_have_equal_ratios_and_the_same_product() -> None:
    factors, stds = [100 * torch.randn(4, 3), 0.01 * torch.randn(3, 5), torch.randn(5, 2)], [0.5, 2.0, 1.0]
    result = balanced(factors, stds)
    ratios = [rms(t).item() / std for t, std in zip(result, stds, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-5)
    torch.testing.assert_close(result[0] @ result[1] @ result[2], factors[0] @ factors[1] @ factors[2])


def test_factors_of_a_zero_matrix_stay_as_they_are() -> None:
    factors = [torch.randn(4, 3), torch.zeros(3, 5)]
    for result, factor in zip(balanced(factors, [1.0, 1.0]), factors, strict=True):
        assert torch.equal(result, factor)
