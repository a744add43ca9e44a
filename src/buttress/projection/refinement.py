"""Alternating least squares: bring factors nearer to a matrix, as measured on the inputs that matter.

A chain is linear in each of its factors. With the other factors fixed, the best value of one solves normal equations.
They are solved by conjugate gradients, preconditioned with the inverse of each block's own equations. Where blocks do
not mix, as for the last factor of any chain without sharing, one step gives the exact solution; elsewhere a few steps
come near it. No sweep makes the error larger: the best factors are kept, so rounding cannot either.

Inputs enter only through their second moments H = E[x x^T]: with H = C C^T, |(A - B) C| is minimized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Axes, Chain
from buttress.errors import ShapeError

MAX_STEPS = 6
"""Most conjugate gradient steps per factor; fewer where it is solved before."""
TOLERANCE = 1e-6
"""A factor is solved when its gradient has shrunk by this; sweeps have converged when one gains less than this."""
RIDGE = 1e-6
"""Added to the diagonal of a block's equations, relative to its mean: they may be singular."""


@dataclass(frozen=True)
class Refinement:
    """Refined factors, and whether more sweeps would change them."""

    factors: list[Tensor]
    converged: bool


def root(moments: Tensor, damping: float) -> Tensor:
    """A lower triangular C with C C^T proportional to H + damping * mean(diag H).

    Args:
        moments: Second moments H of the inputs.
        damping: Multiple of the mean diagonal that is added to it.

    Shape:
        moments: (d_in, d_in). The result has the same shape and dtype.

    Returns:
        C, scaled so that H has a mean diagonal of 1; the scaled identity where H is zero.

    Raises:
        ShapeError: If H is not positive.
    """
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
    rounded: Tensor = lower.to(moments.dtype)
    return rounded


@torch.no_grad()
def refine(chain: Chain, factors: Sequence[Tensor], target: Tensor, inputs: Tensor, sweeps: int) -> Refinement:
    """Bring chain(inputs) nearer to `target` by sweeps over the factors; never further away.

    Each sweep depends only on the factors it starts from: two sweeps and then two more give the same bits as four.

    Args:
        chain: The chain of the factors.
        factors: Where to start. They are not modified.
        target: The wanted outputs.
        inputs: The inputs, one per row.
        sweeps: Most sweeps. Fewer are done where one no longer helps.

    Shape:
        target: (rows, d_out); inputs: (rows, d_in); factors: (blocks, d_out, d_in) each.
    """
    best = [f.clone() for f in factors]
    least = _distance(chain, best, target, inputs)
    current = [f.clone() for f in factors]
    for _ in range(sweeps):
        for i in reversed(range(len(current))):
            current[i] = best_factor(chain, current, i, target, inputs)
        distance = _distance(chain, current, target, inputs)
        if not distance < least:
            return Refinement(best, converged=True)
        best, gain, least = [f.clone() for f in current], 1 - distance / least, distance
        if gain < TOLERANCE:
            return Refinement(best, converged=True)
    return Refinement(best, converged=False)


def _distance(chain: Chain, factors: Sequence[Tensor], target: Tensor, inputs: Tensor) -> float:
    outputs = ops.apply(chain, inputs, factors, impl="bmm")
    return float(torch.linalg.vector_norm(outputs.double() - target.double()))


def best_factor(chain: Chain, factors: Sequence[Tensor], i: int, target: Tensor, inputs: Tensor) -> Tensor:
    """Factor `i` at its best while the others stay: at most `MAX_STEPS` preconditioned conjugate gradient steps."""
    entering, leaving = _entering(chain, factors, i, inputs), _leaving(chain, factors, i, inputs)
    cholesky = [_regularized_cholesky(side.mT @ side) for side in (leaving, entering)]

    def precondition(gradient: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(gradient, cholesky[0]).mT, cholesky[1]).mT

    with torch.enable_grad():
        factor = factors[i].detach().clone().requires_grad_()
        outputs = ops.apply(chain, inputs, [*factors[:i], factor, *factors[i + 1 :]], impl="bmm")

    def transposed(residual: Tensor) -> Tensor:
        # The map is linear in the factor, so its transpose is the same wherever it is taken.
        (gradient,) = torch.autograd.grad(outputs, factor, residual, retain_graph=True)
        return gradient

    def forward(direction: Tensor) -> Tensor:
        return ops.apply(chain, inputs, [*factors[:i], direction, *factors[i + 1 :]], impl="bmm")

    value = factor.detach().clone()
    gradient = transposed(target - outputs.detach())
    step = conditioned = precondition(gradient)
    power = start = (gradient * conditioned).sum()
    for _ in range(MAX_STEPS):
        if not power > TOLERANCE**2 * start:
            break
        change = forward(step)
        length = power / change.square().sum().clamp_min(torch.finfo(change.dtype).tiny)
        value += length * step
        gradient = gradient - length * transposed(change)
        conditioned = precondition(gradient)
        power, before = (gradient * conditioned).sum(), power
        step = conditioned + (power / before) * step
    return value


def _regularized_cholesky(equations: Tensor) -> Tensor:
    """Cholesky factors of each block's equations with a ridge added."""
    ridge = RIDGE * equations.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(equations.dtype).tiny)
    eye = torch.eye(equations.shape[-1], dtype=equations.dtype, device=equations.device)
    lower, failed = torch.linalg.cholesky_ex(equations + ridge[:, None, None] * eye)
    # A block that cannot be inverted is left unconditioned: slower, not wrong.
    return torch.where((failed == 0)[:, None, None], lower, eye)


def _rows(chain: Chain, tensor: Tensor, first: Axes, rest: Axes) -> Tensor:
    """(rows, *axes), ordered (first, others, rest), as (first, rows and others, rest)."""
    blocks, width = chain.size(first), chain.size(rest)
    return tensor.flatten(1).reshape(tensor.shape[0], blocks, -1, width).transpose(0, 1).reshape(blocks, -1, width)


def _entering(chain: Chain, factors: Sequence[Tensor], i: int, inputs: Tensor) -> Tensor:
    """What factor i multiplies: (blocks, rows, d_in)."""
    f = chain.factors[i]
    axes = f.batch_axes + f.shared_axes + f.in_axes
    return _rows(chain, ops.reference.intermediate(chain, inputs, factors[:i], axes, before=i), f.batch_axes, f.in_axes)


def _leaving(chain: Chain, factors: Sequence[Tensor], i: int, like: Tensor) -> Tensor:
    """The derivative of each output by the output of factor i: (blocks, rows, d_out)."""
    f = chain.factors[i]
    number = {a: n for n, a in enumerate(chain.sizes, start=1)}  # 0 is the row
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
    order = f.batch_axes + f.shared_axes + f.out_axes
    return _rows(chain, z.permute(0, *(1 + axes.index(a) for a in order)), f.batch_axes, f.out_axes)
