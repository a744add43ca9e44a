"""Launching compiled kernels: offset tables, limits of the GPU, and tile sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from buttress.errors import ButtressError
from buttress.ops.captures import forbid_in_capture
from buttress.ops.fused.availability import INTERPRETED
from buttress.ops.strides import StridedChain, StridedFactor, Strides

MAX_SHARED_BYTES, RESERVED_SHARED_BYTES = 200 << 10, 24 << 10
"""Shared memory that a program may use, and how much of a smaller GPU's limit is left to the compiler."""

P = ParamSpec("P")
R = TypeVar("R")


class OversizeKernelError(ButtressError):
    """A kernel needs more shared memory or threads than the GPU has."""


class Launch:
    """A kernel with all constants that it is compiled for, launched without inspecting its arguments again.

    A compiled kernel is specialized for dtypes, for numbers that are multiples of 16 and for numbers of 2^31 and more,
    which have another type, so launches must be cached by these. It also assumes that tensors start at multiples of 16
    bytes. If one does not, triton inspects the arguments.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = constants
        """Compile-time arguments by name, with the launch options num_warps and num_stages."""
        self.compiled: Any = None
        self.constant_values: list[Any] = []
        self.tensor_count = 0
        """Number of tensors among the arguments; they precede the numbers."""
        self.compiled_alignments: set[tuple[bool, ...]] = set()
        """For which of the tensors not being aligned triton has compiled the kernel."""

    def __call__(self, programs: int, *args: Any) -> None:
        if not self.tensor_count:
            self.tensor_count = sum(isinstance(a, Tensor) for a in args)
        if INTERPRETED or any(a.data_ptr() % 16 for a in args[: self.tensor_count]):
            self.launch_inspected(programs, *args)
            return
        if self.compiled is None:
            self.compile(*args)
        self.compiled[(programs, 1, 1)](*args, *self.constant_values)

    def launch_inspected(self, programs: int, *args: Any) -> None:
        """Launch the kernel for tensors that start anywhere, which takes more host time."""
        alignments = tuple(a.data_ptr() % 16 == 0 for a in args[: self.tensor_count])
        if alignments not in self.compiled_alignments:
            forbid_in_capture()
        self.kernel[(programs,)](*args, **self.constants)
        self.compiled_alignments.add(alignments)

    def compile(self, *args: Any) -> Any:
        """Compile the kernel for arguments like these.

        Raises:
            OversizeKernelError: If the GPU is too small for the kernel.
            ButtressError: Inside a CUDA graph capture.
        """
        from triton.runtime.errors import OutOfResources

        forbid_in_capture()
        self.constant_values = [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
        compiled = self.kernel.warmup(*args, grid=(1,), **self.constants)
        try:
            compiled._init_handles()
        except OutOfResources as error:
            raise OversizeKernelError(
                f"this GPU is too small for the fused kernels of this layer ({error.name}: {error.required:,} needed, "
                f"{error.limit:,} there): bt.calibrate(model, tokens) makes such layers use torch.bmm"
            ) from None
        self.compiled = compiled
        return compiled


class TensorSpec(NamedTuple):
    """Properties that all tensors of one pass share: device, dtype, and the precision of float32 matmuls."""

    device: torch.device
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        dtype = x.dtype
        exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        return cls(x.device, dtype, "ieee" if exact else "tf32")


def on_device_of_x(
    function: Callable[Concatenate[StridedChain, Tensor, P], R],
) -> Callable[Concatenate[StridedChain, Tensor, P], R]:
    """Make the device of the second argument current, because triton launches on the current device."""

    @wraps(function)
    def run(strided: StridedChain, x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return function(strided, x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(strided, x, *args, **kwargs)

    return run


@lru_cache(maxsize=4096)
def offset_table(factor: StridedFactor, device: torch.device, transposed: bool = False) -> Tensor:
    """For each block (source offset, target offset, slice), offsets in units of their alignment; int32 [blocks, 3]."""
    forbid_in_capture()
    order = (1, 0, 2) if transposed else (0, 1, 2)
    units = (*factor.alignment, 1)
    rows = [[offsets[i] // units[i] for i in order] for offsets in factor.block_offsets]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def kernel_strides(factor: StridedFactor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of the source and of the target as the kernels take them."""

    def as_constants(strides: Strides, alignment: int) -> tuple[int, ...]:
        return strides.inner_size, strides.outer_stride, strides.inner_stride, alignment

    source_alignment, target_alignment = factor.alignment
    return as_constants(factor.source, source_alignment), as_constants(factor.target, target_alignment)


def cdiv(n: int, divisor: int) -> int:
    """n / divisor, rounded up. triton.cdiv would take as long as a launch."""
    return -(-n // divisor)


def tile_size(n: int, limit: int) -> int:
    """The smallest power of two >= n, but at least 16, which tl.dot needs, and at most `limit`."""
    return min(max(1 << (n - 1).bit_length(), 16), limit)


@dataclass(frozen=True)
class DeviceLimits:
    """Resources of a GPU.

    Args:
        multiprocessors: Number of multiprocessors.
        registers: Registers of each.
        shared_bytes: Shared memory of each.
        threads: Resident threads of each.
        program_shared_bytes: Shared memory that one program may use.
    """

    multiprocessors: int = 1
    registers: int = 1 << 16
    shared_bytes: int = 1 << 18
    threads: int = 2048
    program_shared_bytes: int = MAX_SHARED_BYTES


@lru_cache(maxsize=16)
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device; the defaults if it is not a GPU."""
    if device.type != "cuda":
        return DeviceLimits()
    properties: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        properties.multi_processor_count,
        properties.regs_per_multiprocessor,
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
        min(MAX_SHARED_BYTES, properties.shared_memory_per_block_optin - RESERVED_SHARED_BYTES),
    )


def fitting_tile(device: torch.device, size: int, shared_bytes: Callable[[int], int]) -> int:
    """The size of a tile, halved until a program with one stage fits a small GPU's shared memory, but at least 16.

    Args:
        device: The GPU.
        size: A power of two.
        shared_bytes: Shared memory of a program whose tile has a given size.

    Returns:
        A power of two. On an H200 it is `size` for all launch options that are measured.
    """
    while size > 16 and shared_bytes(size) > device_limits(device).program_shared_bytes:
        size //= 2
    return size


def stage_count(device: torch.device, stages: int, resident: int, tile: int, scratch: int) -> int:
    """Tiles in flight at a time: at most `stages`, and no more than shared memory holds; other sizes are in bytes."""
    return max(1, min(stages, (device_limits(device).program_shared_bytes - resident - scratch) // tile))


def lane_count(programs: int, target: int, tiles: int) -> int:
    """Number of lanes among which the tiles are distributed, for about `target` programs in total."""
    return max(1, min(target // programs, tiles))
