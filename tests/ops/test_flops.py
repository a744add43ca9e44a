"""FLOP formulas that torch lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import buttress as bt
from buttress.ops import flops
from buttress.ops.strides import strided_chain


def test_formulas_are_registered_once() -> None:
    flops.register()
    before = dict(flop_registry)
    flops.register()
    assert dict(flop_registry) == before
    for operator in (torch.ops.buttress.chain, torch.ops.buttress.chain_backward):
        assert operator in flop_registry


def test_a_counter_that_was_created_before_gets_the_formulas() -> None:
    counter = FlopCounterMode(display=False)
    counter.flop_registry = {k: v for k, v in counter.flop_registry.items() if k is not torch.ops.buttress.chain}
    with counter:
        flops.register_if_imported()
        assert torch.ops.buttress.chain in counter.flop_registry


def test_attention_on_the_cpu_is_counted() -> None:
    flops.register()
    q = torch.randn(2, 4, 8, 16)
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, q, q)
    assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 8 * 8 * 16)


def test_formulas_of_the_kernels_by_shape() -> None:
    flops.register()
    chain = bt.BTT(rank=2).chain(24, 40)
    strided = strided_chain(chain)
    assert strided is not None
    numbers = strided.to_ints()
    x, dy, z, nothing = (torch.empty(s, device="meta") for s in ((9, 24), (9, 40), (1, strided.total_rows, 64), (0,)))
    weights = [torch.empty(f.shape, device="meta") for f in chain.factors]
    forward = flop_registry[torch.ops.buttress.chain]
    assert forward(x, weights, [], None, numbers, True, True, out_val=None) == 2 * 9 * chain.macs
    backward = flop_registry[torch.ops.buttress.chain_backward]

    def count(z: torch.Tensor, learns: bool) -> int:
        return backward(dy, x, z, weights, [], numbers, False, learns, out_val=[x])

    assert count(z, learns=True) == 4 * 9 * chain.macs
    assert count(nothing, learns=False) == 2 * 9 * chain.macs
    assert count(nothing, learns=True) == 4 * 9 * chain.macs + 2 * 9 * chain.factors[0].macs
