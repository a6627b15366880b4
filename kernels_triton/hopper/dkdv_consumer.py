"""Consumers of the kernels for dk and dv for sm_90, in 16 bits and in FP8: two warpgroups, which share a block of keys.

Each has 64 keys, or half of the columns of the gradients of 64 keys. They visit all queries, of all heads of the group, that see
the keys. Scores are transposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.lse_rows import is_any_large, relative_to_lse
from flexattn.kernels_triton.common.scores import through_mods
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    first_query_head,
    head_at,
    hides_some_query,
    loops_of,
    next_query_block,
)
from flexattn.kernels_triton.gluon.barriers import BOTH, DS_WRITTEN, LAST, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import store_key_gradient
from flexattn.kernels_triton.gluon.masking import apply_mask_mod, hide_queries_past_the_end, mask_queries
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.gluon.pipeline import release, wait_full
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import score_product


class DkdvOperands(NamedTuple):
    """Tiles in shared memory: k, v, dk and dv by consumer, the others by stage."""

    q: Pair
    dout: Any
    k: Pair
    v: Any
    q16: Pair  # in 16 bits, for the products with ds and p; equal to q and dout if these have 16 bits
    dout16: Any
    dk: Pair  # outputs of the epilogue
    dv: Any
    statistics: Any
    factors: Any  # in FP8, from `fp8.write_factors`
    p: Any  # if columns are split: results of one warpgroup for both, of the last two iterations
    ds: Any


class DkdvConsumerBarriers(NamedTuple):
    """Barriers of the rings by the product that reads their tiles: of k and q, of v and dout, of p and dout, of ds and q.

    In 16 bits, q and dout have one ring each. In FP8, both share one ring in FP8 and one in 16 bits; if columns are split, q in 16
    bits has its own ring. A barrier is None if another one covers its wait or release.
    """

    kv_full: Any
    scores_full: Any
    dp_full: Any
    dp_empty: Any
    p_full: Any
    p_empty: Any
    ds_full: Any
    ds_empty: Any
    dkdv_full: Any


@gluon.jit
def consume_dkdv(
    args,
    operands: DkdvOperands,
    barriers: DkdvConsumerBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
    DTYPE: gl.constexpr = operands.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if META.IS_FP8 else 16])
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
    position, values = first_query_head(block, args.work, scores, MODS, META)
    LOOPS: gl.constexpr = loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks * group_size  # counts the blocks of all query heads
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for m_block in range(iterations):
            row, is_full = query_block(position.n, block.block_range, META)
            columns = row + block_columns
            k_slot = CONSUMER + opaque_zero(m_block)
            stage = m_block % META.STAGES_SCORES
            dout0 = operands.dout.index(m_block % META.STAGES_DP).reshape([BLOCK_M, V0])
            wait_full(barriers.scores_full, m_block, META.STAGES_SCORES)
            kq = score_product(operands.k, k_slot, operands.q, stage, zeros, BLOCK_M, META)
            if not META.IS_FP8:  # in FP8, dout is loaded with q
                wait_full(barriers.dp_full, m_block, META.STAGES_DP)
            dp = warpgroup_mma(
                operands.v.index(k_slot).reshape([ROWS, V0]), dout0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            drawn = drawn_weights(draws, position.h, row, n_start, BLOCK_M, True, META)
            s_factor = score_factor(operands.factors, stage, COLUMNS, META)
            kq = warpgroup_mma_wait(1, deps=[kq])
            i, j = columns[None, :], rows[:, None]
            head = head_at(position, values, block, scores, META)
            s, factor, cap_tanh, score = product_logits(kq, i, j, head, scores.scale, s_factor, MODS, META)
            if LOOPS == 2:
                if IS_LARGE == 1:
                    minus_lse_of_columns = operands.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, minus_lse_of_columns[None, :], large, b, position.h, i, len_q, META)
            elif hides_some_query(row, n_start, block, META):
                s = mask_queries(s, rows, columns, block.band, META)
                if META.IS_UNBOUNDED:
                    minus_lse_of_columns = operands.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, minus_lse_of_columns[None, :], large, b, position.h, i, len_q, META)
            s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
            s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
            minus_lse = operands.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
            p = gl.exp2(s * factor + minus_lse[None, :])
            if META.IS_FP8:  # the product with p overlaps the computation of ds
                p16 = gl.convert_layout(p.to(DTYPE), P)
                wait_full(barriers.p_full, m_block, META.STAGES_P)
                dout16 = operands.dout16.index(m_block % META.STAGES_P).reshape([BLOCK_M, V0])
                sum_of_dout = warpgroup_mma(p16, dout16, dv, is_async=True)
            minus_delta = operands.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
            if META.IS_FP8:
                dp_factor = dp_factor_of(operands.factors, stage, COLUMNS, META)
                dp = warpgroup_mma_wait(1, deps=[dp])
                release(barriers.dp_empty, m_block, META.STAGES_DP)
                dp = dp * dp_factor
            else:
                dp = warpgroup_mma_wait(0, deps=[dp])
            dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            if not META.IS_FP8:
                p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), P)
                dout16 = operands.dout16.index(m_block % META.STAGES_P).reshape([BLOCK_M, V0])
                sum_of_dout = warpgroup_mma(p16, dout16, dv, is_async=True)
            stage16 = m_block % META.STAGES_DS
            sum_of_q = warpgroup_mma(ds, operands.q16.first.index(stage16).reshape([BLOCK_M, QK0]), dk, is_async=True)
            if QK1 > 0:
                sum_of_q1 = warpgroup_mma(ds, operands.q16.second.index(stage16).reshape([BLOCK_M, QK1]), dk1, is_async=True)
            PRODUCTS: gl.constexpr = 2 if QK1 > 0 else 1  # with ds
            if not META.IS_FP8:
                dv, p16 = warpgroup_mma_wait(PRODUCTS, deps=[sum_of_dout, p16])
                release(barriers.dp_empty, m_block, META.STAGES_DP)
            if META.IS_FP8 and QK1 > 0:
                dv, dk, dk1, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, sum_of_q1, p16, ds])
            elif META.IS_FP8:
                dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, p16, ds])
            elif QK1 > 0:
                dk, dk1, ds = warpgroup_mma_wait(0, deps=[sum_of_q, sum_of_q1, ds])
            else:
                dk, ds = warpgroup_mma_wait(0, deps=[sum_of_q, ds])
            release(barriers.ds_empty, m_block, META.STAGES_DS)
            position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    if META.SHARES_TILES:
        named_barrier_sync(LAST, BOTH)  # the 16-bit tiles were also read by the other warpgroup, which no longer needs them
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, CONSUMER * ROWS, 0)
        if QK1 > 0:
            store_key_gradient(args.dk32, dk1 * scores.scale, block, CONSUMER * ROWS, QK0)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, CONSUMER * ROWS, 0)
    else:
        operands.dk.first.index(CONSUMER).reshape([ROWS, QK0]).store((dk * scores.scale).to(DTYPE))
        if QK1 > 0:
            operands.dk.second.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * scores.scale).to(DTYPE))
        operands.dv.index(CONSUMER).reshape([ROWS, V0]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def consume_dkdv_columns(
    args,
    operands: DkdvOperands,
    barriers: DkdvConsumerBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
    DTYPE: gl.constexpr = operands.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HALF: gl.constexpr = META.BLOCK_M // 2
    DIM: gl.constexpr = META.QK0
    HALF_DIM: gl.constexpr = META.QK0 // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32 if META.IS_FP8 else 16])
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
    position, values = first_query_head(block, args.work, scores, MODS, META)
    for m_block in range(block.num_blocks * group_size):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        stage = m_block % META.STAGES_SCORES
        q0 = operands.q.first.index(stage).reshape([BLOCK_M, DIM])
        dout0 = operands.dout.index(m_block % META.STAGES_DP).reshape([BLOCK_M, DIM])
        wait_full(barriers.scores_full, m_block, META.STAGES_SCORES)
        q_half = q0.slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(operands.k.first.index(zero).reshape([ROWS, DIM]), q_half, zeros, use_acc=False, is_async=True)
        if not META.IS_FP8:  # in FP8, dout is loaded with q
            wait_full(barriers.dp_full, m_block, META.STAGES_DP)
        dout_half = dout0.slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(operands.v.index(zero).reshape([ROWS, DIM]), dout_half, zeros, use_acc=False, is_async=True)
        minus_lse = operands.statistics.index(stage).slice(FIRST, HALF).load(COLUMNS)
        drawn = drawn_weights(draws, position.h, row + FIRST, block.first_row, HALF, True, META)
        s_factor = score_factor(operands.factors, stage, COLUMNS, META)
        kq = warpgroup_mma_wait(1, deps=[kq])
        i, j = columns[None, :], rows[:, None]
        head = head_at(position, values, block, scores, META)
        s, factor, cap_tanh, score = product_logits(kq, i, j, head, scores.scale, s_factor, MODS, META)
        if hides_some_query(row, block.first_row, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[None, :], large, b, position.h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse[None, :])
        buffer = (m_block & 1) * 2  # two, so that one barrier for each product is enough
        operands.p.index(buffer + CONSUMER).store(kept(p, drawn, True, META).to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = operands.statistics.index(stage).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp_factor = dp_factor_of(operands.factors, stage, COLUMNS, META)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if META.IS_FP8:
            release(barriers.dp_empty, m_block, META.STAGES_DP)
            wait_full(barriers.p_full, m_block, META.STAGES_P)
        dout16 = operands.dout16.index(m_block % META.STAGES_P).reshape([BLOCK_M, DIM])
        sum_of_dout = dv
        for half in gl.static_range(2):
            part = dout16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_dout = warpgroup_mma(operands.p.index(buffer + half), part, sum_of_dout, is_async=True)
        if META.IS_FP8:
            dp = dp * dp_factor
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        operands.ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(DS_WRITTEN, BOTH)
        if META.IS_FP8:
            wait_full(barriers.ds_full, m_block, META.STAGES_DS)
        q16 = operands.q16.first.index(m_block % META.STAGES_DS).reshape([BLOCK_M, DIM])
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(operands.ds.index(buffer + half), part, sum_of_q, is_async=True)
        if META.IS_FP8:
            dv, dk = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q])
            release(barriers.ds_empty, m_block, META.STAGES_DS)
            release(barriers.p_empty, m_block, META.STAGES_P)
        else:
            dv = warpgroup_mma_wait(2, deps=[sum_of_dout])
            release(barriers.dp_empty, m_block, META.STAGES_DP)
            dk = warpgroup_mma_wait(0, deps=[sum_of_q])
            release(barriers.ds_empty, m_block, META.STAGES_DS)
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    if META.SHARES_TILES:
        named_barrier_sync(LAST, BOTH)  # the 16-bit tiles were also read by the other warpgroup, which no longer needs them
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, 0, FIRST_COLUMN)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, 0, FIRST_COLUMN)
    else:
        operands.dk.first.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * scores.scale).to(DTYPE))
        operands.dv.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)
