"""What the kernels reject, and what they say then."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.ops.fused import availability
from kernel_cases import DEVICE

pytest.importorskip("triton", reason="the kernels are written in triton")


def test_a_bias_may_be_strided_but_must_have_the_right_length() -> None:
    chain = bt.BTT().chain(36, 36)
    x = torch.randn(9, 36, device=DEVICE)
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    for bias in (torch.randn(72, device=DEVICE)[::2], torch.randn(1, device=DEVICE).expand(36)):
        expected = ops.apply(chain, x, factors, bias, impl="reference")
        torch.testing.assert_close(ops.apply(chain, x, factors, bias, impl="triton"), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(bt.ShapeError, match="the bias must have 36 numbers"):
        ops.apply(chain, x, factors, torch.randn(1, device=DEVICE), impl="triton")
    with pytest.raises(bt.ShapeError, match="factor R must have the shape"):
        ops.apply(chain, x, [factors[0][:1], factors[1]], impl="triton")


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(structure: bt.Structure, dtype: torch.dtype, match: str) -> None:
        chain = structure.chain(30, 30)
        factors = [torch.zeros(f.shape, dtype=dtype) for f in chain.factors]
        with pytest.raises(bt.ButtressError, match=match):
            ops.apply(chain, torch.zeros(1, 30, dtype=dtype), factors, impl="triton")

    monkeypatch.setattr(availability, "INTERPRETED", True)
    rejected(bt.Convolution(kernel_size=3), torch.float32, "at regular places, which this chain's do not")
    rejected(bt.BTT(), torch.float64, "not float64: use impl='bmm'")
    chain = bt.BTT().chain(30, 30)
    mixed = [torch.zeros(f.shape, dtype=torch.float16) for f in chain.factors]
    with pytest.raises(
        bt.ButtressError, match=r"x is torch\.float32 on cpu, but the layer's parameters are torch\.float16"
    ):
        ops.apply(chain, torch.zeros(1, 30), mixed, impl="triton")
    monkeypatch.setattr(availability, "INTERPRETED", False)
    rejected(bt.BTT(), torch.float32, "run on a CUDA device, but x is on cpu")
    monkeypatch.setattr(availability, "TRITON", False)
    rejected(bt.BTT(), torch.float32, "need triton, which is not installed")
