"""Consumers of the fused backward for sm_90, in 16 bits and in FP8: dk and dv of 64 keys each, and half of each tile of dq.

If the head dim has two parts, the first consumer computes the first part of dq, and the second consumer the other one. The other
warpgroup's ds also contributes to a tile of dq. dq is computed in the next iteration, so that no warpgroup waits for the other in
the middle of one. The products of an iteration, and the work that overlaps them:

    DP_FIRST   dp | p | dv | ds | dk, dq of the last iteration
    else       dq of the last iteration | p | dv, dp | ds | dk

The scores precede all of it; with IS_AHEAD they begin at the end of the previous iteration. In FP8, scores and dp are products of
FP8 tiles, and the others use the 16-bit copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.scores import through_mods
from flexattn.kernels_triton.gluon import barriers as named
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    ScorePlace,
    first_query_head,
    head_at,
    key_block,
    next_query_block,
    probabilities,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_parts import convert_part, is_key_block
from flexattn.kernels_triton.gluon.dq_sums import DqRing, hand_over_dq, write_dq
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import store_key_gradient
from flexattn.kernels_triton.gluon.fused_arguments import Begun, FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pipeline import STAGES, Stage
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import dq_product, product_layout, zero_rows


@gluon.constexpr_function
def _scores_layout(META):
    return product_layout(META.BLOCK_M, 32 if META.IS_FP8 else 16)


class _Consumer(NamedTuple):
    """The 64 keys of a consumer, and the iterations over the blocks of queries of all query heads."""

    n_start: gl.tensor
    rows: gl.tensor  # positions of the keys
    block_columns: gl.tensor  # queries of a block
    uncut_from: gl.tensor  # from `first_uncut_query`
    draws: Any  # from `dropout_state`
    scale: gl.tensor  # factor of the scores
    iterations: gl.tensor
    before: int | gl.tensor  # iterations of the program's earlier blocks of keys
    k_tile: int | gl.tensor  # the block's first tile of k
    v_tile: int | gl.tensor


@gluon.jit
def _consumer_of(args: FusedArguments, block: Block, begun: Begun, CONSUMER: gl.constexpr, META: gl.constexpr):
    SCORES: gl.constexpr = _scores_layout(META)
    n_start = block.first_row + CONSUMER * ROWS
    k_tile = 2 * pipeline.index(Stage(begun.blocks, META.K_STAGES))
    return _Consumer(
        n_start=n_start,
        rows=n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)),
        block_columns=gl.arange(0, META.BLOCK_M, layout=gl.SliceLayout(0, SCORES)),
        uncut_from=first_uncut_query(n_start, ROWS, block.band, META),
        draws=dropout_state(args.dropout, block.first_head, META),
        scale=args.scores.scale,
        iterations=block.num_blocks * block.heads,
        before=begun.iterations,
        k_tile=k_tile,
        v_tile=2 * pipeline.index(Stage(begun.blocks, META.V_STAGES)),
    )


class _Iteration(NamedTuple):
    """A block of queries of one query head, as a consumer visits it."""

    row: gl.tensor  # the first query
    columns: gl.tensor  # positions of the queries
    is_full: Any  # whether the block mask calls the block full
    zero: gl.tensor  # from `opaque_zero`
    n: gl.tensor  # the iteration's number in the program
    stage: Stage  # the stage of q and dout
    index: gl.tensor
    phase: gl.tensor
    current: gl.tensor  # slot of the iteration's ds
    last: gl.tensor  # slot of the last iteration's ds
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # the consumer's rows
    v: gl.shared_memory_descriptor
    key_tile: gl.tensor  # the place of k among its tiles
    value_tile: gl.tensor


@gluon.jit
def _iteration(m_block, n_block, consumer: _Consumer, block: Block, tiles: FusedTiles, CONSUMER: gl.constexpr, META: gl.constexpr):
    DIM: gl.constexpr = META.DIM
    row, is_full = query_block(n_block, block.block_range, META)
    zero = opaque_zero(m_block)
    n = consumer.before + m_block
    stage = Stage(n, STAGES)
    index = pipeline.index(stage)
    key_tile = consumer.k_tile + zero + CONSUMER
    value_tile = consumer.v_tile + zero + CONSUMER
    return _Iteration(
        row=row,
        columns=row + consumer.block_columns,
        is_full=is_full,
        zero=zero,
        n=n,
        stage=stage,
        index=index,
        phase=pipeline.phase(stage),
        current=named.ds_slot(m_block),
        last=named.ds_slot(m_block + 1),
        dout=tiles.dout.index(index).reshape([META.BLOCK_M, DIM]),
        k=tiles.k.index(key_tile).reshape([ROWS, DIM]),
        v=tiles.v.index(value_tile).reshape([ROWS, DIM]),
        key_tile=key_tile,
        value_tile=value_tile,
    )


@gluon.jit
def _keys_by_queries(keys, keys1_tiles, key_tile, queries, queries1_tiles, index, zeros, META: gl.constexpr):
    # Multiplies 64 rows of k or v by the rows of q or dout in a stage, transposed. The arguments with a 1 are the second parts of
    # the head dim, which are () if there are none.
    product = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if META.DIM1 > 0:
        keys1 = keys1_tiles.index(key_tile).reshape([ROWS, META.DIM1])
        queries1 = queries1_tiles.index(index).reshape([META.BLOCK_M, META.DIM1])
        product = warpgroup_mma(keys1, queries1.permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def _begin_scores(tiles: FusedTiles, consumer_k, key_tile, barriers: FusedBarriers, index, phase, has_next, META: gl.constexpr):
    # Issues the scores of the q in a stage, transposed, without a wait for them.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    mbarrier.wait(barriers.q_full.index(index), phase, pred=has_next)
    q = tiles.q.index(index).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=_scores_layout(META))
    if META.DIM1 > 0:
        return _keys_by_queries(consumer_k, tiles.second.k, key_tile, q, tiles.second.q, index, zeros, META)
    else:
        return _keys_by_queries(consumer_k, (), key_tile, q, (), index, zeros, META)


@gluon.jit
def _begin_first_scores(
    tiles: FusedTiles, barriers: FusedBarriers, consumer: _Consumer, CONSUMER: gl.constexpr, META: gl.constexpr
):
    key_tile = consumer.k_tile + opaque_zero(consumer.iterations) + CONSUMER
    k = tiles.k.index(key_tile).reshape([ROWS, META.DIM])
    stage = Stage(consumer.before, STAGES)
    index = pipeline.index(stage)
    return _begin_scores(tiles, k, key_tile, barriers, index, pipeline.phase(stage), consumer.iterations > 0, META)


@gluon.jit
def _begin_next_scores(tiles: FusedTiles, barriers: FusedBarriers, now: _Iteration, has_next, META: gl.constexpr):
    # The last iteration repeats its own scores, without use.
    stage = Stage(now.n + 1, STAGES)
    index = gl.where(has_next, pipeline.index(stage), now.index)
    return _begin_scores(tiles, now.k, now.key_tile, barriers, index, pipeline.phase(stage), has_next, META)


@gluon.jit
def _begin_dp(tiles: FusedTiles, now: _Iteration, zeros, META: gl.constexpr):
    if META.DIM1 > 0:
        second = tiles.second
        return _keys_by_queries(now.v, second.v, now.value_tile, now.dout, second.dout, now.index, zeros, META)
    else:
        return _keys_by_queries(now.v, (), now.value_tile, now.dout, (), now.index, zeros, META)


@gluon.jit
def _begin_dv(p16, tiles: FusedTiles, index, dv, dv1, META: gl.constexpr):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    dout_tiles = tiles.dout16 if META.IS_FP8 else tiles.dout
    dv = warpgroup_mma(p16, dout_tiles.index(index).reshape([BLOCK_M, META.DIM]), dv, is_async=True)
    if META.DIM1 > 0:
        dv1 = warpgroup_mma(p16, tiles.second.dout.index(index).reshape([BLOCK_M, META.DIM1]), dv1, is_async=True)
    return dv, dv1


@gluon.jit
def _begin_dk(ds16, tiles: FusedTiles, index, dk, dk1, META: gl.constexpr):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = tiles.q16 if META.IS_FP8 else tiles.q
    dk = warpgroup_mma(ds16, q_tiles.index(index).reshape([BLOCK_M, META.DIM]), dk, is_async=True)
    if META.DIM1 > 0:
        dk1 = warpgroup_mma(ds16, tiles.second.q.index(index).reshape([BLOCK_M, META.DIM1]), dk1, is_async=True)
    return dk, dk1


@gluon.jit
def _begin_dq(tiles: FusedTiles, slot, k_tile, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Returns this warpgroup's share of a tile of dq, in flight
    if META.DIM1 > 0 and CONSUMER == 1:
        return dq_product(tiles.ds, tiles.second.k, slot, k_tile, META.DIM1, CONSUMER, META)
    else:
        return dq_product(tiles.ds, tiles.k16 if META.IS_FP8 else tiles.k, slot, k_tile, META.DIM, CONSUMER, META)


@gluon.jit
def _wait_for_sums(sums, sums1, left, IN_FLIGHT: gl.constexpr, META: gl.constexpr):
    # Waits for both parts of dk or dv; left: the product's operand in registers
    if META.DIM1 > 0:
        sums, sums1, left = warpgroup_mma_wait(IN_FLIGHT, deps=[sums, sums1, left])
    else:
        sums, left = warpgroup_mma_wait(IN_FLIGHT, deps=[sums, left])
    return sums, sums1, left


@gluon.jit
def _wait_for_all_sums(dv, dv1, p16, dk, dk1, ds16, IN_FLIGHT: gl.constexpr, META: gl.constexpr):
    if META.DIM1 > 0:
        dv, dv1, p16, dk, dk1, ds16 = warpgroup_mma_wait(IN_FLIGHT, deps=[dv, dv1, p16, dk, dk1, ds16])
    else:
        dv, p16, dk, ds16 = warpgroup_mma_wait(IN_FLIGHT, deps=[dv, p16, dk, ds16])
    return dv, dv1, p16, dk, dk1, ds16


@gluon.jit
def _ring_of(tiles: FusedTiles, barriers: FusedBarriers, CONSUMER: gl.constexpr, META: gl.constexpr):
    if META.DIM1 > 0 and CONSUMER == 1:
        return DqRing(tiles=tiles.second.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    else:
        return DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)


@gluon.jit
def _simulate_iteration(tiles: FusedTiles, zeros, CONSUMER: gl.constexpr):
    # Writes the ds of an iteration before the first: 0.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(tiles.ds.dtype))
    fence_async_shared()
    named.announce_written(2, CONSUMER)


@gluon.jit
def _begin_turns(iterations, CONSUMER: gl.constexpr, META: gl.constexpr):
    if iterations > 0:
        if META.DP_FIRST:
            named.announce_read(0, CONSUMER)
        if META.PINGPONG and CONSUMER == 1:
            named.named_barrier_arrive_at(named.TURN, named.BOTH)  # the first warpgroup begins


@gluon.jit
def _end_turn(zero, has_next, CONSUMER: gl.constexpr, META: gl.constexpr):
    if META.PINGPONG:
        if CONSUMER == 0:
            named.named_barrier_arrive_at(named.TURN + 1 + zero, named.BOTH)
        elif has_next:
            named.named_barrier_arrive_at(named.TURN + zero, named.BOTH)


@gluon.jit
def _release_dout(barriers: FusedBarriers, stage: Stage, META: gl.constexpr):
    if META.DOUT_APART:
        pipeline.release(barriers.dout_empty, stage)


class _Sums(NamedTuple):
    """dk without the softmax scale, and dv, of a consumer's keys. A second part is () if the head dim has one part."""

    dk: gl.tensor
    dk1: Any
    dv: gl.tensor
    dv1: Any


@gluon.jit
def _store_sums(
    sums: _Sums,
    consumer: _Consumer,
    args: FusedArguments,
    tiles: FusedTiles,
    block: Block,
    CONSUMER: gl.constexpr,
    META: gl.constexpr,
):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    DTYPE: gl.constexpr = tiles.ds.dtype
    scores, draws, dk, dv = args.scores, consumer.draws, sums.dk, sums.dv
    k_tile, v_tile = consumer.k_tile + CONSUMER, consumer.v_tile + CONSUMER
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, CONSUMER * ROWS, 0)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, CONSUMER * ROWS, 0)
        if META.DIM1 > 0:
            store_key_gradient(args.dk32, sums.dk1 * scores.scale, block, CONSUMER * ROWS, DIM)
            store_key_gradient(args.dv32, scaled(sums.dv1, draws, META), block, CONSUMER * ROWS, DIM)
    else:
        k16_tiles = tiles.k16 if META.IS_FP8 else tiles.k
        k16_tiles.index(k_tile).reshape([ROWS, DIM]).store((dk * scores.scale).to(DTYPE))
        if META.IS_FP8:
            tiles.dout16.index(CONSUMER).reshape([BLOCK_M, DIM]).slice(0, ROWS, 0).store(dv.to(DTYPE))
        else:
            tiles.v.index(v_tile).reshape([ROWS, DIM]).store(scaled(dv, draws, META).to(DTYPE))
        if META.DIM1 > 0:
            k1, v1 = tiles.second.k.index(k_tile), tiles.second.v.index(v_tile)
            k1.reshape([ROWS, META.DIM1]).store((sums.dk1 * scores.scale).to(DTYPE))
            v1.reshape([ROWS, META.DIM1]).store(scaled(sums.dv1, draws, META).to(DTYPE))


@gluon.jit
def _end_iterations(
    tiles: FusedTiles, barriers: FusedBarriers, ring: DqRing, consumer: _Consumer, CONSUMER: gl.constexpr, META: gl.constexpr
):
    # Releases the last q, and computes the last iteration's dq.
    n = consumer.before + consumer.iterations - 1
    if META.IS_AHEAD and META.NUMBERS > 0:  # noqa: SIM102
        if consumer.iterations > 0:
            pipeline.release(barriers.q_empty, Stage(n, STAGES))
    last = named.ds_slot(consumer.iterations + 1)
    named.wait_written(last, CONSUMER)
    if consumer.iterations > 0:
        dq = _begin_dq(tiles, last, consumer.k_tile, CONSUMER, META)  # dQ = dS^T K
        dq = warpgroup_mma_wait(0, deps=[dq])
        write_dq(dq, ring, n, CONSUMER, META)
        hand_over_dq(ring, n, META)


class _Scored(NamedTuple):
    """The probabilities of an iteration, and what their derivative needs."""

    p: gl.tensor
    cap_tanh: float | gl.tensor  # for this and `score` see `logits`
    score: gl.tensor
    i: gl.tensor  # positions of the queries and of the keys
    j: gl.tensor


@gluon.jit
def _scored(
    raw_s,
    now: _Iteration,
    consumer: _Consumer,
    head: Head,
    block: Block,
    tiles: FusedTiles,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    i, j = now.columns[None, :], consumer.rows[:, None]
    s_factor = score_factor(tiles.factors, now.index, gl.SliceLayout(0, raw_s.type.layout), META)
    s, factor, cap_tanh, score = product_logits(raw_s, i, j, head, consumer.scale, s_factor, MODS, META)
    is_cut = cuts_block(now.row, consumer.n_start, consumer.uncut_from, block.band, META)
    place = ScorePlace(rows=consumer.rows, columns=now.columns, row=now.row, is_cut=is_cut, is_full=now.is_full)
    minus_lse = tiles.statistics.index(now.index).slice(0, META.BLOCK_M)
    p = probabilities(s, factor, place, minus_lse, head, block, MODS, META)
    return _Scored(p=p, cap_tanh=cap_tanh, score=score, i=i, j=j)


@gluon.jit
def _consume_block(
    args: FusedArguments,
    tiles: FusedTiles,
    barriers: FusedBarriers,
    block: Block,
    begun: Begun,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Computes dk and dv of 64 keys, and half of each tile of dq; the top of this file shows the order of the products.
    scores = args.scores
    ring = _ring_of(tiles, barriers, CONSUMER, META)
    DTYPE: gl.constexpr = tiles.ds.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    LEFT: gl.constexpr = gl.DotOperandLayout(0, product_layout(META.DIM), 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, _scores_layout(META))
    PARTS: gl.constexpr = 2 if META.DIM1 > 0 else 1  # products for each of scores, dp, dv and dk
    SCORES_IN_FLIGHT: gl.constexpr = PARTS if META.IS_AHEAD else 0
    # dq has a product with the keys of each warpgroup
    IN_FLIGHT: gl.constexpr = SCORES_IN_FLIGHT + (2 if META.DP_FIRST else 0)
    gl.static_assert(META.DP_FIRST or META.IS_AHEAD)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=_scores_layout(META))
    dk, dk1 = zero_rows(META.DIM), zero_rows(META.DIM1)
    dv, dv1 = dk, dk1
    consumer = _consumer_of(args, block, begun, CONSUMER, META)
    _simulate_iteration(tiles, zeros, CONSUMER)
    if META.IS_FP8 and META.NUMBERS == 0:
        mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = first_query_head(block, args.work, scores, MODS, META)
    raw_s = zeros
    _begin_turns(consumer.iterations, CONSUMER, META)
    if META.IS_AHEAD:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if consumer.iterations > 0:
            raw_s = _begin_first_scores(tiles, barriers, consumer, CONSUMER, META)  # S = K Q^T
            raw_s = warpgroup_mma_wait(0, deps=[raw_s])
    for m_block in range(consumer.iterations):
        now = _iteration(m_block, position.n, consumer, block, tiles, CONSUMER, META)
        index = now.index
        if META.DP_FIRST:
            if not META.IS_AHEAD:
                raw_s = _begin_scores(tiles, now.k, now.key_tile, barriers, index, now.phase, True, META)  # S = K Q^T
            mbarrier.wait(barriers.dout_full.index(index), now.phase)
            dp = _begin_dp(tiles, now, zeros, META)  # dP = V dO^T
            if not META.IS_AHEAD:
                raw_s = warpgroup_mma_wait(PARTS, deps=[raw_s])
        else:
            named.wait_written(now.last, CONSUMER)
            dq = _begin_dq(tiles, now.last, consumer.k_tile + now.zero, CONSUMER, META)  # dQ = dS^T K, of the last iteration
        drawn = drawn_weights(consumer.draws, position.h, now.row, consumer.n_start, BLOCK_M, True, META)
        if META.PINGPONG:
            named.named_barrier_sync_at(named.TURN + CONSUMER + now.zero, named.BOTH)
        head = head_at(position, values, block, scores, META)
        scored = _scored(raw_s, now, consumer, head, block, tiles, MODS, META)  # P = exp(S - lse)
        p16 = gl.convert_layout(kept(scored.p, drawn, True, META).to(DTYPE), LEFT)
        has_next = m_block + 1 < consumer.iterations
        _end_turn(now.zero, has_next, CONSUMER, META)
        if not META.DP_FIRST:
            # Between exp and the wait for dq: ptxas moves a wait for all products to the start of its basic block, which is here.
            mbarrier.wait(barriers.dout_full.index(index), now.phase)
            dq = warpgroup_mma_wait(0, deps=[dq])
        dv, dv1 = _begin_dv(p16, tiles, index, dv, dv1, META)  # dV += P dO
        if META.DP_FIRST:
            dp = warpgroup_mma_wait(PARTS, deps=[dp])
        else:
            if m_block > 0:  # during the product; dp then reuses the registers of dq
                write_dq(dq, ring, now.n - 1, CONSUMER, META)
            dp = _begin_dp(tiles, now, zeros, META)  # dP = V dO^T
            if m_block > 0:
                hand_over_dq(ring, now.n - 1, META)
            dv, dv1, p16 = _wait_for_sums(dv, dv1, p16, PARTS, META)
        minus_delta = tiles.statistics.index(index).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        if not META.DP_FIRST:
            dp = warpgroup_mma_wait(0, deps=[dp])
            _release_dout(barriers, now.stage, META)
        if META.IS_FP8:
            dp = dp * dp_factor_of(tiles.factors, index, COLUMNS, META)
        dlogit = scored.p * (kept_gradient(dp, drawn, consumer.draws, True, META) + minus_delta[None, :])
        ds = through_mods(dlogit, scored.cap_tanh, scored.score, scored.i, scored.j, head, MODS, META).to(DTYPE)
        if META.DP_FIRST:  # the other warpgroup's dq of two iterations ago has read the buffer that is overwritten
            named.wait_read(now.current, CONSUMER)
        tiles.ds.index(now.current + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        if META.DP_FIRST and not META.DV_WITH_DK:
            dv, dv1, p16 = _wait_for_sums(dv, dv1, p16, 0, META)
            _release_dout(barriers, now.stage, META)
        dk, dk1 = _begin_dk(ds16, tiles, index, dk, dk1, META)  # dK += dS Q
        fence_async_shared()  # during the product
        named.announce_written(now.current, CONSUMER)
        if META.DP_FIRST:
            named.wait_written(now.last, CONSUMER)
            dq = _begin_dq(tiles, now.last, consumer.k_tile + now.zero, CONSUMER, META)  # dQ = dS^T K, of the last iteration
        if META.IS_AHEAD:
            next_raw_s = _begin_next_scores(tiles, barriers, now, has_next, META)  # S = K Q^T
        if META.DP_FIRST and META.DV_WITH_DK:
            dv, dv1, p16, dk, dk1, ds16 = _wait_for_all_sums(dv, dv1, p16, dk, dk1, ds16, IN_FLIGHT, META)
            _release_dout(barriers, now.stage, META)
        else:
            dk, dk1, ds16 = _wait_for_sums(dk, dk1, ds16, IN_FLIGHT, META)
        if META.IS_AHEAD and META.NUMBERS > 0:  # the last iteration's unused read must end before q is overwritten
            mbarrier.arrive(barriers.q_empty.index(index), count=1, pred=has_next)
        else:
            pipeline.release(barriers.q_empty, now.stage)
        if META.DP_FIRST:
            dq = warpgroup_mma_wait(SCORES_IN_FLIGHT, deps=[dq])
            if has_next:
                named.announce_read(now.last, CONSUMER)
            if m_block > 0:
                write_dq(dq, ring, now.n - 1, CONSUMER, META)
                hand_over_dq(ring, now.n - 1, META)
        if META.IS_AHEAD:
            raw_s = warpgroup_mma_wait(0, deps=[next_raw_s])
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    _end_iterations(tiles, barriers, ring, consumer, CONSUMER, META)
    # k, and in FP8 dout in 16 bits, were also read by the other warpgroup, which no longer needs them
    named.named_barrier_sync(named.LAST, named.BOTH)
    _store_sums(_Sums(dk=dk, dk1=dk1, dv=dv, dv1=dv1), consumer, args, tiles, block, CONSUMER, META)
    fence_async_shared()
    pipeline.release(barriers.dkdv_full, Stage(begun.blocks, META.K_STAGES))


@gluon.jit
def consume_fused(
    args: FusedArguments,
    tiles: FusedTiles,
    barriers: FusedBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # block: of a program that has one
    if META.NUMBERS == 0:
        _consume_block(args, tiles, barriers, block, Begun(blocks=0, iterations=0), CONSUMER, MODS, META)
    else:
        n_tile = 0
        blocks = 0
        iterations = 0
        numbers = receive_tile(n_tile, barriers, META)
        while is_tile(numbers):
            if META.CONVERTED == 0 or is_key_block(numbers):
                drawn = key_block(numbers, args, META)
                begun = Begun(blocks=blocks, iterations=iterations)
                _consume_block(args, tiles, barriers, drawn, begun, CONSUMER, MODS, META)
                blocks += 1
                iterations += drawn.num_blocks * drawn.heads
            else:
                convert_part(numbers, args, CONSUMER, META)
            n_tile += 1
            numbers = receive_tile(n_tile, barriers, META)
