"""The meaning of a chain: one einsum over its axes, any dtype, no thought of speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.chain import Chain
from buttress.ops.layout import framed, read_window


@framed
def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool) -> Tensor:
    """y[token, y] = sum over every other axis of the product of the factors and x[token, x].

    `x` is (tokens, padded d_in) and the result (tokens, padded d_out). What is saved is left to torch.
    """
    # Axis 0 stands for the tokens; einsum takes axes as integers, so there is no limit of 26 letters.
    number = {a: i for i, a in enumerate(chain.sizes, start=1)}
    z = x.reshape(-1, *(chain.sizes[a] for a in chain.x))
    held = chain.x
    if chain.window:
        z, held = read_window(chain, z)
    operands: list[Tensor | list[int]] = [z, [0, *(number[a] for a in held)]]
    for factor, weight in zip(chain.factors, factors, strict=True):
        if factor.regroup:
            old, new = factor.regroup
            z = torch.einsum(*operands, [0, *(number[a] for a in old)])
            z = z.reshape(-1, *(chain.sizes[a] for a in new))
            operands = [z, [0, *(number[a] for a in new)]]
        unfolded = weight.reshape([chain.sizes[a] for a in factor.axes])
        operands += [unfolded, [number[a] for a in factor.axes]]
    y: Tensor = torch.einsum(*operands, [0, *(number[a] for a in chain.y)])
    return y.flatten(1)
