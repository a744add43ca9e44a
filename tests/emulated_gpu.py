"""Runs the on-chip kernels on the CPU: compiled by g++ with `emulation.h`, which has threads and instructions."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import shutil
import subprocess
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import MAX_SHARED_BYTES

COMPILER = shutil.which("g++")
MULTIPROCESSORS = 3
GUARD = 64
"""Numbers before and behind each new tensor that no kernel may write to."""
KERNELS = {
    "arrange_weights": "(u16 *)v[0], (u16 *)v[1], (u16 *)v[2]",
    "apply_pair": "(u16 *)v[0], (u16 *)v[1], (float *)v[2], (float *)v[3], (u16 *)v[4], (u16 *)v[5], v[6]",
    "weight_gradients": "(u16 *)v[0], (u16 *)v[1], (u16 *)v[2], (u16 *)v[3], (float *)v[4], (float *)v[5], "
    "(float *)v[6], (float *)v[7], (float *)v[8], v[9], v[10]",
}
"""The arguments of each kernel, from numbers of eight bytes."""
INPUTS = {"arrange_weights": 2, "apply_pair": 2, "weight_gradients": 4}
"""How many arguments of each kernel are read only, from the first on."""
PAGE_BYTES = mmap.PAGESIZE
launched: list[str] = []
"""Names of the kernels in the order of their launches."""
seeds = count()
"""In which order warps run: different in each launch."""


class EmulatedKernel:
    """Stands for a kernel that a GPU would run, with the same interface."""

    def __init__(self, text: str, name: str, shared_bytes: int, folder: Path) -> None:
        self.run = getattr(_library(text, str(folder)), f"run_{name}")
        self.name, self.shared_bytes = name, shared_bytes

    def launch(self, programs: int, threads: int, *arguments: Tensor | int | None) -> None:
        launched.append(self.name)
        fenced = [Fenced(t) for t in arguments[: INPUTS[self.name]] if isinstance(t, Tensor)]
        others = (a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments[len(fenced) :])
        values = [*(f.address for f in fenced), *others]
        numbers = (ctypes.c_longlong * len(values))(*values)
        self.run(programs, threads, self.shared_bytes, next(seeds), numbers)
        for f in fenced:
            f.close()


class Fenced:
    """A copy of a tensor that ends where no memory can be read: a kernel that reads on crashes."""

    def __init__(self, t: Tensor) -> None:
        data = t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        self.size = -(-max(len(data), 1) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        start = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
        self.start = start
        self.address = start + self.size - PAGE_BYTES - len(data)
        ctypes.memmove(self.address, data, len(data))
        assert not _libc.mprotect(start + self.size - PAGE_BYTES, PAGE_BYTES, 0)

    def close(self) -> None:
        assert not _libc.munmap(self.start, self.size)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@lru_cache(maxsize=64)
def _library(text: str, folder: str) -> ctypes.CDLL:
    """Compile the kernels of a text in a folder, and load them."""
    assert COMPILER is not None
    entries = "".join(
        f'extern "C" void run_{name}(int programs, int threads, int shared_bytes, unsigned seed, const long long *v) {{'
        f"emulation::launch(programs, threads, shared_bytes, seed, [=] {{ {name}({arguments}); }});}}\n"
        for name, arguments in KERNELS.items()
        if f" {name}(const" in text or f"\n{name}(const" in text
    )
    path = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(text + entries, encoding="utf-8")
    emulation = f'-DEMULATION="{Path(__file__).with_name("emulation.h")}"'
    # Accesses that a GPU refuses because they are not aligned, and numbers that overflow, end the process.
    checks = ["-fsanitize=alignment,signed-integer-overflow,bounds", "-fsanitize-undefined-trap-on-error"]
    options = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *checks, emulation]
    command = [COMPILER, *options, "-o", f"{path}.so", f"{path}.cpp"]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(f"{path}.so")


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Launch the on-chip kernels on the CPU, as on a GPU with three multiprocessors."""
    if COMPILER is None:
        pytest.skip("running the kernels on a CPU takes g++")

    def kernel(text: str, name: str, shared_bytes: int, device: object) -> EmulatedKernel:
        return EmulatedKernel(text, name, shared_bytes, folder)

    launches.apply_plan.cache_clear()
    launched.clear()
    monkeypatch.setattr(launches, "_kernel", kernel)
    monkeypatch.setattr(launches, "_multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(launches, "can_launch", lambda dtype, device: dtype in launches.DTYPES)
    monkeypatch.setattr(launches, "shared_limit", lambda device: MAX_SHARED_BYTES)


def guard_new_buffers(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make entries of new tensors NaN, and put NaN around them; `check_guards` takes the result."""
    new_empty = Tensor.new_empty
    buffers: list[Tensor] = []

    def guarded(self: Tensor, *size: Any, **kwargs: Any) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if not kwargs.get("dtype", self.dtype).is_floating_point or not shape.numel() or type(self) is not Tensor:
            return new_empty(self, shape, **kwargs)
        buffer = new_empty(self, shape.numel() + 2 * GUARD, **kwargs).fill_(float("nan"))
        buffers.append(buffer)
        return buffer[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    return buffers


def check_guards(buffers: list[Tensor]) -> None:
    """Check that nothing was written around the tensors of `guard_new_buffers`."""
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all()
        assert buffer[-GUARD:].isnan().all()
