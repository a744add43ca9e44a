"""A strided chain in torch's own operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings

import buttress as bt
from buttress import ops
from buttress.ops.fused.composite import apply_strided
from buttress.ops.strides import strided_chain
from chain_strategies import chains, instance


@settings(deadline=None, max_examples=100, derandomize=True)
@given(chains())
def test_it_is_the_reference_with_every_gradient(chain: bt.Chain) -> None:
    strided = strided_chain(chain)
    if strided is None:
        return
    x, factors = instance(chain)
    bias = torch.randn(chain.d_out, dtype=torch.float64, requires_grad=True)
    scales = [torch.rand(1, dtype=torch.float64, requires_grad=True) for _ in factors]
    leaves = [x, *factors, *scales, bias]
    y = apply_strided(strided, x, factors, scales, bias)
    expected = ops.apply(chain, x, factors, bias, scales=scales, impl="reference")
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    for actual, exact in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(actual, exact)
