"""Partitions: a chain divided among processes along one axis, without communication between its factors.

By outputs, the axis is the slowest of y, so that each process computes a contiguous part of y from all of x. By
inputs, it is the slowest of x, so that each process reads a contiguous part of x, and the results add up to y. Factors
that have the axis are divided along it; every process has all of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from buttress.core.chain import Axes, Chain, Factor
from buttress.core.chain_sum import AnyChain, ChainSum
from buttress.errors import ChainError

Side = Literal["outputs", "inputs"]


@dataclass(frozen=True)
class Division:
    """Where the axis is in a factor's stored tensor.

    Args:
        dim: The dimension that holds the axis: 0 blocks, 1 outputs, 2 inputs.
        before: Number of entries of the axes before it in that dimension; 1 where each process's part is contiguous.
        size: Length of the axis.
    """

    dim: int
    before: int
    size: int


@dataclass(frozen=True)
class Partition:
    """A chain divided among processes.

    Args:
        chain: The chain of one process.
        divisions: By the names of all factors, where they are divided; None for one that every process has as a whole.
    """

    chain: AnyChain
    divisions: Mapping[str, Division | None]


def partition(chain: AnyChain, side: Side, processes: int) -> Partition:
    """Divide a chain, or each part of a sum, among processes.

    Args:
        chain: The chain.
        side: Whether its outputs or its inputs are divided.
        processes: Number of processes.

    Returns:
        The chain of one process, and where the factors are divided.

    Raises:
        ChainError: If the sizes do not divide, or the chain has no such axis.

    Example:
        >>> from buttress.core.structures import LowRank
        >>> partition(LowRank(rank=2).chain(8, 12), "outputs", 2).divisions
        {'V': None, 'U': Division(dim=1, before=1, size=12)}
    """
    parts = [_partition(part, side, processes) for part in chain.parts]
    divisions = {name: division for part, divisions in parts for name, division in divisions.items()}
    local = parts[0][0] if isinstance(chain, Chain) else ChainSum(tuple(part for part, _ in parts))
    return Partition(local, divisions)


def _partition(chain: Chain, side: Side, processes: int) -> tuple[Chain, dict[str, Division | None]]:
    axis = _axis(chain, side, processes)
    divisions = {f.name: _division(chain, f, axis) for f in chain.factors}
    sizes = chain.sizes | {axis: chain.sizes[axis] // processes}  # type: ignore[operator]
    local = replace(
        chain,
        d_in=chain.d_in // (processes if side == "inputs" else 1),
        d_out=chain.d_out // (processes if side == "outputs" else 1),
        factors=tuple(_local(f, axis, processes) for f in chain.factors),
        axis_sizes=tuple(sorted(sizes.items())),
    )
    return local, divisions


def _axis(chain: Chain, side: Side, processes: int) -> str:
    """The slowest axis of y or x that is longer than one."""
    own, other = (chain.y, chain.x) if side == "outputs" else (chain.x, chain.y)
    if padding := chain.padding[1 if side == "outputs" else 0]:
        raise ChainError(f"its {side} are padded by {padding}")
    axis = next((a for a in own if chain.sizes[a] > 1), own[0])
    if chain.sizes[axis] % processes:
        raise ChainError(f"the slowest axis of its {side} has the length {chain.sizes[axis]}")
    if axis in other or axis in (chain.window or ()):
        raise ChainError(
            f"the slowest axis of its {side} is one of its {'inputs' if side == 'outputs' else 'outputs'} too"
        )
    if any(axis in axes for f in chain.factors for axes in f.regroup or ()):
        raise ChainError(f"the slowest axis of its {side} is regrouped between its factors")
    return axis


def _division(chain: Chain, f: Factor, axis: str) -> Division | None:
    groups: tuple[Axes, ...] = (f.batch_axes, f.out_axes, f.in_axes)
    for dim, axes in enumerate(groups):
        if axis in axes:
            return Division(dim, chain.size(axes[: axes.index(axis)]), chain.sizes[axis])
    return None


def _local(f: Factor, axis: str, processes: int) -> Factor:
    def part(size: int, axes: Axes) -> int:
        return size // processes if axis in axes else size

    return replace(
        f,
        blocks=part(f.blocks, f.batch_axes),
        d_out=part(f.d_out, f.out_axes),
        d_in=part(f.d_in, f.in_axes),
        shared=part(f.shared, f.shared_axes),
    )
