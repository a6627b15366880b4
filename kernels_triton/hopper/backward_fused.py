"""Backward attention on Hopper (sm_90) in Gluon, in one pass: scores are computed once, for dk and dv, which stay, and for dq.

A warp loads by TMA and two warpgroups compute, 64 keys each. Their dq goes tile by tile through shared memory, from where a warp
of its own has the copy engine add it to fp32 sums in global memory, in whatever order programs come to it: so the last bits of dq
vary from run to run. What `conditions.fused_unsupported` names, and what must repeat, runs on
`backward`.
"""

from __future__ import annotations

from typing import NamedTuple

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
    head_values,
    is_any_large,
    load_large,
    packed_start,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HopperOnePassTile
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
from flexattn.kernels_triton.hopper.conditions import KEYS, fused_tile
from flexattn.kernels_triton.hopper.descriptors import batch_steps_of, load_rows, load_statistics, ragged_descriptor, store_rows
from flexattn.kernels_triton.hopper.dq_sums import add_dq, convert_dq, dq_product, hand_over, write_dq
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.hopper.masking import FAR, hide_queries_past_the_end, mask_band, mask_by_mod
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers
from flexattn.kernels_triton.hopper.scores import head_group, head_of, modified, scores_of_head
from flexattn.kernels_triton.hopper.tile_scheduler import block_of, section_of, sequences
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


class OnePassMeta(NamedTuple):
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
    HAS_DROPOUT: bool
    BLOCK_SIZE_Q: int
    BLOCK_SIZE_KV: int
    LISTS_ARE_CUT: bool
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DP_FIRST: bool  # this and what follows as in `HopperOnePassTile`
    IS_AHEAD: bool
    TAKES_TURNS: bool
    DV_WITH_DK: bool
    DOUT_APART: bool
    DQ_STAGES: int  # of dq in shared memory


@gluon.jit
def _load(descriptors, tiles, barriers, places, group_size, num_blocks, found, META: gl.constexpr):
    q_descriptor, dout_descriptor, k_descriptor, v_descriptor, statistics_descriptor, _, dk_descriptor, dv_descriptor = descriptors
    q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, _, _ = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, _, _, dkdv_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, dk_place, dv_place, first_tile, tiles_of_a_head = places
    full = kv_full.index(0)
    mbarrier.expect(full, 2 * (k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes))
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(part))
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = query_block(t, found, META)[0]
        slot = turn % STAGES
        before = ((turn // STAGES) & 1) ^ 1
        full = q_full.index(slot)
        mbarrier.wait(q_empty.index(slot), before)
        mbarrier.expect(full, q_descriptor.block_type.nbytes + statistics_descriptor.block_type.nbytes)
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1] + head, 0, full, q_tiles.index(slot))
        of_head = first_tile + head * tiles_of_a_head
        load_statistics(statistics_descriptor, of_head, row, len_q, full, statistics_tiles.index(slot), META)
        full = dout_full.index(slot)
        if META.DOUT_APART:
            mbarrier.wait(dout_empty.index(slot), before)
        mbarrier.expect(full, dout_descriptor.block_type.nbytes)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, full, dout_tiles.index(slot))
        t += 1
        if t == num_blocks:
            t = 0
            head += 1
    mbarrier.wait(dkdv_full.index(0), 0)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        store_rows(dk_descriptor, dk_place[0], len_kv, row, dk_place[1], 0, k_tiles.index(part))
        store_rows(dv_descriptor, dv_place[0], len_kv, row, dv_place[1], 0, v_tiles.index(part))
    tma.store_wait(0)


@gluon.jit
def _begin_scores(q_tiles, own_k, q_full, slot, phase, is_there, META: gl.constexpr):
    # Those of the turn whose q is in `slot`, transposed; to be waited for.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    mbarrier.wait(q_full.index(slot), phase, pred=is_there)
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
    # dk and dv of 64 keys, and half of each tile of dq, to which the other warpgroup's ds adds too. So that neither waits for the
    # other in the middle of a turn, dq of a turn is computed in the next one. The products of a turn, and what runs under them:
    #   DP_FIRST   dp | p | dv | ds | dk, dq of the last turn
    #   else       dq of the last turn | p | dv, dp | ds | dk
    # Before all of it come the scores, which IS_AHEAD has begun at the end of the turn before.
    q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, ds_tiles, dq_tiles = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, dq_full, dq_empty, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, dropout, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    gl.static_assert(META.DP_FIRST or META.IS_AHEAD)
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
    draws = dropout_state(dropout, META)
    turns = num_blocks * group_size
    # As if there had been a turn before the first, whose ds is 0.
    ds_tiles.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(WRITTEN + 2 + CONSUMER, BOTH)
    if turns > 0:
        if META.DP_FIRST:
            named_barrier_arrive_at(READ + CONSUMER, BOTH)
        if META.TAKES_TURNS and CONSUMER == 1:
            named_barrier_arrive_at(TURN, BOTH)  # the first warpgroup begins
    mbarrier.wait(kv_full.index(0), 0)
    t = 0
    h = first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    kq = zeros
    if META.IS_AHEAD:  # noqa: SIM102  # this is known when it is compiled, that at run time
        if turns > 0:
            own_k = k_tiles.index(opaque_zero(turns) + CONSUMER).reshape([ROWS, DIM])
            first_scores = _begin_scores(q_tiles, own_k, q_full, 0, 0, turns > 0, META)
            kq = warpgroup_mma_wait(0, deps=[first_scores])
    for turn in range(turns):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        slot = turn % STAGES
        phase = (turn // STAGES) & 1
        here = (turn & 1) * 2
        last = ((turn + 1) & 1) * 2
        q = q_tiles.index(slot).reshape([BLOCK_M, DIM])
        dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM])
        own_k = k_tiles.index(zero + CONSUMER).reshape([ROWS, DIM])
        own_v = v_tiles.index(zero + CONSUMER).reshape([ROWS, DIM])
        if META.DP_FIRST:
            if not META.IS_AHEAD:
                own_scores_product = _begin_scores(q_tiles, own_k, q_full, slot, phase, True, META)
            mbarrier.wait(dout_full.index(slot), phase)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if not META.IS_AHEAD:
                kq = warpgroup_mma_wait(1, deps=[own_scores_product])
        else:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(ds_tiles, k_tiles, last, zero, CONSUMER, META)
        drawn = drawn_weights(draws, h, row, own_row, BLOCK_M, True, META)
        if META.TAKES_TURNS:
            named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s, factor, cap_tanh, score = modified(kq, columns[None, :], rows[:, None], place, own_scores, head, MODS, META)
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
        p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), LEFT)
        is_there = turn + 1 < turns  # the next one
        if META.TAKES_TURNS:
            if CONSUMER == 0:
                named_barrier_arrive_at(TURN + 1 + zero, BOTH)
            elif is_there:
                named_barrier_arrive_at(TURN + zero, BOTH)
        if not META.DP_FIRST:
            # Between exp and the wait for dq: ptxas moves a wait for all products up to where its basic block begins, here.
            mbarrier.wait(dout_full.index(slot), phase)
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        sum_of_dout = warpgroup_mma(p16, dout, dv, is_async=True)
        if META.DP_FIRST:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            if turn > 0:  # under the product; dp then takes the registers of dq
                write_dq(dq, dq_tiles, dq_empty, turn - 1, CONSUMER, META)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if turn > 0:
                hand_over(dq_full, turn - 1, META)
            dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        if not META.DP_FIRST:
            dp = warpgroup_mma_wait(0, deps=[dp])
            if META.DOUT_APART:
                mbarrier.arrive(dout_empty.index(slot), count=1)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        ds = dscore.to(DTYPE)
        if META.DP_FIRST:  # the other warpgroup's dq of the turn before the last has read what is overwritten
            named_barrier_sync_at(READ + 1 - CONSUMER + here, BOTH)
        ds_tiles.index(here + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        if META.DP_FIRST and not META.DV_WITH_DK:
            dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
            if META.DOUT_APART:
                mbarrier.arrive(dout_empty.index(slot), count=1)
        sum_of_q = warpgroup_mma(ds16, q, dk, is_async=True)
        fence_async_shared()  # under the product
        named_barrier_arrive_at(WRITTEN + CONSUMER + here, BOTH)
        if META.DP_FIRST:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(ds_tiles, k_tiles, last, zero, CONSUMER, META)
        if META.IS_AHEAD:  # in the last turn its own again, for nothing
            next_slot = gl.where(is_there, (turn + 1) % STAGES, slot)
            next_phase = ((turn + 1) // STAGES) & 1
            next_scores = _begin_scores(q_tiles, own_k, q_full, next_slot, next_phase, is_there, META)
        SCORES_IN_FLIGHT: gl.constexpr = 1 if META.IS_AHEAD else 0
        DQ_IN_FLIGHT: gl.constexpr = 2 if META.DP_FIRST else 0  # a product with each warpgroup's keys
        if META.DP_FIRST and META.DV_WITH_DK:
            dv, p16, dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_dout, p16, sum_of_q, ds16])
            if META.DOUT_APART:
                mbarrier.arrive(dout_empty.index(slot), count=1)
        else:
            dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_q, ds16])
        mbarrier.arrive(q_empty.index(slot), count=1)
        if META.DP_FIRST:
            dq = warpgroup_mma_wait(SCORES_IN_FLIGHT, deps=[sum_of_k])
            if is_there:
                named_barrier_arrive_at(READ + CONSUMER + last, BOTH)
            if turn > 0:
                write_dq(dq, dq_tiles, dq_empty, turn - 1, CONSUMER, META)
                hand_over(dq_full, turn - 1, META)
        if META.IS_AHEAD:
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
        sum_of_k = dq_product(ds_tiles, k_tiles, last, 0, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        write_dq(dq, dq_tiles, dq_empty, turns - 1, CONSUMER, META)
        hand_over(dq_full, turns - 1, META)
    named_barrier_sync(LAST, BOTH)  # k was the other warpgroup's too; now k and v are no longer needed
    k_tiles.index(CONSUMER).reshape([ROWS, DIM]).store((dk * softmax_scale).to(DTYPE))
    v_tiles.index(CONSUMER).reshape([ROWS, DIM]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_one_pass_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    v_descriptor,
    statistics_descriptor,
    dq_descriptor,
    dk_descriptor,
    dv_descriptor,
    tiles_of_a_head,
    large_ptr,  # of `large_rows`
    large_lse_ptr,
    table_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    softmax_scale,
    batch,
    num_heads,
    group_size,
    blocks,
    section,
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    step_qs,
    step_qh,
    step_dos,
    step_doh,
    step_ks,
    step_kh,
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
    rng_state_ptr,
    dropout_threshold,
    keep_scale,
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
    DTYPE: gl.constexpr = q_descriptor.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [2] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2] + v_descriptor.block_type.shape, v_descriptor.layout)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], statistics_descriptor.layout)
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * META.DQ_STAGES] + dq_descriptor.block_type.shape, dq_descriptor.layout)
    q_empty = allocate_barriers(STAGES, 2)
    # None may be without a use: Triton would give its memory to what partitions are handed (`CompileReport.idle_barriers`).
    dout_empty = q_empty
    if META.DOUT_APART:
        dout_empty = allocate_barriers(STAGES, 2)
    barriers = (
        allocate_barriers(STAGES, 1),
        q_empty,
        allocate_barriers(STAGES, 1),
        dout_empty,
        allocate_barriers(1, 1),
        allocate_barriers(META.DQ_STAGES, 2),
        allocate_barriers(META.DQ_STAGES, 1),
        allocate_barriers(1, 2),
    )
    block, h_kv, b = block_of(table_ptr, num_heads // group_size, blocks, section, False, META)
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
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        statistics_descriptor,
        dq_descriptor,
        dk_descriptor,
        dv_descriptor,
    )
    tiles = (q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, ds_tiles, dq_tiles)
    place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, start_q)
    first_tile = statistics_tile(b, h, num_heads, place_q, tiles_of_a_head, META, BLOCK_M)
    of_dq = (len_q, first_tile, tiles_of_a_head)
    places = (
        first_row,
        len_q,
        len_kv,
        (start_q + b * step_qs, h + b * step_qh),
        (start_q + b * step_dos, h + b * step_doh),
        (start_kv + b * step_ks, h_kv + b * step_kh),
        (start_kv + b * step_vs, h_kv + b * step_vh),
        (start_kv + b * step_dks, h_kv + b * step_dkh),
        (start_kv + b * step_dvs, h_kv + b * step_dvh),
        first_tile,
        tiles_of_a_head,
    )
    scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, captures)
    bias = (bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b)
    dropout = (rng_state_ptr, dropout_threshold, keep_scale, b * num_heads)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    common = (first_row, window_left, window_right, scores, bias, dropout, large, (len_q, len_kv, shift, b, h))
    gl.warp_specialize(
        [
            (_compute, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
            (_compute, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
            (_load, (descriptors, tiles, barriers, places, group_size, num_blocks, found, META)),
            (add_dq, (dq_descriptor, dq_tiles, barriers[5], barriers[6], of_dq, group_size, num_blocks, found, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def one_pass_backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsoftmax_offset: Tensor | None = None,
    tile: HopperOnePassTile | None = None,
) -> None:
    """`backward.hopper_backward` where `fused_unsupported` has nothing against it; the bits of dq vary from run to run."""
    x = problem
    tile = tile or fused_tile(x)
    dim, size = tile.head_dim, tile.queries
    num_tokens_q, head_dim = x.q.shape[-3], x.q.shape[-1]
    statistics, tiles, large = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)
    dq_sums = torch.zeros((statistics.numel() // 2, head_dim), dtype=torch.float32, device=x.device)
    has_lengths = x.cu_seqlens_q is not None
    bytes_per_head = 12 * dim * max(x.longest_q, x.longest_kv)  # k, v, q and dout of two bytes, dq of four
    section = section_of(x, x.num_heads_kv, bytes_per_head)
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dq_block = [ROWS.value, size * dim // (2 * ROWS.value)]
    dq_layout = gl.NVMMASharedLayout.get_default_for(dq_block, gl.float32)
    blocks = triton.cdiv(x.longest_kv, KEYS)
    table = work_table(x, KEYS, "kv", by_sequence=True) if has_lengths else None
    programs = (blocks * x.batch if table is None else table.shape[0] - 2) * x.num_heads_kv
    meta = OnePassMeta(
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        HAS_LENGTHS=has_lengths,
        HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
        HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        **x.score_meta(),
        HAS_DROPOUT=x.dropout_p > 0,
        BLOCK_M=size,
        BLOCK_N=KEYS,
        DIM=dim,
        DP_FIRST=tile.dp_first,
        IS_AHEAD=tile.is_ahead,
        TAKES_TURNS=tile.takes_turns,
        DV_WITH_DK=tile.dv_with_dk,
        DOUT_APART=tile.dout_apart,
        DQ_STAGES=tile.dq_stages,
    )
    launch(
        _attn_bwd_one_pass_hopper_kernel,
        programs,
        x.device,
        Tile(size, KEYS, 4, 2),
        (
            *(ragged_descriptor(t, size, dim) for t in (x.q, dout)),
            *(ragged_descriptor(t, ROWS.value, dim) for t in (x.k, x.v)),
            TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat),
            TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], dq_block, dq_layout),
            *(ragged_descriptor(t, ROWS.value, dim) for t in (dk, dv)),
            *(tiles, *large[1:], table, x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded),
            *(float(x.softmax_scale), x.batch, x.num_heads, x.group_size, blocks, section),
            *(num_tokens_q, x.k.shape[-3], x.longest_q, x.longest_kv, *x.window, int(x.bottom_right)),
            *batch_steps_of(x.q, dout, x.k, x.v, dk, dv),
            *x.score_arguments(),
            *x.dropout_arguments(),
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
