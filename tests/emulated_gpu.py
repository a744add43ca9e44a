"""Runs the on-chip kernels on the CPU: compiled by g++ with `emulation.h`, which has threads and instructions."""

from __future__ import annotations

import ctypes
import hashlib
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
    "pack": "(u16 *)v[0], (u16 *)v[1], (u16 *)v[2]",
    "apply_pair": "(u16 *)v[0], (u16 *)v[1], (float *)v[2], (float *)v[3], (u16 *)v[4], (u16 *)v[5], v[6]",
    "weight_gradients": "(u16 *)v[0], (u16 *)v[1], (u16 *)v[2], (u16 *)v[3], (float *)v[4], (float *)v[5], "
    "(float *)v[6], (float *)v[7], (float *)v[8], v[9], v[10]",
}
"""The arguments of each kernel, from numbers of eight bytes."""
seeds = count()
"""In which order warps run: different in each launch."""


class EmulatedKernel:
    """Stands for a kernel that a GPU would run, with the same interface."""

    def __init__(self, text: str, name: str, shared_bytes: int, folder: Path) -> None:
        self.run = _library(text, name, str(folder))
        self.shared_bytes = shared_bytes

    def launch(self, programs: int, threads: int, *arguments: Tensor | int | None) -> None:
        values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
        numbers = (ctypes.c_longlong * len(values))(*values)
        self.run(programs, threads, self.shared_bytes, next(seeds), numbers)


@lru_cache(maxsize=64)
def _library(text: str, name: str, folder: str) -> ctypes._CFuncPtr:
    """Compile a kernel in a folder, and load it."""
    assert COMPILER is not None
    entry = (
        'extern "C" void run(int programs, int threads, int shared_bytes, unsigned seed, const long long *v) {\n'
        f"  emulation::launch(programs, threads, shared_bytes, seed, [=] {{ {name}({KERNELS[name]}); }});\n}}\n"
    )
    path = Path(folder) / hashlib.sha256((text + entry).encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(text + entry, encoding="utf-8")
    emulation = f'-DEMULATION="{Path(__file__).with_name("emulation.h")}"'
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", emulation, "-o", f"{path}.so", f"{path}.cpp"]
    subprocess.run(command, check=True, timeout=120)
    function: ctypes._CFuncPtr = ctypes.CDLL(f"{path}.so").run
    return function


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Launch the on-chip kernels on the CPU, as on a GPU with three multiprocessors."""
    if COMPILER is None:
        pytest.skip("running the kernels on a CPU takes g++")

    def kernel(text: str, name: str, shared_bytes: int, device: object) -> EmulatedKernel:
        return EmulatedKernel(text, name, shared_bytes, folder)

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
