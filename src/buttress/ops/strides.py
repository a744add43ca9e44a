"""A chain as the fused kernels see it: one hop a factor, all strides worked out. No triton here.

x and y are (tokens, columns). Between the factors tokens are the fastest axis, in tiles: z is (tile, row, token).
A hop takes, for each of its blocks g, the places `base + place(k)` of what it reads, multiplies by its weight, and
writes to `base + place(j)`; a place is a column of x or y, or a row of z. The shuffle between two factors is
nothing but these numbers, so whatever a structure is called, a chain fits if its places have so few levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

from buttress.core.chain import Axes, Chain

Signature = tuple[tuple[tuple[int, int, int], ...], bool]


@dataclass(frozen=True)
class Places:
    """i -> (i // split) * outer + (i % split) * inner, for i below `size`."""

    size: int
    split: int
    outer: int
    inner: int

    @classmethod
    def of(cls, sizes: Sequence[int], strides: Sequence[int]) -> Places | None:
        """The places of nested axes, slowest first, or None where that takes more than two levels."""
        levels = _merge([(n, (s,)) for n, s in zip(sizes, strides, strict=True)])
        match levels:
            case []:
                return cls(1, 1, 0, 1)
            case [(n, (inner,))]:
                return cls(n, n, 0, inner)
            case [(n, (outer,)), (split, (inner,))]:
                return cls(n * split, split, outer, inner)
        return None


@dataclass(frozen=True)
class Lead:
    """One axis of the blocks: its size, and what a step along it adds to the bases and to the weight's index."""

    size: int
    source: int
    target: int
    weight: int


@dataclass(frozen=True)
class Hop:
    """One factor: where its blocks read, where they write, which slice of the weight they use."""

    source: Places
    target: Places
    leads: tuple[Lead, ...]
    slices: int
    """Slices of the weight."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans of launches are looked up by it on every call.
        return hash((self.source, self.target, self.leads, self.slices))

    @cached_property
    def blocks(self) -> int:
        """Blocks of work: each slice once for everything that shares it."""
        return prod(lead.size for lead in self.leads)

    @property
    def macs(self) -> int:
        return self.blocks * self.source.size * self.target.size

    @cached_property
    def bases(self) -> tuple[tuple[int, int, int], ...]:
        """(base of the source, base of the target, slice of the weight) for each block."""
        steps = product(*(range(lead.size) for lead in self.leads))
        return tuple(
            (
                sum(i * lead.source for i, lead in zip(at, self.leads, strict=True)),
                sum(i * lead.target for i, lead in zip(at, self.leads, strict=True)),
                sum(i * lead.weight for i, lead in zip(at, self.leads, strict=True)),
            )
            for at in steps
        )

    @property
    def reach(self) -> int:
        """One more than the last place that is read."""
        p = self.source
        return self.bases[-1][0] + (p.size // p.split - 1) * p.outer + (p.split - 1) * p.inner + 1

    @cached_property
    def aligned(self) -> tuple[int, int]:
        """What all bases of the source, and of the target, are multiples of: 16 at most, which is wide enough."""
        return gcd(16, *(lead.source for lead in self.leads)), gcd(16, *(lead.target for lead in self.leads))


@dataclass(frozen=True)
class Route:
    """A whole chain. `rows` says how many rows z has after each hop but the last."""

    hops: tuple[Hop, ...]
    d_in: int
    d_out: int
    rows: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.hops, self.d_in, self.d_out, self.rows))

    @property
    def macs(self) -> int:
        return sum(hop.macs for hop in self.hops)

    @cached_property
    def signature(self) -> Signature:
        """What the speed depends on: (blocks, inputs, outputs) of each hop, and whether x or y is read or written in
        single numbers rather than in runs."""
        sizes = tuple((hop.blocks, hop.source.size, hop.target.size) for hop in self.hops)
        return sizes, self.hops[0].source.inner != 1 or self.hops[-1].target.inner != 1

    def numbers(self) -> list[int]:
        """As integers, which is what a registered operator can be given."""
        flat = [self.d_in, self.d_out, len(self.hops), *self.rows]
        for hop in self.hops:
            flat += [*astuple(hop.source), *astuple(hop.target), hop.slices, len(hop.leads)]
            flat += [n for lead in hop.leads for n in astuple(lead)]
        return flat

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Route:
        """The inverse of `numbers`."""
        rest = iter(numbers)

        def take(count: int) -> list[int]:
            return [next(rest) for _ in range(count)]

        d_in, d_out, count = take(3)
        rows = tuple(take(count - 1))
        hops = []
        for _ in range(count):
            source, target = Places(*take(4)), Places(*take(4))
            slices, depth = take(2)
            hops.append(Hop(source, target, tuple(Lead(*take(4)) for _ in range(depth)), slices))
        return cls(tuple(hops), d_in, d_out, rows)


def route(chain: Chain) -> Route | None:
    """The hops of a chain, or None where it has a shape that the kernels do not take."""
    if chain.window or any(f.regroup for f in chain.factors):
        return None
    held = _strides(chain, chain.x)
    hops, rows = [], []
    for i, f in enumerate(chain.factors):
        lead = f.batch_axes + f.shared_axes
        last = i == len(chain.factors) - 1
        made = _strides(chain, chain.y if last else lead + f.out_axes)
        source = Places.of([chain.sizes[a] for a in f.in_axes], [held[a] for a in f.in_axes])
        target = Places.of([chain.sizes[a] for a in f.out_axes], [made[a] for a in f.out_axes])
        if source is None or target is None:
            return None
        slice_of = _strides(chain, f.batch_axes)
        leads = _merge([(chain.sizes[a], (held[a], made[a], slice_of.get(a, 0))) for a in lead])
        hops.append(Hop(source, target, tuple(Lead(n, *steps) for n, steps in leads), f.blocks))
        rows.append(chain.size(lead + f.out_axes))
        held = made
    return Route(tuple(hops), chain.d_in, chain.d_out, tuple(rows[:-1]))


def _strides(chain: Chain, axes: Axes) -> dict[str, int]:
    """The step of each axis where the last is the fastest."""
    return {a: chain.size(axes[i + 1 :]) for i, a in enumerate(axes)}


def _merge(axes: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Neighbouring axes of (size, steps) as one where that makes no difference; axes of size 1 go."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in axes:
        if size == 1:
            continue
        inside = bool(merged) and merged[-1][1] == tuple(size * s for s in steps)
        merged.append((size * (merged.pop()[0] if inside else 1), steps))
    return merged
