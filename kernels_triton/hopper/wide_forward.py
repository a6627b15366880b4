"""Forward attention on sm_90 for head dims above 256, in Gluon: two warpgroups share the columns of out, and a warp loads by TMA.

A tile is 64 rows, of one or several query heads. Warpgroup 0 computes their scores and weights, and the left half of out's columns.
Warpgroup 1 computes the right half, from weights and corrections that warpgroup 0 writes to shared memory. In absorbed latent
attention (MLA), v is the first columns of k, in the same memory. Then one tile serves both products, and two such tiles fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.launch_order import wait_for_previous
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HopperTile
from flexattn.kernels_triton.gluon import forward_rows, pipeline
from flexattn.kernels_triton.gluon.block_ranges import key_block
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Buffers, Tiles
from flexattn.kernels_triton.gluon.forward_launch import Outputs, launch_forward
from flexattn.kernels_triton.gluon.forward_loader import load_partition
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile, received_tile
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_blocks, keep_pairs, unpack_pairs
from flexattn.kernels_triton.gluon.pairs import allocate_key_pair, allocate_pair
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage, allocate_barriers
from flexattn.kernels_triton.gluon.softmax import rescaled, softmax, sums_of_threads
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.hopper.conditions import wide_tile
from flexattn.kernels_triton.hopper.products import product_layout, score_product, zero_rows
from flexattn.kernels_triton.runtime.launch import hopper_kernel


class Exchange(NamedTuple):
    """Tiles from warpgroup 0 to warpgroup 1: both for each key block, and the factors again at a tile's end."""

    p: Any  # weights
    factor: Any  # [rows]: corrections of earlier sums, at the end the factors of out
    full: Any
    empty: Any


@gluon.jit
def _store_half(acc, COLUMN: gl.constexpr, received: ReceivedTile, args: Arguments, META: gl.constexpr):
    # Stores the columns of out from COLUMN on
    tile = received.tile
    len_q = received.band.len_q
    rows, h_of_rows = forward_rows.rows_and_heads(tile.first_row, tile.h, len_q, gl.SliceLayout(1, acc.type.layout), META)
    if META.IS_SPLIT:
        lse_row = forward_rows.statistics_row(received, 0, rows, h_of_rows, args, META)
        forward_rows.store_split_rows(acc, COLUMN, received, lse_row, rows, h_of_rows, args, META)
    else:
        forward_rows.store_out_rows(acc, COLUMN, received, rows, h_of_rows, args, META)


@gluon.jit
def _left_partition(args: Arguments, buffers: Buffers, exchange: Exchange, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    DTYPE: gl.constexpr = tiles.k.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    STAGES: gl.constexpr = META.STAGES
    V0: gl.constexpr = META.V0
    HALF: gl.constexpr = META.V0 // 2
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    P: gl.constexpr = gl.DotOperandLayout(0, product_layout(HALF), 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = zero_rows(BLOCK_N)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    draws = dropout_state(args.dropout, 0, META)
    n_block = 0
    n_exchange = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        tile, band = received.tile, received.band
        rows, h_of_rows = forward_rows.rows_and_heads(tile.first_row, tile.h, band.len_q, ROW_LAYOUT, META)
        h_of_scores = tile.h
        if META.GROUP > 1:
            h_of_scores = h_of_rows[:, None]
        same = forward_rows.Invariants(
            num_blocks=received.num_blocks,
            block_range=received.block_range,
            m_start=tile.first_row,
            rows=rows,
            block_columns=block_columns,
            band=band,
            scale=args.scores.scale,
            head=head_of(args.scores, tile.b, h_of_scores, band.len_q, band.len_kv, band.shift, MODS, META),
            draws=draws,
            b_h=tile.b * args.work.num_heads + tile.h,
            q_slot=0,
            zeros=zeros,
        )
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW_LAYOUT)  # in units of log2
        row_sum = sums_of_threads(zeros, BLOCK_N)
        if META.HAS_SINK:
            row_max, row_sum = forward_rows.sums_with_sink(row_max, row_sum, forward_rows.sink_of_rows(tile, h_of_rows, args, META))
        acc = zero_rows(HALF)
        pipeline.wait_full(barriers.q_full, Stage(n_tile, 1))
        for iteration in range(received.num_blocks):
            column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
            stage = Stage(n_block, STAGES)
            pipeline.wait_full(barriers.k_full, stage)
            s = score_product(tiles.q, 0, tiles.k, pipeline.index(stage), zeros, BLOCK_N, META)  # S = Q K^T
            drawn = drawn_weights(draws, same.b_h, same.m_start, column, BLOCK_N, False, META, META.GROUP)
            s = warpgroup_mma_wait(0, deps=[s])
            if not META.IS_LATENT:
                pipeline.release(barriers.k_empty, stage)
            s, factor = forward_rows.visible_scores(s, column, is_full, same, True, MODS, META)
            weights, row_max, row_sum, correction = softmax(s, row_max, row_sum, factor, drawn, DTYPE, META)
            p = unpack_pairs(weights, ROWS, BLOCK_N, P, DTYPE)
            pipeline.wait_empty(exchange.empty, Stage(n_exchange, 1))
            exchange.p.store(p)
            exchange.factor.store(correction)
            fence_async_shared()
            mbarrier.arrive(exchange.full.index(0), count=1)
            acc = rescaled(acc, correction, META)
            if not META.IS_LATENT:
                pipeline.wait_full(barriers.v_full, stage)
            v = tiles.v.index(pipeline.index(stage)).reshape([BLOCK_N, V0]).slice(0, HALF, 1)
            acc = warpgroup_mma(p, v, acc, is_async=True)  # O += P V, half of the columns
            acc = warpgroup_mma_wait(0, deps=[acc])
            keep_pairs(weights)
            pipeline.release(barriers.v_empty, stage)
            n_block += 1
            n_exchange += 1
        pipeline.release(barriers.q_empty, Stage(n_tile, 1))
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
        rescale = scaled(1.0 / row_sum_or_1, draws, META)
        pipeline.wait_empty(exchange.empty, Stage(n_exchange, 1))
        exchange.factor.store(rescale)
        mbarrier.arrive(exchange.full.index(0), count=1)
        n_exchange += 1
        forward_rows.store_lse(
            row_max, row_sum_or_1, forward_rows.statistics_row(received, 0, rows, h_of_rows, args, META), rows, received, args, META
        )
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        _store_half(acc, 0, received, args, META)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)


@gluon.jit
def _right_partition(args: Arguments, buffers: Buffers, exchange: Exchange, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    BLOCK_N: gl.constexpr = META.BLOCK_N
    STAGES: gl.constexpr = META.STAGES
    V0: gl.constexpr = META.V0
    HALF: gl.constexpr = META.V0 // 2
    n_block = 0
    n_exchange = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        acc = zero_rows(HALF)
        for _ in range(received.num_blocks):
            pipeline.wait_full(exchange.full, Stage(n_exchange, 1))
            acc = rescaled(acc, exchange.factor.load(gl.SliceLayout(1, acc.type.layout)), META)
            stage = Stage(n_block, STAGES)
            pipeline.wait_full(barriers.v_full, stage)
            v = tiles.v.index(pipeline.index(stage)).reshape([BLOCK_N, V0]).slice(HALF, HALF, 1)
            acc = warpgroup_mma(exchange.p, v, acc, is_async=True)  # O += P V, half of the columns
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(exchange.empty.index(0), count=1)
            pipeline.release(barriers.v_empty, stage)
            n_block += 1
            n_exchange += 1
        pipeline.wait_full(exchange.full, Stage(n_exchange, 1))
        rescale = exchange.factor.load(gl.SliceLayout(1, acc.type.layout))
        mbarrier.arrive(exchange.empty.index(0), count=1)
        n_exchange += 1
        _store_half(acc * rescale[:, None], HALF, received, args, META)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)


@gluon.jit
def _allocate_wide_barriers(META: gl.constexpr):
    # Both warpgroups read v, and so k if it is also v.
    STAGES: gl.constexpr = META.STAGES
    v_full = allocate_barriers(STAGES, 1)
    v_empty = allocate_barriers(STAGES, 2)
    k_full, k_empty = v_full, v_empty
    if not META.IS_LATENT:
        k_full = allocate_barriers(STAGES, 1)
        k_empty = allocate_barriers(STAGES, 1)
    return ForwardBarriers(
        q_full=allocate_barriers(1, 1),
        q_empty=allocate_barriers(1, 1),
        k_full=k_full,
        k_empty=k_empty,
        v_full=v_full,
        v_empty=v_empty,
        tile_full=allocate_barriers(2, 1),
        tile_empty=allocate_barriers(2, 2),
        tile_slots=gl.allocate_shared_memory(gl.int32, [2 * META.NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )


@hopper_kernel
def _attn_fwd_wide_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    REGISTERS: gl.constexpr = META.REGISTERS
    # addressing a page takes more registers than addressing a row
    LOADER_REGISTERS: gl.constexpr = 32 if META.PAGE_ROWS > 0 else 24
    q_tiles = allocate_pair(1, descriptors.q, META)
    k_tiles = allocate_key_pair(descriptors.k, META)
    v_tiles = k_tiles.first
    if not META.IS_LATENT:
        v_tiles = allocate_blocks(META.STAGES, descriptors.v, META.BLOCK_N)
    DTYPE: gl.constexpr = descriptors.k.first.dtype
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, META.BLOCK_N], DTYPE)
    exchange = Exchange(
        p=gl.allocate_shared_memory(DTYPE, [ROWS, META.BLOCK_N], WEIGHTS),
        factor=gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        full=allocate_barriers(1, 1),
        empty=allocate_barriers(1, 1),
    )
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=q_tiles.first)  # out is stored from registers
    buffers = Buffers(tiles=tiles, barriers=_allocate_wide_barriers(META))
    wait_for_previous(META.IS_SPLIT)
    gl.warp_specialize(
        [
            (_left_partition, (args, buffers, exchange, MODS, META)),
            (_right_partition, (args, buffers, exchange, META)),
            (load_partition, (args, buffers, META)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


def wide_forward(problem: Problem, out: Tensor, lse: Tensor, tile: HopperTile | None = None, splits: int | None = None) -> None:
    """Launches the forward of a call that `conditions.wide_unsupported` does not reject; for splits see `launch_forward`."""
    outputs = Outputs(out, lse, None)
    launch_forward(_attn_fwd_wide_hopper_kernel, problem, outputs, tile or wide_tile(problem), ROWS.value, splits=splits)
