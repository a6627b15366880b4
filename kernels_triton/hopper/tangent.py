"""Forward attention and the tangent of its results on Hopper (sm_90) in Gluon, in 16 bits: one kernel of six products.

As in `hopper/forward.py`, one warp loads by TMA, and each consumer warpgroup has 64 queries. The formulas are those of
`second_order/tangent.py`, with an online softmax. Weights are relative to the maximum so far, and tangents of scores to their mean
so far. Both change with each block of keys, and earlier sums follow them. A consumer issues the products with a block's values and
the next block's scores together. Meanwhile the other computes weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.problem import Along, Problem
from flexattn.kernels_triton.common.row_tiles import Place
from flexattn.kernels_triton.common.sequences import sequence_of
from flexattn.kernels_triton.common.split_kv import tiles_and_room
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import HopperTile
from flexattn.kernels_triton.gluon import forward_work as work_tiles
from flexattn.kernels_triton.gluon import pairs as tile_pairs
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.barriers import pass_turn, wait_for_turn
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, key_block
from flexattn.kernels_triton.gluon.descriptors import Step, readable, step_of, store_rows
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Cut, Results
from flexattn.kernels_triton.gluon.forward_launch import SplitKeys, forward_arguments, forward_meta
from flexattn.kernels_triton.gluon.forward_rows import mask_block, rows_and_heads, statistics_row, store_lse
from flexattn.kernels_triton.gluon.masking import SequenceBand, band_of_sequence
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles, keep_pairs, pack_pairs, unpack_pairs
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage, allocate_forward_barriers, skip_blocks
from flexattn.kernels_triton.gluon.softmax import exponentials, rescaled, row_maximum
from flexattn.kernels_triton.gluon.tile_scheduler import broadcast_end, broadcast_tile, is_tile, receive_tile
from flexattn.kernels_triton.gluon.work_order import forward_work
from flexattn.kernels_triton.hopper.conditions import tangent_tile
from flexattn.kernels_triton.hopper.forward_parts import store_out, zero_parts
from flexattn.kernels_triton.hopper.products import product_layout, score_product, zero_rows
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


class Twin(NamedTuple):
    """Descriptors of a tensor and of its tangent, with their `step_of`."""

    given: tile_pairs.Pair
    tangent: tile_pairs.Pair
    step: Step
    tangent_step: Step


class TwinTiles(NamedTuple):
    """Tiles of a tensor and of its tangent in shared memory."""

    given: tile_pairs.Pair
    tangent: tile_pairs.Pair


class TangentArguments(NamedTuple):
    call: Arguments  # without descriptors and steps
    q: Twin
    k: Twin
    v: Twin
    out: Twin
    tlse_ptr: Pointer  # the tangent of lse, in its layout


class TangentBuffers(NamedTuple):
    q: TwinTiles
    k: TwinTiles
    v: TwinTiles
    # for out and its tangent, in turn if META.OUT_PARTS is 2: the first columns, and the second ones or ()
    out: gl.shared_memory_descriptor
    out1: gl.shared_memory_descriptor
    barriers: ForwardBarriers


class Columns(NamedTuple):
    """Sums over keys for some columns of v; () for the second part of a head dim with one part."""

    out: gl.tensor  # sum of p v
    tangent: gl.tensor  # sum of p (t - mean) v + p tv; t: the tangent of the logit


class Same(NamedTuple):
    """Values that are constant for all key blocks of a consumer's queries."""

    rows: gl.tensor
    block_columns: gl.tensor
    band: SequenceBand
    m_start: gl.tensor
    scale: gl.tensor
    q_slot: gl.tensor
    zeros: gl.tensor


class Carry(NamedTuple):
    """Sums between two products with v; the weights of the second product are already computed."""

    p: gl.tensor  # weights, and weights times tangents, in pairs
    weighted: gl.tensor
    row_max: gl.tensor  # in units of log2
    row_sum: gl.tensor
    row_tangent: gl.tensor  # the sum of p t, before the scale
    mean: gl.tensor  # the weighted mean of t, with the scale
    sums: Columns
    sums1: Columns


@gluon.jit
def _load_twin(twin: Twin, tiles: TwinTiles, place: Place, full, slot, META: gl.constexpr):
    BYTES: gl.constexpr = tile_pairs.pair_bytes(twin.given.first.block_type.nbytes, twin.given.second.block_type.nbytes, META.QK1)
    mbarrier.expect(full, 2 * BYTES)
    origin = tile_pairs.origin_of(twin.step, place.start, place.h, place.b)
    tile_pairs.load_pair(twin.given, origin, place.length, place.first, full, tiles.given, slot, META)
    origin = tile_pairs.origin_of(twin.tangent_step, place.start, place.h, place.b)
    tile_pairs.load_pair(twin.tangent, origin, place.length, place.first, full, tiles.tangent, slot, META)


@gluon.jit
def _load_partition(args: TangentArguments, buffers: TangentBuffers, META: gl.constexpr):
    call, barriers = args.call, buffers.barriers
    CONSUMERS: gl.constexpr = META.CONSUMERS
    IS_ALONE: gl.constexpr = call.work.table_ptr is None  # a program has one tile
    amount = work_tiles.num_tiles_of_programs(call, META)
    n_block = 0
    n_tile = 0
    t = gl.program_id(0)
    while t < amount:
        tile = work_tiles.tile_of_work(t, amount, call, META)
        sequence = sequence_of(call.lengths_q, call.lengths_kv, tile.b, META)
        band = band_of_sequence(call.band, sequence.len_q, sequence.len_kv)
        num_blocks, block_range = work_tiles.blocks_of_tile(tile, (), band, call, META)
        message = work_tiles.message_of_tile(tile, sequence, (), (), ())
        broadcast_tile(work_tiles.pack_tile(message, META), n_tile, barriers, META)
        q_stage = Stage(n_tile, META.Q_STAGES)
        for consumer in gl.static_range(CONSUMERS):
            first = tile.first_row + consumer * ROWS
            slot = consumer + pipeline.index(q_stage) * CONSUMERS
            mbarrier.wait(barriers.q_empty.index(slot), pipeline.phase(q_stage) ^ 1)
            place = Place(b=tile.b, h=tile.h, start=sequence.start_q, first=first, length=sequence.len_q)
            _load_twin(args.q, buffers.q, place, barriers.q_full.index(slot), slot, META)
        h_kv = tile.h // call.work.group_size
        for n in range(num_blocks):
            first = key_block(num_blocks - 1 - n, block_range, META)[0]
            place = Place(b=tile.b, h=h_kv, start=sequence.start_kv, first=first, length=sequence.len_kv)
            stage = Stage(n_block, META.STAGES)
            slot = pipeline.index(stage)
            pipeline.wait_empty(barriers.k_empty, stage)
            _load_twin(args.k, buffers.k, place, barriers.k_full.index(slot), slot, META)
            pipeline.wait_empty(barriers.v_empty, stage)
            _load_twin(args.v, buffers.v, place, barriers.v_full.index(slot), slot, META)
            n_block += 1
        if IS_ALONE:
            t = amount
        else:
            t = gl.atomic_add(call.work.table_ptr, 1, sem="relaxed") + gl.num_programs(0)
        n_tile += 1
    broadcast_end(n_tile, barriers, META)


@gluon.jit
def _moved(sums: Columns, correction, step, META: gl.constexpr):
    # Returns the sums for the new maximum and mean. step: the change of the mean
    out, tangent = rescaled(sums.out, correction, META), rescaled(sums.tangent, correction, META)
    return Columns(out=out, tangent=tangent - gl.convert_layout(step, gl.SliceLayout(1, out.type.layout))[:, None] * out)


@gluon.jit
def _begin_products(sums: Columns, p, weighted, v, tv):
    # Returns the sums with a block's products, which are in flight
    out = warpgroup_mma(p, v, sums.out, is_async=True)
    tangent = warpgroup_mma(weighted, v, sums.tangent, is_async=True)
    return Columns(out=out, tangent=warpgroup_mma(p, tv, tangent, is_async=True))


@gluon.jit
def _begin_scores(slot, same: Same, buffers: TangentBuffers, META: gl.constexpr):
    return score_product(buffers.q.given, same.q_slot, buffers.k.given, slot, same.zeros, META.BLOCK_N, META)


@gluon.jit
def _begin_tangents(slot, same: Same, buffers: TangentBuffers, META: gl.constexpr):
    q, k = buffers.q, buffers.k
    t = score_product(q.tangent, same.q_slot, k.given, slot, same.zeros, META.BLOCK_N, META)
    return score_product(q.given, same.q_slot, k.tangent, slot, t, META.BLOCK_N, META, True)


@gluon.jit
def _weigh(s, t, column, stage: Stage, same: Same, carry: Carry, buffers: TangentBuffers, META: gl.constexpr):
    # Returns the carry with the weights of the key block at `column`. s and t are in flight
    DTYPE: gl.constexpr = buffers.v.given.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    s = warpgroup_mma_wait(4 if META.QK1 > 0 else 2, deps=[s])
    s = mask_block(s, same.rows, column + same.block_columns, column, same.m_start, same.band, META)
    factor = gl.maximum(same.scale * LOG2E, 1e-37)  # a hidden score is -inf, and -inf * 0 would be NaN
    p, row_max, correction = exponentials(s, row_maximum(s, BLOCK_N), carry.row_max, factor, META)
    row_sum = carry.row_sum * correction + gl.sum(p, 1)
    t = warpgroup_mma_wait(0, deps=[t])
    pipeline.release(buffers.barriers.k_empty, stage)
    row_tangent = carry.row_tangent * correction + gl.sum(p * t, 1)
    mean = row_tangent * same.scale / gl.where(row_sum == 0.0, 1.0, row_sum)
    pairs = pack_pairs(p, ROWS, BLOCK_N, DTYPE)
    weighted = pack_pairs(p * (t * same.scale - mean[:, None]), ROWS, BLOCK_N, DTYPE)
    sums = _moved(carry.sums, correction, mean - carry.mean, META)
    sums1 = carry.sums1
    if META.QK1 > 0:
        sums1 = _moved(sums1, correction, mean - carry.mean, META)
    return Carry(
        p=pairs,
        weighted=weighted,
        row_max=row_max,
        row_sum=row_sum,
        row_tangent=row_tangent,
        mean=mean,
        sums=sums,
        sums1=sums1,
    )


@gluon.jit
def _begin_values(carry: Carry, slot, buffers: TangentBuffers, META: gl.constexpr):
    # Returns both parts of the sums with a block's products with v and its tangent, which are in flight
    v = buffers.v
    DTYPE: gl.constexpr = v.given.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    P: gl.constexpr = gl.DotOperandLayout(0, product_layout(META.QK0), 2)
    p, weighted = unpack_pairs(carry.p, ROWS, BLOCK_N, P, DTYPE), unpack_pairs(carry.weighted, ROWS, BLOCK_N, P, DTYPE)
    v0 = v.given.first.index(slot).reshape([BLOCK_N, META.QK0])
    tv0 = v.tangent.first.index(slot).reshape([BLOCK_N, META.QK0])
    sums, sums1 = _begin_products(carry.sums, p, weighted, v0, tv0), carry.sums1
    if META.QK1 > 0:
        v1 = v.given.second.index(slot).reshape([BLOCK_N, META.QK1])
        tv1 = v.tangent.second.index(slot).reshape([BLOCK_N, META.QK1])
        sums1 = _begin_products(sums1, p, weighted, v1, tv1)
    return sums, sums1


@gluon.jit
def _wait_for_values(sums: Columns, sums1: Columns, carry: Carry, IN_FLIGHT: gl.constexpr, META: gl.constexpr):
    # IN_FLIGHT: later products
    if META.QK1 > 0:
        out, tangent, out1, tangent1 = warpgroup_mma_wait(IN_FLIGHT, deps=[sums.out, sums.tangent, sums1.out, sums1.tangent])
        sums1 = Columns(out=out1, tangent=tangent1)
    else:
        out, tangent = warpgroup_mma_wait(IN_FLIGHT, deps=[sums.out, sums.tangent])
    keep_pairs(carry.p)
    keep_pairs(carry.weighted)
    return Columns(out=out, tangent=tangent), sums1


@gluon.jit
def _with_sums(carry: Carry, sums: Columns, sums1: Columns):
    return Carry(
        p=carry.p,
        weighted=carry.weighted,
        row_max=carry.row_max,
        row_sum=carry.row_sum,
        row_tangent=carry.row_tangent,
        mean=carry.mean,
        sums=sums,
        sums1=sums1,
    )


@gluon.jit
def _iterate(column, n_block, same: Same, carry: Carry, buffers: TangentBuffers, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Processes the next block of keys. Products with the previous block's values and the next scores are issued together, and the
    # scores' tangents as soon as the registers of the previous weights are free.
    barriers = buffers.barriers
    stage, v_stage = Stage(n_block, META.STAGES), Stage(n_block - 1, META.STAGES)
    slot = pipeline.index(stage)
    pipeline.wait_full(barriers.v_full, v_stage)
    pipeline.wait_full(barriers.k_full, stage)
    if META.PINGPONG:
        wait_for_turn(CONSUMER)
    sums, sums1 = _begin_values(carry, pipeline.index(v_stage), buffers, META)
    s = _begin_scores(slot, same, buffers, META)
    sums, sums1 = _wait_for_values(sums, sums1, carry, 2 if META.QK1 > 0 else 1, META)
    pipeline.release(barriers.v_empty, v_stage)
    t = _begin_tangents(slot, same, buffers, META)
    if META.PINGPONG:
        pass_turn(CONSUMER, META.CONSUMERS)
    return _weigh(s, t, column, stage, same, _with_sums(carry, sums, sums1), buffers, META)


@gluon.jit
def _normalized(sums: Columns, factor):
    factor = gl.convert_layout(factor, gl.SliceLayout(1, sums.out.type.layout))[:, None]
    return Columns(out=sums.out * factor, tangent=sums.tangent * factor)


@gluon.jit
def _write(part, tile):
    tile.reshape(part.shape).store(part.to(tile.dtype))


@gluon.jit
def _store(
    sums: Columns, sums1: Columns, out: Twin, buffers: TangentBuffers, place: Place, CONSUMER: gl.constexpr, META: gl.constexpr
):
    # Stores both parts of out and of its tangent. place: its head and start are those of the descriptors
    QK0: gl.constexpr = META.QK0
    token, length, row, head = place.start, place.length, place.first, place.h
    if META.OUT_PARTS == 1:  # the stores wait only for those of the previous work tile
        SLOT: gl.constexpr = 2 * CONSUMER
        tma.store_wait(0)
        _write(sums.out, buffers.out.index(SLOT))
        _write(sums.tangent, buffers.out.index(SLOT + 1))
        if META.QK1 > 0:
            _write(sums1.out, buffers.out1.index(SLOT))
            _write(sums1.tangent, buffers.out1.index(SLOT + 1))
        fence_async_shared()
        store_rows(out.given.first, token, length, row, head, 0, buffers.out.index(SLOT))
        store_rows(out.tangent.first, token, length, row, head, 0, buffers.out.index(SLOT + 1))
        if META.QK1 > 0:
            store_rows(out.given.second, token, length, row, head, QK0, buffers.out1.index(SLOT))
            store_rows(out.tangent.second, token, length, row, head, QK0, buffers.out1.index(SLOT + 1))
    else:
        store_out(sums.out, 0, token, length, row, head, out.given.first, buffers.out.index(CONSUMER))
        store_out(sums.tangent, 0, token, length, row, head, out.tangent.first, buffers.out.index(CONSUMER))
        if META.QK1 > 0:
            store_out(sums1.out, QK0, token, length, row, head, out.given.second, buffers.out1.index(CONSUMER))
            store_out(sums1.tangent, QK0, token, length, row, head, out.tangent.second, buffers.out1.index(CONSUMER))


@gluon.jit
def _compute_partition(args: TangentArguments, buffers: TangentBuffers, CONSUMER: gl.constexpr, META: gl.constexpr):
    call, barriers = args.call, buffers.barriers
    DTYPE: gl.constexpr = buffers.v.given.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = zero_rows(BLOCK_N)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if META.PINGPONG and CONSUMER == META.CONSUMERS - 1:
        pass_turn(CONSUMER, META.CONSUMERS)  # consumer 0 begins
    n_block = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = work_tiles.received_tile(numbers, call, META)
        tile, band = received.tile, received.band
        m_start = tile.first_row + CONSUMER * ROWS
        skipped, num_blocks, block_range = blocks_of_consumer(m_start, received.num_blocks, received.block_range, band, META)
        rows, h = rows_and_heads(m_start, tile.h, band.len_q, ROW, META)
        q_stage = Stage(n_tile, META.Q_STAGES)
        same = Same(
            rows=rows,
            block_columns=block_columns,
            band=band,
            m_start=m_start,
            scale=call.scores.scale,
            q_slot=CONSUMER + pipeline.index(q_stage) * META.CONSUMERS,
            zeros=zeros,
        )
        no_weights = pack_pairs(zeros, ROWS, BLOCK_N, DTYPE)
        row_zeros = gl.zeros([ROWS], gl.float32, layout=ROW)
        acc, acc1 = zero_parts(META)
        carry = Carry(
            p=no_weights,
            weighted=no_weights,
            row_max=gl.full([ROWS], float("-inf"), gl.float32, layout=ROW),
            row_sum=row_zeros,
            row_tangent=row_zeros,
            mean=row_zeros,
            sums=Columns(out=acc, tangent=acc),
            sums1=Columns(out=acc1, tangent=acc1),
        )
        mbarrier.wait(barriers.q_full.index(same.q_slot), pipeline.phase(q_stage))
        if META.SKIPS:
            n_block = skip_blocks(skipped, n_block, barriers, CONSUMER, META)
        if num_blocks > 0:
            stage = Stage(n_block, META.STAGES)
            slot = pipeline.index(stage)
            pipeline.wait_full(barriers.k_full, stage)
            if META.PINGPONG:
                wait_for_turn(CONSUMER)
            s = _begin_scores(slot, same, buffers, META)
            t = _begin_tangents(slot, same, buffers, META)
            if META.PINGPONG:
                pass_turn(CONSUMER, META.CONSUMERS)
            column = key_block(num_blocks - 1, block_range, META)[0]
            carry = _weigh(s, t, column, stage, same, carry, buffers, META)
        for iteration in range(1, num_blocks):
            column = key_block(num_blocks - 1 - iteration, block_range, META)[0]
            carry = _iterate(column, n_block + iteration, same, carry, buffers, CONSUMER, META)
        n_block += num_blocks
        mbarrier.arrive(barriers.q_empty.index(same.q_slot), count=1)
        if META.PINGPONG:  # also without blocks, as the other consumer counts on it
            wait_for_turn(CONSUMER)
        if num_blocks > 0:
            v_stage = Stage(n_block - 1, META.STAGES)
            pipeline.wait_full(barriers.v_full, v_stage)
            sums, sums1 = _begin_values(carry, pipeline.index(v_stage), buffers, META)
            sums, sums1 = _wait_for_values(sums, sums1, carry, 0, META)
            pipeline.release(barriers.v_empty, v_stage)
            carry = _with_sums(carry, sums, sums1)
        if META.PINGPONG:
            pass_turn(CONSUMER, META.CONSUMERS)
        if META.SKIPS:
            n_block = skip_blocks(received.num_blocks - skipped - num_blocks, n_block, barriers, CONSUMER, META)
        row_sum_or_1 = gl.where(carry.row_sum == 0.0, 1.0, carry.row_sum)
        lse_row = statistics_row(received, CONSUMER, rows, h, call, META)
        store_lse(carry.row_max, row_sum_or_1, lse_row, rows, received, call, META)
        gl.store(args.tlse_ptr + lse_row + rows, carry.mean, mask=rows < band.len_q)
        token, head = received.start_q + tile.b * args.out.step.tokens, tile.h + tile.b * args.out.step.heads
        place = Place(b=0, h=head, start=token, first=m_start, length=band.len_q)
        sums, sums1 = _normalized(carry.sums, 1.0 / row_sum_or_1), carry.sums1
        if META.QK1 > 0:
            sums1 = _normalized(sums1, 1.0 / row_sum_or_1)
        _store(sums, sums1, args.out, buffers, place, CONSUMER, META)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)
    if META.PINGPONG and CONSUMER == 0:
        wait_for_turn(CONSUMER)


@gluon.jit
def _allocate_twin(NUM: gl.constexpr, twin: Twin, META: gl.constexpr):
    return TwinTiles(
        given=tile_pairs.allocate_pair(NUM, twin.given, META), tangent=tile_pairs.allocate_pair(NUM, twin.tangent, META)
    )


@gluon.jit
def _allocate_key_twin(twin: Twin, META: gl.constexpr):
    return TwinTiles(given=tile_pairs.allocate_key_pair(twin.given, META), tangent=tile_pairs.allocate_key_pair(twin.tangent, META))


@hopper_kernel
def _attn_tangent_hopper_kernel(args: TangentArguments, META: gl.constexpr):
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    OUT_TILES: gl.constexpr = 2 * CONSUMERS // META.OUT_PARTS
    out1 = ()
    if META.QK1 > 0:
        out1 = allocate_tiles(OUT_TILES, args.out.given.second)
    buffers = TangentBuffers(
        q=_allocate_twin(CONSUMERS * META.Q_STAGES, args.q, META),
        k=_allocate_key_twin(args.k, META),
        v=_allocate_key_twin(args.v, META),
        out=allocate_tiles(OUT_TILES, args.out.given.first),
        out1=out1,
        barriers=allocate_forward_barriers(CONSUMERS, CONSUMERS, META),
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_compute_partition, (args, buffers, 0, META)),
                (_compute_partition, (args, buffers, 1, META)),
                (_load_partition, (args, buffers, META)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, META)),
                (_compute_partition, (args, buffers, 1, META)),
                (_compute_partition, (args, buffers, 2, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


class TangentResults(NamedTuple):
    """Memory for out and its tangent, in one layout, and for lse."""

    out: Tensor
    tout: Tensor
    lse: Tensor


def forward_with_tangent(problem: Problem, along: Along, results: TangentResults, tile: HopperTile | None = None) -> Tensor:
    """Launches the kernel for a call that `conditions.tangent_unsupported` does not reject. Returns the tangent of lse."""
    x, tile = problem, tile or tangent_tile(problem)
    out, tout, lse = results
    tlse = torch.zeros_like(lse) if x.has_padding_q else torch.empty_like(lse)
    meta = forward_meta(x, tile, 1, Cut(False, False))
    tiles, processors = tiles_and_room(x, tile, 1)
    work = forward_work(x, tile.block_m, 1, has_table=tiles > processors)
    stored = Results(lse_ptr=lse, max_logit_ptr=None, parts_ptr=None, whole_lse_ptr=None, out=None)
    widths = (meta.QK0, meta.QK1)

    def twin_of(given: Tensor, tangent: Tensor, rows: int) -> Twin:
        first, second = (tile_pairs.pair_descriptor(t, rows, widths) for t in (given, tangent))
        return Twin(first, second, step_of(given), step_of(tangent))

    args = TangentArguments(
        call=forward_arguments(x, None, None, stored, work, SplitKeys(None, None)),
        q=twin_of(x.q, readable(along.q), ROWS.value),
        k=twin_of(x.k, readable(along.k), tile.block_n),
        v=twin_of(x.v, readable(along.v), tile.block_n),
        out=twin_of(out, tout, ROWS.value),
        tlse_ptr=tlse,
    )
    programs = min(processors, tiles)
    launch(_attn_tangent_hopper_kernel, programs, x.device, Tile(tile.block_m, tile.block_n, 4, tile.num_stages), (args, meta))
    if x.has_padding_q:
        zero_padding(x, out, "q", lse)
        zero_padding(x, tout, "q")
    return tlse
