"""Projection onto a sum of chains, by alternation: each part is the nearest to what the others leave over.

The first part starts with the whole matrix, the next with the remainder, and so on. A round then projects every part
again onto the remainder of the others. An optimal closed form is the best value that a part can have while the others
stay, so the error falls from round to round. Where the closed form is no improvement, because it is not optimal, a
sweep of alternating least squares takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.chain_sum import ChainSum
from buttress.core.scaling import init_std
from buttress.ops.framing import by_part
from buttress.projection.least_squares import Inputs, LeastSquares
from buttress.projection.refinement import TOLERANCE, Refinement, refine

ClosedForm = Callable[[Chain, Tensor], list[Tensor]]
"""The factors of a chain that are nearest to a (d_out, d_in) matrix."""


def one_by_one(chain: ChainSum, weight: Tensor, closed_form: ClosedForm) -> list[Tensor]:
    """Project each part onto what the parts before it leave over; frozen parts come first.

    Args:
        chain: The sum.
        weight: The matrix, of shape (d_out, d_in).
        closed_form: Projects one part.

    Returns:
        The factors of all parts. A part that is left nothing is zero, by its last-applied factor alone, so that it can
        still learn; its other factors are random.
    """
    remainder, scale = weight, torch.linalg.norm(weight)
    tensors: dict[Chain, list[Tensor]] = {}
    for part in sorted(chain.parts, key=lambda part: not any(f.frozen for f in part.factors)):
        if torch.linalg.norm(remainder) <= torch.finfo(weight.dtype).eps * scale:
            tensors[part] = _zero_start(part, weight)
        else:
            tensors[part] = closed_form(part, remainder)
            remainder = remainder - ops.dense(part, tensors[part])
    return [t for part in chain.parts for t in tensors[part]]


def _zero_start(part: Chain, like: Tensor) -> list[Tensor]:
    *first, last = part.factors
    return [*(like.new_empty(f.shape).normal_(std=init_std(f)) for f in first), like.new_zeros(last.shape)]


def alternate(
    chain: ChainSum, factors: Sequence[Tensor], weight: Tensor, inputs: Inputs, rounds: int, closed_form: ClosedForm
) -> Refinement:
    """Reduce the distance between the outputs of a sum and those of a matrix, by rounds over its parts.

    Each round depends only on the factors it starts from. The best factors are kept, so the distance never increases.

    Args:
        chain: The sum.
        factors: The initial factors of all parts, which are not modified.
        weight: The matrix, of shape (d_out, d_in).
        inputs: The inputs for which outputs are compared.
        rounds: Maximum number of rounds; they stop at convergence.
        closed_form: Projects one part.

    Returns:
        The best factors, and whether they have converged.
    """
    parts = [(part, list(own)) for part, own, _ in by_part(chain, factors)]
    matrices = [ops.dense(part, own) for part, own in parts]

    def distance(remainder: Tensor, matrix: Tensor) -> float:
        return float(torch.linalg.norm((inputs.rows @ (remainder - matrix).mT).double()))

    best, least = list(factors), distance(weight, _total(matrices))
    exact = torch.finfo(weight.dtype).eps * distance(weight, torch.zeros_like(weight))
    for _ in range(rounds):
        if least <= exact:
            return Refinement(best, converged=True)
        for i, (part, own) in enumerate(parts):
            remainder = weight - _total([m for j, m in enumerate(matrices) if j != i])
            improved = closed_form(part, remainder)
            if not distance(remainder, ops.dense(part, improved)) < distance(remainder, matrices[i]):
                improved = refine(part, own, LeastSquares(remainder, inputs), sweeps=1).factors
            parts[i], matrices[i] = (part, improved), ops.dense(part, improved)
        now = distance(weight, _total(matrices))
        if not now < least:
            return Refinement(best, converged=True)
        best, gain, least = [t for _, own in parts for t in own], 1 - now / least, now
        if gain < TOLERANCE:
            return Refinement(best, converged=True)
    return Refinement(best, converged=False)


def _total(matrices: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(matrices)).sum(0)
