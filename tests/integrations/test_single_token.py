"""Matmuls of a single row are compiled to a product and a sum, with the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from buttress.integrations.single_token import compiled

# torch calls its own deprecated function while it compiles.


def external_matmuls(code: str) -> int:
    return sum(
        code.count(name) for name in ("extern_kernels.mm(", "extern_kernels.addmm(", "extern_kernels.bmm(", "mkl")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_layers(rows: int, dtype: torch.dtype) -> None:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(48, 64), bt.StructuredLinear(64, 96, bt.BTT(rank=3)), bt.StructuredLinear(96, 40, bt.LowRank(rank=20))
    )
    x = torch.randn(rows, 48)
    exact = layers.double()(x.double())
    layers.to(dtype)

    def step(x: Tensor) -> Tensor:
        result: Tensor = layers(x)
        return result

    with torch.no_grad():
        y, code = run_and_get_code(compiled(step), x.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y.double() - exact).norm() < tolerance * exact.norm()
    assert (external_matmuls("".join(code)) == 0) == (rows == 1)


def test_many_steps_are_compiled_in_one_process() -> None:
    """torch allows eight compilations of one function."""
    weights = [torch.randn(4, 8) for _ in range(12)]

    def step(weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight)

    x = torch.randn(1, 8)
    with torch.no_grad():
        for i, weight in enumerate(weights):
            part = weight[: i % 4 + 1, : 8 - i // 4]  # another shape each time
            assert torch.allclose(
                compiled(step)(part, x[:, : part.shape[1]]), x[:, : part.shape[1]] @ part.mT, atol=1e-5
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(48, 64), bt.StructuredLinear(64, 96, bt.BTT(rank=3)), nn.Linear(96, 40))
    bt.quantize_(layers, "*")
    x = torch.randn(1, 48)

    def step(x: Tensor) -> Tensor:
        result: Tensor = layers(x)
        return result

    with torch.no_grad():
        exact = x.double()
        for layer in layers:
            exact = exact @ layer.to_dense().double().mT + layer.bias
        y = compiled(step)(x.to(dtype))
    assert y.dtype == dtype
    assert (y.double() - exact).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * exact.norm()
