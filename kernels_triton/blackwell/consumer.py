"""A consumer of the forward for sm_100: a warpgroup with the softmax of 128 rows, the rescaling of their sums, and the results."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tma

from flexattn.kernels_triton.blackwell.pipeline import Buffers
from flexattn.kernels_triton.blackwell.tensor_memory import LANES, fence_after_sync, fence_before_sync, forward_weights, row_layout
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, key_block
from flexattn.kernels_triton.gluon.descriptors import store_rows
from flexattn.kernels_triton.gluon.dropout import dropout_state, kept_by_calls, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments
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
from flexattn.kernels_triton.gluon.softmax import exponentials
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile


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
