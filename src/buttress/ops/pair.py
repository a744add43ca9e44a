"""Which two-factor chains the fused kernels take, and the numbers that they need. No triton here.

The kernels see x as (tokens, C, d), y as (tokens, B, a) in either order of its last two axes, and keep
z = R x between the factors as (tile, C, out, token): tokens in tiles, fastest. Whatever the structure is
called, a chain fits if its axes fall into that shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from buttress.chain import Axes, Chain


@dataclass(frozen=True)
class Pair:
    """Sizes and strides of a chain z[c, o] = R[c, o, d] x[c, d], y[b, a] = L[b, a, k] z[k, b]."""

    c: int
    d: int
    o: int
    """Outputs of one slice of R: b * s."""
    b: int
    a: int
    s: int
    """Size of the bond. Column k of L is row (k // s, k % s) of z for this b."""
    z_b: int
    z_s: int
    """Strides of b and s among the outputs of R."""
    y_b: int
    y_a: int
    """Strides of b and a in y."""
    right_shared: int
    left_shared: int
    """How often the one slice of a shared factor is used; 1 where the slices differ."""

    @property
    def narrow(self) -> bool:
        """Whether the kernels take slices of this size; larger ones fill a card by themselves."""
        return max(self.d, self.a) <= WIDEST

    @property
    def k(self) -> int:
        return self.c * self.s


@dataclass(frozen=True)
class Config:
    """What can be tuned without changing a result."""

    tokens: int = 64
    """Tokens in a tile of z."""
    out: int = 128
    """Most outputs that a forward program makes at a time."""
    inner: int = 64
    """Most inputs that it takes in one step."""
    registers: int = 16384
    """Numbers of a weight gradient that one program keeps; beyond that the work is cut."""
    warps: int = 4
    stages: int = 2
    back_warps: int = 8
    back_stages: int = 3


WIDEST = 256
"""Largest side of a slice that the kernels take: they keep a whole row of a weight gradient in registers."""


def config(itemsize: int) -> Config:
    """The best on one H200 of those tried, over BTT of ranks 1 to 4 at widths 1024 to 16384."""
    # float32 tiles are twice as large, and shared memory is not.
    return Config() if itemsize == 2 else Config(registers=4096, back_stages=1)


def pair(chain: Chain) -> Pair | None:
    """The numbers for the kernels, or None where the chain has another shape."""
    if len(chain.factors) != 2 or chain.window or any(f.regroup for f in chain.factors):
        return None
    first, second = chain.factors
    lead = first.batch_axes + first.shared_axes
    kept = second.batch_axes + second.shared_axes
    if (first.batch_axes and first.shared_axes) or (second.batch_axes and second.shared_axes):
        return None
    bond = tuple(a for a in first.out_axes if a not in kept)
    size = chain.size
    fits = (
        chain.x == lead + first.in_axes
        and second.in_axes == lead + bond
        and first.out_axes in (kept + bond, bond + kept)
        and chain.y in (kept + second.out_axes, second.out_axes + kept)
    )
    if not fits:
        return None
    inner_bond = first.out_axes == kept + bond
    inner_out = chain.y == kept + second.out_axes
    return Pair(
        c=size(lead),
        d=first.d_in,
        o=first.d_out,
        b=size(kept),
        a=second.d_out,
        s=size(bond),
        z_b=size(bond) if inner_bond else 1,
        z_s=1 if inner_bond else size(kept),
        y_b=second.d_out if inner_out else 1,
        y_a=1 if inner_out else size(kept),
        right_shared=_shared(first.shared_axes, size(lead)),
        left_shared=_shared(second.shared_axes, size(kept)),
    )


def _shared(axes: Axes, count: int) -> int:
    return count if axes else 1
