"""Partitions against the dense matrix: the parts of all processes are its rows, or add up over its columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.core.chain_sum import AnyChain
from buttress.core.partition import Division, Side, partition
from buttress.errors import ChainError

STRUCTURES = (
    bt.Dense(),
    bt.LowRank(rank=3),
    bt.Kronecker(),
    bt.TensorTrain(rank=2),
    bt.TensorTrain(rank=2, cores=3),
    bt.BTT(rank=2),
    bt.BTT(rank=2, cores=3),
    bt.Monarch(blocks=4),
    bt.BLAST(blocks=4, rank=3),
    bt.Sum(bt.LowRank(rank=2), bt.Monarch(blocks=4)),
)


def part_of(factor: Tensor, division: Division | None, rank: int, processes: int) -> Tensor:
    if division is None:
        return factor
    indices = torch.arange(factor.shape[division.dim])
    after = factor.shape[division.dim] // (division.before * division.size)
    position = indices // after % division.size
    count = division.size // processes
    return factor.index_select(division.dim, indices[position // count == rank])


def parts(chain: AnyChain, side: Side, processes: int) -> tuple[Tensor, list[Tensor], list[int]]:
    """The dense matrix, those of the processes, and how many numbers each process has."""
    factors = {f.name: torch.randn(f.shape, dtype=torch.float64) for f in chain.factors}
    own = partition(chain, side, processes)
    assert own.chain.factors[0].name == chain.factors[0].name
    matrices, counts = [], []
    for rank in range(processes):
        local = [part_of(factors[name], division, rank, processes) for name, division in own.divisions.items()]
        assert [tuple(t.shape) for t in local] == [f.shape for f in own.chain.factors]
        matrices.append(ops.dense(own.chain, local))
        counts.append(sum(t.numel() for t in local))
    return ops.dense(chain, list(factors.values())), matrices, counts


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_outputs_are_contiguous_rows(structure: bt.Structure, processes: int) -> None:
    dense, matrices, _ = parts(structure.chain(64, 64 * 4), "outputs", processes)
    torch.testing.assert_close(torch.cat(matrices), dense)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_inputs_are_contiguous_columns(structure: bt.Structure, processes: int) -> None:
    dense, matrices, _ = parts(structure.chain(64 * 4, 64), "inputs", processes)
    torch.testing.assert_close(torch.cat(matrices, dim=1), dense)


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_btt_is_divided_entirely(side: Side) -> None:
    chain = bt.BTT(rank=2).chain(64, 64)
    _, _, counts = parts(chain, side, 4)
    assert counts == [chain.params // 4] * 4
    assert partition(chain, side, 4).chain.macs == chain.macs // 4


def test_an_axis_of_length_one_is_passed_over() -> None:
    chain = bt.Chain.of(
        6, 6, x="c d", factors={"R": "b d", "L": "a c"}, y="a b", sizes={"a": 1, "b": 6, "c": 1, "d": 6}
    )
    assert partition(chain, "outputs", 2).divisions == {"R": Division(1, 1, 6), "L": None}
    assert partition(chain, "inputs", 2).divisions == {"R": Division(2, 1, 6), "L": None}


@pytest.mark.parametrize(
    ("structure", "sizes", "side", "problem"),
    [
        (bt.LowRank(rank=2), (8, 9), "outputs", "has the length 9"),
        (bt.LowRank(rank=2), (9, 8), "inputs", "has the length 9"),
        (bt.BTT(), (16, 31), "outputs", "outputs are padded by"),
        (bt.BTT(), (31, 16), "inputs", "inputs are padded by"),
        (bt.BlockDiagonal(blocks=4), (16, 16), "outputs", "one of its inputs too"),
        (bt.Convolution(kernel_size=3), (16, 16), "inputs", "one of its outputs too"),
        (bt.Monarch(blocks=4), (24, 24), "outputs", "regrouped"),
        (bt.Sum(bt.LowRank(rank=2), bt.BlockDiagonal(blocks=4)), (16, 16), "inputs", "one of its outputs too"),
    ],
)
def test_chains_that_do_not_divide_are_refused(
    structure: bt.Structure, sizes: tuple[int, int], side: Side, problem: str
) -> None:
    with pytest.raises(ChainError, match=problem):
        partition(structure.chain(*sizes), side, 2)
