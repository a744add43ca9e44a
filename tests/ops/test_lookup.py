"""Looking up rows: on random chains against the dense matrix, with gradients, scales and errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops.layouts import layouts_of
from chain_strategies import chains, instance


@settings(deadline=None, max_examples=150, derandomize=True)
@given(chains())
def test_rows_of_any_chain_are_those_of_its_matrix(chain: bt.Chain) -> None:
    _, factors = instance(chain)
    matrix = ops.dense(chain, factors, impl="reference")
    rows = ops.rows(chain, factors, torch.arange(chain.d_out))
    torch.testing.assert_close(rows, matrix)
    with torch.no_grad():
        torch.testing.assert_close(ops.rows(chain, factors, torch.arange(chain.d_out)), matrix)
    dy = torch.randn_like(rows)
    for a, b in zip(torch.autograd.grad(rows, factors, dy), torch.autograd.grad(matrix, factors, dy), strict=True):
        torch.testing.assert_close(a, b)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(chains())
def test_macs_are_those_that_torch_counts(chain: bt.Chain) -> None:
    _, factors = instance(chain)
    ids = torch.arange(chain.d_out)
    with FlopCounterMode(display=False) as counter:
        ops.rows(chain, factors, ids)
    assert counter.get_total_flops() == 2 * ops.row_macs(chain) * len(ids)
    assert ops.row_macs(chain) == layouts_of(chain).lookup.macs


def test_ids_may_have_any_shape_and_scales_multiply() -> None:
    chain = bt.BTT(rank=2).chain(16, 30)
    _, factors = instance(chain)
    scales = [torch.tensor([0.5], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)]
    ids = torch.tensor([[0, 29, 3], [7, 7, 1]], dtype=torch.int32)
    rows = ops.rows(chain, factors, ids, scales=scales)
    assert rows.shape == (2, 3, 16)
    torch.testing.assert_close(rows, 1.5 * ops.dense(chain, factors)[ids.long()])
    assert ops.rows(chain, factors, torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 16)


def test_autocast_has_no_effect() -> None:
    chain = bt.BTT(rank=2).chain(16, 30)
    factors = [torch.randn(f.shape) for f in chain.factors]
    ids = torch.arange(30)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.rows(chain, factors, ids), ops.rows(chain, factors, ids))
        rows = ops.rows(chain, factors, ids)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, ops.dense(chain, factors))


@pytest.mark.parametrize("wrong", [-1, 30, 31])
def test_an_id_outside_the_matrix_fails(wrong: int) -> None:
    chain = bt.BTT(rank=2).chain(16, 30)
    factors = [torch.randn(f.shape) for f in chain.factors]
    with pytest.raises((IndexError, RuntimeError)):
        ops.rows(chain, factors, torch.tensor([0, wrong]))


def test_ids_must_be_integers() -> None:
    chain = bt.Dense().chain(4, 4)
    with pytest.raises(bt.ShapeError, match=r"looked up by int64 or int32 numbers, got torch\.float32"):
        ops.rows(chain, [torch.zeros(1, 4, 4)], torch.zeros(2))
