"""Bases in which many matrices are diagonal at once, without being orthogonal.

Given blocks A_bcm, we look for U_b, V_c and diagonal D_bcm with A_bcm = U_b D_bcm V_c^T. With bases of the rows and the
columns of blocks, from SVDs, this becomes M_bcm = P_b D_bcm Q_c^T for square matrices.

For any diagonal L, the matrices Z_b = P_b L P_b^-1 and W_c = Q_c^-T L Q_c^T solve the linear equations
Z_b M_bcm = M_bcm W_c, and in general nothing else does. So a random solution of these equations has Q_c^T as its left
eigenvectors, with the same eigenvalues for every c. It is found by projecting a random point onto the solutions, by
conjugate gradients. No block is inverted, so small deviations of the blocks change the bases little.

Multiples of the identity are always solutions and are left out. If there are no others, as for most matrices, the
projection vanishes after a few steps, and there are no such bases. If blocks are diagonalizable up to a small error, it
vanishes later, and the point on the way with the smallest remainder relative to its size is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_STEPS, WORK = 2000, 2e11
"""Maximum number of conjugate gradient steps, and of their multiply-accumulates, which allow large blocks fewer."""
MIN_STEPS = 50
"""Blocks so large that `WORK` allows fewer steps are not diagonalized."""
NO_SOLUTION = 1e-2
"""Least squared remainder of the equations, relative to the squared size of a point, that is far from any solution."""
VANISHED, LOST = 1e-4, 1e-8
"""Squared size of a projected point, relative to that of a random solution, below which there may be no solution, and
below which rounding is all that is left."""
TOLERANCE = 1e-15
"""Relative size of the gradient at which the equations are solved."""


def diagonalizing_bases(blocks: Tensor, rank: int) -> Tensor | None:
    """The rows of V_c^T for which all blocks are U_b D_bcm V_c^T as nearly as possible.

    Args:
        blocks: The blocks A in float64, where each index g is an independent problem.
        rank: Number of rows of V_c^T, at most the sides of a block.

    Shape:
        blocks: (g, b, c, m, height, width); the result is (g, c, rank, width).

    Returns:
        The bases, with rows of norm 1; None if there are none, or the blocks are too large.
    """
    g, b, c, m, height, width = blocks.shape
    steps = int(min(WORK / (4 * g * b * c * m * rank**3), MAX_STEPS))
    if steps < MIN_STEPS:
        return None
    columns = blocks.transpose(1, 2).reshape(g, c, b * m * height, width)
    rows = blocks.permute(0, 1, 4, 2, 3, 5).reshape(g, b, height, c * m * width)
    row_space = torch.linalg.svd(rows, full_matrices=False).U[..., :rank]
    column_space = torch.linalg.svd(columns, full_matrices=False).Vh[..., :rank, :]
    square = torch.einsum("gbhr,gbcmhw,gcsw->gbcmrs", row_space, blocks, column_space)
    square, _ = _whitened(square, "gbcmrs,gbcmts->gbrt", "gbrt,gbcmts->gbcmrs")
    square, whitening = _whitened(square, "gbcmsr,gbcmst->gcrt", "gctr,gbcmst->gbcmsr")
    solution = _random_solution(square, steps)
    if solution is None:
        return None
    values, vectors = torch.linalg.eig(solution.cpu())
    # The same eigenvalues belong together. A complex pair, which no matrix with the structure has, spans a plane.
    order = torch.argsort(values.real + 1e-9 * values.imag, dim=-1)
    values, vectors = values.gather(-1, order), vectors.gather(-1, order[..., None, :].expand_as(vectors))
    right = torch.where((values.imag < 0)[..., None, :], vectors.imag, vectors.real).to(blocks)
    bases, failed = torch.linalg.solve_ex(whitening @ right, column_space)
    bases = bases / bases.norm(dim=-1, keepdim=True)
    return bases if not bool(failed.any()) and bool(bases.isfinite().all()) else None


def _whitened(square: Tensor, gram: str, apply: str) -> tuple[Tensor, Tensor]:
    """The matrices with one side scaled so that their sum of squares is the identity, and the scaling."""
    values, vectors = torch.linalg.eigh(torch.einsum(gram, square, square))
    smallest = torch.finfo(square.dtype).eps * values.amax(-1, keepdim=True)
    scale = values.clamp_min(smallest.clamp_min(torch.finfo(square.dtype).tiny)).rsqrt()
    whitening = (vectors * scale[..., None, :]) @ vectors.mT
    return torch.einsum(apply, whitening, square), whitening


def _random_solution(square: Tensor, steps: int) -> Tensor | None:
    """W of a random solution of Z_b M_bcm = M_bcm W_c without its multiple of the identity; None if that is all."""
    g, b, c, _, rank, _ = square.shape
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(g, b + c, rank, rank, dtype=square.dtype, generator=generator).to(square.device)
    point.diagonal(dim1=-2, dim2=-1).sub_(point.diagonal(dim1=-2, dim2=-1).mean((-2, -1), keepdim=True))

    def residual(z: Tensor) -> Tensor:
        left = torch.einsum("gbrt,gbcmts->gbcmrs", z[:, :b], square)
        return left - torch.einsum("gbcmrt,gcts->gbcmrs", square, z[:, b:])

    def transposed(r: Tensor) -> Tensor:
        left = torch.einsum("gbcmrs,gbcmts->gbrt", r, square)
        return torch.cat([left, -torch.einsum("gbcmrt,gbcmrs->gcts", square, r)], dim=1)

    remainder = residual(point)
    gradient = transposed(remainder)
    direction = -gradient
    norm = initial_norm = gradient.square().sum()
    best, least = point, remainder.square().sum() / point.square().sum()
    for _ in range(steps):
        if not norm > TOLERANCE**2 * initial_norm:
            break
        change = residual(direction)
        step_size = norm / change.square().sum().clamp_min(torch.finfo(change.dtype).tiny)
        point, remainder = point + step_size * direction, remainder + step_size * change
        # Solutions have rank - 1 dimensions for each g, along each of which the random point has variance 1.
        size = point.square().sum() / (g * max(rank - 1, 1))
        ratio = remainder.square().sum() / point.square().sum()
        if size < VANISHED and ratio > NO_SOLUTION:
            return None
        if size < LOST:
            break
        if ratio < least:
            best, least = point, ratio
        gradient = gradient + step_size * transposed(change)
        norm, previous_norm = gradient.square().sum(), norm
        direction = -gradient + (norm / previous_norm) * direction
    return best[:, b:]
