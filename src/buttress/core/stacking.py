"""Stacking: several chains on one input as one chain, whose output is theirs side by side.

If the slowest axis of y is in every factor, slices of each factor belong to one entry of that axis each. Chains that
differ in the length of this axis alone are then parts of one chain with a longer axis, and each of its factors is the
concatenation of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from buttress.core.chain import Chain, Factor
from buttress.core.chain_sum import AnyChain


@dataclass(frozen=True)
class Joint:
    """Where the factors of several chains are joined in a stored tensor of shape (blocks, d_out, d_in).

    Args:
        dim: The dimension that holds the axis: 0 blocks, 1 outputs.
        before: Number of entries of the axes before it in that dimension; 1 where the parts are contiguous.
    """

    dim: int
    before: int


@dataclass(frozen=True)
class Stack:
    """Several chains as one.

    Args:
        chain: The chain whose output is that of the chains side by side.
        joints: How each of its factors is put together, in order of application.
    """

    chain: Chain
    joints: tuple[Joint, ...]


def stacked(chains: Sequence[AnyChain]) -> Stack | None:
    """Several chains on one input as one chain.

    Args:
        chains: The chains, in the order of their outputs.

    Returns:
        The stack. None if there is none: the chains differ in more than the length of the slowest axis of y, one is a
        sum or pads its outputs, or a factor does not have the axis.

    Example:
        >>> from buttress.core.structures import BTT, LowRank
        >>> stack = stacked([BTT(rank=2).chain(64, 64)] * 3)
        >>> stack.chain.d_out, stack.joints
        (192, (Joint(dim=1, before=1), Joint(dim=0, before=1)))
        >>> stacked([LowRank(rank=2).chain(64, 64)] * 3)
    """
    first = chains[0]
    if not isinstance(first, Chain) or first.padding[1]:
        return None
    axis = first.y[0]
    regrouped = any(axis in axes for f in first.factors for axes in f.regroup or ())
    joints = [joint for f in first.factors if (joint := _joint(first, f, axis)) is not None]
    if len(joints) < len(first.factors) or axis in first.x or regrouped:
        return None
    lengths = [chain.sizes[axis] if isinstance(chain, Chain) and axis in chain.sizes else 0 for chain in chains]
    if any(chain != _with_length(first, axis, n) for chain, n in zip(chains, lengths, strict=True)):
        return None
    return Stack(_with_length(first, axis, sum(lengths)), tuple(joints))


def _joint(chain: Chain, f: Factor, axis: str) -> Joint | None:
    """Where a factor has the axis, as one of its blocks or outputs."""
    for dim, axes in enumerate((f.batch_axes, f.out_axes)):
        if axis in axes:
            return Joint(dim, chain.size(axes[: axes.index(axis)]))
    return None


def _with_length(chain: Chain, axis: str, length: int) -> Chain:
    """A chain with another length of the slowest axis of y, which all of its factors have."""

    def scaled(size: int) -> int:
        return size // chain.sizes[axis] * length

    factors = tuple(
        replace(f, blocks=scaled(f.blocks)) if axis in f.batch_axes else replace(f, d_out=scaled(f.d_out))
        for f in chain.factors
    )
    sizes = tuple((name, length if name == axis else size) for name, size in chain.axis_sizes)
    return replace(chain, d_out=scaled(chain.d_out), factors=factors, axis_sizes=sizes)
