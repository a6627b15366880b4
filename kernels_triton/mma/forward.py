"""Forward attention in Gluon for GPUs with mma.sync and cp.async, in the arrangement of FlashAttention-2 (arXiv 2307.08691).

A program has a tile of queries of one head, or of several that share a key head. Each warp has all keys of its rows, so warps
exchange nothing, and weights stay in registers as an operand of the product with v. Blocks of keys come by cp.async while others
are multiplied. They run from the last one down: the blocks that the band's right side or the end cuts, then those that need no
mask, then those that the left side cuts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Parts
from flexattn.kernels_triton.common.crossovers import SPLIT_PROGRAMS
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.plan_pieces import piece_of_part
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.sequences import sequence_of
from flexattn.kernels_triton.common.split_kv import PlannedTile, combine_parts, number_of_splits, split_results, tiles_and_room
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import slots_of_heads
from flexattn.kernels_triton.gluon import forward_rows
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_keys, cut_key_lists, key_block
from flexattn.kernels_triton.gluon.conditions import heads_of_a_tile
from flexattn.kernels_triton.gluon.descales import descales_of
from flexattn.kernels_triton.gluon.dropout import dropout_state, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Cut, Results
from flexattn.kernels_triton.gluon.forward_launch import SplitKeys, forward_arguments
from flexattn.kernels_triton.gluon.forward_work import (
    ReceivedTile,
    WorkTile,
    blocks_of_tile,
    num_tiles_of_programs,
    tile_of_work,
    unmasked_blocks,
)
from flexattn.kernels_triton.gluon.fp8_operands import load_descale
from flexattn.kernels_triton.gluon.masking import band_of_sequence
from flexattn.kernels_triton.gluon.softmax import exponentials, for_threads, rescaled, sums_of_threads
from flexattn.kernels_triton.gluon.work_order import forward_work
from flexattn.kernels_triton.mma import fp8
from flexattn.kernels_triton.mma.arguments import (
    MmaArguments,
    allocate_parts,
    columns_of_part,
    forward_meta,
    product_layout,
    rows_layout,
)
from flexattn.kernels_triton.mma.copies import Head, copy_keys, copy_queries, keep_until_here
from flexattn.kernels_triton.mma.dropout import kept
from flexattn.kernels_triton.mma.products import add_product, at, load_operand, product_of_rows
from flexattn.kernels_triton.mma.tiles import MmaTile, forward_tile
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


class Sums(NamedTuple):
    """The softmax of a tile's rows so far."""

    row_max: Any
    row_sum: Any
    acc0: Any  # the columns of both parts of v
    acc1: Any
    descale_v: Any  # in FP8, of the block that was added last


class Tiles(NamedTuple):
    """q, in shared memory or in registers, and the rings of k and v."""

    q: Parts
    k: Parts
    v: Parts


class Loads(NamedTuple):
    """The keys and values of a tile in global memory, and the shared memory that blocks of them are copied to."""

    k: Head
    v: Head
    tiles: Tiles
    scales: Any  # in FP8, `HeadScales`


@gluon.jit
def _scores(tiles: Tiles, slot, zeros, META: gl.constexpr):
    return product_of_rows(tiles.q, fp8.as_numbers(at(tiles.k, slot), META), zeros, META.HOLDS_Q, META.QK1 > 0)


@gluon.jit
def _add_values(acc, weights, v, META: gl.constexpr):
    if META.IS_FP8:
        return fp8.add_fp8_values(acc, weights, v, META)
    else:
        return add_product(acc, weights, v)


@gluon.jit
def _copy_k(loads: Loads, slot, column, META: gl.constexpr):
    copy_keys(loads.k, loads.tiles.k, slot, column, META.QK0, META.HEAD_DIM_QK, META)


@gluon.jit
def _copy_v(loads: Loads, slot, column, META: gl.constexpr):
    copy_keys(loads.v, loads.tiles.v, slot, column, META.VALUES0, META.HEAD_DIM_V, META)


@gluon.jit
def _take_blocks(
    sums: Sums,
    first,
    end,
    same: forward_rows.Invariants,
    loads: Loads,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Adds the blocks of iterations `first` up to `end`. IS_CUT: they may need a mask
    tiles = loads.tiles
    DTYPE: gl.constexpr = tiles.k.first.dtype
    PRODUCT: gl.constexpr = same.zeros.type.layout
    row_max, row_sum, acc0, acc1, descale_v = sums.row_max, sums.row_sum, sums.acc0, sums.acc1, sums.descale_v
    for iteration in range(first, end):
        n = same.num_blocks - 1 - iteration
        column, is_full = key_block(n, same.block_range, META)
        async_copy.wait_group(0)  # this block's k, and with two stages its v
        if META.STAGES == 2:
            slot = iteration % 2
            if n > 0:
                following = key_block(n - 1, same.block_range, META)[0]
                _copy_k(loads, 1 - slot, following, META)
                _copy_v(loads, 1 - slot, following, META)
            async_copy.commit_group()
            s = _scores(tiles, slot, same.zeros, META)
        else:
            slot = 0
            _copy_v(loads, slot, column, META)
            async_copy.commit_group()
            s = _scores(tiles, slot, same.zeros, META)
            async_copy.wait_group(0)  # this block's v
            if n > 0:
                _copy_k(loads, slot, key_block(n - 1, same.block_range, META)[0], META)
            async_copy.commit_group()
        if META.IS_FP8:
            descale = fp8.score_descale(loads.scales, column, META)
            if META.IS_MODIFIED:
                s = s * descale[:, None]
        s, factor = forward_rows.visible_scores(s, column, is_full, same, IS_CUT, MODS, META)
        if META.IS_FP8:
            factor = fp8.factor_of_rows(factor, descale, same.scale, META)
        p, row_max, correction = exponentials(s, gl.max(s, 1), row_max, factor, META)
        row_sum = row_sum * for_threads(correction, row_sum) + sums_of_threads(p, META.BLOCK_N)
        p = kept(p, same.draws, same.b_h, same.m_start, column, META)
        if META.IS_FP8:
            weights = fp8.to_operand(p, PRODUCT)
        else:
            weights = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, PRODUCT, 2))
        if META.HAS_BLOCK_SCALES:
            scales, previous = loads.scales, descale_v
            descale_v = load_descale(scales.v_blocks, scales.b, scales.h_kv, column, scales.len_kv)
            correction = correction * (previous / descale_v)
        acc0 = _add_values(rescaled(acc0, correction, META), weights, tiles.v.first.index(slot), META)
        if META.VALUES1 > 0:
            acc1 = _add_values(rescaled(acc1, correction, META), weights, tiles.v.second.index(slot), META)
    return Sums(row_max=row_max, row_sum=row_sum, acc0=acc0, acc1=acc1, descale_v=descale_v)


@gluon.jit
def _store_columns(
    acc, COLUMN: gl.constexpr, received: ReceivedTile, lse_row, rows, h_of_rows, args: Arguments, META: gl.constexpr
):
    acc = fp8.columns_in_order(acc, META)
    if META.IS_SPLIT:
        forward_rows.store_split_rows(acc, COLUMN, received, lse_row, rows, h_of_rows, args, META)
    else:  # in 16 bits and in rows, so that a thread stores 16 bytes
        DTYPE: gl.constexpr = args.results.out.ptr.dtype.element_ty
        columns = gl.convert_layout(acc.to(DTYPE), rows_layout(acc.shape[1], META.WARPS))
        forward_rows.store_out_rows(columns, COLUMN, received, rows, h_of_rows, args, META)


@gluon.jit
def _planned_tile(part, args: Arguments, META: gl.constexpr):
    # Returns the work tile of the plan's piece that writes a part; if there is none, it has no blocks
    plan = args.plan
    piece = piece_of_part(plan, part)
    return WorkTile(
        first_row=piece.entry % plan.blocks * (META.BLOCK_M // META.GROUP),
        h=piece.head * META.HEADS,
        b=piece.entry // plan.blocks,
        split=piece.first,
        split_end=piece.end,
        part=part,
    )


@gluon.jit
def _compute_tile(tile: WorkTile, mma_args: MmaArguments, MODS: gl.constexpr, META: gl.constexpr):
    args = mma_args.call
    DTYPE: gl.constexpr = mma_args.k.ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = META.BLOCK_M
    BLOCK_N: gl.constexpr = META.BLOCK_N
    VALUES0: gl.constexpr = META.VALUES0
    VALUES1: gl.constexpr = META.VALUES1
    WORD: gl.constexpr = 2 if META.IS_FP8 else 1  # numbers
    PRODUCT: gl.constexpr = product_layout(META.WARPS)
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    h, b = tile.h, tile.b
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    band = band_of_sequence(args.band, len_q, len_kv)
    cut = ()
    if META.BLOCK_SIZE_Q > 0:
        cut = cut_key_lists(tile.first_row, b, h, band, args.lists, META)
    num_blocks, block_range = blocks_of_tile(tile, cut, band, args, META)
    is_whole = True
    if META.IS_PLANNED:
        is_whole = num_blocks == blocks_of_keys(tile.first_row, b, h, band, args.lists, META, BLOCK_M // META.GROUP)[0]
    received = ReceivedTile(
        tile=tile,
        start_q=sequence.start_q,
        band=band,
        num_blocks=num_blocks,
        block_range=block_range,
        is_whole=is_whole,
        unmasked=(),
        descales=(),
    )
    q_tiles = allocate_parts(DTYPE, 1, BLOCK_M, META.QK0, META.QK1)
    copy_queries(mma_args.q, q_tiles, received, META)
    q = fp8.as_numbers(at(q_tiles, 0), META)
    if META.HOLDS_Q:
        async_copy.commit_group()
        async_copy.wait_group(0)
        q = load_operand(q, gl.DotOperandLayout(0, PRODUCT, 4 if META.IS_FP8 else 2))
    k_tiles = allocate_parts(DTYPE, META.STAGES, BLOCK_N, META.QK0, META.QK1)
    v_tiles = allocate_parts(DTYPE, META.STAGES, BLOCK_N, VALUES0, VALUES1)
    tiles = Tiles(q=q, k=k_tiles, v=v_tiles)
    h_kv = h // args.work.group_size
    b_kv = b * 0 if META.HAS_PAGES else b
    k, v = mma_args.k, mma_args.v
    scales, descale_v = (), 1.0
    if META.IS_FP8:
        scales = fp8.head_scales(args.descales, received, h_kv, ROW, META)
        descale_v = scales.v
    loads = Loads(
        k=Head(x=k, base=row_pointer(k, b_kv, h_kv, sequence.start_kv, META), b=b, length=len_kv, pages=args.pages),
        v=Head(x=v, base=row_pointer(v, b_kv, h_kv, sequence.start_kv, META), b=b, length=len_kv, pages=args.pages),
        tiles=tiles,
        scales=scales,
    )
    if num_blocks > 0:
        column = key_block(num_blocks - 1, block_range, META)[0]
        _copy_k(loads, 0, column, META)
        if META.STAGES == 2:
            _copy_v(loads, 0, column, META)
    async_copy.commit_group()
    rows, h_of_rows = forward_rows.rows_and_heads(tile.first_row, h, len_q, ROW, META)
    h_of_scores = h
    if META.GROUP > 1:
        h_of_scores = h_of_rows[:, None]
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=PRODUCT)
    same = forward_rows.Invariants(
        num_blocks=num_blocks,
        block_range=block_range,
        m_start=tile.first_row,
        rows=rows,
        block_columns=gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, PRODUCT)),
        band=band,
        scale=args.scores.scale,
        head=head_of(args.scores, b, h_of_scores, len_q, len_kv, band.shift, MODS, META),
        draws=dropout_state(args.dropout, 0, META),
        b_h=b * args.work.num_heads + h,
        q_slot=0,
        zeros=zeros,
    )
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROW)  # in units of log2
    row_sum = sums_of_threads(zeros, BLOCK_N)
    if META.HAS_SINK:
        sink = forward_rows.sink_of_rows(tile, h_of_rows, args, META)
        if not META.HAS_MAX_LOGIT:  # max_logit excludes the sink
            row_max, row_sum = forward_rows.sums_with_sink(row_max, row_sum, sink)
            if META.IS_FP8:
                row_sum = fp8.scaled_sink_sum(row_max, row_sum, META)
    acc0 = gl.zeros([BLOCK_M, VALUES0 * WORD], gl.float32, layout=PRODUCT)
    acc1 = acc0
    if VALUES1 > 0:
        acc1 = gl.zeros([BLOCK_M, VALUES1 * WORD], gl.float32, layout=PRODUCT)
    sums = Sums(row_max=row_max, row_sum=row_sum, acc0=acc0, acc1=acc1, descale_v=descale_v)
    unmasked = unmasked_blocks(tile.first_row, BLOCK_M // META.GROUP, num_blocks, block_range, band, 1, META)
    begin = gl.minimum(unmasked.begin, num_blocks)
    end = gl.minimum(gl.maximum(unmasked.end, begin), num_blocks)  # a tile of no blocks has no iteration that is always masked
    sums = _take_blocks(sums, 0, begin, same, loads, True, MODS, META)
    sums = _take_blocks(sums, begin, end, same, loads, False, MODS, META)
    if META.HAS_LEFT or META.BLOCK_SIZE_Q > 0:
        sums = _take_blocks(sums, end, num_blocks, same, loads, True, MODS, META)
    async_copy.wait_group(0)  # a program must not end under a copy
    if not META.HOLDS_Q:
        keep_until_here(q_tiles, META.QK1)
    row_max, acc0, acc1 = sums.row_max, sums.acc0, sums.acc1
    row_sum = gl.convert_layout(gl.sum(sums.row_sum, 1), ROW)
    correction = 1.0
    if META.HAS_MAX_LOGIT:
        forward_rows.report_max_logit(row_max, rows, h_of_rows, len_q, args, META)
        if META.HAS_SINK:
            row_max, row_sum, correction = forward_rows.sums_with_sink_behind(row_max, row_sum, sink, META)
    lse_row = forward_rows.statistics_row(received, 0, rows, h_of_rows, args, META)
    row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    forward_rows.store_lse(row_max, row_sum_or_1, lse_row, rows, received, args, META)
    rescale = (scaled(1.0 / row_sum_or_1, same.draws, META) * correction)[:, None]
    if META.IS_FP8:
        rescale = rescale * sums.descale_v
    _store_columns(acc0 * rescale, 0, received, lse_row, rows, h_of_rows, args, META)
    if VALUES1 > 0:
        _store_columns(acc1 * rescale, VALUES0 * WORD, received, lse_row, rows, h_of_rows, args, META)


@hopper_kernel
def _attn_fwd_mma_kernel(args: MmaArguments, MODS: gl.constexpr, META: gl.constexpr):
    t = gl.program_id(0)
    if META.IS_PLANNED:  # a program for each part that the plan may have
        planned = _planned_tile(t, args.call, META)
        if planned.split < planned.split_end:
            _compute_tile(planned, args, MODS, META)
    elif META.HAS_LENGTHS:  # there are programs for the most tiles that the lengths may need
        amount = num_tiles_of_programs(args.call, META)
        if t < amount:
            _compute_tile(tile_of_work(t, amount, args.call, META), args, MODS, META)
    else:
        _compute_tile(tile_of_work(t, gl.num_programs(0), args.call, META), args, MODS, META)


def mma_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: MmaTile | None = None,
    splits: int | None = None,
) -> None:
    """Launches the forward of a call that `forward_unsupported` does not reject; for splits see `launch_forward`."""
    x = problem
    tile = tile or forward_tile(x)
    group = heads_of_a_tile(x, tile)
    tiles, room = tiles_and_room(x, tile, group, SPLIT_PROGRAMS)
    splits = number_of_splits(x, tiles, room) if splits is None else splits
    queries = tile.block_m // slots_of_heads(group)
    planned = PlannedTile(heads=group, queries=queries, seen=queries, keys=tile.block_n, writes_whole=True)
    plan, parts = split_results(x, planned, splits, room, lse, columns_of_part(x))
    cut = Cut(parts is not None, plan is not None)
    meta = forward_meta(x, tile, group, cut, has_max_logit=max_logit is not None)
    work = forward_work(x, queries, group, has_table=x.has_lengths and plan is None)
    if work.table_ptr is not None:
        tiles = (work.table_ptr.shape[0] - 2) * (x.num_heads // group)
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    results = Results(
        lse_ptr=lse if parts is None else parts.lse,
        max_logit_ptr=max_logit,
        parts_ptr=None if parts is None else parts.out,
        whole_lse_ptr=None if plan is None else lse,
        out=rows_of(out, meta),
    )
    call = forward_arguments(x, None, None, results, work, SplitKeys(splits if splits > 1 else None, plan))
    if x.is_fp8:
        call = call._replace(descales=descales_of(x))
    arguments = MmaArguments(
        q=rows_of(fp8.words(x.q), meta), k=rows_of(fp8.words(x.k), meta), v=rows_of(fp8.words(x.v), meta), call=call
    )
    launch_tile = Tile(tile.block_m, tile.block_n, tile.warps, tile.num_stages)
    programs = tiles * splits if plan is None else plan.num_parts
    launch(_attn_fwd_mma_kernel, programs, out.device, launch_tile, (arguments, x.mods, meta))
    if parts is not None:
        combine_parts(x, parts, (out, lse), plan, planned)
    elif x.has_padding_q:
        zero_padding(x, out, "q", lse)
