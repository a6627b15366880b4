"""Consumers of the kernels for dk and dv for sm_90, in 16 bits and in FP8: two warpgroups, which share a block of keys.

Each has 64 keys, or half of the columns of the gradients of 64 keys. They visit all queries, of all heads of the group, that see
the keys. Scores are transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.lse_rows import is_any_large, relative_to_lse
from flexattn.kernels_triton.common.scores import through_mods
from flexattn.kernels_triton.gluon import backward_blocks, pipeline
from flexattn.kernels_triton.gluon.barriers import BOTH, DS_WRITTEN, LAST, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import KeyGradients, store_key_gradient, store_key_gradients
from flexattn.kernels_triton.gluon.masking import apply_mask_mod, hide_queries_past_the_end, mask_queries
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DkdvBarriers, DkdvTiles
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import product_layout, score_product, zero_rows


@gluon.jit
def _relative_to_lse(s, statistics, index, block: backward_blocks.Block, h, i, META: gl.constexpr):
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    minus_lse = statistics.index(index).slice(0, META.BLOCK_M).load(COLUMNS)
    return relative_to_lse(s, minus_lse[None, :], block.large, block.b, h, i, block.sequence.len_q, META)


@gluon.jit
def _wait_for_sums(dv, dk, dk1, p16, ds, META: gl.constexpr):
    # Waits for dk; in FP8 for dv too. p16 and ds are the products' operands in registers.
    if META.IS_FP8 and META.QK1 > 0:
        dv, dk, dk1, p16, ds = warpgroup_mma_wait(0, deps=[dv, dk, dk1, p16, ds])
    elif META.IS_FP8:
        dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv, dk, p16, ds])
    elif META.QK1 > 0:
        dk, dk1, ds = warpgroup_mma_wait(0, deps=[dk, dk1, ds])
    else:
        dk, ds = warpgroup_mma_wait(0, deps=[dk, ds])
    return dv, dk, dk1, p16, ds


@gluon.jit
def _consume_dkdv_rows(
    args: DkdvArguments,
    tiles: DkdvTiles,
    barriers: DkdvBarriers,
    block: backward_blocks.Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    len_q, large = block.sequence.len_q, block.large
    scores = args.scores
    DTYPE: gl.constexpr = tiles.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = product_layout(BLOCK_M, 32 if META.IS_FP8 else 16)
    DS: gl.constexpr = gl.DotOperandLayout(0, product_layout(QK0), 2)
    P: gl.constexpr = gl.DotOperandLayout(0, product_layout(V0), 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk, dk1, dv = zero_rows(QK0), zero_rows(QK1), zero_rows(V0)
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = backward_blocks.first_query_head(block, args.work, scores, MODS, META)
    LOOPS: gl.constexpr = backward_blocks.loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks * block.heads  # counts the blocks of all query heads
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for m_block in range(iterations):
            row, is_full = query_block(position.n, block.block_range, META)
            columns = row + block_columns
            k_slot = CONSUMER + opaque_zero(m_block)
            scores_stage = Stage(m_block, META.STAGES_SCORES)
            index = pipeline.index(scores_stage)
            dp_stage = Stage(m_block, META.STAGES_DP)
            p_stage = Stage(m_block, META.STAGES_P)
            ds_stage = Stage(m_block, META.STAGES_DS)
            dout0 = tiles.dout.index(pipeline.index(dp_stage)).reshape([BLOCK_M, V0])
            pipeline.wait_full(barriers.scores_full, scores_stage)
            raw_s = score_product(tiles.k, k_slot, tiles.q, index, zeros, BLOCK_M, META)  # S = K Q^T
            if not META.IS_FP8:  # in FP8, dout is loaded with q
                pipeline.wait_full(barriers.dp_full, dp_stage)
            dp = warpgroup_mma(  # dP = V dO^T
                tiles.v.index(k_slot).reshape([ROWS, V0]), dout0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            drawn = drawn_weights(draws, position.h, row, n_start, BLOCK_M, True, META)
            s_factor = score_factor(tiles.factors, index, COLUMNS, META)
            raw_s = warpgroup_mma_wait(1, deps=[raw_s])
            i, j = columns[None, :], rows[:, None]
            head = backward_blocks.head_at(position, values, block, scores, META)
            s, factor, cap_tanh, score = product_logits(raw_s, i, j, head, scores.scale, s_factor, MODS, META)
            if LOOPS == 2:
                if IS_LARGE == 1:
                    s = _relative_to_lse(s, tiles.statistics, index, block, position.h, i, META)
            elif backward_blocks.hides_some_query(row, n_start, block, META):
                s = mask_queries(s, rows, columns, block.band, META)
                if META.IS_UNBOUNDED:
                    s = _relative_to_lse(s, tiles.statistics, index, block, position.h, i, META)
            s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
            s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
            minus_lse = tiles.statistics.index(index).slice(0, BLOCK_M).load(COLUMNS)
            p = gl.exp2(s * factor + minus_lse[None, :])
            if META.IS_FP8:  # the product with p overlaps the computation of ds
                p16 = gl.convert_layout(p.to(DTYPE), P)
                pipeline.wait_full(barriers.p_full, p_stage)
                dout16 = tiles.dout16.index(pipeline.index(p_stage)).reshape([BLOCK_M, V0])
                dv = warpgroup_mma(p16, dout16, dv, is_async=True)  # dV += P dO
            minus_delta = tiles.statistics.index(index).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
            if META.IS_FP8:
                dp_factor = dp_factor_of(tiles.factors, index, COLUMNS, META)
                dp = warpgroup_mma_wait(1, deps=[dp])
                pipeline.release(barriers.dp_empty, dp_stage)
                dp = dp * dp_factor
            else:
                dp = warpgroup_mma_wait(0, deps=[dp])
            dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            if not META.IS_FP8:
                p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), P)
                dout16 = tiles.dout16.index(pipeline.index(p_stage)).reshape([BLOCK_M, V0])
                dv = warpgroup_mma(p16, dout16, dv, is_async=True)  # dV += P dO
            index16 = pipeline.index(ds_stage)
            dk = warpgroup_mma(ds, tiles.q16.first.index(index16).reshape([BLOCK_M, QK0]), dk, is_async=True)  # dK += dS Q
            if QK1 > 0:
                # dK += dS Q
                dk1 = warpgroup_mma(ds, tiles.q16.second.index(index16).reshape([BLOCK_M, QK1]), dk1, is_async=True)
            PRODUCTS: gl.constexpr = 2 if QK1 > 0 else 1  # with ds
            if not META.IS_FP8:
                dv, p16 = warpgroup_mma_wait(PRODUCTS, deps=[dv, p16])
                pipeline.release(barriers.dp_empty, dp_stage)
            dv, dk, dk1, p16, ds = _wait_for_sums(dv, dk, dk1, p16, ds, META)
            pipeline.release(barriers.ds_empty, ds_stage)
            position, values = backward_blocks.next_query_block(position, values, block, args.work, scores, MODS, META)
    if META.SHARES_TILES:
        named_barrier_sync(LAST, BOTH)  # the 16-bit tiles were also read by the other warpgroup, which no longer needs them
    sums = KeyGradients(dk=dk, dk1=dk1, dv=dv)
    store_key_gradients(sums, draws, args, tiles.dk, tiles.dv, block, CONSUMER, META)
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def _consume_dkdv_columns(
    args: DkdvArguments,
    tiles: DkdvTiles,
    barriers: DkdvBarriers,
    block: backward_blocks.Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores = args.scores
    DTYPE: gl.constexpr = tiles.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HALF: gl.constexpr = META.BLOCK_M // 2
    DIM: gl.constexpr = META.QK0
    HALF_DIM: gl.constexpr = META.QK0 // 2
    SCORES: gl.constexpr = product_layout(HALF, 32 if META.IS_FP8 else 16)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    FIRST: gl.constexpr = CONSUMER * HALF
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF_DIM
    zeros = gl.zeros([ROWS, HALF], gl.float32, layout=SCORES)
    dk, dv = zero_rows(HALF_DIM), zero_rows(HALF_DIM)
    rows = block.first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = backward_blocks.first_query_head(block, args.work, scores, MODS, META)
    for m_block in range(block.num_blocks * block.heads):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        scores_stage = Stage(m_block, META.STAGES_SCORES)
        index = pipeline.index(scores_stage)
        dp_stage = Stage(m_block, META.STAGES_DP)
        p_stage = Stage(m_block, META.STAGES_P)
        ds_stage = Stage(m_block, META.STAGES_DS)
        q0 = tiles.q.first.index(index).reshape([BLOCK_M, DIM])
        dout0 = tiles.dout.index(pipeline.index(dp_stage)).reshape([BLOCK_M, DIM])
        pipeline.wait_full(barriers.scores_full, scores_stage)
        q_half = q0.slice(FIRST, HALF, 0).permute([1, 0])
        # S = K Q^T
        raw_s = warpgroup_mma(tiles.k.first.index(zero).reshape([ROWS, DIM]), q_half, zeros, use_acc=False, is_async=True)
        if not META.IS_FP8:  # in FP8, dout is loaded with q
            pipeline.wait_full(barriers.dp_full, dp_stage)
        dout_half = dout0.slice(FIRST, HALF, 0).permute([1, 0])
        # dP = V dO^T
        dp = warpgroup_mma(tiles.v.index(zero).reshape([ROWS, DIM]), dout_half, zeros, use_acc=False, is_async=True)
        minus_lse = tiles.statistics.index(index).slice(FIRST, HALF).load(COLUMNS)
        drawn = drawn_weights(draws, position.h, row + FIRST, block.first_row, HALF, True, META)
        s_factor = score_factor(tiles.factors, index, COLUMNS, META)
        raw_s = warpgroup_mma_wait(1, deps=[raw_s])
        i, j = columns[None, :], rows[:, None]
        head = backward_blocks.head_at(position, values, block, scores, META)
        s, factor, cap_tanh, score = product_logits(raw_s, i, j, head, scores.scale, s_factor, MODS, META)
        if backward_blocks.hides_some_query(row, block.first_row, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[None, :], large, b, position.h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse[None, :])
        buffer = (m_block & 1) * 2  # two, so that one barrier for each product is enough
        tiles.p.index(buffer + CONSUMER).store(kept(p, drawn, True, META).to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = tiles.statistics.index(index).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp_factor = dp_factor_of(tiles.factors, index, COLUMNS, META)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if META.IS_FP8:
            pipeline.release(barriers.dp_empty, dp_stage)
            pipeline.wait_full(barriers.p_full, p_stage)
        dout16 = tiles.dout16.index(pipeline.index(p_stage)).reshape([BLOCK_M, DIM])
        for half in gl.static_range(2):
            part = dout16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            dv = warpgroup_mma(tiles.p.index(buffer + half), part, dv, is_async=True)  # dV += P dO
        if META.IS_FP8:
            dp = dp * dp_factor
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        tiles.ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(DS_WRITTEN, BOTH)
        if META.IS_FP8:
            pipeline.wait_full(barriers.ds_full, ds_stage)
        q16 = tiles.q16.first.index(pipeline.index(ds_stage)).reshape([BLOCK_M, DIM])
        for half in gl.static_range(2):
            part = q16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            dk = warpgroup_mma(tiles.ds.index(buffer + half), part, dk, is_async=True)  # dK += dS Q
        if META.IS_FP8:
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
            pipeline.release(barriers.ds_empty, ds_stage)
            pipeline.release(barriers.p_empty, p_stage)
        else:
            dv = warpgroup_mma_wait(2, deps=[dv])
            pipeline.release(barriers.dp_empty, dp_stage)
            dk = warpgroup_mma_wait(0, deps=[dk])
            pipeline.release(barriers.ds_empty, ds_stage)
        position, values = backward_blocks.next_query_block(position, values, block, args.work, scores, MODS, META)
    if META.SHARES_TILES:
        named_barrier_sync(LAST, BOTH)  # the 16-bit tiles were also read by the other warpgroup, which no longer needs them
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, 0, FIRST_COLUMN)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, 0, FIRST_COLUMN)
    else:
        tiles.dk.first.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * scores.scale).to(DTYPE))
        tiles.dv.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def consume_dkdv(
    args: DkdvArguments,
    tiles: DkdvTiles,
    barriers: DkdvBarriers,
    block: backward_blocks.Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    if META.SPLITS_COLUMNS:
        _consume_dkdv_columns(args, tiles, barriers, block, CONSUMER, MODS, META)
    else:
        _consume_dkdv_rows(args, tiles, barriers, block, CONSUMER, MODS, META)
