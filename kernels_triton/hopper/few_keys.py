"""Forward for at most 128 keys on Hopper (sm_90) in Gluon: one block of keys stays in shared memory, and queries pass by it.

A program has neighbouring work tiles of as few key heads as possible. Its loading warp loads k and v once for each of these heads,
and q tile by tile. All keys of a row are in one product, so the softmax has one pass: nothing is rescaled. The consumers share
nothing but k and v, and each overlaps the loads, products and stores of the others.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.sequences import sequence_of
from flexattn.kernels_triton.common.tiles import HopperTile
from flexattn.kernels_triton.gluon import forward_rows, pipeline
from flexattn.kernels_triton.gluon.descriptors import load_rows
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, scaled
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Tiles
from flexattn.kernels_triton.gluon.forward_launch import Outputs, launch_forward
from flexattn.kernels_triton.gluon.forward_loader import LoadedRows, load_keys, load_queries
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile, WorkTile
from flexattn.kernels_triton.gluon.masking import band_of_sequence
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_blocks, allocate_tiles, keep_pairs, pack_pairs, unpack_pairs
from flexattn.kernels_triton.gluon.pairs import allocate_key_pair, allocate_pair, origin_of
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.softmax import exponentials, for_threads, row_maximum, sums_of_threads
from flexattn.kernels_triton.hopper.forward_parts import scaled_parts, store_out, wait_for_values, zero_parts
from flexattn.kernels_triton.hopper.products import product_layout, zero_rows
from flexattn.kernels_triton.runtime.launch import hopper_kernel


class Barriers(NamedTuple):
    """Barriers of q by consumer and stage, and of k with v by stage, with the names of `ForwardBarriers`."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


class FewKeysBuffers(NamedTuple):
    tiles: Tiles
    barriers: Barriers


@gluon.jit
def _tiles_of_program(args: Arguments):
    # Returns the first and the end of the program's work tiles
    amount = args.lengths_q.batch * args.work.num_heads * args.work.blocks
    share = gl.cdiv(amount, gl.num_programs(0))
    first = gl.minimum(gl.program_id(0) * share, amount)
    return first, gl.minimum(first + share, amount)


@gluon.jit
def _tile_at(t, args: Arguments, META: gl.constexpr):
    # Returns work tile t: the tiles of a head are neighbours
    work = args.work
    b_h = t // work.blocks
    first_row = t % work.blocks * META.BLOCK_M
    return WorkTile(first_row=first_row, h=b_h % work.num_heads, b=b_h // work.num_heads, split=0, split_end=0, part=0)


@gluon.jit
def _key_head(tile: WorkTile, args: Arguments):
    # Returns the number of the tile's key head, of all sequences
    return (tile.b * args.work.num_heads + tile.h) // args.work.group_size


@gluon.jit
def _load_values(args: Arguments, tiles: Tiles, rows: LoadedRows, n_keys, barriers: Barriers, META: gl.constexpr):
    descriptors = args.descriptors
    V1_BYTES: gl.constexpr = descriptors.v1.block_type.nbytes if META.VALUES1 > 0 else 0
    stage = Stage(n_keys, META.STAGES)
    index = pipeline.index(stage)
    full = barriers.v_full.index(index)
    token, head = rows.origin.token, rows.origin.head
    pipeline.wait_empty(barriers.v_empty, stage)
    mbarrier.expect(full, descriptors.v.block_type.nbytes + V1_BYTES)
    load_rows(descriptors.v, token, rows.length, rows.first, head, 0, full, tiles.v.index(index))
    if META.VALUES1 > 0:
        load_rows(descriptors.v1, token, rows.length, rows.first, head, META.VALUES0, full, tiles.v1.index(index))


@gluon.jit
def _load_partition(args: Arguments, buffers: FewKeysBuffers, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    steps = args.steps
    n_tile = 0
    n_keys = 0  # counts the key heads
    last_head = -1
    first, end = _tiles_of_program(args)
    for t in range(first, end):
        tile = _tile_at(t, args, META)
        sequence = sequence_of(args.lengths_q, args.lengths_kv, tile.b, META)
        if tile.first_row < sequence.len_q:
            key_head = _key_head(tile, args)
            if key_head != last_head:
                h_kv = tile.h // args.work.group_size
                k = origin_of(steps.k, sequence.start_kv, h_kv, tile.b)
                v = origin_of(steps.v, sequence.start_kv, h_kv, tile.b)
                len_kv = sequence.len_kv
                load_keys(args.descriptors.k, tiles.k, LoadedRows(origin=k, first=0, length=len_kv), n_keys, barriers, META)
                _load_values(args, tiles, LoadedRows(origin=v, first=0, length=len_kv), n_keys, barriers, META)
                n_keys += 1
                last_head = key_head
            q = origin_of(steps.q, sequence.start_q, tile.h, tile.b)
            rows = LoadedRows(origin=q, first=tile.first_row, length=sequence.len_q)
            load_queries(args.descriptors.q, tiles.q, rows, n_tile, barriers, META)
            n_tile += 1


@gluon.jit
def _begin_scores(tiles: Tiles, q_slot, stage: Stage, FIRST: gl.constexpr, KEYS: gl.constexpr, META: gl.constexpr):
    # Returns the scores with KEYS keys from FIRST on, whose product is in flight
    index = pipeline.index(stage)
    q = tiles.q.first.index(q_slot).reshape([ROWS, META.QK0])
    k = tiles.k.first.index(index).reshape([META.BLOCK_N, META.QK0]).slice(FIRST, KEYS, 0)
    s = warpgroup_mma(q, k.permute([1, 0]), zero_rows(KEYS), use_acc=False, is_async=True)  # S = Q K^T
    if META.QK1 > 0:
        q1 = tiles.q.second.index(q_slot).reshape([ROWS, META.QK1])
        k1 = tiles.k.second.index(index).reshape([META.BLOCK_N, META.QK1]).slice(FIRST, KEYS, 0)
        s = warpgroup_mma(q1, k1.permute([1, 0]), s, is_async=True)  # S += Q K^T
    return s


@gluon.jit
def _visible_scores(s, FIRST: gl.constexpr, same: forward_rows.Invariants, MODS: gl.constexpr, META: gl.constexpr):
    # Returns the visible scores with the keys from FIRST on, their factor in the exponent, and each row's maximum
    KEYS: gl.constexpr = s.shape[1]
    part = forward_rows.Invariants(
        num_blocks=1,
        block_range=0,
        m_start=same.m_start,
        rows=gl.convert_layout(same.rows, gl.SliceLayout(1, s.type.layout)),
        block_columns=gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout)),
        band=same.band,
        scale=same.scale,
        head=same.head,
        draws=same.draws,
        b_h=same.b_h,
        q_slot=same.q_slot,
        zeros=0,
    )
    s, factor = forward_rows.visible_scores(s, FIRST, False, part, True, MODS, META)
    return s, factor, row_maximum(s, KEYS)


@gluon.jit
def _begin_values(weights, tiles: Tiles, stage: Stage, FIRST: gl.constexpr, KEYS: gl.constexpr, acc, acc1, META: gl.constexpr):
    # Returns the sums with the product of weights of KEYS keys from FIRST on, which is in flight
    p = unpack_pairs(weights, ROWS, KEYS, gl.DotOperandLayout(0, product_layout(META.VALUES0), 2), tiles.v.dtype)
    v = tiles.v.index(pipeline.index(stage)).reshape([META.BLOCK_N, META.VALUES0]).slice(FIRST, KEYS, 0)
    acc = warpgroup_mma(p, v, acc, is_async=True)  # O += P V
    if META.VALUES1 > 0:
        v1 = tiles.v1.index(pipeline.index(stage)).reshape([META.BLOCK_N, META.VALUES1]).slice(FIRST, KEYS, 0)
        acc1 = warpgroup_mma(p, v1, acc1, is_async=True)  # O += P V
    return acc, acc1


class Counts(NamedTuple):
    """A program's work tiles and key heads before the current ones."""

    tiles: int | gl.tensor
    key_heads: int | gl.tensor


@gluon.jit
def _compute_tile(
    args: Arguments,
    buffers: FewKeysBuffers,
    received: ReceivedTile,
    counts: Counts,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Computes a consumer's rows of a work tile, whose k and v have come
    tiles, barriers = buffers.tiles, buffers.barriers
    tile, band = received.tile, received.band
    DTYPE: gl.constexpr = tiles.v.dtype
    KEYS0: gl.constexpr = 64 if META.KEYS1 > 0 else META.BLOCK_N
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(KEYS0))
    draws = dropout_state(args.dropout, 0, META)
    m_start = tile.first_row + CONSUMER * ROWS
    rows, h_of_rows = forward_rows.rows_and_heads(m_start, tile.h, band.len_q, ROW_LAYOUT, META)
    q_stage = Stage(counts.tiles, META.Q_STAGES)
    q_slot = CONSUMER + pipeline.index(q_stage) * META.CONSUMERS
    same = forward_rows.Invariants(
        num_blocks=1,
        block_range=0,
        m_start=m_start,
        rows=rows,
        block_columns=0,
        band=band,
        scale=args.scores.scale,
        head=head_of(args.scores, tile.b, tile.h, band.len_q, band.len_kv, band.shift, MODS, META),
        draws=draws,
        b_h=tile.b * args.work.num_heads + tile.h,
        q_slot=q_slot,
        zeros=0,
    )
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW_LAYOUT)  # in units of log2
    row_sum = sums_of_threads(zero_rows(KEYS0), KEYS0)
    if META.HAS_SINK:
        sink = forward_rows.sink_of_rows(tile, h_of_rows, args, META)
        if not META.HAS_MAX_LOGIT:  # max_logit excludes the sink
            row_max, row_sum = forward_rows.sums_with_sink(row_max, row_sum, sink)
    stage = Stage(counts.key_heads, META.STAGES)
    mbarrier.wait(barriers.q_full.index(q_slot), pipeline.phase(q_stage))
    s = _begin_scores(tiles, q_slot, stage, 0, KEYS0, META)
    drawn = drawn_weights(draws, same.b_h, m_start, 0, KEYS0, False, META)
    if META.KEYS1 > 0:
        s1 = _begin_scores(tiles, q_slot, stage, KEYS0, META.KEYS1, META)
        drawn1 = drawn_weights(draws, same.b_h, m_start, KEYS0, META.KEYS1, False, META)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)
    s, factor, highest = _visible_scores(s, 0, same, MODS, META)
    acc, acc1 = zero_parts(META)
    if META.KEYS1 > 0:
        ROW_LAYOUT1: gl.constexpr = gl.SliceLayout(1, product_layout(META.KEYS1))
        s1, factor1, highest1 = _visible_scores(warpgroup_mma_wait(0, deps=[s1]), KEYS0, same, MODS, META)
        highest = gl.maximum(highest, gl.convert_layout(highest1, ROW_LAYOUT))
        highest1, row_max1 = gl.convert_layout(highest, ROW_LAYOUT1), gl.convert_layout(row_max, ROW_LAYOUT1)
        p1, _max, _correction = exponentials(s1, highest1, row_max1, factor1, META)
        weights1 = pack_pairs(kept(p1, drawn1, False, META), ROWS, META.KEYS1, DTYPE)
        acc, acc1 = _begin_values(weights1, tiles, stage, KEYS0, META.KEYS1, acc, acc1, META)
    p, row_max, correction = exponentials(s, highest, row_max, factor, META)
    weights = pack_pairs(kept(p, drawn, False, META), ROWS, KEYS0, DTYPE)
    acc, acc1 = _begin_values(weights, tiles, stage, 0, KEYS0, acc, acc1, META)
    row_sum = row_sum * for_threads(correction, row_sum) + sums_of_threads(p, KEYS0)
    if META.KEYS1 > 0:
        row_sum = row_sum + gl.convert_layout(sums_of_threads(p1, META.KEYS1), row_sum.type.layout)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)
    correction = gl.full([ROWS], 1.0, gl.float32, layout=ROW_LAYOUT)
    if META.HAS_MAX_LOGIT:
        forward_rows.report_max_logit(row_max, rows, h_of_rows, band.len_q, args, META)
        if META.HAS_SINK:
            row_max, row_sum, correction = forward_rows.sums_with_sink_behind(row_max, row_sum, sink, META)
    row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    lse_row = forward_rows.statistics_row(received, CONSUMER, rows, h_of_rows, args, META)
    forward_rows.store_lse(row_max, row_sum_or_1, lse_row, rows, received, args, META)
    rescale = scaled(correction / row_sum_or_1, draws, META)
    acc, acc1 = wait_for_values(acc, acc1, META)
    keep_pairs(weights)
    if META.KEYS1 > 0:
        keep_pairs(weights1)
    acc, acc1 = scaled_parts(acc, acc1, rescale, META)
    if META.WIDTH_V > 0:
        forward_rows.store_out_rows(acc, 0, received, rows, h_of_rows, args, META)
        if META.VALUES1 > 0:
            forward_rows.store_out_rows(acc1, META.VALUES0, received, rows, h_of_rows, args, META)
    else:
        descriptors, out = args.descriptors, args.steps.out
        token, head = received.start_q + tile.b * out.tokens, tile.h + tile.b * out.heads
        store_out(acc, 0, token, band.len_q, m_start, head, descriptors.out, tiles.out.index(CONSUMER))
        if META.VALUES1 > 0:
            store_out(acc1, META.VALUES0, token, band.len_q, m_start, head, descriptors.out1, tiles.out1.index(CONSUMER))


@gluon.jit
def _compute_partition(args: Arguments, buffers: FewKeysBuffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    barriers = buffers.barriers
    n_tile = 0
    n_keys = -1  # number of the key head whose k and v are in use
    last_head = -1
    first, end = _tiles_of_program(args)
    for t in range(first, end):
        tile = _tile_at(t, args, META)
        sequence = sequence_of(args.lengths_q, args.lengths_kv, tile.b, META)
        if tile.first_row < sequence.len_q:
            key_head = _key_head(tile, args)
            if key_head != last_head:
                if n_keys >= 0:
                    pipeline.release(barriers.k_empty, Stage(n_keys, META.STAGES))
                    pipeline.release(barriers.v_empty, Stage(n_keys, META.STAGES))
                n_keys += 1
                last_head = key_head
                pipeline.wait_full(barriers.k_full, Stage(n_keys, META.STAGES))
                pipeline.wait_full(barriers.v_full, Stage(n_keys, META.STAGES))
            received = ReceivedTile(
                tile=tile,
                start_q=sequence.start_q,
                band=band_of_sequence(args.band, sequence.len_q, sequence.len_kv),
                num_blocks=1,
                block_range=0,
                is_whole=True,
                unmasked=(),
                descales=(),
            )
            _compute_tile(args, buffers, received, Counts(tiles=n_tile, key_heads=n_keys), CONSUMER, MODS, META)
            n_tile += 1
    tma.store_wait(0)


@hopper_kernel
def _attn_fwd_few_keys_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    STAGES: gl.constexpr = META.STAGES
    CONSUMERS: gl.constexpr = META.CONSUMERS
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    REGISTERS: gl.constexpr = META.REGISTERS
    q_tiles = allocate_pair(Q_TILES, descriptors.q, META)
    out_tiles, v1_tiles, out1_tiles = q_tiles.first, (), ()  # the first is never used
    if descriptors.out is not None:
        out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    if META.VALUES1 > 0:
        v1_tiles = allocate_blocks(STAGES, descriptors.v1, META.BLOCK_N)
        if descriptors.out1 is not None:
            out1_tiles = allocate_tiles(CONSUMERS, descriptors.out1)
    k_tiles = allocate_key_pair(descriptors.k, META)
    v_tiles = allocate_blocks(STAGES, descriptors.v, META.BLOCK_N)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles, v1=v1_tiles, out1=out1_tiles)
    barriers = Barriers(
        q_full=allocate_barriers(Q_TILES, 1),
        q_empty=allocate_barriers(Q_TILES, 1),
        k_full=allocate_barriers(STAGES, 1),
        k_empty=allocate_barriers(STAGES, CONSUMERS),
        v_full=allocate_barriers(STAGES, 1),
        v_empty=allocate_barriers(STAGES, CONSUMERS),
    )
    buffers = FewKeysBuffers(tiles=tiles, barriers=barriers)
    gl.warp_specialize(
        [
            (_load_partition, (args, buffers, META)),
            (_compute_partition, (args, buffers, 0, MODS, META)),
            (_compute_partition, (args, buffers, 1, MODS, META)),
            (_compute_partition, (args, buffers, 2, MODS, META)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )


def few_keys_forward(problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None, tile: HopperTile) -> None:
    """Launches the forward of a call that `few_keys_unsupported` does not reject; it has at most `tile.block_n` keys."""
    outputs = Outputs(out, lse, max_logit)
    launch_forward(_attn_fwd_few_keys_hopper_kernel, problem, outputs, tile, ROWS.value, group=1, splits=1)
