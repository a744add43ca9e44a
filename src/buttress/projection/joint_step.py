"""One step of all factors together, for chains with a coupled bond.

Alternating least squares stalls there: factors that multiply each entry of a bond separately can only improve together,
and one at a time each is already almost at its best. A Gauss-Newton step changes all of them at once. Its equations are
damped, because scaling one factor up and another down changes nothing, and solved by conjugate gradients with the
preconditioner of each factor. Far from the solution a full step is too long, so shorter ones are tried as well: those
after fewer conjugate gradient steps, and half of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Chain

TRIED = (2, 5, 10)
"""Numbers of conjugate gradient steps after which the factors are tried."""
DAMPING = 1e-3
"""Added to the equations of each factor, relative to their mean diagonal."""

Precondition = Callable[[Tensor], Tensor]


def joint_step(
    chain: Chain,
    factors: Sequence[Tensor],
    target: Tensor,
    inputs: Tensor,
    preconditioners: Sequence[Precondition],
    scales: Sequence[Tensor],
) -> list[Tensor]:
    """Change all factors together so that the outputs are nearer to `target`.

    Args:
        chain: The chain of the factors.
        factors: The factors in order of application, which are not modified.
        target: The outputs to approximate.
        inputs: The inputs, one per row.
        preconditioners: For each factor, an approximate inverse of its damped normal equations.
        scales: For each factor, the mean diagonal of its normal equations.

    Shape:
        target: (rows, d_out); inputs: (rows, d_in); factors: (blocks, d_out, d_in) each.

    Returns:
        The best factors that were tried, or copies of the initial ones.
    """
    start = [f.detach().clone() for f in factors]
    with torch.enable_grad():
        leaves = [f.clone().requires_grad_() for f in start]
        outputs = ops.apply(chain, inputs, leaves, impl="bmm")

    def apply(values: Sequence[Tensor]) -> Tensor:
        return ops.apply(chain, inputs, values, impl="bmm")

    def forward(direction: Sequence[Tensor]) -> Tensor:
        # The outputs are linear in each factor.
        changes = [apply([*start[:i], d, *start[i + 1 :]]) for i, d in enumerate(direction)]
        return torch.stack(changes).sum(0)

    def transposed(residual: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, residual, retain_graph=True)

    def precondition(gradient: Sequence[Tensor]) -> list[Tensor]:
        return [solve(g) for solve, g in zip(preconditioners, gradient, strict=True)]

    residual = target - outputs.detach()
    best, least = start, _squares(residual)
    damping = [DAMPING * scale for scale in scales]
    value = [torch.zeros_like(f) for f in start]
    gradient: Sequence[Tensor] = transposed(residual)
    direction = preconditioned = precondition(gradient)
    norm = _dot(gradient, preconditioned)
    for step in range(1, max(TRIED) + 1):
        if not norm > 0:
            break
        change = forward(direction)
        curvature = change.square().sum() + sum(d * p.square().sum() for d, p in zip(damping, direction, strict=True))
        step_size = norm / curvature
        value = [v + step_size * p for v, p in zip(value, direction, strict=True)]
        gradient = [
            g - step_size * (c + d * p)
            for g, c, d, p in zip(gradient, transposed(change), damping, direction, strict=True)
        ]
        preconditioned = precondition(gradient)
        norm, previous_norm = _dot(gradient, preconditioned), norm
        direction = [p + (norm / previous_norm) * d for p, d in zip(preconditioned, direction, strict=True)]
        for fraction in (1.0, 0.5) if step in TRIED else ():
            tried = [f + fraction * v for f, v in zip(start, value, strict=True)]
            distance = _squares(target - apply(tried))
            if distance < least:
                best, least = tried, distance
    return best


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _dot(one: Sequence[Tensor], two: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()
