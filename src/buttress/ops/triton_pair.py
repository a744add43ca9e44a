"""Fused kernels for chains of two factors (see pair.py for which). Imported only when asked for.

Between the factors tokens are the fastest axis, in tiles: z is stored as (tile, c, o, token). Then the
first kernel writes whole rows of tokens and the second reads them, and the shuffle of c and b that the
chain asks for is nothing but the order in which rows are visited. Names: N tokens in tiles of T, x (N, C, D),
R (C, O, D), z (tiles, C, O, T), L (B, A, K), y (N, B, A), K = C * S.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from buttress.ops.pair import Config, Pair


@triton.jit
def _open(x, r, z, N, C, D, O, T: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):  # noqa: E741
    """z[tile, c, o, t] = sum_d R[c, o, d] x[n, c, d]; zero for tokens beyond the end."""
    tile, c, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, T)
    n = tile * T + t
    o = part * BO + tl.arange(0, BO)
    acc = tl.zeros((BO, T), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        xs = tl.load(
            x + n[:, None].to(tl.int64) * (C * D) + c * D + d[None, :], (n[:, None] < N) & (d[None, :] < D), 0.0
        )
        rs = tl.load(r + (c * O + o[:, None]) * D + d[None, :], (o[:, None] < O) & (d[None, :] < D), 0.0)
        acc = tl.dot(rs, tl.trans(xs), acc, input_precision=P)
    base = (tile.to(tl.int64) * C + c) * O
    tl.store(z + (base + o[:, None]) * T + t[None, :], acc.to(z.dtype.element_ty), o[:, None] < O)


@triton.jit
def _close(
    z, l, y, N, C, O, B, A, S, ZB, ZS, YB, YA,  # noqa: E741
    T: tl.constexpr, BA: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """y[n, b, a] = sum_k L[b, a, k] z[tile, k // S, b, k % S, t]."""
    tile, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, T)
    n = tile * T + t
    a = part * BA + tl.arange(0, BA)
    K = C * S
    acc = tl.zeros((T, BA), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        rows = (tile.to(tl.int64) * C + k // S) * O + b * ZB + (k % S) * ZS
        zs = tl.load(z + rows[:, None] * T + t[None, :], k[:, None] < K, 0.0)
        ls = tl.load(l + (b * A + a[:, None]) * K + k[None, :], (a[:, None] < A) & (k[None, :] < K), 0.0)
        acc = tl.dot(tl.trans(zs), tl.trans(ls), acc, input_precision=P)
    out = y + n[:, None].to(tl.int64) * (B * A) + b * YB + a[None, :] * YA
    tl.store(out, acc.to(y.dtype.element_ty), (n[:, None] < N) & (a[None, :] < A))


@triton.jit
def _back_close(
    dy, z, l, dz, dl, N, C, O, B, A, S, ZB, ZS, YB, YA, tiles,  # noqa: E741
    T: tl.constexpr, BA: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dz[tile, k, t] = sum_a L[b, a, k] dy[n, b, a], and dL[b, a, k] = sum_n dy[n, b, a] z[n, k] over this split."""
    b, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, T)
    a = tl.arange(0, BA)
    K = C * S
    k = part * BK + tl.arange(0, BK)
    ls = tl.load(l + (b * A + a[:, None]) * K + k[None, :], (a[:, None] < A) & (k[None, :] < K), 0.0)
    acc = tl.zeros((BA, BK), tl.float32)
    for tile in range(split, tiles, SPLIT):
        n = tile * T + t
        place = dy + n[:, None].to(tl.int64) * (B * A) + b * YB + a[None, :] * YA
        gs = tl.load(place, (n[:, None] < N) & (a[None, :] < A), 0.0)
        rows = (tl.full((), tile, tl.int64) * C + k // S) * O + b * ZB + (k % S) * ZS
        spot = rows[:, None] * T + t[None, :]
        zs = tl.load(z + spot, k[:, None] < K, 0.0)
        acc = tl.dot(tl.trans(gs), tl.trans(zs), acc, input_precision=P)
        back = tl.dot(tl.trans(ls), tl.trans(gs), input_precision=P)
        tl.store(dz + spot, back.to(dz.dtype.element_ty), k[:, None] < K)
    home = dl + ((split * B + b) * A + a[:, None]) * K + k[None, :]
    tl.store(home, acc, (a[:, None] < A) & (k[None, :] < K))


@triton.jit
def _back_open(
    dz, x, r, dx, dr, N, C, D, O, tiles,  # noqa: E741
    T: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx[n, c, d] = sum_o R[c, o, d] dz[tile, c, o, t]; dR[c, o, d] = sum_n dz[n, c, o] x[n, c, d] over this split."""
    c, split = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, T)
    o = tl.arange(0, BO)
    d = tl.arange(0, BD)
    rs = tl.load(r + (c * O + o[:, None]) * D + d[None, :], (o[:, None] < O) & (d[None, :] < D), 0.0)
    acc = tl.zeros((BO, BD), tl.float32)
    for tile in range(split, tiles, SPLIT):
        n = tile * T + t
        spot = n[:, None].to(tl.int64) * (C * D) + c * D + d[None, :]
        inside = (n[:, None] < N) & (d[None, :] < D)
        xs = tl.load(x + spot, inside, 0.0)
        base = (tl.full((), tile, tl.int64) * C + c) * O
        gs = tl.load(dz + (base + o[:, None]) * T + t[None, :], o[:, None] < O, 0.0)
        acc = tl.dot(gs, xs, acc, input_precision=P)
        back = tl.dot(tl.trans(gs), rs, input_precision=P)
        tl.store(dx + spot, back.to(dx.dtype.element_ty), inside)
    home = dr + ((split * C + c) * O + o[:, None]) * D + d[None, :]
    tl.store(home, acc, (o[:, None] < O) & (d[None, :] < D))


@triton.jit
def _back_open_wide(
    dz, r, dx, N, C, D, O, T: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr, P: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """dx alone, summing over o in pieces: for slices too large to keep dR in registers beside it."""
    tile, c, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, T)
    n = tile * T + t
    d = part * BD + tl.arange(0, BD)
    acc = tl.zeros((T, BD), tl.float32)
    base = (tile.to(tl.int64) * C + c) * O
    for start in range(0, O, BO):
        o = start + tl.arange(0, BO)
        gs = tl.load(dz + (base + o[:, None]) * T + t[None, :], o[:, None] < O, 0.0)
        rs = tl.load(r + (c * O + o[:, None]) * D + d[None, :], (o[:, None] < O) & (d[None, :] < D), 0.0)
        acc = tl.dot(tl.trans(gs), rs, acc, input_precision=P)
    out = dx + n[:, None].to(tl.int64) * (C * D) + c * D + d[None, :]
    tl.store(out, acc.to(dx.dtype.element_ty), (n[:, None] < N) & (d[None, :] < D))


@triton.jit
def _grad_open_wide(
    dz, x, dr, N, C, D, O, tiles,  # noqa: E741
    T: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dR alone, a piece of o at a time."""
    c, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, T)
    o = part * BO + tl.arange(0, BO)
    d = tl.arange(0, BD)
    acc = tl.zeros((BO, BD), tl.float32)
    for tile in range(split, tiles, SPLIT):
        n = tile * T + t
        xs = tl.load(
            x + n[:, None].to(tl.int64) * (C * D) + c * D + d[None, :], (n[:, None] < N) & (d[None, :] < D), 0.0
        )
        base = (tl.full((), tile, tl.int64) * C + c) * O
        gs = tl.load(dz + (base + o[:, None]) * T + t[None, :], o[:, None] < O, 0.0)
        acc = tl.dot(gs, xs, acc, input_precision=P)
    home = dr + ((split * C + c) * O + o[:, None]) * D + d[None, :]
    tl.store(home, acc, (o[:, None] < O) & (d[None, :] < D))


SMALL = 4096
"""Numbers of an accumulator up to which four warps and two stages are best."""
PROGRAMS = 528
"""Programs wanted of a backward kernel: four for each multiprocessor of an H200."""


def _up(n: int, most: int, least: int = 16) -> int:
    """The power of two that covers n, within what tl.dot takes and registers hold."""
    return min(max(triton.next_power_of_2(n), least), most)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"


def forward(p: Pair, x: Tensor, right: Tensor, left: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """y (N, B * A), and z for the backward pass. x is (N, C * D), contiguous; factors have one slice a block."""
    count, tokens = x.shape[0], config.tokens
    tiles = triton.cdiv(count, tokens)
    z = x.new_empty(tiles, p.c, p.o, tokens)
    y = x.new_empty(count, p.b * p.a)
    if not count:
        return y, z
    common = {"T": tokens, "P": _precision(x), "num_warps": config.warps, "num_stages": config.stages}
    bo, bd = _up(p.o, config.out), _up(p.d, config.inner)
    _open[tiles, p.c, triton.cdiv(p.o, bo)](x, right, z, count, p.c, p.d, p.o, BO=bo, BD=bd, **common)
    ba, bk = _up(p.a, config.out), _up(p.k, config.inner)
    strides = (p.z_b, p.z_s, p.y_b, p.y_a)
    _close[tiles, p.b, triton.cdiv(p.a, ba)](
        z, left, y, count, p.c, p.o, p.b, p.a, p.s, *strides, BA=ba, BK=bk, **common
    )  # fmt: skip
    return y, z


def backward(
    p: Pair, dy: Tensor, x: Tensor, z: Tensor, right: Tensor, left: Tensor, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dR, dL. Sums over tokens are cut into a fixed number of parts and added in order: the same every time."""
    count, tiles = x.shape[0], z.shape[0]
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    if not count:
        return dx, torch.zeros_like(right), torch.zeros_like(left)
    common = {"T": z.shape[-1], "P": _precision(x)}

    def launch(numbers: int) -> dict[str, int]:
        """Warps and stages for a program whose accumulator holds so many numbers."""
        if numbers <= SMALL:
            return {"num_warps": 4, "num_stages": min(2, config.back_stages)}
        return {"num_warps": config.back_warps, "num_stages": config.back_stages}

    def splits(programs: int) -> int:
        return max(1, min(tiles, PROGRAMS // programs))

    ba = _up(p.a, 1 << 20)
    bk = _up(p.k, max(16, min(256, config.registers // ba)))
    parts = triton.cdiv(p.k, bk)
    split = splits(p.b * parts)
    dl = x.new_empty(split, p.b, p.a, p.k, dtype=torch.float32)
    strides = (p.z_b, p.z_s, p.y_b, p.y_a)
    _back_close[p.b, parts, split](
        dy, z, left, dz, dl, count, p.c, p.o, p.b, p.a, p.s, *strides, tiles, BA=ba, BK=bk, SPLIT=split,
        **launch(ba * bk), **common,
    )  # fmt: skip
    bo, bd = _up(p.o, 1 << 20), _up(p.d, 1 << 20)
    if bo * bd <= config.registers and bo <= 256:
        split = splits(p.c)
        dr = x.new_empty(split, p.c, p.o, p.d, dtype=torch.float32)
        _back_open[p.c, split](
            dz, x, right, dx, dr, count, p.c, p.d, p.o, tiles, BO=bo, BD=bd, SPLIT=split,
            **launch(bo * bd), **common,
        )  # fmt: skip
    else:
        few_o, few_d = _up(p.o, config.inner), _up(p.d, config.out)
        _back_open_wide[tiles, p.c, triton.cdiv(p.d, few_d)](
            dz, right, dx, count, p.c, p.d, p.o, BO=few_o, BD=few_d, **launch(few_d * z.shape[-1]), **common
        )  # fmt: skip
        bo = _up(p.o, max(16, min(128, config.registers // bd)))
        parts = triton.cdiv(p.o, bo)
        split = splits(p.c * parts)
        dr = x.new_empty(split, p.c, p.o, p.d, dtype=torch.float32)
        _grad_open_wide[p.c, parts, split](
            dz, x, dr, count, p.c, p.d, p.o, tiles, BO=bo, BD=bd, SPLIT=split, **launch(bo * bd), **common
        )  # fmt: skip
    return dx, dr.sum(0).to(right.dtype), dl.sum(0).to(left.dtype)
