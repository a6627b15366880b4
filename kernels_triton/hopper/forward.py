"""Forward attention on Hopper (sm_90) in Gluon: one warp loads by TMA, warpgroups compute, and programs draw work dynamically.

Each consumer warpgroup has 64 queries. It issues the scores of one block of keys and, before it reads them, the product of the
previous block with v. So the softmax of one block overlaps the matrix product of the other. Two or three consumers also take turns
at the tensor cores (FlashAttention-3, arXiv 2407.08608, section 3). Results are those of `portable/forward.py`, which runs the
calls that `conditions.forward_unsupported` rejects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.launch_order import wait_for_previous
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HopperTile
from flexattn.kernels_triton.gluon import forward_rows, pipeline
from flexattn.kernels_triton.gluon.barriers import pass_turn, wait_for_turn
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, key_block
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Buffers, Tiles
from flexattn.kernels_triton.gluon.forward_launch import Outputs, launch_forward
from flexattn.kernels_triton.gluon.forward_loader import load_partition
from flexattn.kernels_triton.gluon.forward_work import Span, received_tile, unmasked_blocks
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_blocks, allocate_tiles, keep_pairs, unpack_pairs
from flexattn.kernels_triton.gluon.pairs import allocate_key_pair, allocate_pair
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_forward_barriers, skip_blocks
from flexattn.kernels_triton.gluon.softmax import softmax, sums_of_threads
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.hopper import forward_parts
from flexattn.kernels_triton.hopper.conditions import forward_tile
from flexattn.kernels_triton.hopper.products import score_product
from flexattn.kernels_triton.runtime.launch import hopper_kernel


class Sums(NamedTuple):
    """Sums of a consumer over its first `iterations` blocks of keys."""

    iterations: int | gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    acc: gl.tensor
    acc1: Any  # the second part of v's columns, or ()
    n_block: int  # counts the blocks that passed through the rings of k and v


class Carry(NamedTuple):
    """Sums between two products with v; the weights of the second product are already computed."""

    weights: gl.tensor  # in pairs
    row_max: gl.tensor
    row_sum: gl.tensor
    acc: gl.tensor
    acc1: Any
    n_block: int


@gluon.jit
def _iterate(
    iteration,
    carry: Carry,
    same: forward_rows.Invariants,
    buffers: Buffers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Processes the next block of keys: its scores, and during their softmax the previous block's product with v.
    tiles, barriers = buffers.tiles, buffers.barriers
    DTYPE: gl.constexpr = tiles.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    P: gl.constexpr = gl.DotOperandLayout(0, carry.acc.type.layout, 2)
    n_block = carry.n_block
    column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)  # read from a list while the products run
    # Unpacked before the scores are issued: between the two products ptxas would serialise them (C7513).
    p = unpack_pairs(carry.weights, ROWS, BLOCK_N, P, DTYPE)
    k_stage = Stage(n_block, META.STAGES)
    pipeline.wait_full(barriers.k_full, k_stage)
    if META.PINGPONG:
        wait_for_turn(CONSUMER)
    s = score_product(tiles.q, same.q_slot, tiles.k, pipeline.index(k_stage), same.zeros, BLOCK_N, META)  # S = Q K^T
    v_stage = Stage(n_block - 1, META.STAGES)
    pipeline.wait_full(barriers.v_full, v_stage)
    acc, acc1 = forward_parts.begin_values(p, tiles, v_stage, carry.acc, carry.acc1, META)
    if META.PINGPONG:
        pass_turn(CONSUMER, META.CONSUMERS)
    drawn = drawn_weights(same.draws, same.b_h, same.m_start, column, BLOCK_N, False, META, META.GROUP)
    s = warpgroup_mma_wait(2 if META.VALUES1 > 0 else 1, deps=[s])
    pipeline.release(barriers.k_empty, k_stage)
    s, factor = forward_rows.visible_scores(s, column, is_full, same, IS_CUT, MODS, META)
    weights, row_max, row_sum, correction = softmax(s, carry.row_max, carry.row_sum, factor, drawn, DTYPE, META)
    acc, acc1 = forward_parts.wait_for_values(acc, acc1, META)
    keep_pairs(carry.weights)
    pipeline.release(barriers.v_empty, v_stage)
    acc, acc1 = forward_parts.rescaled_parts(acc, acc1, correction, META)
    return Carry(weights=weights, row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, n_block=n_block + 1)


@gluon.jit
def _run(
    sums: Sums,
    span: Span,
    same: forward_rows.Invariants,
    buffers: Buffers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Processes a block of keys, with nothing that overlaps its softmax. If the next block is the span's first, it also processes
    # the span, whose blocks are unmasked or, with IS_CUT, may be cut. A branch for that in every iteration would make ptxas move
    # the wait for the product with v to it.
    tiles, barriers = buffers.tiles, buffers.barriers
    DTYPE: gl.constexpr = tiles.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    P: gl.constexpr = gl.DotOperandLayout(0, sums.acc.type.layout, 2)
    iteration = sums.iterations
    n_block = sums.n_block
    k_stage = Stage(n_block, META.STAGES)
    pipeline.wait_full(barriers.k_full, k_stage)
    if META.PINGPONG:
        wait_for_turn(CONSUMER)
    s = score_product(tiles.q, same.q_slot, tiles.k, pipeline.index(k_stage), same.zeros, BLOCK_N, META)  # S = Q K^T
    if META.PINGPONG:
        pass_turn(CONSUMER, META.CONSUMERS)
    column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
    drawn = drawn_weights(same.draws, same.b_h, same.m_start, column, BLOCK_N, False, META, META.GROUP)
    s = warpgroup_mma_wait(0, deps=[s])
    pipeline.release(barriers.k_empty, k_stage)
    s, factor = forward_rows.visible_scores(s, column, is_full, same, True, MODS, META)
    weights, row_max, row_sum, correction = softmax(s, sums.row_max, sums.row_sum, factor, drawn, DTYPE, META)
    acc, acc1 = sums.acc, sums.acc1
    if META.UNMASKED_LOOP:
        acc, acc1 = forward_parts.rescaled_parts(acc, acc1, correction, META)
    carry = Carry(weights=weights, row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, n_block=n_block + 1)
    iteration += 1
    end = gl.where(iteration == span.begin, span.end, iteration)
    for following in range(iteration, end):
        carry = _iterate(following, carry, same, buffers, CONSUMER, IS_CUT, MODS, META)
    mbarrier.arrive(barriers.q_empty.index(same.q_slot), count=1, pred=end == same.num_blocks)
    n_block = carry.n_block
    v_stage = Stage(n_block - 1, META.STAGES)
    pipeline.wait_full(barriers.v_full, v_stage)
    p = unpack_pairs(carry.weights, ROWS, BLOCK_N, P, DTYPE)
    acc, acc1 = forward_parts.begin_values(p, tiles, v_stage, carry.acc, carry.acc1, META)
    acc, acc1 = forward_parts.wait_for_values(acc, acc1, META)
    keep_pairs(carry.weights)
    pipeline.release(barriers.v_empty, v_stage)
    return Sums(iterations=end, row_max=carry.row_max, row_sum=carry.row_sum, acc=acc, acc1=acc1, n_block=n_block)


@gluon.jit
def _compute_partition(args: Arguments, buffers: Buffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    barriers = buffers.barriers
    num_heads = args.work.num_heads
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.VALUES0
    V1: gl.constexpr = META.VALUES1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    GROUP: gl.constexpr = META.GROUP
    draws = dropout_state(args.dropout, 0, META)
    if META.PINGPONG and CONSUMER == META.CONSUMERS - 1:
        pass_turn(CONSUMER, META.CONSUMERS)  # consumer 0 begins
    n_block = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        tile, band = received.tile, received.band
        h, b = tile.h, tile.b
        len_q, len_kv = band.len_q, band.len_kv
        num_blocks, block_range = received.num_blocks, received.block_range
        m_start = tile.first_row + CONSUMER * (ROWS // GROUP)
        skipped, num_consumer_blocks, consumer_range = blocks_of_consumer(m_start, num_blocks, block_range, band, META)
        rows, h_of_rows = forward_rows.rows_and_heads(m_start, h, len_q, ROW_LAYOUT, META)
        h_of_scores = h
        if GROUP > 1:
            h_of_scores = h_of_rows[:, None]
        head = head_of(args.scores, b, h_of_scores, len_q, len_kv, band.shift, MODS, META)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW_LAYOUT)  # in units of log2
        row_sum = sums_of_threads(zeros, BLOCK_N)
        if META.HAS_SINK:
            sink = forward_rows.sink_of_rows(tile, h_of_rows, args, META)
            if not META.HAS_MAX_LOGIT:  # max_logit excludes the sink
                row_max, row_sum = forward_rows.sums_with_sink(row_max, row_sum, sink)
        acc, acc1 = forward_parts.zero_parts(META)
        q_stage = Stage(n_tile, META.Q_STAGES)
        q_slot = CONSUMER + pipeline.index(q_stage) * META.CONSUMERS
        mbarrier.wait(barriers.q_full.index(q_slot), pipeline.phase(q_stage))
        if META.SKIPS:
            n_block = skip_blocks(skipped, n_block, barriers, CONSUMER, META)
        same = forward_rows.Invariants(
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
            q_slot=q_slot,
            zeros=zeros,
        )
        sums = Sums(iterations=0, row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, n_block=n_block)
        if META.UNMASKED_LOOP:
            if META.BLOCK_SIZE_Q > 0:
                unmasked = received.unmasked
            else:
                unmasked = unmasked_blocks(m_start, ROWS // GROUP, num_consumer_blocks, consumer_range, band, 1, META)
            last = num_consumer_blocks  # few other blocks follow, with the same instructions
            if META.HAS_CUT_LOOP:
                last = unmasked.end
            while sums.iterations < last:
                sums = _run(sums, unmasked, same, buffers, CONSUMER, False, MODS, META)
        if META.HAS_CUT_LOOP or not META.UNMASKED_LOOP:
            following = sums.iterations + 1
            if following <= num_consumer_blocks:
                remaining = Span(begin=following, end=num_consumer_blocks)
                sums = _run(sums, remaining, same, buffers, CONSUMER, META.HAS_CUT_LOOP, MODS, META)
        row_max = sums.row_max
        row_sum = gl.convert_layout(gl.sum(sums.row_sum, 1), ROW_LAYOUT)
        acc, acc1 = sums.acc, sums.acc1
        n_block = sums.n_block
        if num_consumer_blocks == 0:
            mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)
        if META.SKIPS:
            n_block = skip_blocks(num_blocks - skipped - num_consumer_blocks, n_block, barriers, CONSUMER, META)
        if META.HAS_MAX_LOGIT:
            forward_rows.report_max_logit(row_max, rows, h_of_rows, len_q, args, META)
            if META.HAS_SINK:
                row_max, row_sum, correction = forward_rows.sums_with_sink_behind(row_max, row_sum, sink, META)
                acc, acc1 = forward_parts.scaled_parts(acc, acc1, correction, META)
        lse_row = forward_rows.statistics_row(received, CONSUMER, rows, h_of_rows, args, META)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
        forward_rows.store_lse(row_max, row_sum_or_1, lse_row, rows, received, args, META)
        rescale = scaled(1.0 / row_sum_or_1, draws, META)
        acc, acc1 = forward_parts.scaled_parts(acc, acc1, rescale, META)
        if META.IS_SPLIT:
            forward_rows.store_split_rows(acc, 0, received, lse_row, rows, h_of_rows, args, META)
            if V1 > 0:
                forward_rows.store_split_rows(acc1, V0, received, lse_row, rows, h_of_rows, args, META)
        elif META.WIDTH_V > 0:
            forward_rows.store_out_rows(acc, 0, received, rows, h_of_rows, args, META)
            if V1 > 0:
                forward_rows.store_out_rows(acc1, V0, received, rows, h_of_rows, args, META)
        else:
            token, out_head = received.start_q + b * args.steps.out.tokens, h + b * args.steps.out.heads
            out_tile = buffers.tiles.out.index(CONSUMER)
            if META.OUT_PARTS == 1:
                forward_parts.store_out(acc, 0, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
            else:
                low, high = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, V0 // 2]), [0, 2, 1]))
                forward_parts.store_out(low, 0, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
                forward_parts.store_out(high, V0 // 2, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
            if V1 > 0:
                forward_parts.store_out(
                    acc1, V0, token, len_q, m_start, out_head, args.descriptors.out1, buffers.tiles.out1.index(CONSUMER)
                )
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)
    if META.PINGPONG and CONSUMER == 0:
        wait_for_turn(CONSUMER)


@hopper_kernel
def _attn_fwd_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    # addressing a page takes more registers than addressing a row
    LOADER_REGISTERS: gl.constexpr = 32 if META.PAGE_ROWS > 0 else 24
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    q_tiles = allocate_pair(Q_TILES, descriptors.q, META)
    out_tiles = q_tiles.first  # never used
    if not META.IS_SPLIT and descriptors.out is not None:
        out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    k_tiles = allocate_key_pair(descriptors.k, META)
    v_tiles = allocate_blocks(META.STAGES, descriptors.v, META.BLOCK_N)
    v1_tiles, out1_tiles = (), ()
    if META.VALUES1 > 0:
        v1_tiles = allocate_blocks(META.STAGES, descriptors.v1, META.BLOCK_N)
        if not META.IS_SPLIT and descriptors.out1 is not None:
            out1_tiles = allocate_tiles(CONSUMERS, descriptors.out1)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles, v1=v1_tiles, out1=out1_tiles)
    barriers = allocate_forward_barriers(CONSUMERS, CONSUMERS, META)
    buffers = Buffers(tiles=tiles, barriers=barriers)
    wait_for_previous(META.IS_SPLIT)
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the remaining registers, 240
        gl.warp_specialize(
            [
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (load_partition, (args, buffers, META)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 4:
        gl.warp_specialize(
            [
                (load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_compute_partition, (args, buffers, 2, MODS, META)),
                (_compute_partition, (args, buffers, 3, MODS, META)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_compute_partition, (args, buffers, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def hopper_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: HopperTile | None = None,
    group: int | None = None,
    splits: int | None = None,
) -> None:
    """Launches the forward of a call that `forward_unsupported` does not reject; for group and splits see `launch_forward`."""
    tile = tile or forward_tile(problem)
    launch_forward(_attn_fwd_hopper_kernel, problem, Outputs(out, lse, max_logit), tile, ROWS.value, group, splits)
