"""Padding, scales, bias and windows around a chain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress.ops.framing import autocast_dtype, framed, read_window, scaled_factors


def test_an_implementation_sees_padded_sizes_and_scaled_factors() -> None:
    chain = bt.BTT().chain(13, 13)  # 15 = 5 * 3 with the padding
    calls = []

    @framed
    def first_columns(
        chain: bt.Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool, activation: str | None
    ) -> Tensor:
        calls.append((x, factors, recompute, activation))
        return x * 2

    x, bias = torch.randn(4, 13), torch.randn(13)
    factors = [torch.randn(f.shape) for f in chain.factors]
    y = first_columns(chain, x, factors, bias, [torch.tensor([2.0]), torch.tensor([3.0])], True, "relu")
    (padded, scaled, recompute, activation) = calls[0]
    assert padded.shape == (4, 15)
    assert not padded[:, 13:].any()
    assert recompute
    assert activation == "relu"
    torch.testing.assert_close(scaled, [2 * factors[0], 3 * factors[1]])
    torch.testing.assert_close(y, 2 * x + bias)
    assert torch.equal(first_columns(chain, x, factors, None, None, False, None), 2 * x)
    assert calls[1][1] is factors


def test_scales_take_the_dtype_of_the_factors() -> None:
    (scaled,) = scaled_factors([torch.ones(2, dtype=torch.bfloat16)], [torch.tensor([0.5])])
    assert scaled.dtype == torch.bfloat16
    assert scaled.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="zip"):
        scaled_factors([torch.ones(2)], [])


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
def test_a_window_is_circular(kernel_size: int) -> None:
    chain = bt.Convolution(kernel_size).chain(10, 5)
    x = torch.randn(3, 2, 5)
    z, axes = read_window(chain, x)
    assert axes == ("c", "n", "w")
    assert z.shape == (3, 2, 5, kernel_size)
    for n in range(5):
        for w in range(kernel_size):
            assert torch.equal(z[:, :, n, w], x[:, :, (n + w - kernel_size // 2) % 5])


def test_autocast_dtype() -> None:
    x = torch.zeros(1)
    assert autocast_dtype(x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16
        assert autocast_dtype(x.double()) is None
        assert autocast_dtype(x.to("meta")) is None
