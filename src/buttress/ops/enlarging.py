"""Factors, and tensors of a factor's shape, in the larger shape that they have once bonds are longer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.core.growth import FactorGrowth


def drawn(growth: FactorGrowth, factor: Tensor, std: float) -> Tensor:
    """A larger factor with the old entries, and new ones that leave the matrix of the chain unchanged.

    New entries are drawn, except those that read a new slice of a bond and write none: these are zero. Every path
    through new slices ends in exactly one such entry. It gets a gradient in the first step, since what it reads is
    nonzero, and the drawn ones follow once it has moved, as with a zero start.

    Args:
        growth: How the factor grows.
        factor: The factor.
        std: Standard deviation of the drawn entries.

    Returns:
        The new factor.

    Shape:
        factor is (blocks, d_out, d_in) of the old factor, the result that of the new one.
    """
    large = torch.empty(growth.new_sizes, dtype=factor.dtype, device=factor.device).normal_(std=std)
    if growth.contracted:
        zeros = _new_slices(growth, growth.contracted, factor) & ~_new_slices(growth, growth.created, factor)
        large.masked_fill_(zeros, 0.0)
    return _with_old(growth, large, factor)


def with_zeros(growth: FactorGrowth, tensor: Tensor) -> Tensor:
    """A tensor of a factor's shape, with zeros at the new entries."""
    return _with_old(growth, tensor.new_zeros(growth.new_sizes), tensor)


def with_means(growth: FactorGrowth, tensor: Tensor) -> Tensor:
    """A tensor of a factor's shape, whose new entries are the means of the old ones along each longer bond."""
    large = tensor.view(growth.old_sizes)
    for axis, (old, new) in enumerate(zip(growth.old_sizes, growth.new_sizes, strict=True)):
        if new > old:
            mean = large.mean(axis, keepdim=True, dtype=torch.promote_types(tensor.dtype, torch.float32))
            shape = list(large.shape)
            shape[axis] = new - old
            large = torch.cat([large, mean.to(tensor.dtype).expand(shape)], axis)
    return large.reshape(growth.new.shape).contiguous()


def _with_old(growth: FactorGrowth, large: Tensor, tensor: Tensor) -> Tensor:
    large[tuple(slice(n) for n in growth.old_sizes)] = tensor.view(growth.old_sizes)
    return large.view(growth.new.shape)


def _new_slices(growth: FactorGrowth, axes: Sequence[int], like: Tensor) -> Tensor:
    """Where the position along any of these axes is new, broadcastable to the new sizes."""
    mask = torch.zeros([1] * len(growth.new_sizes), dtype=torch.bool, device=like.device)
    for axis in axes:
        is_new = torch.arange(growth.new_sizes[axis], device=like.device) >= growth.old_sizes[axis]
        mask = mask | is_new.view([-1 if i == axis else 1 for i in range(len(growth.new_sizes))])
    return mask
