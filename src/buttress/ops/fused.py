"""The fused kernels as operators of torch: fake tensors, gradients, autocast, compilation.

Nothing here imports triton until a kernel runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from buttress.chain import Chain
from buttress.errors import ButtressError
from buttress.ops import bmm
from buttress.ops.pair import WIDEST, Pair, config, pair

ENOUGH = 1 << 26
"""Numbers in x and y from which on the kernels' time exceeds the host's for launching them (one H200)."""
HALF = (torch.bfloat16, torch.float16)
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU, slowly; tests use it."""


def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """(tokens, padded d_in) -> (tokens, padded d_out), or a clear refusal."""
    p = prepare(chain)
    if p is not None and not p.narrow:
        raise ButtressError(
            f"the fused kernels take slices of up to {WIDEST} inputs and outputs, not {p.d} and {p.a}: use impl='bmm'"
        )
    if p is None:
        raise ButtressError(
            "the fused kernels take two factors joined by one bond, which this chain is not: use impl='bmm'\n"
            + chain.equation()
        )
    if x.device.type != "cuda" and not INTERPRETED:
        raise ButtressError(f"the fused kernels run on a CUDA device, but x is on {x.device}: use impl='bmm'")
    right, left = factors
    if p.right_shared > 1:
        right = right.expand(p.right_shared, -1, -1)
    if p.left_shared > 1:
        left = left.expand(p.left_shared, -1, -1)
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        # A mode that counts operations or fakes tensors has to see some: the same products as torch.bmm.
        return bmm.apply(chain, x, factors)
    given = (x.contiguous(), right.contiguous(), left.contiguous())
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = _pair(*given, list(astuple(p)))
        return result[0]
    y: Tensor = _Pair.apply(p, *given)  # type: ignore[no-untyped-call]
    return y


class _Pair(torch.autograd.Function):
    """The kernels without the operator around them, which costs host time on every call."""

    @staticmethod
    def forward(ctx: Any, p: Pair, x: Tensor, right: Tensor, left: Tensor) -> Tensor:
        from buttress.ops import triton_pair

        y, z = triton_pair.forward(p, x, right, left, config(x.itemsize))
        ctx.save_for_backward(x, right, left, z)
        ctx.pair = p
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from buttress.ops import triton_pair

        x, right, left, z = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, *_twice(ctx.pair, dy, (x, right, left), ctx.needs_input_grad[1:]))
        return (None, *triton_pair.backward(ctx.pair, dy.contiguous(), x, z, right, left, config(x.itemsize)))


def _twice(p: Pair, dy: Tensor, inputs: tuple[Tensor, ...], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again: of aliases, because the inputs may depend on each other."""
    alias = [t.view_as(t) for t in inputs]
    chosen = [t for t, w in zip(alias, wanted, strict=True) if w]
    found = iter(torch.autograd.grad(_plain(p, *alias), chosen, dy, create_graph=True))
    return tuple(next(found) if w else None for w in wanted)


def prepare(chain: Chain) -> Pair | None:
    """The numbers for the kernels, worked out once for each chain."""
    if "pair" not in chain.memo:
        chain.memo["pair"] = pair(chain)
    found: Pair | None = chain.memo["pair"]
    return found


def preferred(chain: Chain, x: Tensor) -> bool:
    """Whether the fused kernels are the better choice here, rather than torch.bmm."""
    if x.device.type != "cuda" or x.dtype not in HALF or not TRITON:
        return False
    p = prepare(chain)
    if p is None or not p.narrow:
        return False
    if not torch.compiler.is_compiling() and x.shape[0] * (chain.d_in + chain.d_out) < ENOUGH:
        return False
    # Function transforms and forward-mode derivatives need operations that torch can take apart.
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


@torch.library.custom_op("buttress::pair", mutates_args=())
def _pair(x: Tensor, right: Tensor, left: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    from buttress.ops import triton_pair

    p = Pair(*numbers)
    return triton_pair.forward(p, x, right, left, config(x.itemsize))


@_pair.register_fake
def _(x: Tensor, right: Tensor, left: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    p = Pair(*numbers)
    tokens = config(x.itemsize).tokens
    tiles = (x.shape[0] + tokens - 1) // tokens
    return x.new_empty(x.shape[0], p.b * p.a), x.new_empty(tiles, p.c, p.o, tokens)


@torch.library.custom_op("buttress::pair_backward", mutates_args=())
def _pair_backward(
    dy: Tensor, x: Tensor, z: Tensor, right: Tensor, left: Tensor, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    from buttress.ops import triton_pair

    p = Pair(*numbers)
    return triton_pair.backward(p, dy, x, z, right, left, config(x.itemsize))


@_pair_backward.register_fake
def _(
    dy: Tensor, x: Tensor, z: Tensor, right: Tensor, left: Tensor, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(right), torch.empty_like(left)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, list[int]], output: tuple[Tensor, Tensor]) -> None:
    x, right, left, numbers = inputs
    ctx.save_for_backward(x, right, left, output[1])
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, right, left, z = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return (*_twice(Pair(*ctx.numbers), dy, (x, right, left), ctx.needs_input_grad[:3]), None)
    dx, dr, dl = _pair_backward(dy.contiguous(), x, z, right, left, ctx.numbers)
    return dx, dr, dl, None


_pair.register_autograd(_gradient, setup_context=_setup)


def _plain(p: Pair, x: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """The same map in operations that torch can differentiate any number of times."""
    z = torch.einsum("ncd,cod->nco", x.view(-1, p.c, p.d), right)
    bond_inside = p.z_s == 1
    z = z.unflatten(-1, (p.b, p.s) if bond_inside else (p.s, p.b))
    middle = "ncbs" if bond_inside else "ncsb"
    result = "nba" if p.y_a == 1 else "nab"
    return torch.einsum(f"{middle},bacs->{result}", z, left.unflatten(-1, (p.c, p.s))).flatten(1)
