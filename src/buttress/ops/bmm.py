"""The default implementation: permuted views and one torch.bmm a factor.

Between factors the tokens are the fastest axis. The shuffle that the chain asks for then moves whole
runs of tokens, and for most structures none at all, because a batched matrix product takes a strided
operand as it is. With tokens as the slow axis it would move single numbers, which costs more than
the products themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.chain import Axes, Chain
from buttress.ops.layout import read_window

TOKENS = "tokens"


def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """(tokens, padded d_in) -> (tokens, padded d_out)."""
    how: Layout = chain.memo.get("bmm") or prepare(chain)
    if how.plain:
        for weight in factors:
            x = F.linear(x, weight[0])
        return x
    z = x.reshape(-1, *how.split)
    if chain.window:
        z, _ = read_window(chain, z)
    for step, stored in zip(how.steps, factors, strict=True):
        if step.regroup:
            order, shape = step.regroup
            z = z.permute(order).reshape(*shape, -1)
        z = z.permute(step.order).reshape(step.blocks, *step.matrix)
        weight = stored
        if step.shared > 1:
            weight = stored.unsqueeze(1).expand(-1, step.shared, -1, -1).reshape(step.blocks, *stored.shape[1:])
        if step.into_y:
            return bmm(z.mT, weight.mT).transpose(0, 1).reshape(-1, how.d_out)
        z = bmm(weight, z.mT if step.tokens_slow else z).view(*step.made, -1)
    return z.permute(how.order).reshape(-1, how.d_out)


@dataclass(frozen=True)
class Step:
    """How one factor is applied: arrange, multiply, name the result's axes."""

    regroup: tuple[tuple[int, ...], tuple[int, ...]] | None
    order: tuple[int, ...]
    blocks: int
    matrix: tuple[int, int]
    """Shape of a block of z: (-1, d_in) where the tokens are slow, (d_in, -1) where they are fast."""
    shared: int
    """How often the weight must be repeated: shared axes are blocks at first, as good as tokens later."""
    made: tuple[int, ...]
    tokens_slow: bool
    into_y: bool
    """The last product can write blocks (tokens, out), which only have to be laid side by side."""


@dataclass(frozen=True)
class Layout:
    """Everything about a chain's arrangement, worked out once."""

    plain: bool
    """Nothing but plain matrices one after the other."""
    split: tuple[int, ...]
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    d_out: int


def prepare(chain: Chain) -> Layout:
    """Choose the orders of axes for a chain, once."""

    def sizes(axes: Axes) -> tuple[int, ...]:
        return tuple(chain.sizes[a] for a in axes)

    held: Axes = (TOKENS, *chain.x, *(chain.window[1:] if chain.window else ()))
    steps = []
    for i, f in enumerate(chain.factors):
        first = i == 0
        into_y = (
            not first and i == len(chain.factors) - 1 and not f.shared_axes and chain.y == f.batch_axes + f.out_axes
        )
        regroup = None
        if f.regroup:
            old, new = f.regroup
            regroup = (_order(held, (*old, TOKENS)), sizes(new))
            held = (*new, TOKENS)
        if first:
            wanted: Axes = (*f.batch_axes, *f.shared_axes, TOKENS, *f.in_axes)
            made = (*f.batch_axes, *f.shared_axes, *f.out_axes)
        else:
            wanted = (*f.batch_axes, *f.in_axes, *f.shared_axes, TOKENS)
            made = (*f.batch_axes, *f.out_axes, *f.shared_axes)
        steps.append(
            Step(
                regroup=regroup,
                order=_order(held, wanted),
                blocks=f.blocks * f.shared if first else f.blocks,
                matrix=(-1, f.d_in) if first else (f.d_in, -1),
                shared=f.shared if first else 1,
                made=sizes(made),
                tokens_slow=first,
                into_y=into_y,
            )
        )
        held = (*made, TOKENS)
    chain.memo["bmm"] = Layout(
        plain=not any(f.batch_axes or f.shared_axes or f.regroup for f in chain.factors),
        split=sizes(chain.x),
        steps=tuple(steps),
        order=_order(held, (TOKENS, *chain.y)),
        d_out=chain.size(chain.y),
    )
    return chain.memo["bmm"]  # type: ignore[no-any-return]


def _order(held: Axes, wanted: Axes) -> tuple[int, ...]:
    return tuple(held.index(a) for a in wanted)


class _Bmm(torch.autograd.Function):
    """torch.bmm whose gradients come back in the memory layout of the operands.

    torch's own formula returns row-major gradients. For an operand that is a transposed view that
    means a shuffle of single numbers further back, and here every operand but the weights is one.
    """

    # With a separate setup_context torch inspects the signature on every call: 20 us each.
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.bmm(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        grad_a = grad_b = None
        if wants_a:
            grad_a = bmm(b, grad.mT).mT if _transposed(a) else bmm(grad, b.mT)
        if wants_b:
            grad_b = bmm(grad.mT, a).mT if _transposed(b) else bmm(a.mT, grad)
        return grad_a, grad_b


def _transposed(z: Tensor) -> bool:
    return z.stride(-1) != 1 and z.stride(-2) == 1


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """torch.bmm; compilers and function transforms, which lay out gradients themselves, get it plain."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return torch.bmm(a, b)
    result: Tensor = _Bmm.apply(a, b)  # type: ignore[no-untyped-call]
    return result
