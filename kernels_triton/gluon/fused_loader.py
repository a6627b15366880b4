"""The loading warp of the 16-bit fused backward: it loads k, v, and blocks of q, dout and statistics, and stores dk and dv.

In a persistent kernel it also draws the key blocks of its program. The kernels for sm_90 and sm_100 share it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, find_key_block, key_block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.gluon.dq_parts import find_part, find_task, num_tasks, wait_for_sums
from flexattn.kernels_triton.gluon.fused_arguments import Begun, FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.pairs import Origin, origin_of
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries, num_parts
from flexattn.kernels_triton.gluon.tile_scheduler import broadcast_end, broadcast_tile, num_work_tiles


@gluon.jit
def _load_keys(descriptor, origin: Origin, block: Block, full, BYTES: gl.constexpr, tiles, stage, META: gl.constexpr):
    # Loads k or v of a block, in boxes of the descriptor's rows, on a barrier that also covers other loads of BYTES
    BOX: gl.constexpr = descriptor.block_type.shape[2]
    PARTS: gl.constexpr = META.BLOCK_N // BOX
    mbarrier.expect(full, BYTES + PARTS * descriptor.block_type.nbytes)
    _load_boxes(descriptor, origin, block, 0, full, tiles, stage, META)


@gluon.jit
def _load_boxes(descriptor, origin: Origin, block: Block, COLUMN: gl.constexpr, full, tiles, stage, META: gl.constexpr):
    BOX: gl.constexpr = descriptor.block_type.shape[2]
    PARTS: gl.constexpr = META.BLOCK_N // BOX
    for part in gl.static_range(PARTS):
        row = block.first_row + part * BOX
        load_rows(
            descriptor, origin.token, block.sequence.len_kv, row, origin.head, COLUMN, full, tiles.index(PARTS * stage + part)
        )


@gluon.jit
def _store_gradients(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, n_tile, META: gl.constexpr):
    # Stores dk and dv of the n_tile-th block of a program from the memory of its k and v. In fp32 the consumers have written them.
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    dk = origin_of(steps.dk, sequence.start_kv, block.h_kv, block.b)
    dv = origin_of(steps.dv, sequence.start_kv, block.h_kv, block.b)
    pipeline.wait_full(barriers.dkdv_full, Stage(n_tile, META.K_STAGES))
    if args.dk32.ptr is None:
        BOX: gl.constexpr = descriptors.dk.block_type.shape[2]
        PARTS: gl.constexpr = META.BLOCK_N // BOX
        for part in gl.static_range(PARTS):
            row = block.first_row + part * BOX
            k_tile = tiles.k.index(PARTS * pipeline.index(Stage(n_tile, META.K_STAGES)) + part)
            v_tile = tiles.v.index(PARTS * pipeline.index(Stage(n_tile, META.V_STAGES)) + part)
            store_rows(descriptors.dk, dk.token, sequence.len_kv, row, dk.head, 0, k_tile)
            store_rows(descriptors.dv, dv.token, sequence.len_kv, row, dv.head, 0, v_tile)
            if descriptors.second.q is not None:
                k_tile = tiles.second.k.index(PARTS * pipeline.index(Stage(n_tile, META.K_STAGES)) + part)
                v_tile = tiles.second.v.index(PARTS * pipeline.index(Stage(n_tile, META.V_STAGES)) + part)
                store_rows(descriptors.second.dk, dk.token, sequence.len_kv, row, dk.head, META.DIM, k_tile)
                store_rows(descriptors.second.dv, dv.token, sequence.len_kv, row, dv.head, META.DIM, v_tile)


@gluon.jit
def _load_block(
    args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, begun: Begun, previous, META: gl.constexpr
):
    # previous: in a persistent kernel, the message of the previous block, whose dk and dv are stored here
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    len_q = sequence.len_q
    second = descriptors.second
    HAS_SECOND: gl.constexpr = second.q is not None
    Q1_BYTES: gl.constexpr = second.q.block_type.nbytes if HAS_SECOND else 0
    K1_BYTES: gl.constexpr = META.BLOCK_N * Q1_BYTES // META.BLOCK_M  # v1 has as many, and dout1 as many as q1
    Q_BYTES: gl.constexpr = descriptors.q.block_type.nbytes + Q1_BYTES + descriptors.statistics.block_type.nbytes
    DOUT_BYTES: gl.constexpr = descriptors.dout.block_type.nbytes + Q1_BYTES
    Q_STAGES: gl.constexpr = tiles.q.shape[0]
    DOUT_STAGES: gl.constexpr = tiles.dout.shape[0]
    iterations = block.num_blocks * block.heads
    position = first_queries(block, args.work)
    for m_block in range(iterations):  # counts the blocks of all query heads
        row = query_block(position.n, block.block_range, META)[0]
        q_stage = Stage(begun.iterations + m_block, Q_STAGES)
        q_index = pipeline.index(q_stage)
        full = barriers.q_full.index(q_index)
        pipeline.wait_empty(barriers.q_empty, q_stage)
        if m_block == 0:
            if META.V_STAGES > 1:
                tma.store_wait(0)  # dk and dv of the block before the previous one have been stored
            k_stage = pipeline.index(Stage(begun.blocks, META.K_STAGES))
            _load_keys(descriptors.k, k, block, full, Q_BYTES + K1_BYTES, tiles.k, k_stage, META)
            if HAS_SECOND:
                _load_boxes(second.k, k, block, META.DIM, full, tiles.second.k, k_stage, META)
        else:
            mbarrier.expect(full, Q_BYTES)
        load_rows(descriptors.q, q.token, len_q, row, q.head + position.head, 0, full, tiles.q.index(q_index))
        if HAS_SECOND:
            load_rows(second.q, q.token, len_q, row, q.head + position.head, META.DIM, full, tiles.second.q.index(q_index))
        head_statistics = block.first_statistics + position.head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, head_statistics, row, len_q, full, tiles.statistics.index(q_index), META)
        dout_stage = Stage(begun.iterations + m_block, DOUT_STAGES)
        dout_index = pipeline.index(dout_stage)
        full = barriers.dout_full.index(dout_index)
        if META.DOUT_APART:
            pipeline.wait_empty(barriers.dout_empty, dout_stage)
        if m_block == 0:
            if META.NUMBERS > 0 and META.V_STAGES == 1:  # noqa: SIM102
                if begun.blocks > 0:  # its dv is stored from the memory into which v is loaded
                    _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun.blocks - 1, META)
                    tma.store_wait(0)
            v_stage = pipeline.index(Stage(begun.blocks, META.V_STAGES))
            _load_keys(descriptors.v, v, block, full, DOUT_BYTES + K1_BYTES, tiles.v, v_stage, META)
            if HAS_SECOND:
                _load_boxes(second.v, v, block, META.DIM, full, tiles.second.v, v_stage, META)
        else:
            mbarrier.expect(full, DOUT_BYTES)
        dout_head = dout.head + position.head
        load_rows(descriptors.dout, dout.token, len_q, row, dout_head, 0, full, tiles.dout.index(dout_index))
        if HAS_SECOND:
            load_rows(second.dout, dout.token, len_q, row, dout_head, META.DIM, full, tiles.second.dout.index(dout_index))
        if META.V_STAGES > 1:  # noqa: SIM102
            # The last load before the consumers begin this block, and so before they can end it
            if (begun.blocks > 0) & (m_block == gl.minimum(Q_STAGES, iterations) - 1):
                _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun.blocks - 1, META)
        position = next_queries(position, block, args.work)


@gluon.jit
def load_fused(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, META: gl.constexpr):
    # block: of a program that has one
    if META.NUMBERS == 0:
        _load_block(args, tiles, barriers, block, Begun(blocks=0, iterations=0), (), META)
        _store_gradients(args, tiles, barriers, block, 0, META)
    else:
        work = args.work
        blocks = num_work_tiles(work, num_parts(work), args.lengths_kv.batch, META)
        amount = blocks
        t = gl.program_id(0)
        FIRST_IS_DRAWN: gl.constexpr = META.CONVERTED > 0
        if FIRST_IS_DRAWN:  # Draw the first tile too: a program that waits for one not yet resident would deadlock.
            amount = num_tasks(blocks, args, META)
            t = gl.atomic_add(work.table_ptr, 1, sem="relaxed")
        n_tile = 0
        begun_blocks = 0
        iterations = 0
        previous = (0,)
        for _ in gl.static_range(META.NUMBERS - 1):
            previous = previous + (0,)
        while t < amount:
            n_block = t
            if META.CONVERTED > 0:
                task = find_task(t, blocks, args, META)
                n_block = task.index
            if META.CONVERTED > 0 and task.converts:
                part = find_part(task.index, args, META)
                wait_for_sums(part, args)
                broadcast_tile(part, n_tile, barriers, META)
            else:
                numbers = find_key_block(n_block, blocks, args, META)
                drawn = key_block(numbers, args, META)
                if (drawn.num_blocks == 0) & (begun_blocks > 0):  # the consumers write its zeros immediately
                    _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun_blocks - 1, META)
                    tma.store_wait(0)
                broadcast_tile(numbers, n_tile, barriers, META)
                _load_block(args, tiles, barriers, drawn, Begun(blocks=begun_blocks, iterations=iterations), previous, META)
                previous = numbers
                begun_blocks += 1
                iterations += drawn.num_blocks * drawn.heads
            n_tile += 1
            # After the loads of the block: no other program takes a tile that a program has drawn, however long that is busy.
            t = gl.atomic_add(work.table_ptr, 1, sem="relaxed")
            if not FIRST_IS_DRAWN:
                t += gl.num_programs(0)
        broadcast_end(n_tile, barriers, META)
        if begun_blocks > 0:
            _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun_blocks - 1, META)
    tma.store_wait(0)
