"""Fused backward for Hopper (sm_90) in Gluon: one kernel computes the scores once, for dk and dv, which stay, and for dq.

A warp loads by TMA and two warpgroups compute, 64 keys each. Their dq goes tile by tile through shared memory, from where a warp
of its own has the copy engine add it to fp32 sums in global memory, in whatever order programs come to it: so the last bits of dq
vary from run to run. Calls that `conditions.fused_unsupported` names, and those that must repeat, run on `backward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Scores
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    is_any_large,
    logits,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Backward, with_features
from flexattn.kernels_triton.common.tiles import HopperFusedTile
from flexattn.kernels_triton.common.work_table import zero_padding
from flexattn.kernels_triton.hopper.backward_blocks import (
    Block,
    LargeLse,
    backward_work,
    first_query_head,
    head_at,
    key_block_of_program,
    next_query_block,
)
from flexattn.kernels_triton.hopper.barriers import (
    BOTH,
    LAST,
    READ,
    TURN,
    WRITTEN,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
)
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.conditions import KEYS, fused_tile
from flexattn.kernels_triton.hopper.descriptors import (
    Step,
    load_rows,
    load_statistics,
    ragged_descriptor,
    statistics_descriptor,
    step_of,
    store_rows,
)
from flexattn.kernels_triton.hopper.dq_sums import DqRing, add_dq, convert_dq, dq_product, hand_over_dq, write_dq
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.hopper.masking import (
    apply_mask_mod,
    first_uncut_query,
    hide_queries_past_the_end,
    mask_queries_and_end,
)
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles, opaque_zero
from flexattn.kernels_triton.hopper.pairs import origin_of
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers, release, wait_empty
from flexattn.kernels_triton.hopper.tile_scheduler import Work
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


@with_features
class FusedMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DP_FIRST: bool  # this and what follows as in `HopperFusedTile`
    IS_AHEAD: bool
    PINGPONG: bool
    DV_WITH_DK: bool
    DOUT_APART: bool
    DQ_STAGES: int  # of dq in shared memory


class Descriptors(NamedTuple):
    q: Any
    dout: Any
    k: Any
    v: Any
    statistics: Any
    dq: Any  # its fp32 sums
    dk: Any
    dv: Any


class Steps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    v: Step
    dk: Step
    dv: Step


class Arguments(NamedTuple):
    descriptors: Descriptors
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: Steps
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # of query blocks


class Tiles(NamedTuple):
    """In shared memory: k and v by consumer, q, dout and statistics by stage, ds and dq by stage and consumer."""

    q: Any
    dout: Any
    k: Any
    v: Any
    statistics: Any
    ds: Any
    dq: Any


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    dout_full: Any
    dout_empty: Any
    kv_full: Any
    dq_full: Any
    dq_empty: Any
    dkdv_full: Any


@gluon.jit
def _load(args: Arguments, tiles: Tiles, barriers: Barriers, block: Block, META: gl.constexpr):
    of, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    dk = origin_of(steps.dk, sequence.start_kv, h_kv, b)
    dv = origin_of(steps.dv, sequence.start_kv, h_kv, b)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.kv_full.index(0)
    mbarrier.expect(full, 2 * (of.k.block_type.nbytes + of.v.block_type.nbytes))
    for part in gl.static_range(2):
        row = block.first_row + part * ROWS
        load_rows(of.k, k.token, len_kv, row, k.head, 0, full, tiles.k.index(part))
        load_rows(of.v, v.token, len_kv, row, v.head, 0, full, tiles.v.index(part))
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = m_block % STAGES
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, m_block, STAGES)
        mbarrier.expect(full, of.q.block_type.nbytes + of.statistics.block_type.nbytes)
        load_rows(of.q, q.token, len_q, row, q.head + head, 0, full, tiles.q.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        full = barriers.dout_full.index(stage)
        if META.DOUT_APART:
            wait_empty(barriers.dout_empty, m_block, STAGES)
        mbarrier.expect(full, of.dout.block_type.nbytes)
        load_rows(of.dout, dout.token, len_q, row, dout.head + head, 0, full, tiles.dout.index(stage))
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(2):
        row = block.first_row + part * ROWS
        store_rows(of.dk, dk.token, len_kv, row, dk.head, 0, tiles.k.index(part))
        store_rows(of.dv, dv.token, len_kv, row, dv.head, 0, tiles.v.index(part))
    tma.store_wait(0)


@gluon.jit
def _begin_scores(tiles: Tiles, own_k, barriers: Barriers, stage, phase, is_there, META: gl.constexpr):
    # Scores of the q in a stage, transposed; to be waited for.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    mbarrier.wait(barriers.q_full.index(stage), phase, pred=is_there)
    q = tiles.q.index(stage).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    return warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute(
    args: Arguments,
    tiles: Tiles,
    barriers: Barriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # dk and dv of 64 keys, and half of each tile of dq, to which the other warpgroup's ds adds too. So that neither waits for the
    # other in the middle of an iteration, dq is computed in the next one. The products of an iteration, and what runs under them:
    #   DP_FIRST   dp | p | dv | ds | dk, dq of the last iteration
    #   else       dq of the last iteration | p | dv, dp | ds | dk
    # Before all of it come the scores, which IS_AHEAD has begun at the end of the iteration before.
    b, len_q, band, large = block.b, block.sequence.len_q, block.band, block.large
    scores, group_size = args.scores, args.work.group_size
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    DTYPE: gl.constexpr = tiles.k.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
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
    uncut_from = first_uncut_query(n_start, band, META)
    draws = dropout_state(args.dropout, block.first_head, META)
    iterations = block.num_blocks * group_size
    # As if there had been an iteration before the first, whose ds is 0.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(WRITTEN + 2 + CONSUMER, BOTH)
    if iterations > 0:
        if META.DP_FIRST:
            named_barrier_arrive_at(READ + CONSUMER, BOTH)
        if META.PINGPONG and CONSUMER == 1:
            named_barrier_arrive_at(TURN, BOTH)  # the first warpgroup begins
    mbarrier.wait(barriers.kv_full.index(0), 0)
    at, values = first_query_head(block, scores, MODS, META)
    kq = zeros
    if META.IS_AHEAD:  # noqa: SIM102  # this is known when it is compiled, that at run time
        if iterations > 0:
            own_k = tiles.k.index(opaque_zero(iterations) + CONSUMER).reshape([ROWS, DIM])
            first_scores = _begin_scores(tiles, own_k, barriers, 0, 0, iterations > 0, META)
            kq = warpgroup_mma_wait(0, deps=[first_scores])
    for m_block in range(iterations):  # of all query heads
        row, is_full = query_block(at.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        stage = m_block % STAGES
        phase = (m_block // STAGES) & 1
        here = (m_block & 1) * 2
        last = ((m_block + 1) & 1) * 2
        q = tiles.q.index(stage).reshape([BLOCK_M, DIM])
        dout = tiles.dout.index(stage).reshape([BLOCK_M, DIM])
        own_k = tiles.k.index(zero + CONSUMER).reshape([ROWS, DIM])
        own_v = tiles.v.index(zero + CONSUMER).reshape([ROWS, DIM])
        if META.DP_FIRST:
            if not META.IS_AHEAD:
                own_scores_product = _begin_scores(tiles, own_k, barriers, stage, phase, True, META)
            mbarrier.wait(barriers.dout_full.index(stage), phase)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if not META.IS_AHEAD:
                kq = warpgroup_mma_wait(1, deps=[own_scores_product])
        else:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(tiles.ds, tiles.k, last, zero, CONSUMER, META)
        drawn = drawn_weights(draws, at.h, row, n_start, BLOCK_M, True, META)
        if META.PINGPONG:
            named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        i, j = columns[None, :], rows[:, None]
        head = head_at(at, values, block, scores, META)
        s, factor, cap_tanh, score = logits(kq, i, j, scores.scale, head, MODS, META)
        is_cut = row < uncut_from  # a scalar branch: only blocks on an edge pay for the mask
        if META.HAS_LEFT:
            is_cut = is_cut | (row + BLOCK_M > n_start - band.shift + band.left + 1)
        if is_cut | is_any_large(large, META):
            s = mask_queries_and_end(s, rows, columns, band, META)
            if META.IS_UNBOUNDED:
                of_queries = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                s = relative_to_lse(s, of_queries[None, :], large, b, at.h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p16 = gl.convert_layout(kept(p, drawn, True, META).to(DTYPE), LEFT)
        is_there = m_block + 1 < iterations  # the next one
        if META.PINGPONG:
            if CONSUMER == 0:
                named_barrier_arrive_at(TURN + 1 + zero, BOTH)
            elif is_there:
                named_barrier_arrive_at(TURN + zero, BOTH)
        if not META.DP_FIRST:
            # Between exp and the wait for dq: ptxas moves a wait for all products up to where its basic block begins, here.
            mbarrier.wait(barriers.dout_full.index(stage), phase)
            dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        sum_of_dout = warpgroup_mma(p16, dout, dv, is_async=True)
        if META.DP_FIRST:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            if m_block > 0:  # under the product; dp then takes the registers of dq
                write_dq(dq, ring, m_block - 1, CONSUMER, META)
            dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
            if m_block > 0:
                hand_over_dq(ring, m_block - 1, META)
            dv, p16 = warpgroup_mma_wait(1, deps=[sum_of_dout, p16])
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        if not META.DP_FIRST:
            dp = warpgroup_mma_wait(0, deps=[dp])
            if META.DOUT_APART:
                release(barriers.dout_empty, m_block, STAGES)
        dlogit = p * (kept_gradient(dp, drawn, draws, True, META) + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
        ds = dscore.to(DTYPE)
        if META.DP_FIRST:  # the other warpgroup's dq of the iteration before the last has read what is overwritten
            named_barrier_sync_at(READ + 1 - CONSUMER + here, BOTH)
        tiles.ds.index(here + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        if META.DP_FIRST and not META.DV_WITH_DK:
            dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
            if META.DOUT_APART:
                release(barriers.dout_empty, m_block, STAGES)
        sum_of_q = warpgroup_mma(ds16, q, dk, is_async=True)
        fence_async_shared()  # under the product
        named_barrier_arrive_at(WRITTEN + CONSUMER + here, BOTH)
        if META.DP_FIRST:
            named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
            sum_of_k = dq_product(tiles.ds, tiles.k, last, zero, CONSUMER, META)
        if META.IS_AHEAD:  # in the last one its own again, for nothing
            next_stage = gl.where(is_there, (m_block + 1) % STAGES, stage)
            next_phase = ((m_block + 1) // STAGES) & 1
            next_scores = _begin_scores(tiles, own_k, barriers, next_stage, next_phase, is_there, META)
        SCORES_IN_FLIGHT: gl.constexpr = 1 if META.IS_AHEAD else 0
        DQ_IN_FLIGHT: gl.constexpr = 2 if META.DP_FIRST else 0  # a product with each warpgroup's keys
        if META.DP_FIRST and META.DV_WITH_DK:
            dv, p16, dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_dout, p16, sum_of_q, ds16])
            if META.DOUT_APART:
                release(barriers.dout_empty, m_block, STAGES)
        else:
            dk, ds16 = warpgroup_mma_wait(DQ_IN_FLIGHT + SCORES_IN_FLIGHT, deps=[sum_of_q, ds16])
        release(barriers.q_empty, m_block, STAGES)
        if META.DP_FIRST:
            dq = warpgroup_mma_wait(SCORES_IN_FLIGHT, deps=[sum_of_k])
            if is_there:
                named_barrier_arrive_at(READ + CONSUMER + last, BOTH)
            if m_block > 0:
                write_dq(dq, ring, m_block - 1, CONSUMER, META)
                hand_over_dq(ring, m_block - 1, META)
        if META.IS_AHEAD:
            kq = warpgroup_mma_wait(0, deps=[next_scores])
        at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    last = ((iterations + 1) & 1) * 2
    named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
    if iterations > 0:
        sum_of_k = dq_product(tiles.ds, tiles.k, last, 0, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        write_dq(dq, ring, iterations - 1, CONSUMER, META)
        hand_over_dq(ring, iterations - 1, META)
    named_barrier_sync(LAST, BOTH)  # k was the other warpgroup's too; now k and v are no longer needed
    tiles.k.index(CONSUMER).reshape([ROWS, DIM]).store((dk * scores.scale).to(DTYPE))
    tiles.v.index(CONSUMER).reshape([ROWS, DIM]).store(scaled(dv, draws, META).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_fused_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    DTYPE: gl.constexpr = of.q.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = allocate_tiles(STAGES, of.q)
    dout_tiles = allocate_tiles(STAGES, of.dout)
    k_tiles = allocate_tiles(2, of.k)
    v_tiles = allocate_tiles(2, of.v)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], of.statistics.layout)
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE)
    dq_tiles = allocate_tiles(2 * META.DQ_STAGES, of.dq)
    tiles = Tiles(q=q_tiles, dout=dout_tiles, k=k_tiles, v=v_tiles, statistics=statistics_tiles, ds=ds_tiles, dq=dq_tiles)
    q_empty = allocate_barriers(STAGES, 2)
    # None may be without a use: Triton would give its memory to what partitions are handed (`CompileReport.idle_barriers`).
    dout_empty = q_empty
    if META.DOUT_APART:
        dout_empty = allocate_barriers(STAGES, 2)
    barriers = Barriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=q_empty,
        dout_full=allocate_barriers(STAGES, 1),
        dout_empty=dout_empty,
        kv_full=allocate_barriers(1, 1),
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    block = key_block_of_program(args, META)
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    gl.warp_specialize(
        [
            (_compute, (args, tiles, barriers, block, 0, MODS, META)),
            (_compute, (args, tiles, barriers, block, 1, MODS, META)),
            (_load, (args, tiles, barriers, block, META)),
            (add_dq, (of.dq, ring, block, args.tiles_of_statistics, args.work.group_size, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_backward(call: Backward, tile: HopperFusedTile | None = None) -> None:
    """Launches the fused backward, of calls that `fused_unsupported` does not name; the last bits of dq vary from run to run."""
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    tile = tile or fused_tile(x)
    dim, size = tile.head_dim, tile.queries
    head_dim = x.q.shape[-1]
    statistics, tiles, large = tiled_statistics(call, size)
    dq_sums = torch.zeros((statistics.numel() // 2, head_dim), dtype=torch.float32, device=x.device)
    has_lengths = x.cu_seqlens_q is not None
    bytes_per_head = 12 * dim * max(x.longest_q, x.longest_kv)  # k, v, q and dout of two bytes, dq of four
    work, programs = backward_work(x, KEYS, "kv", bytes_per_head)
    dq_block = [ROWS.value, size * dim // (2 * ROWS.value)]
    dq_layout = gl.NVMMASharedLayout.get_default_for(dq_block, gl.float32)
    meta = FusedMeta(
        **x.features._asdict(),
        BLOCK_M=size,
        BLOCK_N=KEYS,
        DIM=dim,
        DP_FIRST=tile.dp_first,
        IS_AHEAD=tile.is_ahead,
        PINGPONG=tile.takes_turns,
        DV_WITH_DK=tile.dv_with_dk,
        DOUT_APART=tile.dout_apart,
        DQ_STAGES=tile.dq_stages,
    )
    q, dout_rows = (ragged_descriptor(t, size, dim) for t in (x.q, dout))
    k, v, dk_rows, dv_rows = (ragged_descriptor(t, ROWS.value, dim) for t in (x.k, x.v, dk, dv))
    arguments = Arguments(
        descriptors=Descriptors(
            q=q,
            dout=dout_rows,
            k=k,
            v=v,
            statistics=statistics_descriptor(statistics, size),
            dq=TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], dq_block, dq_layout),
            dk=dk_rows,
            dv=dv_rows,
        ),
        steps=Steps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dk=step_of(dk), dv=step_of(dv)),
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
    launch(_attn_bwd_fused_hopper_kernel, programs, x.device, Tile(size, KEYS, 4, 2), (arguments, x.mods, meta))
    convert_dq(x, dq_sums, tiles, size, dq)
    if has_lengths:
        zero_padding(x, dq, "q")
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
