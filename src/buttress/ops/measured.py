"""The measured table: for each card what ran how fast, and from it which implementation to take.

A table comes with the package for the card that it was measured on; `advise` and `measure` add rows for other
cards and sizes, kept as JSON in the user's cache. What nothing near was measured for runs on torch.bmm.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from math import inf, log2
from pathlib import Path
from typing import Any

import torch

from buttress.ops.hops import Signature
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


def _rows(text: str, source: object) -> list[Row]:
    try:
        return [Row.from_json(row) for row in json.loads(text)["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{source} is not a table of measured speeds, so it is left alone: {error!r}", stacklevel=3)
        return []


@lru_cache(maxsize=8)
def table(device: str) -> tuple[Row, ...]:
    """What is known about a card by that name: the rows that come with the package, and the user's own."""
    found: dict[Any, Row] = {}
    shipped = resources.files("buttress.ops").joinpath("tables", f"{_slug(device)}.json")
    own = cache() / f"{_slug(device)}.json"
    for source in (shipped, own):
        if source.is_file():
            found |= {row.key: row for row in _rows(source.read_text(encoding="utf-8"), source)}
    return tuple(found.values())


def keep(device: str, rows: Iterable[Row]) -> Path:
    """Add rows to the user's table of a card, whole or not at all; later ones replace earlier ones."""
    path = cache() / f"{_slug(device)}.json"
    old = _rows(path.read_text(encoding="utf-8"), path) if path.is_file() else []
    merged = {row.key: row for row in (*old, *rows)}
    write(path, device, merged.values())
    table.cache_clear()
    prefers_kernels_cached.cache_clear()
    tuning.cache_clear()
    return path


def write(path: Path, device: str, rows: Iterable[Row]) -> None:
    """One table as a file, replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": device, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(f'{{{json.dumps(head)[1:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    part.replace(path)


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


def prefers_kernels(signature: Signature, dtype: str, index: int, tokens: int, training: bool, launched: bool) -> bool:
    """Whether the fused kernels beat torch.bmm for such a layer on this card, as far as anything was measured."""
    return prefers_kernels_cached(signature, dtype, index, max(tokens, 1).bit_length(), training, launched)


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
