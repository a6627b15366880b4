"""Fused backward attention in Gluon for GPUs with mma.sync and cp.async: dk and dv of a block of keys, and its parts of dq.

A program keeps dk and dv in registers, and adds each block's dq to fp32 sums in global memory by atomics, in an arbitrary order. So
the last bits of dq differ from run to run. Scores are transposed: rows are keys. If all warps are along keys, weights and ds stay
in registers as operands of dv and dk (FlashAttention-2, arXiv 2307.08691); otherwise they go through shared memory. q and the
statistics come in a ring, and dout in one buffer, under the products that do not read it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Rows, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    LargeLse,
    QueryHead,
    ScorePlace,
    first_query_head,
    head_at,
    key_block_of_program,
    next_query_block,
    probabilities,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_conversion import convert_dq
from flexattn.kernels_triton.gluon.dropout import dropout_state, scaled
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work
from flexattn.kernels_triton.mma.arguments import product_layout, rows_layout, swizzled
from flexattn.kernels_triton.mma.copies import copy_block
from flexattn.kernels_triton.mma.dq_sums import add_to_sums
from flexattn.kernels_triton.mma.dropout import keeps
from flexattn.kernels_triton.mma.tiles import MmaBackwardTile, backward_tile
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@with_features
class MmaBackwardMeta(NamedTuple):
    """Constants that the backward is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    DIM: int  # width of the tiles of q, k, v and dout
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    WARPS: int
    SCORE_WARPS: int  # warps along the keys in scores and dp; the others are along queries
    KEY_WARPS: int  # the same in dk and dv; the others are along columns
    QUERY_WARPS: int  # warps along the queries in dq
    Q_STAGES: int
    HOLDS_V: bool
    GROUP: int  # heads of a tile, for dropout
    IS_FP8: bool
    ALIGN: int


class MmaBackwardArguments(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    dout: Rows
    dk: Rows
    dv: Rows
    statistics_ptr: Any
    sums_ptr: Any  # the sums of dq, see `dq_sums`
    tiles_of_statistics: int
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # lists of query blocks


class Tiles(NamedTuple):
    """In shared memory: k and v, rings of q and the statistics, dout, weights and ds; v may be in registers."""

    k: Any
    v: Any
    q: Any
    dout: Any
    statistics: Any
    weights: Any
    ds: Any


@gluon.jit
def _scores_of(a, b, zeros, IN_REGISTERS: gl.constexpr):
    # Returns a b^T over the head dim, a few columns at a time unless a is in registers
    A: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, zeros.type.layout, 2)
    WIDTH: gl.constexpr = b.shape[1]
    s = zeros
    if IN_REGISTERS:
        s = mma_v2(a, b.permute((1, 0)).load(B), s)
    else:
        AT_ONCE: gl.constexpr = min(WIDTH, 64)
        for first in gl.static_range(0, WIDTH, AT_ONCE):
            s = mma_v2(a.slice(first, AT_ONCE, 1).load(A), b.slice(first, AT_ONCE, 1).permute((1, 0)).load(B), s)
    return s


@gluon.jit
def _copy_queries(args: MmaBackwardArguments, tiles: Tiles, slot, position: QueryHead, block: Block, META: gl.constexpr):
    # q and the statistics of the block of queries at a position
    BLOCK_M: gl.constexpr = META.BLOCK_M
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [META.WARPS], [0])
    row = query_block(position.n, block.block_range, META)[0]
    base = row_pointer(args.q, block.b, position.h, block.sequence.start_q + row, META)
    copy_block(args.q, tiles.q.index(slot), META.HEAD_DIM_QK, base, block.sequence.len_q - row, META)
    tile = block.first_statistics + (position.h - block.h) * args.tiles_of_statistics + row // BLOCK_M
    if META.BLOCK_SIZE_Q > 0:  # a listed block may be past the end; then the tile of no query is loaded
        tile = gl.where(row < block.sequence.len_q, tile, tile * 0)
    statistics = args.statistics_ptr + tile.to(gl.int64) * (2 * BLOCK_M) + gl.arange(0, 2 * BLOCK_M, layout=LINE)
    async_copy.async_copy_global_to_shared(tiles.statistics.index(slot), statistics)


@gluon.jit
def _copy_dout(args: MmaBackwardArguments, tiles: Tiles, position: QueryHead, block: Block, META: gl.constexpr):
    row = query_block(position.n, block.block_range, META)[0]
    base = row_pointer(args.dout, block.b, position.h, block.sequence.start_q + row, META)
    copy_block(args.dout, tiles.dout, META.HEAD_DIM_V, base, block.sequence.len_q - row, META)


@gluon.jit
def _add_dq(dq, args: MmaBackwardArguments, position: QueryHead, row, block: Block, META: gl.constexpr):
    tile = block.first_statistics + (position.h - block.h) * args.tiles_of_statistics
    first = tile * META.BLOCK_M + row
    add_to_sums(args.sums_ptr + first.to(gl.int64) * META.HEAD_DIM_QK, dq, META.HEAD_DIM_QK)


@gluon.jit
def _add_blocks(args: MmaBackwardArguments, block: Block, iterations, MODS: gl.constexpr, META: gl.constexpr):
    # Returns dk, without the softmax scale, and dv
    DTYPE: gl.constexpr = args.k.ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = META.BLOCK_M
    BLOCK_N: gl.constexpr = META.BLOCK_N
    DIM: gl.constexpr = META.DIM
    WARPS: gl.constexpr = META.WARPS
    Q_STAGES: gl.constexpr = META.Q_STAGES
    SCORES: gl.constexpr = product_layout(META.SCORE_WARPS, WARPS // META.SCORE_WARPS)
    KEYS: gl.constexpr = product_layout(META.KEY_WARPS, WARPS // META.KEY_WARPS)
    QUERIES: gl.constexpr = product_layout(META.QUERY_WARPS, WARPS // META.QUERY_WARPS)
    HOLDS_WEIGHTS: gl.constexpr = META.SCORE_WARPS == WARPS and META.KEY_WARPS == WARPS
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    BESIDE_KEYS: gl.constexpr = gl.DotOperandLayout(1, KEYS, 2)
    STATISTICS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scores = args.scores
    k_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, DIM], swizzled(DIM))
    v_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, DIM], swizzled(DIM))
    first_key = block.sequence.start_kv + block.first_row
    keys_left = block.sequence.len_kv - block.first_row
    copy_block(args.k, k_tile, META.HEAD_DIM_QK, row_pointer(args.k, block.b, block.h_kv, first_key, META), keys_left, META)
    copy_block(args.v, v_tile, META.HEAD_DIM_V, row_pointer(args.v, block.b, block.h_kv, first_key, META), keys_left, META)
    v = v_tile
    if META.HOLDS_V:  # its shared memory is free for other tiles
        async_copy.commit_group()
        async_copy.wait_group(0)
        v = v_tile.load(gl.DotOperandLayout(0, SCORES, 2))
    ds_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    weights_tile = ds_tile
    if not HOLDS_WEIGHTS:
        weights_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    tiles = Tiles(
        k=k_tile,
        v=v,
        q=gl.allocate_shared_memory(DTYPE, [Q_STAGES, BLOCK_M, DIM], swizzled(DIM)),
        dout=gl.allocate_shared_memory(DTYPE, [BLOCK_M, DIM], swizzled(DIM)),
        statistics=gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2 * BLOCK_M], STATISTICS),
        weights=weights_tile,
        ds=ds_tile,
    )
    position, values = first_query_head(block, args.work, scores, MODS, META)
    _copy_queries(args, tiles, 0, position, block, META)
    _copy_dout(args, tiles, position, block, META)
    async_copy.commit_group()
    rows = block.first_row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES)
    no_dq = gl.zeros([BLOCK_M, DIM], gl.float32, layout=QUERIES)
    dk = gl.zeros([BLOCK_N, DIM], gl.float32, layout=KEYS)
    dv = gl.zeros([BLOCK_N, DIM], gl.float32, layout=KEYS)
    draws = dropout_state(args.dropout, block.first_head, META)
    uncut_from = first_uncut_query(block.first_row, BLOCK_N, block.band, META)
    for n in range(iterations):  # counts the blocks of all query heads
        slot = n % Q_STAGES
        has_next = n + 1 < iterations
        following, following_values = next_query_block(position, values, block, args.work, scores, MODS, META)
        row, is_full = query_block(position.n, block.block_range, META)
        is_cut = cuts_block(row, block.first_row, uncut_from, block.band, META)
        head = head_at(position, values, block, scores, META)
        columns = row + block_columns
        i, j = columns[None, :], rows[:, None]
        q = tiles.q.index(slot)
        statistics = tiles.statistics.index(slot)
        async_copy.wait_group(0)  # this block's q, statistics and dout
        s = _scores_of(tiles.k, q, zeros, False)
        s, factor, cap_tanh, score = logits(s, i, j, scores.scale, head, MODS, META)
        place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
        p = probabilities(s, factor, place, statistics.slice(0, BLOCK_M, 0), head, block, MODS, META)
        weights = p.to(DTYPE)
        if META.HAS_DROPOUT:
            keep = keeps(p, draws, position.h, row, block.first_row, META)
            weights = gl.where(keep, p, 0.0).to(DTYPE)
        if not HOLDS_WEIGHTS:
            tiles.weights.store(weights)
        dp = _scores_of(tiles.v, tiles.dout, zeros, META.HOLDS_V)
        if META.HAS_DROPOUT:
            dp = scaled(gl.where(keep, dp, 0.0), draws, META)
        minus_delta = statistics.slice(BLOCK_M, BLOCK_M, 0).load(gl.SliceLayout(0, SCORES))
        ds = through_mods(p * (dp + minus_delta[None, :]), cap_tanh, score, i, j, head, MODS, META).to(DTYPE)
        if Q_STAGES == 2:
            if has_next:
                _copy_queries(args, tiles, 1 - slot, following, block, META)
            async_copy.commit_group()
        tiles.ds.store(ds)
        if HOLDS_WEIGHTS:
            weights_of_keys = gl.convert_layout(weights, OF_KEYS)
        else:
            weights_of_keys = tiles.weights.load(OF_KEYS)
        dv = mma_v2(weights_of_keys, tiles.dout.load(BESIDE_KEYS), dv)
        if has_next:
            _copy_dout(args, tiles, following, block, META)
        async_copy.commit_group()
        if HOLDS_WEIGHTS:
            ds_of_keys = gl.convert_layout(ds, OF_KEYS)
        else:
            ds_of_keys = tiles.ds.load(OF_KEYS)
        ds_of_queries = tiles.ds.permute((1, 0)).load(gl.DotOperandLayout(0, QUERIES, 2))
        dq = mma_v2(ds_of_queries, tiles.k.load(gl.DotOperandLayout(1, QUERIES, 2)), no_dq)
        if META.BLOCK_SIZE_Q > 0:
            if row < block.sequence.len_q:  # no row of this head is past the end
                _add_dq(dq, args, position, row, block, META)
        else:
            _add_dq(dq, args, position, row, block, META)
        dk = mma_v2(ds_of_keys, q.load(BESIDE_KEYS), dk)
        if Q_STAGES == 1:
            if has_next:
                _copy_queries(args, tiles, slot, following, block, META)
            async_copy.commit_group()
        position, values = following, following_values
    async_copy.wait_group(0)  # a program must not end under a copy
    return dk, scaled(dv, draws, META)


@gluon.jit
def _store_gradient(x: Rows, total, HEAD_DIM: gl.constexpr, block: Block, META: gl.constexpr):
    LAYOUT: gl.constexpr = rows_layout(META.DIM, META.WARPS)
    total = gl.convert_layout(total.to(x.ptr.dtype.element_ty), LAYOUT)
    rows = block.first_row + gl.arange(0, META.BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, META.DIM, layout=gl.SliceLayout(0, LAYOUT))
    pointers = row_pointer(x, block.b, block.h_kv, block.sequence.start_kv + rows, META)
    inside = (rows < block.sequence.len_kv)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(pointers[:, None] + columns[None, :], total, mask=inside)


@hopper_kernel
def _attn_bwd_mma_kernel(args: MmaBackwardArguments, MODS: gl.constexpr, META: gl.constexpr):
    BLOCK_N: gl.constexpr = META.BLOCK_N
    DIM: gl.constexpr = META.DIM
    KEYS: gl.constexpr = product_layout(META.KEY_WARPS, META.WARPS // META.KEY_WARPS)
    block = key_block_of_program(args, META)
    iterations = block.num_blocks * args.work.group_size
    dk = gl.zeros([BLOCK_N, DIM], gl.float32, layout=KEYS)
    dv = gl.zeros([BLOCK_N, DIM], gl.float32, layout=KEYS)
    if iterations > 0:
        dk, dv = _add_blocks(args, block, iterations, MODS, META)
    _store_gradient(args.dv, dv, META.HEAD_DIM_V, block, META)
    _store_gradient(args.dk, dk * args.scores.scale, META.HEAD_DIM_QK, block, META)


def mma_backward(call: Backward, tile: MmaBackwardTile | None = None) -> None:
    """Launches the backward of a call that `backward_unsupported` does not reject; the last bits of dq differ from run to run."""
    x = call.problem
    tile = tile or backward_tile(x)
    meta = MmaBackwardMeta(
        **x.features._asdict(),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DIM=tile.head_dim,
        HEAD_DIM_QK=x.q.shape[-1],
        HEAD_DIM_V=x.v.shape[-1],
        WARPS=tile.warps,
        SCORE_WARPS=tile.score_warps,
        KEY_WARPS=tile.key_warps,
        QUERY_WARPS=tile.query_warps,
        Q_STAGES=tile.q_stages,
        HOLDS_V=tile.holds_v,
        GROUP=1,
        IS_FP8=False,
        ALIGN=8,
    )
    statistics, tiles, large, dq_sums, _ = tiled_statistics(call, tile.block_m, with_dq_sums=True)
    assert dq_sums is not None
    bytes_per_head = 12 * tile.head_dim * max(x.longest_q, x.longest_kv)  # approximate, as for other fused backwards
    work, programs = backward_work(x, tile.block_n, "kv", bytes_per_head, is_fused=True)
    arguments = MmaBackwardArguments(
        q=rows_of(x.q, meta),
        k=rows_of(x.k, meta),
        v=rows_of(x.v, meta),
        dout=rows_of(call.dout, meta),
        dk=rows_of(call.dk, meta),
        dv=rows_of(call.dv, meta),
        statistics_ptr=statistics,
        sums_ptr=dq_sums,
        tiles_of_statistics=tiles,
        large=LargeLse(is_any_ptr=large.is_any, lse_ptr=large.lse),
        work=work,
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        band=x.band,
        scores=x.scores,
        dropout=x.dropout,
        lists=x.lists("q"),
    )
    launch_tile = Tile(tile.block_m, tile.block_n, tile.warps, tile.q_stages)
    launch(_attn_bwd_mma_kernel, programs, x.device, launch_tile, (arguments, x.mods, meta))
    convert_dq(x, dq_sums, tiles, tile.block_m, call.dq, in_cores=True)
    if x.has_lengths:
        zero_padding(x, call.dq, "q")
        zero_padding(x, call.dk, "kv")
        zero_padding(x, call.dv, "kv")
