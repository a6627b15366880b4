"""Fused backward attention on Blackwell (sm_100) in Gluon: dk and dv of 128 keys a program, and their contributions to dq.

One warp loads by TMA, one issues products, and two warpgroups have the softmax. Another warpgroup adds dq to fp32 sums in global
memory, in an arbitrary order. So the last bits of dq differ from run to run. All sums are in tensor memory (FlashAttention-4, arXiv
2603.05451). Blocks, bands, masks, mods, the loading warp and the sums of dq are those of the fused backward for sm_90.

Scores are transposed: a thread of a consumer has a key. Products run in the order of issue, as in `forward`. For a query block that
is

    scores | dq and dk of the previous block | dp | dv

So the consumers compute a block's weights during dq and dk of the previous block, and its ds during dv and the next scores. Two
tiles have two uses: weights replace their scores, and dq replaces dp. The next scores are issued after the product that reads the
weights. dp is issued after dq has left tensor memory.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tcgen05_commit, tcgen05_mma, tma

from flexattn.kernels_triton.blackwell.conditions import backward_tile
from flexattn.kernels_triton.blackwell.tensor_memory import (
    LANES,
    BackwardSums,
    allocate_backward_sums,
    fence_after_sync,
    fence_before_sync,
    row_layout,
    weights_over,
)
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tiles import BlackwellBackwardTile, cdiv
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    ScorePlace,
    first_query_head,
    head_at,
    key_block_of_program,
    next_query_block,
    probabilities,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_sums import in_order_of_sums, place_of_sums
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.fused_launch import finish_fused, launch_of_fused
from flexattn.kernels_triton.gluon.fused_loader import load_fused
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.operands import allocate_tiles
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.runtime.gluon_names import reduce_add
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

CONSUMERS = gl.constexpr(2)  # warpgroups that share a tile of scores: half of its queries each
DQ_COLUMNS = gl.constexpr(32)  # columns of dq that are read from tensor memory at a time
DQ_STAGES = gl.constexpr(2)  # tiles of these columns on their way out


@with_features
class BackwardMeta(NamedTuple):
    """Constants that the backward is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    COLUMNS: int  # queries of which a thread holds the scores with one key at a time
    Q_STAGES: int
    DOUT_STAGES: int
    DQ_PARTS: int  # tiles of DQ_COLUMNS columns of dq
    DIM1: int = 0  # 0: the head dim has one part
    DOUT_APART: bool = True  # for this and the next four see `FusedMeta`
    NUMBERS: int = 0
    K_STAGES: int = 1
    V_STAGES: int = 1
    CONVERTED: int = 0


class ProductBarriers(NamedTuple):
    """Barriers between the warp that issues products and the consumers; all but the last are for one query block."""

    scores_full: gl.shared_memory_descriptor  # scores are complete
    weights_full: gl.shared_memory_descriptor  # weights have replaced the scores
    dp_full: gl.shared_memory_descriptor  # dp is complete, and no product reads ds of the previous block
    ds_full: gl.shared_memory_descriptor  # ds is complete, and dp has been read
    sums_full: gl.shared_memory_descriptor  # dk and dv are complete


class Buffers(NamedTuple):
    tiles: FusedTiles  # in shared memory
    barriers: FusedBarriers
    sums: BackwardSums  # in tensor memory
    products: ProductBarriers


@gluon.constexpr_function
def ds_layout(columns, dtype):
    # Layout of ds of a block; a consumer stores `columns` queries at a time, which are whole rows of the swizzle
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=columns * bits // 8, element_bitwidth=bits, rank=2)


@gluon.jit
def allocate_product_barriers():
    return ProductBarriers(
        scores_full=allocate_barriers(1, 1),
        weights_full=allocate_barriers(1, CONSUMERS),
        dp_full=allocate_barriers(1, 1),
        ds_full=allocate_barriers(1, CONSUMERS),
        sums_full=allocate_barriers(1, 1),
    )


@gluon.jit
def _issue_scores(n, buffers: Buffers, META: gl.constexpr):
    tiles = buffers.tiles
    stage = Stage(n, META.Q_STAGES)
    pipeline.wait_full(buffers.barriers.q_full, stage)  # k is loaded with the first q
    k = tiles.k.index(0).reshape([META.BLOCK_N, META.DIM])
    q = tiles.q.index(pipeline.index(stage)).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(k, q.permute([1, 0]), buffers.sums.scores, use_acc=False)  # S = K Q^T
    tcgen05_commit(buffers.products.scores_full.index(0))


@gluon.jit
def _issue_dq_and_dk(n, buffers: Buffers, META: gl.constexpr):
    tiles, barriers, sums = buffers.tiles, buffers.barriers, buffers.sums
    mbarrier.wait(buffers.products.ds_full.index(0), n & 1)
    fence_after_sync()
    k = tiles.k.index(0).reshape([META.BLOCK_N, META.DIM])
    tcgen05_mma(tiles.ds.permute([1, 0]), k, sums.dp.slice(0, META.DIM), use_acc=False)  # dQ = dS^T K
    tcgen05_commit(barriers.dq_full.index(0))
    index = pipeline.index(Stage(n, META.Q_STAGES))
    q = tiles.q.index(index).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(tiles.ds, q, sums.dk, use_acc=n > 0)  # dK += dS Q
    tcgen05_commit(barriers.q_empty.index(index))


@gluon.jit
def _issue_dp_and_dv(n, buffers: Buffers, META: gl.constexpr):
    COLUMNS: gl.constexpr = META.COLUMNS
    PARTS: gl.constexpr = META.BLOCK_M // COLUMNS
    tiles, barriers, sums = buffers.tiles, buffers.barriers, buffers.sums
    stage = Stage(n, META.DOUT_STAGES)
    pipeline.wait_full(barriers.dout_full, stage)  # v is loaded with the first dout
    pipeline.wait_empty(barriers.dq_empty, Stage(n, 1))
    fence_after_sync()
    v = tiles.v.index(0).reshape([META.BLOCK_N, META.DIM])
    dout = tiles.dout.index(pipeline.index(stage)).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(v, dout.permute([1, 0]), sums.dp, use_acc=False)  # dP = V dO^T
    tcgen05_commit(buffers.products.dp_full.index(0))
    mbarrier.wait(buffers.products.weights_full.index(0), n & 1)
    fence_after_sync()
    for part in gl.static_range(PARTS):
        weights = weights_over(sums.scores, part * COLUMNS, COLUMNS, dout.dtype, META.BLOCK_M)
        tcgen05_mma(weights, dout.slice(part * COLUMNS, COLUMNS, 0), sums.dv, use_acc=n + part > 0)  # dV += P dO
    tcgen05_commit(barriers.dout_empty.index(pipeline.index(stage)))


@gluon.jit
def product_partition(args: FusedArguments, buffers: Buffers, block: Block, META: gl.constexpr):
    iterations = block.num_blocks * block.heads
    if iterations > 0:
        for n in range(iterations):  # counts the blocks of all query heads
            _issue_scores(n, buffers, META)
            if n > 0:
                _issue_dq_and_dk(n - 1, buffers, META)
            _issue_dp_and_dv(n, buffers, META)
        _issue_dq_and_dk(iterations - 1, buffers, META)
        tcgen05_commit(buffers.products.sums_full.index(0))


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


@gluon.jit
def add_dq(args: FusedArguments, buffers: Buffers, block: Block, META: gl.constexpr):
    barriers, tiles = buffers.barriers, buffers.tiles
    LAYOUT: gl.constexpr = row_layout(DQ_COLUMNS)
    PARTS: gl.constexpr = META.DQ_PARTS
    n_tile = 0  # counts the tiles that are stored
    position = first_queries(block, args.work)
    for iteration in range(block.num_blocks * block.heads):
        row = query_block(position.n, block.block_range, META)[0]
        mbarrier.wait(barriers.dq_full.index(0), iteration & 1)
        fence_after_sync()
        # A listed block may be past the end, with no row of this head.
        if META.BLOCK_SIZE_Q == 0 or row < block.sequence.len_q:
            for part in gl.static_range(PARTS):
                dq = buffers.sums.dp.slice(part * DQ_COLUMNS, DQ_COLUMNS).load(LAYOUT)
                tile = tiles.dq.index(pipeline.index(Stage(n_tile, DQ_STAGES)))
                tma.store_wait(DQ_STAGES - 1)  # the engine has read the tile
                tile.store(in_order_of_sums(dq))
                fence_async_shared()
                reduce_add(args.descriptors.dq, [place_of_sums(row, position.head, args, block, META), part * DQ_COLUMNS], tile)
                n_tile += 1
        fence_before_sync()
        mbarrier.arrive(barriers.dq_empty.index(0), count=1)
        position = next_queries(position, block, args.work)
    tma.store_wait(0)


@hopper_kernel
def _attn_bwd_blackwell_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.q.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    Q_STAGES: gl.constexpr = META.Q_STAGES
    DOUT_STAGES: gl.constexpr = META.DOUT_STAGES
    tiles = FusedTiles(
        q=allocate_tiles(Q_STAGES, descriptors.q),
        q16=None,
        dout=allocate_tiles(DOUT_STAGES, descriptors.dout),
        dout16=None,
        k=allocate_tiles(1, descriptors.k),
        k16=None,
        v=allocate_tiles(1, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2 * BLOCK_M], descriptors.statistics.layout),
        factors=None,
        ds=gl.allocate_shared_memory(DTYPE, [META.BLOCK_N, BLOCK_M], ds_layout(META.COLUMNS, DTYPE)),
        dq=allocate_tiles(DQ_STAGES, descriptors.dq),
    )
    barriers = FusedBarriers(
        q_full=allocate_barriers(Q_STAGES, 1),
        # released by the product that reads q, and by the consumers, which read the statistics
        q_empty=allocate_barriers(Q_STAGES, 1 + CONSUMERS),
        dout_full=allocate_barriers(DOUT_STAGES, 1),
        dout_empty=allocate_barriers(DOUT_STAGES, 1),
        dq_full=allocate_barriers(1, 1),
        dq_empty=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, CONSUMERS),
    )
    products = allocate_product_barriers()
    sums = allocate_backward_sums(META.BLOCK_M, META.DIM)
    buffers = Buffers(tiles=tiles, barriers=barriers, sums=sums, products=products)
    block = key_block_of_program(args, META)
    gl.warp_specialize(
        [
            (compute_partition, (args, buffers, block, 0, MODS, META)),
            (compute_partition, (args, buffers, block, 1, MODS, META)),
            (add_dq, (args, buffers, block, META)),
            (product_partition, (args, buffers, block, META)),
            (load_fused, (args, tiles, barriers, block, META)),
        ],
        [4, 4, 1, 1],
        [168, 96, 80, 80],  # the first consumer gets the remaining 168: no role spills more than one register in its loop
    )


def blackwell_backward(call: Backward, tile: BlackwellBackwardTile | None = None) -> None:
    """Launches the backward of a call that `backward_unsupported` does not reject; the last bits of dq differ from run to run."""
    x = call.problem
    tile = tile or backward_tile(x)
    meta = BackwardMeta(
        **x.features._asdict(),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DIM=tile.head_dim,
        COLUMNS=tile.columns,
        Q_STAGES=tile.q_stages,
        DOUT_STAGES=tile.dout_stages,
        DQ_PARTS=cdiv(x.q.shape[-1], DQ_COLUMNS.value),
    )
    ready = launch_of_fused(call, meta, tile.block_n, (LANES.value, DQ_COLUMNS.value))
    launch(_attn_bwd_blackwell_kernel, ready.programs, x.device, ready.tile, ready.arguments)
    finish_fused(call, ready)
