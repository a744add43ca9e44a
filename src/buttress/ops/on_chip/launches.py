"""Launching the on-chip kernels. cuda.core is not imported until a kernel runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from buttress.errors import ButtressError
from buttress.ops.captures import forbid_in_capture
from buttress.ops.on_chip import source
from buttress.ops.on_chip.compiling import LOWEST_CAPABILITY, is_installed, machine_code
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, ceil_div
from buttress.ops.on_chip.sizes import PairSizes

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels support."""
ARRANGING_THREADS, NUMBERS_PER_THREAD = 256, 8
"""Threads of a program that arranges weights, and about how many numbers each of them copies."""


def can_launch(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can run on tensors: their dtype, their GPU, and the packages of buttress[cuda]."""
    return device.type == "cuda" and dtype in DTYPES and is_installed() and _is_capable(device)


@lru_cache(maxsize=16)
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY


@lru_cache(maxsize=16)
def shared_limit(device: torch.device) -> int:
    """Shared memory of a program, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def apply(
    sizes: PairSizes, options: ApplyOptions, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor],
    bias: Tensor | None, *, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Apply a pair of factors, or with `transposed` their transposes; the intermediate stays on the chip.

    Args:
        sizes: Sizes of the pair, from x to the result.
        options: Launch options.
        x: The input, contiguous like all other tensors, and aligned to 16 bytes.
        weights: The factors in order of application; with `transposed`, the second before the first.
        scales: One float32 multiplier for each of them, or none at all.
        bias: Added to the result.
        transposed: Whether the result is the gradient of the input of these factors.

    Shape:
        (tokens, sizes.d_in) -> (tokens, sizes.d_out).

    Returns:
        The result.
    """
    tokens = x.shape[0]
    y = x.new_empty(tokens, sizes.d_out)
    if not tokens:
        return y
    plan = apply_plan(sizes, options, x.dtype, x.device, bool(scales), bias is not None, transposed)
    arranged = x.new_empty(plan.arranged_numbers)
    plan.arrange.launch(plan.arranging_programs, ARRANGING_THREADS, *weights, arranged)
    programs = min(ceil_div(tokens, 16 * options.tiles), options.programs * _multiprocessors(x.device))
    plan.apply.launch(programs, 32 * options.warps, x, arranged, *(scales or (None, None)), bias, y, tokens)
    return y


def weight_gradients(
    sizes: PairSizes, options: GradientOptions, x: Tensor, dy: Tensor, weights: Sequence[Tensor],
    scales: Sequence[Tensor], *, biased: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute sums of which the gradients consist: of both scaled factors, and with `biased` of the bias.

    Tokens are divided into lanes. Adding up the sums of all lanes in order gives a deterministic result.

    Args:
        sizes: Sizes of the pair.
        options: Launch options.
        x: The input, contiguous like all other tensors, and aligned to 16 bytes.
        dy: The gradient of the result, aligned in the same way.
        weights: The factors in order of application.
        scales: One float32 multiplier for each of them, or none at all.
        biased: Whether the gradient of the bias is wanted.

    Shape:
        x (tokens, sizes.d_in), dy (tokens, sizes.d_out) -> (lanes, *shape) for the shape of each factor, and
        (lanes, sizes.d_out).

    Returns:
        The sums of each lane for the factors, and for the bias or None, all in float32.
    """
    tokens = x.shape[0]
    shapes = [tuple(w.shape) for w in weights] + ([(sizes.d_out,)] if biased else [])
    rectangles = options.rectangles(sizes)
    room = options.programs * _multiprocessors(x.device)
    lanes = max(1, min(room // rectangles, ceil_div(tokens, 16 * options.tiles)))
    sums = [x.new_empty(lanes, *shape, dtype=torch.float32) for shape in shapes]
    text = source.gradient_text(sizes, options, x.dtype, scaled=bool(scales), biased=biased)
    kernel = _kernel(text, source.GRADIENTS, options.shared_bytes(sizes), x.device)
    kernel.launch(
        rectangles * lanes, 32 * options.warps, x, dy, *weights, *(scales or (None, None)), *sums,
        *(() if biased else (None,)), lanes, tokens,
    )  # fmt: skip
    first, second, *bias = sums
    return first, second, bias[0] if bias else None


class ApplyPlan(NamedTuple):
    """The parts of applying a pair that do not depend on the number of tokens."""

    arrange: Kernel
    apply: Kernel
    arranged_numbers: int
    arranging_programs: int


@lru_cache(maxsize=1024)
def apply_plan(
    sizes: PairSizes, options: ApplyOptions, dtype: torch.dtype, device: torch.device, scaled: bool, biased: bool,
    transposed: bool,
) -> ApplyPlan:  # fmt: skip
    """The plan for a layer, kept for its next call; arguments as for `apply` and `source.apply_text`."""
    text = source.apply_text(sizes, options, dtype, scaled=scaled, biased=biased, transposed=transposed)
    numbers = options.arranged_numbers(sizes)
    return ApplyPlan(
        _kernel(text, source.ARRANGE, 0, device),
        _kernel(text, source.APPLY, options.shared_bytes(sizes), device),
        numbers,
        ceil_div(numbers, ARRANGING_THREADS * NUMBERS_PER_THREAD),
    )


class Kernel:
    """A loaded kernel.

    Args:
        code: Machine code for the GPU, or the loaded code.
        name: Name of the kernel in it.
        shared_bytes: Shared memory of a program.
        device: The GPU.
    """

    def __init__(self, code: Any, name: str, shared_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        try:
            # Machine code is loaded when its first kernel is looked up.
            loaded = ObjectCode.from_cubin(code) if isinstance(code, bytes) else code
            self.kernel = loaded.get_kernel(name)
        except Exception as error:  # the errors of cuda.core share no class
            raise ButtressError(
                f"{device} does not load {name}, an on-chip kernel compiled for {architecture_of(device)}: {error}; "
                "without cuda-core, the other kernels are used"
            ) from error
        self.name = name
        self.shared_bytes = shared_bytes
        self.configs: dict[tuple[int, int, int | None], Any] = {}
        # A launch may ask for more than 48 KiB only if the kernel allows it.
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(limit, shared_bytes, self.kernel.handle, device.index or 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise ButtressError(
                f"{name} needs {shared_bytes:,} bytes of shared memory, which {device} refused: {status}"
            )

    def launch(self, programs: int, threads: int, *arguments: Tensor | int | None, cluster: int | None = None) -> None:
        """Launch the kernel on the current stream.

        Args:
            programs: Number of programs, a multiple of `cluster`.
            threads: Threads of a program.
            arguments: A tensor stands for its address, None for a null pointer; numbers have eight bytes.
            cluster: Programs in a cluster, if there are clusters.
        """
        from cuda.core import launch

        _make_context_current()
        values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
        try:
            launch(current_stream(), self.config(programs, threads, cluster), self.kernel, *values)
        except Exception as error:  # the errors of cuda.core share no class
            raise ButtressError(f"{self.name} could not be launched with {programs} programs: {error}") from error

    def config(self, programs: int, threads: int, cluster: int | None = None) -> Any:
        """What a launch with these numbers asks for."""
        from cuda.core import LaunchConfig

        key = programs, threads, cluster
        if key not in self.configs:
            grid = programs // (cluster or 1)  # in clusters
            self.configs[key] = LaunchConfig(grid=grid, cluster=cluster, block=threads, shmem_size=self.shared_bytes)
        return self.configs[key]


_thread = threading.local()


def _make_context_current() -> None:
    """Make torch's context that of this thread: a new thread has none until it runs a kernel of torch's own."""
    index = torch.cuda.current_device()
    if getattr(_thread, "device", None) != index:
        from cuda.core import Device

        Device(index).set_current()
        _thread.device = index


@lru_cache(maxsize=1024)
def _kernel(text: str, name: str, shared_bytes: int, device: torch.device) -> Kernel:
    """Compile and load a kernel, once for each device."""
    return Kernel(_code(text, device), name, shared_bytes, device)


@lru_cache(maxsize=1024)
def _code(text: str, device: torch.device) -> Any:
    """Compile the kernels of a text, once for each device; `Kernel` loads them."""
    from cuda.core import ObjectCode

    forbid_in_capture()
    code = machine_code(text, architecture_of(device))
    _make_context_current()
    return ObjectCode.from_cubin(code)


def architecture_of(device: torch.device) -> str:
    """The architecture to compile for, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def current_stream() -> Any:
    """torch's current stream, for cuda.core."""
    return _stream(torch.cuda.current_stream().cuda_stream)


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    """A stream of torch. The default stream has the handle 0 there, and 1 where it must not be confused with none."""
    from cuda.core import Stream

    return Stream.from_handle(handle or 1)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
