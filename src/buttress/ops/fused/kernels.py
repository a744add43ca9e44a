"""The fused kernels, for chains as `ops/strides.py` describes them. Imported only when a kernel runs.

`_apply_factor` loads one block's slice of a weight, keeps it on the chip and multiplies tile after tile of tokens by
it; `backward` is its backward pass, the gradients of the block's source and of its weight together. Programs are
(block, part, lane), blocks fastest: a part is a range of a block's outputs, and a lane is a set of token tiles. Lanes
take tiles in turn, so that at any time the GPU works on neighboring tokens.

The intermediate z between two factors is rank times as large as x, and moving it is the main cost. `forward_pair` runs
both factors in one launch. Programs of the first factor produce z and those of the second consume it a few tiles later,
with a counter for each group of tiles, so that much of z is still in the L2 cache. If z is not needed afterwards, it is
stored in a ring of a few groups and takes no further memory. All programs have to be resident at once, which a
cooperative launch guarantees.

Names: `p_` a pointer, `i_` an index, `o_` a vector of offsets, `m_` a mask, `b_` a tile of values on the chip, `n_` a
count. `src` is what a factor reads, `dst` what it writes, `w` its weight, `s` its scale. Compile-time constants are
upper case. In shapes, K and J are the inputs and outputs of a slice, BK and BJ the parts of them that a program handles
at a time, and T the tokens of a tile. "Tokens fast" means an intermediate, (tile, row, token); otherwise a tensor is
(token, column). Strides are (inner_size, outer_stride, inner_stride, alignment), and `p_table` holds for each block
(source offset / alignment, target offset / alignment, slice of the weight).

Offsets inside one token, one tile of an intermediate or one slice of a weight are 32 bits wide; where these start is
computed in 64 bits. `layouts_of` refuses chains that are too large for that.

ACTIVATION is what the first factor applies to x where it loads it, rounded to the dtype of x; None for nothing. The
backward pass multiplies the gradient of x by its derivative in float32.
"""

# Which branches are taken is decided when a kernel is compiled, statement by statement.
# ruff: noqa: SIM102, SIM108, SIM113
from __future__ import annotations

import triton
import triton.language as tl

from buttress.ops.fused.activations import activate, derivative

ALONE, PRODUCER, CONSUMER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _strided(o_i, STRIDES: tl.constexpr):
    """The map of `strides.Strides`."""
    if STRIDES[1] == 0:
        return o_i * STRIDES[2]
    else:
        return o_i // STRIDES[0] * STRIDES[1] + o_i % STRIDES[0] * STRIDES[2]


@triton.jit
def _block_offset(p_entry, STRIDES: tl.constexpr):
    """Offset of a block. Multiplying by the alignment, a constant, allows wide loads and stores."""
    return tl.load(p_entry) * STRIDES[3]


@triton.jit
def _wait(p_counter, n_programs):
    """Wait until `n_programs` have incremented the counter; their earlier stores are then visible."""
    while tl.load(p_counter, volatile=True) < n_programs:
        pass
    while tl.atomic_add(p_counter, 0, sem="acquire") < n_programs:
        pass
    tl.debug_barrier()


@triton.jit
def _signal(p_counter):
    tl.debug_barrier()
    tl.atomic_add(p_counter, 1, sem="release")


@triton.jit
def _begin_group(
    p_counters, n_groups, i_group, n_programs, n_ring_groups, ROLE: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Before a group of tiles: wait for the other side. `p_counters` are the lane's: filled groups, then freed ones."""
    if ROLE == CONSUMER:
        _wait(p_counters + i_group, n_programs)
    if ROLE == PRODUCER and RING:
        if i_group >= n_ring_groups:
            _wait(p_counters + n_groups + i_group - n_ring_groups, n_programs)


@triton.jit
def _end_group(p_counters, n_groups, i_group, ROLE: tl.constexpr, RING: tl.constexpr):
    """After a group of tiles: signal the other side."""
    if ROLE == PRODUCER:
        _signal(p_counters + i_group)
    if ROLE == CONSUMER and RING:
        _signal(p_counters + n_groups + i_group)


@triton.jit
def _load_tile(p, i_tile, i_slot, o_t, o_row, m_row, n_tokens, width, T: tl.constexpr, TOKENS_FAST: tl.constexpr):
    """One tile as [rows, T]: rows of an intermediate, or columns of a (token, column) tensor, transposed."""
    if TOKENS_FAST:
        p_tile = p + tl.full((), i_slot, tl.int64) * width * T
        return tl.load(p_tile + o_row[:, None] * T + o_t[None, :], m_row[:, None], 0.0)  # [rows, T]
    else:
        o_n = i_tile * T + o_t  # [T]
        p_tokens = p + o_n[:, None].to(tl.int64) * width  # [T, 1]
        return tl.trans(tl.load(p_tokens + o_row[None, :], (o_n[:, None] < n_tokens) & m_row[None, :], 0.0))


@triton.jit
def _store_tile(
    p, b_values, i_tile, i_slot, o_t, o_row, m_row, n_tokens, width, T: tl.constexpr, TOKENS_FAST: tl.constexpr
):  # fmt: skip
    """The inverse of `_load_tile`; `b_values` are [rows, T] for an intermediate and [T, rows] otherwise."""
    b_values = b_values.to(p.dtype.element_ty)
    if TOKENS_FAST:
        p_tile = p + tl.full((), i_slot, tl.int64) * width * T
        tl.store(p_tile + o_row[:, None] * T + o_t[None, :], b_values, m_row[:, None])
    else:
        o_n = i_tile * T + o_t  # [T]
        p_tokens = p + o_n[:, None].to(tl.int64) * width  # [T, 1]
        tl.store(p_tokens + o_row[None, :], b_values, (o_n[:, None] < n_tokens) & m_row[None, :])


@triton.jit
def _weight_pointers(p_w, o_j, o_k, J, K, TRANSPOSED: tl.constexpr):
    """Pointers to w[j, k], or to w[k, j], as [BJ, BK]."""
    if TRANSPOSED:
        return p_w + o_k[None, :] * J + o_j[:, None]
    else:
        return p_w + o_j[:, None] * K + o_k[None, :]


@triton.jit
def _multiply(b_w, b_src, b_acc, DST_TOKENS_FAST: tl.constexpr, PRECISION: tl.constexpr):
    """Add w [BJ, BK] times src [BK, T] to an accumulator [BJ, T], or its transpose to one of [T, BJ]."""
    if DST_TOKENS_FAST:
        return tl.dot(b_w, b_src, b_acc, input_precision=PRECISION)  # [BJ, T]
    else:
        return tl.dot(tl.trans(b_src), tl.trans(b_w), b_acc, input_precision=PRECISION)  # [T, BJ]


@triton.jit
def _apply_factor(
    p_src, p_w, p_s, p_bias, p_dst, p_table, p_counters, i_block, i_part, i_lane,
    n_tokens, n_tiles, n_lanes, group_tiles, n_groups, n_programs, n_ring_groups, n_slots, src_width, dst_width,
    K: tl.constexpr, J: tl.constexpr, SRC_STRIDES: tl.constexpr, DST_STRIDES: tl.constexpr,
    T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, W_ON_CHIP: tl.constexpr, TRANSPOSED: tl.constexpr,
    SRC_TOKENS_FAST: tl.constexpr, DST_TOKENS_FAST: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, ROLE: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """dst[j] = scale * sum_k w[j, k] act(src[k]) + bias[j] for the tiles of one lane; TRANSPOSED reads w[k, j].

    With DERIVATIVE, dst[j] is multiplied by act'(x[j]); p_bias is x, in the places of dst.
    """
    o_t = tl.arange(0, T)  # [T]
    o_j = i_part * BJ + tl.arange(0, BJ)  # [BJ]
    o_dst = _block_offset(p_table + i_block * 3 + 1, DST_STRIDES) + _strided(o_j, DST_STRIDES)  # [BJ]
    m_dst = (o_j < J) & (o_dst < dst_width)  # [BJ]
    src_offset = _block_offset(p_table + i_block * 3, SRC_STRIDES)
    p_slice = p_w + tl.load(p_table + i_block * 3 + 2).to(tl.int64) * J * K
    scale = tl.load(p_s).to(tl.float32) if SCALED else 1.0
    o_k = tl.arange(0, BK)  # [BK]
    o_src = src_offset + _strided(o_k, SRC_STRIDES)  # [BK]
    m_src = (o_k < K) & (o_src < src_width)  # [BK]
    if W_ON_CHIP:
        b_w = tl.load(
            _weight_pointers(p_slice, o_j, o_k, J, K, TRANSPOSED), (o_j[:, None] < J) & (o_k[None, :] < K), 0.0
        )  # [BJ, BK]  # fmt: skip
    if BIASED:
        b_bias = tl.load(p_bias + o_dst, m_dst, 0.0).to(tl.float32)  # [BJ]
    n_lane_tiles = tl.cdiv(n_tiles - i_lane, n_lanes)
    i_group = 0
    for i_first in range(0, n_lane_tiles, group_tiles):
        _begin_group(p_counters, n_groups, i_group, n_programs, n_ring_groups, ROLE, RING)
        for i in range(i_first, tl.minimum(i_first + group_tiles, n_lane_tiles)):
            i_tile = i * n_lanes + i_lane
            i_slot = i_lane * n_slots + i % n_slots if RING else i_tile
            if DST_TOKENS_FAST:
                b_acc = tl.zeros((BJ, T), tl.float32)  # [BJ, T]
            else:
                b_acc = tl.zeros((T, BJ), tl.float32)  # [T, BJ]
            if W_ON_CHIP:
                b_src = _load_tile(
                    p_src, i_tile, i_slot, o_t, o_src, m_src, n_tokens, src_width, T, SRC_TOKENS_FAST
                )  # [BK, T]  # fmt: skip
                b_acc = _multiply(b_w, activate(b_src, ACTIVATION), b_acc, DST_TOKENS_FAST, PRECISION)
            else:
                for k_first in range(0, K, BK):
                    o_kk = k_first + o_k  # [BK]
                    o_part = src_offset + _strided(o_kk, SRC_STRIDES)  # [BK]
                    m_part = (o_kk < K) & (o_part < src_width)  # [BK]
                    b_src = _load_tile(
                        p_src, i_tile, i_slot, o_t, o_part, m_part, n_tokens, src_width, T, SRC_TOKENS_FAST
                    )  # [BK, T]  # fmt: skip
                    b_wk = tl.load(
                        _weight_pointers(p_slice, o_j, o_kk, J, K, TRANSPOSED),
                        (o_j[:, None] < J) & (o_kk[None, :] < K),
                        0.0,
                    )  # [BJ, BK]
                    b_acc = _multiply(b_wk, activate(b_src, ACTIVATION), b_acc, DST_TOKENS_FAST, PRECISION)
            if SCALED:
                b_acc *= scale
            if BIASED:
                b_acc += b_bias[:, None] if DST_TOKENS_FAST else b_bias[None, :]
            if DERIVATIVE is not None:
                b_x = _load_tile(p_bias, i_tile, i_tile, o_t, o_dst, m_dst, n_tokens, dst_width, T, False)  # [BJ, T]
                b_acc *= tl.trans(derivative(b_x, DERIVATIVE))  # [T, BJ]
            _store_tile(p_dst, b_acc, i_tile, i_slot, o_t, o_dst, m_dst, n_tokens, dst_width, T, DST_TOKENS_FAST)
        _end_group(p_counters, n_groups, i_group, ROLE, RING)
        i_group += 1


COUNTS = ["n_tokens", "n_tiles", "n_lanes", "group_tiles", "n_groups", "n_ring_groups", "n_slots"]
"""Arguments that vary from call to call; a kernel must not be compiled again for them."""


@triton.jit(do_not_specialize=COUNTS)
def forward(
    p_src, p_w, p_s, p_bias, p_dst, p_table,
    n_tokens, n_tiles, n_lanes, src_width, dst_width, n_blocks, K: tl.constexpr, J: tl.constexpr,
    SRC_STRIDES: tl.constexpr, DST_STRIDES: tl.constexpr,
    T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, W_ON_CHIP: tl.constexpr, TRANSPOSED: tl.constexpr,
    SRC_TOKENS_FAST: tl.constexpr, DST_TOKENS_FAST: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """One factor. Programs are (block, part, lane), blocks fastest."""
    i_program = tl.program_id(0)
    n_parts = tl.cdiv(J, BJ)
    _apply_factor(
        p_src, p_w, p_s, p_bias, p_dst, p_table, p_table,
        i_program % n_blocks, i_program // n_blocks % n_parts, i_program // (n_blocks * n_parts),
        n_tokens, n_tiles, n_lanes, n_tiles, 1, 0, 0, 1, src_width, dst_width, K, J,
        SRC_STRIDES, DST_STRIDES, T, BK, BJ, W_ON_CHIP, TRANSPOSED, SRC_TOKENS_FAST, DST_TOKENS_FAST,
        SCALED, BIASED, ALONE, False, PRECISION, ACTIVATION, DERIVATIVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def forward_pair(
    p_x, p_w1, p_s1, p_table1, p_z, p_w2, p_s2, p_bias, p_table2, p_y, p_counters,
    n_tokens, n_tiles, n_lanes, group_tiles, n_groups, n_ring_groups, n_slots,
    d_in, n_rows, d_out, n_blocks1, n_blocks2,
    K1: tl.constexpr, J1: tl.constexpr, K2: tl.constexpr, J2: tl.constexpr,
    SRC_STRIDES1: tl.constexpr, DST_STRIDES1: tl.constexpr, SRC_STRIDES2: tl.constexpr, DST_STRIDES2: tl.constexpr,
    T: tl.constexpr, BK1: tl.constexpr, BJ1: tl.constexpr, BK2: tl.constexpr, BJ2: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Both factors of a pair. The first programs produce z, the others consume it."""
    i_program = tl.program_id(0)
    n_first, n_second = n_blocks1 * tl.cdiv(J1, BJ1), n_blocks2 * tl.cdiv(J2, BJ2)
    if i_program < n_first * n_lanes:
        i_lane = i_program // n_first
        _apply_factor(
            p_x, p_w1, p_s1, p_x, p_z, p_table1, p_counters + i_lane * n_groups * 2,
            i_program % n_blocks1, i_program % n_first // n_blocks1, i_lane,
            n_tokens, n_tiles, n_lanes, group_tiles, n_groups, n_second, n_ring_groups, n_slots, d_in, n_rows, K1, J1,
            SRC_STRIDES1, DST_STRIDES1, T, BK1, BJ1, True, False, False, True,
            SCALED, False, PRODUCER, RING, PRECISION, ACTIVATION, None,
        )  # fmt: skip
    else:
        i_program -= n_first * n_lanes
        i_lane = i_program // n_second
        _apply_factor(
            p_z, p_w2, p_s2, p_bias, p_y, p_table2, p_counters + i_lane * n_groups * 2,
            i_program % n_blocks2, i_program % n_second // n_blocks2, i_lane,
            n_tokens, n_tiles, n_lanes, group_tiles, n_groups, n_first, n_ring_groups, n_slots, n_rows, d_out, K2, J2,
            SRC_STRIDES2, DST_STRIDES2, T, BK2, BJ2, True, False, True, False,
            SCALED, BIASED, CONSUMER, RING, PRECISION, None, None,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def backward(
    p_ddst, p_src, p_w, p_s, p_dsrc, p_dw, p_dbias, p_table,
    n_tokens, n_tiles, n_lanes, src_width, dst_width, n_blocks, K: tl.constexpr, J: tl.constexpr,
    SRC_STRIDES: tl.constexpr, DST_STRIDES: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    SRC_TOKENS_FAST: tl.constexpr, DST_TOKENS_FAST: tl.constexpr, WITH_DSRC: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One factor: dsrc[k] = act'(src[k]) * scale * sum_j w[j, k] ddst[j], and over a lane's tokens dw[j, k] = sum
    ddst[j] act(src[k]) and dbias[j] = sum ddst[j]. Without WITH_DSRC only dw and dbias are computed, and j is divided
    into parts as k is."""
    i_program = tl.program_id(0)
    i_block, i_rest = i_program % n_blocks, i_program // n_blocks
    n_parts_k = tl.cdiv(K, BK)
    n_parts_j = 1 if WITH_DSRC else tl.cdiv(J, BJ)
    i_part_k, i_part_j = i_rest % n_parts_k, i_rest // n_parts_k % n_parts_j
    i_lane = i_rest // (n_parts_k * n_parts_j)
    o_t = tl.arange(0, T)  # [T]
    o_j = i_part_j * BJ + tl.arange(0, BJ)  # [BJ]
    o_k = i_part_k * BK + tl.arange(0, BK)  # [BK]
    o_dst = _block_offset(p_table + i_block * 3 + 1, DST_STRIDES) + _strided(o_j, DST_STRIDES)  # [BJ]
    m_dst = (o_j < J) & (o_dst < dst_width)  # [BJ]
    o_src = _block_offset(p_table + i_block * 3, SRC_STRIDES) + _strided(o_k, SRC_STRIDES)  # [BK]
    m_src = (o_k < K) & (o_src < src_width)  # [BK]
    m_w = (o_j[:, None] < J) & (o_k[None, :] < K)  # [BJ, BK]
    if WITH_DSRC:
        p_slice = p_w + tl.load(p_table + i_block * 3 + 2).to(tl.int64) * J * K
        b_w = tl.load(p_slice + o_j[:, None] * K + o_k[None, :], m_w, 0.0)  # [BJ, BK]
    scale = tl.load(p_s).to(tl.float32) if SCALED else 1.0
    b_dw = tl.zeros((BJ, BK), tl.float32)  # [BJ, BK]
    b_dbias = tl.zeros((BJ,), tl.float32)  # [BJ]
    for i_tile in range(i_lane, n_tiles, n_lanes):
        b_ddst = _load_tile(
            p_ddst, i_tile, i_tile, o_t, o_dst, m_dst, n_tokens, dst_width, T, DST_TOKENS_FAST
        )  # [BJ, T]  # fmt: skip
        b_src = _load_tile(
            p_src, i_tile, i_tile, o_t, o_src, m_src, n_tokens, src_width, T, SRC_TOKENS_FAST
        )  # [BK, T]  # fmt: skip
        b_dw = tl.dot(b_ddst, tl.trans(activate(b_src, ACTIVATION)), b_dw, input_precision=PRECISION)  # [BJ, BK]
        if BIASED:
            b_dbias += tl.sum(b_ddst.to(tl.float32), 1)  # [BJ]
        if WITH_DSRC:
            if SRC_TOKENS_FAST:
                b_dsrc = tl.dot(tl.trans(b_w), b_ddst, input_precision=PRECISION)  # [BK, T]
            else:
                b_dsrc = tl.dot(tl.trans(b_ddst), b_w, input_precision=PRECISION)  # [T, BK]
            if SCALED:
                b_dsrc *= scale
            if ACTIVATION is not None:
                b_dsrc *= tl.trans(derivative(b_src, ACTIVATION))  # [T, BK]: the source is x
            _store_tile(p_dsrc, b_dsrc, i_tile, i_tile, o_t, o_src, m_src, n_tokens, src_width, T, SRC_TOKENS_FAST)
    p_dslice = p_dw + (i_lane * n_blocks + i_block).to(tl.int64) * J * K
    tl.store(p_dslice + o_j[:, None] * K + o_k[None, :], b_dw, m_w)
    if BIASED:
        if i_part_k == 0:
            tl.store(p_dbias + i_lane.to(tl.int64) * dst_width + o_dst, b_dbias, m_dst)


@triton.jit(do_not_specialize=["n_entries", "slice_size", "n_lanes", "n_shared", "width"])
def reduce_gradients(
    p_dw_parts, p_s, p_dw, p_dbias_parts, p_dbias, n_entries, slice_size, n_lanes, n_shared, width,
    SCALED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The gradient of a weight, summed over lanes and over the blocks that share a slice, and that of the bias,
    summed over lanes: always in the same order."""
    i_program = tl.program_id(0)
    n_weight_programs = tl.cdiv(n_entries.to(tl.int64), B).to(tl.int32)
    o_b = tl.arange(0, B)  # [B]
    b_acc = tl.zeros((B,), tl.float32)  # [B]
    if i_program < n_weight_programs:
        i_first = i_program.to(tl.int64) * B  # a weight may have more than 2^31 entries, its slices may not
        o_i = (i_first % slice_size).to(tl.int32) + o_b  # [B], from the start of the first entry's slice
        m_i = o_b < n_entries - i_first  # [B]
        o_part = (i_first // slice_size + o_i // slice_size) * slice_size * n_shared + o_i % slice_size  # [B]
        for i_part in range(n_lanes * n_shared):
            part_offset = (
                tl.full((), i_part // n_shared, tl.int64) * n_entries * n_shared
                + tl.full((), i_part % n_shared, tl.int64) * slice_size
            )
            b_acc += tl.load(p_dw_parts + part_offset + o_part, m_i, 0.0)
        if SCALED:
            b_acc *= tl.load(p_s).to(tl.float32)
        tl.store(p_dw + i_first + o_b, b_acc.to(p_dw.dtype.element_ty), m_i)
    else:
        o_i = (i_program - n_weight_programs) * B + o_b  # [B]
        for i_lane in range(n_lanes):
            b_acc += tl.load(p_dbias_parts + tl.full((), i_lane, tl.int64) * width + o_i, o_i < width, 0.0)
        tl.store(p_dbias + o_i, b_acc.to(p_dbias.dtype.element_ty), o_i < width)


@triton.jit(do_not_specialize=["n_tokens"])
def decode_pair(
    p_x, p_w1, p_s1, p_table2, p_w2, p_s2, p_bias, p_y,
    n_tokens, d_in, d_out, n_blocks, n_parts,
    K1: tl.constexpr, J1: tl.constexpr, K2: tl.constexpr, J2: tl.constexpr,
    SLICE_STRIDE1: tl.constexpr, SRC_STRIDES2: tl.constexpr, DST_STRIDES2: tl.constexpr,
    T: tl.constexpr, BK1: tl.constexpr, BK2: tl.constexpr, BJ2: tl.constexpr,
    SCALED: tl.constexpr, ROWS_SCALED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Both factors for few tokens. Each program computes the rows of z that its block of the second factor needs, so
    no program waits for another. SLICE_STRIDE1 is 0 where the first weight is shared. ROWS_SCALED: the scales are
    (slice, j), and the weights may be int8, which all dtypes of x hold exactly."""
    i_program = tl.program_id(0)
    i_block, i_part = i_program % n_blocks, i_program // n_blocks % n_parts
    o_t = i_program // (n_blocks * n_parts) * T + tl.arange(0, T)  # [T]
    o_j2 = i_part * BJ2 + tl.arange(0, BJ2)  # [BJ2]
    o_k1 = tl.arange(0, BK1)  # [BK1]
    z_offset = _block_offset(p_table2 + i_block * 3, SRC_STRIDES2)
    o_y = _block_offset(p_table2 + i_block * 3 + 1, DST_STRIDES2) + _strided(o_j2, DST_STRIDES2)  # [BJ2]
    i_slice2 = tl.load(p_table2 + i_block * 3 + 2).to(tl.int64)
    p_slice2 = p_w2 + i_slice2 * J2 * K2
    if SCALED:
        scale1 = tl.load(p_s1).to(tl.float32)
    b_acc = tl.zeros((T, BJ2), tl.float32)  # [T, BJ2]
    for k_first in range(0, K2, BK2):
        o_k2 = k_first + tl.arange(0, BK2)  # [BK2]
        o_z = z_offset + _strided(o_k2, SRC_STRIDES2)  # [BK2]
        o_block1, o_j1 = o_z // J1, o_z % J1  # [BK2]
        o_row1 = o_block1 * SLICE_STRIDE1 * J1 + o_j1  # [BK2]
        m_w1 = (o_k2[:, None] < K2) & (o_k1[None, :] < K1)  # [BK2, BK1]
        b_w1 = tl.load(p_w1 + o_row1[:, None] * K1 + o_k1[None, :], m_w1, 0.0).to(tl.float32)  # [BK2, BK1]
        o_column = o_block1[:, None] * K1 + o_k1[None, :]  # [BK2, BK1]
        o_x = o_t.to(tl.int64)[:, None, None] * d_in + o_column[None, :, :]  # [T, BK2, BK1]
        m_x = (o_t[:, None, None] < n_tokens) & (m_w1 & (o_column < d_in))[None, :, :]  # [T, BK2, BK1]
        b_x = activate(tl.load(p_x + o_x, m_x, 0.0), ACTIVATION).to(tl.float32)  # [T, BK2, BK1]
        b_z = tl.sum(b_x * b_w1[None, :, :], 2)  # [T, BK2]
        if SCALED:
            b_z *= scale1
        if ROWS_SCALED:
            b_z *= tl.load(p_s1 + o_row1, o_k2 < K2, 0.0)[None, :]
        b_w2 = tl.load(
            p_slice2 + o_j2[:, None] * K2 + o_k2[None, :], (o_j2[:, None] < J2) & (o_k2[None, :] < K2), 0.0
        )  # [BJ2, BK2]  # fmt: skip
        if T >= 16:
            b_w2 = b_w2.to(p_x.dtype.element_ty)
            b_acc = tl.dot(b_z.to(b_w2.dtype), tl.trans(b_w2), b_acc, input_precision=PRECISION)  # [T, BJ2]
        else:
            b_acc += tl.sum(b_z[:, None, :] * b_w2[None, :, :].to(tl.float32), 2)  # [T, BJ2]
    if SCALED:
        b_acc *= tl.load(p_s2).to(tl.float32)
    if ROWS_SCALED:
        b_acc *= tl.load(p_s2 + i_slice2 * J2 + o_j2, o_j2 < J2, 0.0)[None, :]
    m_y = (o_j2 < J2) & (o_y < d_out)  # [BJ2]
    if BIASED:
        b_acc += tl.load(p_bias + o_y, m_y, 0.0).to(tl.float32)[None, :]
    p_out = p_y + o_t.to(tl.int64)[:, None] * d_out + o_y[None, :]  # [T, BJ2]
    tl.store(p_out, b_acc.to(p_y.dtype.element_ty), (o_t[:, None] < n_tokens) & m_y[None, :])
