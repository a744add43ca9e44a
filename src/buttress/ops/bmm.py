"""The default implementation: permuted views and one torch.bmm a factor.

Between factors the tokens are the fastest axis. The shuffle that the chain asks for then moves whole
runs of tokens, and for most structures none at all, because a batched matrix product takes a strided
operand as it is. With tokens as the slow axis it would move single numbers, which costs more than
the products themselves. The backward pass is written out for the same reason: torch's own gradient of
a product has a fixed layout, which is the wrong one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from buttress.core.chain import Axes, Chain
from buttress.ops.framing import framed, read_window

TOKENS = ""  # no axis of a chain can be called so
Order = tuple[int, ...]
Sizes = tuple[int, ...]


@framed
def apply(chain: Chain, x: Tensor, factors: Sequence[Tensor], recompute: bool) -> Tensor:
    """(tokens, padded d_in) -> (tokens, padded d_out)."""
    how: Layout = chain.memo.get("bmm") or prepare(chain)
    if how.plain:
        for weight in factors:
            x = F.linear(x, weight[0])
        return x
    z = read_window(chain, x.reshape(-1, *how.split))[0].flatten(1) if chain.window else x
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        # Compilers and function transforms work out gradients, and their layout, by themselves.
        return _forward(how, z, factors)[0]
    y: Tensor = _Chain.apply(how, recompute, z, *factors)  # type: ignore[no-untyped-call]
    return y


@dataclass(frozen=True)
class Step:
    """How one factor is applied: regroup, arrange into blocks, multiply, name the result's axes."""

    regroup: tuple[Order, Sizes] | None
    ungroup: tuple[Sizes, Order] | None
    order: Order
    arranged: Sizes
    """Sizes once in that order; -1 for the tokens."""
    unorder: Order
    blocks: int
    matrix: tuple[int, int]
    """Shape of a block of z: (-1, d_in) where the tokens are slow, (d_in, -1) where they are fast."""
    shared: int
    """How often the weight must be repeated: shared axes are blocks at first, as good as tokens later."""
    d_out: int
    made: Sizes
    tokens_slow: bool
    into_y: bool
    """The last product can write blocks (tokens, out), which only have to be laid side by side."""
    from_x: bool
    """The first one's inputs are laid side by side in x."""

    def arrange(self, z: Tensor) -> Tensor:
        if self.regroup:
            order, shape = self.regroup
            z = z.permute(order).reshape(*shape, -1)
        return z.permute(self.order).reshape(self.blocks, *self.matrix)

    def restore(self, z: Tensor) -> Tensor:
        """The inverse of `arrange`."""
        z = z.reshape(self.arranged).permute(self.unorder)
        if self.ungroup:
            shape, order = self.ungroup
            z = z.reshape(*shape, -1).permute(order)
        return z

    def spread(self, weight: Tensor) -> Tensor:
        if self.shared == 1:
            return weight
        return weight.unsqueeze(1).expand(-1, self.shared, -1, -1).reshape(self.blocks, *weight.shape[1:])

    def gather(self, grad: Tensor) -> Tensor:
        """The adjoint of `spread`."""
        return grad if self.shared == 1 else grad.unflatten(0, (-1, self.shared)).sum(1)


@dataclass(frozen=True)
class Layout:
    """Everything about a chain's arrangement, worked out once."""

    plain: bool
    """Nothing but plain matrices one after the other."""
    split: Sizes
    """Axes of x."""
    read: Sizes
    """Axes of x as it is read: through the window, if there is one."""
    steps: tuple[Step, ...]
    order: Order
    unorder: Order
    y: Sizes
    d_out: int


def prepare(chain: Chain) -> Layout:
    """Choose the orders of axes for a chain, once."""

    def sizes(axes: Axes) -> Sizes:
        return tuple([-1 if a == TOKENS else chain.sizes[a] for a in axes])

    held: Axes = (TOKENS, *chain.x, *(chain.window[1:] if chain.window else ()))
    read = sizes(held[1:])
    steps = []
    for i, f in enumerate(chain.factors):
        first, last = i == 0, i == len(chain.factors) - 1
        regroup = ungroup = None
        if f.regroup:
            old, new = f.regroup
            order = _order(held, (*old, TOKENS))
            regroup, ungroup = (order, sizes(new)), (sizes(old), _inverse(order))
            held = (*new, TOKENS)
        if first:
            wanted: Axes = (*f.batch_axes, *f.shared_axes, TOKENS, *f.in_axes)
            made = (*f.batch_axes, *f.shared_axes, *f.out_axes)
        else:
            wanted = (*f.batch_axes, *f.in_axes, *f.shared_axes, TOKENS)
            made = (*f.batch_axes, *f.out_axes, *f.shared_axes)
        order = _order(held, wanted)
        steps.append(
            Step(
                regroup=regroup,
                ungroup=ungroup,
                order=order,
                arranged=sizes(wanted),
                unorder=_inverse(order),
                blocks=f.blocks * f.shared if first else f.blocks,
                matrix=(-1, f.d_in) if first else (f.d_in, -1),
                shared=f.shared if first else 1,
                d_out=f.d_out,
                made=sizes(made),
                tokens_slow=first,
                from_x=first and not chain.window and chain.x == f.batch_axes + f.shared_axes + f.in_axes,
                into_y=last and not first and not f.shared_axes and chain.y == f.batch_axes + f.out_axes,
            )
        )
        held = (*made, TOKENS)
    order = _order(held, (TOKENS, *chain.y))
    layout = Layout(
        plain=_plain(chain),
        split=sizes(chain.x),
        read=read,
        steps=tuple(steps),
        order=order,
        unorder=_inverse(order),
        y=sizes(chain.y),
        d_out=chain.size(chain.y),
    )
    chain.memo["bmm"] = layout
    return layout


def _plain(chain: Chain) -> bool:
    """Whether each factor takes all of what the one before it made, in the same order."""
    orders = [chain.x, *(axes for f in chain.factors for axes in (f.in_axes, f.out_axes)), chain.y]
    joined = all(made == taken for made, taken in zip(orders[::2], orders[1::2], strict=True))
    return joined and not chain.window and not any(f.batch_axes or f.shared_axes or f.regroup for f in chain.factors)


def _order(held: Axes, wanted: Axes) -> Order:
    return tuple([held.index(a) for a in wanted])


def _inverse(order: Order) -> Order:
    return tuple([order.index(i) for i in range(len(order))])


def _side_by_side(left: Tensor, right: Tensor, *, direct: bool) -> Tensor:
    """The products' rows, (tokens, blocks * columns). With `direct` they are written there, which a CPU cannot do."""
    blocks, count, columns = left.shape[0], left.shape[1], right.shape[2]
    if direct:
        y = left.new_empty(count, blocks, columns)
        torch.bmm(left, right, out=y.transpose(0, 1))
        return y.view(count, blocks * columns)
    return torch.bmm(left, right).transpose(0, 1).reshape(count, blocks * columns)


def _forward(how: Layout, z: Tensor, factors: Sequence[Tensor], *, direct: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The result, and what each factor but the first was applied to."""
    kept = []
    z = z.reshape(-1, *how.read)
    for step, weight in zip(how.steps, factors, strict=True):
        blocks = step.arrange(z)
        kept.append(blocks)
        if step.into_y:
            return _side_by_side(blocks.mT, weight.mT, direct=direct), kept[1:]
        z = torch.bmm(step.spread(weight), blocks.mT if step.tokens_slow else blocks).view(*step.made, -1)
    return z.permute(how.order).reshape(-1, how.d_out), kept[1:]


class _Chain(torch.autograd.Function):
    """The whole chain as one node of the graph. Saves x and what lies between the factors."""

    @staticmethod
    def forward(ctx: Any, how: Layout, recompute: bool, z: Tensor, *factors: Tensor) -> Tensor:
        y, kept = _forward(how, z, factors, direct=z.is_cuda)
        ctx.how = how
        ctx.shape = z.shape
        # What a factor was applied to is needed for that factor's gradient alone.
        learns = ctx.needs_input_grad[3:]
        between = [k if wanted and not recompute else None for k, wanted in zip(kept, learns[1:], strict=True)]
        ctx.save_for_backward(z if any(learns) else None, *factors, *between)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: Layout = ctx.how
        count = len(how.steps)
        z, *rest = ctx.saved_tensors
        factors, kept = rest[:count], rest[count:]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            # A second derivative is asked for: let torch find the first one. Of aliases, because the
            # inputs may depend on each other. Where only x is wanted its value does not matter.
            given = (grad.new_zeros(ctx.shape, requires_grad=True) if z is None else z, *factors)
            alias = [t.view_as(t) for t in given]
            inputs = [t for t, w in zip(alias, wanted, strict=True) if w]
            found = iter(torch.autograd.grad(_forward(how, alias[0], alias[1:])[0], inputs, grad, create_graph=True))
            return (None, None, *(next(found) if w else None for w in wanted))
        if any(w and k is None for w, k in zip(wanted[2:], kept, strict=True)):
            kept = _forward(how, z, factors)[1]
        grads: list[Tensor | None] = [None] * (count + 1)
        for i in reversed(range(count)):
            step, weight = how.steps[i], factors[i]
            # (blocks, out, tokens), whatever way the result was laid out.
            if step.into_y:
                out = grad.reshape(-1, step.blocks, step.d_out).permute(1, 2, 0)
            elif i == count - 1:
                out = grad.reshape(-1, *how.y).permute(how.unorder).reshape(step.blocks, step.d_out, -1)
            else:
                out = grad.reshape(step.blocks, step.d_out, -1)
            if wanted[i + 1]:
                rows = kept[i - 1].mT if i else step.arrange(z.reshape(-1, *how.read))
                grads[i + 1] = step.gather(torch.bmm(out, rows))
            if i:
                grad = step.restore(torch.bmm(weight.mT, out))
            elif wanted[0] and step.from_x:
                dx = _side_by_side(out.mT, step.spread(weight), direct=out.is_cuda)
                grads[0] = dx.reshape(ctx.shape)
            elif wanted[0]:
                grads[0] = step.restore(torch.bmm(out.mT, step.spread(weight))).reshape(ctx.shape)
        return (None, None, *grads)
