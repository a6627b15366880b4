"""Consumers of the fused backward for sm_90, in 16 bits and in FP8: dk and dv of 64 keys each, and half of each tile of dq."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.scores import through_mods
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
    READ,
    TURN,
    WRITTEN,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_parts import convert_part
from flexattn.kernels_triton.gluon.dq_sums import DqRing, hand_over_dq, write_dq
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import store_key_gradient
from flexattn.kernels_triton.gluon.fused_arguments import Begun, FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.operands import ROWS, opaque_zero
from flexattn.kernels_triton.gluon.pipeline import STAGES, release
from flexattn.kernels_triton.gluon.tile_scheduler import receive_tile
from flexattn.kernels_triton.hopper.fp8 import dp_factor_of, product_logits, score_factor
from flexattn.kernels_triton.hopper.products import dq_product


@gluon.jit
def _begin_scores(tiles: FusedTiles, consumer_k, barriers: FusedBarriers, stage, phase, has_next, META: gl.constexpr):
    # Issues the scores of the q in a stage, transposed, without a wait for them.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if META.IS_FP8 else 16])
    mbarrier.wait(barriers.q_full.index(stage), phase, pred=has_next)
    q = tiles.q.index(stage).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    return warpgroup_mma(consumer_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _begin_turns(iterations, CONSUMER: gl.constexpr, META: gl.constexpr):
    if iterations > 0:
        if META.DP_FIRST:
            named_barrier_arrive_at(READ + CONSUMER, BOTH)
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
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = first_uncut_query(n_start, ROWS, band, META)
    draws = dropout_state(args.dropout, block.first_head, META)
    iterations = block.num_blocks * group_size
    k_tile = 2 * (begun.blocks % META.K_STAGES)
    v_tile = 2 * (begun.blocks % META.V_STAGES)
    # Simulates an iteration before the first, whose ds is 0.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(WRITTEN + 2 + CONSUMER, BOTH)
    if META.IS_FP8 and META.NUMBERS == 0:
        mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = first_query_head(block, args.work, scores, MODS, META)
    kq = zeros
    _begin_turns(iterations, CONSUMER, META)
    if META.IS_AHEAD:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if iterations > 0:
            consumer_k = tiles.k.index(k_tile + opaque_zero(iterations) + CONSUMER).reshape([ROWS, DIM])
            stage = begun.iterations % STAGES
            phase = (begun.iterations // STAGES) & 1
            first_scores = _begin_scores(tiles, consumer_k, barriers, stage, phase, iterations > 0, META)
            kq = warpgroup_mma_wait(0, deps=[first_scores])
    for m_block in range(iterations):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        n = begun.iterations + m_block
        stage = n % STAGES
        phase = (n // STAGES) & 1
        current = (m_block & 1) * 2
        last = ((m_block + 1) & 1) * 2
        dout = tiles.dout.index(stage).reshape([BLOCK_M, DIM])
        consumer_k = tiles.k.index(k_tile + zero + CONSUMER).reshape([ROWS, DIM])
        consumer_v = tiles.v.index(v_tile + zero + CONSUMER).reshape([ROWS, DIM])
        if META.DP_FIRST:
            if not META.IS_AHEAD:
                scores_product = _begin_scores(tiles, consumer_k, barriers, stage, phase, True, META)
            mbarrier.wait(barriers.dout_full.index(stage), phase)
            dp = warpgroup_mma(consumer_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if not META.IS_AHEAD:
                kq = warpgroup_mma_wait(1, deps=[scores_product])
        else:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(tiles.ds, k16_tiles, last, k_tile + zero, CONSUMER, META)
        drawn = drawn_weights(draws, position.h, row, n_start, BLOCK_M, True, META)
        if META.PINGPONG:
            named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        i, j = columns[None, :], rows[:, None]
        head = head_at(position, values, block, scores, META)
        s_factor = score_factor(tiles.factors, stage, COLUMNS, META)
        s, factor, cap_tanh, score = product_logits(kq, i, j, head, scores.scale, s_factor, MODS, META)
        is_cut = cuts_block(row, n_start, uncut_from, band, META)
        place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
        minus_lse = tiles.statistics.index(stage).slice(0, BLOCK_M)
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
            mbarrier.wait(barriers.dout_full.index(stage), phase)
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        sum_of_dout = warpgroup_mma(p16, dout16_tiles.index(stage).reshape([BLOCK_M, DIM]), dv, is_async=True)
        if META.DP_FIRST:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            if m_block > 0:  # during the product; dp then reuses the registers of dq
                write_dq(dq, ring, n - 1, CONSUMER, META)
            dp = warpgroup_mma(consumer_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if m_block > 0:
                hand_over_dq(ring, n - 1, META)
            dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        if not META.DP_FIRST:
            dp = warpgroup_mma_wait(0, deps=[dp])
            if META.DOUT_APART:
                release(barriers.dout_empty, n, STAGES)
        if META.IS_FP8:
            dp = dp * dp_factor_of(tiles.factors, stage, COLUMNS, META)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        ds = dscore.to(DTYPE)
        if META.DP_FIRST:  # the other warpgroup's dq of two iterations ago has read the buffer that is overwritten
            named_barrier_sync_at(READ + 1 - CONSUMER + current, BOTH)
        tiles.ds.index(current + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        if META.DP_FIRST and not META.DV_WITH_DK:
            dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
            if META.DOUT_APART:
                release(barriers.dout_empty, n, STAGES)
        sum_of_q = warpgroup_mma(ds16, q16_tiles.index(stage).reshape([BLOCK_M, DIM]), dk, is_async=True)
        fence_async_shared()  # during the product
        named_barrier_arrive_at(WRITTEN + CONSUMER + current, BOTH)
        if META.DP_FIRST:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(tiles.ds, k16_tiles, last, k_tile + zero, CONSUMER, META)
        if META.IS_AHEAD:  # the last iteration repeats its own scores, without use
            next_stage = gl.where(has_next, (n + 1) % STAGES, stage)
            next_phase = ((n + 1) // STAGES) & 1
            next_scores = _begin_scores(tiles, consumer_k, barriers, next_stage, next_phase, has_next, META)
        SCORES_IN_FLIGHT: gl.constexpr = 1 if META.IS_AHEAD else 0
        DQ_IN_FLIGHT: gl.constexpr = 2 if META.DP_FIRST else 0  # one product with each warpgroup's keys
        if META.DP_FIRST and META.DV_WITH_DK:
            dv, p16, dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_dout, p16, sum_of_q, ds16])
            if META.DOUT_APART:
                release(barriers.dout_empty, n, STAGES)
        else:
            dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_q, ds16])
        if META.IS_AHEAD and META.NUMBERS > 0:  # the last iteration's unused read must end before q is overwritten
            mbarrier.arrive(barriers.q_empty.index(stage), count=1, pred=has_next)
        else:
            release(barriers.q_empty, n, STAGES)
        if META.DP_FIRST:
            dq = warpgroup_mma_wait(SCORES_IN_FLIGHT, deps=[sum_of_k])
            if has_next:
                named_barrier_arrive_at(READ + CONSUMER + last, BOTH)
            if m_block > 0:
                write_dq(dq, ring, n - 1, CONSUMER, META)
                hand_over_dq(ring, n - 1, META)
        if META.IS_AHEAD:
            kq = warpgroup_mma_wait(0, deps=[next_scores])
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    n = begun.iterations + iterations - 1
    if META.IS_AHEAD and META.NUMBERS > 0:  # noqa: SIM102
        if iterations > 0:
            release(barriers.q_empty, n, STAGES)
    last = ((iterations + 1) & 1) * 2
    named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
    if iterations > 0:
        sum_of_k = dq_product(tiles.ds, k16_tiles, last, k_tile, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        write_dq(dq, ring, n, CONSUMER, META)
        hand_over_dq(ring, n, META)
    # k, and in FP8 dout in 16 bits, were also read by the other warpgroup, which no longer needs them
    named_barrier_sync(LAST, BOTH)
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, dk * scores.scale, block, CONSUMER * ROWS, 0)
        store_key_gradient(args.dv32, scaled(dv, draws, META), block, CONSUMER * ROWS, 0)
    else:
        k16_tiles.index(k_tile + CONSUMER).reshape([ROWS, DIM]).store((dk * scores.scale).to(DTYPE))
        if META.IS_FP8:
            dout16_tiles.index(CONSUMER).reshape([BLOCK_M, DIM]).slice(0, ROWS, 0).store(dv.to(DTYPE))
        else:
            tiles.v.index(v_tile + CONSUMER).reshape([ROWS, DIM]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    release(barriers.dkdv_full, begun.blocks, META.K_STAGES)


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
        while numbers[0] >= 0:
            if META.CONVERTED == 0 or numbers[1] >= 0:
                drawn = key_block(numbers, args, META)
                begun = Begun(blocks=blocks, iterations=iterations)
                _consume_block(args, tiles, barriers, drawn, begun, CONSUMER, MODS, META)
                blocks += 1
                iterations += drawn.num_blocks * args.work.group_size
            else:
                convert_part(numbers, args, CONSUMER, META)
            n_tile += 1
            numbers = receive_tile(n_tile, barriers, META)
