"""Rows of a consumer of the forward: visible scores, initial values of sums, and the storing of results."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.exponents import LN2, LOG2E, exponent_factor, log_of_sum, scaled_row_max
from flexattn.kernels_triton.common.heads import shows_block
from flexattn.kernels_triton.common.plan_pieces import first_row_of_part
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.split_ranges import part_row
from flexattn.kernels_triton.gluon.dropout import DropoutState
from flexattn.kernels_triton.gluon.forward_arguments import Arguments
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile, WorkTile
from flexattn.kernels_triton.gluon.fp8_operands import P_SHIFT
from flexattn.kernels_triton.gluon.masking import SequenceBand, apply_mask_mod, mask_keys
from flexattn.kernels_triton.gluon.softmax import for_threads


class Invariants(NamedTuple):
    """Values that are constant for all key blocks that a consumer's queries see."""

    num_blocks: int | gl.tensor
    block_range: int | gl.tensor  # argument of `key_block`
    m_start: gl.tensor  # the first of the consumer's queries
    rows: gl.tensor
    block_columns: gl.tensor
    band: SequenceBand
    scale: gl.tensor
    head: Head
    draws: DropoutState
    b_h: gl.tensor
    q_slot: int
    zeros: int | gl.tensor


@gluon.jit
def mask_block(s, rows, columns, column, m_start, band: SequenceBand, META: gl.constexpr):
    # Masks by the band and the sequence's end; a scalar branch, so that blocks which neither cuts do not pay for it.
    QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
    is_cut = column + s.shape[1] > band.len_kv
    if META.HAS_RIGHT:
        is_cut = is_cut | (column + s.shape[1] > m_start + band.shift + 1 + band.right)
    if META.HAS_LEFT:
        is_cut = is_cut | (column < m_start + band.shift + QUERIES - 1 - band.left)
    if is_cut:
        s = mask_keys(s, rows, columns, band, META)
    return s


@gluon.jit
def visible_scores(qk, column, is_full, same: Invariants, IS_CUT: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    # Returns (scores of the products with the key block at `column`, -inf if hidden; their factor in the exponent)
    columns = column + same.block_columns
    i, j = same.rows[:, None], columns[None, :]
    s, factor, _cap_tanh, _score = logits(qk, i, j, same.scale, same.head, MODS, META)
    if IS_CUT:
        s = mask_block(s, same.rows, columns, column, same.m_start, same.band, META)
    if IS_CUT or META.BLOCK_SIZE_Q == 0:
        if META.ASKS_OF_BLOCKS:
            QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
            if not shows_block(same.head, same.m_start, QUERIES, column, qk.shape[1], MODS):
                s = apply_mask_mod(s, i, j, is_full, same.head, MODS, META)
        else:
            s = apply_mask_mod(s, i, j, is_full, same.head, MODS, META)
    return s, factor


@gluon.jit
def rows_and_heads(m_start, h, len_q, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns (query, head) of each row of a consumer whose first query is m_start; the heads are one number if there is only one
    GROUP: gl.constexpr = META.GROUP
    ROWS: gl.constexpr = META.BLOCK_M // META.CONSUMERS
    rows = m_start + gl.arange(0, ROWS, layout=LAYOUT)
    if GROUP > 1:
        in_tile = gl.arange(0, ROWS, layout=LAYOUT)
        rows = m_start + in_tile // GROUP
        head_in_tile = in_tile % GROUP
        if META.HEADS < GROUP:  # rows of no head count as rows past the sequence's end
            rows = gl.where(head_in_tile < META.HEADS, rows, len_q)
            head_in_tile = gl.minimum(head_in_tile, META.HEADS - 1)
        return rows, h + head_in_tile
    else:
        return rows, h


@gluon.jit
def sink_of_rows(tile: WorkTile, h_of_rows, args: Arguments, META: gl.constexpr):
    # Returns the sink's logit, in units of log2 unless logits are unbounded; only the first split has it
    sink = 0.0
    if META.HAS_OFFSET:
        sink = gl.load(args.softmax_offset_ptr + h_of_rows).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
    if META.IS_SPLIT:
        sink = gl.where(tile.split == 0, sink, float("-inf"))
    return sink


@gluon.jit
def sums_with_sink(row_max, row_sum, sink):
    row_max = gl.maximum(row_max, sink)
    row_sum = row_sum + for_threads(gl.where(row_max == float("-inf"), 0.0, 0.25), row_sum)  # a quarter in each thread
    return row_max, row_sum


@gluon.jit
def report_max_logit(row_max, rows, h_of_rows, len_q, args: Arguments, META: gl.constexpr):
    head_pointers = args.results.max_logit_ptr + (gl.zeros_like(rows) + h_of_rows)
    gl.atomic_max(head_pointers, row_max * (1.0 if META.IS_UNBOUNDED else LN2), mask=rows < len_q, sem="relaxed")


@gluon.jit
def sums_with_sink_behind(row_max, row_sum, sink, META: gl.constexpr):
    # Adds the sink to rows whose maximum was reported without it; also returns the correction factor of their sums
    seen = row_max
    row_max = gl.maximum(row_max, sink)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        scaled_max = scaled_row_max(row_max, factor, 0.0)
        correction = gl.exp2(scaled_row_max(seen, factor, 0.0) - scaled_max)
        row_sum = row_sum * correction + gl.exp2(gl.fma(sink + gl.zeros_like(factor), factor, -scaled_max))
    else:
        scaled_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        correction = gl.exp2(seen - scaled_max)
        row_sum = row_sum * correction + gl.exp2(sink - scaled_max)
    return row_max, row_sum, correction


@gluon.jit
def statistics_row(received: ReceivedTile, CONSUMER: gl.constexpr, rows, h_of_rows, args: Arguments, META: gl.constexpr):
    # Returns the index of a sequence's first query, for each row's head, in lse or in a part
    num_heads = args.work.num_heads
    num_tokens_q = args.lengths_q.num_tokens
    batch = args.lengths_q.batch
    tile = received.tile
    lse_row = (h_of_rows if META.IS_RAGGED_Q else tile.b * num_heads + h_of_rows).to(gl.int64) * num_tokens_q + received.start_q
    if META.IS_PLANNED:  # `rows` are added to it
        ROWS: gl.constexpr = META.BLOCK_M // META.CONSUMERS
        row_in_tile = CONSUMER * ROWS + gl.arange(0, ROWS, layout=rows.type.layout)
        part_row_of_rows = first_row_of_part(args.plan, tile.part) + row_in_tile - rows
        lse_row = gl.where(received.is_whole, lse_row, part_row_of_rows)
    elif META.IS_SPLIT:
        lse_row = lse_row + part_row(tile.split, batch, num_heads, num_tokens_q, META)
    return lse_row


@gluon.jit
def store_lse(row_max, row_sum_or_1, lse_row, rows, received: ReceivedTile, args: Arguments, META: gl.constexpr):
    SHIFT: gl.constexpr = P_SHIFT if META.IS_FP8 else 0.0
    lse_ptr = args.results.lse_ptr
    len_q = received.band.len_q
    if META.IS_PLANNED:
        lse_ptr = gl.where(received.is_whole, args.results.whole_lse_ptr, lse_ptr)
    num_heads = args.work.num_heads
    num_tokens_q = args.lengths_q.num_tokens
    batch = args.lengths_q.batch
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        lse, lost = log_of_sum(row_max, factor, scaled_row_max(row_max, factor, SHIFT), row_sum_or_1)
        if META.IS_PLANNED:
            lost_row = lse_row + first_row_of_part(args.plan, args.plan.num_parts)
            gl.store(args.results.lse_ptr + lost_row + rows, lost, mask=(rows < len_q) & ~received.is_whole)
        elif META.IS_SPLIT:
            lost_row = lse_row + part_row(args.num_splits, batch, num_heads, num_tokens_q, META)
            gl.store(lse_ptr + lost_row + rows, lost, mask=rows < len_q)
        gl.store(lse_ptr + lse_row + rows, lse, mask=rows < len_q)
    else:
        gl.store(lse_ptr + lse_row + rows, (row_max + gl.log2(row_sum_or_1) - SHIFT) * LN2, mask=rows < len_q)


@gluon.jit
def _store_part(acc, COLUMN: gl.constexpr, lse_row, rows, len_q, args: Arguments, META: gl.constexpr):
    # Stored in fp32, for which shared memory has no room; few of the rows are queries.
    OUT: gl.constexpr = acc.type.layout
    part_rows = gl.convert_layout((lse_row + rows) * META.V0, gl.SliceLayout(1, OUT))[:, None]
    is_query = gl.convert_layout(rows < len_q, gl.SliceLayout(1, OUT))[:, None]
    part_columns = COLUMN + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))[None, :]
    gl.store(args.results.parts_ptr + part_rows + part_columns, acc, mask=is_query)


@gluon.jit
def store_out_rows(acc, COLUMN: gl.constexpr, received: ReceivedTile, rows, h_of_rows, args: Arguments, META: gl.constexpr):
    # Stores the columns of out from COLUMN on from registers; each row has its own token and head
    LAYOUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    out = args.results.out
    pointers = row_pointer(out, received.tile.b, h_of_rows, received.start_q + rows, META)
    columns = COLUMN + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    is_query = gl.convert_layout(rows < received.band.len_q, ROW)[:, None]
    inside = is_query & (columns < META.WIDTH_V)[None, :]
    gl.store(gl.convert_layout(pointers, ROW)[:, None] + columns[None, :], acc.to(out.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_split_rows(
    acc, COLUMN: gl.constexpr, received: ReceivedTile, lse_row, rows, h_of_rows, args: Arguments, META: gl.constexpr
):
    # Stores the part of a split, or out of a tile that is not cut
    if META.IS_PLANNED:
        if received.is_whole:
            store_out_rows(acc, COLUMN, received, rows, h_of_rows, args, META)
        else:
            _store_part(acc, COLUMN, lse_row, rows, received.band.len_q, args, META)
    else:
        _store_part(acc, COLUMN, lse_row, rows, received.band.len_q, args, META)
