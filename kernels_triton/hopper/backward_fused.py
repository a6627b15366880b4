"""Fused backward for Hopper (sm_90) in Gluon: one kernel computes the scores once, for dk and dv, which stay, and for dq.

A warp loads by TMA and two warpgroups compute, 64 keys each. Their dq goes tile by tile through shared memory, from where a warp
of its own has the copy engine add it to fp32 sums in global memory, in whatever order programs come to it: so the last bits of dq
vary from run to run. Calls that `conditions.fused_unsupported` names, and those that must repeat, run on `backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HopperFusedTile
from flexattn.kernels_triton.hopper.backward_blocks import Block, key_block_of_program
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.conditions import fused_tile
from flexattn.kernels_triton.hopper.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.hopper.dq_sums import DqRing, add_dq
from flexattn.kernels_triton.hopper.fused_consumer import FusedArguments, FusedBarriers, FusedTiles, consume_fused
from flexattn.kernels_triton.hopper.fused_launch import finish_fused, prepare_fused
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.hopper.pairs import origin_of
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers, wait_empty
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@gluon.jit
def _load(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, META: gl.constexpr):
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
    for m_block in range(block.num_blocks * args.work.group_size):  # counts the blocks of all query heads
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


@hopper_kernel
def _attn_bwd_fused_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
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
    tiles = FusedTiles(
        q=q_tiles,
        q16=None,
        dout=dout_tiles,
        dout16=None,
        k=k_tiles,
        k16=None,
        v=v_tiles,
        statistics=statistics_tiles,
        factors=None,
        ds=ds_tiles,
        dq=dq_tiles,
    )
    q_empty = allocate_barriers(STAGES, 2)
    # None may be without a use: Triton would give its memory to what partitions are handed (`CompileReport.idle_barriers`).
    dout_empty = q_empty
    if META.DOUT_APART:
        dout_empty = allocate_barriers(STAGES, 2)
    barriers = FusedBarriers(
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
            (consume_fused, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_fused, (args, tiles, barriers, block, 1, MODS, META)),
            (_load, (args, tiles, barriers, block, META)),
            (add_dq, (of.dq, ring, block, args.tiles_of_statistics, args.work.group_size, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_backward(call: Backward, tile: HopperFusedTile | None = None) -> None:
    """Launches the fused backward, of calls that `fused_unsupported` does not name; the last bits of dq vary from run to run."""
    x = call.problem
    prepared = prepare_fused(call, tile or fused_tile(x))
    launch(_attn_bwd_fused_hopper_kernel, prepared.programs, x.device, prepared.tile, prepared.arguments)
    finish_fused(call, prepared)
