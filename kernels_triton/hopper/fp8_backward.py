"""Backward attention in FP8 on Hopper (sm_90) in Gluon: `hopper_backward` with scores and dp from FP8 operands.

As in `hopper_fp8_one_pass` the products with p and ds are 16-bit, for the reasons that are given there, and q, k and dout are read
in both forms. One kernel for dq, one for dk and dv, each bitwise repeatable, for head dims up to 256. What is read in FP8 is
released once dp is there, what is read in a half type at the end of a turn, so that each has slots of its own.
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
    LOG2E,
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
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.barriers import BOTH, LAST, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_keys, blocks_of_queries, key_block, query_block
from flexattn.kernels_triton.hopper.conditions import backward_slower, backward_unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import batch_steps_of, load_rows, load_statistics, ragged_descriptor, store_rows
from flexattn.kernels_triton.hopper.fp8 import load_descale, scales_of
from flexattn.kernels_triton.hopper.fp8_backward_fused import halves_of, is_plain, unsupported_operands
from flexattn.kernels_triton.hopper.masking import hide_queries_past_the_end, mask_by_mod, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import opaque_zero
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers
from flexattn.kernels_triton.hopper.scores import head_group, head_of, modified, scores_of_head
from flexattn.kernels_triton.hopper.tile_scheduler import block_of, section_of, sequences
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch

_ROWS = gl.constexpr(64)
_QUERIES = 128  # of a dq program: two warpgroups'
# Named barriers, each of both warpgroups
_P_WRITTEN = gl.constexpr(9)
_DS_WRITTEN = gl.constexpr(10)


class Fp8BackwardTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in two kernels, as `configs.HopperBackwardTile`; no other was timed."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys that dq takes at a time
    dq_stages: tuple[int, int]  # in shared memory: of k and v in FP8, and of k in a half type
    block_m: int  # queries that dk and dv take at a time
    # Of q and dout in FP8, and in a half type of dout and of q, which are as many unless columns are split.
    dkdv_stages: tuple[int, int, int]
    splits_columns: bool  # of dk and dv between the warpgroups: 64 keys a program instead of 128

    @property
    def keys(self) -> int:
        """Of a program of dk and dv."""
        return 64 if self.splits_columns else 128


# With 128 keys, or at head dim 128 with 64 queries, modified scores would lack registers, and a block mask may have fewer.
FP8_BACKWARD = (
    Fp8BackwardTile(64, 64, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(64, 64, 64, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 64, (2, 2), 32, (2, 2, 2), False),
    Fp8BackwardTile(192, 128, 64, (2, 2), 32, (2, 2, 2), False),
    # q, in a half type, has most of a turn to come in: of all four its one slot is missed least.
    Fp8BackwardTile(256, 256, 64, (2, 2), 64, (2, 2, 1), True),
)


class Fp8BackwardMeta(NamedTuple):
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
    BLOCK_SIZE_Q: int
    BLOCK_SIZE_KV: int
    LISTS_ARE_CUT: bool
    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES: int  # in shared memory, of what is in FP8
    STAGES16: int  # in a half type, of k or of dout
    STAGES_Q16: int
    OWN_TILES: bool  # for the gradients, which else leave through tiles of a half type
    SPLITS_COLUMNS: bool  # of dk and dv between the warpgroups, rather than rows


# q and k are a pair of tiles each, of which the second is there where QK1 > 0; so are their descriptors.
@gluon.jit
def _allocate_pair(NUM: gl.constexpr, descriptors, META: gl.constexpr):
    first, second = descriptors
    tiles = gl.allocate_shared_memory(first.dtype, [NUM] + first.block_type.shape, first.layout)
    if META.QK1 > 0:
        return tiles, gl.allocate_shared_memory(second.dtype, [NUM] + second.block_type.shape, second.layout)
    else:
        return tiles, tiles


@gluon.jit
def _load_pair(descriptors, place, head, length, row, barrier, tiles, slot, META: gl.constexpr):
    load_rows(descriptors[0], place[0], length, row, place[1] + head, 0, barrier, tiles[0].index(slot))
    if META.QK1 > 0:
        load_rows(descriptors[1], place[0], length, row, place[1] + head, META.QK0, barrier, tiles[1].index(slot))


@gluon.jit
def _store_pair(descriptors, place, length, row, tiles, slot, META: gl.constexpr):
    store_rows(descriptors[0], place[0], length, row, place[1], 0, tiles[0].index(slot))
    if META.QK1 > 0:
        store_rows(descriptors[1], place[0], length, row, place[1], META.QK0, tiles[1].index(slot))


@gluon.jit
def _score_product(left, own, right, slot, zeros, COLUMNS: gl.constexpr, META: gl.constexpr):
    # _ROWS rows of q by COLUMNS of k, or of k by those of q
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    left0 = left[0].index(own).reshape([_ROWS, QK0])
    right0 = right[0].index(slot).reshape([COLUMNS, QK0])
    s = warpgroup_mma(left0, right0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if QK1 > 0:
        left1 = left[1].index(own).reshape([_ROWS, QK1])
        right1 = right[1].index(slot).reshape([COLUMNS, QK1])
        s = warpgroup_mma(left1, right1.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _descale(scale, b, h, row, length):
    # A listed block, and a program's own rows, may lie past the end.
    return load_descale(scale, b, h, gl.maximum(gl.minimum(row, length - 1), 0))


@gluon.jit
def _write_factors(factors, slot, s_factor, dp_factor):
    # What a turn's scores and its dp are multiplied with. All lanes write what the arrival of the first one publishes. A masked
    # score is -inf, and -inf * 0 would be NaN.
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    factors.index(2 * slot).store(gl.full([4], gl.maximum(s_factor, 1e-37), gl.float32, layout=LANES))
    factors.index(2 * slot + 1).store(gl.full([4], dp_factor, gl.float32, layout=LANES))


@gluon.jit
def _read_factor(factors, index, COLUMNS: gl.constexpr):
    return factors.index(index).slice(0, 1).load(COLUMNS)[None, :]


@gluon.jit
def _logits(product, i, j, place, scores, head, s_factor, MODS: gl.constexpr, META: gl.constexpr):
    # `hopper.modified` of a product of FP8 numbers
    if not META.IS_PLAIN:
        product = product * s_factor
    s, factor, cap_tanh, score = modified(product, i, j, place, scores, head, MODS, META)
    if META.IS_PLAIN:
        factor = s_factor
    return s, factor, cap_tanh, score


@gluon.jit
def _dq_load(descriptors, tiles, barriers, places, scales, num_blocks, found, META: gl.constexpr):
    of_q, of_k, of_k16, of_dq, dout_descriptor, v_descriptor = descriptors
    q_tiles, k_tiles, k16_tiles, dq_tiles, dout_tiles, v_tiles, factors = tiles
    q_full, full8, empty8, full16, empty16, dq_full = barriers
    first_row, len_q, len_kv, q_place, dout_place, k_place, k16_place, v_place, dq_place = places
    scale_q, scale_k, scale_v, scale_dout, b, h, h_kv, softmax_scale = scales
    Q_BYTES: gl.constexpr = of_q[0].block_type.nbytes + (of_q[1].block_type.nbytes if META.QK1 > 0 else 0)
    K_BYTES: gl.constexpr = of_k[0].block_type.nbytes + (of_k[1].block_type.nbytes if META.QK1 > 0 else 0)
    K16_BYTES: gl.constexpr = of_k16[0].block_type.nbytes + (of_k16[1].block_type.nbytes if META.QK1 > 0 else 0)
    full = q_full.index(0)
    mbarrier.expect(full, 2 * (Q_BYTES + dout_descriptor.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = first_row + consumer * _ROWS
        _load_pair(of_q, q_place, 0, len_q, row, full, q_tiles, consumer, META)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1], 0, full, dout_tiles.index(consumer))
    s_factor = _descale(scale_q, b, h, first_row, len_q)
    dp_factor = _descale(scale_dout, b, h, first_row, len_q)
    if META.IS_PLAIN:
        s_factor *= softmax_scale * LOG2E
    for turn in range(num_blocks):
        row = key_block(turn, found, META)[0]
        descale_k = _descale(scale_k, b, h_kv, row, len_kv)
        descale_v = _descale(scale_v, b, h_kv, row, len_kv)
        slot = turn % META.STAGES
        full = full8.index(slot)
        mbarrier.wait(empty8.index(slot), ((turn // META.STAGES) & 1) ^ 1)
        _write_factors(factors, slot, s_factor * descale_k, dp_factor * descale_v)
        mbarrier.expect(full, K_BYTES + v_descriptor.block_type.nbytes)
        _load_pair(of_k, k_place, 0, len_kv, row, full, k_tiles, slot, META)
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(slot))
        slot = turn % META.STAGES16
        mbarrier.wait(empty16.index(slot), ((turn // META.STAGES16) & 1) ^ 1)
        mbarrier.expect(full16.index(slot), K16_BYTES)
        _load_pair(of_k16, k16_place, 0, len_kv, row, full16.index(slot), k16_tiles, slot, META)
    mbarrier.wait(dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        _store_pair(of_dq, dq_place, len_q, first_row + consumer * _ROWS, dq_tiles, consumer, META)
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
    q_tiles, k_tiles, k16_tiles, dq_tiles, dout_tiles, v_tiles, factors = tiles
    q_full, full8, empty8, full16, empty16, dq_full = barriers
    first_row, window_left, window_right, scores, head, large, place = common
    len_q, len_kv, shift, b, h = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = k16_tiles[0].dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SIZE: gl.constexpr = META.STATISTICS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([_ROWS, QK0], gl.float32, layout=DQ)
    if QK1 > 0:
        DQ1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dq1 = gl.zeros([_ROWS, QK1], gl.float32, layout=DQ1)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=COLUMNS)
    pointers = statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    last_seen_by_all = len_kv  # blocks that end past it need the mask
    if META.HAS_RIGHT:
        last_seen_by_all = gl.minimum(len_kv, own_row + shift + window_right + 1)
    mbarrier.wait(q_full.index(0), 0)
    for turn in range(num_blocks):
        column, is_full = key_block(turn, found, META)
        columns = column + block_columns
        own = CONSUMER + opaque_zero(turn)
        slot = turn % META.STAGES
        mbarrier.wait(full8.index(slot), (turn // META.STAGES) & 1)
        qk = _score_product(q_tiles, own, k_tiles, slot, zeros, BLOCK_N, META)
        v = v_tiles.index(slot).reshape([BLOCK_N, V0])
        dp = warpgroup_mma(dout_tiles.index(own).reshape([_ROWS, V0]), v.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = _read_factor(factors, 2 * slot, COLUMNS)
        dp_factor = _read_factor(factors, 2 * slot + 1, COLUMNS)
        qk = warpgroup_mma_wait(1, deps=[qk])
        s, factor, cap_tanh, score = _logits(qk, rows[:, None], columns[None, :], place, scores, head, s_factor, MODS, META)
        is_cut = column + BLOCK_N > last_seen_by_all
        if META.HAS_LEFT:
            is_cut = is_cut | (column < own_row + _ROWS - 1 + shift - window_left)
        if is_cut | is_any_large(large, META):
            s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
            s = relative_to_lse(s, minus_lse[:, None], large, b, h, rows[:, None], len_q, META)
        s = mask_by_mod(s, rows[:, None], columns[None, :], is_full, place, captures, MODS, META)
        p = gl.exp2(s * factor + minus_lse[:, None])
        slot16 = turn % META.STAGES16
        mbarrier.wait(full16.index(slot16), (turn // META.STAGES16) & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(empty8.index(slot), count=1)
        dlogit = p * (dp * dp_factor + minus_delta[:, None])
        dscore = through_mods(dlogit, cap_tanh, score, rows[:, None], columns[None, :], head_group(place, scores, head), MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_k = warpgroup_mma(ds, k16_tiles[0].index(slot16).reshape([BLOCK_N, QK0]), dq, is_async=True)
        if QK1 > 0:
            sum_of_k1 = warpgroup_mma(ds, k16_tiles[1].index(slot16).reshape([BLOCK_N, QK1]), dq1, is_async=True)
            dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
        else:
            dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
        mbarrier.arrive(empty16.index(slot16), count=1)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # k in a half type was the other warpgroup's too; now it is no longer needed
    dq_tiles[0].index(CONSUMER).reshape([_ROWS, QK0]).store((dq * softmax_scale).to(DTYPE))
    if QK1 > 0:
        dq_tiles[1].index(CONSUMER).reshape([_ROWS, QK1]).store((dq1 * softmax_scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_fp8_hopper_kernel(
    q_descriptor,
    dout_descriptor,
    k_descriptor,
    k16_descriptor,
    v_descriptor,
    dq_descriptor,
    q1_descriptor,
    k1_descriptor,
    k16_1_descriptor,
    dq1_descriptor,
    statistics_ptr,
    tiles_of_statistics,
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
    step_k16s,
    step_k16h,
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
    STAGES: gl.constexpr = META.STAGES
    STAGES16: gl.constexpr = META.STAGES16
    of_q = (q_descriptor, q1_descriptor)
    of_k = (k_descriptor, k1_descriptor)
    of_k16 = (k16_descriptor, k16_1_descriptor)
    of_dq = (dq_descriptor, dq1_descriptor)
    q_tiles = _allocate_pair(2, of_q, META)
    k_tiles = _allocate_pair(STAGES, of_k, META)
    k16_tiles = _allocate_pair(STAGES16, of_k16, META)
    dq_tiles = k16_tiles
    if META.OWN_TILES:
        dq_tiles = _allocate_pair(2, of_dq, META)
    dout_tiles = gl.allocate_shared_memory(dout_descriptor.dtype, [2] + dout_descriptor.block_type.shape, dout_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [STAGES] + v_descriptor.block_type.shape, v_descriptor.layout)
    factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = (
        allocate_barriers(1, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES16, 1),
        allocate_barriers(STAGES16, 2),
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
    descriptors = (of_q, of_k, of_k16, of_dq, dout_descriptor, v_descriptor)
    tiles = (q_tiles, k_tiles, k16_tiles, dq_tiles, dout_tiles, v_tiles, factors)
    places = (
        first_row,
        len_q,
        len_kv,
        (start_q + b * step_qs, h + b * step_qh),
        (start_q + b * step_dos, h + b * step_doh),
        (start_kv + b * step_ks, h_kv + b * step_kh),
        (start_kv + b * step_k16s, h_kv + b * step_k16h),
        (start_kv + b * step_vs, h_kv + b * step_vh),
        (start_q + b * step_dqs, h + b * step_dqh),
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
    head = load_head(
        Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        Alibi(alibi_slopes_ptr, stride_alibi_b),
        b,
        h,
        META,
    )
    captures = captures_of_head(b, h, captures, MODS, META)
    scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, captures)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    common = (first_row, window_left, window_right, scores, head, large, (len_q, len_kv, shift, b, h))
    gl.warp_specialize(
        [
            (_dq_compute, (tiles, barriers, common, own_statistics, num_blocks, found, 0, MODS, META)),
            (_dq_compute, (tiles, barriers, common, own_statistics, num_blocks, found, 1, MODS, META)),
            (_dq_load, (descriptors, tiles, barriers, places, scales, num_blocks, found, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META: gl.constexpr):
    of_q, of_q16, of_k, of_dk, dout_descriptor, dout16_descriptor, v_descriptor, dv_descriptor, statistics_descriptor = descriptors
    q_tiles, q16_tiles, k_tiles, dk_tiles, dout_tiles, dout16_tiles, v_tiles, dv_tiles, statistics_tiles, factors = tiles
    full8, empty8, full16, empty16, q16_full, q16_empty, kv_full, dkdv_full = barriers
    first_row, len_q, len_kv, q_places, dout_places, k_place, v_place, dk_place, dv_place, statistics_place = places
    q_place, q16_place = q_places
    dout_place, dout16_place = dout_places
    first_tile, tiles_of_a_head = statistics_place
    scale_q, scale_k, scale_v, scale_dout, b, h, h_kv, softmax_scale = scales
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    Q_BYTES: gl.constexpr = of_q[0].block_type.nbytes + (of_q[1].block_type.nbytes if META.QK1 > 0 else 0)
    Q16_BYTES: gl.constexpr = of_q16[0].block_type.nbytes + (of_q16[1].block_type.nbytes if META.QK1 > 0 else 0)
    K_BYTES: gl.constexpr = of_k[0].block_type.nbytes + (of_k[1].block_type.nbytes if META.QK1 > 0 else 0)
    BYTES: gl.constexpr = Q_BYTES + dout_descriptor.block_type.nbytes + statistics_descriptor.block_type.nbytes
    full = kv_full.index(0)
    mbarrier.expect(full, PARTS * (K_BYTES + v_descriptor.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = first_row + part * _ROWS
        _load_pair(of_k, k_place, 0, len_kv, row, full, k_tiles, part, META)
        load_rows(v_descriptor, v_place[0], len_kv, row, v_place[1], 0, full, v_tiles.index(part))
    s_factor = _descale(scale_k, b, h_kv, first_row, len_kv)
    dp_factor = _descale(scale_v, b, h_kv, first_row, len_kv)
    if META.IS_PLAIN:
        s_factor *= softmax_scale * LOG2E
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        row = query_block(t, found, META)[0]
        descale_q = _descale(scale_q, b, h + head, row, len_q)
        descale_dout = _descale(scale_dout, b, h + head, row, len_q)
        slot = turn % META.STAGES
        full = full8.index(slot)
        mbarrier.wait(empty8.index(slot), ((turn // META.STAGES) & 1) ^ 1)
        _write_factors(factors, slot, s_factor * descale_q, dp_factor * descale_dout)
        mbarrier.expect(full, BYTES)
        _load_pair(of_q, q_place, head, len_q, row, full, q_tiles, slot, META)
        load_rows(dout_descriptor, dout_place[0], len_q, row, dout_place[1] + head, 0, full, dout_tiles.index(slot))
        of_head = first_tile + head * tiles_of_a_head
        load_statistics(statistics_descriptor, of_head, row, len_q, full, statistics_tiles.index(slot), META)
        slot = turn % META.STAGES16
        full = full16.index(slot)
        mbarrier.wait(empty16.index(slot), ((turn // META.STAGES16) & 1) ^ 1)
        mbarrier.expect(full, dout16_descriptor.block_type.nbytes + (0 if META.SPLITS_COLUMNS else Q16_BYTES))
        load_rows(dout16_descriptor, dout16_place[0], len_q, row, dout16_place[1] + head, 0, full, dout16_tiles.index(slot))
        if META.SPLITS_COLUMNS:
            slot = turn % META.STAGES_Q16
            full = q16_full.index(slot)
            mbarrier.wait(q16_empty.index(slot), ((turn // META.STAGES_Q16) & 1) ^ 1)
            mbarrier.expect(full, Q16_BYTES)
        _load_pair(of_q16, q16_place, head, len_q, row, full, q16_tiles, slot, META)
        t += 1
        if t == num_blocks:
            t = 0
            head += 1
    mbarrier.wait(dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = first_row + part * _ROWS
        _store_pair(of_dk, dk_place, len_kv, row, dk_tiles, part, META)
        store_rows(dv_descriptor, dv_place[0], len_kv, row, dv_place[1], 0, dv_tiles.index(part))
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
    q_tiles, q16_tiles, k_tiles, dk_tiles, dout_tiles, dout16_tiles, v_tiles, dv_tiles, statistics_tiles, factors = tiles
    full8, empty8, full16, empty16, _, _, kv_full, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = dout16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([_ROWS, QK0], gl.float32, layout=DK)
    dv = gl.zeros([_ROWS, V0], gl.float32, layout=DV)
    if QK1 > 0:
        DK1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dk1 = gl.zeros([_ROWS, QK1], gl.float32, layout=DK1)
    own_row = first_row + CONSUMER * _ROWS
    rows = own_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    mbarrier.wait(kv_full.index(0), 0)
    t, h = 0, first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    for turn in range(num_blocks * group_size):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        own = CONSUMER + opaque_zero(turn)
        slot = turn % META.STAGES
        mbarrier.wait(full8.index(slot), (turn // META.STAGES) & 1)
        kq = _score_product(k_tiles, own, q_tiles, slot, zeros, BLOCK_M, META)
        dout = dout_tiles.index(slot).reshape([BLOCK_M, V0])
        dp = warpgroup_mma(v_tiles.index(own).reshape([_ROWS, V0]), dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = _read_factor(factors, 2 * slot, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s, factor, cap_tanh, score = _logits(kq, columns[None, :], rows[:, None], place, own_scores, head, s_factor, MODS, META)
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < own_row + _ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                if META.IS_UNBOUNDED:
                    of_queries = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, own_scores[4], MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = statistics_tiles.index(slot).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), P)
        slot16 = turn % META.STAGES16
        mbarrier.wait(full16.index(slot16), (turn // META.STAGES16) & 1)
        sum_of_dout = warpgroup_mma(p16, dout16_tiles.index(slot16).reshape([BLOCK_M, V0]), dv, is_async=True)
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_factor = _read_factor(factors, 2 * slot + 1, COLUMNS)
        dp = warpgroup_mma_wait(1, deps=[dp])
        mbarrier.arrive(empty8.index(slot), count=1)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_q = warpgroup_mma(ds, q16_tiles[0].index(slot16).reshape([BLOCK_M, QK0]), dk, is_async=True)
        if QK1 > 0:
            sum_of_q1 = warpgroup_mma(ds, q16_tiles[1].index(slot16).reshape([BLOCK_M, QK1]), dk1, is_async=True)
            dv, dk, dk1, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, sum_of_q1, p16, ds])
        else:
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, p16, ds])
        mbarrier.arrive(empty16.index(slot16), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            head = head_of(bias, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in a half type was the other warpgroup's too; now it is no longer needed
    dk_tiles[0].index(CONSUMER).reshape([_ROWS, QK0]).store((dk * softmax_scale).to(DTYPE))
    if QK1 > 0:
        dk_tiles[1].index(CONSUMER).reshape([_ROWS, QK1]).store((dk1 * softmax_scale).to(DTYPE))
    dv_tiles.index(CONSUMER).reshape([_ROWS, V0]).store(dv.to(DTYPE))
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
    q_tiles, q16_tiles, k_tiles, dk_tiles, dout_tiles, dout16_tiles, v_tiles, dv_tiles, statistics_tiles, factors = tiles
    shared_p, shared_ds = exchanges
    full8, empty8, full16, empty16, q16_full, q16_empty, kv_full, dkdv_full = barriers
    first_row, window_left, window_right, scores, bias, large, place = common
    len_q, len_kv, shift, b, first_head = place
    softmax_scale, _, _, _, captures = scores
    DTYPE: gl.constexpr = dout16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HALF: gl.constexpr = META.BLOCK_M // 2
    DIM: gl.constexpr = META.QK0
    HALF_DIM: gl.constexpr = META.QK0 // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    FIRST: gl.constexpr = CONSUMER * HALF
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF_DIM
    zeros = gl.zeros([_ROWS, HALF], gl.float32, layout=SCORES)
    dk = gl.zeros([_ROWS, HALF_DIM], gl.float32, layout=DK)
    dv = gl.zeros([_ROWS, HALF_DIM], gl.float32, layout=DK)
    rows = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    mbarrier.wait(kv_full.index(0), 0)
    t, h = 0, first_head
    head = head_of(bias, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    for turn in range(num_blocks * group_size):
        row, is_full = query_block(t, found, META)
        columns = row + block_columns
        zero = opaque_zero(turn)
        slot = turn % META.STAGES
        mbarrier.wait(full8.index(slot), (turn // META.STAGES) & 1)
        own_q = q_tiles[0].index(slot).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(k_tiles[0].index(zero).reshape([_ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        own_dout = dout_tiles.index(slot).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(v_tiles.index(zero).reshape([_ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = statistics_tiles.index(slot).slice(FIRST, HALF).load(COLUMNS)
        s_factor = _read_factor(factors, 2 * slot, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = (len_q, len_kv, shift, b, h)
        own_scores = scores_of_head(scores, values, META)
        s, factor, cap_tanh, score = _logits(kq, columns[None, :], rows[:, None], place, own_scores, head, s_factor, MODS, META)
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < first_row + _ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > first_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                s = relative_to_lse(s, minus_lse[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, own_scores[4], MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse[None, :])
        buffer = (turn & 1) * 2  # two, so that one barrier a product is enough
        shared_p.index(buffer + CONSUMER).store(p.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(_P_WRITTEN, BOTH)
        minus_delta = statistics_tiles.index(slot).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp_factor = _read_factor(factors, 2 * slot + 1, COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(empty8.index(slot), count=1)
        slot = turn % META.STAGES16
        q16_slot = turn % META.STAGES_Q16
        mbarrier.wait(full16.index(slot), (turn // META.STAGES16) & 1)
        dout16 = dout16_tiles.index(slot).reshape([BLOCK_M, DIM])
        sum_of_dout = dv
        for half in gl.static_range(2):
            part = dout16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_dout = warpgroup_mma(shared_p.index(buffer + half), part, sum_of_dout, is_async=True)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(
            dlogit, cap_tanh, score, columns[None, :], rows[:, None], head_group(place, own_scores, head), MODS, META
        )
        shared_ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(_DS_WRITTEN, BOTH)
        mbarrier.wait(q16_full.index(q16_slot), (turn // META.STAGES_Q16) & 1)
        q16 = q16_tiles[0].index(q16_slot).reshape([BLOCK_M, DIM])
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(shared_ds.index(buffer + half), part, sum_of_q, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q])
        mbarrier.arrive(q16_empty.index(q16_slot), count=1)
        mbarrier.arrive(empty16.index(slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            head = head_of(bias, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in a half type was the other warpgroup's too; now it is no longer needed
    dk_tiles[0].index(0).reshape([_ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * softmax_scale).to(DTYPE))
    dv_tiles.index(0).reshape([_ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_fp8_hopper_kernel(
    q_descriptor,
    q16_descriptor,
    dout_descriptor,
    dout16_descriptor,
    k_descriptor,
    v_descriptor,
    dk_descriptor,
    dv_descriptor,
    q1_descriptor,
    q16_1_descriptor,
    k1_descriptor,
    dk1_descriptor,
    statistics_descriptor,
    tiles_of_statistics,
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
    step_q16s,
    step_q16h,
    step_dos,
    step_doh,
    step_do16s,
    step_do16h,
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
    STAGES: gl.constexpr = META.STAGES
    STAGES16: gl.constexpr = META.STAGES16
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    DTYPE: gl.constexpr = dout16_descriptor.dtype
    of_q = (q_descriptor, q1_descriptor)
    of_q16 = (q16_descriptor, q16_1_descriptor)
    of_k = (k_descriptor, k1_descriptor)
    of_dk = (dk_descriptor, dk1_descriptor)
    q_tiles = _allocate_pair(STAGES, of_q, META)
    q16_tiles = _allocate_pair(META.STAGES_Q16, of_q16, META)
    k_tiles = _allocate_pair(PARTS, of_k, META)
    DOUT: gl.constexpr = dout_descriptor.block_type.shape
    dout_tiles = gl.allocate_shared_memory(dout_descriptor.dtype, [STAGES] + DOUT, dout_descriptor.layout)
    dout16_tiles = gl.allocate_shared_memory(DTYPE, [STAGES16] + DOUT, dout16_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [PARTS] + v_descriptor.block_type.shape, v_descriptor.layout)
    dk_tiles = q16_tiles
    dv_tiles = dout16_tiles
    if META.OWN_TILES:
        dk_tiles = _allocate_pair(PARTS, of_dk, META)
        dv_tiles = gl.allocate_shared_memory(DTYPE, [PARTS] + dv_descriptor.block_type.shape, dv_descriptor.layout)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], statistics_descriptor.layout)
    factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full16 = allocate_barriers(STAGES16, 1)
    empty16 = allocate_barriers(STAGES16, 2)
    q16_full, q16_empty = full16, empty16
    if META.SPLITS_COLUMNS:
        q16_full = allocate_barriers(META.STAGES_Q16, 1)
        q16_empty = allocate_barriers(META.STAGES_Q16, 2)
    barriers = (
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        full16,
        empty16,
        q16_full,
        q16_empty,
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
        of_q,
        of_q16,
        of_k,
        of_dk,
        dout_descriptor,
        dout16_descriptor,
        v_descriptor,
        dv_descriptor,
        statistics_descriptor,
    )
    tiles = (
        q_tiles,
        q16_tiles,
        k_tiles,
        dk_tiles,
        dout_tiles,
        dout16_tiles,
        v_tiles,
        dv_tiles,
        statistics_tiles,
        factors,
    )
    places = (
        first_row,
        len_q,
        len_kv,
        ((start_q + b * step_qs, h + b * step_qh), (start_q + b * step_q16s, h + b * step_q16h)),
        ((start_q + b * step_dos, h + b * step_doh), (start_q + b * step_do16s, h + b * step_do16h)),
        (start_kv + b * step_ks, h_kv + b * step_kh),
        (start_kv + b * step_vs, h_kv + b * step_vh),
        (start_kv + b * step_dks, h_kv + b * step_dkh),
        (start_kv + b * step_dvs, h_kv + b * step_dvh),
        (first_tile, tiles_of_statistics),
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
                (_dkdv_load, (descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_compute, (tiles, barriers, common, group_size, num_blocks, found, 0, MODS, META)),
                (_dkdv_compute, (tiles, barriers, common, group_size, num_blocks, found, 1, MODS, META)),
                (_dkdv_load, (descriptors, tiles, barriers, places, scales, group_size, num_blocks, found, META)),
            ],
            [4, 1],
            [240, 24],
        )


def tile_of(problem: Problem) -> Fp8BackwardTile:
    """The narrowest row that serves the head dims, which are at most 256; of 64 keys where scores are more than a product."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    dim_qk, dim_v = x.q.shape[-1], x.v.shape[-1]
    return next(t for t in FP8_BACKWARD if dim_qk <= t.head_dim_qk and dim_v <= t.head_dim_v and t.block_n <= most)


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the kernels cannot run this problem's backward; None: they can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 256:
        return "its accumulators hold head dims up to 256"
    tile = tile_of(x)
    return unsupported_operands(x, out, dout) or backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def slower(problem: Problem) -> str | None:
    """Returns why the two kernels in a half type would be slower than others, which this was measured to be faster than
    (bench/results/fp8_kernels_h200.json), without what those need dequantised; None: they would not."""
    return backward_slower(problem)


def fp8_backward(
    problem: Problem,
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
    """`hopper_backward.hopper_backward` in FP8, for what is not `unsupported`; arguments as of
    `hopper_fp8_one_pass.fp8_one_pass_backward`.
    """
    x = problem
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v
    size = tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    statistics, tiles, large = tiled_statistics(x, out, lse, dout, dlse, dsoftmax_offset, size)
    scales = scales_of(x)
    q16, k16, dout16 = halves_of(x, dout, dq.dtype)
    score_meta = x.score_meta()

    def meta(stages: tuple[int, ...], rows: int, splits_columns: bool, **own: int) -> Fp8BackwardMeta:
        return Fp8BackwardMeta(
            IS_RAGGED_Q=x.q.dim() == 3,
            IS_RAGGED_KV=x.k.dim() == 3,
            HAS_LENGTHS=has_lengths,
            HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
            HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
            HAS_LEFT=x.window_left is not None,
            HAS_RIGHT=x.window_right is not None,
            **score_meta,
            IS_PLAIN=is_plain(score_meta),
            STATISTICS=size,
            QK0=qk0,
            QK1=qk1,
            V0=v0,
            STAGES=stages[0],
            STAGES16=stages[1],
            STAGES_Q16=stages[-1],
            OWN_TILES=rows != _ROWS.value or (min(stages[1:]) < 2 and not splits_columns),
            SPLITS_COLUMNS=splits_columns,
            **own,
        )

    def pairs(rows: int, *tensors: Tensor) -> tuple[list[TensorDescriptor], list[TensorDescriptor]]:
        """Descriptors of the first part of each head dim and of the second, if there is one."""
        first = [ragged_descriptor(t, rows, qk0) for t in tensors]
        return first, [ragged_descriptor(t, rows, qk1) for t in tensors] if qk1 else first

    lengths = (x.cu_seqlens_q, x.cu_seqlens_kv, x.cu_seqlens_q_padded, x.cu_seqlens_kv_padded)
    sizes = (x.q.shape[-3], x.k.shape[-3], x.longest_q, x.longest_kv, *x.window, int(x.bottom_right))
    descales = tuple(argument for scale in scales for argument in scale.arguments)

    for rows, side in ((_QUERIES, "q"), (tile.keys, "kv")):
        longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
        blocks = triton.cdiv(longest, rows)
        table = work_table(x, rows, side, by_sequence=True) if has_lengths else None
        # As in `hopper_backward`: k in both forms and v for dq, q and dout in both for dk and dv.
        again = x.longest_kv * (3 * (qk0 + qk1) + v0) if side == "q" else x.longest_q * 6 * (qk0 + qk1 + v0)
        section = section_of(x, heads, again)
        programs = (blocks * x.batch if table is None else table.shape[0] - 2) * heads
        call = (*lengths, float(x.softmax_scale), x.batch, x.num_heads, x.group_size, blocks, section, *sizes)
        inlined = (*x.score_arguments(), *x.list_arguments("kv" if side == "q" else "q"), x.mods)
        if side == "q":
            (of_q, of_dq), (of_q1, of_dq1) = pairs(64, x.q, dq)
            of_k, of_k1 = pairs(tile.block_n, x.k, k16)
            of_dout, of_v = ragged_descriptor(dout, 64, v0), ragged_descriptor(x.v, tile.block_n, v0)
            own = (of_q, of_dout, *of_k, of_v, of_dq, of_q1, *of_k1, of_dq1, statistics)
            kind = meta(tile.dq_stages, tile.block_n, False, BLOCK_M=_QUERIES, BLOCK_N=tile.block_n)
            steps = batch_steps_of(x.q, dout, x.k, k16, x.v, dq)
            arguments = (*own, tiles, *large[1:], table, *descales, *call, *steps, *inlined, kind)
            launch(_attn_bwd_dq_fp8_hopper_kernel, programs, x.device, Tile(_QUERIES, tile.block_n, 4, 2), arguments)
            gradients = (dq,)
        else:
            of_q, of_q1 = pairs(size, x.q, q16)
            (of_k, of_dk), of_k1 = pairs(64, x.k, dk)
            of_dout = [ragged_descriptor(t, size, v0) for t in (dout, dout16)]
            of_v, of_dv = (ragged_descriptor(t, 64, v0) for t in (x.v, dv))
            flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
            of_statistics = TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat)
            own = (*of_q, *of_dout, of_k, of_v, of_dk, of_dv, *of_q1, *of_k1, of_statistics)
            kind = meta(tile.dkdv_stages, size, tile.splits_columns, BLOCK_M=size, BLOCK_N=tile.keys)
            steps = batch_steps_of(x.q, q16, dout, dout16, x.k, x.v, dk, dv)
            arguments = (*own, tiles, *large[1:], table, *descales, *call, *steps, *inlined, kind)
            launch(_attn_bwd_dkdv_fp8_hopper_kernel, programs, x.device, Tile(size, tile.keys, 4, 2), arguments)
            gradients = (dk, dv)
        if has_lengths:
            for gradient in gradients:
                zero_padding(x, gradient, side)
