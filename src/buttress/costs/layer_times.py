"""Times of one layer in several structures: measured on a device of this machine, or looked up for a GPU elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from math import log2
from typing import NamedTuple

import torch

from buttress.core.chain_sum import AnyChain
from buttress.core.structures import Structure
from buttress.devices import local_device
from buttress.errors import ButtressError
from buttress.ops.speeds import Row, Times, dtype_key, store_rows, table

MAX_SCALING = 4.0
"""Times are scaled from a measured size only if d_in, d_out and tokens each differ by at most this ratio."""
MAX_CPU_MACS, MIN_CPU_TOKENS = 1 << 31, 64
"""A few cores take a fraction of a second for a training step of nn.Linear with so many MACs. Larger steps are measured
with fewer tokens, but not with fewer than this, and scaled."""

Progress = Callable[[str, int, int], None]
"""Called with a structure, the number of structures before it, and the number of all."""


@dataclass(frozen=True)
class TimedDevice:
    """A device on which layers are timed, or a GPU elsewhere whose measured speeds are looked up.

    Args:
        name: Its name.
        local: The device in this machine, None if only its measured-speed table is available.
    """

    name: str
    local: torch.device | None

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype in which layers are timed by default."""
        return torch.float32 if self.local is not None and self.local.type == "cpu" else torch.bfloat16

    @classmethod
    def of(cls, device: torch.device | str | None) -> TimedDevice:
        """For a torch device (default: a GPU if there is one), or for the name of a GPU with a table."""
        if isinstance(device, str) and table(device):
            return cls(device, None)
        try:
            local = local_device(device)
        except ButtressError as error:
            raise ButtressError(f"{error}; or the name of a GPU with measured speeds, such as 'NVIDIA H200'") from None
        if local.type not in ("cuda", "cpu"):
            raise ButtressError(f"speeds are measured on cuda and cpu, not on {local.type}")
        return cls(torch.cuda.get_device_name(local) if local.type == "cuda" else "this machine's CPU", local)


@dataclass(frozen=True)
class Layer:
    """The layer to time: its sizes, tokens at a time, and the dtype of the computation."""

    d_in: int
    d_out: int
    tokens: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.d_in} -> {self.d_out} in {self.dtype}"


class Timing(NamedTuple):
    """The times of one structure, and whether they were measured or scaled."""

    chain: AnyChain
    row: Row
    basis: str

    def linear_ms(self, *, training: bool, compiled: bool) -> float:
        """Milliseconds of nn.Linear."""
        return self.row.linear.of(training=training, compiled=compiled)


def layer_timings(
    device: TimedDevice, candidates: Sequence[Structure], layer: Layer, progress: Progress | None = None
) -> tuple[list[Timing], list[str]]:
    """Time a layer in several structures.

    Args:
        device: Where the layer runs.
        candidates: The structures.
        layer: The layer.
        progress: Called before a structure is measured.

    Returns:
        The times, at least one, and a line for each structure that does not take the layer's sizes. Structures that an
        absent GPU's table lacks are left out.

    Raises:
        ButtressError: If no structure takes the layer's sizes, or an absent GPU's table has nothing near them.
    """
    chains, refusals = _chains(candidates, layer)
    if not chains:
        raise ButtressError(f"no structure takes a layer of {layer.d_in} -> {layer.d_out}: {'; '.join(refusals)}")
    if device.local is not None:
        return _measured(chains, layer, device.local, device.name, progress), refusals
    scaled = (_scaled(structure, chain, layer, device.name) for structure, chain in chains)
    timings = _with_measured_linear([t for t in scaled if t is not None], layer, device.name)
    if not timings:
        raise ButtressError(
            f"nothing near {layer} was measured on {device.name}: use device='cuda' on a machine "
            "with this GPU, or sizes nearer to those in its table"
        )
    return timings, refusals


def _chains(candidates: Sequence[Structure], layer: Layer) -> tuple[list[tuple[Structure, AnyChain]], list[str]]:
    """The chains of the structures that take the layer's sizes, and why the others do not."""
    chains, refusals = [], []
    for structure in candidates:
        try:
            chains.append((structure, structure.chain(layer.d_in, layer.d_out)))
        except Exception as error:  # a structure may be the user's own, and raise anything
            refusals.append(f"{structure} ({type(error).__name__}: {error})".replace("\n", " "))
    return chains, refusals


def _measured(
    chains: Sequence[tuple[Structure, AnyChain]],
    layer: Layer,
    device: torch.device,
    name: str,
    progress: Progress | None,
) -> list[Timing]:
    """Times from the device's table; missing ones are measured, and stored for a GPU. A CPU's load varies too much."""
    from buttress.ops.measuring import measure_layer

    on_cpu = device.type == "cpu"
    tokens = _cpu_tokens(layer) if on_cpu else layer.tokens
    rows = {row.key: row for row in table(name)}
    timings: list[Timing] = []
    new_rows: list[Row] = []
    for i, (structure, chain) in enumerate(chains):
        row = rows.get((str(structure), layer.d_in, layer.d_out, tokens, dtype_key(layer.dtype)))
        if row is None:
            if progress is not None:
                progress(str(structure), i, len(chains))
            linear = new_rows[-1].linear if new_rows else None  # nn.Linear is measured once
            row = measure_layer(chain, str(structure), tokens, layer.dtype, device, linear=linear)
            new_rows.append(row)
        timings.append(Timing(chain, row, "measured"))
    if new_rows and not on_cpu:
        store_rows(name, new_rows)
    return _on_cpu(timings, layer, tokens) if on_cpu else timings


def _cpu_tokens(layer: Layer) -> int:
    """How many tokens are measured on a CPU."""
    return min(layer.tokens, max(MIN_CPU_TOKENS, MAX_CPU_MACS // (layer.d_in * layer.d_out)))


def _on_cpu(timings: Sequence[Timing], layer: Layer, tokens: int) -> list[Timing]:
    """Times of a CPU for all tokens. If nn.Linear's time has changed meanwhile, that counts as spread, too."""
    drift = _drift(timings[0].row.linear, layer, tokens) if len(timings) > 1 else 0.0
    basis = "measured" if tokens == layer.tokens else f"scaled from {tokens:,} tokens"
    ratio = layer.tokens / tokens
    return [
        Timing(chain, replace(_stretched(row, layer, ratio, ratio), spread=max(row.spread, drift)), basis)
        for chain, row, _ in timings
    ]


def _drift(linear: Times, layer: Layer, tokens: int) -> float:
    """By how much the time of nn.Linear differs from an earlier one."""
    from buttress.ops.measuring import sample_linear

    again, _ = sample_linear(layer.d_in, layer.d_out, torch.randn(tokens, layer.d_in, dtype=layer.dtype))
    ratios: list[float] = [max(a, b) / min(a, b) for a, b in zip(astuple(linear), astuple(again), strict=True)]
    return max(ratios) - 1


def _scaled(structure: Structure, chain: AnyChain, layer: Layer, device: str) -> Timing | None:
    """Times of the nearest measured size, scaled by memory traffic for the structure and by MACs for nn.Linear."""
    d_in, d_out, tokens = layer.d_in, layer.d_out, layer.tokens

    def distances(row: Row) -> list[float]:
        return [abs(log2(a / b)) for a, b in ((row.d_in, d_in), (row.d_out, d_out), (row.tokens, tokens))]

    rows = [r for r in table(device) if r.structure == str(structure) and r.dtype == dtype_key(layer.dtype)]
    rows = [r for r in rows if max(distances(r)) <= log2(MAX_SCALING)]
    if not rows:
        return None
    row = min(rows, key=lambda r: sum(distances(r)))
    if row.key[1:4] == (d_in, d_out, tokens):
        return Timing(chain, row, "measured")
    moved = _numbers_moved(chain, tokens) / _numbers_moved(structure.chain(row.d_in, row.d_out), row.tokens)
    work = tokens * d_in * d_out / (row.tokens * row.d_in * row.d_out)
    return Timing(
        chain, _stretched(row, layer, moved, work), f"scaled from {row.d_in} -> {row.d_out}, {row.tokens:,} tokens"
    )


def _with_measured_linear(timings: list[Timing], layer: Layer, device: str) -> list[Timing]:
    """The timings, all with the time of nn.Linear at the layer's own size if the table has one, with any structure."""
    sizes = (layer.d_in, layer.d_out, layer.tokens, dtype_key(layer.dtype))
    linear = next((row.linear for row in table(device) if row.key[1:] == sizes), None)
    return timings if linear is None else [t._replace(row=replace(t.row, linear=linear)) for t in timings]


def _stretched(row: Row, layer: Layer, structured: float, linear: float) -> Row:
    """A row for another layer, with the times of the structure and of nn.Linear multiplied."""

    def stretch(times: Times, ratio: float) -> Times:
        return Times(*(ratio * t for t in astuple(times)))

    return replace(
        row,
        d_in=layer.d_in,
        d_out=layer.d_out,
        tokens=layer.tokens,
        linear=stretch(row.linear, linear),
        times={name: stretch(times, structured) for name, times in row.times.items()},
    )


def _numbers_moved(chain: AnyChain, tokens: int) -> int:
    """Numbers that a step reads or writes: inputs and outputs of each part, intermediates twice, and the factors."""
    intermediates = sum(
        part.size(f.batch_axes + f.shared_axes + f.out_axes) for part in chain.parts for f in part.factors[:-1]
    )
    return tokens * (len(chain.parts) * (chain.d_in + chain.d_out) + 2 * intermediates) + chain.params
