"""The fastest structure for a layer of given size on a given device, compared with nn.Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import inf, log2

import torch
from torch import nn

from buttress.core.chain import Chain
from buttress.core.structures import Structure, parse, structures
from buttress.errors import ButtressError, ShapeError
from buttress.nn.linear import StructuredLinear
from buttress.ops.speeds import Row, Times, dtype_key, store_rows, table
from buttress.text_table import render

TOLERANCE = 1.05
"""A time within five percent of another counts as the same."""
MAX_SCALING = 4.0
"""Times are scaled from a measured size only if d_in, d_out and tokens each differ by at most this ratio."""


@dataclass(frozen=True)
class Option:
    """One structure for a layer, with its time and size."""

    structure: str
    """The structure as text."""
    implementation: str
    """Name of its fastest implementation."""
    ms: float
    """Milliseconds of that implementation."""
    against_dense: float
    """Speedup over nn.Linear; below 1 it is slower."""
    parameters: int
    """Number of parameters."""
    against_dense_parameters: float
    """Number of parameters divided by that of nn.Linear."""
    rank: int
    """Largest possible rank of the matrix."""
    basis: str
    """"measured", or the measured sizes from which the time was scaled."""


@dataclass(frozen=True)
class Advice:
    """Structures for one layer, fastest first, and a recommendation. `str` gives a table and a verdict."""

    d_in: int
    d_out: int
    tokens: int
    device: str
    what: str
    """The timed computation: a training step or the forward pass, and its dtype."""
    dense_ms: float
    """Milliseconds of nn.Linear."""
    options: tuple[Option, ...]
    """The structures, fastest first."""

    @property
    def fastest(self) -> Option | None:
        """The fastest option, or None if nn.Linear is no slower."""
        best = self.options[0] if self.options else None
        return best if best and best.against_dense > TOLERANCE else None

    @property
    def largest(self) -> Option | None:
        """The option with the most parameters among those no slower than nn.Linear."""
        fits = [o for o in self.options if o.against_dense * TOLERANCE >= 1]
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
        """The advice in one or two sentences."""
        if self.fastest is None:
            return "Stay dense: no structure here saves time. Fewer parameters may still be reason enough."
        text = f"{self.fastest.structure} is fastest: {self.fastest.against_dense:.3g} times faster than nn.Linear."
        if self.largest and self.largest != self.fastest:
            text += (
                f" {self.largest.structure} has the most parameters of those that are no slower "
                f"({self.largest.parameters:,}, {self.largest.against_dense:.3g} times faster)."
            )
        return text


@dataclass(frozen=True)
class _TimedDevice:
    """A device on which layers are timed, or a GPU elsewhere whose measured speeds are looked up."""

    name: str
    local: torch.device | None
    """The device in this machine, None if only its measured-speed table is available."""

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.float32 if self.local is not None and self.local.type == "cpu" else torch.bfloat16

    @classmethod
    def of(cls, device: torch.device | str | None) -> _TimedDevice:
        """For a torch device (default: a GPU if there is one), or for the name of a GPU with a table."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            local = torch.device(device)
        except RuntimeError:
            if not table(str(device)):
                raise ButtressError(
                    f"{device!r} is neither a torch device nor a GPU with a measured-speed table: "
                    "give 'cuda', 'cpu', or a GPU's name such as 'NVIDIA H200'"
                ) from None
            return cls(str(device), None)
        if local.type == "cuda" and not torch.cuda.is_available():
            raise ButtressError(f"{device!r} was requested, but torch finds no GPU: give the name of a GPU instead")
        if local.type not in ("cuda", "cpu"):
            raise ButtressError(f"speeds are measured on cuda and cpu, not on {local.type}")
        return cls(torch.cuda.get_device_name(local) if local.type == "cuda" else "this machine's CPU", local)


@dataclass(frozen=True)
class _Timing:
    """The times of one structure, and whether they were measured or scaled."""

    chain: Chain
    row: Row
    basis: str

    def linear_ms(self, *, training: bool, compiled: bool) -> float:
        """Milliseconds of nn.Linear."""
        return self.row.linear.of(training=training, compiled=compiled)

    def option(self, *, training: bool, compiled: bool) -> Option:
        """The fastest implementation, compared with nn.Linear."""
        ms = {name: times.of(training=training, compiled=compiled) for name, times in self.row.times.items()}
        best = min(ms, key=lambda name: ms[name])
        return Option(
            structure=self.row.structure,
            implementation=best,
            ms=ms[best],
            against_dense=self.linear_ms(training=training, compiled=compiled) / ms[best],
            parameters=self.chain.params,
            against_dense_parameters=self.chain.params / (self.chain.d_in * self.chain.d_out),
            rank=self.chain.max_rank,
            basis=self.basis,
        )


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
    """Compare the speed of structures for one layer and recommend one.

    Args:
        d_in: Inputs of the layer.
        d_out: Outputs of the layer.
        tokens: Tokens at a time.
        device: A device of this machine, on which times that its table lacks are measured and, for a GPU, stored; or
            the name of a GPU with a table ("NVIDIA H200"), whose times are looked up or scaled from the nearest size.
            Default: "cuda" if there is a GPU, else "cpu".
        dtype: Dtype of the computation. Default: bfloat16 on a GPU, float32 on a CPU.
        candidates: Structures or their texts. Default: a few of every structure.
        training: Time a training step; otherwise the forward pass alone.
        compiled: Leave out the time that Python takes to launch kernels.

    Returns:
        The options, fastest first.

    Raises:
        ShapeError: If a size is not an integer of at least 1.
        ButtressError: If there are no candidates, the device is unknown, or its table has nothing near these sizes.

    Example:
        >>> print(bt.advise(4096, 4096, 32768, device="NVIDIA H200"))
    """
    _check_sizes(d_in, d_out, tokens)
    chosen = (
        _default_candidates() if candidates is None else [parse(c) if isinstance(c, str) else c for c in candidates]
    )
    if not chosen:
        raise ButtressError("there is nothing to compare: give at least one candidate, such as BTT(rank=2)")
    timed_device = _TimedDevice.of(device)
    dtype = dtype or timed_device.default_dtype
    timings = _timings(timed_device, chosen, d_in, d_out, tokens, dtype)
    linear_ms = min(t.linear_ms(training=training, compiled=compiled) for t in timings)
    options = [t.option(training=training, compiled=compiled) for t in timings]
    what = f"{'a training step' if training else 'forward'}, {str(dtype).removeprefix('torch.')}"
    what += "" if compiled else ", launched by Python"
    return Advice(d_in, d_out, tokens, timed_device.name, what, linear_ms, tuple(sorted(options, key=lambda o: o.ms)))


def timed(
    tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    training: bool = False,
) -> Callable[[Structure | None, int, int], float]:
    """A cost function for `curves`: the milliseconds of a layer, measured or looked up as in `advise`.

    Args:
        tokens: Tokens at a time.
        device: As for `advise`.
        dtype: As for `advise`.
        training: Time a training step; otherwise the forward pass alone.

    Returns:
        A function of a structure (None for nn.Linear), d_in and d_out. A structure that is not in a GPU's table
        costs infinity, so that it is never chosen.

    Raises:
        ButtressError: If the device is unknown; from the function, if a table has nothing near a layer's sizes.

    Example:
        >>> options = bt.curves(model, cost=bt.timed(16384, device="NVIDIA H200"))
    """
    timed_device = _TimedDevice.of(device)

    def timings(candidates: Sequence[Structure], d_in: int, d_out: int) -> list[_Timing]:
        _check_sizes(d_in, d_out, tokens)
        return _timings(timed_device, candidates, d_in, d_out, tokens, dtype or timed_device.default_dtype)

    @lru_cache(maxsize=4096)
    def milliseconds(structure: Structure | None, d_in: int, d_out: int) -> float:
        if structure is None:
            # Every row includes the time of nn.Linear: measuring one candidate is enough. A table may have rows for
            # only some of them.
            candidates = _default_candidates()[: None if timed_device.local is None else 1]
            return min(t.linear_ms(training=training, compiled=True) for t in timings(candidates, d_in, d_out))
        try:
            return timings([structure], d_in, d_out)[0].option(training=training, compiled=True).ms
        except ButtressError:
            return inf

    return milliseconds


def calibrate(model: nn.Module, tokens: int, *, dtype: torch.dtype | None = None) -> list[Option]:
    """Time every distinct structured layer of a model on its GPU, so that each uses its fastest implementation there.

    The times are stored in the user's table, and apply in this process and in later ones.

    Args:
        model: A model on a GPU.
        tokens: Tokens at a time.
        dtype: Dtype of the computation under autocast. Default: the dtype of each layer.

    Returns:
        One option per distinct layer.

    Raises:
        ButtressError: If the model has no structured layers, or is not on a GPU.

    Example:
        >>> bt.calibrate(model, tokens=16384, dtype=torch.bfloat16)
    """
    from buttress.ops.measuring import measure_layer

    layers: dict[tuple[object, ...], StructuredLinear] = {}
    for module in model.modules():
        if isinstance(module, StructuredLinear):
            weight = next(iter(module.factors.values()))
            key = str(module.structure), module.in_features, module.out_features, weight.dtype, weight.device
            layers[key] = module
    if not layers:
        raise ButtressError("the model has no structured layers: replace_ some first")
    options = []
    for layer in layers.values():
        weight = next(iter(layer.factors.values()))
        if weight.device.type != "cuda":
            raise ButtressError(f"layers are calibrated on a GPU, but this model is on {weight.device}")
        row = measure_layer(layer.chain, str(layer.structure), tokens, dtype or weight.dtype, weight.device)
        timing = _Timing(layer.chain, row, f"{layer.in_features} -> {layer.out_features}, measured")
        options.append(timing.option(training=True, compiled=True))
        store_rows(torch.cuda.get_device_name(weight.device), [row])
    return options


def _check_sizes(d_in: int, d_out: int, tokens: int) -> None:
    for label, value in (("d_in", d_in), ("d_out", d_out), ("tokens", tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")


def _default_candidates() -> list[Structure]:
    return [member for cls in structures().values() for member in cls.default_candidates()]


def _timings(
    device: _TimedDevice, candidates: Sequence[Structure], d_in: int, d_out: int, tokens: int, dtype: torch.dtype
) -> list[_Timing]:
    """The times of the candidates, at least one. Candidates that an absent GPU's table lacks are left out."""
    if device.local is not None:
        return _measured(candidates, d_in, d_out, tokens, dtype, device.local, device.name)
    scaled = (_scaled(structure, d_in, d_out, tokens, dtype, device.name) for structure in candidates)
    timings = [timing for timing in scaled if timing is not None]
    if not timings:
        raise ButtressError(
            f"nothing near {d_in} -> {d_out} in {dtype} was measured on {device.name}: use device='cuda' on a machine "
            "with this GPU, or sizes nearer to those in its table"
        )
    return timings


def _measured(
    candidates: Sequence[Structure],
    d_in: int,
    d_out: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> list[_Timing]:
    """Times from the device's table; missing ones are measured, and stored for a GPU. A CPU's load varies too much."""
    from buttress.ops.measuring import measure_layer

    rows = {row.key: row for row in table(name)}
    timings: list[_Timing] = []
    new_rows: list[Row] = []
    for structure in candidates:
        chain = structure.chain(d_in, d_out)
        row = rows.get((str(structure), d_in, d_out, tokens, dtype_key(dtype)))
        if row is None:
            linear = new_rows[-1].linear if new_rows else None  # nn.Linear is measured once
            row = measure_layer(chain, str(structure), tokens, dtype, device, linear=linear)
            new_rows.append(row)
        timings.append(_Timing(chain, row, "measured"))
    if new_rows and device.type == "cuda":
        store_rows(name, new_rows)
    return timings


def _scaled(
    structure: Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype, device: str
) -> _Timing | None:
    """Times of the nearest measured size, scaled by memory traffic for the structure and by MACs for nn.Linear."""

    def distances(row: Row) -> list[float]:
        return [abs(log2(a / b)) for a, b in ((row.d_in, d_in), (row.d_out, d_out), (row.tokens, tokens))]

    rows = [r for r in table(device) if r.structure == str(structure) and r.dtype == dtype_key(dtype)]
    rows = [r for r in rows if max(distances(r)) <= log2(MAX_SCALING)]
    if not rows:
        return None
    chain = structure.chain(d_in, d_out)
    row = min(rows, key=lambda r: sum(distances(r)))
    if row.key[1:4] == (d_in, d_out, tokens):
        return _Timing(chain, row, "measured")
    moved = _numbers_moved(chain, tokens) / _numbers_moved(structure.chain(row.d_in, row.d_out), row.tokens)
    work = tokens * d_in * d_out / (row.tokens * row.d_in * row.d_out)
    times = {name: _stretched(t, moved) for name, t in row.times.items()}
    linear = _stretched(row.linear, work)
    scaled = Row(row.structure, d_in, d_out, tokens, row.dtype, row.signature, linear, times, row.tuning)
    return _Timing(chain, scaled, f"scaled from {row.d_in} -> {row.d_out}, {row.tokens:,} tokens")


def _stretched(times: Times, ratio: float) -> Times:
    return Times(*(ratio * t for t in astuple(times)))


def _numbers_moved(chain: Chain, tokens: int) -> int:
    """Numbers that a step reads or writes: inputs, outputs, intermediates twice, and the factors."""
    intermediates = sum(chain.size(f.batch_axes + f.shared_axes + f.out_axes) for f in chain.factors[:-1])
    return tokens * (chain.d_in + chain.d_out + 2 * intermediates) + chain.params
