"""The axis orders with which torch.bmm applies a chain, derived once per chain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from buttress.core.chain import Axes, Chain, Factor

TOKEN_AXIS = ""
"""Stands for the tokens among a chain's axes, none of which can have this name."""
Permutation = tuple[int, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class BmmFactor:
    """How one factor is applied: regroup, arrange into blocks, multiply.

    Sizes hold -1 for the tokens.

    Args:
        regroup: Permutation and new sizes of a regroup before the factor.
        ungroup: Old sizes and permutation that undo it.
        permutation: Order of the input's axes with the block axes first.
        permuted_sizes: Sizes in that order.
        inverse: The permutation that undoes it.
        blocks: Batch size of torch.bmm.
        block_shape: One block of the input: (-1, d_in) where the tokens are slow, (d_in, -1) where they are fast.
        repeats: How often each slice of the weight is repeated: shared axes count as blocks in the first factor and
            as tokens later.
        d_out: Rows of a slice.
        result_sizes: Sizes of the result, without its tokens, which are the fastest axis.
        tokens_slow: Whether the tokens are the slow axis of a block.
        reads_x: Whether this is the first factor, with the inputs of its blocks side by side in x.
        writes_y: Whether this is the last factor, with the outputs of its blocks side by side in y.
    """

    regroup: tuple[Permutation, Sizes] | None
    ungroup: tuple[Sizes, Permutation] | None
    permutation: Permutation
    permuted_sizes: Sizes
    inverse: Permutation
    blocks: int
    block_shape: tuple[int, int]
    repeats: int
    d_out: int
    result_sizes: Sizes
    tokens_slow: bool
    reads_x: bool
    writes_y: bool

    def arrange(self, z: Tensor) -> Tensor:
        """The input as (blocks, *block_shape)."""
        if self.regroup:
            permutation, sizes = self.regroup
            z = z.permute(permutation).reshape(*sizes, -1)
        return z.permute(self.permutation).reshape(self.blocks, *self.block_shape)

    def restore(self, z: Tensor) -> Tensor:
        """The inverse of `arrange`."""
        z = z.reshape(self.permuted_sizes).permute(self.inverse)
        if self.ungroup:
            sizes, permutation = self.ungroup
            z = z.reshape(*sizes, -1).permute(permutation)
        return z

    def repeat(self, weight: Tensor) -> Tensor:
        """The weight with one slice for each block."""
        if self.repeats == 1:
            return weight
        return weight.unsqueeze(1).expand(-1, self.repeats, -1, -1).reshape(self.blocks, *weight.shape[1:])

    def sum_repeats(self, grad: Tensor) -> Tensor:
        """The adjoint of `repeat`."""
        return grad if self.repeats == 1 else grad.reshape(-1, self.repeats, *grad.shape[1:]).sum(1)


@dataclass(frozen=True)
class BmmLayout:
    """How a whole chain is applied.

    Args:
        plain: Whether the chain is a sequence of dense matrices without blocks.
        x_sizes: Sizes of the axes of x.
        read_sizes: Sizes of the axes of x as it is read: through the window, if there is one.
        factors: The factors in order of application.
        permutation: Order in which the last factor's result becomes y.
        inverse: The permutation that undoes it.
        y_sizes: Sizes of the axes of y.
        d_out: Entries of y, with padding.
    """

    plain: bool
    x_sizes: Sizes
    read_sizes: Sizes
    factors: tuple[BmmFactor, ...]
    permutation: Permutation
    inverse: Permutation
    y_sizes: Sizes
    d_out: int


def bmm_layout(chain: Chain) -> BmmLayout:
    """Choose the axis orders for a chain."""
    axes: Axes = (TOKEN_AXIS, *chain.x, *(chain.window[1:] if chain.window else ()))
    read_sizes = _sizes(chain, axes[1:])
    factors = []
    for i in range(len(chain.factors)):
        factor, axes = _factor_layout(chain, i, axes)
        factors.append(factor)
    permutation = _permutation(axes, (TOKEN_AXIS, *chain.y))
    return BmmLayout(
        plain=_is_plain(chain),
        x_sizes=_sizes(chain, chain.x),
        read_sizes=read_sizes,
        factors=tuple(factors),
        permutation=permutation,
        inverse=_inverse(permutation),
        y_sizes=_sizes(chain, chain.y),
        d_out=chain.size(chain.y),
    )


def _factor_layout(chain: Chain, i: int, axes: Axes) -> tuple[BmmFactor, Axes]:
    """The layout of factor i for an input with these axes, and the axes of its result."""
    f = chain.factors[i]
    first, last = i == 0, i == len(chain.factors) - 1
    regroup = ungroup = None
    if f.regroup:
        old, new = f.regroup
        permutation = _permutation(axes, (*old, TOKEN_AXIS))
        regroup, ungroup = (permutation, _sizes(chain, new)), (_sizes(chain, old), _inverse(permutation))
        axes = (*new, TOKEN_AXIS)
    block_order, result_axes = _axis_orders(f, first)
    permutation = _permutation(axes, block_order)
    layout = BmmFactor(
        regroup=regroup,
        ungroup=ungroup,
        permutation=permutation,
        permuted_sizes=_sizes(chain, block_order),
        inverse=_inverse(permutation),
        blocks=f.blocks * f.shared if first else f.blocks,
        block_shape=(-1, f.d_in) if first else (f.d_in, -1),
        repeats=f.shared if first else 1,
        d_out=f.d_out,
        result_sizes=_sizes(chain, result_axes),
        tokens_slow=first,
        reads_x=first and not chain.window and chain.x == f.batch_axes + f.shared_axes + f.in_axes,
        writes_y=last and not first and not f.shared_axes and chain.y == f.batch_axes + f.out_axes,
    )
    return layout, (*result_axes, TOKEN_AXIS)


def _axis_orders(f: Factor, first: bool) -> tuple[Axes, Axes]:
    """The orders of the input's axes for torch.bmm and of the result's axes without the tokens."""
    if first:
        return (
            (*f.batch_axes, *f.shared_axes, TOKEN_AXIS, *f.in_axes),
            (*f.batch_axes, *f.shared_axes, *f.out_axes),
        )
    return (
        (*f.batch_axes, *f.in_axes, *f.shared_axes, TOKEN_AXIS),
        (*f.batch_axes, *f.out_axes, *f.shared_axes),
    )


def _is_plain(chain: Chain) -> bool:
    """Whether each factor contracts all that the one before it created, in the same order."""
    orders = [chain.x, *(axes for f in chain.factors for axes in (f.in_axes, f.out_axes)), chain.y]
    consecutive = all(before == after for before, after in zip(orders[::2], orders[1::2], strict=True))
    blocked = any(f.batch_axes or f.shared_axes or f.regroup for f in chain.factors)
    return consecutive and not chain.window and not blocked


def _sizes(chain: Chain, axes: Axes) -> Sizes:
    return tuple([-1 if a == TOKEN_AXIS else chain.sizes[a] for a in axes])


def _permutation(axes: Axes, order: Axes) -> Permutation:
    return tuple([axes.index(a) for a in order])


def _inverse(permutation: Permutation) -> Permutation:
    return tuple([permutation.index(i) for i in range(len(permutation))])
