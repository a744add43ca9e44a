"""The kernels compile for every kind of GPU that they are meant for, and compiled code is read from a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress import files
from buttress.ops.on_chip import compiling
from buttress.ops.on_chip.options import apply_candidates, gradient_candidates
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.on_chip.source import apply_text, gradient_text
from buttress.ops.strides import strided_chain

if not compiling.is_installed():
    pytest.skip("compiling the kernels takes cuda.core", allow_module_level=True)

KERNEL = 'extern "C" __global__ void fill(int* x, int value) { x[threadIdx.x] = value; }'


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_architecture(architecture: str, dtype: torch.dtype) -> None:
    strided = strided_chain(bt.BTT(rank=2).chain(768, 1000))
    assert strided is not None
    sizes = on_chip_sizes(strided)
    assert sizes is not None
    options, gradients = next(apply_candidates(sizes)), next(gradient_candidates(sizes))
    texts = [
        apply_text(sizes, options, dtype, scaled=True, biased=True, transposed=True),
        gradient_text(sizes, gradients, dtype, scaled=True, biased=True),
    ]
    for text in texts:
        assert compiling.machine_code(text, architecture, cached=False).startswith(b"\x7fELF")


def test_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiling.machine_code(KERNEL, "sm_90")
    monkeypatch.setattr(compiling, "_compile", lambda text, architecture: b"compiled again")
    assert compiling.machine_code(KERNEL, "sm_90") == code
    assert compiling.machine_code(KERNEL, "sm_80") == b"compiled again"
    assert compiling.machine_code(KERNEL + "\n", "sm_90") == b"compiled again"
    monkeypatch.setattr(compiling, "_compiler", lambda: "another version")
    assert compiling.machine_code(KERNEL, "sm_90") == b"compiled again"


def test_damaged_code_is_compiled_again() -> None:
    code = compiling.machine_code(KERNEL, "sm_90")
    (path,) = (files.cache_folder() / "kernels").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert compiling.machine_code(KERNEL, "sm_90") == code


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "file"))
    assert compiling.machine_code(KERNEL, "sm_90").startswith(b"\x7fELF")
    assert "will be compiled again" in caplog.text


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user without one."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("BUTTRESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert compiling.machine_code(KERNEL, "sm_90").startswith(b"\x7fELF")


def test_a_text_that_is_wrong() -> None:
    with pytest.raises(bt.ButtressError, match="could not be compiled for sm_90"):
        compiling.machine_code("not C++", "sm_90")
