"""Strides of a chain: what each block reads and writes, and which chains have them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops.strides import BlockAxis, StridedChain, StridedFactor, Strides, strided_chain
from chain_strategies import chains
from kernel_cases import STRUCTURES


def positions(strides: Strides) -> list[int]:
    """The map of the docstring, written out."""
    return [
        (i // strides.inner_size) * strides.outer_stride + (i % strides.inner_size) * strides.inner_stride
        for i in range(strides.size)
    ]


def apply_by_hand(strided: StridedChain, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Loop over factors, blocks and entries: nothing but the offsets and the strides."""
    z = x
    for i, (factor, weight) in enumerate(zip(strided.factors, weights, strict=True)):
        last = i == len(strided.factors) - 1
        width = strided.d_out if last else strided.intermediate_rows[i]
        target = torch.zeros(len(x), max(width, 1 + max(
            offsets[1] + max(positions(factor.target)) for offsets in factor.block_offsets
        )), dtype=x.dtype)  # fmt: skip
        for source_offset, target_offset, piece in factor.block_offsets:
            columns = [source_offset + k for k in positions(factor.source)]
            read = torch.stack([z[:, c] if c < z.shape[1] else torch.zeros(len(x), dtype=x.dtype) for c in columns], 1)
            for j, position in enumerate(positions(factor.target)):
                target[:, target_offset + position] += read @ weight[piece, j]
        z = target
    return z[:, : strided.d_out]


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ([], [], Strides(1, 1, 0, 1)),
        ([1, 1], [7, 9], Strides(1, 1, 0, 1)),
        ([5], [3], Strides(5, 5, 0, 3)),
        ([2, 5], [15, 3], Strides(10, 10, 0, 3)),
        ([2, 5], [40, 3], Strides(10, 5, 40, 3)),
        ([2, 1, 5], [40, 99, 3], Strides(10, 5, 40, 3)),
        ([2, 3, 5], [100, 40, 3], None),
    ],
)
def test_nested_axes_are_merged(sizes: list[int], strides: list[int], expected: Strides | None) -> None:
    assert Strides.of(sizes, strides) == expected


def test_a_block_train_by_hand() -> None:
    strided = strided_chain(bt.BTT(rank=2).chain(20, 30))  # c = 5, d = 4, b = 5, a = 6
    assert strided is not None
    right, left = strided.factors
    assert right == StridedFactor(Strides(4, 4, 0, 1), Strides(10, 10, 0, 1), (BlockAxis(5, 4, 10, 1),), 5)
    # z is (c, b, s): block b of L reads s side by side for each c.
    assert left == StridedFactor(Strides(10, 2, 10, 1), Strides(6, 6, 0, 1), (BlockAxis(5, 2, 6, 1),), 5)
    assert strided.intermediate_rows == (50,)
    assert (strided.total_rows, strided.row_starts) == (50, (0,))
    assert strided.signature == (((5, 4, 10), (5, 10, 6)), False)
    assert right.block_offsets == tuple((4 * c, 10 * c, c) for c in range(5))
    assert right.alignment == (4, 2)
    assert left.source_extent == 50


def test_shared_blocks_use_one_slice() -> None:
    strided = strided_chain(bt.Kronecker().chain(20, 30))
    assert strided is not None
    right = strided.factors[0]
    assert (right.blocks, right.slices) == (5, 1)
    assert {piece for _, _, piece in right.block_offsets} == {0}
    assert strided.signature[1], "y is written in single numbers"


def test_blocks_next_to_shared_ones_keep_their_slices() -> None:
    sizes = {"g": 2, "s": 3, "d": 4, "e": 5}
    chain = bt.Chain.of(24, 30, x="g s d", factors={"W": "g e d"}, y="g s e", sizes=sizes)
    strided = strided_chain(chain)
    assert strided is not None
    # The blocks lie one after the other in x and in y, but every third one begins another slice.
    assert strided.factors[0].block_offsets == tuple((4 * i, 5 * i, i // 3) for i in range(6))


@pytest.mark.parametrize(
    "chain", [bt.Convolution(3).chain(12, 12), bt.Monarch(4).chain(12, 12)], ids=["window", "regroup"]
)
def test_windows_and_regroups_have_no_strides(chain: bt.Chain) -> None:
    assert strided_chain(chain) is None


def test_a_strided_chain_is_the_same_after_it_was_integers() -> None:
    for structure in STRUCTURES:
        strided = strided_chain(structure.chain(40, 63))
        assert strided is None or StridedChain.from_ints(strided.to_ints()) == strided


@settings(deadline=None, max_examples=100, derandomize=True)
@given(chains())
def test_strides_mean_what_the_chain_does(chain: bt.Chain) -> None:
    strided = strided_chain(chain)
    if strided is None:
        return
    assert strided.macs == chain.macs
    assert StridedChain.from_ints(strided.to_ints()) == strided
    x = torch.randn(2, chain.d_in, dtype=torch.float64)
    factors = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    torch.testing.assert_close(
        apply_by_hand(strided, x, factors), ops.apply(chain, x, factors, impl="reference"), rtol=1e-9, atol=1e-9
    )
