"""Applying a chain to tensors: `apply` multiplies by its matrix, `rows` looks up rows of it.

`apply` has three interchangeable implementations: `reference` is the definition (an einsum for each factor), `bmm` runs
everywhere, and `triton` is the fused kernels, chosen automatically where they were measured to be faster. An
implementation that cannot compute the result raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from buttress.core.chain import Chain
from buttress.core.chain_sum import AnyChain
from buttress.errors import ButtressError, ShapeError
from buttress.ops import bmm, flops, fused, reference, saving, speeds
from buttress.ops.activations import activated, check_activation
from buttress.ops.captures import is_exporting
from buttress.ops.framing import autocast_dtype, by_part
from buttress.ops.fused import graphed
from buttress.ops.layouts import layouts_of
from buttress.ops.lookup import row_macs, rows

flops.register_if_cheap()

Impl = Literal["reference", "bmm", "triton"]
# Before 2.13, torch.export takes the smaller of two strides of a view for a condition on a dynamic batch. The views of
# "bmm", whose fastest axis is the batch, have such strides.
_EXPORT_FIXES_BATCH_OF_VIEWS = torch.__version__ < "2.13"

IMPLEMENTATIONS = {"reference": reference.apply, "bmm": bmm.apply, "triton": fused.apply}

__all__ = ["IMPLEMENTATIONS", "Impl", "apply", "dense", "fastest", "graphed", "prepare", "row_macs", "rows"]


def prepare(chain: AnyChain) -> None:
    """Derive a chain's layouts ahead of time, so that a compiler does not trace their derivation.

    Args:
        chain: The chain of a module, after it was built, copied or loaded.
    """
    for part in chain.parts:
        layouts_of(part)


def apply(
    chain: AnyChain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    scales: Sequence[Tensor] | None = None,
    recompute: bool | None = False,
    impl: Impl | None = None,
    activation: str | None = None,
) -> Tensor:
    """Multiply by a chain's matrix: y = act(x) W^T + bias, where W is `dense(chain, factors)`.

    Autocast applies as it does for F.linear. The parts of a sum are computed one after the other, each by its own
    fastest implementation, and added up. A part whose factors have another dtype than the first part's computes in its
    own; the sum has that of the first.

    Args:
        chain: The chain, or the sum of chains.
        x: The input.
        factors: The factors of W in order of application, part by part.
        bias: Added to the result.
        scales: A multiplier of each factor, as a tensor with one entry.
        recompute: Compute the intermediates between the factors again in the backward pass instead of saving them:
            less memory, slightly more time. None: where saving them would need more memory than a dense layer
            (`saving.recomputes`).
        impl: The implementation to use, "reference", "bmm" or "triton". Default: "triton" where it was measured to be
            faster for a similar layer on this GPU, else "bmm" (see `fastest`).
        activation: What is applied to x first: "gelu" (exact), "gelu_tanh", "silu" or "relu". Default: nothing. The
            backward pass needs x alone, so act(x) need not be stored: "triton" never does, "bmm" only for chains
            without blocks and for sums.

    Shape:
        x (*, d_in), factors (blocks, d_out, d_in) each, bias (d_out,) -> (*, d_out).

    Returns:
        The output.

    Raises:
        ShapeError: If x does not have `chain.d_in` features.
        ButtressError: If `impl` or `activation` is unknown, or `impl` cannot compute this.

    Example:
        >>> import buttress as bt
        >>> chain = bt.BTT(rank=2).chain(16, 36)
        >>> factors = [torch.randn(f.shape) for f in chain.factors]
        >>> apply(chain, torch.randn(5, 16), factors).shape
        torch.Size([5, 36])
    """
    if x.dim() == 0 or x.shape[-1] != chain.d_in:
        raise ShapeError(
            f"this layer takes {chain.d_in} features in the last dimension, got a tensor of shape {tuple(x.shape)}"
        )
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ButtressError(f"unknown implementation {impl!r}: there are {', '.join(IMPLEMENTATIONS)}")
    check_activation(activation)
    factor_itemsize = min(w.element_size() for w in factors)
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
        factors = [w.to(dtype) for w in factors]
        bias = None if bias is None else bias.to(dtype)
    x_rows = x if x.dim() == 2 else x.reshape(-1, chain.d_in)
    if recompute is None:
        recompute = saving.recomputes(chain, x_rows, factors, scales, factor_itemsize)
    if isinstance(chain, Chain):
        y = _apply(chain, x_rows, factors, bias, scales, recompute, impl, activation)
    else:
        # Once for all parts, which may differ in dtype and implementation.
        x_rows = activated(x_rows, activation)
        first, *others = by_part(chain, factors, scales)
        y = _apply(first[0], x_rows, first[1], bias, first[2], recompute, impl)
        for part, own, own_scales in others:
            # A part may be stored in a wider dtype than the first, such as the trained one next to a frozen one.
            y = y + _apply(part, x_rows.to(own[0].dtype), own, None, own_scales, recompute, impl).to(y.dtype)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], chain.d_out)


def _apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
    impl: Impl | None,
    activation: str | None = None,
) -> Tensor:
    """Multiply the rows of x by the matrix of one chain."""
    return IMPLEMENTATIONS[impl or fastest(chain, x)](chain, x, factors, bias, scales, recompute, activation)


def fastest(chain: Chain, x: Tensor) -> Impl:
    """The implementation that `apply` uses by itself.

    Args:
        chain: The chain.
        x: The input.

    Shape:
        x is (tokens, d_in).

    Returns:
        "triton" where it was measured to be faster for a similar layer on this GPU, else "bmm". With
        BUTTRESS_CALIBRATE=1 in the environment, a layer that is like none in the table is measured first. Inside
        torch.export before torch 2.13, "reference" takes the place of "bmm".
    """
    if speeds.MEASURES_ON_FIRST_USE and x.device.type == "cuda" and not torch.compiler.is_compiling():
        from buttress.ops.measuring import measure_at_first_use

        measure_at_first_use(chain, x)
    if fused.preferred(chain, x):
        return "triton"
    return "reference" if _EXPORT_FIXES_BATCH_OF_VIEWS and is_exporting() else "bmm"


def dense(chain: AnyChain, factors: Sequence[Tensor], *, impl: Impl | None = None) -> Tensor:
    """The dense matrix: the chain applied to the identity, in the factors' own precision even under autocast.

    Args:
        chain: The chain.
        factors: Its factors in order of application.
        impl: The implementation to use; see `apply`.

    Shape:
        factors (blocks, d_out, d_in) each -> (chain.d_out, chain.d_in).

    Returns:
        The matrix, in the dtype of the first factor.

    Raises:
        ButtressError: If torch.fx traces the factors.

    Example:
        >>> import buttress as bt
        >>> chain = bt.Kronecker().chain(4, 4)
        >>> dense(chain, [torch.ones(1, 2, 2), torch.ones(1, 2, 2)]).shape
        torch.Size([4, 4])
    """
    if not all(isinstance(f, Tensor) for f in factors):
        raise ButtressError(
            "torch.fx cannot trace the weight of a structured layer: call the layer instead of reading its weight, or "
            "use torch.export"
        )
    if len({f.dtype for f in factors}) > 1:
        wide = reduce(torch.promote_types, (f.dtype for f in factors))
        return dense(chain, [f.to(wide) for f in factors], impl=impl).to(factors[0].dtype)
    eye = torch.eye(chain.d_in, dtype=factors[0].dtype, device=factors[0].device)
    if autocast_dtype(eye) is None:
        return apply(chain, eye, factors, impl=impl).mT
    with torch.autocast(eye.device.type, enabled=False):
        return apply(chain, eye, factors, impl=impl).mT
