"""The meaning of a chain: one einsum over its axes, any dtype, no thought of speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain
from buttress.ops.framing import framed, read_window


@framed
def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool) -> Tensor:
    """y[token, y] = sum over every other axis of the product of the factors and x[token, x].

    `x` is (tokens, padded d_in) and the result (tokens, padded d_out). What is saved is left to torch.
    """
    return _held(chain, x, factors, chain.y, len(chain.factors)).flatten(1)


def held(chain: Chain, x: Tensor, factors: Sequence[Tensor], axes: Axes, *, before: int) -> Tensor:
    """What is held before factor number `before`, after its regroup: (tokens, *axes). `factors` are those up to it."""
    return _held(chain, F.pad(x, (0, chain.padding[0])), factors, axes, before)


def _held(chain: Chain, x: Tensor, factors: Sequence[Tensor], wanted: Axes, before: int) -> Tensor:
    # Axis 0 stands for the tokens; einsum takes axes as integers, so there is no limit of 26 letters.
    number = {a: i for i, a in enumerate(chain.sizes, start=1)}
    z = x.reshape(-1, *(chain.sizes[a] for a in chain.x))
    axes = chain.x
    if chain.window:
        z, axes = read_window(chain, z)
    operands: list[Tensor | list[int]] = [z, [0, *(number[a] for a in axes)]]
    for i, factor in enumerate(chain.factors[: before + 1]):
        if factor.regroup:
            old, new = factor.regroup
            z = torch.einsum(*operands, [0, *(number[a] for a in old)])
            z = z.reshape(-1, *(chain.sizes[a] for a in new))
            operands = [z, [0, *(number[a] for a in new)]]
        if i < before:
            unfolded = factors[i].reshape([chain.sizes[a] for a in factor.axes])
            operands += [unfolded, [number[a] for a in factor.axes]]
    made: Tensor = torch.einsum(*operands, [0, *(number[a] for a in wanted)])
    return made
