"""Backward attention in FP8 on Hopper (sm_90) in Gluon, in one pass, as `hopper_one_pass`.

"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.configs import Tile
from flexattn.kernels_triton.hopper import (
    allocate_barriers,
    batch_steps_of,
    blocks_of_queries,
    head_of,
    hide_queries_past_the_end,
    keep_pairs,
    load_rows,
    load_statistics,
    mask_by_mod,
    modified,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
    opaque_zero,
    query_block,
    ragged_descriptor,
    reduce_add,
    sequences,
    store_rows,
)
from flexattn.kernels_triton.hopper_fp8 import (
    BLOCK,
    Scale,
    compute_here,
    first_transposed_block,
    load_descale,
    pack_quads,
    transposed_descriptor,
    unpack_quads,
)
from flexattn.kernels_triton.hopper_fp8_backward import Fp8Gradient
from flexattn.kernels_triton.hopper_one_pass import _CONVERSION_TILE, _block_of, _mask
from flexattn.kernels_triton.launch import hopper_kernel, kernel, launch
from flexattn.kernels_triton.primitives import LOG2E, load_sequence, load_tile, row_pointer, row_steps, store_tile, through_mods
from flexattn.kernels_triton.problem import Problem, row_strides
from flexattn.kernels_triton.ragged import work_table, zero_padding
from flexattn.kernels_triton.statistics import statistics_tile, tiled_statistics

_ROWS = gl.constexpr(64)
_KEYS = 128  # of a program: two warpgroups'
_BOTH = gl.constexpr(2 * 128)  # threads of the two warpgroups
_EXCHANGE = gl.constexpr(9)  # the first of four named barriers, by parity of the turn and by who has written its ds
_LAST = gl.constexpr(13)
_STAGES = gl.constexpr(2)  # of q and dout in shared memory
_LARGEST = gl.constexpr(448.0)  # of e4m3
_TINY = gl.constexpr(1e-30)  # a row with nothing larger is 0


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
    IS_FP32: bool
    HAS_SCORE_MOD: bool
    HAS_MASK_MOD: bool
    BLOCK_SIZE_Q: int
    BLOCK_SIZE_KV: int
    IS_MODIFIED: bool
    IS_BLOCKWISE: bool
    IS_HALF: bool  # the products with p and ds are those of 16-bit numbers
    REDUCES: bool
    PARTS: int
    ORDER: int
    PERMUTED: bool
    LAZY: bool
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DQ_STAGES: int


@gluon.jit
def _load(descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META: gl.constexpr):
    q_descriptor, dout_descriptor, q2_descriptor, dout2_descriptor, k_descriptor, v_descriptor, k16_descriptor = descriptors[0]
    statistics_descriptor, dk_descriptor, dv_descriptor = descriptors[1]
    q_tiles, dout_tiles, q2_tiles, dout2_tiles, k_tiles, v_tiles, k16_tiles, statistics_tiles, factors, _, _, dk_tiles, dv_tiles = tiles
    q_full, q_empty, dout_full, kv_full, _, _, dkdv_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, v_place, k16_place, dk_place, dv_place = places[0]
    q2_place, dout2_place, transposed_block, blocks_of_a_head, first_tile, tiles_of_a_head = places[1]
    full = kv_full.index(0)
    mbarrier.expect(full, 2 * (k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes + k16_descriptor.block_type.nbytes))
    for part in gl.static_range(2):
        row = first_row + part * _ROWS
        load_rows(k_descriptor, k_place[0], len_kv, row, k_place[1], 0, full, k_tiles.index(part))
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
        load_rows(k16_descriptor, k16_place[0], len_kv, row, k16_place[1], 0, full, k16_tiles.index(part))
    REST: gl.constexpr = (
        dout_descriptor.block_type.nbytes + dout2_descriptor.block_type.nbytes + q2_descriptor.block_type.nbytes
    )
    scale_q, scale_k, scale_v, scale_dout, b, h, h_kv, softmax_scale = scales
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    qk_scale = load_descale(scale_k, b, h_kv, gl.minimum(first_row, gl.maximum(len_kv - 1, 0)))
    dp_scale = load_descale(scale_v, b, h_kv, gl.minimum(first_row, gl.maximum(len_kv - 1, 0)))
    if not META.IS_MODIFIED:
        qk_scale *= softmax_scale * LOG2E
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = query_block(t, found, META)[0]
        slot = turn % _STAGES
        descale_row = gl.minimum(row, len_q - 1)
        descale_q = load_descale(scale_q, b, h + head, descale_row)
        descale_dout = load_descale(scale_dout, b, h + head, descale_row)
        full = q_full.index(slot)
        mbarrier.wait(q_empty.index(slot), ((turn // _STAGES) & 1) ^ 1)
        factors.index(2 * slot).store(gl.full([32], gl.maximum(descale_q * qk_scale, 1e-37), gl.float32, layout=LANES))
        factors.index(2 * slot + 1).store(gl.full([32], descale_dout * dp_scale, gl.float32, layout=LANES))
        if not META.IS_HALF:
            factors.index(2 * _STAGES + 2 * slot).store(gl.full([32], descale_q, gl.float32, layout=LANES))
            factors.index(2 * _STAGES + 2 * slot + 1).store(gl.full([32], descale_dout, gl.float32, layout=LANES))
        mbarrier.expect(full, q_descriptor.block_type.nbytes + statistics_descriptor.block_type.nbytes)
        load_rows(q_descriptor, q_place[0], len_q, row, q_place[1] + head, 0, full, q_tiles.index(slot))
        of_head = first_tile + head * tiles_of_a_head
        load_statistics(statistics_descriptor, of_head, row, len_q, full, statistics_tiles.index(slot), META)
        full = dout_full.index(slot)
        mbarrier.expect(full, REST)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, full, dout_tiles.index(slot))
        if META.IS_HALF:
            load_rows(dout2_descriptor, dout2_place[0], len_q, row, dout2_place[1] + head, 0, full, dout2_tiles.index(slot))
            load_rows(q2_descriptor, q2_place[0], len_q, row, q2_place[1] + head, 0, full, q2_tiles.index(slot))
        else:
            transposed = [transposed_block + head * blocks_of_a_head + row // BLOCK, 0, row % BLOCK]
            tma.async_copy_global_to_shared(dout2_descriptor, transposed, full, dout2_tiles.index(slot))
            tma.async_copy_global_to_shared(q2_descriptor, transposed, full, q2_tiles.index(slot))
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
def _add_dq(dq_descriptor, dq_tiles, barriers, places, group_size, num_blocks, found, META: gl.constexpr):
    _, _, _, _, dq_full, dq_empty, _ = barriers
    len_q = places[0][1]
    _, _, _, _, first_tile, tiles_of_a_head = places[1]
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        slot = turn % META.DQ_STAGES
        row = query_block(t, found, META)[0]
        at = (first_tile + head * tiles_of_a_head) * META.BLOCK_M + row
        mbarrier.wait(dq_full.index(slot), (turn // META.DQ_STAGES) & 1)
        # A listed block may lie past the end: no row of this head's. (The engine has no addition to rows outside of a tensor.)
        if META.REDUCES:
            if META.BLOCK_SIZE_Q == 0 or row < len_q:
                for part in gl.static_range(2):
                    reduce_add(dq_descriptor, [at, part * (META.DIM // 2)], dq_tiles.index(2 * slot + part))
        tma.store_wait(0)  # the engine has read the tile
        mbarrier.arrive(dq_empty.index(slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            head += 1


@gluon.jit
def _dq_product(ds_tiles, k_tiles, buffer, zero, CONSUMER: gl.constexpr, META: gl.constexpr):
    # This warpgroup's half of the columns of a tile of dq, from all 128 keys.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    COLUMNS: gl.constexpr = META.DIM // 2
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout=DQ)
    for part in gl.static_range(2):
        k = k_tiles.index(zero + part).reshape([_ROWS, META.DIM]).slice(CONSUMER * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds_tiles.index(buffer + part).permute([1, 0]), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over(dq, dq_tiles, dq_full, dq_empty, turn, CONSUMER: gl.constexpr, META: gl.constexpr):
    slot = turn % META.DQ_STAGES
    mbarrier.wait(dq_empty.index(slot), ((turn // META.DQ_STAGES) & 1) ^ 1)
    if META.PERMUTED:
        # Rows 0 .. 3 and 4 .. 7 in turn: a store of half a warp then meets all banks.
        dq = gl.permute(dq.reshape([META.BLOCK_M // 8, 2, 4, META.DIM // 2]), [0, 2, 1, 3]).reshape([META.BLOCK_M, META.DIM // 2])
    dq_tiles.index(2 * slot + CONSUMER).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(slot), count=1)


@gluon.jit
def _in_e4m3(x, COLUMNS: gl.constexpr):
    # (x in e4m3 by quads, what each row is to be multiplied with)
    largest = gl.maximum(gl.max(gl.abs(x), 1), _TINY)
    return pack_quads(x * (_LARGEST / largest)[:, None], _ROWS, COLUMNS, gl.float8e4nv), largest * (1.0 / _LARGEST)


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
    q_tiles, dout_tiles, q2_tiles, dout2_tiles, k_tiles, v_tiles, k16_tiles, statistics_tiles, factors, ds_tiles, dq_tiles, dk_tiles, dv_tiles = (
        tiles
    )
    q_full, q_empty, dout_full, kv_full, dq_full, dq_empty, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, place = common
    len_q, len_kv, shift, b, first_head, h_kv = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16 if META.IS_HALF else 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2 if META.IS_HALF else 4)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, layout=SCORES)
    no_sum = gl.zeros([_ROWS, DIM], gl.float32, layout=DK)
    dk = gl.zeros([_ROWS, DIM], gl.float32, layout=DK)
    dv = gl.zeros([_ROWS, DIM], gl.float32, layout=DK)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = 0  # blocks of queries that begin before it need the mask
    if META.HAS_RIGHT:
        uncut_from = own_row + _ROWS - 1 - shift - window_right
    uncut_from = gl.where(own_row + _ROWS > len_kv, 2**30, uncut_from)
    # dq of a turn is computed in the next one, so that its product runs under that one's exp; before the first there is none.
    ds_tiles.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(_EXCHANGE + 2 + CONSUMER, _BOTH)
    mbarrier.wait(kv_full.index(0), 0)
    if META.LAZY:
        dk = warpgroup_mma_init(dk)
        ds16 = gl.convert_layout(zeros.to(DTYPE), LEFT)
    t = 0
    h = first_head
    head = head_of(bias, b, h, META)
    turns = num_blocks * group_size
    if META.ORDER == 2:
        next_kq = zeros
        if turns > 0:
            mbarrier.wait(q_full.index(0), 0)
            first_k = k_tiles.index(CONSUMER).reshape([_ROWS, DIM])
            first_q = q_tiles.index(0).reshape([BLOCK_M, DIM])
            first = warpgroup_mma(first_k, first_q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            next_kq = warpgroup_mma_wait(0, deps=[first])
    for turn in range(turns):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        slot = turn % _STAGES
        phase = (turn // _STAGES) & 1
        q = q_tiles.index(slot).reshape([BLOCK_M, DIM])
        dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM])
        if META.ORDER == 0:
            mbarrier.wait(q_full.index(slot), phase)
            own_k = k_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
            kq = warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        # Two barriers in turn: with one, a warpgroup that is ahead could arrive twice before the other has waited once.
        last = ((turn + 1) & 1) * 2
        named_barrier_sync_at(_EXCHANGE + 1 - CONSUMER + last, _BOTH)
        sum_of_k = _dq_product(ds_tiles, k16_tiles, last, zero, CONSUMER, META)
        if META.LAZY:
            kq, dk, ds16 = warpgroup_mma_wait(2, deps=[kq, dk, ds16])
            if turn > 0:
                mbarrier.arrive(q_empty.index((turn - 1) % _STAGES), count=1)
        elif META.ORDER == 0:
            kq = warpgroup_mma_wait(2, deps=[kq])
        else:
            kq = next_kq
        here = (len_q, len_kv, shift, b, h)
        qk_scale = factors.index(2 * slot).slice(0, 1).load(COLUMNS)[None, :]
        if META.IS_MODIFIED:
            kq = kq * qk_scale
        s, factor, cap_tanh, score = modified(kq, columns[None, :], rows[:, None], here, scores, head, MODS, META)
        if not META.IS_MODIFIED:
            factor = qk_scale
        is_cut = row < uncut_from  # a scalar branch: only blocks on an edge pay for the mask
        if META.HAS_LEFT:
            is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
        if is_cut:
            s = _mask(s, rows, columns, len_kv, shift, window_left, window_right, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, here, captures, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        own_v = v_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
        if META.IS_HALF:
            p16 = gl.convert_layout(p.to(DTYPE), LEFT)
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
            mbarrier.wait(dout_full.index(slot), phase)
            sum_of_dout = warpgroup_mma(p16, dout2_tiles.index(slot).reshape([BLOCK_M, DIM]), dv, is_async=True)
            if turn > 0:  # under the product; dp then takes the registers of dq
                _hand_over(dq, dq_tiles, dq_full, dq_empty, turn - 1, CONSUMER, META)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
            minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
            dp_scale = factors.index(2 * slot + 1).slice(0, 1).load(COLUMNS)[None, :]
            dp = warpgroup_mma_wait(0, deps=[dp])
        else:
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
            mbarrier.wait(dout_full.index(slot), phase)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if turn > 0:  # under the product
                _hand_over(dq, dq_tiles, dq_full, dq_empty, turn - 1, CONSUMER, META)
            p_quads, undo_p = _in_e4m3(p, BLOCK_M)
            minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
            dp_scale = factors.index(2 * slot + 1).slice(0, 1).load(COLUMNS)[None, :]
            dp = warpgroup_mma_wait(0, deps=[dp])
        dlogit = p * (dp * dp_scale + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, b, h, columns[None, :], rows[:, None], captures, MODS, META)
        ds = dscore.to(DTYPE)
        ds_tiles.index((turn & 1) * 2 + CONSUMER).store(ds)
        fence_async_shared()
        named_barrier_arrive_at(_EXCHANGE + CONSUMER + (turn & 1) * 2, _BOTH)
        if META.IS_HALF:
            ds16 = gl.convert_layout(ds, LEFT)
            if META.LAZY:
                dk = warpgroup_mma(ds16, q2_tiles.index(slot).reshape([BLOCK_M, DIM]), dk, is_async=True)
            else:
                sum_of_q = warpgroup_mma(ds16, q2_tiles.index(slot).reshape([BLOCK_M, DIM]), dk, is_async=True)
                if META.ORDER == 2:
                    # The next scores; after the last turn these again, for nothing.
                    next_slot = gl.where(turn + 1 < turns, (turn + 1) % _STAGES, slot)
                    mbarrier.wait(q_full.index(next_slot), ((turn + 1) // _STAGES) & 1, pred=turn + 1 < turns)
                    next_q = q_tiles.index(next_slot).reshape([BLOCK_M, DIM])
                    next_k = k_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
                    next_s = warpgroup_mma(next_k, next_q.permute([1, 0]), zeros, use_acc=False, is_async=True)
                    dk, ds16 = warpgroup_mma_wait(1, deps=[sum_of_q, ds16])
                    mbarrier.arrive(q_empty.index(slot), count=1)
                    next_kq = warpgroup_mma_wait(0, deps=[next_s])
                else:
                    dk, ds16 = warpgroup_mma_wait(0, deps=[sum_of_q, ds16])
        else:
            ds_quads, undo_ds = _in_e4m3(dscore, BLOCK_M)
            p8 = unpack_quads(p_quads, _ROWS, BLOCK_M, LEFT, gl.float8e4nv)
            dout_t = dout2_tiles.index(slot).reshape([DIM, BLOCK_M])
            ds8 = unpack_quads(ds_quads, _ROWS, BLOCK_M, LEFT, gl.float8e4nv)
            qt = q2_tiles.index(slot).reshape([DIM, BLOCK_M])
            sum_of_dout = warpgroup_mma(p8, dout_t.permute([1, 0]), no_sum, use_acc=False, is_async=True)
            sum_here = warpgroup_mma_wait(0, deps=[sum_of_dout])
            keep_pairs(p_quads)
            descale_dout = factors.index(2 * _STAGES + 2 * slot + 1).slice(0, 1).load(gl.SliceLayout(1, DK))
            dv = dv + sum_here * (gl.convert_layout(undo_p, gl.SliceLayout(1, DK)) * descale_dout)[:, None]
            compute_here(dv)
            # Into the same registers: with others there are not enough.
            sum_of_q = warpgroup_mma(ds8, qt.permute([1, 0]), sum_here, use_acc=False, is_async=True)
            sum_here = warpgroup_mma_wait(0, deps=[sum_of_q])
            keep_pairs(ds_quads)
            descale_q = factors.index(2 * _STAGES + 2 * slot).slice(0, 1).load(gl.SliceLayout(1, DK))
            dk = dk + sum_here * (gl.convert_layout(undo_ds, gl.SliceLayout(1, DK)) * descale_q)[:, None]
            compute_here(dk)
        if not META.LAZY and META.ORDER == 0:
            mbarrier.arrive(q_empty.index(slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            head = head_of(bias, b, gl.minimum(h, first_head + group_size - 1), META)
    if META.LAZY:
        dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
    last = ((turns + 1) & 1) * 2
    named_barrier_sync_at(_EXCHANGE + 1 - CONSUMER + last, _BOTH)
    if turns > 0:
        sum_of_k = _dq_product(ds_tiles, k16_tiles, last, 0, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        _hand_over(dq, dq_tiles, dq_full, dq_empty, turns - 1, CONSUMER, META)
    named_barrier_sync(_LAST, _BOTH)  # what the gradients take the place of is no longer needed
    dk_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store((dk * softmax_scale).to(DTYPE))
    dv_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@gluon.jit
def _compute_eager(
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
    q_tiles, dout_tiles, q2_tiles, dout2_tiles, k_tiles, v_tiles, k16_tiles, statistics_tiles, factors, ds_tiles, dq_tiles, dk_tiles, dv_tiles = (
        tiles
    )
    q_full, q_empty, dout_full, kv_full, dq_full, dq_empty, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, place = common
    len_q, len_kv, shift, b, first_head, h_kv = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([_ROWS, DIM], gl.float32, layout=DK)
    dv = gl.zeros([_ROWS, DIM], gl.float32, layout=DK)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = 0  # blocks of queries that begin before it need the mask
    if META.HAS_RIGHT:
        uncut_from = own_row + _ROWS - 1 - shift - window_right
    uncut_from = gl.where(own_row + _ROWS > len_kv, 2**30, uncut_from)
    mbarrier.wait(kv_full.index(0), 0)
    t = 0
    h = first_head
    head = head_of(bias, b, h, META)
    turns = num_blocks * group_size
    s = zeros
    if turns > 0:
        mbarrier.wait(q_full.index(0), 0)
        first = warpgroup_mma(
            k_tiles.index(CONSUMER).reshape([_ROWS, DIM]),
            q_tiles.index(0).reshape([BLOCK_M, DIM]).permute([1, 0]),
            zeros,
            use_acc=False,
            is_async=True,
        )
        s = warpgroup_mma_wait(0, deps=[first])
    for turn in range(turns):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        slot = turn % _STAGES
        phase = (turn // _STAGES) & 1
        dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM])
        mbarrier.wait(dout_full.index(slot), phase)
        own_v = v_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
        dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        here = (len_q, len_kv, shift, b, h)
        qk_scale = factors.index(2 * slot).slice(0, 1).load(COLUMNS)[None, :]
        if META.IS_MODIFIED:
            s = s * qk_scale
        s, factor, cap_tanh, score = modified(s, columns[None, :], rows[:, None], here, scores, head, MODS, META)
        if not META.IS_MODIFIED:
            factor = qk_scale
        is_cut = row < uncut_from  # a scalar branch: only blocks on an edge pay for the mask
        if META.HAS_LEFT:
            is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
        if is_cut:
            s = _mask(s, rows, columns, len_kv, shift, window_left, window_right, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, here, captures, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), LEFT)
        sum_of_dout = warpgroup_mma(p16, dout2_tiles.index(slot).reshape([BLOCK_M, DIM]), dv, is_async=True)
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_scale = factors.index(2 * slot + 1).slice(0, 1).load(COLUMNS)[None, :]
        dp = warpgroup_mma_wait(1, deps=[dp])
        dlogit = p * (dp * dp_scale + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, b, h, columns[None, :], rows[:, None], captures, MODS, META)
        ds = dscore.to(DTYPE)
        ds_tiles.index((turn & 1) * 2 + CONSUMER).store(ds)
        fence_async_shared()
        named_barrier_arrive_at(_EXCHANGE + CONSUMER + (turn & 1) * 2, _BOTH)
        ds16 = gl.convert_layout(ds, LEFT)
        dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
        sum_of_q = warpgroup_mma(ds16, q2_tiles.index(slot).reshape([BLOCK_M, DIM]), dk, is_async=True)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            head = head_of(bias, b, gl.minimum(h, first_head + group_size - 1), META)
        named_barrier_sync_at(_EXCHANGE + 1 - CONSUMER + (turn & 1) * 2, _BOTH)
        sum_of_k = _dq_product(ds_tiles, k16_tiles, (turn & 1) * 2, zero, CONSUMER, META)
        if META.PARTS == 1:
            # The next scores; of the last turn, the first slot's again, for nothing.
            next_slot = gl.where(turn + 1 < turns, (turn + 1) % _STAGES, slot)
            mbarrier.wait(q_full.index(next_slot), ((turn + 1) // _STAGES) & 1, pred=turn + 1 < turns)
            own_k = k_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
            q = q_tiles.index(next_slot).reshape([BLOCK_M, DIM])
            kq = warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            dk, ds16 = warpgroup_mma_wait(2, deps=[sum_of_q, ds16])
            mbarrier.arrive(q_empty.index(slot), count=1)
            dq = warpgroup_mma_wait(1, deps=[sum_of_k])
            _hand_over(dq, dq_tiles, dq_full, dq_empty, turn, CONSUMER, META)
            s = warpgroup_mma_wait(0, deps=[kq])
        else:
            dk, ds16 = warpgroup_mma_wait(2, deps=[sum_of_q, ds16])
            mbarrier.arrive(q_empty.index(slot), count=1)
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
            next_slot = gl.where(turn + 1 < turns, (turn + 1) % _STAGES, slot)
            mbarrier.wait(q_full.index(next_slot), ((turn + 1) // _STAGES) & 1, pred=turn + 1 < turns)
            own_k = k_tiles.index(zero + CONSUMER).reshape([_ROWS, DIM])
            q = q_tiles.index(next_slot).reshape([BLOCK_M, DIM])
            kq = warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
            _hand_over(dq, dq_tiles, dq_full, dq_empty, turn, CONSUMER, META)
            s = warpgroup_mma_wait(0, deps=[kq])
    named_barrier_sync(_LAST, _BOTH)  # what the gradients take the place of is no longer needed
    dk_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store((dk * softmax_scale).to(DTYPE))
    dv_tiles.index(CONSUMER).reshape([_ROWS, DIM]).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_one_pass_fp8_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    q2_descriptor,
    dout2_descriptor,
    k_descriptor,
    v_descriptor,
    k16_descriptor,
    statistics_descriptor,
    dq_descriptor,
    dk_descriptor,
    dv_descriptor,
    transposed_blocks,
    tiles_of_a_head,
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
    step_q2s,
    step_q2h,
    step_do2s,
    step_do2h,
    step_ks,
    step_kh,
    step_vs,
    step_vh,
    step_k2s,
    step_k2h,
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
    q_tiles = gl.allocate_shared_memory(q_descriptor.dtype, [_STAGES] + q_descriptor.block_type.shape, q_descriptor.layout)
    dout_tiles = gl.allocate_shared_memory(dout_descriptor.dtype, [_STAGES] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    q2_tiles = gl.allocate_shared_memory(q2_descriptor.dtype, [_STAGES] + q2_descriptor.block_type.shape, q2_descriptor.layout)
    dout2_tiles = gl.allocate_shared_memory(
        dout2_descriptor.dtype, [_STAGES] + dout2_descriptor.block_type.shape, dout2_descriptor.layout
    )
    k_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [2] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [2] + v_descriptor.block_type.shape, v_descriptor.layout)
    k16_tiles = gl.allocate_shared_memory(DTYPE, [2] + k16_descriptor.block_type.shape, k16_descriptor.layout)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [_STAGES, 2 * BLOCK_M], statistics_descriptor.layout)
    factors = gl.allocate_shared_memory(gl.float32, [4 * _STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * META.DQ_STAGES] + dq_descriptor.block_type.shape, dq_descriptor.layout)
    dk_tiles = k16_tiles
    if META.IS_HALF:
        dv_tiles = dout2_tiles
    else:
        dv_tiles = gl.allocate_shared_memory(dv_descriptor.dtype, [2] + dv_descriptor.block_type.shape, dv_descriptor.layout)
    barriers = (
        allocate_barriers(_STAGES, 1),
        allocate_barriers(_STAGES, 2),
        allocate_barriers(_STAGES, 1),
        allocate_barriers(1, 1),
        allocate_barriers(META.DQ_STAGES, 2),
        allocate_barriers(META.DQ_STAGES, 1),
        allocate_barriers(1, 2),
    )
    block, h_kv, b = _block_of(table_ptr, num_heads // group_size, blocks, META)
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
        (q_descriptor, dout_descriptor, q2_descriptor, dout2_descriptor, k_descriptor, v_descriptor, k16_descriptor),
        (statistics_descriptor, dk_descriptor, dv_descriptor),
    )
    tiles = (
        q_tiles,
        dout_tiles,
        q2_tiles,
        dout2_tiles,
        k_tiles,
        v_tiles,
        k16_tiles,
        statistics_tiles,
        factors,
        ds_tiles,
        dq_tiles,
        dk_tiles,
        dv_tiles,
    )
    places = (
        (
            first_row,
            len_q,
            len_kv,
            (start_q + b * step_qs, h + b * step_qh),
            (start_q + b * step_dos, h + b * step_doh),
            (start_kv + b * step_ks, h_kv + b * step_kh),
            (start_kv + b * step_vs, h_kv + b * step_vh),
            (start_kv + b * step_k2s, h_kv + b * step_k2h),
            (start_kv + b * step_dks, h_kv + b * step_dkh),
            (start_kv + b * step_dvs, h_kv + b * step_dvh),
        ),
        (
            (start_q + b * step_q2s, h + b * step_q2h),
            (start_q + b * step_do2s, h + b * step_do2h),
            h * transposed_blocks + first_transposed_block(b, start_q, num_tokens_q, META.IS_RAGGED_Q),
            transposed_blocks,
            statistics_tile(b, h, num_heads, start_q, tiles_of_a_head, META, BLOCK_M),
            tiles_of_a_head,
        ),
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
    common = (first_row, window_left, window_right, scores, bias, (len_q, len_kv, shift, b, h, h_kv))
    if META.ORDER == 1:
        gl.warp_specialize(
            [
                (_compute_eager, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
                (_compute_eager, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
                (_load, (descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META)),
                (_add_dq, (dq_descriptor, dq_tiles, barriers, places, group_size, num_blocks, found, META)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
                (_compute, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
                (_load, (descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META)),
                (_add_dq, (dq_descriptor, dq_tiles, barriers, places, group_size, num_blocks, found, META)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


@kernel
def _convert_kernel(
    dq_sums_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    cu_seqlens_q_ptr,
    cu_seqlens_q_padded_ptr,
    softmax_scale,
    batch,
    num_heads,
    num_tokens_q,
    max_seqlen_q,
    tiles,
    SIZE: tl.constexpr,
    PERMUTED: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % num_heads
    b = tl.program_id(0) // blocks // num_heads
    start_q, len_q, _ = load_sequence(
        cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, b, batch, num_tokens_q, max_seqlen_q, META.IS_RAGGED_Q, META.HAS_GAPS_Q, META
    )
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    first_sum = statistics_tile(b, h, num_heads, start_q, tiles, META, SIZE) * SIZE + first_row
    sums = dq_sums_ptr + tl.cast(first_sum, tl.int64) * HEAD_DIM
    rows = tl.arange(0, BLOCK_M)
    if PERMUTED:
        rows = rows // 8 * 8 + rows % 4 * 2 + rows // 4 % 2
    dq_pointer = row_pointer(dq_ptr, b, h, start_q + first_row, stride_dqb, stride_dqs, stride_dqh, META)
    _, dq_offsets = row_steps(stride_dqs, BLOCK_M, META)
    dq0 = load_tile(sums, rows * HEAD_DIM, first_row, first_row + BLOCK_M, BLOCK_M, 0, META.QK0, HEAD_DIM, True)
    store_tile(dq_pointer, dq0 * softmax_scale, dq_offsets, first_row, len_q, BLOCK_M, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        dq1 = load_tile(sums, rows * HEAD_DIM, first_row, first_row + BLOCK_M, BLOCK_M, META.QK0, META.QK1, HEAD_DIM, True)
        store_tile(dq_pointer, dq1 * softmax_scale, dq_offsets, first_row, len_q, BLOCK_M, META.QK0, META.QK1, HEAD_DIM)


class Variant(NamedTuple):
    is_half: bool
    dq_stages: int = 1
    reduces: bool = True
    parts: int = 1
    order: int = 0
    queries: int = 64
    permuted: bool = False
    lazy: bool = False


def fp8_one_pass_backward(
    problem: Problem,
    scales: tuple[Scale, Scale, Scale],
    gradient: Fp8Gradient,
    halves: tuple[Tensor, Tensor, Tensor],  # q, k, dout
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsoftmax_offset: Tensor | None = None,
    tile: Variant = Variant(True),
) -> None:
    x = problem
    dim, size = 64 if max(x.q.shape[-1], x.v.shape[-1]) <= 64 else 128, tile.queries
    num_tokens_q, head_dim = x.q.shape[-3], x.q.shape[-1]
    statistics, tiles = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)
    dq_sums = torch.zeros((statistics.numel() // 2, head_dim), dtype=torch.float32, device=x.device)
    has_lengths = x.cu_seqlens_q is not None
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dq_block = [size, dim // 2]
    dq_layout = gl.NVMMASharedLayout.get_default_for(dq_block, gl.float32)
    blocks = triton.cdiv(x.longest_kv, _KEYS)
    table = work_table(x, _KEYS, "kv") if has_lengths else None
    programs = (blocks * x.batch if table is None else table.shape[0] - 2) * x.num_heads_kv
    all_scales = (*scales, gradient.scale_dout)
    q16, k16, dout16 = halves
    meta = Fp8OnePassMeta(
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        HAS_LENGTHS=has_lengths,
        HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
        HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        **x.score_meta(),
        IS_MODIFIED=x.is_modified,
        IS_BLOCKWISE=any(scale.is_blockwise for scale in all_scales),
        IS_HALF=tile.is_half,
        REDUCES=tile.reduces,
        PARTS=tile.parts,
        ORDER=tile.order,
        PERMUTED=tile.permuted,
        LAZY=tile.lazy,
        BLOCK_M=size,
        BLOCK_N=_KEYS,
        DIM=dim,
        DQ_STAGES=tile.dq_stages,
    )
    if tile.is_half:
        second = [ragged_descriptor(t, size, dim) for t in (q16, dout16)]
    else:
        second = [transposed_descriptor(t, dim, size) for t in (gradient.q_transposed, gradient.dout_transposed)]
    launch(
        _attn_bwd_one_pass_fp8_hopper_kernel,
        programs,
        x.device,
        Tile(size, _KEYS, 4, 2),
        (
            *(ragged_descriptor(t, size, dim) for t in (x.q, gradient.dout8)),
            *second,
            *(ragged_descriptor(t, _ROWS.value, dim) for t in (x.k, x.v, k16)),
            TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat),
            TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], dq_block, dq_layout),
            *(ragged_descriptor(t, _ROWS.value, dim) for t in (dk, dv)),
            *(gradient.q_transposed.shape[1], tiles, table),
            *(argument for scale in all_scales for argument in scale.arguments),
            *(x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded),
            *(float(x.softmax_scale), x.batch, x.num_heads, x.group_size, blocks),
            *(num_tokens_q, x.k.shape[-3], x.longest_q, x.longest_kv, *x.window, int(x.bottom_right)),
            *batch_steps_of(x.q, gradient.dout8, q16, dout16, x.k, x.v, k16, dk, dv),
            *x.score_arguments(),
            *x.list_arguments("q"),
            x.mods,
            meta,
        ),
    )
    portable = x.meta(_CONVERSION_TILE, (dq,))
    launch(
        _convert_kernel,
        triton.cdiv(x.longest_q, _CONVERSION_TILE.block_m) * x.num_heads * x.batch,
        x.device,
        _CONVERSION_TILE,
        (
            *(dq_sums, dq, *row_strides(dq, portable), x.cu_seqlens_q, x.cu_seqlens_q_padded, float(x.softmax_scale)),
            *(x.batch, x.num_heads, num_tokens_q, x.longest_q, tiles, size, tile.permuted, portable),
        ),
    )
    if has_lengths:
        zero_padding(x, dq, "q")
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
