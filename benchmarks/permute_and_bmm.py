"""The usual way to write a layer of two batched matmuls, in three versions, as a baseline for the kernels.

Tokens are the slow axis throughout, and the intermediate z is permuted by a copy between the matmuls. Factors are
stored as (blocks, in, out). The versions differ in that copy:

- `BlocksFirst` copies z to (blocks, tokens, ...), as the code of the BTT paper does;
- `TokensFirst` copies z within each token and reads its blocks as strided views, as fly's Monarch code does;
- `compiled` leaves the copies and the backward pass to torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import buttress as bt


def _bmm_strided(left: Tensor, right: Tensor) -> Tensor:
    """torch.bmm of (blocks, tokens, in) and (blocks, in, out), written as (tokens, blocks, out)."""
    y = left.new_empty(left.shape[1], left.shape[0], right.shape[2])
    torch.bmm(left, right, out=y.transpose(0, 1))
    return y


def _exchange(z: Tensor, blocks: int, bond: int, *, blocks_first: bool) -> Tensor:
    """Permute z, (tokens, old blocks, blocks * bond), to (blocks, tokens, old blocks * bond), copying it once."""
    tokens, old, _ = z.shape
    axes = z.view(tokens, old, blocks, bond)
    if blocks_first:
        return axes.permute(2, 0, 1, 3).reshape(blocks, tokens, old * bond)
    return axes.permute(0, 2, 1, 3).reshape(tokens, blocks, old * bond).transpose(0, 1)


class _Exchanged(torch.autograd.Function):
    """Two batched matmuls with a backward pass written by hand."""

    blocks_first: bool

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, right: Tensor, left: Tensor) -> Tensor:
        (c, d, _), (b, k, _) = right.shape, left.shape
        tokens = x.shape[0]
        first = _bmm_strided(x.view(tokens, c, d).transpose(0, 1), right)
        z = _exchange(first, b, k // c, blocks_first=cls.blocks_first)
        ctx.save_for_backward(x, right, left, z)
        return _bmm_strided(z, left).view(tokens, -1)

    @classmethod
    def backward(cls, ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, right, left, z = ctx.saved_tensors
        (c, d, _), (b, k, a) = right.shape, left.shape
        tokens = x.shape[0]
        grad = dy.view(tokens, b, a).transpose(0, 1)
        dz = _exchange(_bmm_strided(grad, left.mT), c, k // c, blocks_first=cls.blocks_first)
        dx = _bmm_strided(dz, right.mT).view(tokens, c * d)
        d_right = torch.bmm(dz.mT, x.view(tokens, c, d).transpose(0, 1)).mT
        return dx, d_right, torch.bmm(grad.mT, z).mT


class BlocksFirst(_Exchanged):
    """Copies z to (blocks, tokens, ...)."""

    blocks_first = True


class TokensFirst(_Exchanged):
    """Copies z within each token."""

    blocks_first = False


def plain(x: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """The same matmuls and permutations, with the gradients that torch derives."""
    (c, d, _), (b, k, _) = right.shape, left.shape
    tokens = x.shape[0]
    first = torch.bmm(x.view(tokens, c, d).transpose(0, 1), right)
    z = first.view(c, tokens, b, k // c).permute(2, 1, 0, 3).reshape(b, tokens, k)
    return torch.bmm(z, left).transpose(0, 1).reshape(tokens, -1)


@cache  # torch.compile imports its compiler, which only this version needs
def _compiled_plain() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(plain, dynamic=False)


def compiled(x: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """`plain`, compiled."""
    return _compiled_plain()(x, right, left)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "blocks first": BlocksFirst.apply,
    "tokens first": TokensFirst.apply,
    "compiled": compiled,
}
"""The versions by name."""


def has_bond_inside(chain: bt.Chain) -> bool:
    """Whether the intermediate is (old blocks, blocks, bond), as BTT's is, and not (old blocks, bond, blocks)."""
    first, second = chain.factors
    return first.out_axes[: len(second.batch_axes)] == second.batch_axes


def authors_way(chain: bt.Chain) -> str:
    """The version that the authors of a structure use: BTT's and Monarch's differ, as do their intermediates."""
    return "blocks first" if has_bond_inside(chain) else "tokens first"


def random_factors(chain: bt.Chain, **where: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Random factors of a chain, as buttress stores them, and as the versions above take them: leaves of autograd."""
    factors = [torch.randn(f.shape, **where).mul_(bt.init_std(f)) for f in chain.factors]
    right, left = factors
    if not has_bond_inside(chain):
        # The same matrix, once the rows of the first factor are in the other order.
        first, second = chain.factors
        right = right.unflatten(1, (first.d_out // second.blocks, second.blocks)).transpose(1, 2).flatten(1, 2)
    return factors, [f.mT.contiguous().requires_grad_() for f in (right, left)]
