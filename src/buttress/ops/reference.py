"""The reference implementation, which defines a chain's matrix: an einsum for each factor, not optimized."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain
from buttress.ops.activations import activated
from buttress.ops.framing import read_window, scaled_factors


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
    activation: str | None,
) -> Tensor:
    """y[token, y] = sum over every other axis of the factors times act(x)[token, x].

    Args:
        chain: The chain.
        x: The input.
        factors: The factors in order of application.
        bias: Added to the result.
        scales: A multiplier of each factor, as a tensor with one entry.
        recompute: Ignored; torch decides what is saved.
        activation: Name of the activation, or None.

    Shape:
        (tokens, d_in) -> (tokens, d_out).

    Returns:
        The output.
    """
    if scales is not None:
        factors = scaled_factors(factors, scales)
    y = _einsum(chain, activated(x, activation), factors, chain.y, len(chain.factors)).flatten(1)
    if chain.padding[1]:
        y = y[:, : chain.d_out]
    return y if bias is None else y + bias


def intermediate(chain: Chain, x: Tensor, factors: Sequence[Tensor], axes: Axes, *, before: int) -> Tensor:
    """The tensor held before one factor, after its regroup.

    Args:
        chain: The chain.
        x: The input.
        factors: At least the factors that are applied before it.
        axes: Order of the held axes in the result.
        before: Index of the factor, in order of application.

    Shape:
        x (tokens, d_in) -> (tokens, *axes).

    Returns:
        The held tensor.
    """
    return _einsum(chain, x, factors, axes, before)


def _einsum(chain: Chain, x: Tensor, factors: Sequence[Tensor], out_axes: Axes, count: int) -> Tensor:
    """The first `count` factors applied to x, and the regroup that follows them, if any."""
    # Axis 0 stands for the tokens; einsum takes axes as integers, so there is no limit of 26 letters.
    number = {a: i for i, a in enumerate(chain.sizes, start=1)}
    if chain.padding[0]:
        x = F.pad(x, (0, chain.padding[0]))
    z = x.reshape(-1, *(chain.sizes[a] for a in chain.x))
    axes = chain.x
    if chain.window:
        z, axes = read_window(chain, z)
    held = [0, *(number[a] for a in axes)]
    for i, factor in enumerate(chain.factors[: count + 1]):
        if factor.regroup:
            old, new = factor.regroup
            z = torch.einsum(z, held, [0, *(number[a] for a in old)]).reshape(-1, *(chain.sizes[a] for a in new))
            held = [0, *(number[a] for a in new)]
        if i < count:
            # One factor at a time: for more operands, opt_einsum chooses an order by the sizes, and fixes the number
            # of tokens of an exported program.
            unfolded = factors[i].reshape([chain.sizes[a] for a in factor.axes])
            summed = {number[a] for a in factor.in_axes}
            result_axes = [a for a in held if a not in summed] + [number[a] for a in factor.out_axes]
            z = torch.einsum(z, held, unfolded, [number[a] for a in factor.axes], result_axes)
            held = result_axes
    result: Tensor = torch.einsum(z, held, [0, *(number[a] for a in out_axes)])
    return result
