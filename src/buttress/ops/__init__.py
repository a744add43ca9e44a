"""Two doors to a chain's arithmetic: `apply` multiplies by its matrix, `rows` looks rows of it up.

Behind `apply` stand interchangeable implementations. `reference` is the meaning (one einsum), `bmm` runs
everywhere, `triton` is the fused kernels, chosen by themselves where they were measured to be faster. All give the
same answer or refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.errors import ButtressError, ShapeError
from buttress.ops import bmm, flops, reference
from buttress.ops.framing import autocast_dtype
from buttress.ops.fused import operators as fused
from buttress.ops.fused.operators import graphed
from buttress.ops.lookup import macs as row_macs
from buttress.ops.lookup import prepare as prepare_rows
from buttress.ops.lookup import rows

flops.register_if_cheap()

Impl = Literal["reference", "bmm", "triton"]
IMPLEMENTATIONS = {"reference": reference.apply, "bmm": bmm.apply, "triton": fused.apply}

__all__ = ["IMPLEMENTATIONS", "Impl", "apply", "dense", "graphed", "prepare", "row_macs", "rows"]


def prepare(chain: Chain) -> None:
    """Work out a chain's layouts now, so that a compiler that traces `apply` finds them ready."""
    bmm.prepare(chain)
    fused.prepare(chain)
    prepare_rows(chain)
    _ = chain.padding, chain.sizes


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scales: Sequence[Tensor] | None = None,
    recompute: bool = False,
    impl: Impl | None = None,
) -> Tensor:
    """y = W x + bias for any leading shape of x, where `factors` are W's, in order of application.

    Law: apply(chain, x, factors) = x @ dense(chain, factors).T. `scales` holds one number for each factor, by
    which it is multiplied. With `recompute` the backward pass makes what lies between the factors anew instead of
    finding it saved: less memory, a little more time. Follows autocast as F.linear does. `impl` forces one
    implementation; without it the fastest that fits is taken, as far as the card was measured.
    """
    if x.dim() == 0 or x.shape[-1] != chain.d_in:
        raise ShapeError(
            f"this layer takes {chain.d_in} features in the last dimension, got a tensor of shape {tuple(x.shape)}"
        )
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ButtressError(f"unknown implementation {impl!r}: there are {', '.join(IMPLEMENTATIONS)}")
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
        factors = [w.to(dtype) for w in factors]
        bias = None if bias is None else bias.to(dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, chain.d_in)
    run = IMPLEMENTATIONS[impl or ("triton" if fused.preferred(chain, rows) else "bmm")]
    y = run(chain, rows, factors, bias, scales, recompute)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], chain.d_out)


def dense(chain: Chain, factors: Sequence[Tensor], *, impl: Impl | None = None) -> Tensor:
    """The (d_out, d_in) matrix: the chain applied to the identity, in the factors' own precision."""
    eye = torch.eye(chain.d_in, dtype=factors[0].dtype, device=factors[0].device)
    if autocast_dtype(eye) is None:
        return apply(chain, eye, factors, impl=impl).mT
    with torch.autocast(eye.device.type, enabled=False):
        return apply(chain, eye, factors, impl=impl).mT
