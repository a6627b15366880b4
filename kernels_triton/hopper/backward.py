"""Backward attention on Hopper (sm_90) in Gluon: one kernel for dq, one for dk and dv, each bitwise repeatable, as `backward` is.

`backward_fused` is faster, but its dq does not repeat to the bit. In both a warp loads by TMA and two warpgroups compute, 64 rows
of the gradient each (of dk and dv at head dim 256: half of the columns of 64 rows each). What
`conditions.backward_unsupported` names runs on the portable kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Head, Lengths, Scores
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.primitives import head_of, is_any_large, logits, relative_to_lse, through_mods
from flexattn.kernels_triton.common.problem import Backward, with_features
from flexattn.kernels_triton.common.tiles import HopperBackwardTile, split_head_dim
from flexattn.kernels_triton.common.work_table import zero_padding
from flexattn.kernels_triton.hopper.backward_blocks import (
    Block,
    LargeLse,
    backward_work,
    first_query_head,
    head_at,
    hides_some_key,
    hides_some_query,
    key_block_of_program,
    last_key_seen_by_all,
    load_query_statistics,
    next_query_block,
    query_block_of_program,
    statistics_of_block,
)
from flexattn.kernels_triton.hopper.barriers import BOTH, DS_WRITTEN, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import key_block, query_block
from flexattn.kernels_triton.hopper.conditions import QUERIES, backward_tile
from flexattn.kernels_triton.hopper.descriptors import (
    Step,
    load_rows,
    load_statistics,
    ragged_descriptor,
    statistics_descriptor,
    step_of,
    store_rows,
)
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.hopper.masking import apply_mask_mod, hide_queries_past_the_end, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles, opaque_zero
from flexattn.kernels_triton.hopper.pairs import (
    Pair,
    allocate_pair,
    load_pair,
    origin_of,
    origin_of_head,
    pair_bytes,
    pair_descriptor,
    score_product,
    store_pair,
)
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers, release, wait_empty, wait_full
from flexattn.kernels_triton.hopper.tile_scheduler import Work
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


@with_features
class BackwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES0: int  # in shared memory: of k and of v for dq, of q and of dout for dk and dv
    STAGES1: int
    SPLITS_COLUMNS: bool  # of dk and dv between the warpgroups, rather than rows


class DqDescriptors(NamedTuple):
    q: Pair
    dout: Any
    k: Pair
    v: Any
    dq: Pair


class DkdvDescriptors(NamedTuple):
    q: Pair
    dout: Any
    k: Pair
    v: Any
    statistics: Any
    dk: Pair
    dv: Any


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
    descriptors: DqDescriptors
    statistics_ptr: Any
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DqSteps
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # of key blocks


class DkdvArguments(NamedTuple):
    descriptors: DkdvDescriptors
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DkdvSteps
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # of query blocks


class DqTiles(NamedTuple):
    """In shared memory: q and dout by consumer, k and v by stage."""

    q: Pair
    dout: Any
    k: Pair
    v: Any


class DqBarriers(NamedTuple):
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    dq_full: Any


class DqRows(NamedTuple):
    """The head of a block of queries, and where the statistics of its sequence begin."""

    head: Head
    statistics_ptr: Any


class DkdvTiles(NamedTuple):
    """In shared memory: k and v by consumer, q, dout and statistics by stage."""

    q: Pair
    dout: Any
    k: Pair
    v: Any
    statistics: Any


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
    of, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    dq = origin_of(steps.dq, sequence.start_q, h, b)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.q_full.index(0)
    Q_BYTES: gl.constexpr = pair_bytes(of.q.first.block_type.nbytes, of.q.second.block_type.nbytes, META.QK1)
    K_BYTES: gl.constexpr = pair_bytes(of.k.first.block_type.nbytes, of.k.second.block_type.nbytes, META.QK1)
    mbarrier.expect(full, 2 * (Q_BYTES + of.dout.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = block.first_row + consumer * ROWS
        load_pair(of.q, q, len_q, row, full, tiles.q, consumer, META)
        load_rows(of.dout, dout.token, len_q, row, dout.head, 0, full, tiles.dout.index(consumer))
    for n_block in range(block.num_blocks):
        row = key_block(n_block, block.block_range, META)[0]
        stage = n_block % META.STAGES0
        full = barriers.k_full.index(stage)
        wait_empty(barriers.k_empty, n_block, META.STAGES0)
        mbarrier.expect(full, K_BYTES)
        load_pair(of.k, k, len_kv, row, full, tiles.k, stage, META)
        stage = n_block % META.STAGES1
        wait_empty(barriers.v_empty, n_block, META.STAGES1)
        mbarrier.expect(barriers.v_full.index(stage), of.v.block_type.nbytes)
        load_rows(of.v, v.token, len_kv, row, v.head, 0, barriers.v_full.index(stage), tiles.v.index(stage))
    mbarrier.wait(barriers.dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        store_pair(of.dq, dq, len_q, block.first_row + consumer * ROWS, tiles.q, consumer, META)
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
    b, h, len_q, large = block.b, block.h, block.sequence.len_q, block.large
    softmax_scale = args.scores.scale
    DTYPE: gl.constexpr = tiles.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
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
    statistics = load_query_statistics(own.statistics_ptr, rows, len_q, META)
    minus_lse = statistics.minus_lse
    last = last_key_seen_by_all(m_start, block.band, META)
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
            wait_full(barriers.k_full, n_block, META.STAGES0)
            qk = score_product(tiles.q, consumer, tiles.k, k_stage, zeros, BLOCK_N, META)
            wait_full(barriers.v_full, n_block, META.STAGES1)
            v0 = tiles.v.index(v_stage).reshape([BLOCK_N, V0])
            dp = warpgroup_mma(
                tiles.dout.index(consumer).reshape([ROWS, V0]), v0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            drawn = drawn_weights(draws, h, m_start, column, BLOCK_N, False, META)
            qk = warpgroup_mma_wait(1, deps=[qk])
            i, j = rows[:, None], columns[None, :]
            s, factor, cap_tanh, score = logits(qk, i, j, softmax_scale, own.head, MODS, META)
            is_cut = hides_some_key(column, last, m_start, block, META)
            if LOOPS == 1:
                is_cut = is_cut | is_any_large(large, META)
            if is_cut:
                s = mask_keys(s, rows, columns, block.band, META)
                if LOOPS == 1:
                    s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
            if IS_LARGE == 1:
                s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
            s = apply_mask_mod(s, i, j, is_full, own.head, MODS, META)
            p = gl.exp2(s * factor + minus_lse[:, None])
            dp = warpgroup_mma_wait(0, deps=[dp])
            release(barriers.v_empty, n_block, META.STAGES1)
            dlogit = p * (kept_gradient(dp, drawn, draws, False, META) + statistics.minus_delta[:, None])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, own.head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            sum_of_k = warpgroup_mma(ds, tiles.k.first.index(k_stage).reshape([BLOCK_N, QK0]), dq, is_async=True)
            if QK1 > 0:
                sum_of_k1 = warpgroup_mma(ds, tiles.k.second.index(k_stage).reshape([BLOCK_N, QK1]), dq1, is_async=True)
                dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
            else:
                dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
            release(barriers.k_empty, n_block, META.STAGES0)
    tiles.q.first.index(CONSUMER).reshape([ROWS, QK0]).store((dq * softmax_scale).to(DTYPE))  # q is no longer needed
    if QK1 > 0:
        tiles.q.second.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * softmax_scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    tiles = DqTiles(
        q=allocate_pair(2, of.q, META),
        dout=allocate_tiles(2, of.dout),
        k=allocate_pair(STAGES0, of.k, META),
        v=allocate_tiles(STAGES1, of.v),
    )
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
        head=head_of(args.scores, block.b, block.h, sequence.len_q, sequence.len_kv, block.band.shift, MODS, META),
        statistics_ptr=statistics_of_block(args, block, META),
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
    of, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    dk = origin_of(steps.dk, sequence.start_kv, h_kv, b)
    dv = origin_of(steps.dv, sequence.start_kv, h_kv, b)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.kv_full.index(0)
    K_BYTES: gl.constexpr = pair_bytes(of.k.first.block_type.nbytes, of.k.second.block_type.nbytes, META.QK1)
    mbarrier.expect(full, PARTS * (K_BYTES + of.v.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = block.first_row + part * ROWS
        load_pair(of.k, k, len_kv, row, full, tiles.k, part, META)
        load_rows(of.v, v.token, len_kv, row, v.head, 0, full, tiles.v.index(part))
    Q_BYTES: gl.constexpr = pair_bytes(of.q.first.block_type.nbytes, of.q.second.block_type.nbytes, META.QK1)
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = m_block % META.STAGES0
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, m_block, META.STAGES0)
        mbarrier.expect(full, Q_BYTES + of.statistics.block_type.nbytes)
        load_pair(of.q, origin_of_head(q, head), len_q, row, full, tiles.q, stage, META)
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        stage = m_block % META.STAGES1
        full = barriers.dout_full.index(stage)
        wait_empty(barriers.dout_empty, m_block, META.STAGES1)
        mbarrier.expect(full, of.dout.block_type.nbytes)
        load_rows(of.dout, dout.token, len_q, row, dout.head + head, 0, full, tiles.dout.index(stage))
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = block.first_row + part * ROWS
        store_pair(of.dk, dk, len_kv, row, tiles.k, part, META)
        store_rows(of.dv, dv.token, len_kv, row, dv.head, 0, tiles.v.index(part))
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
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
    DTYPE: gl.constexpr = tiles.v.dtype
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
    at, values = first_query_head(block, scores, MODS, META)
    LOOPS: gl.constexpr = loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks * group_size  # of all query heads
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for m_block in range(iterations):
            row, is_full = query_block(at.n, block.block_range, META)
            columns = row + block_columns
            own = CONSUMER + opaque_zero(m_block)
            q_stage = m_block % META.STAGES0
            dout_stage = m_block % META.STAGES1
            dout0 = tiles.dout.index(dout_stage).reshape([BLOCK_M, V0])
            wait_full(barriers.q_full, m_block, META.STAGES0)
            kq = score_product(tiles.k, own, tiles.q, q_stage, zeros, BLOCK_M, META)
            wait_full(barriers.dout_full, m_block, META.STAGES1)
            dp = warpgroup_mma(tiles.v.index(own).reshape([ROWS, V0]), dout0.permute([1, 0]), zeros, use_acc=False, is_async=True)
            drawn = drawn_weights(draws, at.h, row, n_start, BLOCK_M, True, META)
            kq = warpgroup_mma_wait(1, deps=[kq])
            i, j = columns[None, :], rows[:, None]
            head = head_at(at, values, block, scores, META)
            s, factor, cap_tanh, score = logits(kq, i, j, scores.scale, head, MODS, META)
            if LOOPS == 2:
                if IS_LARGE == 1:
                    of_queries = tiles.statistics.index(q_stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, at.h, i, len_q, META)
            elif hides_some_query(row, n_start, block, META):
                s = mask_queries(s, rows, columns, block.band, META)
                if META.IS_UNBOUNDED:
                    of_queries = tiles.statistics.index(q_stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, at.h, i, len_q, META)
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
            sum_of_q = warpgroup_mma(ds, tiles.q.first.index(q_stage).reshape([BLOCK_M, QK0]), dk, is_async=True)
            if QK1 > 0:
                sum_of_q1 = warpgroup_mma(ds, tiles.q.second.index(q_stage).reshape([BLOCK_M, QK1]), dk1, is_async=True)
                dv, p16 = warpgroup_mma_wait(2, deps=[sum_of_dout, p16])
                release(barriers.dout_empty, m_block, META.STAGES1)
                dk, dk1, ds = warpgroup_mma_wait(0, deps=[sum_of_q, sum_of_q1, ds])
            else:
                dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
                release(barriers.dout_empty, m_block, META.STAGES1)
                dk, ds = warpgroup_mma_wait(0, deps=[sum_of_q, ds])
            release(barriers.q_empty, m_block, META.STAGES0)
            at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    tiles.k.first.index(CONSUMER).reshape([ROWS, QK0]).store((dk * scores.scale).to(DTYPE))  # k and v are no longer needed
    if QK1 > 0:
        tiles.k.second.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * scores.scale).to(DTYPE))
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
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
    DTYPE: gl.constexpr = tiles.v.dtype
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
    at, values = first_query_head(block, scores, MODS, META)
    for m_block in range(block.num_blocks * group_size):  # of all query heads
        row, is_full = query_block(at.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        q_stage = m_block % META.STAGES0
        dout_stage = m_block % META.STAGES1
        q0 = tiles.q.first.index(q_stage).reshape([BLOCK_M, DIM])
        dout0 = tiles.dout.index(dout_stage).reshape([BLOCK_M, DIM])
        wait_full(barriers.q_full, m_block, META.STAGES0)
        own_q = q0.slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(tiles.k.first.index(zero).reshape([ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        wait_full(barriers.dout_full, m_block, META.STAGES1)
        own_dout = dout0.slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(tiles.v.index(zero).reshape([ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = tiles.statistics.index(q_stage).slice(FIRST, HALF).load(COLUMNS)
        drawn = drawn_weights(draws, at.h, row + FIRST, block.first_row, HALF, True, META)
        kq = warpgroup_mma_wait(1, deps=[kq])
        i, j = columns[None, :], rows[:, None]
        head = head_at(at, values, block, scores, META)
        s, factor, cap_tanh, score = logits(kq, i, j, scores.scale, head, MODS, META)
        if hides_some_query(row, block.first_row, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[None, :], large, b, at.h, i, len_q, META)
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
        at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    tiles.k.first.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * scores.scale).to(DTYPE))
    tiles.v.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    DTYPE: gl.constexpr = of.dout.dtype
    STAGES0: gl.constexpr = META.STAGES0
    STAGES1: gl.constexpr = META.STAGES1
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    tiles = DkdvTiles(
        q=allocate_pair(STAGES0, of.q, META),
        dout=allocate_tiles(STAGES1, of.dout),
        k=allocate_pair(PARTS, of.k, META),
        v=allocate_tiles(PARTS, of.v),
        statistics=gl.allocate_shared_memory(gl.float32, [STAGES0, 2 * BLOCK_M], of.statistics.layout),
    )
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
    """Launches the two kernels of a backward, of calls that `backward_unsupported` does not name.

    A bias and captures get their gradients by `score_gradients.bias_and_capture_gradients`.
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
            **x.features._asdict(),
            STATISTICS=size,
            QK0=qk0,
            QK1=qk1,
            V0=v0,
            **own,
        )

    shared: dict[str, Any] = {
        "tiles_of_statistics": tiles,
        "large": LargeLse(is_any_ptr=large.is_any, lse_ptr=large.lse),
        "lengths_q": x.lengths_q,
        "lengths_kv": x.lengths_kv,
        "band": x.band,
        "scores": x.scores,
        "dropout": x.dropout,
    }
    widths = (qk0, qk1)
    head_dims = qk0 + qk1 + v0
    # Read again and again of a head: k and v for dq, q and dout for dk and dv (as room for half as many heads).
    dq_work, programs = backward_work(x, QUERIES, "q", x.longest_kv * 2 * head_dims)
    dq_arguments = DqArguments(
        descriptors=DqDescriptors(
            q=pair_descriptor(x.q, 64, widths),
            dout=ragged_descriptor(dout, 64, v0),
            k=pair_descriptor(x.k, tile.block_n, widths),
            v=ragged_descriptor(x.v, tile.block_n, v0),
            dq=pair_descriptor(dq, 64, widths),
        ),
        steps=DqSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dq=step_of(dq)),
        statistics_ptr=statistics,
        work=dq_work,
        lists=x.lists("kv"),
        **shared,
    )
    dq_meta = meta(BLOCK_M=QUERIES, BLOCK_N=tile.block_n, STAGES0=2, STAGES1=tile.v_stages, SPLITS_COLUMNS=False)
    dq_tile = Tile(QUERIES, tile.block_n, 4, 2)
    launch(_attn_bwd_dq_hopper_kernel, programs, x.device, dq_tile, (dq_arguments, x.mods, dq_meta))
    if has_lengths:
        zero_padding(x, dq, "q")
    dkdv_work, programs = backward_work(x, tile.keys, "kv", x.longest_q * 4 * head_dims)
    dkdv_arguments = DkdvArguments(
        descriptors=DkdvDescriptors(
            q=pair_descriptor(x.q, size, widths),
            dout=ragged_descriptor(dout, size, v0),
            k=pair_descriptor(x.k, 64, widths),
            v=ragged_descriptor(x.v, 64, v0),
            statistics=statistics_descriptor(statistics, size),
            dk=pair_descriptor(dk, 64, widths),
            dv=ragged_descriptor(dv, 64, v0),
        ),
        steps=DkdvSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dk=step_of(dk), dv=step_of(dv)),
        work=dkdv_work,
        lists=x.lists("q"),
        **shared,
    )
    dkdv_meta = meta(BLOCK_M=size, BLOCK_N=tile.keys, STAGES0=2, STAGES1=2, SPLITS_COLUMNS=tile.splits_columns)
    dkdv_tile = Tile(size, tile.keys, 4, 2)
    launch(_attn_bwd_dkdv_hopper_kernel, programs, x.device, dkdv_tile, (dkdv_arguments, x.mods, dkdv_meta))
    if has_lengths:
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
