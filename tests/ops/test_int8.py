"""Rounding to int8 within half a scale, and chains applied with int8 factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.core.scaling import init_std
from buttress.ops import fused
from buttress.ops.int8 import apply_int8, rounded
from buttress.ops.layouts import layouts_of
from kernel_cases import DEVICE, LIMIT, poison_new_buffers, relative

STRUCTURES = [
    bt.Dense(), bt.LowRank(rank=7), bt.BTT(rank=3), bt.Monarch(4), bt.Kronecker(), bt.TensorTrain(rank=3),
    bt.BTT(rank=2, cores=3), bt.Convolution(kernel_size=3), bt.Sum(bt.LowRank(rank=4), bt.BTT(rank=1)),
]  # fmt: skip


def test_rounding_is_within_half_a_scale() -> None:
    weight = torch.randn(6, 5, 37, dtype=torch.float64) * torch.logspace(-12, 12, 30, dtype=torch.float64).view(6, 5, 1)
    weight[2, 3] = 0
    weight = weight.float()
    values, scales = rounded(weight)
    assert values.dtype == torch.int8
    assert scales.shape == (6, 5)
    error = (values.double() * scales.double().unsqueeze(-1) - weight.double()).abs()
    assert (error <= scales.double().unsqueeze(-1) / 2 * (1 + 1e-12)).all()
    largest = weight.abs().amax(-1)
    kept = largest > 0
    assert (scales[kept] <= largest[kept] / 127 * (1 + 2**-7)).all(), "no scale is wasted"
    assert torch.equal(scales, scales.bfloat16().float()), "the same numbers in bfloat16"


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sizes", [(32, 48), (30, 42), (37, 29)], ids=str)
def test_the_reference_with_rounded_factors(structure: bt.Structure, rows: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    chain = structure.chain(*sizes)
    pairs = [rounded(torch.randn(f.shape)) for f in chain.factors]
    values, scales = [v for v, _ in pairs], [s for _, s in pairs]
    exact_factors = [v.double() * s.double().unsqueeze(-1) for v, s in pairs]
    bias = torch.randn(sizes[1])
    x = torch.randn(2, rows, sizes[0])
    exact = ops.apply(chain, x.double(), exact_factors, bias.double(), impl="reference")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)):
        y = apply_int8(chain, x.to(dtype), values, scales, bias)
        assert y.dtype == dtype
        assert y.shape == exact.shape
        assert (y.double() - exact).norm() <= tolerance * exact.norm()
    with pytest.raises(bt.ShapeError):
        apply_int8(chain, x[..., 1:], values, scales, bias)


@pytest.mark.parametrize(
    ("structure", "launches"),
    [
        (bt.BTT(rank=2), 1),
        (bt.Sum(bt.BTT(rank=1), bt.LowRank(rank=4), bt.BTT(rank=2)), 2),
        (bt.LowRank(rank=4), 0),
        (bt.BTT(rank=2, cores=3), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [True, False])
def test_parts_that_the_kernel_for_few_tokens_serves(
    structure: bt.Structure, launches: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule as on a GPU; the bias is added once, in the dtype of x."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    poison_new_buffers(monkeypatch)
    served: list[bt.Chain] = []
    kernel = fused.apply_int8_rows

    def apply_int8_rows(chain: bt.Chain, *args: Any) -> torch.Tensor:
        served.append(chain)
        return kernel(chain, *args)

    monkeypatch.setattr(fused, "apply_int8_rows", apply_int8_rows)
    monkeypatch.setattr(fused, "serves_int8", lambda chain, x, bias: layouts_of(chain).decodable)
    chain = structure.chain(67, 71)
    pairs = [rounded(torch.randn(f.shape, device=DEVICE)) for f in chain.factors]
    bias = torch.randn(71, device=DEVICE) if biased else None
    x = torch.randn(2, 3, 67, device=DEVICE).half()
    y = apply_int8(chain, x, [v for v, _ in pairs], [s for _, s in pairs], bias)
    factors = [v.double() * s.double().unsqueeze(-1) for v, s in pairs]
    exact = ops.apply(chain, x.double(), factors, None if bias is None else bias.double(), impl="reference")
    assert len(served) == launches
    assert y.dtype == torch.float16
    assert y.shape == exact.shape
    assert relative(y, exact) < LIMIT[torch.float16]


def test_the_gradient_of_the_input() -> None:
    layer = bt.Int8Linear.of(bt.StructuredLinear(67, 71, bt.BTT(rank=2), device=DEVICE))
    x = torch.randn(2, 67, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert relative(x.grad, layer.to_dense().double().sum(0).expand(2, 67)) < 1e-5


@pytest.mark.parametrize("structure", [bt.Dense(), bt.LowRank(rank=32), bt.BTT(rank=2)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_large_activations_in_float16(structure: bt.Structure, rows: int) -> None:
    torch.manual_seed(0)
    chain = structure.chain(1024, 1024 if structure == bt.BTT(rank=2) else 64)
    factors = [torch.randn(f.shape) * init_std(f) for f in chain.factors]
    pairs = [rounded(w) for w in factors]
    x = 30 * torch.randn(rows, 1024)
    x[0, 17] = 800
    exact_factors = [v.double() * s.double().unsqueeze(-1) for v, s in pairs]
    exact = ops.apply(chain, x.half().double(), exact_factors, None, impl="reference")
    y = apply_int8(chain, x.half(), [v for v, _ in pairs], [s for _, s in pairs], None)
    assert y.isfinite().all()
    assert (y.double() - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_of_the_input(dtype: torch.dtype, rows: int) -> None:
    values, scales = rounded(torch.randn(1, 24, 32))
    x = torch.randn(rows, 32).to(dtype).requires_grad_()
    apply_int8(bt.Dense().chain(32, 24), x, [values], [scales], None).sum().backward()
    exact = (values.double() * scales.double().unsqueeze(-1))[0].sum(0)
    assert x.grad is not None
    assert (x.grad.double() - exact).norm() <= 2e-2 * exact.norm() * rows**0.5
