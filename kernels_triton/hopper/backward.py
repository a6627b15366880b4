"""Backward attention on Hopper (sm_90) in Gluon: one kernel for dq, one for dk and dv, each bitwise repeatable, as `backward` is.

`backward_fused` is faster, but its dq does not repeat to the bit. In both a warp loads by TMA and two warpgroups compute, 64 rows
of the gradient each (of dk and dv at head dim 256: half of the columns of 64 rows each). What
`conditions.backward_unsupported` names runs on the portable kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Alibi, Bias, Lengths
from flexattn.kernels_triton.common.preprocess import statistics_tile, tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    captures_of_head,
    head_values,
    is_any_large,
    load_head,
    load_large,
    packed_start,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HopperBackwardTile, split_head_dim
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.barriers import BOTH, DS_WRITTEN, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_keys, blocks_of_queries, key_block, query_block
from flexattn.kernels_triton.hopper.conditions import QUERIES, backward_tile
from flexattn.kernels_triton.hopper.descriptors import batch_steps_of, load_rows, load_statistics, ragged_descriptor, store_rows
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.hopper.masking import hide_queries_past_the_end, mask_by_mod, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers
from flexattn.kernels_triton.hopper.scores import head_group, head_of, modified, scores_of_head
from flexattn.kernels_triton.hopper.tile_scheduler import block_of, section_of, sequences
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


class BackwardMeta(NamedTuple):
    """What the kernels are compiled for."""

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
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES0: int  # in shared memory: of k and of v for dq, of q and of dout for dk and dv
    STAGES1: int
    SPLITS_COLUMNS: bool  # of dk and dv between the warpgroups, rather than rows


@gluon.jit
def _dq_load(descriptors, tiles, barriers, places, num_blocks, found, META: gl.constexpr):
    q_descriptor, dout_descriptor, k_descriptor, v_descriptor, q1_descriptor, k1_descriptor, dq_descriptor, dq1_descriptor = (
        descriptors
    )
    q_tiles, dout_tiles, k_tiles, v_tiles, q1_tiles, k1_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty, dq_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, dq_place = places
    QK0: gl.constexpr = META.QK0
    full = q_full.index(0)
    Q_BYTES: gl.constexpr = q_descriptor.block_type.nbytes + (q1_descriptor.block_type.nbytes if META.QK1 > 0 else 0)
    mbarrier.expect(full, 2 * (Q_BYTES + dout_descriptor.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = first_row + consumer * ROWS
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1], 0, full, q_tiles.index(consumer))
        if META.QK1 > 0:
            load_rows(q1_descriptor, q_place[0], len_q, row, q_place[1], QK0, full, q1_tiles.index(consumer))
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1], 0, full, dout_tiles.index(consumer))
    for turn in range(num_blocks):
        row = key_block(turn, found, META)[0]
        slot = turn % META.STAGES0
        full = k_full.index(slot)
        mbarrier.wait(k_empty.index(slot), ((turn // META.STAGES0) & 1) ^ 1)
        mbarrier.expect(full, k_descriptor.block_type.nbytes + (k1_descriptor.block_type.nbytes if META.QK1 > 0 else 0))
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(slot))
        if META.QK1 > 0:
            load_rows(k1_descriptor, k_place[0], len_kv, row, k_place[1], QK0, full, k1_tiles.index(slot))
        slot = turn % META.STAGES1
        mbarrier.wait(v_empty.index(slot), ((turn // META.STAGES1) & 1) ^ 1)
        mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes)
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, v_full.index(slot), v_tiles.index(slot))
    mbarrier.wait(dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        row = first_row + consumer * ROWS
        store_rows(dq_descriptor, dq_place[0], len_q, row, dq_place[1], 0, q_tiles.index(consumer))
        if META.QK1 > 0:
            store_rows(dq1_descriptor, dq_place[0], len_q, row, dq_place[1], QK0, q1_tiles.index(consumer))
    tma.store_wait(0)


@gluon.jit
def _dq_compute(
    tiles,
    barriers,
    common,
    statistics_ptr,
    num_blocks,
    found,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    q_tiles, dout_tiles, k_tiles, v_tiles, q1_tiles, k1_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty, dq_full = barriers
    first_row, window_left, window_right, scores, head, dropout, large, place = common
    len_q, len_kv, shift, b, h = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SIZE: gl.constexpr = META.STATISTICS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([ROWS, QK0], gl.float32, layout=DQ)
    if QK1 > 0:
        DQ1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dq1 = gl.zeros([ROWS, QK1], gl.float32, layout=DQ1)
    own_row = first_row + CONSUMER * ROWS
    rows = own_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    pointers = statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    last_seen_by_all = len_kv  # blocks that end past it need the mask
    if META.HAS_RIGHT:
        last_seen_by_all = gl.minimum(len_kv, own_row + shift + window_right + 1)
    draws = dropout_state(dropout, META)
    mbarrier.wait(q_full.index(0), 0)
    for turn in range(num_blocks):
        column, is_full = key_block(turn, found, META)
        columns = column + block_columns
        own = CONSUMER + opaque_zero(turn)
        k_slot = turn % META.STAGES0
        v_slot = turn % META.STAGES1
        k0 = k_tiles.index(k_slot).reshape([BLOCK_N, QK0])
        mbarrier.wait(k_full.index(k_slot), (turn // META.STAGES0) & 1)
        qk = warpgroup_mma(q_tiles.index(own).reshape([ROWS, QK0]), k0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        if QK1 > 0:
            k1 = k1_tiles.index(k_slot).reshape([BLOCK_N, QK1])
            qk = warpgroup_mma(q1_tiles.index(own).reshape([ROWS, QK1]), k1.permute([1, 0]), qk, is_async=True)
        mbarrier.wait(v_full.index(v_slot), (turn // META.STAGES1) & 1)
        v0 = v_tiles.index(v_slot).reshape([BLOCK_N, V0])
        dp = warpgroup_mma(dout_tiles.index(own).reshape([ROWS, V0]), v0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        drawn = drawn_weights(draws, h, own_row, column, BLOCK_N, False, META)
        qk = warpgroup_mma_wait(1, deps=[qk])
        s, factor, cap_tanh, score = modified(qk, rows[:, None], columns[None, :], place, scores, head, MODS, META)
        is_cut = column + BLOCK_N > last_seen_by_all
        if META.HAS_LEFT:
            is_cut = is_cut | (column < own_row + ROWS - 1 + shift - window_left)
        if is_cut | is_any_large(large, META):
            s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
            s = relative_to_lse(s, minus_lse[:, None], large, b, h, rows[:, None], len_q, META)
        s = mask_by_mod(s, rows[:, None], columns[None, :], is_full, place, captures, MODS, META)
        p = gl.exp2(s * factor + minus_lse[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        dlogit = p * (kept_gradient(dp, drawn, draws, False, META) + minus_delta[:, None])
        dscore = through_mods(dlogit, cap_tanh, score, rows[:, None], columns[None, :], head_group(place, scores, head), MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_k = warpgroup_mma(ds, k0, dq, is_async=True)
        if QK1 > 0:
            sum_of_k1 = warpgroup_mma(ds, k1, dq1, is_async=True)
            dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
        else:
            dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
    q_tiles.index(CONSUMER).reshape([ROWS, QK0]).store((dq * softmax_scale).to(DTYPE))  # q is no longer needed
    if QK1 > 0:
        q1_tiles.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * softmax_scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    v_descriptor,
    dq_descriptor,
    q1_descriptor,
    k1_descriptor,
    dq1_descriptor,
    statistics_ptr,
    tiles_of_statistics,
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
    step_dqs,
    step_dqh,
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
    DTYPE: gl.constexpr = q_descriptor.dtype
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    q_tiles = gl.allocate_shared_memory(DTYPE, [2] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES0] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES1] + v_descriptor.block_type.shape, v_descriptor.layout)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = gl.allocate_shared_memory(DTYPE, [2] + q1_descriptor.block_type.shape, q1_descriptor.layout)
        k1_tiles = gl.allocate_shared_memory(DTYPE, [STAGES0] + k1_descriptor.block_type.shape, k1_descriptor.layout)
    barriers = (
        allocate_barriers(1, 1),
        allocate_barriers(STAGES0, 1),
        allocate_barriers(STAGES0, 2),
        allocate_barriers(STAGES1, 1),
        allocate_barriers(STAGES1, 2),
        allocate_barriers(1, 2),
    )
    block, h, b = block_of(table_ptr, num_heads, blocks, section, True, META)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    start_q, len_q, start_kv, len_kv = sequences(
        b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
    )
    shift = (len_kv - len_q) * bottom_right
    first_row = gl.minimum(block * META.BLOCK_M, len_q)
    lists = (block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length)
    num_blocks, found = blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META)
    num_blocks = gl.where(first_row < len_q, num_blocks, 0)
    h_kv = h // group_size
    place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, start_q)
    first_tile = statistics_tile(b, h, num_heads, place_q, tiles_of_statistics, META, META.STATISTICS)
    own_statistics = statistics_ptr + first_tile.to(gl.int64) * (2 * META.STATISTICS)
    descriptors = (
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        q1_descriptor,
        k1_descriptor,
        dq_descriptor,
        dq1_descriptor,
    )
    tiles = (q_tiles, dout_tiles, k_tiles, v_tiles, q1_tiles, k1_tiles)
    places = (
        first_row,
        len_q,
        len_kv,
        (start_q + b * step_qs, h + b * step_qh),
        (start_q + b * step_dos, h + b * step_doh),
        (start_kv + b * step_ks, h_kv + b * step_kh),
        (start_kv + b * step_vs, h_kv + b * step_vh),
        (start_q + b * step_dqs, h + b * step_dqh),
    )
    head = load_head(
        Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        Alibi(alibi_slopes_ptr, stride_alibi_b),
        b,
        h,
        META,
    )
    captures = captures_of_head(b, h, captures, MODS, META)
    scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, captures)
    dropout = (rng_state_ptr, dropout_threshold, keep_scale, b * num_heads)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    common = (first_row, window_left, window_right, scores, head, dropout, large, (len_q, len_kv, shift, b, h))
    gl.warp_specialize(
        [
            (_dq_compute, (tiles, barriers, common, own_statistics, num_blocks, found, 0, MODS, META)),
            (_dq_compute, (tiles, barriers, common, own_statistics, num_blocks, found, 1, MODS, META)),
            (_dq_load, (descriptors, tiles, barriers, places, num_blocks, found, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(descriptors, tiles, barriers, places, group_size, num_blocks, found, META: gl.constexpr):
    (
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        statistics_descriptor,
        q1_descriptor,
        k1_descriptor,
        dk_descriptor,
        dv_descriptor,
        dk1_descriptor,
    ) = descriptors
    q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, q1_tiles, k1_tiles = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, dkdv_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, dk_place, dv_place, statistics_place = places
    first_tile, tiles_of_a_head = statistics_place
    QK0: gl.constexpr = META.QK0
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    full = kv_full.index(0)
    K_BYTES: gl.constexpr = k_descriptor.block_type.nbytes + (k1_descriptor.block_type.nbytes if META.QK1 > 0 else 0)
    mbarrier.expect(full, PARTS * (K_BYTES + v_descriptor.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(part))
        if META.QK1 > 0:
            load_rows(k1_descriptor, k_place[0], len_kv, row, k_place[1], QK0, full, k1_tiles.index(part))
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
    Q_BYTES: gl.constexpr = q_descriptor.block_type.nbytes + (q1_descriptor.block_type.nbytes if META.QK1 > 0 else 0)
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = query_block(t, found, META)[0]
        slot = turn % META.STAGES0
        full = q_full.index(slot)
        mbarrier.wait(q_empty.index(slot), ((turn // META.STAGES0) & 1) ^ 1)
        mbarrier.expect(full, Q_BYTES + statistics_descriptor.block_type.nbytes)
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1] + head, 0, full, q_tiles.index(slot))
        if META.QK1 > 0:
            load_rows(q1_descriptor, q_place[0], len_q, row, q_place[1] + head, QK0, full, q1_tiles.index(slot))
        of_head = first_tile + head * tiles_of_a_head
        load_statistics(statistics_descriptor, of_head, row, len_q, full, statistics_tiles.index(slot), META)
        slot = turn % META.STAGES1
        mbarrier.wait(dout_empty.index(slot), ((turn // META.STAGES1) & 1) ^ 1)
        mbarrier.expect(dout_full.index(slot), dout_descriptor.block_type.nbytes)
        load_rows(
            dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, dout_full.index(slot), dout_tiles.index(slot)
        )
        t += 1
        if t == num_blocks:
            t = 0
            head += 1
    mbarrier.wait(dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        store_rows(dk_descriptor, dk_place[0], len_kv, row, dk_place[1], 0, k_tiles.index(part))
        if META.QK1 > 0:
            store_rows(dk1_descriptor, dk_place[0], len_kv, row, dk_place[1], QK0, k1_tiles.index(part))
        store_rows(dv_descriptor, dv_place[0], len_kv, row, dv_place[1], 0, v_tiles.index(part))
    tma.store_wait(0)


@gluon.jit
def _dkdv_compute(
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
    q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, q1_tiles, k1_tiles = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, dropout, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, QK0], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, V0], gl.float32, layout=DV)
    if QK1 > 0:
        DK1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dk1 = gl.zeros([ROWS, QK1], gl.float32, layout=DK1)
    own_row = first_row + CONSUMER * ROWS
    rows = own_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    draws = dropout_state(dropout, META)
    mbarrier.wait(kv_full.index(0), 0)
    t, h = 0, first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    for turn in range(num_blocks * group_size):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        own = CONSUMER + opaque_zero(turn)
        q_slot = turn % META.STAGES0
        dout_slot = turn % META.STAGES1
        q0 = q_tiles.index(q_slot).reshape([BLOCK_M, QK0])
        dout0 = dout_tiles.index(dout_slot).reshape([BLOCK_M, V0])
        mbarrier.wait(q_full.index(q_slot), (turn // META.STAGES0) & 1)
        kq = warpgroup_mma(k_tiles.index(own).reshape([ROWS, QK0]), q0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        if QK1 > 0:
            q1 = q1_tiles.index(q_slot).reshape([BLOCK_M, QK1])
            kq = warpgroup_mma(k1_tiles.index(own).reshape([ROWS, QK1]), q1.permute([1, 0]), kq, is_async=True)
        mbarrier.wait(dout_full.index(dout_slot), (turn // META.STAGES1) & 1)
        dp = warpgroup_mma(v_tiles.index(own).reshape([ROWS, V0]), dout0.permute([1, 0]), zeros, use_acc=False, is_async=True)
        drawn = drawn_weights(draws, h, row, own_row, BLOCK_M, True, META)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s, factor, cap_tanh, score = modified(kq, columns[None, :], rows[:, None], place, own_scores, head, MODS, META)
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < own_row + ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                if META.IS_UNBOUNDED:
                    of_queries = statistics_tiles.index(q_slot).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, own_scores[4], MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = statistics_tiles.index(q_slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        minus_delta = statistics_tiles.index(q_slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), P)
        sum_of_dout = warpgroup_mma(p16, dout0, dv, is_async=True)
        sum_of_q = warpgroup_mma(ds, q0, dk, is_async=True)
        if QK1 > 0:
            sum_of_q1 = warpgroup_mma(ds, q1, dk1, is_async=True)
            dv, p16 = warpgroup_mma_wait(2, deps=[sum_of_dout, p16])
            mbarrier.arrive(dout_empty.index(dout_slot), count=1)
            dk, dk1, ds = warpgroup_mma_wait(0, deps=[sum_of_q, sum_of_q1, ds])
        else:
            dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
            mbarrier.arrive(dout_empty.index(dout_slot), count=1)
            dk, ds = warpgroup_mma_wait(0, deps=[sum_of_q, ds])
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            head = head_of(bias, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    k_tiles.index(CONSUMER).reshape([ROWS, QK0]).store((dk * softmax_scale).to(DTYPE))  # k and v are no longer needed
    if QK1 > 0:
        k1_tiles.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * softmax_scale).to(DTYPE))
    v_tiles.index(CONSUMER).reshape([ROWS, V0]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@gluon.jit
def _dkdv_compute_columns(
    tiles,
    exchanges,
    barriers,
    common,
    group_size,
    num_blocks,
    found,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, _, _ = tiles
    shared_p, shared_ds = exchanges
    q_full, q_empty, dout_full, dout_empty, kv_full, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, dropout, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HALF: gl.constexpr = META.BLOCK_M // 2
    DIM: gl.constexpr = META.QK0
    HALF_DIM: gl.constexpr = META.QK0 // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    FIRST: gl.constexpr = CONSUMER * HALF
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF_DIM
    zeros = gl.zeros([ROWS, HALF], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, HALF_DIM], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, HALF_DIM], gl.float32, layout=DK)
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    draws = dropout_state(dropout, META)
    mbarrier.wait(kv_full.index(0), 0)
    t, h = 0, first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    for turn in range(num_blocks * group_size):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        q_slot = turn % META.STAGES0
        dout_slot = turn % META.STAGES1
        q0 = q_tiles.index(q_slot).reshape([BLOCK_M, DIM])
        dout0 = dout_tiles.index(dout_slot).reshape([BLOCK_M, DIM])
        mbarrier.wait(q_full.index(q_slot), (turn // META.STAGES0) & 1)
        own_q = q0.slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(k_tiles.index(zero).reshape([ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        mbarrier.wait(dout_full.index(dout_slot), (turn // META.STAGES1) & 1)
        own_dout = dout0.slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(v_tiles.index(zero).reshape([ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = statistics_tiles.index(q_slot).slice(FIRST, HALF).load(COLUMNS)
        drawn = drawn_weights(draws, h, row + FIRST, first_row, HALF, True, META)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s, factor, cap_tanh, score = modified(kq, columns[None, :], rows[:, None], place, own_scores, head, MODS, META)
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < first_row + ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > first_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                s = relative_to_lse(s, minus_lse[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, own_scores[4], MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse[None, :])
        buffer = (turn & 1) * 2  # two, so that one barrier a product is enough
        shared_p.index(buffer + CONSUMER).store(kept(p, drawn, True, META).to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = statistics_tiles.index(q_slot).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        sum_of_dout = dv
        for half in gl.static_range(2):
            part = dout0.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_dout = warpgroup_mma(shared_p.index(buffer + half), part, sum_of_dout, is_async=True)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        shared_ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(DS_WRITTEN, BOTH)
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q0.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(shared_ds.index(buffer + half), part, sum_of_q, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[sum_of_dout])
        mbarrier.arrive(dout_empty.index(dout_slot), count=1)
        dk = warpgroup_mma_wait(0, deps=[sum_of_q])
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            head = head_of(bias, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    k_tiles.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * softmax_scale).to(DTYPE))
    v_tiles.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    v_descriptor,
    statistics_descriptor,
    dk_descriptor,
    dv_descriptor,
    q1_descriptor,
    k1_descriptor,
    dk1_descriptor,
    tiles_of_statistics,
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
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES0] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [STAGES1] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [PARTS] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [PARTS] + v_descriptor.block_type.shape, v_descriptor.layout)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES0, 2 * BLOCK_M], statistics_descriptor.layout)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = gl.allocate_shared_memory(DTYPE, [STAGES0] + q1_descriptor.block_type.shape, q1_descriptor.layout)
        k1_tiles = gl.allocate_shared_memory(DTYPE, [2] + k1_descriptor.block_type.shape, k1_descriptor.layout)
    barriers = (
        allocate_barriers(STAGES0, 1),
        allocate_barriers(STAGES0, 2),
        allocate_barriers(STAGES1, 1),
        allocate_barriers(STAGES1, 2),
        allocate_barriers(1, 1),
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
    place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, start_q)
    first_tile = statistics_tile(b, h, num_heads, place_q, tiles_of_statistics, META, BLOCK_M)
    descriptors = (
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        statistics_descriptor,
        q1_descriptor,
        k1_descriptor,
        dk_descriptor,
        dv_descriptor,
        dk1_descriptor,
    )
    tiles = (q_tiles, dout_tiles, k_tiles, v_tiles, statistics_tiles, q1_tiles, k1_tiles)
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
        (first_tile, tiles_of_statistics),
    )
    scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, captures)
    bias = (bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b)
    dropout = (rng_state_ptr, dropout_threshold, keep_scale, b * num_heads)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    common = (first_row, window_left, window_right, scores, bias, dropout, large, (len_q, len_kv, shift, b, h))
    if META.SPLITS_COLUMNS:
        HALF: gl.constexpr = META.BLOCK_M // 2
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], DTYPE)
        shared_p = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        shared_ds = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        exchanges = (shared_p, shared_ds)
        gl.warp_specialize(
            [
                (
                    _dkdv_compute_columns,
                    (tiles, exchanges, barriers, common, group_size, num_blocks, found, 0, MODS, META),
                ),
                (
                    _dkdv_compute_columns,
                    (tiles, exchanges, barriers, common, group_size, num_blocks, found, 1, MODS, META),
                ),
                (_dkdv_load, (descriptors, tiles, barriers, places, group_size, num_blocks, found, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_compute, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
                (_dkdv_compute, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
                (_dkdv_load, (descriptors, tiles, barriers, places, group_size, num_blocks, found, META)),
            ],
            [4, 1],
            [240, 24],
        )


def hopper_backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsoftmax_offset: Tensor | None = None,
    tile: HopperBackwardTile | None = None,
) -> None:
    """dq, dk, dv and dsoftmax_offset of `backward.attention_backward`, where `backward_unsupported` has nothing against it.

    dq, dk and dv are contiguous. A bias and captures get their gradients by `score_gradients.bias_and_capture_gradients`.
    """
    x = problem
    tile = tile or backward_tile(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v
    size = tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    num_tokens_q = x.q.shape[-3]
    statistics, tiles, large = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)

    def meta(**own: int | bool) -> BackwardMeta:
        return BackwardMeta(
            IS_RAGGED_Q=x.q.dim() == 3,
            IS_RAGGED_KV=x.k.dim() == 3,
            HAS_LENGTHS=has_lengths,
            HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
            HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
            HAS_LEFT=x.window_left is not None,
            HAS_RIGHT=x.window_right is not None,
            **x.score_meta(),
            HAS_DROPOUT=x.dropout_p > 0,
            STATISTICS=size,
            QK0=qk0,
            QK1=qk1,
            V0=v0,
            **own,
        )

    def descriptors(rows: int, *tensors: tuple[Tensor, int]) -> list[TensorDescriptor]:
        return [ragged_descriptor(t, rows, width) for t, width in tensors]

    lengths = (x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded)
    sizes = (num_tokens_q, x.k.shape[-3], x.longest_q, x.longest_kv, *x.window, int(x.bottom_right))

    for rows, side in ((QUERIES, "q"), (tile.keys, "kv")):
        longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
        blocks = triton.cdiv(longest, rows)
        table = work_table(x, rows, side, by_sequence=True) if has_lengths else None
        # What is read again and again of a head: k and v for dq, q and dout for dk and dv (as room for half as many heads).
        again = x.longest_kv * 2 if side == "q" else x.longest_q * 4
        section = section_of(x, heads, again * (qk0 + qk1 + v0))
        programs = (blocks * x.batch if table is None else table.shape[0] - 2) * heads
        head = (
            tiles,
            *large[1:],
            table,
            *lengths,
            float(x.softmax_scale),
            x.batch,
            x.num_heads,
            x.group_size,
            blocks,
            section,
            *sizes,
        )
        inlined = (*x.score_arguments(), *x.dropout_arguments(), *x.list_arguments("kv" if side == "q" else "q"), x.mods)
        if side == "q":
            own = descriptors(64, (x.q, qk0), (dout, v0)) + descriptors(tile.block_n, (x.k, qk0), (x.v, v0))
            second = [ragged_descriptor(x.q, 64, qk1), ragged_descriptor(x.k, tile.block_n, qk1)] if qk1 else own[:2]
            grads = descriptors(64, (dq, qk0)), descriptors(64, (dq, qk1)) if qk1 else own[:1]
            kind = meta(BLOCK_M=QUERIES, BLOCK_N=tile.block_n, STAGES0=2, STAGES1=tile.v_stages, SPLITS_COLUMNS=False)
            steps = batch_steps_of(x.q, dout, x.k, x.v, dq)
            arguments = (*own, *grads[0], *second, *grads[1], statistics, *head, *steps, *inlined, kind)
            launch(_attn_bwd_dq_hopper_kernel, programs, x.device, Tile(QUERIES, tile.block_n, 4, 2), arguments)
            gradients = (dq,)
        else:
            own = descriptors(tile.block_m, (x.q, qk0), (dout, v0)) + descriptors(64, (x.k, qk0), (x.v, v0))
            flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
            own.append(TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat))
            second = [ragged_descriptor(x.q, tile.block_m, qk1), ragged_descriptor(x.k, 64, qk1)] if qk1 else own[:2]
            grads = descriptors(64, (dk, qk0), (dv, v0)), descriptors(64, (dk, qk1)) if qk1 else own[:1]
            kind = meta(BLOCK_M=tile.block_m, BLOCK_N=tile.keys, STAGES0=2, STAGES1=2, SPLITS_COLUMNS=tile.splits_columns)
            steps = batch_steps_of(x.q, dout, x.k, x.v, dk, dv)
            arguments = (*own, *grads[0], *second, *grads[1], *head, *steps, *inlined, kind)
            launch(_attn_bwd_dkdv_hopper_kernel, programs, x.device, Tile(tile.block_m, tile.keys, 4, 2), arguments)
            gradients = (dk, dv)
        if has_lengths:
            for gradient in gradients:
                zero_padding(x, gradient, side)
