"""Factors brought nearer to a matrix by alternating least squares, measured on the inputs that matter.

A chain is linear in each of its factors. With the others held, the best value of one solves normal equations,
here by conjugate gradients with the blocks' own equations, turned around, as the preconditioner. Where blocks do
not mix, as for the last factor of any chain without sharing, that is the exact solution in one step; otherwise it
comes near it in a few. No step makes the error larger, and rounding is not allowed to either: the best is kept.

Inputs enter by their second moments H = E[x x^T] alone: with H = C C^T, what is minimised is |(A - B) C|.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Axes, Chain
from buttress.errors import ShapeError

STEPS = 6
"""Most conjugate gradients for one factor; fewer where it is solved before."""
SOLVED = 1e-6
"""Part of the first gradient at which a factor counts as solved."""
DAMPING = 1e-6
"""Of a block's own equations, relative to their mean: they may be singular."""


def root(moments: Tensor, damping: float) -> Tensor:
    """C with C C^T proportional to H + damping * mean(diagonal), in H's precision; the identity where H is zero."""
    wide = moments.double()
    eye = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    size = wide.diagonal().abs().mean()
    # Relative to its own size, so that the smallest inputs do not vanish in float32.
    wide = wide / size if bool(size > 0) else eye
    lower, failed = torch.linalg.cholesky_ex((wide + wide.mT) / 2 + damping * eye)
    if bool(failed) or not bool(lower.isfinite().all()):
        raise ShapeError(
            "these second moments are not those of any inputs (not positive): gather them with moments(), "
            "or raise the damping"
        )
    found: Tensor = lower.to(moments.dtype)
    return found


@torch.no_grad()
def refine(chain: Chain, factors: Sequence[Tensor], target: Tensor, inputs: Tensor, sweeps: int) -> list[Tensor]:
    """Factors for which chain(inputs) is nearer to `target`, both with a row for each input; never further."""
    best = [f.clone() for f in factors]
    least = _distance(chain, best, target, inputs)
    now = [f.clone() for f in factors]
    for _ in range(sweeps):
        for i in reversed(range(len(now))):
            now[i] = _solved(chain, now, i, target, inputs)
        found = _distance(chain, now, target, inputs)
        if not found < least:
            break
        best, gain, least = [f.clone() for f in now], 1 - found / least, found
        if gain < SOLVED:
            break
    return best


def _distance(chain: Chain, factors: Sequence[Tensor], target: Tensor, inputs: Tensor) -> float:
    made = ops.apply(chain, inputs, factors, impl="bmm")
    return float(torch.linalg.vector_norm(made.double() - target.double()))


def _solved(chain: Chain, factors: Sequence[Tensor], i: int, target: Tensor, inputs: Tensor) -> Tensor:
    """Factor i at its best while the others stay."""
    entering, leaving = _entering(chain, factors, i, inputs), _leaving(chain, factors, i, inputs)
    own = [_inverse(side.mT @ side) for side in (leaving, entering)]

    def condition(gradient: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(gradient, own[0]).mT, own[1]).mT

    with torch.enable_grad():
        factor = factors[i].detach().clone().requires_grad_()
        made = ops.apply(chain, inputs, [*factors[:i], factor, *factors[i + 1 :]], impl="bmm")

    def pull(outputs: Tensor) -> Tensor:
        # The map is linear in the factor, so its transpose is the same wherever it is taken.
        (gradient,) = torch.autograd.grad(made, factor, outputs, retain_graph=True)
        return gradient

    def push(direction: Tensor) -> Tensor:
        return ops.apply(chain, inputs, [*factors[:i], direction, *factors[i + 1 :]], impl="bmm")

    value = factor.detach().clone()
    gradient = pull(target - made.detach())
    step = conditioned = condition(gradient)
    power = start = (gradient * conditioned).sum()
    for _ in range(STEPS):
        if not power > SOLVED**2 * start:
            break
        moved = push(step)
        length = power / moved.square().sum().clamp_min(torch.finfo(moved.dtype).tiny)
        value += length * step
        gradient = gradient - length * pull(moved)
        conditioned = condition(gradient)
        power, before = (gradient * conditioned).sum(), power
        step = conditioned + (power / before) * step
    return value


def _inverse(own: Tensor) -> Tensor:
    """Cholesky factors of blocks' equations, made regular."""
    ridge = DAMPING * own.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(own.dtype).tiny)
    eye = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
    lower, failed = torch.linalg.cholesky_ex(own + ridge[:, None, None] * eye)
    # A block that cannot be inverted is left unconditioned: slower, not wrong.
    return torch.where((failed == 0)[:, None, None], lower, eye)


def _numbers(chain: Chain) -> dict[str, int]:
    return {a: i for i, a in enumerate(chain.sizes, start=1)}


def _rows(chain: Chain, tensor: Tensor, first: Axes, rest: Axes) -> Tensor:
    """(anything, *axes) already in the order (first, others, rest), as (first, anything and others, rest)."""
    blocks, width = chain.size(first), chain.size(rest)
    return tensor.flatten(1).reshape(tensor.shape[0], blocks, -1, width).transpose(0, 1).reshape(blocks, -1, width)


def _entering(chain: Chain, factors: Sequence[Tensor], i: int, inputs: Tensor) -> Tensor:
    """What factor i multiplies: (blocks, rows, d_in)."""
    f = chain.factors[i]
    axes = f.batch_axes + f.shared_axes + f.in_axes
    return _rows(chain, ops.reference.intermediate(chain, inputs, factors[:i], axes, before=i), f.batch_axes, f.in_axes)


def _leaving(chain: Chain, factors: Sequence[Tensor], i: int, like: Tensor) -> Tensor:
    """By how much each output changes with what factor i makes: (blocks, rows, d_out)."""
    f = chain.factors[i]
    number = _numbers(chain)
    eye = torch.eye(chain.d_out, chain.size(chain.y), dtype=like.dtype, device=like.device)
    z, axes = eye.reshape(-1, *(chain.sizes[a] for a in chain.y)), chain.y
    for later, weight in zip(reversed(chain.factors[i + 1 :]), reversed(factors[i + 1 :]), strict=True):
        before = later.batch_axes + later.shared_axes + later.in_axes
        unfolded = weight.reshape([chain.sizes[a] for a in later.axes])
        z = torch.einsum(
            z, [0, *(number[a] for a in axes)], unfolded, [number[a] for a in later.axes],
            [0, *(number[a] for a in before)],
        )  # fmt: skip
        axes = before
        if later.regroup:
            old, new = later.regroup
            z = z.permute(0, *(1 + axes.index(a) for a in new)).reshape(-1, *(chain.sizes[a] for a in old))
            axes = old
    wanted = f.batch_axes + f.shared_axes + f.out_axes
    return _rows(chain, z.permute(0, *(1 + axes.index(a) for a in wanted)), f.batch_axes, f.out_axes)
