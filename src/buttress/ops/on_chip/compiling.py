"""Compiling a kernel for a GPU when it is first used: NVRTC through cuda.core, with the result cached on disk.

cuda.core is not imported until something is compiled or launched. Nothing here needs a GPU.
"""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from buttress import files
from buttress.errors import ButtressError

log = logging.getLogger(__name__)

LOWEST_CAPABILITY = 8, 0
"""The kernels use bfloat16 matrix instructions, which GPUs have from this compute capability on."""
STANDARD = "c++17"
_DIGEST_BYTES = 32


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether cuda.core, in version 1 at least, and the bindings that it compiles through are installed."""
    try:
        return int(version("cuda-core").split(".")[0]) >= 1 and bool(version("cuda-bindings"))
    except PackageNotFoundError:
        return False


def machine_code(text: str, architecture: str, *, cached: bool = True) -> bytes:
    """Compile CUDA C++ for one architecture.

    Args:
        text: The source.
        architecture: The GPU's, such as "sm_90".
        cached: Whether to read and write the user's cache folder.

    Returns:
        The machine code, a cubin.

    Raises:
        ButtressError: If it cannot be compiled.
    """
    key = hashlib.sha256(f"{architecture} {_compiler()} {STANDARD}\n{text}".encode()).hexdigest()
    path = _cached_file(key) if cached else None
    if path is not None and (code := _read(path)) is not None:
        return code
    code = _compile(text, architecture)
    if path is not None:
        _write(path, code)
    return code


def _cached_file(key: str) -> Path | None:
    """The file of some machine code in the user's cache; None where a user has no home folder."""
    try:
        return files.cache_folder() / "kernels" / f"{key}.cubin"
    except RuntimeError:
        return None


@lru_cache(maxsize=1)
def _compiler() -> str:
    """The version of NVRTC, on which the code depends; "none" if it cannot be loaded, which compiling will say."""
    try:
        from cuda.bindings import nvrtc

        return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    except Exception:  # the errors of loading a library share no class
        return "none"


def _compile(text: str, architecture: str) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions

        program = Program(text, "c++", ProgramOptions(arch=architecture, std=STANDARD))
        code = program.compile("cubin").code
    except Exception as error:  # the errors of cuda.core share no class
        raise ButtressError(
            f"the on-chip kernels could not be compiled for {architecture}; "
            f"if cuda-core is uninstalled, the other kernels are used: {error}"
        ) from error
    assert isinstance(code, bytes)
    return code


def _read(path: Path) -> bytes | None:
    """Machine code from the cache, or None if there is none, or it is not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        with files.replacing(path) as part:
            part.write_bytes(hashlib.sha256(code).digest() + code)
    except OSError as error:
        log.warning("a compiled kernel could not be stored, and will be compiled again: %r", error)
