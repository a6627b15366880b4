"""Fused backward attention in Gluon for GPUs with mma.sync and cp.async: dk and dv of a block of keys, and its parts of dq.

A program keeps dk and dv in registers, and adds each block's dq to fp32 sums in global memory by atomics, in an arbitrary order. So
the last bits of dq differ from run to run; `backward_dq` computes dq in a kernel of its own. Scores are transposed: rows are keys.
If all warps are along keys, weights and ds stay in registers as operands of dv and dk (FlashAttention-2, arXiv 2307.08691);
otherwise they go through shared memory. q and the statistics come in a ring, and dout in one buffer, under the products that do
not read it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Parts, Rows, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.preprocess import Tiled, tiled_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import split_head_dim
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
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_conversion import convert_dq
from flexattn.kernels_triton.gluon.dropout import dropout_state, scaled
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work
from flexattn.kernels_triton.mma.arguments import allocate_parts, product_layout, swizzled
from flexattn.kernels_triton.mma.copies import copy_block, keep_until_here
from flexattn.kernels_triton.mma.dropout import keeps
from flexattn.kernels_triton.mma.products import (
    Destination,
    add_product,
    at,
    load_operand,
    product_of_rows,
    store_part,
    zeros_of_part,
)
from flexattn.kernels_triton.mma.tiles import MmaBackwardTile, backward_tile
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.gluon_names import load_elements
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@with_features
class MmaBackwardMeta(NamedTuple):
    """Constants that the backward is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    QK0: int  # widths of the one or two parts of a head dim
    QK1: int
    V0: int
    V1: int
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    WARPS: int
    SCORE_WARPS: int  # warps along the keys in scores and dp; the others are along queries
    KEY_WARPS: int  # the same in dk and dv; the others are along columns
    QUERY_WARPS: int  # warps along the queries in dq
    Q_STAGES: int
    HOLDS_V: bool
    ADDS_DQ: bool  # False: the kernel computes dk and dv alone
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
    sums_ptr: Any  # the sums of dq, see `_add_to_sums`
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

    k: Parts
    v: Parts
    q: Parts
    dout: Parts
    statistics: Any
    weights: Any
    ds: Any


class Sums(NamedTuple):
    """dk and dv of a block of keys, the columns of both parts; without a second part the first is repeated."""

    dk0: Any
    dk1: Any
    dv0: Any
    dv1: Any


@gluon.jit
def _copy_queries(args: MmaBackwardArguments, tiles: Tiles, slot, position: QueryHead, block: Block, META: gl.constexpr):
    # q and the statistics of the block of queries at a position
    BLOCK_M: gl.constexpr = META.BLOCK_M
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [META.WARPS], [0])
    row = query_block(position.n, block.block_range, META)[0]
    base = row_pointer(args.q, block.b, position.h, block.sequence.start_q + row, META)
    copy_block(args.q, tiles.q, slot, META.QK0, META.HEAD_DIM_QK, base, block.sequence.len_q - row, META)
    tile = block.first_statistics + (position.h - block.h) * args.tiles_of_statistics + row // BLOCK_M
    if META.BLOCK_SIZE_Q > 0:  # a listed block may be past the end; then the tile of no query is loaded
        tile = gl.where(row < block.sequence.len_q, tile, tile * 0)
    statistics = args.statistics_ptr + tile.to(gl.int64) * (2 * BLOCK_M) + gl.arange(0, 2 * BLOCK_M, layout=LINE)
    load_elements(tiles.statistics.index(slot), statistics)


@gluon.jit
def _copy_dout(args: MmaBackwardArguments, tiles: Tiles, position: QueryHead, block: Block, META: gl.constexpr):
    row = query_block(position.n, block.block_range, META)[0]
    base = row_pointer(args.dout, block.b, position.h, block.sequence.start_q + row, META)
    copy_block(args.dout, tiles.dout, 0, META.V0, META.HEAD_DIM_V, base, block.sequence.len_q - row, META)


@gluon.jit
def _add_to_sums(sums_ptr, dq, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    # Adds a tile of dq, its columns from FIRST on, to the sums at sums_ptr; columns past HEAD_DIM have none. The sums are in cores
    # of 8 queries and 8 columns, [rows / 8, columns / 8, odd column, row, pair of columns]. So an atomic of a warp is 128 bytes
    # in a row.
    ROWS: gl.constexpr = dq.shape[0]
    WIDTH: gl.constexpr = dq.shape[1]
    cores = gl.permute(gl.reshape(dq, [ROWS // 8, 8, WIDTH // 8, 4, 2]), (0, 2, 4, 1, 3))
    values = gl.reshape(cores, [ROWS * WIDTH])
    place = gl.arange(0, ROWS * WIDTH, layout=values.type.layout)
    if WIDTH < HEAD_DIM or WIDTH > HEAD_DIM:
        core = place // 64
        column = FIRST // 8 + core % (WIDTH // 8)
        place = (core // (WIDTH // 8) * (HEAD_DIM // 8) + column) * 64 + place % 64
    if FIRST + WIDTH > HEAD_DIM:
        gl.atomic_add(sums_ptr + place, values, mask=column < HEAD_DIM // 8, sem="relaxed")
    else:
        gl.atomic_add(sums_ptr + place, values, sem="relaxed")


@gluon.jit
def _add_part_of_dq(sums_ptr, ds, k, FIRST: gl.constexpr, LAYOUT: gl.constexpr, META: gl.constexpr):
    # dq = ds k, the columns of a part
    no_dq = zeros_of_part(META.BLOCK_M, k.shape[1], LAYOUT)
    _add_to_sums(sums_ptr, add_product(no_dq, ds, k), FIRST, META.HEAD_DIM_QK)


@gluon.jit
def _add_dq(ds_tile, k: Parts, args: MmaBackwardArguments, position: QueryHead, row, block: Block, META: gl.constexpr):
    QUERIES: gl.constexpr = product_layout(META.QUERY_WARPS, META.WARPS // META.QUERY_WARPS)
    ds = ds_tile.permute((1, 0)).load(gl.DotOperandLayout(0, QUERIES, 2))
    tile = block.first_statistics + (position.h - block.h) * args.tiles_of_statistics
    first = tile * META.BLOCK_M + row
    sums_ptr = args.sums_ptr + first.to(gl.int64) * META.HEAD_DIM_QK
    _add_part_of_dq(sums_ptr, ds, k.first, 0, QUERIES, META)
    if META.QK1 > 0:
        _add_part_of_dq(sums_ptr, ds, k.second, META.QK0, QUERIES, META)


@gluon.jit
def _add_blocks(args: MmaBackwardArguments, block: Block, iterations, sums: Sums, MODS: gl.constexpr, META: gl.constexpr):
    # Returns dk, without the softmax scale, and dv; `sums` are zeros
    DTYPE: gl.constexpr = args.k.ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = META.BLOCK_M
    BLOCK_N: gl.constexpr = META.BLOCK_N
    WARPS: gl.constexpr = META.WARPS
    Q_STAGES: gl.constexpr = META.Q_STAGES
    SCORES: gl.constexpr = product_layout(META.SCORE_WARPS, WARPS // META.SCORE_WARPS)
    HOLDS_WEIGHTS: gl.constexpr = META.SCORE_WARPS == WARPS and META.KEY_WARPS == WARPS
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, sums.dk0.type.layout, 2)
    STATISTICS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scores = args.scores
    k_tile = allocate_parts(DTYPE, 1, BLOCK_N, META.QK0, META.QK1)
    v_tile = allocate_parts(DTYPE, 1, BLOCK_N, META.V0, META.V1)
    first_key = block.sequence.start_kv + block.first_row
    keys_left = block.sequence.len_kv - block.first_row
    k_base = row_pointer(args.k, block.b, block.h_kv, first_key, META)
    v_base = row_pointer(args.v, block.b, block.h_kv, first_key, META)
    copy_block(args.k, k_tile, 0, META.QK0, META.HEAD_DIM_QK, k_base, keys_left, META)
    copy_block(args.v, v_tile, 0, META.V0, META.HEAD_DIM_V, v_base, keys_left, META)
    v = at(v_tile, 0)
    if META.HOLDS_V:  # its shared memory is free for other tiles
        async_copy.commit_group()
        async_copy.wait_group(0)
        v = load_operand(v, gl.DotOperandLayout(0, SCORES, 2))
    ds_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    weights_tile = ds_tile
    if not HOLDS_WEIGHTS:
        weights_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    tiles = Tiles(
        k=at(k_tile, 0),
        v=v,
        q=allocate_parts(DTYPE, Q_STAGES, BLOCK_M, META.QK0, META.QK1),
        dout=allocate_parts(DTYPE, 1, BLOCK_M, META.V0, META.V1),
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
    dk0, dk1, dv0, dv1 = sums.dk0, sums.dk1, sums.dv0, sums.dv1
    draws = dropout_state(args.dropout, block.first_head, META)
    uncut_from = first_uncut_query(block.first_row, BLOCK_N, block.band, META)
    dout = at(tiles.dout, 0)
    for n in range(iterations):  # counts the blocks of all query heads
        slot = n % Q_STAGES
        has_next = n + 1 < iterations
        following, following_values = next_query_block(position, values, block, args.work, scores, MODS, META)
        row, is_full = query_block(position.n, block.block_range, META)
        is_cut = cuts_block(row, block.first_row, uncut_from, block.band, META)
        head = head_at(position, values, block, scores, META)
        columns = row + block_columns
        i, j = columns[None, :], rows[:, None]
        q = at(tiles.q, slot)
        statistics = tiles.statistics.index(slot)
        async_copy.wait_group(0)  # this block's q, statistics and dout
        s = product_of_rows(tiles.k, q, zeros, False, META.QK1 > 0)
        s, factor, cap_tanh, score = logits(s, i, j, scores.scale, head, MODS, META)
        place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
        p = probabilities(s, factor, place, statistics.slice(0, BLOCK_M, 0), head, block, MODS, META)
        weights = p.to(DTYPE)
        if META.HAS_DROPOUT:
            keep = keeps(p, draws, position.h, row, block.first_row, META)
            weights = gl.where(keep, p, 0.0).to(DTYPE)
        if not HOLDS_WEIGHTS:
            tiles.weights.store(weights)
        dp = product_of_rows(tiles.v, dout, zeros, META.HOLDS_V, META.V1 > 0)
        if META.HAS_DROPOUT:
            dp = scaled(gl.where(keep, dp, 0.0), draws, META)
        minus_delta = statistics.slice(BLOCK_M, BLOCK_M, 0).load(gl.SliceLayout(0, SCORES))
        ds = through_mods(p * (dp + minus_delta[None, :]), cap_tanh, score, i, j, head, MODS, META).to(DTYPE)
        if Q_STAGES == 2:
            if has_next:
                _copy_queries(args, tiles, 1 - slot, following, block, META)
            async_copy.commit_group()
        if META.ADDS_DQ or not HOLDS_WEIGHTS:
            tiles.ds.store(ds)
        if HOLDS_WEIGHTS:
            weights_of_keys = gl.convert_layout(weights, OF_KEYS)
        else:
            weights_of_keys = tiles.weights.load(OF_KEYS)
        dv0 = add_product(dv0, weights_of_keys, dout.first)
        if META.V1 > 0:
            dv1 = add_product(dv1, weights_of_keys, dout.second)
        if has_next:
            _copy_dout(args, tiles, following, block, META)
        async_copy.commit_group()
        if HOLDS_WEIGHTS:
            ds_of_keys = gl.convert_layout(ds, OF_KEYS)
        else:
            ds_of_keys = tiles.ds.load(OF_KEYS)
        if META.ADDS_DQ:
            if META.BLOCK_SIZE_Q > 0:
                if row < block.sequence.len_q:  # no row of this head is past the end
                    _add_dq(tiles.ds, tiles.k, args, position, row, block, META)
            else:
                _add_dq(tiles.ds, tiles.k, args, position, row, block, META)
        dk0 = add_product(dk0, ds_of_keys, q.first)
        if META.QK1 > 0:
            dk1 = add_product(dk1, ds_of_keys, q.second)
        if Q_STAGES == 1:
            if has_next:
                _copy_queries(args, tiles, slot, following, block, META)
            async_copy.commit_group()
        position, values = following, following_values
    async_copy.wait_group(0)  # a program must not end under a copy
    keep_until_here(k_tile, META.QK1)
    if not META.HOLDS_V:
        keep_until_here(v_tile, META.V1)
    return Sums(dk0=dk0, dk1=dk1, dv0=scaled(dv0, draws, META), dv1=scaled(dv1, draws, META))


@hopper_kernel
def _attn_bwd_mma_kernel(args: MmaBackwardArguments, MODS: gl.constexpr, META: gl.constexpr):
    KEYS: gl.constexpr = product_layout(META.KEY_WARPS, META.WARPS // META.KEY_WARPS)
    block = key_block_of_program(args, META)
    iterations = block.num_blocks * block.heads
    dk0 = zeros_of_part(META.BLOCK_N, META.QK0, KEYS)
    dv0 = zeros_of_part(META.BLOCK_N, META.V0, KEYS)
    dk1, dv1 = dk0, dv0
    if META.QK1 > 0:
        dk1 = zeros_of_part(META.BLOCK_N, META.QK1, KEYS)
    if META.V1 > 0:
        dv1 = zeros_of_part(META.BLOCK_N, META.V1, KEYS)
    sums = Sums(dk0=dk0, dk1=dk1, dv0=dv0, dv1=dv1)
    if iterations > 0:
        sums = _add_blocks(args, block, iterations, sums, MODS, META)
    first, left = block.sequence.start_kv + block.first_row, block.sequence.len_kv - block.first_row
    to_dv = Destination(x=args.dv, b=block.b, h=block.h_kv, first=first, left=left)
    to_dk = Destination(x=args.dk, b=block.b, h=block.h_kv, first=first, left=left)
    scale = args.scores.scale
    store_part(to_dv, sums.dv0, 0, META.HEAD_DIM_V, META)
    if META.V1 > 0:
        store_part(to_dv, sums.dv1, META.V0, META.HEAD_DIM_V, META)
    store_part(to_dk, sums.dk0 * scale, 0, META.HEAD_DIM_QK, META)
    if META.QK1 > 0:
        store_part(to_dk, sums.dk1 * scale, META.QK0, META.HEAD_DIM_QK, META)


def arguments_of_backward(problem: Problem, tiled: Tiled) -> dict[str, Any]:
    """Returns the arguments that both kernels of a backward have, by name."""
    return shared_arguments(problem, tiled) | {"statistics_ptr": tiled.statistics, "dropout": problem.dropout}


def constants_of_backward(problem: Problem) -> dict[str, Any]:
    """Returns the constants that both kernels of a backward have, by name."""
    x = problem
    qk, values = split_head_dim(x.q.shape[-1]), split_head_dim(x.v.shape[-1])
    widths = {"QK0": qk[0], "QK1": qk[1], "V0": values[0], "V1": values[1]}
    dims = {"HEAD_DIM_QK": x.q.shape[-1], "HEAD_DIM_V": x.v.shape[-1]}
    return {**x.features._asdict(), **widths, **dims, "GROUP": 1, "IS_FP8": False, "ALIGN": 8}


def launch_key_blocks(call: Backward, tile: MmaBackwardTile, tiled: Tiled) -> None:
    """Launches the kernel of blocks of keys: dk and dv and, if `tiled` has memory for its sums, dq."""
    x, dq_sums = call.problem, tiled.dq_sums
    meta = MmaBackwardMeta(
        **constants_of_backward(x),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WARPS=tile.warps,
        SCORE_WARPS=tile.score_warps,
        KEY_WARPS=tile.key_warps,
        QUERY_WARPS=tile.query_warps,
        Q_STAGES=tile.q_stages,
        HOLDS_V=tile.holds_v,
        ADDS_DQ=dq_sums is not None,
    )
    bytes_per_head = 4 * (meta.QK0 + meta.QK1 + meta.V0 + meta.V1) * x.longest_q  # approximate: q and dout, twice, to leave room
    if dq_sums is not None:
        bytes_per_head = 12 * tile.head_dim * max(x.longest_q, x.longest_kv)  # as for other fused backwards
    work, programs = backward_work(x, tile.block_n, "kv", bytes_per_head, is_fused=dq_sums is not None)
    arguments = MmaBackwardArguments(
        q=rows_of(x.q, meta),
        k=rows_of(x.k, meta),
        v=rows_of(x.v, meta),
        dout=rows_of(call.dout, meta),
        dk=rows_of(call.dk, meta),
        dv=rows_of(call.dv, meta),
        sums_ptr=dq_sums,
        **arguments_of_backward(x, tiled),
        work=work,
        lists=x.lists("q"),
    )
    launch_tile = Tile(tile.block_m, tile.block_n, tile.warps, tile.q_stages)
    launch(_attn_bwd_mma_kernel, programs, x.device, launch_tile, (arguments, x.mods, meta))


def mma_backward(call: Backward, tile: MmaBackwardTile | None = None) -> None:
    """Launches the backward of a call that `backward_unsupported` does not reject; the last bits of dq differ from run to run."""
    tile = tile or backward_tile(call.problem)
    tiled = tiled_statistics(call, tile.block_m, with_dq_sums=True)
    assert tiled.dq_sums is not None
    launch_key_blocks(call, tile, tiled)
    convert_dq(call.problem, tiled.dq_sums, tiled.tiles, tile.block_m, call.dq, in_cores=True)
    zero_padding_of_gradients(call)
