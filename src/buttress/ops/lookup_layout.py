"""The axis orders with which rows of a chain's matrix are looked up, derived once per chain.

A row is the transposed chain applied to a one-hot vector. The row's number fixes every axis of y. From the last factor
to the first, each is read at its fixed axes and multiplied with the held tensor over its other axes, until the axes of
x are left.

A factor is read by gathering, which copies the entries at its fixed axes for each row. Where these are more than the
held tensor has with the fixed axes expanded (one position nonzero), the axes are expanded instead, and one matmul with
the whole factor covers all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain, Factor

ROW_AXIS = ""
"""Stands for the rows that are looked up among a chain's axes, none of which can have this name."""
Permutation = tuple[int, ...]
Sizes = tuple[int, ...]


class FixedAxis(NamedTuple):
    """An axis of y, fixed by the row's number: its position in y and its size."""

    position: int
    size: int


@dataclass(frozen=True)
class Arrangement:
    """Expand fixed axes at the end, permute all axes, and reshape."""

    expanded: tuple[FixedAxis, ...]
    permutation: Permutation
    shape: Sizes

    def __call__(self, z: Tensor, indices: Sequence[Tensor]) -> Tensor:
        """Arrange z (rows, *axes), where `indices` are each row's positions along the axes of y."""
        for position, size in self.expanded:
            one_hot = indices[position][:, None] == torch.arange(size, device=z.device)
            z = torch.where(one_hot.reshape(-1, *(1,) * (z.dim() - 1), size), z.unsqueeze(-1), 0.0)
        return z.permute(self.permutation).reshape(self.shape)


@dataclass(frozen=True)
class LookupFactor:
    """How one factor is multiplied with the held tensor.

    Args:
        sizes: Sizes of the factor's axes.
        permutation: Their order: fixed axes that are read, batch, summed, created.
        table_shape: (read, *others) where the factor is gathered, (batch, summed, created) where one matmul covers all
            rows.
        read_axes: Fixed axes at which the factor is read.
        gathered: Whether the factor is gathered.
        left: The held tensor as the left operand of torch.bmm; None for the first factor of a lookup, which is copied.
        slice_shape: The gathered entries as one matrix for each row and block: (-1, summed, created).
        bmm_shape: The result of one matmul for all rows: (batch, rows, shared * created).
        result_shape: The held tensor after the factor.
        regroup: The inverse of a regroup before the factor.
    """

    sizes: Sizes
    permutation: Permutation
    table_shape: Sizes
    read_axes: tuple[FixedAxis, ...]
    gathered: bool
    left: Arrangement | None
    slice_shape: Sizes
    bmm_shape: Sizes
    result_shape: Sizes
    regroup: Arrangement | None

    def table(self, weight: Tensor) -> Tensor:
        """The factor's stored tensor in the order in which it is read."""
        return weight.reshape(self.sizes).permute(self.permutation).reshape(self.table_shape)

    def gather(self, table: Tensor, indices: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
        """The entries of the table for each row; for a row that is not `valid`, the read itself raises an error."""
        entry = torch.zeros_like(indices[0])
        for position, size in self.read_axes:
            entry = entry * size + indices[position]
        if valid is not None:
            entry = torch.where(valid, entry, self.table_shape[0])
        # torch.jit.trace compares a trace with one without gradients.
        if torch.is_grad_enabled() or torch._C._get_tracing_state() is not None:
            # Its gradient is faster than that of index_select. It needs contiguous entries, possibly a copy.
            return F.embedding(entry, table.reshape(self.table_shape[0], -1))
        return table.index_select(0, entry)


@dataclass(frozen=True)
class WindowScatter:
    """The transpose of reading a circular window: entry (n, w) is added to n + w - size // 2.

    Args:
        length: Length of the axis n.
        size: Length of the window.
        center: Position in y of the axis n, where it is fixed.
        source: The held tensor with the window last.
        result_shape: The held tensor afterwards.
    """

    length: int
    size: int
    center: int | None
    source: Arrangement
    result_shape: Sizes

    def __call__(self, z: Tensor, indices: Sequence[Tensor]) -> Tensor:
        source = self.source(z, indices)
        center = torch.arange(self.length, device=z.device) if self.center is None else indices[self.center]
        target = (center[:, None] + torch.arange(self.size, device=z.device) - self.size // 2) % self.length
        if self.center is None:
            target = target.reshape(1, -1)
        x = source.new_zeros(*source.shape[:2], self.length)
        return x.scatter_add(-1, target[:, None].expand(source.shape), source).reshape(self.result_shape)


@dataclass(frozen=True)
class LookupLayout:
    """How rows of a chain's matrix are looked up.

    Args:
        d_out: Number of rows.
        d_in: Length of a row.
        radix: Stride and size of each axis of y.
        factors: The factors, last-applied first.
        window: The transposed window, where the chain has one.
        output: The held tensor as rows, padded.
        macs: Multiply-accumulates per row.
    """

    d_out: int
    d_in: int
    radix: tuple[tuple[int, int], ...]
    factors: tuple[LookupFactor, ...]
    window: WindowScatter | None
    output: Arrangement
    macs: int


def lookup_layout(chain: Chain) -> LookupLayout:
    """Choose the axis orders for looking up rows of a chain's matrix."""
    builder = _LayoutBuilder(chain)
    factors = tuple(builder.add_factor(f) for f in reversed(chain.factors))
    window = builder.add_window(*chain.window) if chain.window else None
    output = builder.arrange(builder.fixed, (), chain.x, (-1, chain.size(chain.x)))
    strides = [chain.size(chain.y[i + 1 :]) for i in range(len(chain.y))]
    radix = tuple(zip(strides, (chain.sizes[a] for a in chain.y), strict=True))
    return LookupLayout(chain.d_out, chain.d_in, radix, factors, window, output, builder.macs)


@dataclass(frozen=True)
class _Roles:
    """The role of each axis when one factor is used for a lookup.

    Args:
        read: Fixed axes at which the factor is read.
        expanded: Fixed axes that are expanded instead.
        batch: Axes of the factor that stay.
        summed: Axes over which the factor is summed.
        shared: Axes of the held tensor that the factor does not have.
        created: Axes that the factor adds to the held tensor.
    """

    read: Axes
    expanded: Axes
    batch: Axes
    summed: Axes
    shared: Axes
    created: Axes


class _LayoutBuilder:
    """Tracks the fixed and the held axes from y back to x."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.fixed: Axes = chain.y
        self.current: Axes | None = None
        """Axes of the held tensor; None before the first factor is read."""
        self.macs = 0

    def add_factor(self, f: Factor) -> LookupFactor:
        """The layout of the next factor; updates the held and the fixed axes."""
        size = self.chain.size
        roles = self._roles(f)
        gathered = bool(roles.read) or self.current is None
        left = None if self.current is None else self._left_operand(roles, gathered)
        order = roles.read + roles.batch + roles.summed + roles.created
        multiplied = (size(roles.batch), size(roles.summed), size(roles.created))
        self.current = roles.batch + roles.shared + roles.created
        self.fixed = tuple(a for a in self.fixed if a not in f.out_axes)
        result_shape = (-1, *self._sizes(self.current))
        return LookupFactor(
            sizes=self._sizes(f.axes),
            permutation=tuple(f.axes.index(a) for a in order),
            table_shape=(size(roles.read), *self._sizes(order[len(roles.read) :])) if gathered else multiplied,
            read_axes=self._fixed_axes(roles.read),
            gathered=gathered,
            left=left,
            slice_shape=(-1, size(roles.summed), size(roles.created)),
            bmm_shape=(size(roles.batch), -1, size(roles.shared + roles.created)),
            result_shape=result_shape,
            regroup=self._undo_regroup(f),
        )

    def _roles(self, f: Factor) -> _Roles:
        """Choose between gathering a factor at its fixed axes and expanding them: the one that copies less."""
        read = tuple(a for a in f.axes if a in self.fixed)
        expanded: Axes = ()
        if self.current is not None:
            gathered_size = self.chain.size(a for a in f.axes if a not in read)
            if not read or self.chain.size(self.current + read) < gathered_size:
                read, expanded = (), read
        return _Roles(
            read=read,
            expanded=expanded,
            batch=tuple(a for a in f.batch_axes if a not in read),
            summed=tuple(a for a in f.out_axes if a not in read),
            shared=tuple(a for a in (*(self.current or ()), *expanded) if a not in f.axes),
            created=f.in_axes,
        )

    def _left_operand(self, roles: _Roles, gathered: bool) -> Arrangement:
        """The held tensor as the left operand of torch.bmm, batched over rows where the factor is gathered."""
        size = self.chain.size
        self.macs += size(roles.batch + roles.shared + roles.summed + roles.created)
        if gathered:
            shape = (-1, size(roles.shared), size(roles.summed))
            return self.arrange(roles.expanded, (), roles.batch + roles.shared + roles.summed, shape)
        shape = (size(roles.batch), -1, size(roles.summed))
        return self.arrange(roles.expanded, roles.batch, roles.shared + roles.summed, shape)

    def _undo_regroup(self, f: Factor) -> Arrangement | None:
        if not f.regroup:
            return None
        old, new = f.regroup
        arrangement = self.arrange(self.fixed, (), new, (-1, *self._sizes(old)))
        self.current = old
        return arrangement

    def add_window(self, n: str, w: str) -> WindowScatter:
        """The transposed window; updates the held and the fixed axes."""
        assert self.current is not None
        center = self.chain.y.index(n) if n in self.fixed else None
        others = tuple(a for a in self.current if a not in (n, w))
        last = (w,) if n in self.fixed else (n, w)
        shape = (-1, self.chain.size(others), self.chain.size(last))
        source = self.arrange(tuple(a for a in (w,) if a in self.fixed), (), others + last, shape)
        self.current = (*others, n)
        self.fixed = tuple(a for a in self.fixed if a != n)
        length, size = self.chain.sizes[n], self.chain.sizes[w]
        return WindowScatter(length, size, center, source, (-1, *self._sizes(self.current)))

    def arrange(self, expanded: Axes, before: Axes, after: Axes, shape: Sizes) -> Arrangement:
        """Expand fixed axes, which are then no longer fixed, and order all axes: `before`, the rows, `after`."""
        assert self.current is not None
        axes = (ROW_AXIS, *self.current, *expanded)
        self.fixed = tuple(a for a in self.fixed if a not in expanded)
        permutation = tuple(axes.index(a) for a in (*before, ROW_AXIS, *after))
        return Arrangement(self._fixed_axes(expanded), permutation, shape)

    def _fixed_axes(self, axes: Axes) -> tuple[FixedAxis, ...]:
        return tuple(FixedAxis(self.chain.y.index(a), self.chain.sizes[a]) for a in axes)

    def _sizes(self, axes: Axes) -> Sizes:
        return tuple(self.chain.sizes[a] for a in axes)
