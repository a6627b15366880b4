"""Backward attention in FP8 on Hopper (sm_90) in Gluon, in one pass: `hopper_one_pass` with scores and dp from FP8 operands.

The products with p and ds are 16-bit. In FP8 each of theirs would need the largest of a tile's rows, a scale, and a sum of its own
that is added in fp32, as Hopper adds FP8 products up in some 14 bits: that takes longer than the tensor cores save. So no operand
has to come transposed, and nothing that was computed here is rounded to FP8. q, k and dout are read in both forms; the half one is
what the FP8 one stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Lengths
from flexattn.kernels_triton.common.preprocess import statistics_tile, tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    LOG2E,
    head_values,
    is_any_large,
    load_large,
    packed_start,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.barriers import (
    BOTH,
    LAST,
    READ,
    TURN,
    WRITTEN,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
)
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_queries, query_block
from flexattn.kernels_triton.hopper.conditions import KEYS, fused_slower, unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import (
    DTYPES,
    FP8_DTYPES,
    batch_steps_of,
    descriptor_error,
    load_rows,
    load_statistics,
    ragged_descriptor,
    store_rows,
)
from flexattn.kernels_triton.hopper.dq_sums import add_dq, convert_dq, dq_product, hand_over, write_dq
from flexattn.kernels_triton.hopper.fp8 import Scale, load_descale, scale_error, scales_of
from flexattn.kernels_triton.hopper.masking import FAR, hide_queries_past_the_end, mask_band, mask_by_mod
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers
from flexattn.kernels_triton.hopper.quantize import dequantize
from flexattn.kernels_triton.hopper.scores import head_group, head_of, modified, scores_of_head
from flexattn.kernels_triton.hopper.tile_scheduler import block_of, section_of, sequences
from flexattn.kernels_triton.runtime.launch import Tile, capability_of, hopper_kernel, launch


class Fp8OnePassTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in one pass: it serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    queries: int  # of a turn, and of a tile of statistics and of dq
    dq_stages: int  # of dq in shared memory


# bench/results/fp8_one_pass_orders_h200.json. With 128 queries modified scores would spill, and a block mask may have fewer.
FP8_ONE_PASS = (Fp8OnePassTile(64, 128, 1), Fp8OnePassTile(64, 64, 2), Fp8OnePassTile(128, 64, 1))


class Fp8OnePassMeta(NamedTuple):
    """What the kernel is compiled for."""

    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_GAPS_Q: bool
    HAS_GAPS_KV: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
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
    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DQ_STAGES: int


@gluon.jit
def _load(descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META: gl.constexpr):
    of_q, of_dout, of_k, statistics_descriptor, _, dk_descriptor, dv_descriptor = descriptors
    q_tiles, q16_tiles, dout_tiles, dout16_tiles, k_tiles, k16_tiles, v_tiles, statistics_tiles, factors, _, _ = tiles
    q_full, q_empty, dout_full, kv_full, _, _, dkdv_full = barriers
    first_row, len_q, len_kv, q_places, dout_places, k_places, first_tile, tiles_of_a_head = places
    q_descriptor, q16_descriptor = of_q
    dout_descriptor, dout16_descriptor = of_dout
    k_descriptor, k16_descriptor, v_descriptor = of_k
    q_place, q16_place = q_places
    dout_place, dout16_place = dout_places
    k_place, k16_place, v_place, dk_place, dv_place = k_places
    scale_q, scale_k, scale_v, scale_dout, b, h, h_kv, softmax_scale = scales
    full = kv_full.index(0)
    BYTES: gl.constexpr = k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes + k16_descriptor.block_type.nbytes
    mbarrier.expect(full, 2 * BYTES)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(part))
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
        load_rows(k16_descriptor, k16_place[0], len_kv, row, k16_place[1], 0, full, k16_tiles.index(part))
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    scale_row = gl.minimum(first_row, gl.maximum(len_kv - 1, 0))
    s_factor = load_descale(scale_k, b, h_kv, scale_row)
    dp_factor = load_descale(scale_v, b, h_kv, scale_row)
    if META.IS_PLAIN:
        s_factor *= softmax_scale * LOG2E
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = query_block(t, found, META)[0]
        slot = turn % STAGES
        scale_row = gl.minimum(row, len_q - 1)
        descale_q = load_descale(scale_q, b, h + head, scale_row)
        descale_dout = load_descale(scale_dout, b, h + head, scale_row)
        full = q_full.index(slot)
        mbarrier.wait(q_empty.index(slot), ((turn // STAGES) & 1) ^ 1)
        # A masked score is -inf, and -inf * 0 would be NaN. All lanes write what the arrival of the first one publishes.
        factors.index(2 * slot).store(gl.full([4], gl.maximum(s_factor * descale_q, 1e-37), gl.float32, layout=LANES))
        factors.index(2 * slot + 1).store(gl.full([4], dp_factor * descale_dout, gl.float32, layout=LANES))
        mbarrier.expect(full, q_descriptor.block_type.nbytes + statistics_descriptor.block_type.nbytes)
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1] + head, 0, full, q_tiles.index(slot))
        of_head = first_tile + head * tiles_of_a_head
        load_statistics(statistics_descriptor, of_head, row, len_q, full, statistics_tiles.index(slot), META)
        full = dout_full.index(slot)
        HALVES: gl.constexpr = dout16_descriptor.block_type.nbytes + q16_descriptor.block_type.nbytes
        mbarrier.expect(full, dout_descriptor.block_type.nbytes + HALVES)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, full, dout_tiles.index(slot))
        load_rows(dout16_descriptor, dout16_place[0], len_q, row, dout16_place[1] + head, 0, full, dout16_tiles.index(slot))
        load_rows(q16_descriptor, q16_place[0], len_q, row, q16_place[1] + head, 0, full, q16_tiles.index(slot))
        t += 1
        if t == num_blocks:
            t = 0
            head += 1
    mbarrier.wait(dkdv_full.index(0), 0)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        store_rows(dk_descriptor, dk_place[0], len_kv, row, dk_place[1], 0, k16_tiles.index(part))
        # A tile's first rows are what is needed.
        store_rows(dv_descriptor, dv_place[0], len_kv, row, dv_place[1], 0, dout16_tiles.index(part).slice(0, ROWS, 2))
    tma.store_wait(0)


@gluon.jit
def _score_product(q_tiles, k_tiles, q_full, slot, phase, is_there, zero, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Of the turn whose q is in `slot`; transposed.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    mbarrier.wait(q_full.index(slot), phase, pred=is_there)
    own_k = k_tiles.index(zero + CONSUMER).reshape([ROWS, META.DIM])
    q = q_tiles.index(slot).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    return warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute(
    tiles,
    barriers,
    common,
    group_size,
    num_blocks,
    found,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    q_tiles, q16_tiles, dout_tiles, dout16_tiles, k_tiles, k16_tiles, v_tiles, statistics_tiles, factors, ds_tiles, dq_tiles = tiles
    q_full, q_empty, dout_full, kv_full, dq_full, dq_empty, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    own_row = first_row + CONSUMER * ROWS
    rows = own_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = 0  # blocks of queries that begin before it need the mask
    if META.HAS_RIGHT:
        uncut_from = own_row + ROWS - 1 - shift - window_right
    uncut_from = gl.where(own_row + ROWS > len_kv, FAR, uncut_from)
    # A turn's products, and what runs under them: dp | p | dv | ds | dk, dq of the turn before, the next turn's scores. Half of dq
    # is a sum over the other warpgroup's ds too, which is there a turn later; before the first there is 0. While one warpgroup
    # computes p, the other multiplies.
    ds_tiles.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(WRITTEN + 2 + CONSUMER, BOTH)
    mbarrier.wait(kv_full.index(0), 0)
    t = 0
    h = first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    turns = num_blocks * group_size
    kq = zeros
    if turns > 0:
        named_barrier_arrive_at(READ + CONSUMER, BOTH)
        if CONSUMER == 1:
            named_barrier_arrive_at(TURN, BOTH)  # the first warpgroup begins
        first = _score_product(q_tiles, k_tiles, q_full, 0, 0, turns > 0, opaque_zero(turns), CONSUMER, META)
        kq = warpgroup_mma_wait(0, deps=[first])
    for turn in range(turns):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        slot = turn % STAGES
        phase = (turn // STAGES) & 1
        here = (turn & 1) * 2
        # Two barriers in turn: with one, a warpgroup that is ahead could arrive twice before the other has waited once.
        last = ((turn + 1) & 1) * 2
        own_v = v_tiles.index(zero + CONSUMER).reshape([ROWS, DIM])
        dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM])
        mbarrier.wait(dout_full.index(slot), phase)
        dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s_factor = factors.index(2 * slot).slice(0, 1).load(COLUMNS)[None, :]
        if not META.IS_PLAIN:
            kq = kq * s_factor
        s, factor, cap_tanh, score = modified(kq, columns[None, :], rows[:, None], place, own_scores, head, MODS, META)
        if META.IS_PLAIN:
            factor = s_factor
        is_cut = row < uncut_from  # a scalar branch: only blocks on an edge pay for the mask
        if META.HAS_LEFT:
            is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
        if is_cut | is_any_large(large, META):
            s = mask_band(s, rows, columns, len_kv, shift, window_left, window_right, META)
            if META.IS_UNBOUNDED:
                of_queries = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
                s = relative_to_lse(s, of_queries[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, own_scores[4], MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), LEFT)
        if CONSUMER == 0:
            named_barrier_arrive_at(TURN + 1 + zero, BOTH)
        elif turn + 1 < turns:
            named_barrier_arrive_at(TURN + zero, BOTH)
        sum_of_dout = warpgroup_mma(p16, dout16_tiles.index(slot).reshape([BLOCK_M, DIM]), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_factor = factors.index(2 * slot + 1).slice(0, 1).load(COLUMNS)[None, :]
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        ds = dscore.to(DTYPE)
        # The other warpgroup's dq of the turn before the last has read what is overwritten.
        named_barrier_sync_at(READ + 1 - CONSUMER + here, BOTH)
        ds_tiles.index(here + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
        sum_of_q = warpgroup_mma(ds16, q16_tiles.index(slot).reshape([BLOCK_M, DIM]), dk, is_async=True)
        fence_async_shared()  # under the product
        named_barrier_arrive_at(WRITTEN + CONSUMER + here, BOTH)
        named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
        sum_of_k = dq_product(ds_tiles, k16_tiles, last, zero, CONSUMER, META)
        # The next turn's scores under these; in the last turn its own again, for nothing.
        is_there = turn + 1 < turns
        next_slot = gl.where(is_there, (turn + 1) % STAGES, slot)
        next_phase = ((turn + 1) // STAGES) & 1
        next_scores = _score_product(q_tiles, k_tiles, q_full, next_slot, next_phase, is_there, zero, CONSUMER, META)
        dk, ds16 = warpgroup_mma_wait(3, deps=[sum_of_q, ds16])
        mbarrier.arrive(q_empty.index(slot), count=1)
        dq = warpgroup_mma_wait(1, deps=[sum_of_k])
        if is_there:
            named_barrier_arrive_at(READ + CONSUMER + last, BOTH)
        if turn > 0:
            write_dq(dq, dq_tiles, dq_empty, turn - 1, CONSUMER, META)
            hand_over(dq_full, turn - 1, META)
        kq = warpgroup_mma_wait(0, deps=[next_scores])
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            head = head_of(bias, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    last = ((turns + 1) & 1) * 2
    named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
    if turns > 0:
        sum_of_k = dq_product(ds_tiles, k16_tiles, last, 0, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        write_dq(dq, dq_tiles, dq_empty, turns - 1, CONSUMER, META)
        hand_over(dq_full, turns - 1, META)
    named_barrier_sync(LAST, BOTH)  # k and dout in a half type were the other warpgroup's too; now they are no longer needed
    k16_tiles.index(CONSUMER).reshape([ROWS, DIM]).store((dk * softmax_scale).to(DTYPE))
    dout16_tiles.index(CONSUMER).reshape([BLOCK_M, DIM]).slice(0, ROWS, 0).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_one_pass_fp8_hopper_kernel(
    q_descriptor,
    q16_descriptor,
    dout_descriptor,
    dout16_descriptor,
    k_descriptor,
    k16_descriptor,
    v_descriptor,
    statistics_descriptor,
    dq_descriptor,
    dk_descriptor,
    dv_descriptor,
    tiles_of_a_head,
    large_ptr,  # of `large_rows`
    large_lse_ptr,
    table_ptr,
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
    descale_dout_ptr,
    stride_descale_dob,
    stride_descale_doh,
    stride_descale_don,
    block_rows_dout,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    softmax_scale,
    batch,
    num_heads,
    group_size,
    blocks,
    heads_per_section,
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    step_qs,
    step_qh,
    step_q16s,
    step_q16h,
    step_dos,
    step_doh,
    step_do16s,
    step_do16h,
    step_ks,
    step_kh,
    step_k16s,
    step_k16h,
    step_vs,
    step_vh,
    step_dks,
    step_dkh,
    step_dvs,
    step_dvh,
    bias_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    alibi_slopes_ptr,
    stride_alibi_b,
    softcap,
    captures,
    block_counts_ptr,  # of the block mask, the lists of query blocks
    block_indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    stride_list_b,
    stride_list_h,
    list_length,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DTYPE: gl.constexpr = k16_descriptor.dtype
    q_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [STAGES] + q_descriptor.block_type.shape, q_descriptor.layout)
    q16_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + q16_descriptor.block_type.shape, q16_descriptor.layout)
    DOUT: gl.constexpr = dout_descriptor.block_type.shape
    dout_tiles = gl.allocate_shared_memory(dout_descriptor.dtype, [STAGES] + DOUT, dout_descriptor.layout)
    dout16_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + dout16_descriptor.block_type.shape, dout16_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [2] + k_descriptor.block_type.shape, k_descriptor.layout)
    k16_tiles = gl.allocate_shared_memory(DTYPE, [2] + k16_descriptor.block_type.shape, k16_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [2] + v_descriptor.block_type.shape, v_descriptor.layout)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], statistics_descriptor.layout)
    # Of each turn what its scores and its dp are multiplied with.
    factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE)
    DQ: gl.constexpr = dq_descriptor.block_type.shape
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * META.DQ_STAGES] + DQ, dq_descriptor.layout)
    barriers = (
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(1, 1),
        allocate_barriers(META.DQ_STAGES, 2),
        allocate_barriers(META.DQ_STAGES, 1),
        allocate_barriers(1, 2),
    )
    block, h_kv, b = block_of(table_ptr, num_heads // group_size, blocks, heads_per_section, False, META)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    start_q, len_q, start_kv, len_kv = sequences(
        b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
    )
    shift = (len_kv - len_q) * bottom_right
    first_row = gl.minimum(block * META.BLOCK_N, len_kv)
    h = h_kv * group_size
    lists = (block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length)
    num_blocks, found = blocks_of_queries(first_row, b, h, len_q, shift, window_left, window_right, lists, META)
    num_blocks = gl.where(first_row < len_kv, num_blocks, 0)
    descriptors = (
        (q_descriptor, q16_descriptor),
        (dout_descriptor, dout16_descriptor),
        (k_descriptor, k16_descriptor, v_descriptor),
        statistics_descriptor,
        dq_descriptor,
        dk_descriptor,
        dv_descriptor,
    )
    tiles = (
        q_tiles,
        q16_tiles,
        dout_tiles,
        dout16_tiles,
        k_tiles,
        k16_tiles,
        v_tiles,
        statistics_tiles,
        factors,
        ds_tiles,
        dq_tiles,
    )
    place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, start_q)
    first_tile = statistics_tile(b, h, num_heads, place_q, tiles_of_a_head, META, BLOCK_M)
    of_dq = (len_q, first_tile, tiles_of_a_head)
    places = (
        first_row,
        len_q,
        len_kv,
        ((start_q + b * step_qs, h + b * step_qh), (start_q + b * step_q16s, h + b * step_q16h)),
        ((start_q + b * step_dos, h + b * step_doh), (start_q + b * step_do16s, h + b * step_do16h)),
        (
            (start_kv + b * step_ks, h_kv + b * step_kh),
            (start_kv + b * step_k16s, h_kv + b * step_k16h),
            (start_kv + b * step_vs, h_kv + b * step_vh),
            (start_kv + b * step_dks, h_kv + b * step_dkh),
            (start_kv + b * step_dvs, h_kv + b * step_dvh),
        ),
        first_tile,
        tiles_of_a_head,
    )
    scales = (
        (descale_q_ptr, stride_descale_qb, stride_descale_qh, stride_descale_qn, block_rows_q),
        (descale_k_ptr, stride_descale_kb, stride_descale_kh, stride_descale_kn, block_rows_k),
        (descale_v_ptr, stride_descale_vb, stride_descale_vh, stride_descale_vn, block_rows_v),
        (descale_dout_ptr, stride_descale_dob, stride_descale_doh, stride_descale_don, block_rows_dout),
        b,
        h,
        h_kv,
        softmax_scale,
    )
    scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, captures)
    bias = (bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    common = (first_row, window_left, window_right, scores, bias, large, (len_q, len_kv, shift, b, h))
    gl.warp_specialize(
        [
            (_compute, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
            (_compute, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
            (_load, (descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META)),
            (add_dq, (dq_descriptor, dq_tiles, barriers[4], barriers[5], of_dq, group_size, num_blocks, found, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def tile_of(problem: Problem) -> Fp8OnePassTile:
    """The narrowest row that serves the head dims, which are at most 128; of 64 queries where scores are more than a product."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    width = max(x.q.shape[-1], x.v.shape[-1])
    return next(tile for tile in FP8_ONE_PASS if width <= tile.head_dim and tile.queries <= most)


def is_plain(score_meta: dict[str, Any]) -> bool:
    """Whether a logit is a scaled score, of a problem with such `score_meta`."""
    adds = ("HAS_PRE_SCALE_BIAS", "HAS_POST_SCALE_BIAS", "HAS_ALIBI", "HAS_SOFTCAP", "HAS_SCORE_MOD")
    return not any(score_meta[name] for name in adds)


def halves_of(problem: Problem, dout: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and dout in a half type: as they came, where the copy engine takes them so, else dequantised."""
    x = problem
    given = dict(zip(("dout", "q", "k"), x.halves, strict=False))
    scales = scales_of(x)

    def half(name: str, side: Literal["q", "kv"], t: Tensor, scale: Scale) -> Tensor:
        found = given.get(name)
        if found is not None and found.dtype is dtype and descriptor_error(name, found) is None:
            return found
        return dequantize(x, side, t, scale, torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format))

    return half("q", "q", x.q, scales[0]), half("k", "kv", x.k, scales[1]), half("dout", "q", dout, scales[3])


def in_half(problem: Problem, dout: Tensor, dtype: torch.dtype, device: torch.device | str | None = None) -> tuple[Problem, Tensor]:
    """The same backward for the kernels of a half type: the problem and dout, whose q, k and v and which itself are not written
    yet, unless dout came so; `fill_half` does that.

    device: "meta" to ask about it alone, without memory; None: theirs.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "memory_format": torch.contiguous_format}
    q, k, v, half = (torch.empty_like(t, **options) for t in (*_of(problem), dout))
    if problem.dout_is_to_come:
        half = problem.halves[0]
    return dataclasses.replace(problem, q=q, k=k, v=v, descales=(), scale_rows=0, dout_is_to_come=False), half


def fill_half(problem: Problem, dout: Tensor, half: Problem, half_dout: Tensor) -> None:
    targets = _of(half) if problem.dout_is_to_come else (*_of(half), half_dout)
    for side, t, scale, out in zip(("q", "kv", "kv", "q"), (*_of(problem), dout), scales_of(problem), targets, strict=False):
        dequantize(problem, side, t, scale, out)  # type: ignore[arg-type]


def _of(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.q, problem.k, problem.v


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the kernel cannot run this problem's backward; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "its accumulators hold head dims up to 128"
    return unsupported_operands(x, out, dout) or unsupported_block_mask(x, (tile_of(x).queries, KEYS))


def unsupported_operands(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns what `unsupported` says whatever the head dims and the tiles."""
    x = problem
    if capability_of(x.device) != 90:
        return "it is written for Hopper, sm_90"
    if out.dtype not in DTYPES:
        return f"its gradients are bf16 or fp16, and out is {str(out.dtype).removeprefix('torch.')}"
    for has, what in ((x.dropout_p > 0, "dropout"), (x.softmax_scale == 0, "a softmax_scale of 0")):
        if has:
            return f"it does not do {what} yet"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    if x.num_heads * (x.q.shape[-3] + 256) * x.batch >= 2**29:
        return "its statistics are more than the copy engine's coordinates reach"
    names, heads = ("q", "k", "v", "dout"), (x.num_heads, x.num_heads_kv, x.num_heads_kv, x.num_heads)
    for name, t, scale, h in zip(names, (x.q, x.k, x.v, dout), scales_of(x), heads, strict=True):
        if t.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(t.dtype).removeprefix('torch.')}"
        if error := descriptor_error(name, t) or scale_error(name, scale, x, h, KEYS):
            return error
    return descriptor_error("out", out)


def slower(problem: Problem) -> str | None:
    """Returns why the fused backward in a half type would be slower than others: this is faster where that is, as that needs a
    dequantisation first; None: it would not."""
    return fused_slower(problem)


def fp8_one_pass_backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsoftmax_offset: Tensor | None = None,
    tile: Fp8OnePassTile | None = None,
) -> None:
    """`hopper_one_pass.one_pass_backward` in FP8, for what is not `unsupported`.

    problem: q, k and v in FP8, with the descales of them and of dout.
    dout: in FP8. Its sums with out are of what it stands for, as dp is: else a query that sees one key would get a gradient.
    dq, dk, dv: contiguous, in a half type.
    """
    x = problem
    tile = tile or tile_of(x)
    dim, size = tile.head_dim, tile.queries
    num_tokens_q, head_dim = x.q.shape[-3], x.q.shape[-1]
    statistics, tiles, large = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)
    dq_sums = torch.zeros((statistics.numel() // 2, head_dim), dtype=torch.float32, device=x.device)
    has_lengths = x.cu_seqlens_q is not None
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dq_block = [ROWS.value, dim * size // KEYS]  # a warpgroup's
    dq_layout = gl.NVMMASharedLayout.get_default_for(dq_block, gl.float32)
    blocks = triton.cdiv(x.longest_kv, KEYS)
    table = work_table(x, KEYS, "kv", by_sequence=True) if has_lengths else None
    programs = (blocks * x.batch if table is None else table.shape[0] - 2) * x.num_heads_kv
    bytes_per_head = 12 * dim * max(x.longest_q, x.longest_kv)  # about: q and dout in both forms, dq in fp32
    section = section_of(x, x.num_heads_kv, bytes_per_head)
    scales = scales_of(x)
    q16, k16, dout16 = halves_of(x, dout, dq.dtype)
    score_meta = x.score_meta()
    meta = Fp8OnePassMeta(
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        HAS_LENGTHS=has_lengths,
        HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
        HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        **score_meta,
        IS_PLAIN=is_plain(score_meta),
        BLOCK_M=size,
        BLOCK_N=KEYS,
        DIM=dim,
        DQ_STAGES=tile.dq_stages,
    )
    by_query, by_key = (x.q, q16, dout, dout16), (x.k, k16, x.v)
    launch(
        _attn_bwd_one_pass_fp8_hopper_kernel,
        programs,
        x.device,
        Tile(size, KEYS, 4, 2),
        (
            *(ragged_descriptor(t, size, dim) for t in by_query),
            *(ragged_descriptor(t, ROWS.value, dim) for t in by_key),
            TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat),
            TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], dq_block, dq_layout),
            *(ragged_descriptor(t, ROWS.value, dim) for t in (dk, dv)),
            *(tiles, *large[1:], table),
            *(argument for scale in scales for argument in scale.arguments),
            *(x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded),
            *(float(x.softmax_scale), x.batch, x.num_heads, x.group_size, blocks, section),
            *(num_tokens_q, x.k.shape[-3], x.longest_q, x.longest_kv, *x.window, int(x.bottom_right)),
            *batch_steps_of(*by_query, *by_key, dk, dv),
            *x.score_arguments(),
            *x.list_arguments("q"),
            x.mods,
            meta,
        ),
    )
    convert_dq(x, dq_sums, tiles, size, dq)
    if has_lengths:
        zero_padding(x, dq, "q")
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
