"""dq of the fused backward: fp32 sums in global memory, to which the copy engine adds, and their conversion to dq."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_parts import count_block, is_key_block
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.runtime.gluon_names import reduce_add


class DqRing(NamedTuple):
    """Tiles of dq in shared memory on their way to the sums: for each stage one from each consumer, or one part of the head dim."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def in_order_of_sums(dq):
    # See `place_in_sums`: consecutive rows of a wgmma would be swizzled into the same banks.
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    return gl.permute(dq.reshape([ROWS // 8, 2, 4, COLUMNS]), [0, 2, 1, 3]).reshape([ROWS, COLUMNS])


@gluon.jit
def write_dq(dq, ring: DqRing, n, CONSUMER: gl.constexpr, META: gl.constexpr):
    # n: the iteration of this dq
    stage = Stage(n, META.DQ_STAGES)
    pipeline.wait_empty(ring.empty, stage)
    slot = pipeline.index(stage)
    if META.DIM1 == 0:
        slot = 2 * slot + CONSUMER
    ring.tiles.index(slot).store(in_order_of_sums(dq))


@gluon.jit
def hand_over_dq(ring: DqRing, n, META: gl.constexpr):
    fence_async_shared()
    pipeline.release(ring.full, Stage(n, META.DQ_STAGES))


@gluon.jit
def place_of_sums(row, head, args, block: Block, META: gl.constexpr):
    # Returns the first row of the sums for a tile of dq, for the queries from `row` on and the head-th head of a program
    return (block.first_statistics + head * args.tiles_of_statistics) * META.BLOCK_M + row


@gluon.jit
def _add_block(args, ring: DqRing, tiles, block: Block, before, META: gl.constexpr):
    # before: iterations of the blocks before this one
    descriptor = args.descriptors.dq
    second = args.descriptors.second
    iterations = block.num_blocks * block.heads
    position = first_queries(block, args.work)
    for iteration in range(before, before + iterations):
        stage = Stage(iteration, META.DQ_STAGES)
        index = pipeline.index(stage)
        row = query_block(position.n, block.block_range, META)[0]
        sums_row = place_of_sums(row, position.head, args, block, META)
        pipeline.wait_full(ring.full, stage)
        # A listed block may be past the end, with no row of this head. (The engine cannot add to rows outside of a tensor.)
        if META.BLOCK_SIZE_Q == 0 or row < block.sequence.len_q:
            if second.dq is not None:
                reduce_add(descriptor, [sums_row, 0], ring.tiles.index(index))
                reduce_add(second.dq, [sums_row, META.DIM], tiles.second.dq.index(index))
            else:
                for part in gl.static_range(2):
                    if META.BLOCK_M == ROWS:
                        reduce_add(descriptor, [sums_row, part * (META.DIM // 2)], ring.tiles.index(2 * index + part))
                    else:
                        reduce_add(descriptor, [sums_row + part * ROWS, 0], ring.tiles.index(2 * index + part))
        tma.store_wait(0)  # the engine has read the tile
        pipeline.release(ring.empty, stage)
        position = next_queries(position, block, args.work)


@gluon.jit
def add_dq(args, tiles, barriers, block: Block, META: gl.constexpr):
    # A separate partition, which adds each tile of dq to the sums. block: of a program that has one
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    if META.NUMBERS == 0:
        _add_block(args, ring, tiles, block, 0, META)
    else:
        n_tile = 0
        before = 0
        numbers = receive_tile(n_tile, barriers, META)
        while is_tile(numbers):
            if META.CONVERTED == 0 or is_key_block(numbers):
                drawn = key_block(numbers, args, META)
                _add_block(args, ring, tiles, drawn, before, META)
                before += drawn.num_blocks * drawn.heads
                if META.CONVERTED > 0:
                    count_block(args, drawn)
            n_tile += 1
            numbers = receive_tile(n_tile, barriers, META)
