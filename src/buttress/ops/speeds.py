"""The speed table: how fast each implementation ran on each GPU, and from it which implementation to use.

The package contains a table for the GPU on which it was measured; `advise` and `calibrate` add rows for other GPUs and
sizes, stored as JSON in the user's cache. Layers without a similar measured one run on torch.bmm.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import inf, log2
from pathlib import Path
from typing import Any

import torch

from buttress import files
from buttress.ops.strides import Signature
from buttress.ops.tuning import Backward, Forward, Tuning

MANY_TOKENS = 1 << 15
"""The number of tokens assumed where a compiler leaves it open."""
MAX_SIZE_RATIO = 4.0
"""A measured layer is similar to another if none of their sizes differ by more than this factor."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one layer. Field names are those of the speed tables.

    Args:
        forward: Forward pass, replayed from a CUDA graph.
        both: Forward and backward pass, replayed from a CUDA graph.
        forward_eager: Forward pass, launched by Python.
        both_eager: Forward and backward pass, launched by Python.
    """

    forward: float
    both: float
    forward_eager: float
    both_eager: float

    def of(self, *, training: bool, launched: bool) -> float:
        """One of the four times.

        Args:
            training: Forward and backward pass rather than the forward pass alone.
            launched: Whether a compiler or a CUDA graph does the launching.

        Returns:
            Milliseconds.
        """
        if training:
            return self.both if launched else self.both_eager
        return self.forward if launched else self.forward_eager


@dataclass(frozen=True)
class Row:
    """One layer on one GPU. Field names are those of the speed tables.

    Args:
        structure: The structure as text.
        d_in: Input features.
        d_out: Output features.
        tokens: Tokens in the batch.
        dtype: As `dtype_key` names it.
        signature: Sizes of the chain for the kernels; None where they do not take it.
        linear: Times of nn.Linear of the same sizes.
        times: Times by implementation.
        tuning: The fastest launch options of the kernels, where they were measured.
    """

    structure: str
    d_in: int
    d_out: int
    tokens: int
    dtype: str
    signature: Signature | None
    linear: Times
    times: Mapping[str, Times]
    tuning: Tuning | None = None

    @property
    def best(self) -> str:
        """The fastest implementation for a training step under a compiler."""
        return min(self.times, key=lambda name: self.times[name].both)

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        """What a row of a table is identified by."""
        return self.structure, self.d_in, self.d_out, self.tokens, self.dtype

    def as_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `as_json`; raises ValueError, KeyError or TypeError for other data."""
        tuning, signature = data["tuning"], data["signature"]
        if signature:
            sizes, scattered = signature
            signature = tuple((a, b, c) for a, b, c in sizes), bool(scattered)
            if not all(isinstance(n, int) and n > 0 for factor in signature[0] for n in factor):
                raise ValueError(f"sizes must be positive: {sizes}")
        if "bmm" not in data["times"]:
            raise KeyError("bmm")
        return cls(
            **{k: data[k] for k in ("structure", "d_in", "d_out", "tokens", "dtype")},
            signature=signature,
            linear=Times(**data["linear"]),
            times={name: Times(**t) for name, t in data["times"].items()},
            tuning=tuning and Tuning(Forward(**tuning["forward"]), Backward(**tuning["backward"])),
        )


def cache_folder() -> Path:
    """Where the user's speed tables are stored: $BUTTRESS_CACHE, or `buttress` in the user's cache folder."""
    if folder := os.environ.get("BUTTRESS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "buttress"


@lru_cache(maxsize=8)
def table(device: str) -> tuple[Row, ...]:
    """A GPU's speed table: the rows that the package contains, and the user's own, which replace them.

    Args:
        device: Name of the GPU, as torch.cuda.get_device_name gives it.

    Returns:
        The rows; none where nothing was measured. A file that is not a table is ignored with a warning.
    """
    name = _file_name(device)
    shipped = _read_or_warn(lambda: resources.files("buttress.ops").joinpath("tables", name))
    own = _read_or_warn(lambda: cache_folder() / name)
    return tuple({row.key: row for row in (*shipped, *own, *unwritten_rows.get(device, ()))}.values())


unwritten_rows: dict[str, list[Row]] = {}
"""Rows by GPU that could not be written to the user's cache; they count while this process lives."""


def store_rows(device: str, rows: Iterable[Row]) -> None:
    """Add rows to the user's speed table for a GPU, in one step; later rows replace earlier ones of the same layer.

    Several processes may do so at once. Where nothing can be written, the rows count in this process alone.

    Args:
        device: Name of the GPU.
        rows: The rows to add.
    """
    new_rows = list(rows)
    try:
        path = cache_folder() / _file_name(device)
        with files.locked(path.with_suffix(".lock"), wait=True):
            old_rows, sound = _read_if_sound(path)
            if not sound:
                path.replace(path.with_suffix(".bad"))
            write(path, device, {row.key: row for row in (*old_rows, *new_rows)}.values())
    except (OSError, RuntimeError) as error:
        warnings.warn(f"measured speeds could not be stored, and count in this process alone: {error!r}", stacklevel=2)
        unwritten_rows.setdefault(device, []).extend(new_rows)
    clear_caches()


def write(path: Path, device: str, rows: Iterable[Row]) -> None:
    """Write one table as a file, replaced in one step.

    Args:
        path: The file.
        device: Name of the GPU.
        rows: The rows.
    """
    head = {"device": device, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
    files.write_text(path, f'{{{json.dumps(head)[1:-1]}, "rows": [\n{lines}\n]}}\n')


def clear_caches() -> None:
    """Forget what was read from tables and decided from them, so that they are read again."""
    for cached in (table, prefers_kernels_cached, measured_tuning):
        cached.cache_clear()


def _file_name(device: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return f"{slug}.json"


def _read(file: Path | Traversable) -> list[Row]:
    """The rows of a table; none where there is no file."""
    if not file.is_file():
        return []
    return [Row.from_json(row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _read_or_warn(locate: Callable[[], Path | Traversable]) -> list[Row]:
    """The rows of a table; none, with a warning, where it cannot be read: speed is not worth a crash."""
    source: object = "the user's cache"
    try:
        source = file = locate()
        return _read(file)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{source} is not a table of measured speeds and is ignored: {error!r}", stacklevel=3)
        return []


def _read_if_sound(path: Path) -> tuple[list[Row], bool]:
    """The rows of a file, and whether it was a table."""
    try:
        return _read(path), True
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], False


@lru_cache(maxsize=16)
def gpu_name(index: int) -> str:
    """Name of a GPU of this machine."""
    return torch.cuda.get_device_name(index)


def nearest(rows: Iterable[Row], signature: Signature, dtype: str, tokens: int | None) -> Row | None:
    """The measured layer that is most similar to this one.

    Args:
        rows: Measured layers.
        signature: Sizes of the chain; see `StridedChain.signature`.
        dtype: As `dtype_key` names it.
        tokens: Tokens in the batch; None to leave them out of the comparison.

    Returns:
        The row with the smallest sum of log-ratios, or None where no row is within `MAX_SIZE_RATIO` in every size.
    """
    best, least = None, inf
    for row in rows:
        if row.signature is None or row.dtype != dtype:
            continue
        (row_sizes, row_scattered), (sizes, scattered) = row.signature, signature
        if len(row_sizes) != len(sizes) or row_scattered != scattered:
            continue
        distances = [abs(log2(a / b)) for a, b in zip(sum(row_sizes, ()), sum(sizes, ()), strict=True)]
        if max(distances) > log2(MAX_SIZE_RATIO):
            continue
        distance = sum(distances) + (0.0 if tokens is None else abs(log2(row.tokens / max(tokens, 1))))
        if distance < least:
            best, least = row, distance
    return best


def dtype_key(dtype: torch.dtype) -> str:
    """A dtype as the tables name it: "tf32" for float32 where its matrix products are computed in tf32."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return str(dtype)


def prefers_kernels(
    signature: Signature, dtype: torch.dtype, index: int, tokens: int, training: bool, launched: bool
) -> bool:
    """Whether the fused kernels are faster than torch.bmm for such a layer, as far as anything similar was measured.

    Args:
        signature: Sizes of the chain.
        dtype: dtype of the layer.
        index: Index of the GPU.
        tokens: Tokens in the batch.
        training: Whether a backward pass follows.
        launched: Whether a compiler or a CUDA graph does the launching.

    Returns:
        True for the kernels, False for torch.bmm.
    """
    return prefers_kernels_cached(signature, dtype_key(dtype), index, max(tokens, 1).bit_length(), training, launched)


# A compiler calls it once and does not trace it: torch.compiler.assume_constant_result, without importing it.
prefers_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def prefers_kernels_cached(
    signature: Signature, dtype: str, index: int, token_bits: int, training: bool, launched: bool
) -> bool:
    """As `prefers_kernels`, with the tokens rounded down to a power of two, given by its bit length."""
    row = nearest(table(gpu_name(index)), signature, dtype, 1 << (token_bits - 1))
    if row is None or "triton" not in row.times:
        return False
    ms = {name: times.of(training=training, launched=launched) for name, times in row.times.items()}
    return ms["triton"] < ms["bmm"]


@lru_cache(maxsize=4096)
def measured_tuning(signature: Signature, dtype: str, index: int) -> Tuning | None:
    """The fastest launch options for the most similar measured layer, or None.

    Args:
        signature: Sizes of the chain.
        dtype: As `dtype_key` names it.
        index: Index of the GPU.

    Returns:
        The launch options, if anything similar was measured on this GPU.
    """
    row = nearest((r for r in table(gpu_name(index)) if r.tuning), signature, dtype, None)
    return None if row is None else row.tuning
