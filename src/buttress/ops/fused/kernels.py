"""The fused kernels (hops.py says what they are given). Imported only when asked for.

`_map` takes one block's slice of a weight, keeps it on the chip and carries tile after tile of tokens through it;
`backward` is its backward pass, the gradient of what the block read and of the weight in one go. Programs are
(block, part of the block, lane of tokens), blocks fastest, and lanes are dealt tiles in turn, so that at any time
the card works on tokens that lie close together.

Between two hops lies z, rank times as large as x, and moving it is what costs. `forward_pair` runs both hops in one
launch, some programs each: the consumers follow the producers at a distance of a few tiles, a counter for each
group of tiles tells them when, and much of what passes between them is still in the L2 cache. Where nobody needs z
afterwards it lives in a ring of a few groups and takes no memory. All programs have to be on the card at
once for that: a cooperative launch, of no more programs than fit.
"""

# Which branches are taken is settled when a kernel is compiled, statement by statement.
# ruff: noqa: SIM102, SIM108, SIM113
from __future__ import annotations

import triton
import triton.language as tl

ALONE, PRODUCES, CONSUMES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _place(i, AT: tl.constexpr):
    """hops.Places: AT is (split, outer, inner, align)."""
    if AT[1] == 0:
        return i * AT[2]
    else:
        return i // AT[0] * AT[1] + i % AT[0] * AT[2]


@triton.jit
def _base(table, AT: tl.constexpr):
    """Where a block begins. That it is a multiple of `align` is what lets loads and stores be wide."""
    return tl.load(table) * AT[3]


@triton.jit
def _wait(flag, count):
    """Until `count` programs have raised the flag; what they stored before is visible afterwards."""
    while tl.load(flag, volatile=True) < count:
        pass
    while tl.atomic_add(flag, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def _raise(flag):
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def _enter(flags, groups, group, count, ring, LINK: tl.constexpr, RING: tl.constexpr):
    """Before a group of tiles: wait for the other side. `flags` are this lane's: ready ones, then freed ones."""
    if LINK == CONSUMES:
        _wait(flags + group, count)
    if LINK == PRODUCES and RING:
        if group >= ring:
            _wait(flags + groups + group - ring, count)


@triton.jit
def _leave(flags, groups, group, LINK: tl.constexpr, RING: tl.constexpr):
    if LINK == PRODUCES:
        _raise(flags + group)
    if LINK == CONSUMES and RING:
        _raise(flags + groups + group)


@triton.jit
def _read(p, tile, slot, t, place, inside, tokens, width, T: tl.constexpr, FAST: tl.constexpr):
    """(places, tokens) of one tile: rows of z, or columns of x, which come with tokens first."""
    if FAST:
        base = p + tl.full((), slot, tl.int64) * width * T
        return tl.load(base + place[:, None] * T + t[None, :], inside[:, None], 0.0)
    else:
        n = tile * T + t
        base = p + n[:, None].to(tl.int64) * width
        return tl.trans(tl.load(base + place[None, :], (n[:, None] < tokens) & inside[None, :], 0.0))


@triton.jit
def _write(p, values, tile, slot, t, place, inside, tokens, width, T: tl.constexpr, FAST: tl.constexpr):
    """The inverse of `_read`; `values` are (places, tokens) for z and (tokens, places) otherwise."""
    values = values.to(p.dtype.element_ty)
    if FAST:
        base = p + tl.full((), slot, tl.int64) * width * T
        tl.store(base + place[:, None] * T + t[None, :], values, inside[:, None])
    else:
        n = tile * T + t
        base = p + n[:, None].to(tl.int64) * width
        tl.store(base + place[None, :], values, (n[:, None] < tokens) & inside[None, :])


@triton.jit
def _at(w, j, k, J, K, FLIPPED: tl.constexpr):
    if FLIPPED:
        return w + k[None, :] * J + j[:, None]
    else:
        return w + j[:, None] * K + k[None, :]


@triton.jit
def _multiply(w, s, acc, FAST: tl.constexpr, P: tl.constexpr):
    """W s as (out, tokens), or its transpose where the result is wanted tokens first."""
    if FAST:
        return tl.dot(w, s, acc, input_precision=P)
    else:
        return tl.dot(tl.trans(s), tl.trans(w), acc, input_precision=P)


@triton.jit
def _map(
    source, w, scale, bias, target, table, flags, block, part, lane,
    tokens, tiles, lanes, group, groups, count, ring, slots, source_width, target_width,
    K: tl.constexpr, J: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr,
    T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, ONCE: tl.constexpr, FLIPPED: tl.constexpr,
    SOURCE_FAST: tl.constexpr, TARGET_FAST: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, LINK: tl.constexpr, RING: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """target[j] = scale * sum_k w[j, k] source[k] + bias[j] for the tiles of one lane; FLIPPED reads w[k, j]."""
    t = tl.arange(0, T)
    j = part * BJ + tl.arange(0, BJ)
    to = _base(table + block * 3 + 1, TO) + _place(j, TO)
    to_inside = (j < J) & (to < target_width)
    come = _base(table + block * 3, FROM)
    slice_w = w + tl.load(table + block * 3 + 2).to(tl.int64) * J * K
    gain = tl.load(scale).to(tl.float32) if SCALED else 1.0
    k = tl.arange(0, BK)
    place = come + _place(k, FROM)
    inside = (k < K) & (place < source_width)
    if ONCE:
        ws = tl.load(_at(slice_w, j, k, J, K, FLIPPED), (j[:, None] < J) & (k[None, :] < K), 0.0)
    if BIASED:
        shift = tl.load(bias + to, to_inside, 0.0).to(tl.float32)
    mine = tl.cdiv(tiles - lane, lanes)
    number = 0
    for start in range(0, mine, group):
        _enter(flags, groups, number, count, ring, LINK, RING)
        for i in range(start, tl.minimum(start + group, mine)):
            tile = i * lanes + lane
            slot = lane * slots + i % slots if RING else tile
            if TARGET_FAST:
                acc = tl.zeros((BJ, T), tl.float32)
            else:
                acc = tl.zeros((T, BJ), tl.float32)
            if ONCE:
                s = _read(source, tile, slot, t, place, inside, tokens, source_width, T, SOURCE_FAST)
                acc = _multiply(ws, s, acc, TARGET_FAST, P)
            else:
                for begin in range(0, K, BK):
                    ks = begin + k
                    at = come + _place(ks, FROM)
                    there = (ks < K) & (at < source_width)
                    s = _read(source, tile, slot, t, at, there, tokens, source_width, T, SOURCE_FAST)
                    wp = tl.load(
                        _at(slice_w, j, ks, J, K, FLIPPED), (j[:, None] < J) & (ks[None, :] < K), 0.0
                    )  # fmt: skip
                    acc = _multiply(wp, s, acc, TARGET_FAST, P)
            if SCALED:
                acc *= gain
            if BIASED:
                acc += shift[:, None] if TARGET_FAST else shift[None, :]
            _write(target, acc, tile, slot, t, to, to_inside, tokens, target_width, T, TARGET_FAST)
        _leave(flags, groups, number, LINK, RING)
        number += 1


COUNTS = ["tokens", "tiles", "lanes", "group", "groups", "ring", "slots"]
"""Arguments that vary from call to call; a kernel must not be compiled anew for them."""


@triton.jit(do_not_specialize=COUNTS)
def forward(
    source, w, scale, bias, target, table,
    tokens, tiles, lanes, source_width, target_width, blocks, K: tl.constexpr, J: tl.constexpr,
    FROM: tl.constexpr, TO: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, ONCE: tl.constexpr,
    FLIPPED: tl.constexpr, SOURCE_FAST: tl.constexpr, TARGET_FAST: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One hop by itself. Programs are (block, part of its outputs, lane of tokens), blocks fastest."""
    pid = tl.program_id(0)
    parts = tl.cdiv(J, BJ)
    _map(
        source, w, scale, bias, target, table, table, pid % blocks, pid // blocks % parts, pid // (blocks * parts),
        tokens, tiles, lanes, tiles, 1, 0, 0, 1, source_width, target_width, K, J,
        FROM, TO, T, BK, BJ, ONCE, FLIPPED, SOURCE_FAST, TARGET_FAST, SCALED, BIASED, ALONE, False, P,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def forward_pair(
    x, w1, scale1, table1, z, w2, scale2, bias, table2, y, flags,
    tokens, tiles, lanes, group, groups, ring, slots, d_in, rows, d_out, blocks1, blocks2,
    K1: tl.constexpr, J1: tl.constexpr, K2: tl.constexpr, J2: tl.constexpr,
    FROM1: tl.constexpr, TO1: tl.constexpr, FROM2: tl.constexpr, TO2: tl.constexpr,
    T: tl.constexpr, BK1: tl.constexpr, BJ1: tl.constexpr, BK2: tl.constexpr, BJ2: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, RING: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Both hops of a pair, z between them."""
    pid = tl.program_id(0)
    first, second = blocks1 * tl.cdiv(J1, BJ1), blocks2 * tl.cdiv(J2, BJ2)
    if pid < first * lanes:
        lane = pid // first
        _map(
            x, w1, scale1, x, z, table1, flags + lane * groups * 2, pid % blocks1, pid % first // blocks1, lane,
            tokens, tiles, lanes, group, groups, second, ring, slots, d_in, rows, K1, J1,
            FROM1, TO1, T, BK1, BJ1, True, False, False, True, SCALED, False, PRODUCES, RING, P,
        )  # fmt: skip
    else:
        pid -= first * lanes
        lane = pid // second
        _map(
            z, w2, scale2, bias, y, table2, flags + lane * groups * 2, pid % blocks2, pid % second // blocks2, lane,
            tokens, tiles, lanes, group, groups, first, ring, slots, rows, d_out, K2, J2,
            FROM2, TO2, T, BK2, BJ2, True, False, True, False, SCALED, BIASED, CONSUMES, RING, P,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def backward(
    grad, source, w, scale, out, dw, db, table,
    tokens, tiles, lanes, source_width, target_width, blocks, K: tl.constexpr, J: tl.constexpr,
    FROM: tl.constexpr, TO: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    SOURCE_FAST: tl.constexpr, TARGET_FAST: tl.constexpr, BACK: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One hop: out[k] = scale * sum_j w[j, k] grad[j], and over a lane's tokens dw[j, k] = sum grad[j] source[k] and
    db[j] = sum grad[j]. Without BACK only the sums, of a part of j as well as of k."""
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    parts_k = tl.cdiv(K, BK)
    parts_j = 1 if BACK else tl.cdiv(J, BJ)
    part_k, part_j, lane = rest % parts_k, rest // parts_k % parts_j, rest // (parts_k * parts_j)
    t = tl.arange(0, T)
    j = part_j * BJ + tl.arange(0, BJ)
    k = part_k * BK + tl.arange(0, BK)
    to = _base(table + block * 3 + 1, TO) + _place(j, TO)
    to_inside = (j < J) & (to < target_width)
    place = _base(table + block * 3, FROM) + _place(k, FROM)
    inside = (k < K) & (place < source_width)
    corner = (j[:, None] < J) & (k[None, :] < K)
    if BACK:
        slice_w = w + tl.load(table + block * 3 + 2).to(tl.int64) * J * K
        ws = tl.load(slice_w + j[:, None] * K + k[None, :], corner, 0.0)
    gain = tl.load(scale).to(tl.float32) if SCALED else 1.0
    acc = tl.zeros((BJ, BK), tl.float32)
    total = tl.zeros((BJ,), tl.float32)
    for tile in range(lane, tiles, lanes):
        gs = _read(grad, tile, tile, t, to, to_inside, tokens, target_width, T, TARGET_FAST)
        s = _read(source, tile, tile, t, place, inside, tokens, source_width, T, SOURCE_FAST)
        acc = tl.dot(gs, tl.trans(s), acc, input_precision=P)
        if BIASED:
            total += tl.sum(gs.to(tl.float32), 1)
        if BACK:
            if SOURCE_FAST:
                back = tl.dot(tl.trans(ws), gs, input_precision=P)
            else:
                back = tl.dot(tl.trans(gs), ws, input_precision=P)
            if SCALED:
                back *= gain
            _write(out, back, tile, tile, t, place, inside, tokens, source_width, T, SOURCE_FAST)
    home = dw + (lane * blocks + block).to(tl.int64) * J * K
    tl.store(home + j[:, None] * K + k[None, :], acc, corner)
    if BIASED:
        if part_k == 0:
            tl.store(db + lane * target_width + to, total, to_inside)


@triton.jit(do_not_specialize=["count", "size", "lanes", "shared", "width"])
def total(
    parts, scale, dw, sums, db, count, size, lanes, shared, width, SCALED: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The gradient of a weight, summed over lanes and over the blocks that share a slice, and that of the bias,
    summed over lanes: always in the same order."""
    pid = tl.program_id(0)
    programs = tl.cdiv(count, B)
    if pid < programs:
        i = pid * B + tl.arange(0, B)
        base = (i // size).to(tl.int64) * size * shared + i % size
        acc = tl.zeros((B,), tl.float32)
        for part in range(lanes * shared):
            step = tl.full((), part // shared, tl.int64) * count * shared + part % shared * size
            acc += tl.load(parts + step + base, i < count, 0.0)
        if SCALED:
            acc *= tl.load(scale).to(tl.float32)
        tl.store(dw + i, acc.to(dw.dtype.element_ty), i < count)
    else:
        i = (pid - programs) * B + tl.arange(0, B)
        acc = tl.zeros((B,), tl.float32)
        for lane in range(lanes):
            acc += tl.load(sums + lane * width + i, i < width, 0.0)
        tl.store(db + i, acc.to(db.dtype.element_ty), i < width)


@triton.jit(do_not_specialize=["tokens"])
def decode(
    x, w1, scale1, table2, w2, scale2, bias, y,
    tokens, d_in, d_out, blocks, parts,
    K1: tl.constexpr, J1: tl.constexpr, K2: tl.constexpr, J2: tl.constexpr,
    SLICE: tl.constexpr, FROM2: tl.constexpr, TO2: tl.constexpr,
    T: tl.constexpr, BK1: tl.constexpr, BK2: tl.constexpr, BJ2: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Both hops for a handful of tokens. A block of the second hop needs only its own rows of the first, so that
    each program makes them for itself and none waits for another. SLICE is 0 where the first weight is shared."""
    pid = tl.program_id(0)
    block, part = pid % blocks, pid // blocks % parts
    t = pid // (blocks * parts) * T + tl.arange(0, T)
    a = part * BJ2 + tl.arange(0, BJ2)
    d = tl.arange(0, BK1)
    come = _base(table2 + block * 3, FROM2)
    to = _base(table2 + block * 3 + 1, TO2) + _place(a, TO2)
    slice2 = w2 + tl.load(table2 + block * 3 + 2).to(tl.int64) * J2 * K2
    if SCALED:
        gain1 = tl.load(scale1).to(tl.float32)
    acc = tl.zeros((T, BJ2), tl.float32)
    for start in range(0, K2, BK2):
        k = start + tl.arange(0, BK2)
        row = come + _place(k, FROM2)
        c, o = row // J1, row % J1
        inside = (k[:, None] < K2) & (d[None, :] < K1)
        ws = tl.load(w1 + (c * SLICE * J1 + o)[:, None] * K1 + d[None, :], inside, 0.0).to(tl.float32)
        column = c[:, None] * K1 + d[None, :]
        spot = t.to(tl.int64)[:, None, None] * d_in + column[None, :, :]
        here = (t[:, None, None] < tokens) & (inside & (column < d_in))[None, :, :]
        xs = tl.load(x + spot, here, 0.0).to(tl.float32)
        z = tl.sum(xs * ws[None, :, :], 2)
        if SCALED:
            z *= gain1
        vs = tl.load(slice2 + a[:, None] * K2 + k[None, :], (a[:, None] < J2) & (k[None, :] < K2), 0.0)
        if T >= 16:
            acc = tl.dot(z.to(vs.dtype), tl.trans(vs), acc, input_precision=P)
        else:
            acc += tl.sum(z[:, None, :] * vs[None, :, :].to(tl.float32), 2)
    if SCALED:
        acc *= tl.load(scale2).to(tl.float32)
    inside = (a < J2) & (to < d_out)
    if BIASED:
        acc += tl.load(bias + to, inside, 0.0).to(tl.float32)[None, :]
    out = y + t.to(tl.int64)[:, None] * d_out + to[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), (t[:, None] < tokens) & inside[None, :])
