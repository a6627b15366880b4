"""Consumers of the fused backward for sm_90, in 16 bits and in FP8: dk and dv of 64 keys each, and half of each tile of dq."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.scores import through_mods
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
from flexattn.kernels_triton.gluon.barriers import (
    BOTH,
    LAST,
    TURN,
    announce_read,
    announce_written,
    ds_slot,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
    wait_read,
    wait_written,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_parts import convert_part, is_key_block
from flexattn.kernels_triton.gluon.dq_sums import DqRing, hand_over_dq, write_dq, write_second_dq
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import store_key_gradient
from flexattn.kernels_triton.gluon.fused_arguments import Begun, FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pipeline import STAGES, Stage
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import dq_product, second_dq_product


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
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if META.IS_FP8 else 16])
    mbarrier.wait(barriers.q_full.index(index), phase, pred=has_next)
    q = tiles.q.index(index).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    if META.DIM1 > 0:
        return _keys_by_queries(consumer_k, tiles.second.k, key_tile, q, tiles.second.q, index, zeros, META)
    else:
        return _keys_by_queries(consumer_k, (), key_tile, q, (), index, zeros, META)


@gluon.jit
def _begin_dp(tiles: FusedTiles, consumer_v, value_tile, dout, index, zeros, META: gl.constexpr):
    if META.DIM1 > 0:
        return _keys_by_queries(consumer_v, tiles.second.v, value_tile, dout, tiles.second.dout, index, zeros, META)
    else:
        return _keys_by_queries(consumer_v, (), value_tile, dout, (), index, zeros, META)


@gluon.jit
def _begin_second_sum(left, tiles, index, sums, META: gl.constexpr):
    # Issues the second part of dk's or dv's product, from the tiles of q or dout
    return warpgroup_mma(left, tiles.index(index).reshape([META.BLOCK_M, META.DIM1]), sums, is_async=True)


@gluon.jit
def _begin_dq(tiles: FusedTiles, k16_tiles, slot, k_tile, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Returns this warpgroup's share of both parts of a tile of dq, in flight
    dq = dq_product(tiles.ds, k16_tiles, slot, k_tile, CONSUMER, META)  # dQ = dS^T K
    dq1 = ()
    if META.DIM1 > 0:
        dq1 = second_dq_product(tiles.ds, tiles.second.k, slot, k_tile, CONSUMER, META)  # dQ = dS^T K
    return dq, dq1


@gluon.jit
def _wait_for_dq(dq, dq1, IN_FLIGHT: gl.constexpr, META: gl.constexpr):
    if META.DIM1 > 0:
        dq, dq1 = warpgroup_mma_wait(IN_FLIGHT, deps=[dq, dq1])
    else:
        dq = warpgroup_mma_wait(IN_FLIGHT, deps=[dq])
    return dq, dq1


@gluon.jit
def _wait_for_sums(sums, sums1, left, IN_FLIGHT: gl.constexpr, META: gl.constexpr):
    # Waits for both parts of dk or dv; left: the product's operand in registers
    if META.DIM1 > 0:
        sums, sums1, left = warpgroup_mma_wait(IN_FLIGHT, deps=[sums, sums1, left])
    else:
        sums, left = warpgroup_mma_wait(IN_FLIGHT, deps=[sums, left])
    return sums, sums1, left


@gluon.jit
def _write_both_dq(dq, dq1, tiles: FusedTiles, ring: DqRing, n, CONSUMER: gl.constexpr, META: gl.constexpr):
    write_dq(dq, ring, n, CONSUMER, META)
    if META.DIM1 > 0:
        write_second_dq(dq1, tiles.second.dq, n, CONSUMER, META)


@gluon.jit
def _begin_turns(iterations, CONSUMER: gl.constexpr, META: gl.constexpr):
    if iterations > 0:
        if META.DP_FIRST:
            announce_read(0, CONSUMER)
        if META.PINGPONG and CONSUMER == 1:
            named_barrier_arrive_at(TURN, BOTH)  # the first warpgroup begins


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
    # Computes dk and dv of 64 keys, and half of each tile of dq, to which the other warpgroup's ds also contributes. dq is computed
    # in the next iteration, so that no warpgroup waits for the other in the middle of one. The products of an iteration, and the
    # work that overlaps them:
    #
    #   DP_FIRST   dp | p | dv | ds | dk, dq of the last iteration
    #   else       dq of the last iteration | p | dv, dp | ds | dk
    #
    # The scores precede all of it; with IS_AHEAD they begin at the end of the previous iteration. In FP8, scores and dp are
    # products of FP8 tiles, and the others use the 16-bit copies.
    band = block.band
    scores, group_size = args.scores, args.work.group_size
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    q16_tiles, dout16_tiles, k16_tiles = tiles.q, tiles.dout, tiles.k
    if META.IS_FP8:
        q16_tiles, dout16_tiles, k16_tiles = tiles.q16, tiles.dout16, tiles.k16
    DTYPE: gl.constexpr = k16_tiles.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if META.IS_FP8 else 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    gl.static_assert(META.DP_FIRST or META.IS_AHEAD)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    dk1 = ()
    dv1 = ()
    PARTS: gl.constexpr = 2 if META.DIM1 > 0 else 1  # products for each of scores, dp, dv and dk
    if META.DIM1 > 0:
        DIM1: gl.constexpr = META.DIM1
        DK1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM1, 16])
        dk1 = gl.zeros([ROWS, DIM1], gl.float32, layout=DK1)
        dv1 = gl.zeros([ROWS, DIM1], gl.float32, layout=DK1)
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = first_uncut_query(n_start, ROWS, band, META)
    draws = dropout_state(args.dropout, block.first_head, META)
    iterations = block.num_blocks * group_size
    k_tile = 2 * pipeline.index(Stage(begun.blocks, META.K_STAGES))
    v_tile = 2 * pipeline.index(Stage(begun.blocks, META.V_STAGES))
    # Simulates an iteration before the first, whose ds is 0.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    announce_written(2, CONSUMER)
    if META.IS_FP8 and META.NUMBERS == 0:
        mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = first_query_head(block, args.work, scores, MODS, META)
    raw_s = zeros
    _begin_turns(iterations, CONSUMER, META)
    if META.IS_AHEAD:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if iterations > 0:
            key_tile = k_tile + opaque_zero(iterations) + CONSUMER
            consumer_k = tiles.k.index(key_tile).reshape([ROWS, DIM])
            stage = Stage(begun.iterations, STAGES)
            index = pipeline.index(stage)
            phase = pipeline.phase(stage)
            raw_s = _begin_scores(tiles, consumer_k, key_tile, barriers, index, phase, iterations > 0, META)  # S = K Q^T
            raw_s = warpgroup_mma_wait(0, deps=[raw_s])
    for m_block in range(iterations):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        n = begun.iterations + m_block
        stage = Stage(n, STAGES)
        index = pipeline.index(stage)
        phase = pipeline.phase(stage)
        current = ds_slot(m_block)
        last = ds_slot(m_block + 1)
        dout = tiles.dout.index(index).reshape([BLOCK_M, DIM])
        consumer_k = tiles.k.index(k_tile + zero + CONSUMER).reshape([ROWS, DIM])
        consumer_v = tiles.v.index(v_tile + zero + CONSUMER).reshape([ROWS, DIM])
        key_tile = k_tile + zero + CONSUMER
        value_tile = v_tile + zero + CONSUMER
        if META.DP_FIRST:
            if not META.IS_AHEAD:
                raw_s = _begin_scores(tiles, consumer_k, key_tile, barriers, index, phase, True, META)  # S = K Q^T
            mbarrier.wait(barriers.dout_full.index(index), phase)
            dp = _begin_dp(tiles, consumer_v, value_tile, dout, index, zeros, META)  # dP = V dO^T
            if not META.IS_AHEAD:
                raw_s = warpgroup_mma_wait(PARTS, deps=[raw_s])
        else:
            wait_written(last, CONSUMER)
            dq, dq1 = _begin_dq(tiles, k16_tiles, last, k_tile + zero, CONSUMER, META)  # of the last iteration
        drawn = drawn_weights(draws, position.h, row, n_start, BLOCK_M, True, META)
        if META.PINGPONG:
            named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        i, j = columns[None, :], rows[:, None]
        head = head_at(position, values, block, scores, META)
        s_factor = score_factor(tiles.factors, index, COLUMNS, META)
        s, factor, cap_tanh, score = product_logits(raw_s, i, j, head, scores.scale, s_factor, MODS, META)
        is_cut = cuts_block(row, n_start, uncut_from, band, META)
        place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
        minus_lse = tiles.statistics.index(index).slice(0, BLOCK_M)
        p = probabilities(s, factor, place, minus_lse, head, block, MODS, META)
        p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), LEFT)
        has_next = m_block + 1 < iterations  # whether a next iteration exists
        if META.PINGPONG:
            if CONSUMER == 0:
                named_barrier_arrive_at(TURN + 1 + zero, BOTH)
            elif has_next:
                named_barrier_arrive_at(TURN + zero, BOTH)
        if not META.DP_FIRST:
            # Between exp and the wait for dq: ptxas moves a wait for all products to the start of its basic block, which is here.
            mbarrier.wait(barriers.dout_full.index(index), phase)
            dq, dq1 = _wait_for_dq(dq, dq1, 0, META)
        dv = warpgroup_mma(p16, dout16_tiles.index(index).reshape([BLOCK_M, DIM]), dv, is_async=True)  # dV += P dO
        if META.DIM1 > 0:
            dv1 = _begin_second_sum(p16, tiles.second.dout, index, dv1, META)  # dV += P dO
        if META.DP_FIRST:
            dp = warpgroup_mma_wait(PARTS, deps=[dp])
        else:
            if m_block > 0:  # during the product; dp then reuses the registers of dq
                _write_both_dq(dq, dq1, tiles, ring, n - 1, CONSUMER, META)
            dp = _begin_dp(tiles, consumer_v, value_tile, dout, index, zeros, META)  # dP = V dO^T
            if m_block > 0:
                hand_over_dq(ring, n - 1, META)
            dv, dv1, p16 = _wait_for_sums(dv, dv1, p16, PARTS, META)
        minus_delta = tiles.statistics.index(index).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        if not META.DP_FIRST:
            dp = warpgroup_mma_wait(0, deps=[dp])
            if META.DOUT_APART:
                pipeline.release(barriers.dout_empty, stage)
        if META.IS_FP8:
            dp = dp * dp_factor_of(tiles.factors, index, COLUMNS, META)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        ds = dscore.to(DTYPE)
        if META.DP_FIRST:  # the other warpgroup's dq of two iterations ago has read the buffer that is overwritten
            wait_read(current, CONSUMER)
        tiles.ds.index(current + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        if META.DP_FIRST and not META.DV_WITH_DK:
            dv, dv1, p16 = _wait_for_sums(dv, dv1, p16, 0, META)
            if META.DOUT_APART:
                pipeline.release(barriers.dout_empty, stage)
        dk = warpgroup_mma(ds16, q16_tiles.index(index).reshape([BLOCK_M, DIM]), dk, is_async=True)  # dK += dS Q
        if META.DIM1 > 0:
            dk1 = _begin_second_sum(ds16, tiles.second.q, index, dk1, META)  # dK += dS Q
        fence_async_shared()  # during the product
        announce_written(current, CONSUMER)
        if META.DP_FIRST:
            wait_written(last, CONSUMER)
            dq, dq1 = _begin_dq(tiles, k16_tiles, last, k_tile + zero, CONSUMER, META)  # of the last iteration
        if META.IS_AHEAD:  # the last iteration repeats its own scores, without use
            next_stage = Stage(n + 1, STAGES)
            next_index = gl.where(has_next, pipeline.index(next_stage), index)
            next_phase = pipeline.phase(next_stage)
            next_raw_s = _begin_scores(tiles, consumer_k, key_tile, barriers, next_index, next_phase, has_next, META)  # S = K Q^T
        SCORES_IN_FLIGHT: gl.constexpr = PARTS if META.IS_AHEAD else 0
        # one product with each warpgroup's keys, and one for the second part
        DQ_IN_FLIGHT: gl.constexpr = 1 + PARTS if META.DP_FIRST else 0
        if META.DP_FIRST and META.DV_WITH_DK:
            if META.DIM1 > 0:
                deps = [dv, dv1, p16, dk, dk1, ds16]
                dv, dv1, p16, dk, dk1, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=deps)
            else:
                dv, p16, dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[dv, p16, dk, ds16])
            if META.DOUT_APART:
                pipeline.release(barriers.dout_empty, stage)
        else:
            dk, dk1, ds16 = _wait_for_sums(dk, dk1, ds16, DQ_IN_FLIGHT + SCORES_IN_FLIGHT, META)
        if META.IS_AHEAD and META.NUMBERS > 0:  # the last iteration's unused read must end before q is overwritten
            mbarrier.arrive(barriers.q_empty.index(index), count=1, pred=has_next)
        else:
            pipeline.release(barriers.q_empty, stage)
        if META.DP_FIRST:
            dq, dq1 = _wait_for_dq(dq, dq1, SCORES_IN_FLIGHT, META)
            if has_next:
                announce_read(last, CONSUMER)
            if m_block > 0:
                _write_both_dq(dq, dq1, tiles, ring, n - 1, CONSUMER, META)
                hand_over_dq(ring, n - 1, META)
        if META.IS_AHEAD:
            raw_s = warpgroup_mma_wait(0, deps=[next_raw_s])
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    n = begun.iterations + iterations - 1
    if META.IS_AHEAD and META.NUMBERS > 0:  # noqa: SIM102
        if iterations > 0:
            pipeline.release(barriers.q_empty, Stage(n, STAGES))
    last = ds_slot(iterations + 1)
    wait_written(last, CONSUMER)
    if iterations > 0:
        dq, dq1 = _begin_dq(tiles, k16_tiles, last, k_tile, CONSUMER, META)  # of the last iteration
        dq, dq1 = _wait_for_dq(dq, dq1, 0, META)
        _write_both_dq(dq, dq1, tiles, ring, n, CONSUMER, META)
        hand_over_dq(ring, n, META)
    # k, and in FP8 dout in 16 bits, were also read by the other warpgroup, which no longer needs them
    named_barrier_sync(LAST, BOTH)
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, CONSUMER * ROWS, 0)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, CONSUMER * ROWS, 0)
        if META.DIM1 > 0:
            store_key_gradient(args.dk32, dk1 * scores.scale, block, CONSUMER * ROWS, DIM)
            store_key_gradient(args.dv32, scaled(dv1, draws, META), block, CONSUMER * ROWS, DIM)
    else:
        k16_tiles.index(k_tile + CONSUMER).reshape([ROWS, DIM]).store((dk * scores.scale).to(DTYPE))
        if META.IS_FP8:
            dout16_tiles.index(CONSUMER).reshape([BLOCK_M, DIM]).slice(0, ROWS, 0).store(dv.to(DTYPE))
        else:
            tiles.v.index(v_tile + CONSUMER).reshape([ROWS, DIM]).store(scaled(dv, draws, META).to(DTYPE))
        if META.DIM1 > 0:
            k1, v1 = tiles.second.k.index(k_tile + CONSUMER), tiles.second.v.index(v_tile + CONSUMER)
            k1.reshape([ROWS, META.DIM1]).store((dk1 * scores.scale).to(DTYPE))
            v1.reshape([ROWS, META.DIM1]).store(scaled(dv1, draws, META).to(DTYPE))
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
                iterations += drawn.num_blocks * args.work.group_size
            else:
                convert_part(numbers, args, CONSUMER, META)
            n_tile += 1
            numbers = receive_tile(n_tile, barriers, META)
