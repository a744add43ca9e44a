"""The implementations against each other on random chains, and what all of them share."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops.fused.composite import apply_strided
from buttress.ops.layouts import layouts_of
from chain_strategies import chains, instance


@settings(deadline=None, max_examples=400, derandomize=True)
@given(chains())
def test_any_chain_gives_the_same_both_ways(chain: bt.Chain) -> None:
    x, factors = instance(chain)
    ours, meaning = (ops.apply(chain, x, factors, impl=impl) for impl in ("bmm", "reference"))
    torch.testing.assert_close(ours, meaning)
    dy = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, [x, *factors], dy), torch.autograd.grad(meaning, [x, *factors], dy), strict=True
    ):
        torch.testing.assert_close(a, b)
    if (strided := layouts_of(chain).strided) is not None:
        torch.testing.assert_close(apply_strided(strided, x, factors, [], None), meaning)
    flops = FlopCounterMode(display=False)
    with flops:
        ops.apply(chain, x, factors)
    assert flops.get_total_flops() == 2 * chain.macs * len(x)


@pytest.mark.parametrize("impl", ["reference", "bmm"])
def test_padding_scales_activation_and_bias(impl: Any) -> None:
    chain = bt.BTT().chain(13, 13)  # 15 = 5 * 3 with the padding
    x, bias = torch.randn(4, 13), torch.randn(13)
    first, second = factors = [torch.randn(f.shape) for f in chain.factors]
    scales = [torch.tensor([2.0]), torch.tensor([3.0])]
    y = ops.apply(chain, x, factors, bias, scales=scales, activation="relu", impl=impl)
    read = torch.cat([x.relu(), torch.zeros(4, 2)], 1).reshape(4, 5, 3)
    product = 6 * torch.einsum("ncd,cbd,bac->nba", read, first, second).flatten(1)
    torch.testing.assert_close(y, product[:, :13] + bias, rtol=1e-4, atol=1e-4)


class ReadsTheDtype(nn.Module):
    """As the FFN of T5."""

    def __init__(self, *, normalize: bool) -> None:
        super().__init__()
        self.layer = bt.StructuredLinear(16, 12, bt.BTT(), normalize=normalize)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype))


@pytest.mark.parametrize("normalize", [False, True])
def test_reading_the_weight_under_torch_fx_is_refused(*, normalize: bool) -> None:
    with pytest.raises(bt.ButtressError, match=r"^torch.fx cannot trace the weight .*: call the layer instead .*$"):
        torch.fx.symbolic_trace(ReadsTheDtype(normalize=normalize))


def test_dense_form_keeps_its_precision_under_autocast() -> None:
    layer = bt.StructuredLinear(32, 32, bt.BTT(rank=2))
    exact = layer.to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 32)).dtype == torch.bfloat16
        torch.testing.assert_close(layer.to_dense(), exact, rtol=0, atol=0)
        assert bt.project(bt.BTT(rank=2), exact).relative_error < 1e-5


def test_unknown_implementation() -> None:
    chain = bt.Dense().chain(2, 2)
    wrong: Any = "fast"
    with pytest.raises(bt.ButtressError, match="unknown implementation 'fast': there are reference, bmm"):
        ops.apply(chain, torch.zeros(1, 2), [torch.zeros(1, 2, 2)], impl=wrong)


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(ops)
    assert result.attempted > 0
    assert result.failed == 0
