"""Chains as the fused kernels read them: for each factor, strides into its source and its target. No triton here.

x and y are (tokens, columns). The intermediates between factors are (tile, row, token): tokens are the fastest axis,
in tiles. Each block of a factor reads the entries `offset + strides(k)` of its source, multiplies them by its slice of
the weight, and writes to `offset + strides(j)` of its target. An entry is a column of x or y, or a row of an
intermediate. The permutation between two factors is contained in these numbers, so the kernels support a chain of any
structure whose index sets need at most two strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

from buttress.core.chain import Axes, Chain
from buttress.ops.activations import ACTIVATIONS

Signature = tuple[tuple[tuple[int, int, int], ...], bool]
"""Sizes on which the speed of the kernels depends; see `StridedChain.signature`."""


@dataclass(frozen=True)
class Strides:
    """The map i -> (i // inner_size) * outer_stride + (i % inner_size) * inner_stride, for i below `size`."""

    size: int
    inner_size: int
    outer_stride: int
    inner_stride: int

    @classmethod
    def of(cls, sizes: Sequence[int], strides: Sequence[int]) -> Strides | None:
        """The strides of nested axes, slowest first, or None where they need more than two."""
        merged = _merge_axes([(n, (s,)) for n, s in zip(sizes, strides, strict=True)])
        match merged:
            case []:
                return cls(1, 1, 0, 1)
            case [(n, (inner,))]:
                return cls(n, n, 0, inner)
            case [(n, (outer,)), (inner_size, (inner,))]:
                return cls(n * inner_size, inner_size, outer, inner)
        return None


@dataclass(frozen=True)
class BlockAxis:
    """One axis along which a factor's blocks are numbered, and the stride along it of each offset."""

    size: int
    source_stride: int
    target_stride: int
    weight_stride: int
    """In slices of the weight; 0 along an axis that shares them."""


@dataclass(frozen=True)
class StridedFactor:
    """The strides of one factor.

    Args:
        source: Strides of a block's inputs.
        target: Strides of a block's outputs.
        block_axes: Axes along which the blocks are numbered.
        slices: Number of slices of the weight.
    """

    source: Strides
    target: Strides
    block_axes: tuple[BlockAxis, ...]
    slices: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached, because launch plans are looked up by it on every call.
        return hash((self.source, self.target, self.block_axes, self.slices))

    @cached_property
    def blocks(self) -> int:
        """Number of blocks: each slice counts once for every position that shares it."""
        return prod(axis.size for axis in self.block_axes)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token."""
        return self.blocks * self.source.size * self.target.size

    @cached_property
    def block_offsets(self) -> tuple[tuple[int, int, int], ...]:
        """For each block: the offsets of its source and target, and its slice of the weight."""
        strides = [(axis.source_stride, axis.target_stride, axis.weight_stride) for axis in self.block_axes]
        offsets = []
        for index in product(*(range(axis.size) for axis in self.block_axes)):
            source, target, weight = (
                sum(i * stride[role] for i, stride in zip(index, strides, strict=True)) for role in range(3)
            )
            offsets.append((source, target, weight))
        return tuple(offsets)

    @property
    def source_extent(self) -> int:
        """One more than the last entry of the source that is read."""
        s = self.source
        last = (s.size // s.inner_size - 1) * s.outer_stride + (s.inner_size - 1) * s.inner_stride
        return self.block_offsets[-1][0] + last + 1

    @cached_property
    def alignment(self) -> tuple[int, int]:
        """Common divisors of all source offsets and of all target offsets, up to 16, the widest access."""
        return (
            gcd(16, *(axis.source_stride for axis in self.block_axes)),
            gcd(16, *(axis.target_stride for axis in self.block_axes)),
        )


@dataclass(frozen=True)
class StridedChain:
    """The strides of a whole chain.

    Args:
        factors: The factors in order of application.
        d_in: Columns of x.
        d_out: Columns of y.
        intermediate_rows: Rows of the intermediate after each factor but the last.
        activation: What the first factor applies to x where it loads it; None for nothing.
    """

    factors: tuple[StridedFactor, ...]
    d_in: int
    d_out: int
    intermediate_rows: tuple[int, ...]
    activation: str | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.factors, self.d_in, self.d_out, self.intermediate_rows, self.activation))

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token."""
        return sum(factor.macs for factor in self.factors)

    @cached_property
    def total_rows(self) -> int:
        """Rows of all intermediates, which are stored in one tensor."""
        return sum(self.intermediate_rows)

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each intermediate in that tensor."""
        return tuple(sum(self.intermediate_rows[:i]) for i in range(len(self.intermediate_rows)))

    @cached_property
    def signature(self) -> Signature:
        """(blocks, inputs, outputs) of each factor, and whether x or y is accessed in single numbers.

        The alternative is contiguous access. The speed of the kernels depends on these.
        """
        sizes = tuple((f.blocks, f.source.size, f.target.size) for f in self.factors)
        return sizes, self.factors[0].source.inner_stride != 1 or self.factors[-1].target.inner_stride != 1

    def to_ints(self) -> list[int]:
        """The chain as integers, which a registered operator accepts as an argument."""
        activation = 0 if self.activation is None else 1 + list(ACTIVATIONS).index(self.activation)
        flat = [self.d_in, self.d_out, activation, len(self.factors), *self.intermediate_rows]
        for factor in self.factors:
            flat += [*astuple(factor.source), *astuple(factor.target), factor.slices, len(factor.block_axes)]
            flat += [n for axis in factor.block_axes for n in astuple(axis)]
        return flat

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> StridedChain:
        """The inverse of `to_ints`."""
        remaining = iter(numbers)

        def take(count: int) -> list[int]:
            return [next(remaining) for _ in range(count)]

        d_in, d_out, activation, count = take(4)
        intermediate_rows = tuple(take(count - 1))
        factors = []
        for _ in range(count):
            source, target = Strides(*take(4)), Strides(*take(4))
            slices, depth = take(2)
            factors.append(StridedFactor(source, target, tuple(BlockAxis(*take(4)) for _ in range(depth)), slices))
        return cls(tuple(factors), d_in, d_out, intermediate_rows, (None, *ACTIVATIONS)[activation])


def strided_chain(chain: Chain) -> StridedChain | None:
    """The strides of a chain.

    Args:
        chain: Any chain.

    Returns:
        The strides, or None where the chain has a window, a regroup, or axes that need more than two strides.
    """
    if chain.window or any(f.regroup for f in chain.factors):
        return None
    source_strides = _contiguous_strides(chain, chain.x)
    factors, rows = [], []
    for i, f in enumerate(chain.factors):
        block_axes = f.batch_axes + f.shared_axes
        last = i == len(chain.factors) - 1
        target_strides = _contiguous_strides(chain, chain.y if last else block_axes + f.out_axes)
        source = Strides.of([chain.sizes[a] for a in f.in_axes], [source_strides[a] for a in f.in_axes])
        target = Strides.of([chain.sizes[a] for a in f.out_axes], [target_strides[a] for a in f.out_axes])
        if source is None or target is None:
            return None
        slice_strides = _contiguous_strides(chain, f.batch_axes)
        merged = _merge_axes(
            [(chain.sizes[a], (source_strides[a], target_strides[a], slice_strides.get(a, 0))) for a in block_axes]
        )
        factors.append(StridedFactor(source, target, tuple(BlockAxis(n, *steps) for n, steps in merged), f.blocks))
        rows.append(chain.size(block_axes + f.out_axes))
        source_strides = target_strides
    return StridedChain(tuple(factors), chain.d_in, chain.d_out, tuple(rows[:-1]))


def largest_offset(chain: Chain, strided: StridedChain, tile_tokens: int) -> int:
    """The largest offset inside one token, one tile of the intermediates, one slice of a weight or a table of offsets.

    Args:
        chain: The chain.
        strided: Its strides.
        tile_tokens: Tokens in a tile.

    Returns:
        An upper bound, in numbers.
    """
    tokens = chain.size(chain.x), chain.size(chain.y)
    slices = (f.source.size * f.target.size for f in strided.factors)
    tables = (3 * f.blocks for f in strided.factors)
    return max(*tokens, strided.total_rows * tile_tokens, *slices, *tables)


def _contiguous_strides(chain: Chain, axes: Axes) -> dict[str, int]:
    """The stride of each axis where the last is the fastest."""
    return {a: chain.size(axes[i + 1 :]) for i, a in enumerate(axes)}


def _merge_axes(axes: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Join neighboring axes of (size, strides) that act as one, and drop axes of size 1."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, strides in axes:
        if size == 1:
            continue
        contiguous = bool(merged) and merged[-1][1] == tuple(size * s for s in strides)
        merged.append((size * (merged.pop()[0] if contiguous else 1), strides))
    return merged
