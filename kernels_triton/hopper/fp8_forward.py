"""Forward attention in FP8 on Hopper (sm_90) in Gluon: `hopper_forward` with fp8 operands, all products by QGMMA.

q, k and v come in FP8 with scales per tensor, head, batch or block of rows; v comes transposed (`hopper_fp8`), and p is made fp8 in
the order of v's tokens, so that nothing is transposed or shuffled here. The tensor cores add fp8 products up in about 14 bits: the
product with v of each block of keys is an accumulator of its own, added in fp32 to the rest by the multiply-add that rescales it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Alibi, Bias, Lengths
from flexattn.kernels_triton.common.primitives import (
    LN2,
    LOG2E,
    LOWEST,
    captures_of_head,
    exponent_factor,
    exponent_origin,
    load_head,
    log_of_sum,
    packed_start,
    positive_factor,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HOPPER_FLOPS, split_head_dim
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_keys, key_block, own_blocks
from flexattn.kernels_triton.hopper.conditions import unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import (
    FP8_DTYPES,
    batch_steps_of,
    descriptor_error,
    load_rows,
    ragged_descriptor,
    store_rows,
)
from flexattn.kernels_triton.hopper.fp8 import (
    BLOCK,
    P_SCALE,
    P_SHIFT,
    Scale,
    compute_here,
    first_transposed_block,
    load_descale,
    pack_quads,
    scale_error,
    scales_of,
    transposed_descriptor,
    unpack_quads,
)
from flexattn.kernels_triton.hopper.masking import mask_by_mod, mask_keys
from flexattn.kernels_triton.hopper.operands import keep_pairs
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers, pass_over
from flexattn.kernels_triton.hopper.scores import modified
from flexattn.kernels_triton.hopper.tile_scheduler import (
    amount_of_work,
    hear,
    piece_of_work,
    query_heads_per_section,
    sequences,
    tell,
)
from flexattn.kernels_triton.runtime.launch import Tile, capability_of, hopper_kernel, launch, num_processors

_ROWS = gl.constexpr(64)  # queries of a warpgroup: wgmma's M
_COLUMNS = gl.constexpr(8)  # of the product that sums p: wgmma's least N, all alike
_ONE = gl.constexpr(0x38)  # 1 in e4m3


class Fp8Tile(NamedTuple):
    """A row for the FP8 forward on sm_90, as `HopperTile`."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 64 for each consumer warpgroup
    block_n: int
    num_stages: int  # of k and of v in shared memory
    q_stages: int
    registers: int  # of a consumer's thread
    parts: int  # in which v is summed, for want of registers


FP8_FORWARD = (
    Fp8Tile(64, 64, 192, 128, 3, 2, 160, 1),
    Fp8Tile(128, 128, 192, 128, 3, 2, 160, 1),
    Fp8Tile(192, 128, 192, 128, 2, 2, 160, 2),
    Fp8Tile(256, 256, 128, 128, 2, 1, 240, 2),
)


SHORTEST = 2048
"""Of the longest sequence, from which it was measured (bench/results/fp8_hopper_h200.json, beside bf16)."""


def select_fp8_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> Fp8Tile:
    """The narrowest row that serves the head dims, which are at most 256; scores that are modified need registers."""
    tile = next(tile for tile in FP8_FORWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return tile._replace(block_m=128, registers=240) if is_modified else tile


class Fp8ForwardMeta(NamedTuple):
    """What the kernel is compiled for."""

    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_GAPS_Q: bool
    HAS_GAPS_KV: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_IDLE: bool  # `own_blocks` and `pass_over` of the 16-bit kernel know these four
    SKIPS: bool
    GROUP: int
    TAKES_TURNS: bool
    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_PRE_SCALE_BIAS: bool
    HAS_POST_SCALE_BIAS: bool
    IS_BIAS_CONTIGUOUS: bool
    HAS_ALIBI: bool
    HAS_SOFTCAP: bool
    IS_UNBOUNDED: bool
    HAS_EXACT_TANH: bool
    HAS_SCORE_MOD: bool
    HAS_MASK_MOD: bool
    BLOCK_SIZE_Q: int
    BLOCK_SIZE_KV: int
    LISTS_ARE_CUT: bool
    IS_MODIFIED: bool  # a logit is more than a scaled score
    Q_BLOCKWISE: bool  # the scales of q, of k, of v vary along the sequence
    K_BLOCKWISE: bool
    V_BLOCKWISE: bool
    BLOCK_M: int
    BLOCK_N: int
    QK0: int  # head dims as the tiles hold them, in one or two parts
    QK1: int
    V0: int  # of a part of v
    PARTS: int
    STAGES: int
    Q_STAGES: int
    CONSUMERS: int
    REGISTERS: int
    NUMBERS: int  # that make a tile: (first query, head, batch), with lengths (first token, queries, keys), then three scales


@gluon.jit
def _load_partition(common, scales, META: gl.constexpr):
    descriptors, tiles, barriers, work, scalars, cu_seqlens, table_ptr, lists = common
    q_descriptor, k_descriptor, v_descriptor, _, q1_descriptor, k1_descriptor = descriptors
    q_tiles, k_tiles, v_tiles, _, q1_tiles, k1_tiles, _ = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    scale_q, scale_k, scale_v = scales
    batch, num_heads, group_size, blocks, heads_per_section, v_blocks = work
    num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps = scalars
    step_qs, step_qh, step_ks, step_kh, _, _ = steps
    amount = amount_of_work(table_ptr, batch, num_heads, blocks, META)
    CONSUMERS: gl.constexpr = META.CONSUMERS
    QK0: gl.constexpr = META.QK0
    loaded = 0
    turn = 0
    piece = gl.program_id(0)
    while piece < amount:
        drawn = gl.atomic_add(table_ptr, 1, sem="relaxed")  # the next piece's number travels while this one loads
        first_row, h, b = piece_of_work(piece, amount, table_ptr, batch, num_heads, blocks, heads_per_section, META)
        start_q, len_q, start_kv, len_kv = sequences(
            b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
        )
        h_kv = h // group_size
        tile = (first_row, h, b)
        if META.HAS_LENGTHS:
            tile = tile + (start_q, len_q, len_kv)
        descale_q = load_descale(scale_q, b, h, 0).to(gl.int32, bitcast=True)
        descale_k = load_descale(scale_k, b, h_kv, 0).to(gl.int32, bitcast=True)
        descale_v = load_descale(scale_v, b, h_kv, 0).to(gl.int32, bitcast=True)
        tell(tile + (descale_q, descale_k, descale_v), turn, barriers, META)
        shift = (len_kv - len_q) * bottom_right
        num_blocks, found = blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META)
        place_kv = packed_start(Lengths(cu_seqlens[1], cu_seqlens[3], batch, num_tokens_kv, max_seqlen_kv), b, start_kv)
        v_block = h_kv * v_blocks + first_transposed_block(b, place_kv, num_tokens_kv, META.IS_RAGGED_KV)
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * _ROWS
            token, head = start_q + b * step_qs, h + b * step_qh
            slot = consumer + turn % META.Q_STAGES * CONSUMERS
            full = q_full.index(slot)
            mbarrier.wait(q_empty.index(slot), ((turn // META.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(full, q_descriptor.block_type.nbytes + (q1_descriptor.block_type.nbytes if META.QK1 > 0 else 0))
            load_rows(q_descriptor, token, len_q, row, head, 0, full, q_tiles.index(slot))
            if META.QK1 > 0:
                load_rows(q1_descriptor, token, len_q, row, head, QK0, full, q1_tiles.index(slot))
        for t in range(num_blocks):
            row = key_block(num_blocks - 1 - t, found, META)[0]
            slot = loaded % META.STAGES
            phase = (loaded // META.STAGES) & 1
            token, head = start_kv + b * step_ks, h_kv + b * step_kh
            full = k_full.index(slot)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(full, k_descriptor.block_type.nbytes + (k1_descriptor.block_type.nbytes if META.QK1 > 0 else 0))
            load_rows(k_descriptor, token, len_kv, row, head, 0, full, k_tiles.index(slot))
            if META.QK1 > 0:
                load_rows(k1_descriptor, token, len_kv, row, head, QK0, full, k1_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes)
            place = [v_block + row // BLOCK, 0, row % BLOCK]
            tma.async_copy_global_to_shared(v_descriptor, place, v_full.index(slot), v_tiles.index(slot))
            loaded += 1
        piece = drawn + gl.num_programs(0)
        turn += 1
    tell((-1, 0, 0, 0, 0, 0, 0, 0, 0), turn, barriers, META)


@gluon.jit
def _scores(q_tiles, k_tiles, q1_tiles, k1_tiles, q_slot, slot, zeros, META: gl.constexpr):
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    q0 = q_tiles.index(q_slot).reshape([_ROWS, QK0])
    k0 = k_tiles.index(slot).reshape([BLOCK_N, QK0])
    qk = warpgroup_mma(q0, k0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if QK1 > 0:
        q1 = q1_tiles.index(q_slot).reshape([_ROWS, QK1])
        k1 = k1_tiles.index(slot).reshape([BLOCK_N, QK1])
        qk = warpgroup_mma(q1, k1.permute([1, 0]), qk, is_async=True)
    return qk


@gluon.jit
def _logits(qk, rows, columns, place, scores, head, descale, MODS: gl.constexpr, META: gl.constexpr):
    # (s, factor): s * factor[:, None] is the logit in units of log2, before the mask
    if META.IS_MODIFIED:
        s, factor, _slope, _score = modified(
            qk * descale[:, None], rows[:, None], columns[None, :], place, scores, head, MODS, META
        )
        return s, gl.zeros_like(descale) + factor
    else:
        return qk, positive_factor(descale * (scores[0] * LOG2E))


@gluon.jit
def _whole_blocks(own_row, num_blocks, found, mask, META: gl.constexpr):
    # Of a tile's blocks of keys, of which the last come first: (from which on, up to which) an edge hides nothing from the queries
    # of this warpgroup. Of a block mask's none, as a list skips some.
    len_kv, shift, window_left, window_right = mask
    if META.BLOCK_SIZE_Q > 0:
        return num_blocks, num_blocks
    else:
        right_end = len_kv  # what all queries see ends here, and begins at left_end
        if META.HAS_RIGHT:
            right_end = gl.maximum(gl.minimum(len_kv, own_row + shift + 1 + window_right), 0)
        begin = gl.minimum(gl.maximum(found + num_blocks - right_end // META.BLOCK_N, 0), num_blocks)
        end = num_blocks
        if META.HAS_LEFT:
            left_end = gl.maximum(own_row + _ROWS - 1 + shift - window_left, 0)
            end = gl.maximum(gl.minimum(found + num_blocks - gl.cdiv(left_end, META.BLOCK_N), num_blocks), begin)
        return begin, end


@gluon.jit
def _softmax(s, row_max, factor, DTYPE: gl.constexpr, META: gl.constexpr):
    # (the weights as quads, the rows' maximum, what is summed already is to be multiplied with). The maximum is in units of log2,
    # but of unbounded logits exact.
    if META.IS_UNBOUNDED:
        new_max = gl.maximum(row_max, gl.max(s, 1))
        factor = exponent_factor(new_max)
        origin = exponent_origin(new_max, factor, P_SHIFT)
        p = gl.exp2(gl.fma(s, factor[:, None], -origin[:, None]))
        before = exponent_origin(row_max, factor, P_SHIFT)
        return pack_quads(p, _ROWS, META.BLOCK_N, DTYPE), new_max, gl.exp2(before - origin)
    else:
        new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        origin = gl.maximum(new_max, LOWEST)  # for -inf too exp2(-inf - origin) is 0
        p = gl.exp2(s * factor[:, None] - (origin - P_SHIFT)[:, None])
        return pack_quads(p, _ROWS, META.BLOCK_N, DTYPE), new_max, gl.exp2(row_max - origin)


@gluon.jit
def _once(sums):
    # Of `_COLUMNS` columns, which are alike, one in each thread
    one, _ = gl.split(gl.reshape(sums, [_ROWS, _COLUMNS // 2, 2]))
    return one


@gluon.jit
def _turns(
    begin,
    end,
    so_far,
    num_blocks,
    found,
    fixed,
    tiles,
    barriers,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # The blocks of keys from `begin` up to `end`; IS_CUT: an edge or a block mask may hide some of them.
    rows, mask, place, scores, head, own_captures, scales_of_blocks, q_slot, zeros, no_sum, no_row_sum = fixed
    scale_k, scale_v, descale_q, descale, b, h_kv = scales_of_blocks
    len_kv, shift, window_left, window_right = mask
    q_tiles, k_tiles, v_tiles, _, q1_tiles, k1_tiles, ones = tiles
    _, _, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    row_max, row_sum, acc, acc1, descale_v, loaded = so_far
    DTYPE: gl.constexpr = gl.float8e4nv  # of p
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    OUT: gl.constexpr = no_sum.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, zeros.type.layout))
    for t in range(begin, end):
        slot = loaded % META.STAGES
        phase = (loaded // META.STAGES) & 1
        column, is_full = key_block(num_blocks - 1 - t, found, META)
        ratio = 1.0
        if META.K_BLOCKWISE:
            descale = descale_q * load_descale(scale_k, b, h_kv, column)
        if META.V_BLOCKWISE:  # acc is in units of the scale of the block that was added last
            next_descale_v = load_descale(scale_v, b, h_kv, column)
            ratio = descale_v / next_descale_v
            descale_v = next_descale_v
        mbarrier.wait(k_full.index(slot), phase)
        product = _scores(q_tiles, k_tiles, q1_tiles, k1_tiles, q_slot, slot, zeros, META)
        qk = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_empty.index(slot), count=1)
        columns = column + block_columns
        s, factor = _logits(qk, rows, columns, place, scores, head, descale, MODS, META)
        if IS_CUT:
            s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
        s = mask_by_mod(s, rows[:, None], columns[None, :], is_full, place, own_captures, MODS, META)
        quads, row_max, decay = _softmax(s, row_max, factor, DTYPE, META)
        decay_of_sums = gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))
        decay = gl.convert_layout(decay * ratio, gl.SliceLayout(1, OUT))
        p = unpack_quads(quads, _ROWS, BLOCK_N, P, DTYPE)
        mbarrier.wait(v_full.index(slot), phase)
        v = v_tiles.index(slot).reshape([META.PARTS * V0, BLOCK_N])
        sum_of_v = warpgroup_mma(p, v.slice(0, V0, 0).permute([1, 0]), no_sum, use_acc=False, is_async=True)
        # The tensor cores sum p too, by a product with ones: 64 additions a thread less. It is p as the product with v takes it.
        p_again = gl.convert_layout(p, gl.DotOperandLayout(0, no_row_sum.type.layout, 4))
        sum_of_p = warpgroup_mma(p_again, ones.permute([1, 0]), no_row_sum, use_acc=False, is_async=True)
        sum_here, sum_of_p = warpgroup_mma_wait(0, deps=[sum_of_v, sum_of_p])
        row_sum = row_sum * decay_of_sums[:, None] + _once(sum_of_p)
        if META.PARTS == 2:
            acc = acc * decay[:, None] + sum_here
            compute_here(acc)
            # Into the same registers: with others there are not enough.
            sum_of_v = warpgroup_mma(p, v.slice(V0, V0, 0).permute([1, 0]), sum_here, use_acc=False, is_async=True)
            sum_here = warpgroup_mma_wait(0, deps=[sum_of_v])
        keep_pairs(quads)
        mbarrier.arrive(v_empty.index(slot), count=1)
        if META.PARTS == 2:
            acc1 = acc1 * decay[:, None] + sum_here
            compute_here(acc1)
        else:
            acc = acc * decay[:, None] + sum_here
            compute_here(acc)
        loaded += 1
    return row_max, row_sum, acc, acc1, descale_v, loaded


@gluon.jit
def _compute_partition(
    common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    descriptors, tiles, barriers, work, scalars, cu_seqlens, _, lists = common
    bias, alibi_slopes_ptr, stride_alibi_b, softcap, captures = mods
    bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n = bias
    scale_q, scale_k, scale_v = scales
    _, _, _, out_descriptor, _, _ = descriptors
    out_tiles = tiles[3]
    q_full, q_empty, _, _, _, _, _, _, _ = barriers
    batch, num_heads, group_size, _, _, _ = work
    num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps = scalars
    _, _, _, _, step_os, step_oh = steps
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    no_sum = gl.zeros([_ROWS, V0], gl.float32, layout=OUT)
    no_row_sum = gl.zeros([_ROWS, _COLUMNS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32]))
    loaded = 0
    turn = 0
    tile = hear(turn, barriers, META)
    while tile[0] >= 0:
        first_row, h, b = tile[:3]
        if META.HAS_LENGTHS:
            start_q, len_q, len_kv = tile[3:6]
        else:
            start_q, len_q, _, len_kv = sequences(
                b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
            )
        shift = (len_kv - len_q) * bottom_right
        num_blocks, found = blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META)
        h_kv = h // group_size
        head = load_head(
            Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
            Alibi(alibi_slopes_ptr, stride_alibi_b),
            b,
            h,
            META,
        )
        place = (len_q, len_kv, shift, b, h)
        own_captures = captures_of_head(b, h, captures, MODS, META)
        scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, own_captures)
        own_row = first_row + CONSUMER * _ROWS
        skipped, own_num, own_found = own_blocks(own_row, num_blocks, found, len_q, shift, window_left, window_right, META)
        rows = own_row + gl.arange(0, _ROWS, layout=ROWS)
        row_max = gl.full([_ROWS], float("-inf"), gl.float32, layout=ROWS)  # in units of log2, but of unbounded logits exact
        row_sum = _once(no_row_sum)
        if META.Q_BLOCKWISE:
            descale_q = load_descale(scale_q, b, h, gl.maximum(gl.minimum(rows, len_q - 1), 0))
        else:
            descale_q = gl.zeros([_ROWS], gl.float32, layout=ROWS) + tile[META.NUMBERS - 3].to(gl.float32, bitcast=True)
        descale_v = tile[META.NUMBERS - 1].to(gl.float32, bitcast=True)
        descale = descale_q * tile[META.NUMBERS - 2].to(gl.float32, bitcast=True)
        if META.HAS_SINK:
            sink = 0.0
            if META.HAS_OFFSET:
                sink = gl.load(softmax_offset_ptr + h).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
            row_max = gl.maximum(row_max, sink)
            own = gl.where(row_max == float("-inf"), 0.0, P_SCALE)
            if META.IS_UNBOUNDED:
                factor = exponent_factor(row_max)
                own = gl.exp2(gl.fma(row_max, factor, -exponent_origin(row_max, factor, P_SHIFT)))
            row_sum = row_sum + gl.convert_layout(own, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        q_slot = CONSUMER + turn % META.Q_STAGES * META.CONSUMERS
        mbarrier.wait(q_full.index(q_slot), (turn // META.Q_STAGES) & 1)
        acc = gl.zeros([_ROWS, V0], gl.float32, layout=OUT)
        acc1 = gl.zeros([_ROWS, V0], gl.float32, layout=OUT)
        if META.SKIPS:
            loaded = pass_over(skipped, loaded, barriers, CONSUMER, META)
        mask = (len_kv, shift, window_left, window_right)
        whole_from, whole_to = _whole_blocks(own_row, own_num, own_found, mask, META)
        scales_of_blocks = (scale_k, scale_v, descale_q, descale, b, h_kv)
        fixed = (rows, mask, place, scores, head, own_captures, scales_of_blocks, q_slot, zeros, no_sum, no_row_sum)
        so_far = (row_max, row_sum, acc, acc1, descale_v, loaded)
        how = (own_num, own_found, fixed, tiles, barriers)
        if META.HAS_LEFT:
            done = 0
            while done < own_num:  # twice at most: what is after the whole blocks goes through the loop for those before
                so_far = _turns(done, whole_from, so_far, *how, True, MODS, META)
                so_far = _turns(whole_from, whole_to, so_far, *how, False, MODS, META)
                done = whole_to
                whole_from = own_num
                whole_to = own_num
        else:
            so_far = _turns(0, whole_from, so_far, *how, True, MODS, META)
            so_far = _turns(whole_from, own_num, so_far, *how, False, MODS, META)
        row_max, row_sum, acc, acc1, descale_v, loaded = so_far
        if META.SKIPS:
            loaded = pass_over(num_blocks - skipped - own_num, loaded, barriers, CONSUMER, META)
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        lse_row = (h if META.IS_RAGGED_Q else b * num_heads + h).to(gl.int64) * num_tokens_q + start_q
        row_sum = gl.convert_layout(gl.max(row_sum, 1), ROWS)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # of a row that sees nothing: its out is 0 / 1, its lse -inf + 0
        if META.IS_UNBOUNDED:
            factor = exponent_factor(row_max)
            lse, _lost = log_of_sum(row_max, factor, exponent_origin(row_max, factor, P_SHIFT), row_sum_or_1)
            gl.store(lse_ptr + lse_row + rows, lse, mask=rows < len_q)
        else:
            gl.store(lse_ptr + lse_row + rows, (row_max + gl.log2(row_sum_or_1) - P_SHIFT) * LN2, mask=rows < len_q)
        normaliser = gl.convert_layout(descale_v / row_sum_or_1, gl.SliceLayout(1, OUT))[:, None]
        out_tile = out_tiles.index(CONSUMER)
        tma.store_wait(0)
        if META.PARTS == 2:
            out_tile.reshape([_ROWS, 2 * V0]).slice(0, V0, 1).store((acc * normaliser).to(out_descriptor.dtype))
            out_tile.reshape([_ROWS, 2 * V0]).slice(V0, V0, 1).store((acc1 * normaliser).to(out_descriptor.dtype))
        else:
            out_tile.reshape([_ROWS, V0]).store((acc * normaliser).to(out_descriptor.dtype))
        fence_async_shared()
        store_rows(out_descriptor, start_q + b * step_os, len_q, own_row, h + b * step_oh, 0, out_tile)
        turn += 1
        tile = hear(turn, barriers, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_fwd_fp8_hopper_kernel(
    q_descriptor,
    k_descriptor,
    v_descriptor,  # transposed
    out_descriptor,
    q1_descriptor,  # of the second part of the head dim; without one, anything
    k1_descriptor,
    lse_ptr,
    descale_q_ptr,
    stride_descale_qb,
    stride_descale_qh,
    stride_descale_qn,
    block_rows_q,
    descale_k_ptr,
    stride_descale_kb,
    stride_descale_kh,
    stride_descale_kn,
    block_rows_k,
    descale_v_ptr,
    stride_descale_vb,
    stride_descale_vh,
    stride_descale_vn,
    block_rows_v,
    softmax_offset_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    table_ptr,  # `ragged.work_table`'s; without lengths its counter alone
    softmax_scale,
    batch,
    num_heads,
    group_size,
    blocks,
    heads_per_section,
    v_blocks,  # transposed tiles of a head of v
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    step_qs,
    step_qh,
    step_ks,
    step_kh,
    step_os,
    step_oh,
    bias_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    alibi_slopes_ptr,
    stride_alibi_b,
    softcap,
    captures,
    block_counts_ptr,  # of the block mask, the lists of key blocks
    block_indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    stride_list_b,
    stride_list_h,
    list_length,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    CONSUMERS: gl.constexpr = META.CONSUMERS
    STAGES: gl.constexpr = META.STAGES
    REGISTERS: gl.constexpr = META.REGISTERS
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    q_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [Q_TILES] + q_descriptor.block_type.shape, q_descriptor.layout)
    out_tiles = gl.allocate_shared_memory(
        out_descriptor.dtype, [CONSUMERS] + out_descriptor.block_type.shape, out_descriptor.layout
    )
    k_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [STAGES] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [STAGES] + v_descriptor.block_type.shape, v_descriptor.layout)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [Q_TILES] + q1_descriptor.block_type.shape, q1_descriptor.layout)
        k1_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [STAGES] + k1_descriptor.block_type.shape, k1_descriptor.layout)
    # As bits: of fp32 ones that are cast, ptxas (CUDA 12.8) leaves two bytes of four to chance.
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_COLUMNS, META.BLOCK_N], gl.float8e4nv)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    bits = gl.full([_COLUMNS, META.BLOCK_N], _ONE, gl.int8, layout=LINES)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [_COLUMNS, META.BLOCK_N], ONES)
    ones.store(bits.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    told = gl.allocate_shared_memory(gl.int32, [2 * META.NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = (
        allocate_barriers(Q_TILES, 1),
        allocate_barriers(Q_TILES, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, CONSUMERS),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, CONSUMERS),
        allocate_barriers(2, 1),
        allocate_barriers(2, CONSUMERS),
        told,
    )
    descriptors = (q_descriptor, k_descriptor, v_descriptor, out_descriptor, q1_descriptor, k1_descriptor)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles, q1_tiles, k1_tiles, ones)
    work = (batch, num_heads, group_size, blocks, heads_per_section, v_blocks)
    steps = (step_qs, step_qh, step_ks, step_kh, step_os, step_oh)
    scalars = (num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    lists = (block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length)
    common = (descriptors, tiles, barriers, work, scalars, cu_seqlens, table_ptr, lists)
    scale_q = (descale_q_ptr, stride_descale_qb, stride_descale_qh, stride_descale_qn, block_rows_q)
    scale_k = (descale_k_ptr, stride_descale_kb, stride_descale_kh, stride_descale_kn, block_rows_k)
    scale_v = (descale_v_ptr, stride_descale_vb, stride_descale_vh, stride_descale_vn, block_rows_v)
    scales = (scale_q, scale_k, scale_v)
    bias = (bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n)
    mods = (bias, alibi_slopes_ptr, stride_alibi_b, softcap, captures)
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the registers that are left, 240
        gl.warp_specialize(
            [
                (_compute_partition, (common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, 0, MODS, META)),
                (_compute_partition, (common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, 1, MODS, META)),
                (_load_partition, (common, scales, META)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_load_partition, (common, scales, META)),
                (_compute_partition, (common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, 0, MODS, META)),
                (_compute_partition, (common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, 1, MODS, META)),
                (_compute_partition, (common, softmax_offset_ptr, softmax_scale, scales, mods, lse_ptr, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def unsupported(problem: Problem, out: Tensor, return_max_logit: bool = False) -> str | None:
    """Returns why the kernel cannot run this problem, with q, k and v in FP8; None: it can."""
    x = problem
    if capability_of(x.device) != 90:
        return "it is written for Hopper, sm_90"
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(tensor.dtype).removeprefix('torch.')}"
    for has, what in (
        (x.dropout_p > 0, "dropout"),
        (return_max_logit, "max_logit"),
        (x.softmax_scale == 0, "a softmax_scale of 0"),
    ):
        if has:
            return f"it does not do {what} yet"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    tile = tile_of(x)
    errors: list[str | None] = [descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("out", out))]
    heads = (x.num_heads, x.num_heads_kv, x.num_heads_kv)
    errors += [
        scale_error(name, scale, x, h, 1 if name == "q" else tile.block_n)
        for name, scale, h in zip("qkv", scales_of(x)[:3], heads, strict=True)
    ]
    return next((error for error in errors if error), None) or unsupported_block_mask(x, tile[2:4])


def slower(problem: Problem) -> str | None:
    """Returns why the kernel was not measured to be faster than the portable one for this problem; None: it was."""
    x = problem
    tokens = x.q.numel() // x.q.shape[-1]  # of all heads
    flops = 2 * tokens * x.longest_kv * (x.q.shape[-1] + x.v.shape[-1]) * (1.0 if x.window_right is None else 0.5)
    longest = max(x.longest_q, x.longest_kv)
    if x.is_modified or x.window_left is not None:
        return "modified scores and windows were not measured"
    if longest < SHORTEST:
        return f"it was measured from {SHORTEST} tokens, and the longest sequence has {longest}"
    return None if flops >= HOPPER_FLOPS else "there is too little work for its large tiles"


def tile_of(problem: Problem) -> Fp8Tile:
    """Returns the committed tile."""
    x = problem
    return select_fp8_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def hopper_fp8_forward(
    problem: Problem,
    v_transposed: Tensor,
    scales: tuple[Scale, Scale, Scale],
    out: Tensor,
    lse: Tensor,
    tile: Fp8Tile | None = None,
) -> None:
    """`hopper_forward.hopper_forward` in FP8, for what is not `unsupported`.

    problem: q and k in FP8; of its v only the shape is read.
    v_transposed: [h_kv, blocks, d_v, BLOCK], as `hopper_fp8_quantize` writes it.
    scales: of q, k and v.
    out: bf16 or fp16, [.., h, d_v] laid out as q or otherwise.
    """
    x = problem
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v // tile.parts
    has_lengths = x.cu_seqlens_q is not None
    has_idle = has_lengths or x.longest_q <= tile.block_m - _ROWS.value
    blocks = triton.cdiv(x.longest_q, tile.block_m)
    meta = Fp8ForwardMeta(
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        HAS_LENGTHS=has_lengths,
        HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
        HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or x.window_left is not None or x.window_right is not None),
        GROUP=1,
        TAKES_TURNS=False,
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        **x.score_meta(),
        IS_MODIFIED=x.is_modified,
        Q_BLOCKWISE=scales[0].is_blockwise,
        K_BLOCKWISE=scales[1].is_blockwise,
        V_BLOCKWISE=scales[2].is_blockwise,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        QK0=qk0,
        QK1=qk1,
        V0=v0,
        PARTS=tile.parts,
        STAGES=tile.num_stages,
        Q_STAGES=tile.q_stages,
        CONSUMERS=tile.block_m // _ROWS.value,
        REGISTERS=tile.registers,
        NUMBERS=9 if has_lengths else 6,
    )
    descriptors: list[Any] = [
        ragged_descriptor(x.q, _ROWS.value, qk0),
        ragged_descriptor(x.k, tile.block_n, qk0),
        transposed_descriptor(v_transposed, tile.head_dim_v, tile.block_n),
        ragged_descriptor(out, _ROWS.value, tile.head_dim_v),
    ]
    if qk1:
        descriptors += [ragged_descriptor(x.q, _ROWS.value, qk1), ragged_descriptor(x.k, tile.block_n, qk1)]
    else:
        descriptors += descriptors[:2]
    if has_lengths:
        table = work_table(x, tile.block_m, "q", by_sequence=False)
        zero_padding(x, out, "q", lse)
    else:
        table = torch.zeros(1, dtype=torch.int32, device=out.device)
    launch(
        _attn_fwd_fp8_hopper_kernel,
        min(num_processors(out.device), blocks * x.batch * x.num_heads),
        out.device,
        Tile(tile.block_m, tile.block_n, 4, tile.num_stages),
        (
            *descriptors,
            lse,
            *(argument for scale in scales for argument in scale.arguments),
            x.softmax_offset,
            x.cu_seqlens_q,
            x.cu_seqlens_kv,
            x.cu_seqlens_q_padded,
            x.cu_seqlens_kv_padded,
            table,
            float(x.softmax_scale),
            x.batch,
            x.num_heads,
            x.group_size,
            blocks,
            query_heads_per_section(x),
            v_transposed.shape[1],
            x.q.shape[-3],
            x.k.shape[-3],
            x.longest_q,
            x.longest_kv,
            *x.window,
            int(x.bottom_right),
            *batch_steps_of(x.q, x.k, out),
            *x.score_arguments(),
            *x.list_arguments("kv"),
            x.mods,
            meta,
        ),
    )
