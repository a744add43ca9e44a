"""Rows of a chain's matrix: what an embedding looks up.

A row is the transposed chain applied to a unit vector. The number of the row fixes every axis of y; going through the
factors backwards, each is read where its axes are fixed and multiplied into what is held over the others. What comes
out are the axes of x. Nothing has the size of the whole matrix, or of a column of it.

A factor is read by gathering, which makes a copy of the part that is left for each row. Where that is larger than what
is held with the fixed axes written out (one place filled, the others zero), they are written out instead, and the
factor multiplies all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain, Factor
from buttress.errors import ShapeError
from buttress.ops.framing import autocast_dtype

Order = tuple[int, ...]
Sizes = tuple[int, ...]
Fixed = tuple[int, int]
"""An axis of y, which the number of the row fixes: which one, and its size."""


def rows(chain: Chain, factors: Sequence[Tensor], ids: Tensor, *, scales: Sequence[Tensor] | None = None) -> Tensor:
    """Rows `ids` of the (d_out, d_in) matrix that `factors` make, in order of application: (*ids.shape, d_in).

    Law: rows(chain, factors, ids) = dense(chain, factors)[ids]. An id that is no row of the matrix fails as it does in
    F.embedding. `scales` holds one number for each factor, by which it is multiplied. Autocast is left aside, as
    F.embedding leaves it.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"rows are looked up by int64 or int32 numbers, got {ids.dtype}")
    route: Route = chain.memo.get("rows") or prepare(chain)
    on = autocast_dtype(factors[0]) is not None
    with torch.autocast(ids.device.type, enabled=False) if on else nullcontext():
        found = _rows(route, factors, ids.reshape(-1).long())
        if scales is not None:
            found = found * reduce(mul, scales).to(found.dtype)
    return found.reshape(*ids.shape, chain.d_in)


def macs(chain: Chain) -> int:
    """Multiply-accumulates of one row."""
    route: Route = chain.memo.get("rows") or prepare(chain)
    return route.macs


def _rows(route: Route, factors: Sequence[Tensor], ids: Tensor) -> Tensor:
    at = [ids // stride % size for stride, size in route.radix]
    inside = (ids >= 0) & (ids < route.number)
    z = ids
    for step, weight in zip(route.steps, reversed(factors), strict=True):
        w = weight.reshape(step.unfolded).permute(step.order).reshape(step.table)
        if step.left is None:
            z = step.gathered(w, at, inside)
        elif step.gathers:
            z = torch.bmm(step.left(z, at), step.gathered(w, at).reshape(step.block))
        else:
            z = torch.bmm(step.left(z, at), w).reshape(step.turned).transpose(0, 1)
        z = z.reshape(step.held)
        if step.regroup is not None:
            z = step.regroup(z, at)
    if route.window is not None:
        z = route.window(z, at)
    x = route.end(z, at)
    return x if x.shape[1] == route.width else x[:, : route.width].contiguous()


@dataclass(frozen=True)
class Arrange:
    """Write fixed axes out at the end, put all in order, and split anew."""

    placed: tuple[Fixed, ...]
    order: Order
    shape: Sizes

    def __call__(self, z: Tensor, at: Sequence[Tensor]) -> Tensor:
        for which, size in self.placed:
            here = at[which][:, None] == torch.arange(size, device=z.device)
            z = torch.where(here.reshape(-1, *(1,) * (z.dim() - 1), size), z.unsqueeze(-1), 0.0)
        return z.permute(self.order).reshape(self.shape)


@dataclass(frozen=True)
class Step:
    """What one factor does to what is held."""

    unfolded: Sizes
    order: Order
    """Of the factor's axes: those that are read, batch, summed, made."""
    table: Sizes
    """(read, *rest) for one that is gathered, (batch, summed, made) for one that multiplies all rows."""
    read: tuple[Fixed, ...]
    gathers: bool
    left: Arrange | None
    """What is held as the left side of a batched product; None for the first factor, which is only read."""
    block: Sizes
    turned: Sizes
    """Where all rows are multiplied, they come second: (batch, rows, shared * made)."""
    held: Sizes
    regroup: Arrange | None

    def gathered(self, table: Tensor, at: Sequence[Tensor], inside: Tensor | None = None) -> Tensor:
        place = torch.zeros_like(at[0])
        for which, size in self.read:
            place = place * size + at[which]
        if inside is not None:
            place = torch.where(inside, place, self.table[0])  # which reading refuses, as it should
        if torch.is_grad_enabled():
            # Its gradient is the quick one. It wants what is read side by side, which may take a copy of the factor.
            return F.embedding(place, table.reshape(self.table[0], -1))
        return table.index_select(0, place)


@dataclass(frozen=True)
class Unread:
    """The transpose of reading a circular window: entry (n, w) adds to n + w - size(w) // 2."""

    ring: int
    size: int
    centre: int | None
    """The axis of y that n is, where it is fixed."""
    source: Arrange
    held: Sizes

    def __call__(self, z: Tensor, at: Sequence[Tensor]) -> Tensor:
        source = self.source(z, at)
        centre = torch.arange(self.ring, device=z.device) if self.centre is None else at[self.centre]
        target = (centre[:, None] + torch.arange(self.size, device=z.device) - self.size // 2) % self.ring
        if self.centre is None:
            target = target.reshape(1, -1)
        x = source.new_zeros(*source.shape[:2], self.ring)
        return x.scatter_add(-1, target[:, None].expand(source.shape), source).reshape(self.held)


@dataclass(frozen=True)
class Route:
    """The way through a chain, last-applied factor first."""

    number: int
    width: int
    radix: tuple[tuple[int, int], ...]
    """Stride and size of each axis of y."""
    steps: tuple[Step, ...]
    window: Unread | None
    end: Arrange
    macs: int
    """Multiply-accumulates a row."""


def prepare(chain: Chain) -> Route:
    """Work out the way through a chain, once."""
    way = _Way(chain)
    steps = tuple(way.step(f) for f in reversed(chain.factors))
    window = way.unread(*chain.window) if chain.window else None
    end = way.arrange(way.fixed, (), chain.x, (-1, chain.size(chain.x)))
    strides = [chain.size(chain.y[i + 1 :]) for i in range(len(chain.y))]
    radix = tuple(zip(strides, (chain.sizes[a] for a in chain.y), strict=True))
    route = Route(chain.d_out, chain.d_in, radix, steps, window, end, way.macs)
    chain.memo["rows"] = route
    return route


class _Way:
    """Which axes are fixed and which are held, on the way back through a chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.fixed: Axes = chain.y
        self.held: Axes | None = None
        self.macs = 0

    def step(self, f: Factor) -> Step:
        size, sizes = self.chain.size, self.sizes
        read = tuple(a for a in f.axes if a in self.fixed)
        placed: Axes = ()
        if self.held is not None and (not read or size(self.held + read) < size(a for a in f.axes if a not in read)):
            placed, read = read, ()
        gathers = bool(read) or self.held is None
        batch, summed = (tuple(a for a in axes if a not in read) for axes in (f.batch_axes, f.out_axes))
        shared = tuple(a for a in (*(self.held or ()), *placed) if a not in f.axes)
        order = read + batch + summed + f.in_axes
        left = None
        if self.held is not None:
            self.macs += size(batch + shared + summed + f.in_axes)
            first, shape = (
                ((), (-1, size(shared), size(summed))) if gathers else (batch, (size(batch), -1, size(summed)))
            )
            left = self.arrange(placed, first, (() if first else batch) + shared + summed, shape)
        self.held = batch + shared + f.in_axes
        held = (-1, *sizes(self.held))
        self.fixed = tuple(a for a in self.fixed if a not in f.out_axes)
        regroup = None
        if f.regroup:
            old, new = f.regroup
            regroup = self.arrange(self.fixed, (), new, (-1, *sizes(old)))
            self.held = old
        return Step(
            unfolded=sizes(f.axes),
            order=tuple(f.axes.index(a) for a in order),
            table=(size(read), *sizes(order[len(read) :])) if gathers else (size(batch), size(summed), size(f.in_axes)),
            read=self.located(read),
            gathers=gathers,
            left=left,
            block=(-1, size(summed), size(f.in_axes)),
            turned=(size(batch), -1, size(shared + f.in_axes)),
            held=held,
            regroup=regroup,
        )

    def unread(self, n: str, w: str) -> Unread:
        assert self.held is not None
        sizes = self.chain.sizes
        centre = self.chain.y.index(n) if n in self.fixed else None
        rest = tuple(a for a in self.held if a not in (n, w))
        last = (w,) if n in self.fixed else (n, w)
        shape = (-1, self.chain.size(rest), self.chain.size(last))
        source = self.arrange(tuple(a for a in (w,) if a in self.fixed), (), rest + last, shape)
        self.held = (*rest, n)
        self.fixed = tuple(a for a in self.fixed if a != n)
        return Unread(sizes[n], sizes[w], centre, source, (-1, *self.sizes(self.held)))

    def arrange(self, placed: Axes, before: Axes, after: Axes, shape: Sizes) -> Arrange:
        """Fixed axes written out, then the axes `before` the rows, the rows, and those `after` them."""
        assert self.held is not None
        axes = ("", *self.held, *placed)
        self.fixed = tuple(a for a in self.fixed if a not in placed)
        return Arrange(self.located(placed), tuple(axes.index(a) for a in (*before, "", *after)), shape)

    def located(self, axes: Axes) -> tuple[Fixed, ...]:
        return tuple((self.chain.y.index(a), self.chain.sizes[a]) for a in axes)

    def sizes(self, axes: Axes) -> Sizes:
        return tuple(self.chain.sizes[a] for a in axes)
