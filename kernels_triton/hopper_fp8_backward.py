"""Backward attention in FP8 on Hopper (sm_90) in Gluon: `hopper_backward` with fp8 operands, all seven products by QGMMA.

What a product sums over comes transposed: k for dq, q and dout for dk and dv (`hopper_fp8`). p and ds become e4m3 with a scale for
each row of each tile, from the largest there: a row of a tile is a row of the gradient it goes into, so the scale is undone in fp32
as the tile's product, an accumulator of its own, is added to the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.configs import Tile
from flexattn.kernels_triton.hopper import (
    FP8_DTYPES,
    allocate_barriers,
    batch_steps_of,
    descriptor_error,
    keep_pairs,
    key_blocks,
    load_rows,
    mask_keys,
    mask_queries,
    opaque_zero,
    query_blocks,
    ragged_descriptor,
    sequences,
    store_rows,
)
from flexattn.kernels_triton.hopper_backward import block_of
from flexattn.kernels_triton.hopper_fp8 import (
    BLOCK,
    Scale,
    compute_here,
    first_transposed_block,
    load_descale,
    pack_quads,
    scale_error,
    transposed_descriptor,
    unpack_quads,
)
from flexattn.kernels_triton.launch import capability_of, hopper_kernel, launch
from flexattn.kernels_triton.primitives import LOG2E
from flexattn.kernels_triton.problem import Problem
from flexattn.kernels_triton.ragged import work_table, zero_padding
from flexattn.kernels_triton.statistics import statistics_tile, tiled_statistics

_ROWS = gl.constexpr(64)
_OPEN = 2**30
_TILE_ROWS = 128  # of a program: two warpgroups'
_LARGEST = gl.constexpr(448.0)  # of e4m3
_TINY = gl.constexpr(1e-30)  # a row with nothing larger is 0


class Fp8BackwardTile(NamedTuple):
    """A row for the FP8 backward on sm_90: it serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    block_n: int  # keys that dq takes at a time
    block_m: int  # queries that dk and dv take at a time
    stages: int  # of each operand that is loaded again and again


FP8_BACKWARD = (Fp8BackwardTile(64, 128, 128, 2), Fp8BackwardTile(128, 128, 64, 2))


def select_fp8_backward_tile(head_dim_qk: int, head_dim_v: int) -> Fp8BackwardTile | None:
    """The narrowest row that serves the head dims; None if there is none."""
    return next((tile for tile in FP8_BACKWARD if max(head_dim_qk, head_dim_v) <= tile.head_dim), None)


class Fp8BackwardMeta(NamedTuple):
    """What the kernels are compiled for."""

    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_GAPS_Q: bool
    HAS_GAPS_KV: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    IS_BLOCKWISE: bool  # some scale varies along the sequence
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    DIM: int
    STAGES: int


@gluon.jit
def _dq_load(descriptors, tiles, barriers, places, begin, num_blocks, META: gl.constexpr):
    q_descriptor, dout_descriptor, k_descriptor, v_descriptor, kt_descriptor, dq_descriptor = descriptors
    q_tiles, dout_tiles, k_tiles, v_tiles, kt_tiles, dq_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty, dq_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, dq_place, kt_block = places
    full = q_full.index(0)
    mbarrier.expect(full, 2 * (q_descriptor.block_type.nbytes + dout_descriptor.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = first_row + consumer * _ROWS
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1], 0, full, q_tiles.index(consumer))
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1], 0, full, dout_tiles.index(consumer))
    for turn in range(num_blocks):
        row = (begin + turn) * META.BLOCK_N
        slot = turn % META.STAGES
        phase = ((turn // META.STAGES) & 1) ^ 1
        full = k_full.index(slot)
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(full, k_descriptor.block_type.nbytes + kt_descriptor.block_type.nbytes)
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(slot))
        place = [kt_block + row // BLOCK, 0, row % BLOCK]
        tma.async_copy_global_to_shared(kt_descriptor, place, full, kt_tiles.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes)
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, v_full.index(slot), v_tiles.index(slot))
    mbarrier.wait(dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        row = first_row + consumer * _ROWS
        store_rows(dq_descriptor, dq_place[0], len_q, row, dq_place[1], 0, dq_tiles.index(consumer))
    tma.store_wait(0)


@gluon.jit
def _in_e4m3(x, COLUMNS: gl.constexpr):
    # (x in e4m3 by quads, what each row is to be multiplied with)
    largest = gl.maximum(gl.max(gl.abs(x), 1), _TINY)
    return pack_quads(x * (_LARGEST / largest)[:, None], _ROWS, COLUMNS, gl.float8e4nv), largest * (1.0 / _LARGEST)


@gluon.jit
def _dq_compute(
    tiles,
    barriers,
    common,
    statistics_ptr,
    scales,
    begin,
    num_blocks,
    CONSUMER: gl.constexpr,
    META: gl.constexpr,
):
    q_tiles, dout_tiles, k_tiles, v_tiles, kt_tiles, dq_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty, dq_full = barriers
    first_row, window_left, window_right, softmax_scale, place = common
    len_q, len_kv, shift, b, h, h_kv = place
    scale_q, scale_k, scale_v, scale_dout = scales
    BLOCK_N: gl.constexpr = META.BLOCK_N
    DIM: gl.constexpr = META.DIM
    SIZE: gl.constexpr = META.STATISTICS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 4)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    no_sum = gl.zeros([_ROWS, DIM], gl.float32, layout=DQ)
    dq = gl.zeros([_ROWS, DIM], gl.float32, layout=DQ)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    pointers = statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    last_seen_by_all = len_kv  # blocks that end past it need the mask
    if META.HAS_RIGHT:
        last_seen_by_all = gl.minimum(len_kv, own_row + shift + window_right + 1)
    own_scale_row = gl.minimum(own_row, gl.maximum(len_q - 1, 0))
    descale_q = load_descale(scale_q, b, h, own_scale_row)
    descale_dout = load_descale(scale_dout, b, h, own_scale_row)
    descale_k = load_descale(scale_k, b, h_kv, 0)
    descale_v = load_descale(scale_v, b, h_kv, 0)
    mbarrier.wait(q_full.index(0), 0)
    for turn in range(num_blocks):
        column = (begin + turn) * BLOCK_N
        if META.IS_BLOCKWISE:
            descale_k = load_descale(scale_k, b, h_kv, column)
            descale_v = load_descale(scale_v, b, h_kv, column)
        own = CONSUMER + opaque_zero(turn)
        slot = turn % META.STAGES
        phase = (turn // META.STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_tiles.index(slot).reshape([BLOCK_N, DIM])
        qk = warpgroup_mma(q_tiles.index(own).reshape([_ROWS, DIM]), k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), phase)
        v = v_tiles.index(slot).reshape([BLOCK_N, DIM])
        dp = warpgroup_mma(dout_tiles.index(own).reshape([_ROWS, DIM]), v.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[qk])
        is_cut = column + BLOCK_N > last_seen_by_all
        if META.HAS_LEFT:
            is_cut = is_cut | (column < own_row + _ROWS - 1 + shift - window_left)
        if is_cut:
            s = mask_keys(s, rows, column + block_columns, len_kv, shift, window_left, window_right, META)
        factor = gl.maximum(descale_q * descale_k * (softmax_scale * LOG2E), 1e-37)
        p = gl.exp2(s * factor + minus_lse[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(slot), count=1)
        quads, undo = _in_e4m3(p * (dp * (descale_dout * descale_v) + minus_delta[:, None]), BLOCK_N)
        ds = unpack_quads(quads, _ROWS, BLOCK_N, DS, gl.float8e4nv)
        kt = kt_tiles.index(slot).reshape([DIM, BLOCK_N])
        sum_of_k = warpgroup_mma(ds, kt.permute([1, 0]), no_sum, use_acc=False, is_async=True)
        sum_here = warpgroup_mma_wait(0, deps=[sum_of_k])
        keep_pairs(quads)
        mbarrier.arrive(k_empty.index(slot), count=1)
        dq = dq + sum_here * gl.convert_layout(undo * descale_k, gl.SliceLayout(1, DQ))[:, None]
        compute_here(dq)
    dq_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store((dq * softmax_scale).to(dq_tiles.dtype))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_fp8_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    v_descriptor,
    kt_descriptor,  # transposed
    dq_descriptor,
    kt_blocks,  # transposed tiles of a head
    statistics_ptr,
    tiles_of_statistics,
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
    META: gl.constexpr,
):
    STAGES: gl.constexpr = META.STAGES
    q_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [2] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(dout_descriptor.dtype, [2] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [STAGES] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [STAGES] + v_descriptor.block_type.shape, v_descriptor.layout)
    kt_tiles = gl.allocate_shared_memory(kt_descriptor.dtype, [STAGES] + kt_descriptor.block_type.shape, kt_descriptor.layout)
    dq_tiles = gl.allocate_shared_memory(dq_descriptor.dtype, [2] + dq_descriptor.block_type.shape, dq_descriptor.layout)
    barriers = (
        allocate_barriers(1, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(1, 2),
    )
    block, h, b = block_of(table_ptr, num_heads, blocks, True, META)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    start_q, len_q, start_kv, len_kv = sequences(
        b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
    )
    shift = (len_kv - len_q) * bottom_right
    first_row = gl.minimum(block * META.BLOCK_M, len_q)
    begin, end = key_blocks(first_row, len_kv, shift, window_left, window_right, META)
    num_blocks = gl.where(first_row < len_q, end - begin, 0)
    h_kv = h // group_size
    first_tile = statistics_tile(b, h, num_heads, start_q, tiles_of_statistics, META, META.STATISTICS)
    own_statistics = statistics_ptr + first_tile.to(gl.int64) * (2 * META.STATISTICS)
    descriptors = (q_descriptor, dout_descriptor, k_descriptor, v_descriptor, kt_descriptor, dq_descriptor)
    tiles = (q_tiles, dout_tiles, k_tiles, v_tiles, kt_tiles, dq_tiles)
    places = (
        first_row,
        len_q,
        len_kv,
        (start_q + b * step_qs, h + b * step_qh),
        (start_q + b * step_dos, h + b * step_doh),
        (start_kv + b * step_ks, h_kv + b * step_kh),
        (start_kv + b * step_vs, h_kv + b * step_vh),
        (start_q + b * step_dqs, h + b * step_dqh),
        h_kv * kt_blocks + first_transposed_block(b, start_kv, num_tokens_kv, META.IS_RAGGED_KV),
    )
    scales = (
        (descale_q_ptr, stride_descale_qb, stride_descale_qh, stride_descale_qn, block_rows_q),
        (descale_k_ptr, stride_descale_kb, stride_descale_kh, stride_descale_kn, block_rows_k),
        (descale_v_ptr, stride_descale_vb, stride_descale_vh, stride_descale_vn, block_rows_v),
        (descale_dout_ptr, stride_descale_dob, stride_descale_doh, stride_descale_don, block_rows_dout),
    )
    common = (first_row, window_left, window_right, softmax_scale, (len_q, len_kv, shift, b, h, h_kv))
    gl.warp_specialize(
        [
            (_dq_compute, (tiles, barriers, common, own_statistics, scales, begin, num_blocks, 0, META)),
            (_dq_compute, (tiles, barriers, common, own_statistics, scales, begin, num_blocks, 1, META)),
            (_dq_load, (descriptors, tiles, barriers, places, begin, num_blocks, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(descriptors, tiles, barriers, places, group_size, begin, num_blocks, META: gl.constexpr):
    (
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        qt_descriptor,
        dout_t_descriptor,
        statistics_descriptor,
        dk_descriptor,
        dv_descriptor,
    ) = descriptors
    q_tiles, dout_tiles, k_tiles, v_tiles, qt_tiles, dout_t_tiles, statistics_tiles, dk_tiles, dv_tiles = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, dkdv_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, dk_place, dv_place, transposed_place, statistics_place = places
    first_tile, tiles_of_a_head = statistics_place
    transposed_block, blocks_of_a_head = transposed_place
    full = kv_full.index(0)
    mbarrier.expect(full, 2 * (k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes))
    for part in gl.static_range(2):
        row = first_row + part * _ROWS
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(part))
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
    Q_BYTES: gl.constexpr = q_descriptor.block_type.nbytes + qt_descriptor.block_type.nbytes
    DOUT_BYTES: gl.constexpr = dout_descriptor.block_type.nbytes + dout_t_descriptor.block_type.nbytes
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = (begin + t) * META.BLOCK_M
        slot = turn % META.STAGES
        phase = ((turn // META.STAGES) & 1) ^ 1
        transposed = [transposed_block + head * blocks_of_a_head + row // BLOCK, 0, row % BLOCK]
        full = q_full.index(slot)
        mbarrier.wait(q_empty.index(slot), phase)
        mbarrier.expect(full, Q_BYTES + statistics_descriptor.block_type.nbytes)
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1] + head, 0, full, q_tiles.index(slot))
        tma.async_copy_global_to_shared(qt_descriptor, transposed, full, qt_tiles.index(slot))
        at = (first_tile + head * tiles_of_a_head + row // META.BLOCK_M) * (2 * META.BLOCK_M)
        tma.async_copy_global_to_shared(statistics_descriptor, [at], full, statistics_tiles.index(slot))
        full = dout_full.index(slot)
        mbarrier.wait(dout_empty.index(slot), phase)
        mbarrier.expect(full, DOUT_BYTES)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, full, dout_tiles.index(slot))
        tma.async_copy_global_to_shared(dout_t_descriptor, transposed, full, dout_t_tiles.index(slot))
        t += 1
        if t == num_blocks:
            t = 0
            head += 1
    mbarrier.wait(dkdv_full.index(0), 0)
    for part in gl.static_range(2):
        row = first_row + part * _ROWS
        store_rows(dk_descriptor, dk_place[0], len_kv, row, dk_place[1], 0, dk_tiles.index(part))
        store_rows(dv_descriptor, dv_place[0], len_kv, row, dv_place[1], 0, dv_tiles.index(part))
    tma.store_wait(0)


@gluon.jit
def _dkdv_compute(
    tiles,
    barriers,
    common,
    scales,
    group_size,
    begin,
    num_blocks,
    CONSUMER: gl.constexpr,
    META: gl.constexpr,
):
    q_tiles, dout_tiles, k_tiles, v_tiles, qt_tiles, dout_t_tiles, statistics_tiles, dk_tiles, dv_tiles = tiles
    q_full, q_empty, dout_full, dout_empty, kv_full, dkdv_full = barriers
    first_row, window_left, window_right, softmax_scale, place = common
    _, len_kv, shift, b, h, h_kv = place
    scale_q, scale_k, scale_v, scale_dout = scales
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, layout=SCORES)
    no_sum = gl.zeros([_ROWS, DIM], gl.float32, layout=SUM)
    dk = gl.zeros([_ROWS, DIM], gl.float32, layout=SUM)
    dv = gl.zeros([_ROWS, DIM], gl.float32, layout=SUM)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    own_scale_row = gl.minimum(own_row, gl.maximum(len_kv - 1, 0))
    descale_k = load_descale(scale_k, b, h_kv, own_scale_row)
    descale_v = load_descale(scale_v, b, h_kv, own_scale_row)
    mbarrier.wait(kv_full.index(0), 0)
    t = 0
    for turn in range(num_blocks * group_size):
        row = (begin + t) * BLOCK_M
        descale_q = load_descale(scale_q, b, h, row)
        descale_dout = load_descale(scale_dout, b, h, row)
        own = CONSUMER + opaque_zero(turn)
        slot = turn % META.STAGES
        phase = (turn // META.STAGES) & 1
        mbarrier.wait(q_full.index(slot), phase)
        q = q_tiles.index(slot).reshape([BLOCK_M, DIM])
        kq = warpgroup_mma(k_tiles.index(own).reshape([_ROWS, DIM]), q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(dout_full.index(slot), phase)
        dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM])
        dp = warpgroup_mma(v_tiles.index(own).reshape([_ROWS, DIM]), dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[kq])
        if META.HAS_LEFT or META.HAS_RIGHT:
            is_cut = False
            if META.HAS_RIGHT:
                is_cut = row < own_row + _ROWS - 1 - shift - window_right
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, row + block_columns, shift, window_left, window_right, META)
        factor = gl.maximum(descale_q * descale_k * (softmax_scale * LOG2E), 1e-37)
        minus_lse = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p_quads, undo_p = _in_e4m3(p, BLOCK_M)
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds_quads, undo_ds = _in_e4m3(p * (dp * (descale_dout * descale_v) + minus_delta[None, :]), BLOCK_M)
        p8 = unpack_quads(p_quads, _ROWS, BLOCK_M, OPERAND, gl.float8e4nv)
        dout_t = dout_t_tiles.index(slot).reshape([DIM, BLOCK_M])
        sum_of_dout = warpgroup_mma(p8, dout_t.permute([1, 0]), no_sum, use_acc=False, is_async=True)
        sum_here = warpgroup_mma_wait(0, deps=[sum_of_dout])
        keep_pairs(p_quads)
        mbarrier.arrive(dout_empty.index(slot), count=1)
        dv = dv + sum_here * gl.convert_layout(undo_p * descale_dout, gl.SliceLayout(1, SUM))[:, None]
        compute_here(dv)
        ds8 = unpack_quads(ds_quads, _ROWS, BLOCK_M, OPERAND, gl.float8e4nv)
        qt = qt_tiles.index(slot).reshape([DIM, BLOCK_M])
        # Into the same registers: with others there are not enough.
        sum_of_q = warpgroup_mma(ds8, qt.permute([1, 0]), sum_here, use_acc=False, is_async=True)
        sum_here = warpgroup_mma_wait(0, deps=[sum_of_q])
        keep_pairs(ds_quads)
        mbarrier.arrive(q_empty.index(slot), count=1)
        dk = dk + sum_here * gl.convert_layout(undo_ds * descale_q, gl.SliceLayout(1, SUM))[:, None]
        compute_here(dk)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
    dk_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store((dk * softmax_scale).to(dk_tiles.dtype))
    dv_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store(dv.to(dv_tiles.dtype))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_fp8_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    v_descriptor,
    qt_descriptor,  # transposed
    dout_t_descriptor,
    statistics_descriptor,
    dk_descriptor,
    dv_descriptor,
    transposed_blocks,  # of a head
    tiles_of_statistics,
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
    META: gl.constexpr,
):
    STAGES: gl.constexpr = META.STAGES
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [STAGES] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(
        dout_descriptor.dtype, [STAGES] + dout_descriptor.block_type.shape, dout_descriptor.layout
    )
    k_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [2] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [2] + v_descriptor.block_type.shape, v_descriptor.layout)
    qt_tiles = gl.allocate_shared_memory(qt_descriptor.dtype, [STAGES] + qt_descriptor.block_type.shape, qt_descriptor.layout)
    dout_t_tiles = gl.allocate_shared_memory(
        dout_t_descriptor.dtype, [STAGES] + dout_t_descriptor.block_type.shape, dout_t_descriptor.layout
    )
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], statistics_descriptor.layout)
    dk_tiles = gl.allocate_shared_memory(dk_descriptor.dtype, [2] + dk_descriptor.block_type.shape, dk_descriptor.layout)
    dv_tiles = gl.allocate_shared_memory(dv_descriptor.dtype, [2] + dv_descriptor.block_type.shape, dv_descriptor.layout)
    barriers = (
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(1, 1),
        allocate_barriers(1, 2),
    )
    block, h_kv, b = block_of(table_ptr, num_heads // group_size, blocks, False, META)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    start_q, len_q, start_kv, len_kv = sequences(
        b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
    )
    shift = (len_kv - len_q) * bottom_right
    first_row = gl.minimum(block * META.BLOCK_N, len_kv)
    h = h_kv * group_size
    begin, end = query_blocks(first_row, META.BLOCK_N, len_q, shift, window_left, window_right, META)
    num_blocks = gl.where(first_row < len_kv, end - begin, 0)
    first_tile = statistics_tile(b, h, num_heads, start_q, tiles_of_statistics, META, BLOCK_M)
    descriptors = (
        q_descriptor,
        dout_descriptor,
        k_descriptor,
        v_descriptor,
        qt_descriptor,
        dout_t_descriptor,
        statistics_descriptor,
        dk_descriptor,
        dv_descriptor,
    )
    tiles = (q_tiles, dout_tiles, k_tiles, v_tiles, qt_tiles, dout_t_tiles, statistics_tiles, dk_tiles, dv_tiles)
    transposed_block = h * transposed_blocks + first_transposed_block(b, start_q, num_tokens_q, META.IS_RAGGED_Q)
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
        (transposed_block, transposed_blocks),
        (first_tile, tiles_of_statistics),
    )
    scales = (
        (descale_q_ptr, stride_descale_qb, stride_descale_qh, stride_descale_qn, block_rows_q),
        (descale_k_ptr, stride_descale_kb, stride_descale_kh, stride_descale_kn, block_rows_k),
        (descale_v_ptr, stride_descale_vb, stride_descale_vh, stride_descale_vn, block_rows_v),
        (descale_dout_ptr, stride_descale_dob, stride_descale_doh, stride_descale_don, block_rows_dout),
    )
    common = (first_row, window_left, window_right, softmax_scale, (len_q, len_kv, shift, b, h, h_kv))
    gl.warp_specialize(
        [
            (_dkdv_compute, (tiles, barriers, common, scales, group_size, begin, num_blocks, 0, META)),
            (_dkdv_compute, (tiles, barriers, common, scales, group_size, begin, num_blocks, 1, META)),
            (_dkdv_load, (descriptors, tiles, barriers, places, group_size, begin, num_blocks, META)),
        ],
        [4, 1],
        [240, 24],
    )


class Fp8Gradient(NamedTuple):
    """dout and what it and the inputs are in FP8; the transposed ones as `hopper_fp8_quantize` writes them."""

    dout8: Tensor  # [b, s, h, d_v] or [total, h, d_v]
    scale_dout: Scale
    q_transposed: Tensor
    k_transposed: Tensor
    dout_transposed: Tensor


def refusal(problem: Problem, gradient: Fp8Gradient, scales: tuple[Scale, Scale, Scale]) -> str | None:
    """None if the kernels run this problem's backward, else why the portable ones do."""
    x = problem
    if capability_of(x.device) != 90:
        return "it is written for Hopper, sm_90"
    operands = {"q": x.q, "k": x.k, "v": x.v, "dout": gradient.dout8}
    for name, tensor in operands.items():
        if tensor.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(tensor.dtype).removeprefix('torch.')}"
    for has, what in (
        (x.dropout_p > 0, "dropout"),
        (x.is_modified, "a softcap, a bias, ALiBi, mods or a block mask"),
        (x.softmax_scale == 0, "a softmax_scale of 0"),
    ):
        if has:
            return f"it does not do {what} yet"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    if select_fp8_backward_tile(x.q.shape[-1], x.v.shape[-1]) is None:
        return f"it has no tile for head dims {x.q.shape[-1]} and {x.v.shape[-1]}"
    if x.num_heads * (x.q.shape[-3] + 256) * x.batch >= 2**29:
        return "its statistics are more than the copy engine's coordinates reach"
    heads = (x.num_heads, x.num_heads_kv, x.num_heads_kv, x.num_heads)
    errors = [descriptor_error(name, t) for name, t in operands.items()]
    errors += [
        scale_error(name, scale, x, h, BLOCK.value)
        for name, scale, h in zip(operands, (*scales, gradient.scale_dout), heads, strict=True)
    ]
    return next((error for error in errors if error), None)


def hopper_fp8_backward(
    problem: Problem,
    scales: tuple[Scale, Scale, Scale],
    gradient: Fp8Gradient,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsoftmax_offset: Tensor | None = None,
    tile: Fp8BackwardTile | None = None,
) -> None:
    """`hopper_backward.hopper_backward` in FP8, for what `refusal` has no objection to.

    problem: q, k and v in FP8, as the forward had them.
    scales: of q, k and v.
    out, lse: the forward's; dout as it was before it was quantised, in a half type, for the sum of out and dout in a row.
    dq, dk, dv: contiguous, in a half type.
    """
    x = problem
    tile = tile or select_fp8_backward_tile(x.q.shape[-1], x.v.shape[-1])
    assert tile is not None
    dim, size = tile.head_dim, tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    statistics, tiles = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)
    lengths = (x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded)
    left, right = x.window
    right = right if x.window_right is not None else _OPEN
    sizes = (x.q.shape[-3], x.k.shape[-3], x.longest_q, x.longest_kv, left, right, int(x.bottom_right))
    all_scales = (*scales, gradient.scale_dout)
    scale_arguments = [argument for scale in all_scales for argument in scale.arguments]

    def meta(block_m: int, block_n: int, has_right: bool) -> Fp8BackwardMeta:
        return Fp8BackwardMeta(
            IS_RAGGED_Q=x.q.dim() == 3,
            IS_RAGGED_KV=x.k.dim() == 3,
            HAS_LENGTHS=has_lengths,
            HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
            HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
            HAS_LEFT=x.window_left is not None,
            HAS_RIGHT=has_right,
            IS_BLOCKWISE=any(scale.is_blockwise for scale in all_scales),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STATISTICS=size,
            DIM=dim,
            STAGES=tile.stages,
        )

    def descriptors(rows: int, *tensors: Tensor) -> list[Any]:
        return [ragged_descriptor(t, rows, dim) for t in tensors]

    for side in ("q", "kv"):
        longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
        blocks = triton.cdiv(longest, _TILE_ROWS)
        table = work_table(x, _TILE_ROWS, side) if has_lengths else None  # type: ignore[arg-type]
        programs = (blocks * x.batch if table is None else table.shape[0] - 2) * heads
        head = (table, *scale_arguments, *lengths, float(x.softmax_scale), x.batch, x.num_heads, x.group_size, blocks, *sizes)
        if side == "q":
            own = descriptors(64, x.q, gradient.dout8) + descriptors(tile.block_n, x.k, x.v)
            own += [transposed_descriptor(gradient.k_transposed, dim, tile.block_n), *descriptors(64, dq)]
            steps = batch_steps_of(x.q, gradient.dout8, x.k, x.v, dq)
            place = (gradient.k_transposed.shape[1], statistics, tiles)
            arguments = (*own, *place, *head, *steps, meta(_TILE_ROWS, tile.block_n, x.window_right is not None))
            launch(_attn_bwd_dq_fp8_hopper_kernel, programs, x.device, Tile(_TILE_ROWS, tile.block_n, 4, 2), arguments)
            gradients: tuple[Tensor, ...] = (dq,)
        else:
            own = descriptors(size, x.q, gradient.dout8) + descriptors(64, x.k, x.v)
            own += [transposed_descriptor(t, dim, size) for t in (gradient.q_transposed, gradient.dout_transposed)]
            flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
            own.append(TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat))
            own += descriptors(64, dk, dv)
            steps = batch_steps_of(x.q, gradient.dout8, x.k, x.v, dk, dv)
            place = (gradient.q_transposed.shape[1], tiles)  # type: ignore[assignment]
            arguments = (
                *own,
                *place,
                *head,
                *steps,
                meta(size, _TILE_ROWS, True),
            )  # without the branch that it never takes, ptxas spills at 64
            launch(_attn_bwd_dkdv_fp8_hopper_kernel, programs, x.device, Tile(size, _TILE_ROWS, 4, 2), arguments)
            gradients = (dk, dv)
        if has_lengths:
            for t in gradients:
                zero_padding(x, t, side)  # type: ignore[arg-type]
