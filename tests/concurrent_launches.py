"""Cooperative launches next to other kernels on one GPU: a program of its own, so that a deadlock can be ended.

`python concurrent_launches.py two_streams` or `... beside_spinning_kernels` exits with 0 if every result is right.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.fused import kernels, launches
from buttress.ops.tuning import Forward, Tuning

# One thread of each block waits for a number of nanoseconds.
SPIN = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %p;
    .reg .u64 %limit, %start, %now;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %p, %now, %limit;
    @%p bra AGAIN;
    ret;
}
\0"""
MAX_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""


class SpinningKernel:
    """A kernel that takes the shared memory of as many multiprocessors as asked for, and ends by itself."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes torch's context current
        self.shared_bytes = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self.module), SPIN)
        self.call("cuModuleGetFunction", ctypes.byref(self.function), self.module, b"spin")
        self.call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED_BYTES, self.shared_bytes)

    def call(self, name: str, *args: object) -> None:
        status = getattr(self.driver, name)(*args)
        assert status == 0, f"{name}: CUDA error {status}"

    def launch(self, multiprocessors: int, seconds: float, stream: torch.cuda.Stream) -> None:
        nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(nanoseconds), ctypes.c_void_p))
        self.call(
            "cuLaunchKernel", self.function, multiprocessors, 1, 1, 32, 1, 1, self.shared_bytes,
            ctypes.c_void_p(stream.cuda_stream), arguments, None,
        )  # fmt: skip


class Layer:
    """A layer on the fused kernels, with its result when nothing else runs."""

    def __init__(self, width: int, tokens: int, *, learns: bool) -> None:
        self.chain = bt.BTT(rank=2).chain(width, width)
        self.x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        self.factors = [
            (torch.randn(f.shape, device="cuda") * bt.init_std(f)).bfloat16().requires_grad_(learns)
            for f in self.chain.factors
        ]
        self.alone = self()
        exact = ops.apply(self.chain, self.x, self.factors, impl="bmm")
        error = (self.alone - exact).float().norm() / exact.float().norm()
        assert error < 1e-2, f"wrong by {error:.3g} with nothing beside it"

    def __call__(self) -> Tensor:
        return ops.apply(self.chain, self.x, self.factors, impl="triton").detach()

    def check(self, results: list[Tensor]) -> None:
        for y in results:
            assert torch.equal(y, self.alone), "a result differs from the one with nothing beside it"


def count_cooperative_launches() -> list[int]:
    """Sizes of the cooperative grids that are launched from now on."""
    grids: list[int] = []
    launch = launches.Launch.__call__

    def call(self: launches.Launch, programs: int, *args: object) -> None:
        if self.kernel is kernels.forward_pair:
            grids.append(programs)
        launch(self, programs, *args)

    launches.Launch.__call__ = call  # type: ignore[method-assign]
    return grids


def two_streams() -> None:
    """Two layers at once, each on a stream of its own, with the intermediate in a ring and stored as a whole."""
    grids = count_cooperative_launches()
    layers = [Layer(2048, 20_000, learns=False), Layer(1024, 30_000, learns=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    grids.clear()
    for _ in range(20):
        for layer, stream, outputs in zip(layers, streams, results, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(layer())
    torch.cuda.synchronize()
    assert len(grids) == 40, "every call is a cooperative launch"
    for layer, outputs in zip(layers, results, strict=True):
        layer.check(outputs)


def beside_spinning_kernels() -> None:
    """A layer on two streams while a third holds 8 to 32 multiprocessors, as a collective of NCCL would."""
    grids = count_cooperative_launches()
    layer = Layer(2048, 20_000, learns=False)
    spinning = SpinningKernel()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for multiprocessors in (8, 16, 32):
        for spin_first in (True, False):
            results = []
            grids.clear()
            if spin_first:
                spinning.launch(multiprocessors, 0.3, streams[2])
            for stream in streams[:2] * 2:
                with torch.cuda.stream(stream):
                    results.append(layer())
                if not spin_first and len(results) == 1:
                    spinning.launch(multiprocessors, 0.3, streams[2])
            assert len(grids) == 4, "every call is a cooperative launch"
            if spin_first:
                assert not streams[2].query(), "the other kernel was still there"
            torch.cuda.synchronize()
            layer.check(results)


if __name__ == "__main__":
    torch.manual_seed(0)
    with fused.tuned(Tuning(Forward(fuse=True))):
        {"two_streams": two_streams, "beside_spinning_kernels": beside_spinning_kernels}[sys.argv[1]]()
