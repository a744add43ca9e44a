"""Rows of a chain are rows of its dense form, whatever the chain, and cost no more than they must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from chain_strategies import chains
from embedding_models import few, random_factors


@settings(deadline=None, max_examples=300, derandomize=True)
@given(chains())
def test_rows_of_any_chain(chain: bt.Chain) -> None:
    factors = random_factors(chain)
    ids = torch.randint(0, chain.d_out, (5,))
    ours, meaning = ops.rows(chain, factors, ids), ops.dense(chain, factors, impl="reference")[ids]
    torch.testing.assert_close(ours, meaning)
    dy = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, factors, dy), torch.autograd.grad(meaning, factors, dy), strict=True):
        torch.testing.assert_close(a, b)
    flops = FlopCounterMode(display=False)
    with torch.no_grad(), flops:
        torch.testing.assert_close(ops.rows(chain, factors, ids.int()), meaning)
    assert flops.get_total_flops() == 2 * ops.row_macs(chain) * len(ids)
    for wrong in (-1, chain.d_out, chain.size(chain.y), 10**9):
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(IndexError):
                ops.rows(chain, factors, torch.tensor([0, wrong]))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 70), st.integers(1, 70))
def test_rows_of_every_structure_at_any_size(d_in: int, d_out: int) -> None:
    for kind in bt.structures().values():
        for structure in (*kind.default_candidates(), kind()):
            chain = structure.chain(d_in, d_out)
            factors = random_factors(chain)
            with torch.no_grad():
                every = ops.rows(chain, factors, torch.arange(d_out))
                torch.testing.assert_close(every, ops.dense(chain, factors, impl="reference"))


@few
def test_gradcheck(structure: bt.Structure, number: int, width: int) -> None:
    chain = structure.chain(5, 7)
    factors = random_factors(chain)
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.autograd.gradcheck(lambda *w: ops.rows(chain, w, ids), factors)
    assert torch.autograd.gradgradcheck(lambda *w: ops.rows(chain, w, ids), factors)


class Largest(TorchDispatchMode):
    """Records the size of the largest new tensor; views of existing tensors do not count."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.existing_pointers = {t.untyped_storage().data_ptr() for t in existing}
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.existing_pointers:
            self.size = max(self.size, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("rank", [1, 4])
def test_a_lookup_makes_nothing_of_the_size_of_the_vocabulary(rank: int) -> None:
    number, width, tokens = 50257, 64, 3
    module = bt.StructuredEmbedding(number, width, bt.BTT(rank=rank))
    with torch.no_grad(), Largest(list(module.parameters())) as largest:
        module(torch.tensor([1, 50256, 7]))
    assert largest.size == tokens * rank * width
    # For the gradient the smaller factor is copied; the larger, which has entries for every row, never is.
    with Largest(list(module.parameters())) as largest:
        module(torch.tensor([1, 50256, 7]))
    assert largest.size == module.factors["R"].numel() < module.factors["L"].numel() / 20


@pytest.mark.parametrize("blocks", [2, 4, 16])
def test_no_way_to_read_a_factor_is_larger_than_the_other(blocks: int) -> None:
    """Few large blocks would be copied for every row: the row is expanded over the blocks instead."""
    module = bt.StructuredEmbedding(4096, 64, bt.Monarch(blocks))
    tokens = 50
    with torch.no_grad(), Largest(list(module.parameters())) as largest:
        module(torch.arange(tokens))
    gathered, expanded = module.chain.factors[0].params // blocks, 64
    assert largest.size <= tokens * max(64, min(gathered, expanded)) + module.chain.factors[0].params
