"""Speed tables: the measured times of each implementation on a GPU, which decide which implementation is used.

The package contains tables for some GPUs. `advise` and `calibrate` add rows for other GPUs and sizes, stored as JSON in
the user's cache. A layer without a similar measured one uses torch.bmm. On a GPU without any measured speeds this is
said once.
"""

from __future__ import annotations

import json
import logging
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
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, OnChip
from buttress.ops.strides import Signature
from buttress.ops.tuning import Backward, Forward, Tuning

log = logging.getLogger(__name__)

MEASURES_ON_FIRST_USE = os.environ.get("BUTTRESS_CALIBRATE", "").lower() in ("1", "true", "yes", "on")
"""Whether a layer without a similar measured one is measured when it is first used on a GPU: $BUTTRESS_CALIBRATE."""
MANY_TOKENS = 1 << 15
"""The number of tokens assumed where a compiler leaves it open."""
MAX_SIZE_RATIO = 4.0
"""A measured layer is similar to another if none of their sizes differ by more than this factor."""


@dataclass(frozen=True)
class Times:
    """Times of one layer in milliseconds. Field names are those of the speed tables.

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

    def of(self, *, training: bool, compiled: bool) -> float:
        """One of the four times.

        Args:
            training: Whether to return the time of forward and backward pass rather than of the forward pass alone.
            compiled: Whether a compiled function or a CUDA graph launches the kernels, rather than Python.

        Returns:
            Milliseconds.
        """
        if training:
            return self.both if compiled else self.both_eager
        return self.forward if compiled else self.forward_eager


@dataclass(frozen=True)
class Row:
    """Measured times of one layer on one GPU. Field names are those of the speed tables.

    Args:
        structure: The structure as text.
        d_in: Input features.
        d_out: Output features.
        tokens: Tokens in the batch.
        dtype: Name of the dtype, from `dtype_key`.
        signature: Sizes of the chain for the kernels; None where they do not support it.
        linear: Times of nn.Linear of the same sizes.
        times: Times by implementation.
        tuning: The fastest launch options of the kernels, where they were measured.
        spread: The largest interquartile range of the times, divided by their median.
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
    spread: float = 0.0

    @property
    def best(self) -> str:
        """The fastest implementation for a training step under a compiler."""
        return min(self.times, key=lambda name: self.times[name].both)

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        """The fields that identify a row of a table."""
        return self.structure, self.d_in, self.d_out, self.tokens, self.dtype

    def as_json(self) -> dict[str, Any]:
        """The row as plain data, in the form of version 0.1 without what that could not measure."""
        data = asdict(self)
        if not self.spread:
            del data["spread"]
        if self.tuning and not self.tuning.on_chip:
            del data["tuning"]["on_chip"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `as_json`.

        Args:
            data: The row as plain data.

        Returns:
            The row.

        Raises:
            ValueError, KeyError, TypeError: If the data is not a row.
        """
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
            tuning=tuning and _tuning_from_json(tuning),
            spread=float(data.get("spread", 0.0)),  # not in tables of version 0.1
        )


@lru_cache(maxsize=8)
def table(device: str) -> tuple[Row, ...]:
    """A GPU's speed table: the rows of the package, and those of the user's cache, which take precedence.

    Args:
        device: Name of the GPU, from torch.cuda.get_device_name.

    Returns:
        The rows; empty if nothing was measured. A file that is not a table is ignored with a warning.
    """
    name = _file_name(device)
    shipped = _read_or_warn(lambda: resources.files("buttress.ops").joinpath("tables", name))
    own = _read_or_warn(lambda: files.cache_folder() / name)
    return tuple({row.key: row for row in (*shipped, *own, *unwritten_rows.get(device, ()))}.values())


MAX_OPTION = 1 << 20
"""Largest number in the launch options of a table."""

unwritten_rows: dict[str, list[Row]] = {}
"""Rows by GPU that could not be written to the user's cache; they are used by this process only."""


def _tuning_from_json(data: Mapping[str, Any]) -> Tuning:
    on_chip = data.get("on_chip")  # not in tables of version 0.1
    if on_chip is not None:
        types = {"forward": ApplyOptions, "input_gradient": ApplyOptions, "weight_gradients": GradientOptions}
        on_chip = OnChip(
            **{name: None if values is None else types[name](**values) for name, values in on_chip.items()}
        )
    tuning = Tuning(Forward(**data["forward"]), Backward(**data["backward"]), on_chip)
    for options in (tuning.forward, tuning.backward, *(() if on_chip is None else vars(on_chip).values())):
        for name, value in ({} if options is None else vars(options)).items():
            if not isinstance(value, bool) and not (isinstance(value, int) and 0 < value <= MAX_OPTION):
                raise ValueError(f"the launch option {name} must be a whole number from 1 to {MAX_OPTION}: {value!r}")
    return tuning


def store_rows(device: str, rows: Iterable[Row]) -> None:
    """Add rows to the user's speed table for a GPU, in one step; later rows replace earlier ones of the same layer.

    Several processes may do so at the same time. If nothing can be written, the rows are used by this process only.

    Args:
        device: Name of the GPU.
        rows: The rows to add.
    """
    new_rows = list(rows)
    try:
        path = files.cache_folder() / _file_name(device)
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
    """Clear the caches of tables and of decisions based on them, so that the tables are read again."""
    for cached in (table, prefers_kernels_cached, measured_tuning):
        cached.cache_clear()


@lru_cache(maxsize=16)
def report_unmeasured_gpu(name: str) -> None:
    """Say, once for each GPU, which implementation is used where nothing was measured, and how to measure.

    Args:
        name: Name of the GPU.
    """
    log.warning(
        "no speeds were measured on %s: structured layers use torch.bmm. bt.calibrate(model, tokens) measures "
        "the fused kernels and stores which is faster; BUTTRESS_CALIBRATE=1 measures each layer at its first use",
        name,
    )


def _file_name(device: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return f"{slug}.json"


def _read(file: Path | Traversable) -> list[Row]:
    """The rows of a table; empty if there is no file."""
    if not file.is_file():
        return []
    return [Row.from_json(row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _read_or_warn(locate: Callable[[], Path | Traversable]) -> list[Row]:
    """The rows of a table; empty, with a warning rather than an error, if it cannot be read."""
    source: object = "the user's cache"
    try:
        source = file = locate()
        return _read(file)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{source} is not a speed table and is ignored: {error!r}", stacklevel=3)
        return []


def _read_if_sound(path: Path) -> tuple[list[Row], bool]:
    """The rows of a file, and whether it is a valid table."""
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
        dtype: Name of the dtype, from `dtype_key`.
        tokens: Tokens in the batch; None to leave them out of the comparison.

    Returns:
        The row with the smallest sum of log-ratios, or None if no row is within `MAX_SIZE_RATIO` in every size.
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
    """Name of a dtype in the tables: "tf32" for float32 if its matmuls are computed in tf32."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return str(dtype)


def prefers_kernels(
    signature: Signature, dtype: torch.dtype, index: int, tokens: int, training: bool, compiled: bool
) -> bool:
    """Whether the fused kernels are faster than torch.bmm for a layer.

    Args:
        signature: Sizes of the chain.
        dtype: dtype of the layer.
        index: Index of the GPU.
        tokens: Tokens in the batch.
        training: Whether a backward pass follows.
        compiled: Whether a compiled function or a CUDA graph launches the kernels, rather than Python.

    Returns:
        True if they were faster for the most similar measured layer; False if they were not, or none is similar.
    """
    return prefers_kernels_cached(signature, dtype_key(dtype), index, max(tokens, 1).bit_length(), training, compiled)


# A compiler calls it once and does not trace it: torch.compiler.assume_constant_result, without importing it.
prefers_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def prefers_kernels_cached(
    signature: Signature, dtype: str, index: int, token_bits: int, training: bool, compiled: bool
) -> bool:
    """As `prefers_kernels`, with the tokens rounded down to a power of two, given by its bit length."""
    rows = table(gpu_name(index))
    if not rows:
        report_unmeasured_gpu(gpu_name(index))
    row = nearest(rows, signature, dtype, 1 << (token_bits - 1))
    if row is None or "triton" not in row.times:
        return False
    ms = {name: times.of(training=training, compiled=compiled) for name, times in row.times.items()}
    return ms["triton"] < ms["bmm"]


@lru_cache(maxsize=4096)
def measured_tuning(signature: Signature, dtype: str, index: int) -> Tuning | None:
    """The fastest launch options of the most similar measured layer.

    Args:
        signature: Sizes of the chain.
        dtype: Name of the dtype, from `dtype_key`.
        index: Index of the GPU.

    Returns:
        The launch options, or None if no similar layer was measured on this GPU.
    """
    row = nearest((r for r in table(gpu_name(index)) if r.tuning), signature, dtype, None)
    return None if row is None else row.tuning
