"""Int8Linear: what callers find at `weight`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import buttress as bt


def layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> bt.Int8Linear:
    torch.manual_seed(0)
    return bt.Int8Linear.of(nn.Linear(12, 8, bias, dtype=dtype))


WRITES: dict[str, Callable[[bt.Int8Linear], object]] = {
    "in place": lambda m: m.weight.mul_(2),
    "view": lambda m: m.weight[0].zero_(),
    "data": lambda m: m.weight.data.zero_(),
    "init": lambda m: nn.init.ones_(m.weight),
    "tensor": lambda m: setattr(m, "weight", torch.zeros(8, 12)),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(8, 12))),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_the_weight_are_refused(write: Callable[[bt.Int8Linear], object]) -> None:
    int8 = layer()
    with torch.no_grad(), pytest.raises(bt.ReadOnlyError, match="computed from its values and scales"):
        write(int8)


def test_a_copy_of_the_weight_is_an_ordinary_tensor() -> None:
    int8 = layer()
    copied = int8.weight.clone()
    assert torch.equal(copied, int8.to_dense())
    assert type(copied.zero_()) is Tensor


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_weight_has_the_dtype_of_the_original_layer(dtype: torch.dtype, bias: bool) -> None:
    int8 = layer(dtype, bias=bias)
    twins = [int8, copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))]
    assert [twin.weight.dtype for twin in twins] == [dtype] * 3
    assert int8.to_dense().dtype == torch.float32
    assert torch.equal(int8.weight, int8.to_dense().to(dtype))
    assert int8.bfloat16().weight.dtype == torch.bfloat16
    assert int8.to(torch.float32).weight.dtype == torch.float32


def test_the_weight_has_the_dtype_of_a_structured_layer() -> None:
    structured = bt.StructuredLinear(12, 8, bt.BTT(), dtype=torch.bfloat16)
    adapted = nn.Sequential(nn.Linear(12, 8, dtype=torch.bfloat16), nn.Linear(8, 8))
    bt.adapt_(adapted, bt.LowRank(rank=1))
    assert {p.dtype for p in adapted[0].factors.values()} == {torch.bfloat16, torch.float32}
    for original in structured, adapted[0]:
        assert bt.Int8Linear.of(original).weight.dtype == original.weight.dtype == torch.bfloat16


def test_the_dtype_is_not_in_the_state() -> None:
    assert set(layer().state_dict()) == {"values_W", "scales_W", "bias"}
