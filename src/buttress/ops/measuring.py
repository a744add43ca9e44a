"""Timing the implementations of a layer, on any device; if asked for, at its first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, product
from math import log2
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.chain_sum import AnyChain
from buttress.core.scaling import init_std
from buttress.errors import ButtressError
from buttress.ops.fused import availability, tuned
from buttress.ops.fused.checks import DTYPES
from buttress.ops.fused.launches import OversizeKernelError
from buttress.ops.layouts import layouts_of
from buttress.ops.on_chip import launches as on_chip_launches
from buttress.ops.on_chip.options import GradientOptions, OnChip, apply_candidates, gradient_candidates
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.speeds import MAX_SIZE_RATIO, Row, Times, dtype_key, gpu_name, nearest, store_rows, table
from buttress.ops.strides import Signature
from buttress.ops.tuning import BACKWARD_CANDIDATES, FORWARD_CANDIDATES, Tuning, default_tuning

log = logging.getLogger(__name__)

TIMING_SECONDS, TUNING_SECONDS = 0.08, 0.03
"""Seconds of repetitions for a time that is stored, and for one that only compares launch options."""
TOLERANCE = 2e-2
"""Largest relative distance of the on-chip kernels from torch.bmm, which rounds to 16 bits as well."""
ON_CHIP_CANDIDATES = 4
"""Launch options of the on-chip kernels that are compared for each pass when a GPU is measured."""
FLUSH_BYTES = 1 << 28
"""Bytes written before each repetition, to flush the caches of the GPU."""

Options = TypeVar("Options")


class Sample(NamedTuple):
    """The median of repeated calls.

    Args:
        ms: Milliseconds.
        spread: How much the calls differ: their interquartile range divided by the median.
    """

    ms: float
    spread: float

    @classmethod
    def of(cls, ms: Sequence[float]) -> Sample:
        """The sample of at least two durations."""
        lower, middle, upper = quantiles(ms, method="inclusive")
        return cls(middle, (upper - lower) / middle)


def sample_ms(function: Callable[[], object], device: torch.device, seconds: float = TIMING_SECONDS) -> Sample:
    """Time repeated calls.

    Args:
        function: The function to time.
        device: The device on which it runs.
        seconds: Approximate duration of the repetitions; there are three at least.

    Returns:
        Their median and their spread.
    """
    if device.type != "cuda":
        return _cpu_sample_ms(function, seconds)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def run(count: int) -> list[float]:
        # Queued without waiting in between: a GPU that idles between calls would run faster than in practice.
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            flush.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in pairs]

    run(2)
    return Sample.of(run(max(5, min(200, int(1e3 * seconds / median(run(3)))))))


def _cpu_sample_ms(function: Callable[[], object], seconds: float) -> Sample:
    function()
    durations: list[float] = []
    begin = time.perf_counter()
    while len(durations) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        function()
        durations.append(1e3 * (time.perf_counter() - start))
    return Sample.of(durations)


def graph_sample_ms(function: Callable[[], object], device: torch.device, seconds: float = TIMING_SECONDS) -> Sample:
    """Time replays of a call from a CUDA graph, which excludes host time; otherwise as `sample_ms`."""
    if device.type != "cuda":
        return sample_ms(function, device, seconds)
    for _ in range(2):
        function()
    graph = torch.cuda.CUDAGraph()
    # On the stream where the leaves were created, or autograd would wait for another in the middle of the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        function()
    return sample_ms(graph.replay, device, seconds)


def time_passes(call: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Times:
    """The times of `sample_passes`, without their spread."""
    return sample_passes(call, x, weights)[0]


@torch.enable_grad()  # may be called while gradients are disabled
def sample_passes(call: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> tuple[Times, float]:
    """Time the forward pass of a function, and forward and backward together, with a CUDA graph and without one.

    Args:
        call: A function of the input.
        x: The input.
        weights: Further tensors whose gradients are computed.

    Returns:
        The four times, and the largest of their spreads. A CPU has no graphs: there they are two different times.
    """
    leaf = x.detach().requires_grad_()
    with torch.no_grad():
        dy = torch.randn_like(call(x))
    if x.is_cuda:
        # The first kernel of torch's backward thread sets its CUDA context; if cuBLAS came first, torch would warn.
        one = torch.ones((), device=x.device, requires_grad=True)
        torch.autograd.grad(one.exp(), one)

    def forward() -> object:
        with torch.no_grad():
            return call(x)

    def both() -> object:
        return torch.autograd.grad(call(leaf), [leaf, *weights], dy)

    samples = [graph_sample_ms(forward, x.device), graph_sample_ms(both, x.device)]
    samples += [sample_ms(forward, x.device), sample_ms(both, x.device)] if x.is_cuda else samples
    return Times(*(round(sample.ms, 5) for sample in samples)), max(sample.spread for sample in samples)


def measure_layer(
    chain: AnyChain, label: str, tokens: int, dtype: torch.dtype, device: torch.device, *, linear: Times | None = None
) -> Row:
    """Time the implementations of a chain, the kernels with their fastest launch options.

    Args:
        chain: The chain. For a sum, the kernels are timed with the launch options that its parts have by themselves.
        label: The structure as text.
        tokens: Tokens in the batch.
        dtype: dtype of input and factors.
        device: The device to measure.
        linear: Times of nn.Linear of the same sizes, if they were measured before.

    Returns:
        One row of the speed table.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        x = torch.randn(tokens, chain.d_in, device=device, dtype=dtype)
        linear, linear_spread = (linear, 0.0) if linear else sample_linear(chain.d_in, chain.d_out, x)
        factors = [
            torch.randn(f.shape, device=device, dtype=dtype).mul_(init_std(f)).requires_grad_() for f in chain.factors
        ]
        samples = {"bmm": sample_passes(lambda t: ops.apply(chain, t, factors, impl="bmm"), x, factors)}
        tuning = None
        whole = layouts_of(chain) if isinstance(chain, Chain) else None
        supported = all(layouts_of(part).strided is not None for part in chain.parts)
        if supported and availability.TRITON and device.type == "cuda":
            try:
                tuning = tune(chain, x, factors) if isinstance(chain, Chain) else None
                with tuned(tuning) if tuning else nullcontext():
                    samples["triton"] = sample_passes(lambda t: ops.apply(chain, t, factors, impl="triton"), x, factors)
            except OversizeKernelError:
                tuning = None  # the GPU is too small for the kernels
    return Row(
        label, chain.d_in, chain.d_out, tokens, dtype_key(dtype), whole.signature if whole else None, linear,
        {name: times for name, (times, _) in samples.items()}, tuning,
        spread=round(max(linear_spread, *(spread for _, spread in samples.values())), 3),
    )  # fmt: skip


def sample_linear(d_in: int, d_out: int, x: Tensor) -> tuple[Times, float]:
    """Times of nn.Linear of these sizes, for the input x, and their spread."""
    weight = torch.randn(d_out, d_in, device=x.device, dtype=x.dtype).mul_(d_in**-0.5).requires_grad_()
    return sample_passes(lambda t: torch.nn.functional.linear(t, weight), x, [weight])


@torch.enable_grad()
def tune(chain: Chain, x: Tensor, factors: Sequence[Tensor], *, on_chip: bool = True) -> Tuning:
    """The fastest of the candidate launch options of the kernels.

    Args:
        chain: A chain that the kernels support.
        x: The input.
        factors: The factors in order of application.
        on_chip: Whether to compare the on-chip kernels, too.

    Returns:
        The launch options; for dtypes wider than 16 bits the defaults, without measuring.
    """
    leaf = x.detach().requires_grad_()
    dy = torch.randn(x.shape[0], chain.d_out, device=x.device, dtype=x.dtype)

    def forward() -> Tensor:
        return ops.apply(chain, leaf, factors, impl="triton")

    def both() -> object:
        return torch.autograd.grad(forward(), [leaf, *factors], dy)

    def milliseconds(function: Callable[[], object], tuning: Tuning) -> float:
        with tuned(tuning):
            try:
                return graph_sample_ms(function, x.device, TUNING_SECONDS).ms
            except OversizeKernelError:
                return float("inf")

    base = default_tuning(layouts_of(chain).signature, x.itemsize)  # type: ignore[arg-type]
    if x.itemsize > 2:
        return base
    fastest_forward = min(FORWARD_CANDIDATES, key=lambda f: milliseconds(forward, Tuning(f, base.backward)))
    fastest_backward = min(BACKWARD_CANDIDATES, key=lambda b: milliseconds(both, Tuning(fastest_forward, b)))
    tuning = Tuning(fastest_forward, fastest_backward)
    fitting = tune_on_chip(chain, x) if on_chip else OnChip()

    def fastest(function: Callable[[], object], gradients: GradientOptions | None) -> Tuning:
        passes = product((fitting.forward, None), (fitting.input_gradient, None))
        options = dict.fromkeys((None, *(OnChip(*pair, gradients) for pair in passes)))
        options.pop(OnChip(), None)  # the same as None
        return min((replace(tuning, on_chip=o) for o in options), key=lambda t: milliseconds(function, t))

    if fitting.weight_gradients and (faster := fastest(both, fitting.weight_gradients)).on_chip:
        return faster
    if not (fitting.forward or fitting.input_gradient):
        return tuning
    # The passes of frozen factors save nothing in any case, and do not touch a training step that saves intermediates.
    frozen = [f.detach() for f in factors]
    return fastest(lambda: torch.autograd.grad(ops.apply(chain, leaf, frozen, impl="triton"), leaf, dy), None)


def tune_on_chip(chain: Chain, x: Tensor, candidates: int = ON_CHIP_CANDIDATES) -> OnChip:
    """The fastest options of the on-chip kernels for each pass.

    Args:
        chain: A chain that the kernels support.
        x: The input.
        candidates: How many options to compare for each pass. Each of them is compiled, which takes seconds.

    Returns:
        The options. A pass has none where the on-chip kernels cannot run or do not support it; options that give wrong
        numbers or fail are left out, with a warning.
    """
    strided = layouts_of(chain).strided
    sizes = None if strided is None else on_chip_sizes(strided)
    if sizes is None or not on_chip_launches.can_launch(x.dtype, x.device):
        return OnChip()
    limit = on_chip_launches.shared_limit(x.device)
    dy, *weights = (
        torch.randn(shape, device=x.device, dtype=x.dtype)
        for shape in ((x.shape[0], chain.d_out), *(f.shape for f in chain.factors))
    )
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    y = ops.apply(chain, leaves[0], leaves[1:], impl="bmm")
    exact_dx, *exact_dws = torch.autograd.grad(y, leaves, dy)

    def fastest(
        options: Iterable[Options], run: Callable[[Options], Sequence[Tensor]], exact: Sequence[Tensor]
    ) -> Options | None:
        best, least = None, float("inf")
        for option in islice(options, candidates):
            try:
                wrong = any(not _relative(t, e) < TOLERANCE for t, e in zip(run(option), exact, strict=True))
                ms = graph_sample_ms(partial(run, option), x.device, TUNING_SECONDS).ms
            except ButtressError as error:
                log.warning("launch options of the on-chip kernels are not used: %s", error)
                continue
            if wrong:
                log.warning("launch options that give wrong numbers on this GPU are not used: %s", option)
            elif ms < least:
                best, least = option, ms
        return best

    forward = fastest(
        apply_candidates(sizes, limit),
        lambda o: [on_chip_launches.apply(sizes, o, x, weights, (), None)],
        [y.detach()],
    )
    input_gradient = fastest(
        apply_candidates(sizes.transposed, limit),
        lambda o: [on_chip_launches.apply(sizes.transposed, o, dy, weights[::-1], (), None, transposed=True)],
        [exact_dx],
    )
    gradients = fastest(
        gradient_candidates(sizes, limit),
        lambda o: [
            sums.sum(0)
            for sums in on_chip_launches.weight_gradients(sizes, o, x, dy, weights, (), biased=False)
            if sums is not None
        ],
        exact_dws,
    )
    return OnChip(forward, input_gradient, gradients)


def _relative(result: Tensor, exact: Tensor) -> float:
    """Relative error; NaN if anything is."""
    return float((result.float() - exact.float()).norm() / exact.float().norm())


used_layers: set[tuple[Signature, str, int, int]] = set()
"""Layers that `measure_at_first_use` has been called for: signature, dtype, GPU, and bit length of the tokens."""


def measure_at_first_use(chain: Chain, x: Tensor) -> None:
    """Measure a layer, unless a similar one was measured on this GPU, and store its times in the user's table.

    Nothing happens where nothing can be measured: in a CUDA graph capture, under a dispatch mode or a function
    transform, or if the kernels do not support the layer.

    Args:
        chain: The chain.
        x: An input on a GPU.

    Shape:
        x is (tokens, d_in).
    """
    signature, index = layouts_of(chain).signature, x.device.index or 0
    if signature is None or x.dtype not in DTYPES or not availability.TRITON or not x.shape[0]:
        return
    layer = signature, dtype_key(x.dtype), index, x.shape[0].bit_length()
    observed = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    if layer in used_layers or observed or torch.cuda.is_current_stream_capturing():
        return
    used_layers.add(layer)
    tokens = 1 << (x.shape[0].bit_length() - 1)
    row = nearest(table(gpu_name(index)), signature, dtype_key(x.dtype), tokens)
    if row is not None and abs(log2(row.tokens / tokens)) <= log2(MAX_SIZE_RATIO):
        return
    label = "chain of " + ", ".join(f"{blocks} × {d_in} × {d_out}" for blocks, d_in, d_out in signature[0])
    try:
        # The random numbers and the modes of the caller stay as they are.
        with torch.random.fork_rng(devices=[index]), torch.inference_mode(False):
            store_rows(gpu_name(index), [measure_layer(chain, label, tokens, x.dtype, x.device)])
    except torch.OutOfMemoryError:
        log.warning("a layer of %d -> %d was not measured: no memory is left for it", chain.d_in, chain.d_out)
