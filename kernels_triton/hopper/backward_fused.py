"""Fused backward for Hopper (sm_90) in Gluon: one kernel computes the scores once, for dk and dv, which stay, and for dq.

A warp loads by TMA and two warpgroups compute, 64 keys each. In a persistent kernel the warp also draws the blocks of keys of its
program, and loads the k of one while the one before ends. The warpgroups' dq goes tile by tile through shared memory, from where
a warp of its own has the copy engine add it to fp32 sums in global memory, in whatever order programs come to it: so the last bits
of dq vary from run to run. Calls that `conditions.fused_unsupported` names, and those that must repeat, run on `backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HopperFusedTile
from flexattn.kernels_triton.hopper.backward_blocks import Block, find_key_block, key_block, key_block_of_program
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.conditions import fused_tile
from flexattn.kernels_triton.hopper.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.hopper.dq_sums import add_dq
from flexattn.kernels_triton.hopper.fused_consumer import Begun, FusedArguments, FusedBarriers, FusedTiles, consume_fused
from flexattn.kernels_triton.hopper.fused_launch import finish_fused, prepare_fused
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.hopper.pairs import Origin, origin_of
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers, allocate_tile_slots, wait_empty, wait_full
from flexattn.kernels_triton.hopper.tile_scheduler import broadcast_end, broadcast_tile, num_work_tiles
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch, num_processors


@gluon.jit
def _load_keys(descriptor, origin: Origin, block: Block, full, BYTES: gl.constexpr, tiles, tile):
    # k or v of a block, on the barrier of what comes with it: BYTES
    mbarrier.expect(full, BYTES + 2 * descriptor.block_type.nbytes)
    for part in gl.static_range(2):
        row = block.first_row + part * ROWS
        load_rows(descriptor, origin.token, block.sequence.len_kv, row, origin.head, 0, full, tiles.index(tile + part))


@gluon.jit
def _store_gradients(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, n_tile, META: gl.constexpr):
    # dk and dv of the n_tile-th block of a program leave through the memory of its k and v.
    of, steps, sequence = args.descriptors, args.steps, block.sequence
    dk = origin_of(steps.dk, sequence.start_kv, block.h_kv, block.b)
    dv = origin_of(steps.dv, sequence.start_kv, block.h_kv, block.b)
    wait_full(barriers.dkdv_full, n_tile, META.K_STAGES)
    for part in gl.static_range(2):
        row = block.first_row + part * ROWS
        k_tile = tiles.k.index(2 * (n_tile % META.K_STAGES) + part)
        v_tile = tiles.v.index(2 * (n_tile % META.V_STAGES) + part)
        store_rows(of.dk, dk.token, sequence.len_kv, row, dk.head, 0, k_tile)
        store_rows(of.dv, dv.token, sequence.len_kv, row, dv.head, 0, v_tile)


@gluon.jit
def _load_block(
    args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, begun: Begun, previous, META: gl.constexpr
):
    # previous: the numbers of the block before, in a persistent kernel, whose dk and dv are stored here
    of, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    len_q = sequence.len_q
    Q_BYTES: gl.constexpr = of.q.block_type.nbytes + of.statistics.block_type.nbytes
    DOUT_BYTES: gl.constexpr = of.dout.block_type.nbytes
    iterations = block.num_blocks * args.work.group_size
    n = 0
    head = 0
    for m_block in range(iterations):  # counts the blocks of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = (begun.iterations + m_block) % STAGES
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, begun.iterations + m_block, STAGES)
        if m_block == 0:
            if META.V_STAGES > 1:
                tma.store_wait(0)  # dk and dv of the last but one have left
            _load_keys(of.k, k, block, full, Q_BYTES, tiles.k, 2 * (begun.blocks % META.K_STAGES))
        else:
            mbarrier.expect(full, Q_BYTES)
        load_rows(of.q, q.token, len_q, row, q.head + head, 0, full, tiles.q.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        full = barriers.dout_full.index(stage)
        if META.DOUT_APART:
            wait_empty(barriers.dout_empty, begun.iterations + m_block, STAGES)
        if m_block == 0:
            if META.NUMBERS > 0 and META.V_STAGES == 1:  # noqa: SIM102
                if begun.blocks > 0:  # its dv leaves through the memory into which v comes
                    _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun.blocks - 1, META)
                    tma.store_wait(0)
            _load_keys(of.v, v, block, full, DOUT_BYTES, tiles.v, 2 * (begun.blocks % META.V_STAGES))
        else:
            mbarrier.expect(full, DOUT_BYTES)
        load_rows(of.dout, dout.token, len_q, row, dout.head + head, 0, full, tiles.dout.index(stage))
        if META.V_STAGES > 1:  # noqa: SIM102
            # The last to be loaded before consumers have begun this block, and so before they can have ended it
            if (begun.blocks > 0) & (m_block == gl.minimum(STAGES, iterations) - 1):
                _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun.blocks - 1, META)
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1


@gluon.jit
def _load(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, META: gl.constexpr):
    # block: of a program that has one
    if META.NUMBERS == 0:
        _load_block(args, tiles, barriers, block, Begun(blocks=0, iterations=0), (), META)
        _store_gradients(args, tiles, barriers, block, 0, META)
    else:
        work = args.work
        amount = num_work_tiles(work, work.num_heads // work.group_size, args.lengths_kv.batch, META)
        t = gl.program_id(0)
        n_tile = 0
        iterations = 0
        previous = (0,)
        for _ in gl.static_range(META.NUMBERS - 1):
            previous = previous + (0,)
        while t < amount:
            numbers = find_key_block(t, amount, args, META)
            drawn = key_block(numbers, args, META)
            if (drawn.num_blocks == 0) & (n_tile > 0):  # the consumers write its zeros at once
                _store_gradients(args, tiles, barriers, key_block(previous, args, META), n_tile - 1, META)
                tma.store_wait(0)
            broadcast_tile(numbers, n_tile, barriers, META)
            _load_block(args, tiles, barriers, drawn, Begun(blocks=n_tile, iterations=iterations), previous, META)
            previous = numbers
            iterations += drawn.num_blocks * work.group_size
            n_tile += 1
            # Not before the block is loaded: what a program has drawn no other takes, however long it is busy.
            t = gl.atomic_add(work.table_ptr, 1, sem="relaxed") + gl.num_programs(0)
        broadcast_end(n_tile, barriers, META)
        if n_tile > 0:
            _store_gradients(args, tiles, barriers, key_block(previous, args, META), n_tile - 1, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_bwd_fused_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    DTYPE: gl.constexpr = of.q.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = allocate_tiles(STAGES, of.q)
    dout_tiles = allocate_tiles(STAGES, of.dout)
    k_tiles = allocate_tiles(2 * META.K_STAGES, of.k)
    v_tiles = allocate_tiles(2 * META.V_STAGES, of.v)
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
    tile_full, tile_empty, tile_slots, block = None, None, None, None
    if META.NUMBERS == 0:
        block = key_block_of_program(args, META)
    else:
        tile_full = allocate_barriers(2, 1)
        tile_empty = allocate_barriers(2, 3)
        tile_slots = allocate_tile_slots(META.NUMBERS)
    barriers = FusedBarriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=q_empty,
        dout_full=allocate_barriers(STAGES, 1),
        dout_empty=dout_empty,
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(META.K_STAGES, 2),
        tile_full=tile_full,
        tile_empty=tile_empty,
        tile_slots=tile_slots,
    )
    gl.warp_specialize(
        [
            (consume_fused, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_fused, (args, tiles, barriers, block, 1, MODS, META)),
            (_load, (args, tiles, barriers, block, META)),
            (add_dq, (args, tiles, barriers, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_backward(call: Backward, tile: HopperFusedTile | None = None) -> None:
    """Launches the fused backward, of calls that `fused_unsupported` does not name; the last bits of dq vary from run to run."""
    x = call.problem
    tile = tile or fused_tile(x)
    prepared = prepare_fused(call, tile)
    programs = min(prepared.programs, num_processors(x.device)) if tile.is_persistent else prepared.programs
    launch(_attn_bwd_fused_hopper_kernel, programs, x.device, prepared.tile, prepared.arguments)
    finish_fused(call, prepared)
