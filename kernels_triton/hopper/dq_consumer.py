"""Consumers of the kernels for dq for sm_90, in 16 bits and in FP8: each has 64 queries, and visits all keys that these see."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.lse_rows import is_any_large, relative_to_lse
from flexattn.kernels_triton.common.scores import through_mods
from flexattn.kernels_triton.gluon import backward_blocks, pipeline
from flexattn.kernels_triton.gluon.barriers import BOTH, LAST, named_barrier_sync
from flexattn.kernels_triton.gluon.block_ranges import key_block
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept_gradient
from flexattn.kernels_triton.gluon.fp32_gradients import store_gradient
from flexattn.kernels_triton.gluon.masking import apply_mask_mod, mask_keys
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.hopper.backward_arguments import DqArguments, DqBarriers, DqRows, DqTiles
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import product_layout, score_product, zero_rows


@gluon.jit
def consume_dq(
    args: DqArguments,
    tiles: DqTiles,
    barriers: DqBarriers,
    block: backward_blocks.Block,
    query_rows: DqRows,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    b, h, len_q, large = block.b, block.h, block.sequence.len_q, block.large
    softmax_scale = args.scores.scale
    DTYPE: gl.constexpr = tiles.k16.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = product_layout(BLOCK_N, 32 if META.IS_FP8 else 16)
    DS: gl.constexpr = gl.DotOperandLayout(0, product_layout(QK0), 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    dq, dq1 = zero_rows(QK0), zero_rows(QK1)
    m_start = block.first_row + CONSUMER * ROWS
    rows = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=COLUMNS)
    statistics = backward_blocks.load_query_statistics(query_rows.statistics_ptr, rows, len_q, META)
    minus_lse = statistics.minus_lse
    last = backward_blocks.last_key_seen_by_all(m_start, block.band, META)
    draws = dropout_state(args.dropout, block.first_head, META)
    mbarrier.wait(barriers.q_full.index(0), 0)
    LOOPS: gl.constexpr = backward_blocks.loops_of(META)
    for IS_LARGE in gl.static_range(LOOPS):
        iterations = block.num_blocks
        if LOOPS == 2:
            iterations = gl.where(is_any_large(large, META) == (IS_LARGE == 1), iterations, 0)
        for n_block in range(iterations):
            column, is_full = key_block(n_block, block.block_range, META)
            columns = column + block_columns
            consumer = CONSUMER + opaque_zero(n_block)
            scores_stage = Stage(n_block, META.STAGES_SCORES)
            dp_stage = Stage(n_block, META.STAGES_DP)
            ds_stage = Stage(n_block, META.STAGES_DS)
            index = pipeline.index(scores_stage)
            index16 = pipeline.index(ds_stage)
            pipeline.wait_full(barriers.scores_full, scores_stage)
            raw_s = score_product(tiles.q, consumer, tiles.k, index, zeros, BLOCK_N, META)  # S = Q K^T
            if not META.IS_FP8:  # in FP8, v is loaded with k
                pipeline.wait_full(barriers.dp_full, dp_stage)
            v0 = tiles.v.index(pipeline.index(dp_stage)).reshape([BLOCK_N, V0])
            dp = warpgroup_mma(  # dP = dO V^T
                tiles.dout.index(consumer).reshape([ROWS, V0]), v0.permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            drawn = drawn_weights(draws, h, m_start, column, BLOCK_N, False, META)
            s_factor = score_factor(tiles.factors, index, COLUMNS, META)
            dp_factor = dp_factor_of(tiles.factors, index, COLUMNS, META)
            raw_s = warpgroup_mma_wait(1, deps=[raw_s])
            i, j = rows[:, None], columns[None, :]
            s, factor, cap_tanh, score = product_logits(raw_s, i, j, query_rows.head, softmax_scale, s_factor, MODS, META)
            is_cut = backward_blocks.hides_some_key(column, last, m_start, block, META)
            if LOOPS == 1:
                is_cut = is_cut | is_any_large(large, META)
            if is_cut:
                if LOOPS == 1:  # before the mask: behind it, LLVM would compute the last operation of a score_mod twice
                    s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
                s = mask_keys(s, rows, columns, block.band, META)
            if IS_LARGE == 1:
                s = relative_to_lse(s, minus_lse[:, None], large, b, h, i, len_q, META)
            s = apply_mask_mod(s, i, j, is_full, query_rows.head, MODS, META)
            p = gl.exp2(s * factor + minus_lse[:, None])
            if META.IS_FP8:
                pipeline.wait_full(barriers.ds_full, ds_stage)
            dp = warpgroup_mma_wait(0, deps=[dp])
            pipeline.release(barriers.dp_empty, dp_stage)
            if META.IS_FP8:
                dp = dp * dp_factor
            dlogit = p * (kept_gradient(dp, drawn, draws, False, META) + statistics.minus_delta[:, None])
            dscore = through_mods(dlogit, cap_tanh, score, i, j, query_rows.head, MODS, META)
            ds = gl.convert_layout(dscore.to(DTYPE), DS)
            dq = warpgroup_mma(ds, tiles.k16.first.index(index16).reshape([BLOCK_N, QK0]), dq, is_async=True)  # dQ += dS K
            if QK1 > 0:
                # dQ += dS K
                dq1 = warpgroup_mma(ds, tiles.k16.second.index(index16).reshape([BLOCK_N, QK1]), dq1, is_async=True)
                dq, dq1, ds = warpgroup_mma_wait(0, deps=[dq, dq1, ds])
            else:
                dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
            pipeline.release(barriers.ds_empty, ds_stage)
    if META.SHARES_TILES:
        named_barrier_sync(LAST, BOTH)  # k in 16 bits was also read by the other warpgroup, which no longer needs it
    if args.dq32.ptr is not None:
        start_q = block.sequence.start_q
        store_gradient(args.dq32, dq * softmax_scale, b, h, start_q, len_q, m_start, 0)
        if QK1 > 0:
            store_gradient(args.dq32, dq1 * softmax_scale, b, h, start_q, len_q, m_start, QK0)
    else:
        tiles.dq.first.index(CONSUMER).reshape([ROWS, QK0]).store((dq * softmax_scale).to(DTYPE))
        if QK1 > 0:
            tiles.dq.second.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * softmax_scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(0), count=1)
