"""The fused kernels as operators of torch: fake tensors, gradients, autocast, compilation.

Nothing here imports triton until a kernel runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from buttress.core.chain import Chain
from buttress.errors import ButtressError, ShapeError
from buttress.ops import bmm
from buttress.ops import speeds as measured
from buttress.ops.strides import Hop, Places, Route, route
from buttress.ops.tuning import TOKENS, Tuning, default

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU, slowly; tests use it."""


def apply(
    chain: Chain,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    scales: Sequence[Tensor] | None,
    recompute: bool,
) -> Tensor:
    """(tokens, d_in) -> (tokens, d_out), or a clear refusal."""
    way = prepare(chain)
    if way is None:
        raise ButtressError(
            "the fused kernels take factors that read and write at regular places, which this chain's do not: "
            "use impl='bmm'\n" + chain.equation()
        )
    if not TRITON:
        raise ButtressError("the fused kernels need triton, which is not installed: use impl='bmm'")
    if x.device.type != "cuda" and not INTERPRETED:
        raise ButtressError(f"the fused kernels run on a CUDA device, but x is on {x.device}: use impl='bmm'")
    if x.dtype == torch.float64:
        raise ButtressError("the fused kernels take bfloat16, float16 and float32, not float64: use impl='bmm'")
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._len_torch_dispatch_stack():
        # A mode that counts operations or fakes tensors has to see some: the same products as torch.bmm.
        return bmm.apply(chain, x, factors, bias, scales, recompute)
    if bias is not None:
        bias = bias.contiguous()
        if bias.shape != (chain.d_out,):
            raise ShapeError(f"the bias must have {chain.d_out} numbers, got a tensor of shape {tuple(bias.shape)}")
    for f, w in zip(chain.factors, factors, strict=True):
        if w.shape != f.shape:
            raise ShapeError(f"factor {f.name} must have the shape {f.shape}, got {tuple(w.shape)}")
    weights = [w.contiguous() for w in factors]
    gains = [s.float() for s in scales or ()]
    given = [*weights, *([] if bias is None else [bias])]
    if any(t.dtype != x.dtype or t.device != x.device for t in given) or any(g.device != x.device for g in gains):
        kinds = ", ".join(sorted({f"{t.dtype} on {t.device}" for t in (*given, *gains)}))
        raise ButtressError(
            f"x is {x.dtype} on {x.device}, but the layer's parameters are {kinds}: bring them together"
        )
    if compiling:
        learns = torch.is_grad_enabled() and any(w.requires_grad for w in (*weights, *gains))
        save = learns and not recompute
        made: tuple[Tensor, Tensor] = torch.ops.buttress.chain(
            x.contiguous(), weights, gains, bias, way.numbers(), learns, save
        )
        return made[0]
    y: Tensor = _Chain.apply(way, recompute, x.contiguous(), bias, *weights, *gains)  # type: ignore[no-untyped-call]
    return y


def prepare(chain: Chain) -> Route | None:
    """The hops for the kernels, worked out once for each chain."""
    if "route" not in chain.memo:
        found = chain.memo["route"] = route(chain)
        chain.memo["signature"] = found and found.signature
    way: Route | None = chain.memo["route"]
    return way


def preferred(chain: Chain, x: Tensor) -> bool:
    """Whether the fused kernels are the better choice here, rather than torch.bmm."""
    if x.device.type != "cuda" or not TRITON or prepare(chain) is None:
        return False
    # Function transforms and forward-mode derivatives need operations that torch can take apart.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    compiling = torch.compiler.is_compiling()
    # A compiler may leave the number of tokens open; what is worth compiling has many.
    tokens = measured.MANY if compiling else x.shape[0]
    where = x.device.index or 0
    faster: bool = measured.prefers_kernels(
        chain.memo["signature"], x.dtype, where, tokens, torch.is_grad_enabled(), compiling or _replayed > 0
    )
    return faster


_replayed = 0


@contextmanager
def graphed() -> Iterator[None]:
    """Let layers choose their implementation as if launching were free, which it is where a CUDA graph is replayed.

    Use it around the steps that warm up and around the capture, so that both make the same choice. A compiler needs
    no such hint.
    """
    global _replayed  # noqa: PLW0603
    _replayed += 1
    try:
        yield
    finally:
        _replayed -= 1


_forced: list[Tuning] = []


@contextmanager
def tuned(how: Tuning) -> Iterator[None]:
    """Launch the kernels this way and no other, to measure it."""
    _forced.append(how)
    try:
        yield
    finally:
        _forced.pop()


def _tuning(way: Route, x: Tensor) -> Tuning:
    if _forced:
        return _forced[-1]
    if x.device.type != "cuda":
        return default(way.signature, x.itemsize)
    return measured.tuning(way.signature, measured.kind(x.dtype), x.device.index or 0) or default(
        way.signature, x.itemsize
    )


class _Chain(torch.autograd.Function):
    """The kernels without the operator around them, which costs host time on every call."""

    @staticmethod
    def forward(ctx: Any, way: Route, recompute: bool, x: Tensor, bias: Tensor | None, *given: Tensor) -> Tensor:
        from buttress.ops.fused import launching as launch

        count = len(way.hops)
        weights, scales = given[:count], given[count:]
        # What lies between the factors is needed for their gradients alone.
        learns = any(ctx.needs_input_grad[4:])
        save = learns and not recompute
        y, z = launch.forward(way, x, weights, scales, bias, _tuning(way, x).forward, save=save)
        ctx.save_for_backward(x if learns else None, bias, z, *given)
        ctx.way, ctx.learns, ctx.shape = way, learns, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from buttress.ops.fused import launching as launch

        x, bias, z, *given = ctx.saved_tensors
        way: Route = ctx.way
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            x = dy.new_zeros(ctx.shape, requires_grad=True) if x is None else x  # its value does not matter then
            return (None, None, *_twice(way, dy, (x, bias, *given), wanted))
        dy = dy.contiguous()
        weights, scales = given[: len(way.hops)], given[len(way.hops) :]
        if not ctx.learns:
            dx = launch.backward_x(way, dy, weights, scales, _tuning(way, dy).forward) if wanted[0] else None
            return (None, None, dx, dy.sum(0) if wanted[1] else None, *(None for _ in given))
        if z is None:
            z = launch.between(way, x, weights, scales, _tuning(way, x).forward)
        dx, dws, dss, db = launch.backward(way, dy, x, z, weights, scales, _tuning(way, x), biased=wanted[1])
        return (None, None, dx, db, *dws, *dss)


def _twice(
    way: Route, dy: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again: of aliases, because the inputs may depend on each other."""
    alias: list[Any] = [None if t is None else t.view_as(t) for t in inputs]
    x, bias, *given = alias
    y = plain(way, x, given[: len(way.hops)], given[len(way.hops) :], bias)
    chosen = [t for t, w in zip(alias, wanted, strict=True) if w]
    found = iter(torch.autograd.grad(y, chosen, dy, create_graph=True))
    return tuple(next(found) if w else None for w in wanted)


# Defined one by one rather than with torch.library.custom_op, whose checks cost host time on every call.
torch.library.define(
    "buttress::chain",
    "(Tensor x, Tensor[] weights, Tensor[] scales, Tensor? bias, int[] numbers, bool learns, bool save) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "buttress::chain_backward",
    "(Tensor dy, Tensor x, Tensor z, Tensor[] weights, Tensor[] scales, int[] numbers, bool biased, bool learns) "
    "-> Tensor[]",
)
DEVICES = ("cpu", "cuda")


@lru_cache(maxsize=1024)
def _route(numbers: tuple[int, ...]) -> Route:
    return Route.of(numbers)


@torch.library.impl("buttress::chain", DEVICES)
def _chain(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    bias: Tensor | None,
    numbers: Sequence[int],
    learns: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    from buttress.ops.fused import launching as launch

    way = _route(tuple(numbers))
    y, z = launch.forward(way, x, weights, scales, bias, _tuning(way, x).forward, save=save)
    return y, x.new_empty(0) if z is None else z


@torch.library.register_fake("buttress::chain")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    bias: Tensor | None,
    numbers: Sequence[int],
    learns: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    way = Route.of(numbers)
    tiles = (x.shape[0] + TOKENS - 1) // TOKENS
    return x.new_empty(x.shape[0], way.d_out), x.new_empty(tiles, sum(way.rows), TOKENS) if save else x.new_empty(0)


@torch.library.impl("buttress::chain_backward", DEVICES)
def _chain_backward(
    dy: Tensor, x: Tensor, z: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], numbers: Sequence[int],
    biased: bool, learns: bool,
) -> list[Tensor]:  # fmt: skip
    from buttress.ops.fused import launching as launch

    way = _route(tuple(numbers))
    if not learns:
        dx = launch.backward_x(way, dy, weights, scales, _tuning(way, dy).forward)
        return [dx, *([dy.sum(0)] if biased else [])]
    if z.dim() != 3:
        z = launch.between(way, x, weights, scales, _tuning(way, x).forward)
    dx, dws, dss, db = launch.backward(way, dy, x, z, weights, scales, _tuning(way, x), biased=biased)
    return [dx, *dws, *dss, *([] if db is None else [db])]


@torch.library.register_fake("buttress::chain_backward")  # type: ignore[untyped-decorator]
def _(
    dy: Tensor, x: Tensor, z: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], numbers: Sequence[int],
    biased: bool, learns: bool,
) -> list[Tensor]:  # fmt: skip
    bias = [dy.new_empty(dy.shape[1])] if biased else []
    if not learns:
        return [dy.new_empty(dy.shape[0], Route.of(numbers).d_in), *bias]
    return [*(torch.empty_like(t) for t in (x, *weights, *scales)), *bias]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, scales, bias, numbers, learns, _ = inputs
    ctx.save_for_backward(x if learns else None, bias, output[1], *weights, *scales)
    ctx.shape = x.shape
    ctx.numbers, ctx.count, ctx.learns = numbers, len(weights), learns
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    x, bias, z, *given = ctx.saved_tensors
    weights, scales = given[: ctx.count], given[ctx.count :]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Of lists torch says only whether any of them is wanted.
        x = dy.new_zeros(ctx.shape, requires_grad=True) if x is None else x
        lists = [w.requires_grad for w in weights], [s.requires_grad for s in scales]
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[3], *lists[0], *lists[1]]
        dx, db, *rest = _twice(Route.of(ctx.numbers), dy, (x, bias, *given), wanted)
        return dx, rest[: ctx.count], rest[ctx.count :], db, None, None, None
    biased = ctx.needs_input_grad[3]
    dx, *rest = torch.ops.buttress.chain_backward(
        dy.contiguous(), dy if x is None else x, z, weights, scales, ctx.numbers, biased, ctx.learns
    )
    db = rest.pop() if biased else None
    if not ctx.learns:
        return dx, [None] * len(weights), [None] * len(scales), db, None, None, None
    return dx, rest[: ctx.count], rest[ctx.count :], db, None, None, None


torch.library.register_autograd("buttress::chain", _gradient, setup_context=_setup)


def plain(way: Route, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The same map in operations that torch can differentiate any number of times."""
    z = x
    for i, (hop, weight) in enumerate(zip(way.hops, weights, strict=True)):
        source, target, slices = _indices(hop, x.device)
        z = F.pad(z, (0, hop.reach - z.shape[1])) if z.shape[1] < hop.reach else z
        made = torch.einsum("ngk,gjk->ngj", z[:, source], weight[slices])
        made = made * scales[i].to(made.dtype) if scales else made
        z = made.flatten(1)[:, target]
    z = z[:, : way.d_out]
    return z if bias is None else z + bias


@lru_cache(maxsize=1024)
def _indices(hop: Hop, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Columns that each block reads, which output lands in each column, and each block's slice of the weight."""

    def places(p: Places) -> Tensor:
        i = torch.arange(p.size, device=device)
        return i // p.split * p.outer + i % p.split * p.inner

    bases = torch.tensor(hop.bases, device=device)
    source = bases[:, :1] + places(hop.source)
    target = (bases[:, 1:2] + places(hop.target)).flatten()
    return source, torch.argsort(target), bases[:, 2]
