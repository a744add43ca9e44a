"""Which chains are pairs of block-diagonal factors, and their sizes."""

from __future__ import annotations

import pytest

import buttress as bt
from buttress.ops.on_chip.sizes import PairSizes, on_chip_sizes
from buttress.ops.strides import strided_chain


def sizes_of(structure: bt.Structure, d_in: int, d_out: int) -> PairSizes | None:
    strided = strided_chain(structure.chain(d_in, d_out))
    return None if strided is None else on_chip_sizes(strided)


@pytest.mark.parametrize(("structure", "d_in", "d_out", "sizes"), [
    (bt.BTT(rank=4), 1024, 4096, PairSizes(c=32, d=32, b=64, a=64, s=4, d_in=1024, d_out=4096)),
    (bt.BTT(rank=3), 37, 53, PairSizes(c=8, d=5, b=6, a=9, s=3, d_in=37, d_out=53)),
    (bt.BTT(), 1, 1, PairSizes(c=1, d=1, b=1, a=1, s=1, d_in=1, d_out=1)),
    (bt.BTT(rank=2), 7, 1, PairSizes(c=4, d=2, b=1, a=1, s=2, d_in=7, d_out=1)),
    (bt.LowRank(rank=5), 60, 24, PairSizes(c=1, d=60, b=1, a=24, s=5, d_in=60, d_out=24)),
], ids=str)  # fmt: skip
def test_sizes_of_pairs(structure: bt.Structure, d_in: int, d_out: int, sizes: PairSizes) -> None:
    assert sizes_of(structure, d_in, d_out) == sizes


@pytest.mark.parametrize(
    "structure", [bt.Kronecker(), bt.TensorTrain(rank=2), bt.BTT(cores=3), bt.Dense(), bt.BlockDiagonal(4)], ids=str
)
def test_other_chains_have_none(structure: bt.Structure) -> None:
    assert sizes_of(structure, 64, 64) is None


def test_transposed_sizes() -> None:
    sizes = PairSizes(c=8, d=5, b=6, a=9, s=3, d_in=37, d_out=53)
    assert sizes.transposed == PairSizes(c=6, d=9, b=8, a=5, s=3, d_in=53, d_out=37)
    assert sizes.transposed.transposed == sizes


@pytest.mark.parametrize(
    ("d_in", "d", "access"), [(1024, 32, 8), (1216, 38, 2), (60, 12, 4), (37, 5, 1), (1020, 32, 4)]
)
def test_access_divides_the_start_of_every_block(d_in: int, d: int, access: int) -> None:
    sizes = PairSizes(c=-(-d_in // d), d=d, b=4, a=8, s=1, d_in=d_in, d_out=32)
    assert sizes.access == (access, 8)
