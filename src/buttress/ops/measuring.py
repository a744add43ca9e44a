"""Timing a layer's implementations side by side, on whatever device there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.scaling import init_std
from buttress.ops import tuning
from buttress.ops.fused import operators as fused
from buttress.ops.speeds import Row, Times, kind

BUDGET, GLANCE = 0.08, 0.03
"""Seconds of repetitions for a time that is kept, and for one that only picks a way to launch."""
FLUSH = 1 << 28
"""Bytes written before each repetition, so that no cache holds what the last one left."""


def time_ms(function: Callable[[], object], device: torch.device, budget: float = BUDGET) -> float:
    """The median of repeated calls, in milliseconds."""
    if device.type != "cuda":
        return _time_cpu(function, budget)
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)

    def run(count: int) -> list[float]:
        # Everything is queued before anything is waited for: a card that rests in between runs faster than it will.
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            flush.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in pairs]

    run(2)
    return median(run(max(5, min(200, int(1e3 * budget / median(run(3)))))))


def _time_cpu(function: Callable[[], object], budget: float) -> float:
    function()
    took: list[float] = []
    begin = time.perf_counter()
    while len(took) < 3 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        function()
        took.append(time.perf_counter() - start)
    return 1e3 * median(took)


def graph_ms(function: Callable[[], object], device: torch.device, budget: float = BUDGET) -> float:
    """As `time_ms`, replayed from a CUDA graph: the device's time without the host's."""
    if device.type != "cuda":
        return time_ms(function, device, budget)
    for _ in range(2):
        function()
    graph = torch.cuda.CUDAGraph()
    # On the stream where the leaves were made, or autograd would wait for another in the middle of the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        function()
    return time_ms(graph.replay, device, budget)


@torch.enable_grad()  # projection asks for prices where there are no gradients
def times(call: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Times:
    """Forward, and forward with backward, from a graph and as launched by Python."""
    leaf = x.detach().requires_grad_()
    with torch.no_grad():
        dy = torch.randn_like(call(x))

    def forward() -> object:
        with torch.no_grad():
            return call(x)

    def both() -> object:
        return torch.autograd.grad(call(leaf), [leaf, *weights], dy)

    where = x.device
    return Times(
        forward=round(graph_ms(forward, where), 5),
        both=round(graph_ms(both, where), 5),
        forward_eager=round(time_ms(forward, where), 5),
        both_eager=round(time_ms(both, where), 5),
    )


def measure(
    chain: Chain, label: str, tokens: int, dtype: torch.dtype, device: torch.device, *, linear: Times | None = None
) -> Row:
    """One row of the table: every implementation that takes the chain, the kernels at their best."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        x = torch.randn(tokens, chain.d_in, device=device, dtype=dtype)
        linear = linear or measure_linear(chain.d_in, chain.d_out, x)
        found: dict[str, Times] = {}
        factors = [
            torch.randn(f.shape, device=device, dtype=dtype).mul_(init_std(f)).requires_grad_() for f in chain.factors
        ]
        found["bmm"] = times(lambda t: ops.apply(chain, t, factors, impl="bmm"), x, factors)
        way = fused.prepare(chain)
        best = None
        if way is not None and fused.TRITON and device.type == "cuda":
            from triton.runtime.errors import OutOfResources

            try:
                best = tune(chain, x, factors)
                with fused.tuned(best):
                    found["triton"] = times(lambda t: ops.apply(chain, t, factors, impl="triton"), x, factors)
            except OutOfResources:
                best = None  # a small card: torch.bmm it is
    signature = None if way is None else way.signature
    return Row(label, chain.d_in, chain.d_out, tokens, kind(dtype), signature, linear, found, best)


def measure_linear(d_in: int, d_out: int, x: Tensor) -> Times:
    """nn.Linear of the same sizes."""
    weight = torch.randn(d_out, d_in, device=x.device, dtype=x.dtype).mul_(d_in**-0.5).requires_grad_()
    return times(lambda t: torch.nn.functional.linear(t, weight), x, [weight])


@torch.enable_grad()
def tune(chain: Chain, x: Tensor, factors: Sequence[Tensor]) -> tuning.Tuning:
    """The fastest of the ways to launch the kernels that are tried."""
    leaf = x.detach().requires_grad_()
    dy = torch.randn(x.shape[0], chain.d_out, device=x.device, dtype=x.dtype)

    def took(how: tuning.Tuning, *, back: bool) -> float:
        from triton.runtime.errors import OutOfResources

        with fused.tuned(how):
            try:

                def forward() -> Tensor:
                    return ops.apply(chain, leaf, factors, impl="triton")

                def both() -> object:
                    return torch.autograd.grad(forward(), [leaf, *factors], dy)

                return graph_ms(both if back else forward, x.device, GLANCE)
            except OutOfResources:
                return float("inf")

    base = tuning.default(fused.prepare(chain).signature, x.itemsize)  # type: ignore[union-attr]
    if x.itemsize > 2:
        return base
    forward = min(tuning.FORWARD, key=lambda f: took(tuning.Tuning(f, base.backward), back=False))
    backward = min(tuning.BACKWARD, key=lambda b: took(tuning.Tuning(forward, b), back=True))
    return tuning.Tuning(forward, backward)
