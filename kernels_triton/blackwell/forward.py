"""Forward attention on Blackwell (sm_100) in Gluon: one warp loads, one issues products, two warpgroups have the softmax.

tcgen05 products read q, k and v from shared memory and weights from tensor memory, and write scores and out to tensor memory. The
two consumer warpgroups have 128 queries each, so that the products of one overlap the softmax of the other (FlashAttention-4, arXiv
2603.05451). Work tiles, bands, masks, mods and results are those of the forward for sm_90.

Products run in the order of issue. PTX guarantees that only for products of one accumulator; kernels of Triton and FlashAttention-4
rely on it for others too. A consumer's next scores are issued after the product that reads its weights, because they overwrite
them. So while one consumer computes its softmax, the other consumer's products run. A barrier that scores are committed to also
covers that product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tcgen05_commit, tcgen05_mma, tma

from flexattn.kernels_triton.blackwell.conditions import forward_tile
from flexattn.kernels_triton.blackwell.tensor_memory import (
    LANES,
    ForwardTiles,
    allocate_forward_tiles,
    fence_after_sync,
    fence_before_sync,
    forward_weights,
    multiply_scores,
    row_layout,
)
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.launch_order import wait_for_previous
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BlackwellTile
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, key_block
from flexattn.kernels_triton.gluon.descriptors import store_rows
from flexattn.kernels_triton.gluon.dropout import dropout_state, kept_by_calls, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Tiles
from flexattn.kernels_triton.gluon.forward_launch import Outputs, launch_forward
from flexattn.kernels_triton.gluon.forward_loader import load_partition
from flexattn.kernels_triton.gluon.forward_rows import (
    Invariants,
    report_max_logit,
    rows_and_heads,
    sink_of_rows,
    statistics_row,
    store_lse,
    store_out_rows,
    store_split_rows,
    sums_with_sink_behind,
    visible_scores,
)
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile, received_tile
from flexattn.kernels_triton.gluon.operands import allocate_blocks, allocate_tiles
from flexattn.kernels_triton.gluon.pairs import allocate_key_pair, allocate_pair
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage, allocate_barriers, allocate_forward_barriers
from flexattn.kernels_triton.gluon.softmax import exponentials
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel


class ProductBarriers(NamedTuple):
    """Barriers between the warp that issues products and the consumers, one for each consumer."""

    scores_full: gl.shared_memory_descriptor  # a block's scores are complete, and so is the previous block's product with v
    weights_full: gl.shared_memory_descriptor  # the weights are complete, and out is rescaled for them
    out_full: gl.shared_memory_descriptor  # a work tile's last product with v is complete


class Buffers(NamedTuple):
    tiles: Tiles  # in shared memory
    barriers: ForwardBarriers
    sums: ForwardTiles  # in tensor memory
    products: ProductBarriers


@gluon.jit
def allocate_product_barriers(CONSUMERS: gl.constexpr):
    return ProductBarriers(
        scores_full=allocate_barriers(CONSUMERS, 1),
        weights_full=allocate_barriers(CONSUMERS, 1),
        out_full=allocate_barriers(CONSUMERS, 1),
    )


class Share(NamedTuple):
    """The blocks of a work tile that one consumer's queries see, by their indices among all blocks that the tile's queries see."""

    begin: int | gl.tensor
    end: gl.tensor
    before: int | gl.tensor  # blocks of the consumer in earlier work tiles


@gluon.jit
def _share_of(CONSUMER: gl.constexpr, before, received, META: gl.constexpr):
    QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
    m_start = received.tile.first_row + CONSUMER * QUERIES
    skipped, amount, _ = blocks_of_consumer(m_start, received.num_blocks, received.block_range, received.band, META)
    return Share(begin=skipped, end=skipped + amount, before=before)


@gluon.jit
def _add_product_with_v(n, n_block, share: Share, CONSUMER: gl.constexpr, buffers: Buffers, META: gl.constexpr):
    # For the n-th block of a work tile, which is the program's n_block-th
    v = buffers.tiles.v.index(pipeline.index(Stage(n_block, META.STAGES))).reshape([META.BLOCK_N, META.V0])
    weights = forward_weights(buffers.sums, CONSUMER, v.dtype, META.BLOCK_N, META)
    mbarrier.wait(buffers.products.weights_full.index(CONSUMER), (share.before + n - share.begin) & 1)
    fence_after_sync()
    tcgen05_mma(weights, v, buffers.sums.out.index(CONSUMER), use_acc=n > share.begin)  # O += P V
    if n == share.end - 1:
        tcgen05_commit(buffers.products.out_full.index(CONSUMER))


@gluon.jit
def _issue_scores(n, n_block, share: Share, q_slot, CONSUMER: gl.constexpr, buffers: Buffers, META: gl.constexpr):
    tiles = buffers.tiles
    index = pipeline.index(Stage(n_block, META.STAGES))
    multiply_scores(tiles.q, q_slot, tiles.k, index, buffers.sums.scores.index(CONSUMER), META)  # S = Q K^T
    tcgen05_commit(buffers.products.scores_full.index(CONSUMER))
    if n == share.end - 1:
        tcgen05_commit(buffers.barriers.q_empty.index(q_slot))


@gluon.jit
def product_partition(args: Arguments, buffers: Buffers, META: gl.constexpr):
    barriers = buffers.barriers
    STAGES: gl.constexpr = META.STAGES
    CONSUMERS: gl.constexpr = META.CONSUMERS
    n_block = 0  # counts the blocks of all work tiles
    n_tile = 0
    before0, before1 = 0, 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        num_blocks = received.num_blocks
        shares = (_share_of(0, before0, received, META), _share_of(1, before1, received, META))
        q_stage = Stage(n_tile, META.Q_STAGES)
        first_slot = pipeline.index(q_stage) * CONSUMERS
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(barriers.q_full.index(first_slot + consumer), pipeline.phase(q_stage))
            is_idle = shares[consumer].end == shares[consumer].begin
            mbarrier.arrive(barriers.q_empty.index(first_slot + consumer), count=1, pred=is_idle)
        for n in range(num_blocks + 1):  # the scores of block n, and the previous block's product with v
            if n < num_blocks:
                pipeline.wait_full(barriers.k_full, Stage(n_block + n, STAGES))
            if n > 0:
                pipeline.wait_full(barriers.v_full, Stage(n_block + n - 1, STAGES))
            for consumer in gl.static_range(CONSUMERS):
                share = shares[consumer]
                if (n > share.begin) & (n <= share.end):
                    _add_product_with_v(n - 1, n_block + n - 1, share, consumer, buffers, META)
                if (n >= share.begin) & (n < share.end):
                    _issue_scores(n, n_block + n, share, first_slot + consumer, consumer, buffers, META)
            if n < num_blocks:
                tcgen05_commit(barriers.k_empty.index(pipeline.index(Stage(n_block + n, STAGES))))
            if n > 0:
                tcgen05_commit(barriers.v_empty.index(pipeline.index(Stage(n_block + n - 1, STAGES))))
        before0 += shares[0].end - shares[0].begin
        before1 += shares[1].end - shares[1].begin
        n_block += num_blocks
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    if n_block > 0:  # the last commit must arrive before the program ends
        pipeline.wait_full(barriers.v_empty, Stage(n_block - 1, STAGES))


class Carry(NamedTuple):
    """Statistics of a consumer's rows over the key blocks so far; their sums of v are in tensor memory."""

    row_max: gl.tensor
    row_sum: gl.tensor
    n_block: int  # counts the consumer's blocks


@gluon.jit
def _rescale_out(out, correction, META: gl.constexpr):
    # Skipped if no row's maximum rose: a lazy kernel rarely rescales a row.
    COLUMNS: gl.constexpr = 32  # at a time: with more, registers spill
    PARTS: gl.constexpr = META.V0 // COLUMNS
    LAYOUT: gl.constexpr = row_layout(COLUMNS)
    if gl.max((correction != 1.0).to(gl.int32), 0) > 0:
        factor = gl.convert_layout(correction, gl.SliceLayout(1, LAYOUT))[:, None]
        for part in gl.static_range(PARTS):
            columns = out.slice(part * COLUMNS, COLUMNS)
            columns.store(columns.load(LAYOUT) * factor)


@gluon.jit
def _take_block(
    iteration, carry: Carry, same: Invariants, buffers: Buffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    products = buffers.products
    DTYPE: gl.constexpr = buffers.tiles.v.dtype
    column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
    mbarrier.wait(products.scores_full.index(CONSUMER), carry.n_block & 1)
    fence_after_sync()
    scores = buffers.sums.scores.index(CONSUMER)
    s, factor = visible_scores(scores.load(row_layout(META.BLOCK_N)), column, is_full, same, True, MODS, META)
    weights, row_max, correction = exponentials(s, gl.max(s, 1), carry.row_max, factor, META)
    row_sum = carry.row_sum * correction + gl.sum(weights, 1)
    if META.HAS_DROPOUT:  # a thread has a row: it draws for each eight neighbouring keys, whose weights it has
        CALLS: gl.constexpr = row_layout(META.BLOCK_N // 8)
        weights = kept_by_calls(weights, same.draws, same.b_h, same.m_start, column, CALLS, META)
    # before out is loaded: there are no registers for both
    forward_weights(buffers.sums, CONSUMER, DTYPE, META.BLOCK_N, META).store(weights.to(DTYPE))
    if iteration > 0:  # this block's scores are complete, so the previous block's product with v has ended
        _rescale_out(buffers.sums.out.index(CONSUMER), correction, META)
    fence_before_sync()
    mbarrier.arrive(products.weights_full.index(CONSUMER), count=1)
    return Carry(row_max=row_max, row_sum=row_sum, n_block=carry.n_block + 1)


class OutRows(NamedTuple):
    """Rows of a consumer, whose sums become its part of out."""

    queries: gl.tensor
    heads: gl.tensor
    lse_row: gl.tensor
    rescale: gl.tensor
    is_empty: bool | gl.tensor  # they see no key, and out is undefined because no product wrote it


@gluon.jit
def _store_out(
    out_rows: OutRows, received: ReceivedTile, CONSUMER: gl.constexpr, args: Arguments, buffers: Buffers, META: gl.constexpr
):
    # Asynchronous: the last part's store may still be in flight on return.
    QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
    PARTS: gl.constexpr = META.OUT_PARTS
    COLUMNS: gl.constexpr = META.V0 // PARTS
    LAYOUT: gl.constexpr = row_layout(COLUMNS)
    tile = received.tile
    factor = gl.convert_layout(out_rows.rescale, gl.SliceLayout(1, LAYOUT))[:, None]
    for part in gl.static_range(PARTS):
        columns = gl.zeros([LANES, COLUMNS], gl.float32, layout=LAYOUT)
        if not out_rows.is_empty:
            columns = buffers.sums.out.index(CONSUMER).slice(part * COLUMNS, COLUMNS).load(LAYOUT) * factor
        if META.IS_SPLIT:
            store_split_rows(columns, part * COLUMNS, received, out_rows.lse_row, out_rows.queries, out_rows.heads, args, META)
        elif META.HEADS < META.GROUP:
            store_out_rows(columns, part * COLUMNS, received, out_rows.queries, out_rows.heads, args, META)
        else:
            token, head = received.start_q + tile.b * args.steps.out.tokens, tile.h + tile.b * args.steps.out.heads
            row = tile.first_row + CONSUMER * QUERIES
            buffer = buffers.tiles.out.index(CONSUMER)
            tma.store_wait(0)  # the previous store has read the buffer
            buffer.reshape([LANES, COLUMNS]).store(columns.to(buffer.dtype))
            fence_async_shared()
            store_rows(args.descriptors.out, token, received.band.len_q, row, head, part * COLUMNS, buffer)


@gluon.jit
def compute_partition(args: Arguments, buffers: Buffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    barriers = buffers.barriers
    num_heads = args.work.num_heads
    GROUP: gl.constexpr = META.GROUP
    SCORES: gl.constexpr = row_layout(META.BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    block_columns = gl.arange(0, META.BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    draws = dropout_state(args.dropout, 0, META)
    n_block = 0
    n_tile = 0
    n_out = 0  # counts the work tiles in which this consumer has key blocks
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        tile, band = received.tile, received.band
        h, b = tile.h, tile.b
        m_start = tile.first_row + CONSUMER * (META.BLOCK_M // META.CONSUMERS // GROUP)
        _, num_consumer_blocks, consumer_range = blocks_of_consumer(m_start, received.num_blocks, received.block_range, band, META)
        rows, h_of_rows = rows_and_heads(m_start, h, band.len_q, ROW, META)
        h_of_scores = h
        if GROUP > 1:
            h_of_scores = h_of_rows[:, None]
        head = head_of(args.scores, b, h_of_scores, band.len_q, band.len_kv, band.shift, MODS, META)
        row_max = gl.full([LANES], float("-inf"), gl.float32, layout=ROW)  # in units of log2
        row_sum = gl.zeros([LANES], gl.float32, layout=ROW)
        if META.HAS_SINK:
            sink = sink_of_rows(tile, h_of_rows, args, META)
            if not META.HAS_MAX_LOGIT:  # max_logit excludes the sink
                row_max = gl.maximum(row_max, sink)
                row_sum += gl.where(row_max == float("-inf"), 0.0, 1.0)
        same = Invariants(
            num_blocks=num_consumer_blocks,
            block_range=consumer_range,
            m_start=m_start,
            rows=rows,
            block_columns=block_columns,
            band=band,
            scale=args.scores.scale,
            head=head,
            draws=draws,
            b_h=b * num_heads + h,
            q_slot=0,
            zeros=0,
        )
        carry = Carry(row_max=row_max, row_sum=row_sum, n_block=n_block)
        for iteration in range(num_consumer_blocks):
            carry = _take_block(iteration, carry, same, buffers, CONSUMER, MODS, META)
        n_block = carry.n_block
        row_max, row_sum = carry.row_max, carry.row_sum
        correction = 1.0
        if META.HAS_MAX_LOGIT:
            report_max_logit(row_max, rows, h_of_rows, band.len_q, args, META)
            if META.HAS_SINK:
                row_max, row_sum, correction = sums_with_sink_behind(row_max, row_sum, sink, META)
        lse_row = statistics_row(received, CONSUMER, rows, h_of_rows, args, META)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees nothing: out 0, lse -inf + 0
        store_lse(row_max, row_sum_or_1, lse_row, rows, received, args, META)
        is_empty = num_consumer_blocks == 0
        mbarrier.wait(buffers.products.out_full.index(CONSUMER), n_out & 1, pred=num_consumer_blocks > 0)
        fence_after_sync()
        n_out += gl.where(is_empty, 0, 1)
        out_rows = OutRows(
            queries=rows,
            heads=h_of_rows,
            lse_row=lse_row,
            rescale=scaled(1.0 / row_sum_or_1, draws, META) * correction,
            is_empty=is_empty,
        )
        _store_out(out_rows, received, CONSUMER, args, buffers, META)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_fwd_blackwell_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    LOADER_REGISTERS: gl.constexpr = 56
    q_tiles = allocate_pair(CONSUMERS * META.Q_STAGES, descriptors.q, META)
    out_tiles = q_tiles.first  # never used
    if not META.IS_SPLIT:
        out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    k_tiles = allocate_key_pair(descriptors.k, META)
    v_tiles = allocate_blocks(META.STAGES, descriptors.v, META.BLOCK_N)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    # One warp releases all stages after its products have read them, and it also receives work tiles.
    barriers = allocate_forward_barriers(1, CONSUMERS + 1, META)
    products = allocate_product_barriers(CONSUMERS)
    sums = allocate_forward_tiles(CONSUMERS, META.BLOCK_N, META.V0)
    buffers = Buffers(tiles=tiles, barriers=barriers, sums=sums, products=products)
    wait_for_previous(META.IS_SPLIT)
    gl.warp_specialize(
        [
            (compute_partition, (args, buffers, 0, MODS, META)),
            (compute_partition, (args, buffers, 1, MODS, META)),
            (product_partition, (args, buffers, META)),
            (load_partition, (args, buffers, META)),
        ],
        [4, 1, 1],
        [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )


def blackwell_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: BlackwellTile | None = None,
    splits: int | None = None,
) -> None:
    """Launches the forward of a call that `forward_unsupported` does not reject; for splits see `launch_forward`."""
    outputs = Outputs(out, lse, max_logit)
    launch_forward(_attn_fwd_blackwell_kernel, problem, outputs, tile or forward_tile(problem), LANES.value, splits=splits)
