"""The measured table: for each card what ran how fast, and from it which implementation to take.

A table comes with the package for the card that it was measured on; `advise` and `measure` add rows for other
cards and sizes, kept as JSON in the user's cache. What nothing near was measured for runs on torch.bmm.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import inf, log2
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from buttress.ops.strides import Signature
from buttress.ops.tuning import Backward, Forward, Tuning

MANY = 1 << 15
"""Tokens that stand for "as many as you like"."""
NEAR = 4.0
"""A measured size stands for another up to this ratio in every one of its numbers."""


@dataclass(frozen=True)
class Times:
    """Milliseconds: of the forward pass and of a training step, replayed from a CUDA graph and launched by Python."""

    forward: float
    both: float
    forward_eager: float
    both_eager: float

    def of(self, *, training: bool, launched: bool) -> float:
        """`launched`: a compiler or a graph does the launching."""
        if training:
            return self.both if launched else self.both_eager
        return self.forward if launched else self.forward_eager


@dataclass(frozen=True)
class Row:
    """One layer on one card."""

    structure: str
    d_in: int
    d_out: int
    tokens: int
    dtype: str
    signature: Signature | None
    """None where the kernels do not take the chain."""
    linear: Times
    """nn.Linear of the same sizes."""
    times: Mapping[str, Times]
    """By implementation."""
    tuning: Tuning | None = None

    @property
    def best(self) -> str:
        """The implementation for a training step under a compiler."""
        return min(self.times, key=lambda name: self.times[name].both)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        tuning, signature = data["tuning"], data["signature"]
        if signature:
            sizes, scattered = signature
            signature = tuple((a, b, c) for a, b, c in sizes), bool(scattered)
            if not all(isinstance(n, int) and n > 0 for hop in signature[0] for n in hop):
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

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        return self.structure, self.d_in, self.d_out, self.tokens, self.dtype


def cache() -> Path:
    """Where measured tables are kept: $BUTTRESS_CACHE, or `buttress` in the user's cache."""
    if given := os.environ.get("BUTTRESS_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "buttress"


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def _parsed(file: Path | Traversable) -> list[Row]:
    if not file.is_file():
        return []
    return [Row.from_json(row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _rows(find: Callable[[], Path | Traversable]) -> list[Row]:
    """The rows of a table, none where there is no file, or where it is not one: speed is not worth a crash."""
    source: object = "the user's cache"
    try:
        source = file = find()
        return _parsed(file)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{source} is not a table of measured speeds, so it is left alone: {error!r}", stacklevel=3)
        return []


@lru_cache(maxsize=8)
def table(device: str) -> tuple[Row, ...]:
    """What is known about a card by that name: the rows that come with the package, and the user's own."""
    name = f"{_slug(device)}.json"
    shipped = _rows(lambda: resources.files("buttress.ops").joinpath("tables", name))
    own = _rows(lambda: cache() / name)
    return tuple({row.key: row for row in (*shipped, *own, *_unkept.get(device, ()))}.values())


_unkept: dict[str, list[Row]] = {}
"""Rows that could not be written; they count while this process lives."""


def keep(device: str, rows: Iterable[Row]) -> None:
    """Add rows to the user's table of a card, whole or not at all; later ones replace earlier ones.

    Several processes may do so at once. Where nothing can be written, the rows count in this process alone.
    """
    fresh = list(rows)
    try:
        path = cache() / f"{_slug(device)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            old, sound = _old(path)
            if not sound:
                path.replace(path.with_suffix(".bad"))
            write(path, device, {row.key: row for row in (*old, *fresh)}.values())
    except (OSError, RuntimeError) as error:
        warnings.warn(f"measured speeds could not be kept, and count in this process alone: {error!r}", stacklevel=2)
        _unkept.setdefault(device, []).extend(fresh)
    table.cache_clear()
    prefers_kernels_cached.cache_clear()
    tuning.cache_clear()


def _old(path: Path) -> tuple[list[Row], bool]:
    """What a table held, and whether it was one."""
    try:
        return _parsed(path), True
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks; they end with the process."""
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, device: str, rows: Iterable[Row]) -> None:
    """One table as a file, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": device, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
    with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        part.write(f'{{{json.dumps(head)[1:-1]}, "rows": [\n{lines}\n]}}\n')
    Path(part.name).chmod(0o644)
    Path(part.name).replace(path)


@lru_cache(maxsize=16)
def card(index: int) -> str:
    return torch.cuda.get_device_name(index)


def nearest(rows: Iterable[Row], signature: Signature, dtype: str, tokens: int | None) -> Row | None:
    """The measured layer that is most like this one, if any is like it at all."""
    best, least = None, inf
    for row in rows:
        if row.signature is None or row.dtype != dtype:
            continue
        (mine, scattered), (theirs, wanted) = row.signature, signature
        if len(mine) != len(theirs) or scattered != wanted:
            continue
        steps = [abs(log2(a / b)) for a, b in zip(sum(mine, ()), sum(theirs, ()), strict=True)]
        if max(steps) > log2(NEAR):
            continue
        far = sum(steps) + (0.0 if tokens is None else abs(log2(row.tokens / max(tokens, 1))))
        if far < least:
            best, least = row, far
    return best


def kind(dtype: torch.dtype) -> str:
    """A dtype as the tables name it: float32 is another thing where its products are made in tf32."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return str(dtype)


def prefers_kernels(
    signature: Signature, dtype: torch.dtype, index: int, tokens: int, training: bool, launched: bool
) -> bool:
    """Whether the fused kernels beat torch.bmm for such a layer on this card, as far as anything was measured."""
    return prefers_kernels_cached(signature, kind(dtype), index, max(tokens, 1).bit_length(), training, launched)


# A compiler is to ask once and not to look inside: torch.compiler.assume_constant_result, without importing it.
prefers_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def prefers_kernels_cached(
    signature: Signature, dtype: str, index: int, bits: int, training: bool, launched: bool
) -> bool:
    row = nearest(table(card(index)), signature, dtype, 1 << (bits - 1))
    if row is None or "triton" not in row.times:
        return False
    took = {name: times.of(training=training, launched=launched) for name, times in row.times.items()}
    return took["triton"] < took["bmm"]


@lru_cache(maxsize=4096)
def tuning(signature: Signature, dtype: str, index: int) -> Tuning | None:
    """How the kernels are launched best for such a layer on this card, if anything near was measured."""
    row = nearest((r for r in table(card(index)) if r.tuning), signature, dtype, None)
    return None if row is None else row.tuning
