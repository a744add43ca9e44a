"""Which structure to take for a layer of given size on a given device, by the clock, and whether to take any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import inf, log2

import torch
from torch import nn

from buttress.core.structures import Structure, parse, structures
from buttress.errors import ButtressError, ShapeError
from buttress.nn.linear import StructuredLinear
from buttress.ops.speeds import Row, Times, store_rows, table
from buttress.ops.speeds import dtype_key as named
from buttress.text_table import render

NO_SLOWER = 1.05
"""A time within five percent of another counts as the same."""
NEAR = 4.0
"""Sizes up to this ratio away are scaled to the one asked for."""


@dataclass(frozen=True)
class Option:
    """One structure for the layer asked about."""

    structure: str
    implementation: str
    ms: float
    against_dense: float
    """How many times faster than nn.Linear; below 1 it is slower."""
    parameters: int
    against_dense_parameters: float
    rank: int
    """Largest possible rank of the matrix."""
    basis: str
    """"measured", or the measured sizes from which the time was scaled."""


@dataclass(frozen=True)
class Advice:
    """Options, fastest first, and what they come to."""

    d_in: int
    d_out: int
    tokens: int
    device: str
    what: str
    dense_ms: float
    options: tuple[Option, ...]

    @property
    def fastest(self) -> Option | None:
        """The fastest option, or None where nn.Linear is no slower."""
        best = self.options[0] if self.options else None
        return best if best and best.against_dense > NO_SLOWER else None

    @property
    def largest(self) -> Option | None:
        """The option with the most parameters among those no slower than nn.Linear."""
        fits = [o for o in self.options if o.against_dense * NO_SLOWER >= 1]
        return max(fits, key=lambda o: (o.parameters, o.against_dense), default=None)

    @property
    def stay_dense(self) -> bool:
        """Whether no structure would save time."""
        return self.fastest is None

    def __str__(self) -> str:
        head = f"{self.d_in} -> {self.d_out}, {self.tokens:,} tokens, {self.what}, {self.device}"
        lines = [head, f"nn.Linear takes {self.dense_ms:.4g} ms", "", render(self.options), "", self.verdict()]
        return "\n".join(lines)

    def verdict(self) -> str:
        """One or two sentences."""
        if self.fastest is None:
            return "Stay dense: no structure here saves time. Fewer parameters may still be reason enough."
        text = f"{self.fastest.structure} is fastest: {self.fastest.against_dense:.3g} times faster than nn.Linear."
        if self.largest and self.largest != self.fastest:
            text += (
                f" {self.largest.structure} has the most parameters of those that are no slower "
                f"({self.largest.parameters:,}, {self.largest.against_dense:.3g} times faster)."
            )
        return text


def advise(
    d_in: int,
    d_out: int,
    tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    candidates: Iterable[Structure | str] | None = None,
    training: bool = True,
    compiled: bool = True,
) -> Advice:
    """Time every candidate for a layer of d_in inputs and d_out outputs on so many tokens, and say what to take.

    `device` is a device of this machine, where what the table lacks is measured now and kept, or the name of a
    card with a table ("NVIDIA H200"), where times are looked up and, if need be, scaled from the nearest size.
    `compiled=False` counts the time that Python takes to launch things; `training=False` is the forward pass alone.

    >>> print(bt.advise(4096, 4096, 32768, device="NVIDIA H200"))
    """
    for label, value in (("d_in", d_in), ("d_out", d_out), ("tokens", tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")
    asked = (
        list(candidates)
        if candidates is not None
        else [s for c in structures().values() for s in c.default_candidates()]
    )
    chosen = [parse(c) if isinstance(c, str) else c for c in asked]
    if not chosen:
        raise ButtressError("there is nothing to compare: give at least one candidate, such as BTT(rank=2)")
    where = _local(device)
    if where is None:
        name = str(device)
        kind = dtype or torch.bfloat16
        found = [_scaled(s, d_in, d_out, tokens, kind, name) for s in chosen]
    else:
        kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
        name, found = _measured(chosen, d_in, d_out, tokens, kind, where)
    rows = [(s, *f) for s, f in zip(chosen, found, strict=True) if f is not None]
    if not rows:
        raise ButtressError(
            f"nothing near {d_in} -> {d_out} in {kind} was measured on {name}: ask on a machine that has the card, "
            "with device='cuda', or for sizes nearer to those of its table"
        )
    linear = min(r.linear.of(training=training, launched=compiled) for _, r, _ in rows)
    options = []
    for structure, row, basis in rows:
        took = {n: t.of(training=training, launched=compiled) for n, t in row.times.items()}
        best = min(took, key=lambda n: took[n])
        against = row.linear.of(training=training, launched=compiled) / took[best]
        chain = structure.chain(d_in, d_out)
        share = chain.params / (d_in * d_out)
        options.append(Option(str(structure), best, took[best], against, chain.params, share, chain.max_rank, basis))
    what = f"{'a training step' if training else 'forward'}, {str(kind).removeprefix('torch.')}"
    what += "" if compiled else ", launched by Python"
    return Advice(d_in, d_out, tokens, name, what, linear, tuple(sorted(options, key=lambda o: o.ms)))


def timed(
    tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    training: bool = False,
) -> Callable[[Structure | None, int, int], float]:
    """A cost for `curves`: milliseconds of a layer on so many tokens, measured here or looked up, as `advise` does.

    What a card's table knows nothing of costs infinitely much, so that it is never chosen.

    >>> options = curves(model, cost=timed(16384, device="NVIDIA H200"))
    """

    @lru_cache(maxsize=4096)
    def price(structure: Structure | None, d_in: int, d_out: int) -> float:
        some: list[Structure] | None = None  # nn.Linear stands in every row of a table
        if structure is not None:
            some = [structure]
        elif _local(device) is not None:
            some = [s for c in structures().values() for s in c.default_candidates()][:1]
        try:
            found = advise(d_in, d_out, tokens, device=device, dtype=dtype, candidates=some, training=training)
        except ButtressError:
            if structure is None:
                raise
            return inf
        return found.dense_ms if structure is None else found.options[0].ms

    return price


def calibrate(model: nn.Module, tokens: int, *, dtype: torch.dtype | None = None) -> list[Option]:
    """Measure every distinct structured layer of a model on the GPU it is on, so that each takes what is fastest there.

    Rows are kept in the user's table and used from then on, in this process and in later ones. `dtype` is what the
    layers compute in, if autocast makes that another than their own.
    """
    from buttress.ops.measuring import measure_layer

    layers = {}
    for m in model.modules():
        if isinstance(m, StructuredLinear):
            weight = next(iter(m.factors.values()))
            layers[str(m.structure), m.in_features, m.out_features, weight.dtype, weight.device] = m
    if not layers:
        raise ButtressError("the model has no structured layers: replace_ some first")
    options = []
    for (label, d_in, d_out, own, device), layer in layers.items():
        if device.type != "cuda":
            raise ButtressError(f"layers are calibrated on a GPU, but this model is on {device}")
        row = measure_layer(layer.chain, label, tokens, dtype or own, device)
        took = row.times[row.best].both
        chain = layer.chain
        share = chain.params / (d_in * d_out)
        where = f"{d_in} -> {d_out}, measured"
        options.append(
            Option(label, row.best, took, row.linear.both / took, chain.params, share, chain.max_rank, where)
        )
        store_rows(torch.cuda.get_device_name(device), [row])
    return options


def _local(device: torch.device | str | None) -> torch.device | None:
    """A device of this machine, or None for the name of a card."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        if not table(str(device)):
            raise ButtressError(
                f"{device!r} is neither a device of torch nor a card with a table of measured speeds"
            ) from None
        return None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ButtressError(f"{device!r} was asked for, but torch sees no GPU here: give the name of a card instead")
    if where.type not in ("cuda", "cpu"):
        raise ButtressError(f"speeds are measured on cuda and cpu, not on {where.type}")
    return where


Found = tuple[Row, str]


def _measured(
    chosen: Sequence[Structure], d_in: int, d_out: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[str, list[Found | None]]:
    """Rows of the table, those that it lacks measured now. A CPU's are not kept: it is never twice as busy."""
    from buttress.ops.measuring import measure_layer

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
    known = {row.key: row for row in table(name)}
    rows: list[Row] = []
    fresh: list[Row] = []
    linear: Times | None = None
    for structure in chosen:
        row = known.get((str(structure), d_in, d_out, tokens, named(dtype)))
        if row is None:
            row = measure_layer(structure.chain(d_in, d_out), str(structure), tokens, dtype, device, linear=linear)
            fresh.append(row)
            linear = row.linear
        rows.append(row)
    if fresh and device.type == "cuda":
        store_rows(name, fresh)
    return name, [(row, "measured") for row in rows]


def _scaled(structure: Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype, device: str) -> Found | None:
    """The nearest measured row of this structure, its times scaled by what has to be moved or multiplied."""

    def steps(row: Row) -> list[float]:
        return [abs(log2(a / b)) for a, b in ((row.d_in, d_in), (row.d_out, d_out), (row.tokens, tokens))]

    alike = [r for r in table(device) if r.structure == str(structure) and r.dtype == named(dtype)]
    near = [r for r in alike if max(steps(r)) <= log2(NEAR)]
    if not near:
        return None
    row = min(near, key=lambda r: sum(steps(r)))
    if row.key[1:4] == (d_in, d_out, tokens):
        return row, "measured"
    moved = _moved(structure, d_in, d_out, tokens) / _moved(structure, row.d_in, row.d_out, row.tokens)
    work = tokens * d_in * d_out / (row.tokens * row.d_in * row.d_out)
    times = {name: _stretched(t, moved) for name, t in row.times.items()}
    linear = _stretched(row.linear, work)
    scaled = Row(row.structure, d_in, d_out, tokens, row.dtype, row.signature, linear, times, row.tuning)
    return scaled, f"scaled from {row.d_in} -> {row.d_out}, {row.tokens:,} tokens"


def _stretched(times: Times, by: float) -> Times:
    return Times(*(by * t for t in astuple(times)))


def _moved(structure: Structure, d_in: int, d_out: int, tokens: int) -> int:
    """Numbers that a step has to move: the ends, twice what lies between the factors, and the factors."""
    chain = structure.chain(d_in, d_out)
    between = sum(chain.size(f.batch_axes + f.shared_axes + f.out_axes) for f in chain.factors[:-1])
    return tokens * (d_in + d_out + 2 * between) + chain.params
