"""Scales, windows and autocast."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress.ops.framing import add_windows, autocast_dtype, read_window, scaled_factors


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


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [0, 3])
def test_windows_are_added_where_they_were_read(kernel_size: int, tokens: int) -> None:
    chain = bt.Convolution(kernel_size).chain(10, 5)
    x, z = (torch.randn(tokens, 2, 5, *end, dtype=torch.float64) for end in ((), (kernel_size,)))
    dx = add_windows(chain, z)
    assert dx.shape == x.shape
    torch.testing.assert_close((read_window(chain, x)[0] * z).sum(), (x * dx).sum())


def test_autocast_dtype() -> None:
    x = torch.zeros(1)
    assert autocast_dtype(x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16
        assert autocast_dtype(x.double()) is None
        assert autocast_dtype(x.to("meta")) is None
