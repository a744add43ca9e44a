"""From a route and tensors to launches of the kernels, forward and backward. Imports triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from buttress.ops.fused import kernels
from buttress.ops.strides import Hop, Places, Route
from buttress.ops.tuning import TOKENS, Forward, Tuning

INTERPRETED = bool(triton.knobs.runtime.interpret)
NARROW = 256
"""Longest side of a slice that a program keeps on the chip as a whole."""
DECODE = 64
"""Most tokens for the kernel in which no program waits for another."""
SHARED, SPARE = 200 << 10, 24 << 10
"""Bytes of shared memory that a program may take, or what a smaller card has, less some for the compiler."""
LIVE, RING = 24 << 20, 2
"""Bytes of z under way between the hops of a pair, about half of an L2 cache, and in how many groups."""

Scales = Sequence[Tensor]


class Launch:
    """A kernel with all that it is compiled for, launched without looking at its arguments again.

    What a kernel is compiled for includes dtypes and which numbers are multiples of 16, so plans are kept by these. It
    includes that tensors begin at multiples of 16 bytes, too; where one does not, triton is asked the long way.
    """

    def __init__(self, kernel: Any, meta: dict[str, Any]) -> None:
        self.kernel = kernel
        self.meta = meta
        self.compiled: Any = None
        self.constants: list[Any] = []
        self.tensors = 0
        """How many arguments are tensors; they come first."""

    def __call__(self, programs: int, *args: Any) -> None:
        if not self.tensors:
            self.tensors = sum(isinstance(a, Tensor) for a in args)
        if INTERPRETED or any(a.data_ptr() % 16 for a in args[: self.tensors]):
            self.kernel[(programs,)](*args, **self.meta)
            return
        if self.compiled is None:
            self.compile(*args)
        self.compiled[(programs, 1, 1)](*args, *self.constants)

    def compile(self, *args: Any) -> Any:
        self.constants = [self.meta[name] for name in self.kernel.arg_names[len(args) :]]
        self.compiled = self.kernel.warmup(*args, grid=(1,), **self.meta)
        self.compiled._init_handles()
        return self.compiled


P = ParamSpec("P")
R = TypeVar("R")


def _there(function: Callable[Concatenate[Route, Tensor, P], R]) -> Callable[Concatenate[Route, Tensor, P], R]:
    """Triton launches on the current device, which need not be the one where the tensors are."""

    @wraps(function)
    def run(route: Route, x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return function(route, x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(route, x, *args, **kwargs)

    return run


@lru_cache(maxsize=4096)
def _table(hop: Hop, device: torch.device, flipped: bool = False) -> Tensor:
    order = (1, 0, 2) if flipped else (0, 1, 2)
    units = (*hop.aligned, 1)
    rows = [[base[i] // units[i] for i in order] for base in hop.bases]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _cdiv(n: int, by: int) -> int:
    """How many times `by` it takes to cover n; triton's own takes as long as a launch."""
    return -(-n // by)


def _up(n: int, most: int) -> int:
    """The power of two that covers n, within what tl.dot takes and `most`."""
    return min(max(1 << (n - 1).bit_length(), 16), most)


def _stages(device: torch.device, wanted: int, kept: int, tile: int, scratch: int) -> int:
    """Tiles under way at a time, of so many bytes each: as many as shared memory has room for."""
    return max(1, min(wanted, (_card(device).room - kept - scratch) // tile))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32" else "tf32"


def _ends(hop: Hop) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a hop reads and writes, as the kernels are told."""

    def told(places: Places, aligned: int) -> tuple[int, ...]:
        return places.split, places.outer, places.inner, aligned

    return told(hop.source, hop.aligned[0]), told(hop.target, hop.aligned[1])


@dataclass(frozen=True)
class Card:
    """Multiprocessors, what each has, and the shared memory that one program may have."""

    processors: int = 1
    registers: int = 1 << 16
    memory: int = 1 << 18
    threads: int = 2048
    room: int = SHARED


@lru_cache(maxsize=16)
def _card(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card()
    p: Any = torch.cuda.get_device_properties(device)
    return Card(
        p.multi_processor_count,
        p.regs_per_multiprocessor,
        p.shared_memory_per_multiprocessor,
        p.max_threads_per_multi_processor,
        min(SHARED, p.shared_memory_per_block_optin - SPARE),
    )


def _lanes(programs: int, wanted: int, tiles: int) -> int:
    """Into how many lanes the tokens are dealt, tile by tile."""
    return max(1, min(wanted // programs, tiles))


def room(route: Route, x: Tensor) -> Tensor:
    """What lies between the hops, one behind the other: (tile, row, token)."""
    return x.new_empty(_cdiv(x.shape[0], TOKENS), sum(route.rows), TOKENS)


def _stations(route: Route, x: Tensor, z: Tensor, y: Tensor) -> list[tuple[Tensor, int]]:
    """What the hops lead from and to, with the width of each."""
    starts = [sum(route.rows[:i]) for i in range(len(route.rows))]
    return [(x, route.d_in), *((z[:, start:], z.shape[1]) for start in starts), (y, route.d_out)]


@_there
def forward(
    route: Route, x: Tensor, weights: Sequence[Tensor], scales: Scales, bias: Tensor | None, how: Forward, *, save: bool
) -> tuple[Tensor, Tensor | None]:
    """y (tokens, d_out), and with `save` what lies between the hops. x is (tokens, d_in); all are contiguous."""
    y = x.new_empty(x.shape[0], route.d_out)
    if not x.shape[0]:
        return y, room(route, x) if save else None
    if not save and x.shape[0] <= DECODE and decodes(route):
        _decode(route, x, weights, scales, bias, y)
        return y, None
    # What fits on the card at once was worked out for aligned tensors, as nearly all are.
    given = (x, *weights, *scales, *(() if bias is None else (bias,)))
    if how.fuse and _narrow(route) and not any(t.data_ptr() % 16 for t in given):
        done, z = _forward_pair(route, x, weights, scales, bias, y, how, save)
        if done:
            return y, z
    z = room(route, x)
    stations = _stations(route, x, z, y)
    for i, hop in enumerate(route.hops):
        last = i == len(route.hops) - 1
        scale = scales[i] if scales else None
        _forward(
            hop,
            stations[i],
            weights[i],
            scale,
            bias if last else None,
            stations[i + 1],
            i > 0,
            not last,
            how,
        )
    return y, z if save else None


@_there
def between(route: Route, x: Tensor, weights: Sequence[Tensor], scales: Scales, how: Forward) -> Tensor:
    """What `forward` would have saved, made anew for the backward pass."""
    z = room(route, x)
    if x.shape[0]:
        stations = _stations(route, x, z, x)
        for i, hop in enumerate(route.hops[:-1]):
            _forward(
                hop,
                stations[i],
                weights[i],
                scales[i] if scales else None,
                None,
                stations[i + 1],
                i > 0,
                True,
                how,
            )
    return z


@lru_cache(maxsize=4096)
def _forward_plan(
    hop: Hop, device: torch.device, dtype: torch.dtype, how: Forward, flipped: bool, fast: tuple[bool, bool],
    widths: tuple[int, int], scaled: bool, biased: bool, precision: str,
) -> tuple[Tensor, int, Launch]:  # fmt: skip
    """What no number of tokens changes about a launch: table, programs of a lane, what the kernel is compiled for."""
    itemsize = dtype.itemsize
    take, make = _ends(hop)[::-1] if flipped else _ends(hop)
    inputs, outputs = (hop.source.size, hop.target.size)[:: -1 if flipped else 1]
    once = inputs <= NARROW
    bk = _up(inputs, NARROW if once else 64)
    bj = _up(outputs, max(16, min(how.out, 65536 // (bk * itemsize))))
    tile = (bk * TOKENS + (0 if once else bk * bj)) * itemsize
    meta = {
        "K": inputs, "J": outputs, "FROM": take, "TO": make, "T": TOKENS, "BK": bk, "BJ": bj, "ONCE": once,
        "FLIPPED": flipped, "SOURCE_FAST": fast[0], "TARGET_FAST": fast[1], "SCALED": scaled, "BIASED": biased,
        "P": precision, "num_warps": how.warps,
        "num_stages": _stages(device, how.stages, bk * bj * itemsize, tile, bj * TOKENS * itemsize),
    }  # fmt: skip
    return _table(hop, device, flipped), hop.blocks * _cdiv(outputs, bj), Launch(kernels.forward, meta)


def _forward(
    hop: Hop, source: tuple[Tensor, int], weight: Tensor, scale: Tensor | None, bias: Tensor | None,
    target: tuple[Tensor, int], source_fast: bool, target_fast: bool, how: Forward, *, flipped: bool = False,
) -> None:  # fmt: skip
    """One hop in a launch of its own; flipped, its transpose."""
    table, programs, launch = _forward_plan(
        hop, weight.device, weight.dtype, how, flipped, (source_fast, target_fast), (source[1], target[1]),
        scale is not None, bias is not None, _precision(weight),
    )  # fmt: skip
    tokens, tiles = _tokens(source, target, source_fast, target_fast)
    lanes = _lanes(programs, how.programs * _card(weight.device).processors, tiles)
    launch(
        programs * lanes, source[0], weight, weight if scale is None else scale, weight if bias is None else bias,
        target[0], table, tokens, tiles, lanes, source[1], target[1], hop.blocks,
    )  # fmt: skip


def _tokens(
    source: tuple[Tensor, int], target: tuple[Tensor, int], source_fast: bool, target_fast: bool
) -> tuple[int, int]:
    """Tokens and tiles. Between two stations inside the chain, tokens beyond the last one are there too, as zeros."""
    for (station, _), fast in ((source, source_fast), (target, target_fast)):
        if not fast:
            return station.shape[0], _cdiv(station.shape[0], TOKENS)
    return source[0].shape[0] * TOKENS, source[0].shape[0]


def _narrow(route: Route) -> bool:
    """Whether two hops follow each other, each with inputs that stay on the chip."""
    return len(route.hops) == 2 and max(hop.source.size for hop in route.hops) <= NARROW


def _pair_ends(route: Route) -> dict[str, Any]:
    first, second = route.hops
    names = ("K1", "J1", "K2", "J2", "FROM1", "TO1", "FROM2", "TO2")
    sizes = (first.source.size, first.target.size, second.source.size, second.target.size)
    return dict(zip(names, (*sizes, *_ends(first), *_ends(second)), strict=True))


@lru_cache(maxsize=4096)
def _pair_plan(
    route: Route, device: torch.device, dtype: torch.dtype, how: Forward, scaled: bool, biased: bool, ring: bool,
    precision: str,
) -> tuple[list[Tensor], int, int, Launch]:  # fmt: skip
    """As `_forward_plan` for both hops of a pair, and how many programs the card holds at once."""
    itemsize = dtype.itemsize
    blocks: list[int] = []
    stages, programs = how.stages, 0
    for hop in route.hops:
        bk = _up(hop.source.size, NARROW)
        bj = _up(hop.target.size, max(16, min(how.out, 65536 // (bk * itemsize))))
        blocks += [bk, bj]
        stages = _stages(device, stages, bk * bj * itemsize, bk * TOKENS * itemsize, bj * TOKENS * itemsize)
        programs += hop.blocks * _cdiv(hop.target.size, bj)
    meta: dict[str, Any] = {
        **_pair_ends(route), **dict(zip(("BK1", "BJ1", "BK2", "BJ2"), blocks, strict=True)),
        "T": TOKENS, "SCALED": scaled, "BIASED": biased, "RING": ring, "P": precision,
        "num_warps": how.warps, "num_stages": stages,
    }  # fmt: skip
    tables = [_table(hop, device) for hop in route.hops]
    if device.type != "cuda":
        return tables, programs, programs * 2, Launch(kernels.forward_pair, meta)
    meta["launch_cooperative_grid"] = True
    card = _card(device)
    some = torch.empty(16, dtype=dtype, device=device)
    scale = torch.empty(16, dtype=torch.float32, device=device) if scaled else some
    sizes = (route.d_in, route.rows[0], route.d_out, *(hop.blocks for hop in route.hops))
    launch = Launch(kernels.forward_pair, meta)
    compiled = launch.compile(
        some, some, scale, tables[0], some, some, scale, some, tables[1], some, tables[0], *(2,) * 7, *sizes
    )
    threads = 32 * how.warps
    by_registers = card.registers // (-(-compiled.n_regs // 8) * 8 * threads)
    by_memory = card.memory // (compiled.metadata.shared + 1024)  # a program costs 1 KiB of its own
    return tables, programs, card.processors * min(by_registers, by_memory, card.threads // threads), launch


def _forward_pair(
    route: Route, x: Tensor, weights: Sequence[Tensor], scales: Scales, bias: Tensor | None, y: Tensor,
    how: Forward, save: bool,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Both hops in one launch, or False where the card does not hold all the programs at once."""
    # The interpreter runs one program after the other: producers first, and nobody to make room for them.
    ring = not save and not INTERPRETED
    tables, programs, fit, launch = _pair_plan(
        route, x.device, x.dtype, how, bool(scales), bias is not None, ring, _precision(x)
    )
    if fit < programs:
        return False, None
    (rows,) = route.rows
    tiles = _cdiv(x.shape[0], TOKENS)
    lanes = _lanes(programs, fit, tiles)
    length = _cdiv(tiles, lanes)
    group = max(1, min(length, LIVE // (lanes * RING * rows * TOKENS * x.itemsize)))
    groups = _cdiv(length, group)
    rings = min(RING, groups)
    z = x.new_empty(lanes * rings * group if ring else tiles, rows, TOKENS)
    flags = torch.zeros(lanes * groups * 2, dtype=torch.int32, device=x.device)
    scale1, scale2 = scales or (x, x)
    launch(
        programs * lanes, x, weights[0], scale1, tables[0], z, weights[1], scale2, x if bias is None else bias,
        tables[1], y, flags, x.shape[0], tiles, lanes, group, groups, rings, rings * group,
        route.d_in, rows, route.d_out, route.hops[0].blocks, route.hops[1].blocks,
    )  # fmt: skip
    return True, z if save else None


@_there
def backward(
    route: Route, dy: Tensor, x: Tensor, z: Tensor, weights: Sequence[Tensor], scales: Scales, how: Tuning,
    *, biased: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of x, the weights, the scales and the bias.

    Sums over tokens are cut into a fixed number of lanes that are added in order: the same every time.
    """
    dx = torch.empty_like(x)
    if not x.shape[0]:
        db = dy.new_zeros(route.d_out) if biased else None
        return dx, [torch.zeros_like(w) for w in weights], [torch.zeros_like(s) for s in scales], db
    came = _stations(route, x, z, dy)
    went = _stations(route, dx, torch.empty_like(z), dy)
    dws: list[Tensor] = []
    dss: list[Tensor] = []
    db = None
    for i in reversed(range(len(route.hops))):
        last = i == len(route.hops) - 1
        scale = scales[i] if scales else None
        dw, ds, part = _backward(
            route.hops[i],
            went[i + 1],
            came[i],
            weights[i],
            scale,
            went[i],
            i > 0,
            not last,
            how,
            biased=biased and last,
        )
        dws.append(dw)
        dss += [] if ds is None else [ds]
        db = part if last else db
    return dx, dws[::-1], dss[::-1], db


@_there
def backward_x(route: Route, dy: Tensor, weights: Sequence[Tensor], scales: Scales, how: Forward) -> Tensor:
    """The gradient of x alone: the hops turned around, nothing saved."""
    dx = dy.new_empty(dy.shape[0], route.d_in)
    if dy.shape[0]:
        stations = _stations(route, dx, room(route, dy), dy)
        for i in reversed(range(len(route.hops))):
            scale = scales[i] if scales else None
            inner = i < len(route.hops) - 1
            _forward(
                route.hops[i],
                stations[i + 1],
                weights[i],
                scale,
                None,
                stations[i],
                inner,
                i > 0,
                how,
                flipped=True,
            )
    return dx


@lru_cache(maxsize=4096)
def _backward_plan(
    hop: Hop, device: torch.device, dtype: torch.dtype, how: Tuning, fast: tuple[bool, bool],
    widths: tuple[int, int], scaled: bool, biased: bool, precision: str,
) -> tuple[Tensor, int, Launch]:  # fmt: skip
    back, itemsize = how.backward, dtype.itemsize
    whole = hop.target.size <= NARROW
    bj = _up(hop.target.size, NARROW) if whole else 64
    bk = _up(hop.source.size, max(16, min(NARROW, back.numbers // bj)))
    take, make = _ends(hop)
    meta = {
        "K": hop.source.size, "J": hop.target.size, "FROM": take, "TO": make, "T": TOKENS, "BK": bk, "BJ": bj,
        "SOURCE_FAST": fast[0], "TARGET_FAST": fast[1], "BACK": whole, "SCALED": scaled, "BIASED": biased,
        "P": precision, "num_warps": back.warps,
        "num_stages": _stages(
            device, back.stages, bk * bj * itemsize, (bk + bj) * TOKENS * itemsize, max(bk, bj) * TOKENS * itemsize
        ),
    }  # fmt: skip
    parts = _cdiv(hop.source.size, bk) * (1 if whole else _cdiv(hop.target.size, bj))
    return _table(hop, device), hop.blocks * parts, Launch(kernels.backward, meta)


def _backward(
    hop: Hop, grad: tuple[Tensor, int], source: tuple[Tensor, int], weight: Tensor, scale: Tensor | None,
    out: tuple[Tensor, int], source_fast: bool, target_fast: bool, how: Tuning, *, biased: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of the weight, its scale and the bias; that of the source is written to `out`."""
    table, programs, launch = _backward_plan(
        hop, weight.device, weight.dtype, how, (source_fast, target_fast), (source[1], grad[1]), scale is not None,
        biased, _precision(weight),
    )  # fmt: skip
    if not launch.meta["BACK"]:
        # Too many outputs to have them all at once: the source's gradient by itself, as a hop turned around.
        _forward(hop, grad, weight, scale, None, out, target_fast, source_fast, how.forward, flipped=True)
    tokens, tiles = _tokens(source, grad, source_fast, target_fast)
    lanes = _lanes(programs, how.backward.programs * _card(weight.device).processors, tiles)
    parts = weight.new_empty(lanes, hop.blocks, hop.target.size, hop.source.size, dtype=torch.float32)
    db = weight.new_empty(lanes, grad[1], dtype=torch.float32) if biased else None
    launch(
        programs * lanes, grad[0], source[0], weight, weight if scale is None else scale, out[0], parts,
        parts if db is None else db, table, tokens, tiles, lanes, source[1], grad[1], hop.blocks,
    )  # fmt: skip
    return _total(hop, parts, weight, scale, db)


@lru_cache(maxsize=8)
def _total_launch(device: torch.device, dtype: torch.dtype, scaled: bool) -> Launch:
    return Launch(kernels.total, {"SCALED": scaled, "B": 1024, "num_warps": 4, "num_stages": 1})


def _total(
    hop: Hop, parts: Tensor, weight: Tensor, scale: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the weight, its scale and the bias, from the sums of each lane and block."""
    dw = torch.empty_like(weight)
    lanes, shared = parts.shape[0], hop.blocks // hop.slices
    width = 0 if sums is None else sums.shape[1]
    db = None if sums is None else weight.new_empty(width)
    launch = _total_launch(weight.device, weight.dtype, scale is not None)
    launch(
        _cdiv(weight.numel(), 1024) + _cdiv(width, 1024), parts, weight if scale is None else scale, dw,
        parts if sums is None else sums, dw if db is None else db,
        weight.numel(), hop.source.size * hop.target.size, lanes, shared, width,
    )  # fmt: skip
    if scale is None:
        return dw, None, db
    # Before its scale, the gradient's product with the weight is what the scale has to know.
    alone = parts.unflatten(1, (hop.slices, shared)).sum((0, 2))
    return dw, (alone * weight).sum().to(scale.dtype).reshape(scale.shape), db


def decodes(route: Route) -> bool:
    """Whether the kernel for a handful of tokens takes this route."""
    if not _narrow(route):
        return False
    first, second = route.hops
    columns = Places(first.source.size, first.source.size, 0, 1)
    return (
        first.source == columns
        and len(first.leads) == 1
        and first.leads[0].source == first.source.size
        and second.blocks >= 8
    )


@lru_cache(maxsize=4096)
def _decode_plan(
    route: Route, device: torch.device, dtype: torch.dtype, tokens: int, scaled: bool, biased: bool, precision: str
) -> tuple[Tensor, int, Launch]:
    first, second = route.hops
    bk1 = _up(first.source.size, NARROW)
    bj2 = _up(second.target.size, 64)
    # So many numbers of x does a program multiply at a time.
    bk2 = _up(second.source.size, max(16, 16384 // (tokens * bk1)))
    meta = {
        **{name: value for name, value in _pair_ends(route).items() if name not in ("FROM1", "TO1")},
        "SLICE": first.leads[0].weight, "T": tokens, "BK1": bk1, "BK2": bk2, "BJ2": bj2,
        "SCALED": scaled, "BIASED": biased, "P": precision, "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    return _table(second, device), _cdiv(second.target.size, bj2), Launch(kernels.decode, meta)


def _decode(route: Route, x: Tensor, weights: Sequence[Tensor], scales: Scales, bias: Tensor | None, y: Tensor) -> None:
    tokens = min(1 << (x.shape[0] - 1).bit_length(), 16)
    table, parts, launch = _decode_plan(route, x.device, x.dtype, tokens, bool(scales), bias is not None, _precision(x))
    scale1, scale2 = scales or (x, x)
    blocks = route.hops[1].blocks
    launch(
        blocks * parts * _cdiv(x.shape[0], tokens),
        x, weights[0], scale1, table, weights[1], scale2, x if bias is None else bias, y,
        x.shape[0], route.d_in, route.d_out, blocks, parts,
    )  # fmt: skip
