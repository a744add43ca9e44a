"""Alternating least squares: improving factors so that their matrix is nearer to a given one.

A chain is linear in each of its factors. With the other factors fixed, the best value of one solves normal equations.
They are solved by conjugate gradients, preconditioned with the inverse of each block's own equations. If blocks do not
mix, as for the last factor of any chain without sharing, one step gives the exact solution; otherwise a few steps
approximate it. The error never increases, because the best factors are kept.

Where a bond is coupled (splitting.py), each sweep ends with a step of all factors together (joint_step.py).

Inputs enter only through their second moments H = E[x x^T]: with H = C C^T, |(A - B) C| is minimized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Axes, Chain
from buttress.core.scaling import init_std
from buttress.errors import ShapeError
from buttress.ops.norms import balanced
from buttress.projection.contraction import is_contractible, matrix
from buttress.projection.joint_step import DAMPING, Precondition, joint_step
from buttress.projection.least_squares import LeastSquares

MAX_STEPS = 6
"""Maximum number of conjugate gradient steps per factor."""
TOLERANCE = 1e-6
"""Relative size of the gradient at which a factor is solved, and relative gain of a sweep at which sweeps converge."""
DENSE_SPEEDUP = 4
"""About how much faster a dense product is than products of small blocks with as many MACs."""
RIDGE = 1e-6
"""Added to the equations of a block, relative to their mean diagonal, because they may be singular."""


@dataclass(frozen=True)
class Refinement:
    """Refined factors, and whether more sweeps would change them."""

    factors: list[Tensor]
    converged: bool


def moment_root(moments: Tensor, damping: float) -> Tensor:
    """A lower triangular C with C C^T proportional to H + damping * mean(diag H) * I.

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
    mean_diagonal = wide.diagonal().abs().mean()
    # Normalized, so that very small moments do not underflow in float32.
    wide = wide / mean_diagonal if bool(mean_diagonal > 0) else eye
    lower, failed = torch.linalg.cholesky_ex((wide + wide.mT) / 2 + damping * eye)
    if bool(failed) or not bool(lower.isfinite().all()):
        raise ShapeError(
            "these second moments are not those of any inputs (not positive): gather them with moments(), "
            "or raise the damping"
        )
    rounded: Tensor = lower.to(moments.dtype)
    return rounded


@torch.no_grad()
def refine(chain: Chain, factors: Sequence[Tensor], problem: LeastSquares, sweeps: int) -> Refinement:
    """Reduce the distance of a chain's outputs from those of a dense matrix by sweeps over its factors.

    Each sweep depends only on the factors it starts from: two sweeps and then two more give the same bits as four.

    Args:
        chain: The chain of the factors.
        factors: The initial factors, which are not modified.
        problem: The matrix and the inputs.
        sweeps: Maximum number of sweeps; they stop at convergence.

    Shape:
        factors: (blocks, d_out, d_in) each.

    Returns:
        The best factors, whose distance is at most that of the initial ones, and whether they have converged.
    """
    best = [f.clone() for f in factors]
    least = _distance(chain, best, problem)
    current = [f.clone() for f in factors]
    for _ in range(sweeps):
        for i in reversed(range(len(current))):
            current[i] = best_factor(chain, current, i, problem)
        if chain.coupled_bonds:
            current = stepped_together(chain, current, problem)
        distance = _distance(chain, current, problem)
        if not distance < least:
            return Refinement(best, converged=True)
        best, gain, least = [f.clone() for f in current], 1 - distance / least, distance
        if gain < TOLERANCE:
            return Refinement(best, converged=True)
    return Refinement(best, converged=False)


def _distance(chain: Chain, factors: Sequence[Tensor], problem: LeastSquares) -> float:
    rows = problem.inputs.rows
    if is_contractible(chain):
        outputs = rows @ matrix(chain, factors).mT
    else:
        outputs = ops.apply(chain, rows, factors, impl="bmm")
    return float(torch.linalg.vector_norm(outputs.double() - problem.outputs.double()))


def best_factor(chain: Chain, factors: Sequence[Tensor], i: int, problem: LeastSquares) -> Tensor:
    """Optimize one factor with the others fixed, by preconditioned conjugate gradients.

    Args:
        chain: The chain of the factors.
        factors: The factors in order of application, which are not modified.
        i: Index of the factor to optimize.
        problem: The matrix and the inputs.

    Shape:
        factors: (blocks, d_out, d_in) each.

    Returns:
        The new value of factor i, after at most `MAX_STEPS` steps.
    """
    rows = problem.inputs.rows
    precondition, _ = _preconditioner(chain, factors, i, rows, RIDGE)
    equations = (_ByMatrix if _is_cheaper_by_matrix(chain, rows) else _ByRow)(chain, factors, i, problem)
    value = factors[i].detach().clone()
    gradient = equations.first_gradient()
    direction = preconditioned = precondition(gradient)
    norm = initial_norm = (gradient * preconditioned).sum()
    for _ in range(MAX_STEPS):
        if not norm > TOLERANCE**2 * initial_norm:
            break
        change, squares = equations.product(direction)
        step_size = norm / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        value += step_size * direction
        gradient = gradient - step_size * change
        preconditioned = precondition(gradient)
        norm, previous_norm = (gradient * preconditioned).sum(), norm
        direction = preconditioned + (norm / previous_norm) * direction
    return value


class _ByRow:
    """Normal equations of one factor, from the outputs for every row of the inputs."""

    def __init__(self, chain: Chain, factors: Sequence[Tensor], i: int, problem: LeastSquares) -> None:
        self.chain, self.factors, self.i, self.problem = chain, factors, i, problem
        # The outputs are linear in the factor, so the transpose does not depend on its value.
        with torch.enable_grad():
            self.factor = factors[i].detach().clone().requires_grad_()
            self.outputs = self.apply(self.factor)

    def apply(self, factor: Tensor) -> Tensor:
        """What the factors give with this one in its place."""
        return self._outputs([*self.factors[: self.i], factor, *self.factors[self.i + 1 :]])

    def _outputs(self, factors: Sequence[Tensor]) -> Tensor:
        return ops.apply(self.chain, self.problem.inputs.rows, factors, impl="bmm")

    def first_gradient(self) -> Tensor:
        """Minus half the gradient of the squared distance from the outputs to approximate."""
        return self.transposed(self.problem.outputs - self.outputs.detach())

    def product(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The equations' matrix times a direction, and the square of the change of the outputs along it."""
        change = self.apply(direction)
        return self.transposed(change), change.square().sum()

    def transposed(self, residual: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.outputs, self.factor, residual, retain_graph=True)
        return gradient


class _ByMatrix(_ByRow):
    """The same from the dense matrix and the inputs' second moments: two dense products instead of many small ones."""

    def _outputs(self, factors: Sequence[Tensor]) -> Tensor:
        return matrix(self.chain, factors)

    def first_gradient(self) -> Tensor:
        return self.transposed((self.problem.weight - self.outputs.detach()) @ self.problem.inputs.moments)

    def product(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        change = self.apply(direction)
        weighted = change @ self.problem.inputs.moments
        return self.transposed(weighted), (change * weighted).sum()


def _is_cheaper_by_matrix(chain: Chain, inputs: Tensor) -> bool:
    """Whether a dense product with the moments takes fewer operations than applying the chain to all rows.

    A dense product reaches several times the speed of products of small blocks.
    """
    return is_contractible(chain) and chain.d_out * chain.d_in**2 < DENSE_SPEEDUP * len(inputs) * 2 * chain.macs


def stepped_together(chain: Chain, factors: Sequence[Tensor], problem: LeastSquares) -> list[Tensor]:
    """A joint step from factors of equal size, so that one damping suits all of them."""
    start = balanced(list(factors), [init_std(f) for f in chain.factors])
    # The damping of the step is the product of both ridges.
    rows = problem.inputs.rows
    parts = [_preconditioner(chain, start, i, rows, DAMPING**0.5) for i in range(len(start))]
    return joint_step(chain, start, problem.outputs, rows, [p for p, _ in parts], [scale for _, scale in parts])


def _preconditioner(
    chain: Chain, factors: Sequence[Tensor], i: int, inputs: Tensor, ridge: float
) -> tuple[Precondition, Tensor]:
    """The inverse of the equations of each block of factor i, and their mean diagonal."""
    sides = (_output_jacobian(chain, factors, i), _factor_inputs(chain, factors, i, inputs))
    equations = [side.mT @ side for side in sides]
    left, right = (_regularized_cholesky(e, ridge) for e in equations)

    def precondition(gradient: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(gradient, left).mT, right).mT

    means = [e.diagonal(dim1=-2, dim2=-1).mean() for e in equations]
    return precondition, means[0] * means[1]


def _regularized_cholesky(equations: Tensor, ridge: float) -> Tensor:
    """Cholesky factors of each block's equations with a ridge added, relative to their mean diagonal."""
    added = ridge * equations.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(equations.dtype).tiny)
    eye = torch.eye(equations.shape[-1], dtype=equations.dtype, device=equations.device)
    lower, failed = torch.linalg.cholesky_ex(equations + added[:, None, None] * eye)
    # A block that cannot be inverted is not preconditioned, which is only slower.
    return torch.where((failed == 0)[:, None, None], lower, eye)


def _by_block(chain: Chain, tensor: Tensor, blocks: Axes, columns: Axes) -> Tensor:
    """A tensor (rows, *blocks, *others, *columns) as one matrix per block: (blocks, rows * others, columns)."""
    count, width = chain.size(blocks), chain.size(columns)
    return tensor.flatten(1).reshape(tensor.shape[0], count, -1, width).transpose(0, 1).reshape(count, -1, width)


def _factor_inputs(chain: Chain, factors: Sequence[Tensor], i: int, inputs: Tensor) -> Tensor:
    """The inputs of each block of factor i: (blocks, rows, d_in)."""
    f = chain.factors[i]
    axes = f.batch_axes + f.shared_axes + f.in_axes
    z = ops.reference.intermediate(chain, inputs, factors[:i], axes, before=i)
    return _by_block(chain, z, f.batch_axes, f.in_axes)


def _output_jacobian(chain: Chain, factors: Sequence[Tensor], i: int) -> Tensor:
    """The derivative of each output with respect to the output of each block of factor i: (blocks, rows, d_out)."""
    f = chain.factors[i]
    number = {a: n for n, a in enumerate(chain.sizes, start=1)}  # 0 is the row
    eye = torch.eye(chain.d_out, chain.size(chain.y), dtype=factors[i].dtype, device=factors[i].device)
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
    return _by_block(chain, z.permute(0, *(1 + axes.index(a) for a in order)), f.batch_axes, f.out_axes)
