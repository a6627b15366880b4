"""Backward attention on Hopper (sm_90) in Gluon: one kernel for dq, one for dk and dv, each bitwise repeatable, as `backward` is.

`backward_fused` is faster, but its dq does not repeat to the bit. In both a warp loads by TMA and two warpgroups compute, 64 rows
of the gradient each (of dk and dv at head dim 256: half of the columns of 64 rows each). What
`conditions.backward_unsupported` names runs on the portable kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Head, Lengths, Scores
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    behind,
    head_of,
    head_values,
    is_any_large,
    load_head,
    logits,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HopperBackwardTile, split_head_dim
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.backward_blocks import (
    BackwardWork,
    Block,
    LargeLse,
    key_block_of_program,
    query_block_of_program,
)
from flexattn.kernels_triton.hopper.barriers import BOTH, DS_WRITTEN, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import key_block, query_block
from flexattn.kernels_triton.hopper.conditions import QUERIES, backward_tile
from flexattn.kernels_triton.hopper.descriptors import Step, load_rows, load_statistics, ragged_descriptor, step_of, store_rows
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.hopper.masking import apply_mask_mod, hide_queries_past_the_end, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles, opaque_zero
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers, release, wait_empty, wait_full
from flexattn.kernels_triton.hopper.scores import head_from
from flexattn.kernels_triton.hopper.tile_scheduler import section_of
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


class DqTensors(NamedTuple):
    """The descriptors of the tensors; those of a second part of the head dim, where there is none, are the first's again."""

    q: Any
    dout: Any
    k: Any
    v: Any
    dq: Any
    q1: Any
    k1: Any
    dq1: Any


class DkdvTensors(NamedTuple):
    """The same for dk and dv."""

    q: Any
    dout: Any
    k: Any
    v: Any
    statistics: Any
    dk: Any
    dv: Any
    q1: Any
    k1: Any
    dk1: Any


class DqSteps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    v: Step
    dq: Step


class DkdvSteps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    v: Step
    dk: Step
    dv: Step


class DqArguments(NamedTuple):
    descriptors: DqTensors
    statistics_ptr: Any
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: BackwardWork
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DqSteps
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # of key blocks


class DkdvArguments(NamedTuple):
    descriptors: DkdvTensors
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: BackwardWork
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DkdvSteps
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # of query blocks


class DqTiles(NamedTuple):
    """In shared memory: q and dout by consumer, k and v by stage."""

    q: Any
    dout: Any
    k: Any
    v: Any
    q1: Any
    k1: Any


class DqBarriers(NamedTuple):
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    dq_full: Any


class DqRows(NamedTuple):
    """What is read of the head of a block of queries, and where the statistics of its sequence begin."""

    head: Head
    statistics_ptr: Any


class DkdvTiles(NamedTuple):
    """In shared memory: k and v by consumer, q, dout and statistics by stage."""

    q: Any
    dout: Any
    k: Any
    v: Any
    statistics: Any
    q1: Any
    k1: Any


class DkdvBarriers(NamedTuple):
    q_full: Any
    q_empty: Any
    dout_full: Any
    dout_empty: Any
    kv_full: Any
    dkdv_full: Any


class Exchanges(NamedTuple):
    """In shared memory, of the last two iterations, what one warpgroup computes for both."""

    p: Any
    ds: Any


@gluon.jit
def _dq_load(args: DqArguments, tiles: DqTiles, barriers: DqBarriers, block: Block, META: gl.constexpr):
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    QK0: gl.constexpr = META.QK0
    q_token, q_head = sequence.start_q + b * steps.q.tokens, h + b * steps.q.heads
    dout_token, dout_head = sequence.start_q + b * steps.dout.tokens, h + b * steps.dout.heads
    k_token, k_head = sequence.start_kv + b * steps.k.tokens, h_kv + b * steps.k.heads
    v_token, v_head = sequence.start_kv + b * steps.v.tokens, h_kv + b * steps.v.heads
    dq_token, dq_head = sequence.start_q + b * steps.dq.tokens, h + b * steps.dq.heads
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.q_full.index(0)
    Q_BYTES: gl.constexpr = descriptors.q.block_type.nbytes + (descriptors.q1.block_type.nbytes if META.QK1 > 0 else 0)
    K_BYTES: gl.constexpr = descriptors.k.block_type.nbytes + (descriptors.k1.block_type.nbytes if META.QK1 > 0 else 0)
    mbarrier.expect(full, 2 * (Q_BYTES + descriptors.dout.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = block.first_row + consumer * ROWS
        load_rows(descriptors.q, q_token, len_q, row, q_head, 0, full, tiles.q.index(consumer))
        if META.QK1 > 0:
            load_rows(descriptors.q1, q_token, len_q, row, q_head, QK0, full, tiles.q1.index(consumer))
        load_rows(descriptors.dout, dout_token, len_q, row, dout_head, 0, full, tiles.dout.index(consumer))
    for n_block in range(block.num_blocks):
        row = key_block(n_block, block.block_range, META)[0]
        stage = n_block % META.STAGES0
        full = barriers.k_full.index(stage)
        wait_empty(barriers.k_empty, n_block, META.STAGES0)
        mbarrier.expect(full, K_BYTES)
        load_rows(descriptors.k, k_token, len_kv, row, k_head, 0, full, tiles.k.index(stage))
        if META.QK1 > 0:
            load_rows(descriptors.k1, k_token, len_kv, row, k_head, QK0, full, tiles.k1.index(stage))
        stage = n_block % META.STAGES1
        wait_empty(barriers.v_empty, n_block, META.STAGES1)
        mbarrier.expect(barriers.v_full.index(stage), descriptors.v.block_type.nbytes)
        load_rows(descriptors.v, v_token, len_kv, row, v_head, 0, barriers.v_full.index(stage), tiles.v.index(stage))
    mbarrier.wait(barriers.dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        row = block.first_row + consumer * ROWS
        store_rows(descriptors.dq, dq_token, len_q, row, dq_head, 0, tiles.q.index(consumer))
        if META.QK1 > 0:
            store_rows(descriptors.dq1, dq_token, len_q, row, dq_head, QK0, tiles.q1.index(consumer))
    tma.store_wait(0)


@gluon.constexpr_function
def loops_of(META):
    """Returns 2 where a kernel has a loop for calls with a large lse and one for all others, of which one runs, else 1.

    Without a band the second has no branch but for the last block: one on `large` would cost 8 % of the backward at head dim 64.
    """
    return 2 if META.IS_UNBOUNDED and not (META.HAS_LEFT or META.HAS_RIGHT) else 1


@gluon.jit
def _dq_compute(
    args: DqArguments,
    tiles: DqTiles,
    barriers: DqBarriers,
    block: Block,
    own: DqRows,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    sequence, b, h = block.sequence, block.b, block.h
    len_q, len_kv = sequence.len_q, sequence.len_kv
    window_left, window_right = args.band.left, args.band.right
    shift, large = block.shift, block.large
    softmax_scale = args.scores.scale
    DTYPE: gl.constexpr = tiles.k.dtype
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
    m_start = block.first_row + CONSUMER * ROWS
    rows = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    pointers = own.statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    last_seen_by_all = len_kv  # blocks that end past it need the mask
    if META.HAS_RIGHT:
        last_seen_by_all = gl.minimum(len_kv, m_start + shift + window_right + 1)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.q_full.index(0), 0)
    LOOPS: gl.constexpr = loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for n_block in range(iterations):
            column, is_full = key_block(n_block, block.block_range, META)
            columns = column + block_columns
            consumer = CONSUMER + opaque_zero(n_block)
            k_stage = n_block % META.STAGES0
            v_stage = n_block % META.STAGES1
            k0 = tiles.k.index(k_stage).reshape([BLOCK_N, QK0])
            wait_full(barriers.k_full, n_block, META.STAGES0)
            qk = warpgroup_mma(
                tiles.q.index(consumer).reshape([ROWS, QK0]), k0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            if QK1 > 0:
                k1 = tiles.k1.index(k_stage).reshape([BLOCK_N, QK1])
                qk = warpgroup_mma(tiles.q1.index(consumer).reshape([ROWS, QK1]), k1.permute([1, 0]), qk, is_async=True)
            wait_full(barriers.v_full, n_block, META.STAGES1)
            v0 = tiles.v.index(v_stage).reshape([BLOCK_N, V0])
            dp = warpgroup_mma(
                tiles.dout.index(consumer).reshape([ROWS, V0]), v0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            drawn = drawn_weights(draws, h, m_start, column, BLOCK_N, False, META)
            qk = warpgroup_mma_wait(1, deps=[qk])
            i, j = rows[:, None], columns[None, :]
            s, factor, cap_tanh, score = logits(qk, i, j, softmax_scale, own.head, MODS, META)
            is_cut = column + BLOCK_N > last_seen_by_all
            if META.HAS_LEFT:
                is_cut = is_cut | (column < m_start + ROWS - 1 + shift - window_left)
            if LOOPS == 1:
                is_cut = is_cut | is_any_large(large, META)
            if is_cut:
                s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
                if LOOPS == 1:
                    s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
            if IS_LARGE == 1:
                s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
            s = apply_mask_mod(s, i, j, is_full, own.head, MODS, META)
            p = gl.exp2(s * factor + minus_lse[:, None])
            dp = warpgroup_mma_wait(0, deps=[dp])
            release(barriers.v_empty, n_block, META.STAGES1)
            dlogit = p * (kept_gradient(dp, drawn, draws, False, META) + minus_delta[:, None])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, own.head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            sum_of_k = warpgroup_mma(ds, k0, dq, is_async=True)
            if QK1 > 0:
                sum_of_k1 = warpgroup_mma(ds, k1, dq1, is_async=True)
                dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
            else:
                dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
            release(barriers.k_empty, n_block, META.STAGES0)
    tiles.q.index(CONSUMER).reshape([ROWS, QK0]).store((dq * softmax_scale).to(DTYPE))  # q is no longer needed
    if QK1 > 0:
        tiles.q1.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * softmax_scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    q_tiles = allocate_tiles(2, descriptors.q)
    dout_tiles = allocate_tiles(2, descriptors.dout)
    k_tiles = allocate_tiles(STAGES0, descriptors.k)
    v_tiles = allocate_tiles(STAGES1, descriptors.v)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = allocate_tiles(2, descriptors.q1)
        k1_tiles = allocate_tiles(STAGES0, descriptors.k1)
    tiles = DqTiles(q=q_tiles, dout=dout_tiles, k=k_tiles, v=v_tiles, q1=q1_tiles, k1=k1_tiles)
    barriers = DqBarriers(
        q_full=allocate_barriers(1, 1),
        k_full=allocate_barriers(STAGES0, 1),
        k_empty=allocate_barriers(STAGES0, 2),
        v_full=allocate_barriers(STAGES1, 1),
        v_empty=allocate_barriers(STAGES1, 2),
        dq_full=allocate_barriers(1, 2),
    )
    block = query_block_of_program(args, META)
    sequence = block.sequence
    rows = DqRows(
        head=head_of(args.scores, block.b, block.h, sequence.len_q, sequence.len_kv, block.shift, MODS, META),
        statistics_ptr=args.statistics_ptr + block.first_statistics.to(gl.int64) * (2 * META.STATISTICS),
    )
    gl.warp_specialize(
        [
            (_dq_compute, (args, tiles, barriers, block, rows, 0, MODS, META)),
            (_dq_compute, (args, tiles, barriers, block, rows, 1, MODS, META)),
            (_dq_load, (args, tiles, barriers, block, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(args: DkdvArguments, tiles: DkdvTiles, barriers: DkdvBarriers, block: Block, META: gl.constexpr):
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    QK0: gl.constexpr = META.QK0
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    q_token, q_head = sequence.start_q + b * steps.q.tokens, h + b * steps.q.heads
    dout_token, dout_head = sequence.start_q + b * steps.dout.tokens, h + b * steps.dout.heads
    k_token, k_head = sequence.start_kv + b * steps.k.tokens, h_kv + b * steps.k.heads
    v_token, v_head = sequence.start_kv + b * steps.v.tokens, h_kv + b * steps.v.heads
    dk_token, dk_head = sequence.start_kv + b * steps.dk.tokens, h_kv + b * steps.dk.heads
    dv_token, dv_head = sequence.start_kv + b * steps.dv.tokens, h_kv + b * steps.dv.heads
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.kv_full.index(0)
    K_BYTES: gl.constexpr = descriptors.k.block_type.nbytes + (descriptors.k1.block_type.nbytes if META.QK1 > 0 else 0)
    mbarrier.expect(full, PARTS * (K_BYTES + descriptors.v.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = block.first_row + part * ROWS
        load_rows(descriptors.k, k_token, len_kv, row, k_head, 0, full, tiles.k.index(part))
        if META.QK1 > 0:
            load_rows(descriptors.k1, k_token, len_kv, row, k_head, QK0, full, tiles.k1.index(part))
        load_rows(descriptors.v, v_token, len_kv, row, v_head, 0, full, tiles.v.index(part))
    Q_BYTES: gl.constexpr = descriptors.q.block_type.nbytes + (descriptors.q1.block_type.nbytes if META.QK1 > 0 else 0)
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = m_block % META.STAGES0
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, m_block, META.STAGES0)
        mbarrier.expect(full, Q_BYTES + descriptors.statistics.block_type.nbytes)
        load_rows(descriptors.q, q_token, len_q, row, q_head + head, 0, full, tiles.q.index(stage))
        if META.QK1 > 0:
            load_rows(descriptors.q1, q_token, len_q, row, q_head + head, QK0, full, tiles.q1.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        stage = m_block % META.STAGES1
        full = barriers.dout_full.index(stage)
        wait_empty(barriers.dout_empty, m_block, META.STAGES1)
        mbarrier.expect(full, descriptors.dout.block_type.nbytes)
        load_rows(descriptors.dout, dout_token, len_q, row, dout_head + head, 0, full, tiles.dout.index(stage))
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = block.first_row + part * ROWS
        store_rows(descriptors.dk, dk_token, len_kv, row, dk_head, 0, tiles.k.index(part))
        if META.QK1 > 0:
            store_rows(descriptors.dk1, dk_token, len_kv, row, dk_head, QK0, tiles.k1.index(part))
        store_rows(descriptors.dv, dv_token, len_kv, row, dv_head, 0, tiles.v.index(part))
    tma.store_wait(0)


@gluon.jit
def _dkdv_compute(
    args: DkdvArguments,
    tiles: DkdvTiles,
    barriers: DkdvBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    sequence, b, first_head = block.sequence, block.b, block.h
    len_q = sequence.len_q
    window_left, window_right = args.band.left, args.band.right
    shift, large = block.shift, block.large
    softmax_scale, captures = args.scores.scale, args.scores.captures
    group_size = args.work.group_size
    DTYPE: gl.constexpr = tiles.k.dtype
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
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    n, h = 0, first_head
    bias_ptr, alibi_slope = load_head(args.scores.bias, args.scores.alibi, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    LOOPS: gl.constexpr = loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks * group_size  # of all query heads
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for m_block in range(iterations):
            row, is_full = query_block(n, block.block_range, META)
            columns = row + block_columns
            own = CONSUMER + opaque_zero(m_block)
            q_stage = m_block % META.STAGES0
            dout_stage = m_block % META.STAGES1
            q0 = tiles.q.index(q_stage).reshape([BLOCK_M, QK0])
            dout0 = tiles.dout.index(dout_stage).reshape([BLOCK_M, V0])
            wait_full(barriers.q_full, m_block, META.STAGES0)
            kq = warpgroup_mma(tiles.k.index(own).reshape([ROWS, QK0]), q0.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if QK1 > 0:
                q1 = tiles.q1.index(q_stage).reshape([BLOCK_M, QK1])
                kq = warpgroup_mma(tiles.k1.index(own).reshape([ROWS, QK1]), q1.permute([1, 0]), kq, is_async=True)
            wait_full(barriers.dout_full, m_block, META.STAGES1)
            dp = warpgroup_mma(tiles.v.index(own).reshape([ROWS, V0]), dout0.permute([1, 0]), zeros, use_acc=False, is_async=True)
            drawn = drawn_weights(draws, h, row, n_start, BLOCK_M, True, META)
            kq = warpgroup_mma_wait(1, deps=[kq])
            i, j = columns[None, :], rows[:, None]
            head = head_from(args.scores, b, h, sequence, shift, bias_ptr, alibi_slope, behind(captures, values, META))
            s, factor, cap_tanh, score = logits(kq, i, j, softmax_scale, head, MODS, META)
            if LOOPS == 2:
                if IS_LARGE == 1:
                    of_queries = tiles.statistics.index(q_stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, h, i, len_q, META)
            elif META.HAS_LEFT or META.HAS_RIGHT:
                is_cut = is_any_large(large, META)
                if META.HAS_RIGHT:
                    is_cut = is_cut | (row < n_start + ROWS - 1 - shift - window_right)
                if META.HAS_LEFT:
                    is_cut = is_cut | (row + BLOCK_M > n_start - shift + window_left + 1)
                if is_cut:
                    s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                    if META.IS_UNBOUNDED:
                        of_queries = tiles.statistics.index(q_stage).slice(0, BLOCK_M).load(COLUMNS)
                        s = relative_to_lse(s, of_queries[None, :], large, b, h, i, len_q, META)
            s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
            s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
            minus_lse = tiles.statistics.index(q_stage).slice(0, BLOCK_M).load(COLUMNS)
            p = gl.exp2(s * factor + minus_lse[None, :])
            minus_delta = tiles.statistics.index(q_stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
            dp = warpgroup_mma_wait(0, deps=[dp])
            dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), P)
            sum_of_dout = warpgroup_mma(p16, dout0, dv, is_async=True)
            sum_of_q = warpgroup_mma(ds, q0, dk, is_async=True)
            if QK1 > 0:
                sum_of_q1 = warpgroup_mma(ds, q1, dk1, is_async=True)
                dv, p16 = warpgroup_mma_wait(2, deps=[sum_of_dout, p16])
                release(barriers.dout_empty, m_block, META.STAGES1)
                dk, dk1, ds = warpgroup_mma_wait(0, deps=[sum_of_q, sum_of_q1, ds])
            else:
                dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
                release(barriers.dout_empty, m_block, META.STAGES1)
                dk, ds = warpgroup_mma_wait(0, deps=[sum_of_q, ds])
            release(barriers.q_empty, m_block, META.STAGES0)
            n += 1
            if n == block.num_blocks:
                n = 0
                h += 1
                next_h = gl.minimum(h, first_head + group_size - 1)
                bias_ptr, alibi_slope = load_head(args.scores.bias, args.scores.alibi, b, next_h, META)
                values = head_values(b, next_h, captures, MODS, META)
    tiles.k.index(CONSUMER).reshape([ROWS, QK0]).store((dk * softmax_scale).to(DTYPE))  # k and v are no longer needed
    if QK1 > 0:
        tiles.k1.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * softmax_scale).to(DTYPE))
    tiles.v.index(CONSUMER).reshape([ROWS, V0]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def _dkdv_compute_columns(
    args: DkdvArguments,
    tiles: DkdvTiles,
    exchanges: Exchanges,
    barriers: DkdvBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    sequence, b, first_head = block.sequence, block.b, block.h
    len_q = sequence.len_q
    window_left, window_right = args.band.left, args.band.right
    shift, large = block.shift, block.large
    softmax_scale, captures = args.scores.scale, args.scores.captures
    group_size = args.work.group_size
    DTYPE: gl.constexpr = tiles.k.dtype
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
    rows = block.first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    n, h = 0, first_head
    bias_ptr, alibi_slope = load_head(args.scores.bias, args.scores.alibi, b, h, META)
    values = head_values(b, h, captures, MODS, META)
    for m_block in range(block.num_blocks * group_size):  # of all query heads
        row, is_full = query_block(n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        q_stage = m_block % META.STAGES0
        dout_stage = m_block % META.STAGES1
        q0 = tiles.q.index(q_stage).reshape([BLOCK_M, DIM])
        dout0 = tiles.dout.index(dout_stage).reshape([BLOCK_M, DIM])
        wait_full(barriers.q_full, m_block, META.STAGES0)
        own_q = q0.slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(tiles.k.index(zero).reshape([ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        wait_full(barriers.dout_full, m_block, META.STAGES1)
        own_dout = dout0.slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(tiles.v.index(zero).reshape([ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = tiles.statistics.index(q_stage).slice(FIRST, HALF).load(COLUMNS)
        drawn = drawn_weights(draws, h, row + FIRST, block.first_row, HALF, True, META)
        kq = warpgroup_mma_wait(1, deps=[kq])
        i, j = columns[None, :], rows[:, None]
        head = head_from(args.scores, b, h, sequence, shift, bias_ptr, alibi_slope, behind(captures, values, META))
        s, factor, cap_tanh, score = logits(kq, i, j, softmax_scale, head, MODS, META)
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < block.first_row + ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > block.first_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                s = relative_to_lse(s, minus_lse[None, :], large, b, h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse[None, :])
        buffer = (m_block & 1) * 2  # two, so that one barrier a product is enough
        exchanges.p.index(buffer + CONSUMER).store(kept(p, drawn, True, META).to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = tiles.statistics.index(q_stage).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        sum_of_dout = dv
        for half in gl.static_range(2):
            part = dout0.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_dout = warpgroup_mma(exchanges.p.index(buffer + half), part, sum_of_dout, is_async=True)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        exchanges.ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(DS_WRITTEN, BOTH)
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q0.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(exchanges.ds.index(buffer + half), part, sum_of_q, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[sum_of_dout])
        release(barriers.dout_empty, m_block, META.STAGES1)
        dk = warpgroup_mma_wait(0, deps=[sum_of_q])
        release(barriers.q_empty, m_block, META.STAGES0)
        n += 1
        if n == block.num_blocks:
            n = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            bias_ptr, alibi_slope = load_head(args.scores.bias, args.scores.alibi, b, next_h, META)
            values = head_values(b, next_h, captures, MODS, META)
    tiles.k.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * softmax_scale).to(DTYPE))
    tiles.v.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.q.dtype
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    q_tiles = allocate_tiles(STAGES0, descriptors.q)
    dout_tiles = allocate_tiles(STAGES1, descriptors.dout)
    k_tiles = allocate_tiles(PARTS, descriptors.k)
    v_tiles = allocate_tiles(PARTS, descriptors.v)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES0, 2 * BLOCK_M], descriptors.statistics.layout)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = allocate_tiles(STAGES0, descriptors.q1)
        k1_tiles = allocate_tiles(2, descriptors.k1)
    tiles = DkdvTiles(q=q_tiles, dout=dout_tiles, k=k_tiles, v=v_tiles, statistics=statistics_tiles, q1=q1_tiles, k1=k1_tiles)
    barriers = DkdvBarriers(
        q_full=allocate_barriers(STAGES0, 1),
        q_empty=allocate_barriers(STAGES0, 2),
        dout_full=allocate_barriers(STAGES1, 1),
        dout_empty=allocate_barriers(STAGES1, 2),
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    block = key_block_of_program(args, META)
    if META.SPLITS_COLUMNS:
        HALF: gl.constexpr = META.BLOCK_M // 2
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], DTYPE)
        shared_p = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        shared_ds = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        exchanges = Exchanges(p=shared_p, ds=shared_ds)
        gl.warp_specialize(
            [
                (_dkdv_compute_columns, (args, tiles, exchanges, barriers, block, 0, MODS, META)),
                (_dkdv_compute_columns, (args, tiles, exchanges, barriers, block, 1, MODS, META)),
                (_dkdv_load, (args, tiles, barriers, block, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_compute, (args, tiles, barriers, block, 0, MODS, META)),
                (_dkdv_compute, (args, tiles, barriers, block, 1, MODS, META)),
                (_dkdv_load, (args, tiles, barriers, block, META)),
            ],
            [4, 1],
            [240, 24],
        )


def hopper_backward(call: Backward, tile: HopperBackwardTile | None = None) -> None:
    """dq, dk, dv and dsoftmax_offset of `backward.attention_backward`, where `backward_unsupported` has nothing against it.

    dq, dk and dv are contiguous. A bias and captures get their gradients by `score_gradients.bias_and_capture_gradients`.
    """
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    tile = tile or backward_tile(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v
    size = tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    statistics, tiles, large = tiled_statistics(call, size)

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

    for rows, side in ((QUERIES, "q"), (tile.keys, "kv")):
        longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
        blocks = triton.cdiv(longest, rows)
        table = work_table(x, rows, side, by_sequence=True) if has_lengths else None
        # What is read again and again of a head: k and v for dq, q and dout for dk and dv (as room for half as many heads).
        again = x.longest_kv * 2 if side == "q" else x.longest_q * 4
        section = section_of(x, heads, again * (qk0 + qk1 + v0))
        programs = (blocks * x.batch if table is None else table.shape[0] - 2) * heads
        work = BackwardWork(
            table_ptr=table, num_heads=x.num_heads, group_size=x.group_size, blocks=blocks, heads_per_section=section
        )
        shared = {
            "tiles_of_statistics": tiles,
            "large": LargeLse(is_any_ptr=large.is_any, lse_ptr=large.lse),
            "work": work,
            "lengths_q": x.lengths_q,
            "lengths_kv": x.lengths_kv,
            "band": x.band,
            "scores": x.scores,
            "dropout": x.dropout,
            "lists": x.lists("kv" if side == "q" else "q"),
        }
        if side == "q":
            q, dout_rows, dq_rows = (ragged_descriptor(t, 64, width) for t, width in ((x.q, qk0), (dout, v0), (dq, qk0)))
            k, v = (ragged_descriptor(t, tile.block_n, width) for t, width in ((x.k, qk0), (x.v, v0)))
            q1, k1, dq1 = q, k, q
            if qk1:
                q1, k1, dq1 = (ragged_descriptor(t, n, qk1) for t, n in ((x.q, 64), (x.k, tile.block_n), (dq, 64)))
            kind = meta(BLOCK_M=QUERIES, BLOCK_N=tile.block_n, STAGES0=2, STAGES1=tile.v_stages, SPLITS_COLUMNS=False)
            arguments = DqArguments(
                descriptors=DqTensors(q=q, dout=dout_rows, k=k, v=v, dq=dq_rows, q1=q1, k1=k1, dq1=dq1),
                steps=DqSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dq=step_of(dq)),
                statistics_ptr=statistics,
                **shared,
            )
            launch(_attn_bwd_dq_hopper_kernel, programs, x.device, Tile(QUERIES, tile.block_n, 4, 2), (arguments, x.mods, kind))
            gradients = (dq,)
        else:
            q, dout_rows = (ragged_descriptor(t, tile.block_m, width) for t, width in ((x.q, qk0), (dout, v0)))
            of_keys = ((x.k, qk0), (x.v, v0), (dk, qk0), (dv, v0))
            k, v, dk_rows, dv_rows = (ragged_descriptor(t, 64, width) for t, width in of_keys)
            flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
            q1, k1, dk1 = q, k, q
            if qk1:
                q1, k1, dk1 = (ragged_descriptor(t, n, qk1) for t, n in ((x.q, tile.block_m), (x.k, 64), (dk, 64)))
            kind = meta(BLOCK_M=tile.block_m, BLOCK_N=tile.keys, STAGES0=2, STAGES1=2, SPLITS_COLUMNS=tile.splits_columns)
            arguments = DkdvArguments(
                descriptors=DkdvTensors(
                    q=q,
                    dout=dout_rows,
                    k=k,
                    v=v,
                    statistics=TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat),
                    dk=dk_rows,
                    dv=dv_rows,
                    q1=q1,
                    k1=k1,
                    dk1=dk1,
                ),
                steps=DkdvSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dk=step_of(dk), dv=step_of(dv)),
                **shared,
            )
            launch(
                _attn_bwd_dkdv_hopper_kernel,
                programs,
                x.device,
                Tile(tile.block_m, tile.keys, 4, 2),
                (arguments, x.mods, kind),
            )
            gradients = (dk, dv)
        if has_lengths:
            for gradient in gradients:
                zero_padding(x, gradient, side)
