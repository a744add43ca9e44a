"""The reference implementation, which defines a chain's matrix: one einsum over its axes, not optimized."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain
from buttress.ops.activations import activated
from buttress.ops.framing import framed, read_window


@framed
def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool, activation: str | None) -> Tensor:
    """y[token, y] = sum over every other axis of the factors times act(x)[token, x].

    Args:
        chain: The chain.
        x: The input, padded.
        factors: The factors in order of application.
        recompute: Ignored; torch decides what is saved.
        activation: Name of the activation, or None.

    Shape:
        (tokens, padded d_in) -> (tokens, padded d_out).

    Returns:
        The output, padded.
    """
    return _einsum(chain, activated(x, activation), factors, chain.y, len(chain.factors)).flatten(1)


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
    return _einsum(chain, F.pad(x, (0, chain.padding[0])), factors, axes, before)


def _einsum(chain: Chain, x: Tensor, factors: Sequence[Tensor], out_axes: Axes, count: int) -> Tensor:
    """The first `count` factors applied to a padded x, and the regroup that follows them, if any."""
    # Axis 0 stands for the tokens; einsum takes axes as integers, so there is no limit of 26 letters.
    number = {a: i for i, a in enumerate(chain.sizes, start=1)}
    z = x.reshape(-1, *(chain.sizes[a] for a in chain.x))
    axes = chain.x
    if chain.window:
        z, axes = read_window(chain, z)
    operands: list[Tensor | list[int]] = [z, [0, *(number[a] for a in axes)]]
    for i, factor in enumerate(chain.factors[: count + 1]):
        if factor.regroup:
            old, new = factor.regroup
            z = torch.einsum(*operands, [0, *(number[a] for a in old)])
            z = z.reshape(-1, *(chain.sizes[a] for a in new))
            operands = [z, [0, *(number[a] for a in new)]]
        if i < count:
            unfolded = factors[i].reshape([chain.sizes[a] for a in factor.axes])
            operands += [unfolded, [number[a] for a in factor.axes]]
    result: Tensor = torch.einsum(*operands, [0, *(number[a] for a in out_axes)])
    return result
