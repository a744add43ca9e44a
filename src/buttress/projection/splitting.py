"""Splitting a tensor in two: the first factor of a chain, and the contraction of all later factors.

An ordinary bond is contracted by the next factor that has it. Any basis of the bond then gives the same rest, and one
truncated SVD per block is the best split.

A coupled bond is a batch axis of the factors in between, which multiply each of its entries separately. The basis then
decides whether the rest can be represented at all, and an SVD picks one for each block without regard to the others.
Three splits are candidates:

- by block: as for an ordinary bond; the bases of different blocks do not match.
- aligned: one SVD for all blocks, which gives them a common basis. The factors in between start constant, so the result
  is as near as two factors with this bond can be.
- diagonalizing: the bases in which the factors in between are diagonal for all blocks (diagonalization.py). It is exact
  for a matrix that has the structure, if the bond is no longer than the sides of a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain, Factor
from buttress.errors import StructureError
from buttress.projection.diagonalization import diagonalizing_bases

Halves = tuple[Tensor, Tensor]
"""The first factor, with the axes `Cut.first_axes`, and the rest, with the axes `Cut.rest_axes`."""

Svd = tuple[Tensor, Tensor, Tensor]
LATEST: ContextVar[deque[tuple[Tensor, Svd]] | None] = ContextVar("latest decompositions", default=None)


@dataclass(frozen=True)
class Cut:
    """Where a tensor is split, by groups of axes; build one with `Cut.of`.

    Attributes:
        keep: Axes of the tensor that both halves have.
        bond: Axes that both halves have and the tensor has not.
        only_first: Axes of the first factor alone.
        only_rest: Axes of the tensor that the first factor has not.
    """

    keep: Axes
    bond: Axes
    only_first: Axes
    only_rest: Axes

    @classmethod
    def of(cls, first: Factor, later: tuple[Factor, ...], axes: Axes) -> Cut:
        """The cut of a tensor with these axes after the first factor."""
        rest = {a for f in later for a in f.axes}
        return cls(
            keep=tuple(a for a in axes if a in first.axes and a in rest),
            bond=tuple(a for a in first.axes if a in rest and a not in axes),
            only_first=tuple(a for a in first.axes if a not in rest),
            only_rest=tuple(a for a in axes if a not in first.axes),
        )

    @property
    def first_axes(self) -> Axes:
        """Axes of the first half."""
        return (*self.keep, *self.bond, *self.only_first)

    @property
    def rest_axes(self) -> Axes:
        """Axes of the second half."""
        return (*self.keep, *self.only_rest, *self.bond)


def splits(chain: Chain, cut: Cut, later: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> Iterator[Halves]:
    """Candidates for the best split: one at an ordinary bond, up to three at a coupled one.

    Args:
        chain: The chain.
        cut: Where to split.
        later: The factors of the second half.
        tensor: The tensor to split.
        axes: Its axes.

    Yields:
        The two halves.

    Raises:
        StructureError: If the bond is longer than needed to represent any matrix exactly.
    """
    if not set(cut.bond) & set(chain.coupled_bonds):
        yield by_svd(chain, cut, tensor, axes)
        return
    yield _aligned(chain, cut, later, tensor, axes)
    if chain.size(cut.bond) <= min(chain.size(cut.only_first), chain.size(cut.only_rest)):
        yield by_svd(chain, cut, tensor, axes)
    yield from _diagonalizing(chain, cut, later, tensor, axes)


def by_svd(chain: Chain, cut: Cut, tensor: Tensor, axes: Axes) -> Halves:
    """Split by one truncated SVD for each index of the kept axes."""
    blocks = permuted(tensor, axes, (*cut.keep, *cut.only_rest, *cut.only_first))
    blocks = blocks.reshape(chain.size(cut.keep), chain.size(cut.only_rest), chain.size(cut.only_first))
    if chain.size(cut.bond) > (full := min(blocks.shape[1:])):
        raise StructureError(
            f"a rank of {chain.size(cut.bond)} at the bond {' '.join(cut.bond)} is above {full}, with which the "
            f"structure represents any {chain.d_out} × {chain.d_in} matrix exactly: use a rank of at most {full}"
        )
    left, right, root = truncated_svd(blocks, chain.size(cut.bond))
    # The rest is approximated further, so all singular values go to it.
    rest = (left * root[:, None, :] ** 2).reshape([chain.sizes[a] for a in cut.rest_axes])
    return right.reshape([chain.sizes[a] for a in cut.first_axes]), rest


def _aligned(chain: Chain, cut: Cut, later: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> Halves:
    """Split by one SVD over all blocks that only the factors in between tell apart; the rest is constant over them."""
    far = {a for f in later if not _is_between(f, cut) for a in f.axes}
    moved = tuple(a for a in cut.keep if a not in far)
    keep = tuple(a for a in cut.keep if a in far)
    whole = replace(cut, keep=keep, only_first=(*moved, *cut.only_first))
    first, rest = by_svd(chain, whole, tensor, axes)
    rest = rest.expand([chain.sizes[a] for a in moved] + list(rest.shape))
    return permuted(first, whole.first_axes, cut.first_axes), permuted(rest, (*moved, *whole.rest_axes), cut.rest_axes)


def _diagonalizing(chain: Chain, cut: Cut, later: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> Iterator[Halves]:
    """Split by the bases that diagonalize all blocks; nothing is yielded if the bond is longer than a block's sides."""
    between = {a for f in later if _is_between(f, cut) for a in f.axes}
    far = {a for f in later if not _is_between(f, cut) for a in f.axes}
    groups: tuple[Axes, ...] = (
        tuple(a for a in cut.keep if a in far),
        tuple(a for a in cut.only_rest if a in between and a in far),  # rows of blocks
        tuple(a for a in cut.keep if a not in far),  # columns of blocks
        tuple(a for a in cut.only_rest if a not in far),
        tuple(a for a in cut.only_rest if a not in between),
        cut.only_first,
    )
    *_, height, width = (chain.size(group) for group in groups)
    rank = chain.size(cut.bond)
    if rank > min(height, width):
        return
    order = tuple(a for group in groups for a in group)
    blocks = permuted(tensor, axes, order).reshape([chain.size(group) for group in groups]).double()
    bases = diagonalizing_bases(blocks, rank)
    if bases is None:
        return
    rest = torch.einsum("gbcmad,gcdr->gbcmar", blocks, torch.linalg.pinv(bases))
    first_axes = (*groups[0], *groups[2], *cut.bond, *cut.only_first)
    first = bases.to(tensor).reshape([chain.sizes[a] for a in first_axes])
    rest_axes = (*order[: len(order) - len(cut.only_first)], *cut.bond)
    rest = rest.to(tensor).reshape([chain.sizes[a] for a in rest_axes])
    yield permuted(first, first_axes, cut.first_axes), permuted(rest, rest_axes, cut.rest_axes)


def _is_between(factor: Factor, cut: Cut) -> bool:
    """Whether the bond is a batch axis of this factor."""
    return any(a in factor.batch_axes for a in cut.bond)


def truncated_svd(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(left, right, root) with blocks ~ (left * root) @ (root * right), padded with zeros to the rank."""
    # torch decomposes larger matrices one after the other on a GPU, where the CPU is faster.
    on_cpu = blocks.is_cuda and len(blocks) > 1 and max(blocks.shape[1:]) > 32
    u, s, vh = (t.to(blocks.device) for t in _svd(blocks.cpu() if on_cpu else blocks))
    root = s[:, :rank].sqrt()
    missing = rank - root.shape[1]
    return F.pad(u[..., :rank], (0, missing)), F.pad(vh[:, :rank], (0, 0, 0, missing)), F.pad(root, (0, missing))


@contextmanager
def shared_svds(count: int = 2) -> Iterator[None]:
    """Keep the latest decompositions during the block: structures that differ in rank alone truncate the same one.

    Args:
        count: How many to keep. A projection with moments alternates between two.
    """
    token = LATEST.set(deque(maxlen=count))
    try:
        yield
    finally:
        LATEST.reset(token)


def _svd(blocks: Tensor) -> Svd:
    latest = LATEST.get()
    for same, parts in latest or ():
        if same.shape == blocks.shape and same.dtype == blocks.dtype and torch.equal(same, blocks):
            return parts
    result = torch.linalg.svd(blocks, full_matrices=False)
    parts = result.U, result.S, result.Vh
    if latest is not None:
        latest.append((blocks, parts))
    return parts


def permuted(tensor: Tensor, axes: Axes, order: Axes) -> Tensor:
    """A tensor with these axes, in another order."""
    return tensor.permute([axes.index(a) for a in order])
