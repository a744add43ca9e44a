"""The nearest semi-orthogonal matrix to each matrix of a stack, by matrix products alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from buttress.errors import RuleError

Coefficients = tuple[float, float, float]
"""(a, b, c) of one step X -> a X + b (X X^T) X + c (X X^T)^2 X, which maps each singular value x to
a x + b x^3 + c x^5."""

QUINTIC: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5
"""The coefficients of the first Muon: singular values end between about 0.7 and 1.2."""

CUSHION = 1.05
"""How far above their bound singular values may be, by rounding in bfloat16: 1.5 % was seen. What is above the bound
all the same grows more than tenfold in each step, without limit."""

SQUARINGS = 4
"""Squarings of the Gram matrix in `spectral_norm_bounds`."""


@cache
def minimax_coefficients(steps: int = 6, lower: float = 1e-3) -> tuple[Coefficients, ...]:
    """Coefficients that bring singular values as close to 1 as this many steps can.

    Each step has the odd polynomial of degree 5 whose largest distance from 1 is smallest, on the interval to which the
    steps before it have mapped [lower, 1]. This composition is the idea of Polar Express (arXiv 2505.16932), computed
    here by exchange of the extrema.

    Args:
        steps: Number of steps.
        lower: Smallest singular value, relative to the norm of the matrix, that is brought close to 1. Smaller ones
            grow too, but end between 0 and 1.

    Returns:
        One triple per step, for `Muon(coefficients=...)`.

    Raises:
        RuleError: If `steps` is below 1, or `lower` is not between 0 and 1.

    Example:
        >>> optimizer = bt.optim.Muon(groups, coefficients=bt.optim.minimax_coefficients(steps=8))
    """
    if steps < 1 or not 0 < lower < 1:
        raise RuleError(f"coefficients need steps >= 1 and 0 < lower < 1, got steps={steps} and lower={lower:g}")
    coefficients = []
    low, high = lower, 1.0
    for _ in range(steps):
        (a, b, c), error = _nearest_to_one(low, CUSHION * high)
        coefficients.append((a, b, c))
        low, high = 1 - error, 1 + error
    return tuple(coefficients)


def _nearest_to_one(low: float, high: float) -> tuple[Coefficients, float]:
    """The odd polynomial of degree 5 nearest to 1 on an interval, and its error there.

    Its error has the same size, with alternating signs, at both ends and at its two extrema (Chebyshev).
    """
    inner = np.array([0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high])
    for _ in range(100):
        x = np.array([low, *inner, high])
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        root = sqrt(9 * b**2 - 20 * a * c)
        previous, inner = inner, np.sqrt(np.array([-3 * b - root, -3 * b + root]) / (10 * c))
        if np.abs(inner - previous).max() < 1e-12 * high:
            break
    return (float(a), float(b), float(c)), abs(float(error))


def largest_norm(coefficients: Sequence[Coefficients]) -> float:
    """A bound on the spectral norm of what `orthogonalize` returns with these coefficients, apart from rounding."""
    high = 1.0
    for a, b, c in coefficients:
        slope = np.roots([5 * c, 3 * b, a])  # of the polynomial, as a function of x^2
        turns = np.sqrt(slope.real[np.isreal(slope) & (slope.real > 0) & (slope.real < high**2)])
        x = np.array([high, *turns])
        high = float(np.abs(a * x + b * x**3 + c * x**5).max())
    return high


def orthogonalize(matrices: Tensor, coefficients: Sequence[Coefficients] | None = None) -> Tensor:
    """The nearest semi-orthogonal matrix to each matrix: U V^T of its singular value decomposition U S V^T.

    Args:
        matrices: The matrices, in the data type to compute in. Any scale will do; a matrix of zeros stays zero.
        coefficients: Coefficients of the steps. Default: `minimax_coefficients()`.

    Shape:
        matrices: (..., rows, columns). Returns the same shape.

    Returns:
        Matrices whose singular values are close to 1.

    Example:
        >>> u = orthogonalize(torch.randn(16, 32, 64))
        >>> torch.dist(u @ u.mT, torch.eye(32))  # small
    """
    *_, rows, columns = matrices.shape
    x = matrices.mT if rows > columns else matrices
    x = x.reshape(-1, *x.shape[-2:])
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)  # the squares below would underflow
    gram = x @ x.mT
    # The norm of the Gram matrix bounds the square of the largest singular value, far closer than that of x.
    wide = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.matrix_norm(gram.to(wide), keepdim=True).clamp(min=tiny)
    x = x / square.sqrt().to(x.dtype)
    gram = gram / square.to(x.dtype)
    for i, (a, b, c) in enumerate(minimax_coefficients() if coefficients is None else coefficients):
        if i:
            gram = x @ x.mT
        # With alpha=0, torch 2.13 returns wrong numbers in bfloat16 on a CPU (oneDNN).
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if rows > columns else x).reshape(matrices.shape)


def spectral_norm_bounds(matrices: Tensor) -> Tensor:
    """An upper bound of the spectral norm of each matrix: its Schatten norm of order 64.

    The bound is above the norm by a factor of at most min(rows, columns)^(1/64): 7 % for 64, 12 % for 1024. Unlike a
    power iteration it needs no vector from the step before, and apart from rounding it is never below
    the norm.

    Args:
        matrices: The matrices.

    Shape:
        matrices: (..., rows, columns). Returns (...), float32 or float64.
    """
    *_, rows, columns = matrices.shape
    x = matrices.mT if rows > columns else matrices
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    tiny = torch.finfo(x.dtype).tiny
    bounds = x.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)
    x = x / bounds
    power = x @ x.mT
    for n in range(SQUARINGS + 1):
        if n:
            power = power @ power
        norm = torch.linalg.matrix_norm(power, keepdim=True).clamp(min=tiny)
        power = power / norm
        bounds = bounds * norm ** (0.5**n / 2)
    return bounds.squeeze((-2, -1))
