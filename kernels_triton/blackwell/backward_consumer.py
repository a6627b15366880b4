"""A consumer of the backward for sm_100: weights and ds of 128 keys and 64 of a block's 128 queries, and at the end dv or dk.

Scores are transposed: a thread has a key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from flexattn.kernels_triton.blackwell.backward_pipeline import CONSUMERS, Buffers
from flexattn.kernels_triton.blackwell.tensor_memory import LANES, fence_after_sync, fence_before_sync, row_layout, weights_over
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    ScorePlace,
    first_query_head,
    head_at,
    next_query_block,
    probabilities,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.pipeline import Stage


@gluon.jit
def _write_gradient(total, factor, has_queries, tile, META: gl.constexpr):
    # Writes a sum from tensor memory, or zeros, times factor, in 16 bits to a tile in shared memory
    COLUMNS: gl.constexpr = 64  # rows of the swizzle
    PARTS: gl.constexpr = META.DIM // COLUMNS
    LAYOUT: gl.constexpr = row_layout(COLUMNS)
    rows = tile.reshape([LANES, META.DIM])
    for part in gl.static_range(PARTS):
        columns = gl.zeros([LANES, COLUMNS], gl.float32, layout=LAYOUT)
        if has_queries:
            columns = total.slice(part * COLUMNS, COLUMNS).load(LAYOUT) * factor
        rows.slice(part * COLUMNS, COLUMNS, 1).store(columns.to(tile.dtype))
    fence_async_shared()


@gluon.jit
def compute_partition(
    args: FusedArguments, buffers: Buffers, block: Block, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    tiles, barriers, sums, products = buffers.tiles, buffers.barriers, buffers.sums, buffers.products
    scores = args.scores
    DTYPE: gl.constexpr = tiles.ds.dtype
    COLUMNS: gl.constexpr = META.COLUMNS
    PARTS: gl.constexpr = META.BLOCK_M // CONSUMERS // COLUMNS
    FIRST: gl.constexpr = CONSUMER * PARTS * COLUMNS  # its first query in a block
    SCORES: gl.constexpr = row_layout(COLUMNS)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = block.first_row + gl.arange(0, LANES, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, COLUMNS, layout=QUERIES)
    uncut_from = first_uncut_query(block.first_row, LANES, block.band, META)
    position, values = first_query_head(block, args.work, scores, MODS, META)
    iterations = block.num_blocks * block.heads
    for n in range(iterations):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        is_cut = cuts_block(row, block.first_row, uncut_from, block.band, META)
        head = head_at(position, values, block, scores, META)
        q_stage = Stage(n, META.Q_STAGES)
        statistics = tiles.statistics.index(pipeline.index(q_stage))
        # Statistics are loaded and released with q. Complete scores imply that they are loaded, and a complete dk that they have
        # been read. But PTX guarantees only for a commit that products have ended.
        pipeline.wait_full(barriers.q_full, q_stage)
        mbarrier.wait(products.scores_full.index(0), n & 1)
        fence_after_sync()
        for part in gl.static_range(PARTS):
            columns = row + FIRST + part * COLUMNS + block_columns
            i, j = columns[None, :], rows[:, None]
            score_columns = sums.scores.slice(FIRST + part * COLUMNS, COLUMNS)
            s, factor, cap_tanh, score = logits(score_columns.load(SCORES), i, j, scores.scale, head, MODS, META)
            place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
            p = probabilities(s, factor, place, statistics.slice(FIRST + part * COLUMNS, COLUMNS), head, block, MODS, META)
            weights_over(sums.scores, FIRST + part * COLUMNS, COLUMNS, DTYPE, META.BLOCK_M).store(p.to(DTYPE))
            if part == PARTS - 1:
                fence_before_sync()
                mbarrier.arrive(products.weights_full.index(0), count=1)
            if part == 0:
                mbarrier.wait(products.dp_full.index(0), n & 1)
                fence_after_sync()
            minus_delta = statistics.slice(META.BLOCK_M + FIRST + part * COLUMNS, COLUMNS).load(QUERIES)
            dlogit = p * (sums.dp.slice(FIRST + part * COLUMNS, COLUMNS).load(SCORES) + minus_delta[None, :])
            ds = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
            tiles.ds.slice(FIRST + part * COLUMNS, COLUMNS, 1).store(ds.to(DTYPE))
        fence_async_shared()
        fence_before_sync()
        mbarrier.arrive(products.ds_full.index(0), count=1)
        pipeline.release(barriers.q_empty, q_stage)
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    has_queries = iterations > 0  # False if no query sees the keys
    mbarrier.wait(products.sums_full.index(0), 0, pred=has_queries)
    fence_after_sync()
    if CONSUMER == 0:  # through the memory of v and k, which no product reads any more
        _write_gradient(sums.dv, 1.0, has_queries, tiles.v.index(0), META)
    else:
        _write_gradient(sums.dk, scores.scale, has_queries, tiles.k.index(0), META)
    pipeline.release(barriers.dkdv_full, Stage(0, 1))
