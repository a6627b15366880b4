"""dq of the fused backward: fp32 sums in global memory, to which the copy engine adds, and their conversion to dq."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.preprocess import place_of_program, statistics_tile
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_parts import count_block, place_in_sums
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pipeline import release, wait_empty, wait_full
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.tile_scheduler import receive_tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.gluon_names import reduce_add
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_CONVERSION_TILE = Tile(32, 64, 4, 1)


class DqRing(NamedTuple):
    """Tiles of dq in shared memory, two for each stage, one from each consumer, on their way to the sums."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def in_order_of_sums(dq):
    # See `place_in_sums`: consecutive rows of a wgmma would be swizzled into the same banks.
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    return gl.permute(dq.reshape([ROWS // 8, 2, 4, COLUMNS]), [0, 2, 1, 3]).reshape([ROWS, COLUMNS])


@gluon.jit
def write_dq(dq, ring: DqRing, n, CONSUMER: gl.constexpr, META: gl.constexpr):
    # n: the iteration of this dq
    wait_empty(ring.empty, n, META.DQ_STAGES)
    ring.tiles.index(2 * (n % META.DQ_STAGES) + CONSUMER).store(in_order_of_sums(dq))


@gluon.jit
def hand_over_dq(ring: DqRing, n, META: gl.constexpr):
    fence_async_shared()
    mbarrier.arrive(ring.full.index(n % META.DQ_STAGES), count=1)


@gluon.jit
def place_of_sums(row, head, args, block: Block, META: gl.constexpr):
    # Returns the first row of the sums for a tile of dq, for the queries from `row` on and the head-th head of a program
    return (block.first_statistics + head * args.tiles_of_statistics) * META.BLOCK_M + row


@gluon.jit
def _add_block(args, ring: DqRing, block: Block, before, META: gl.constexpr):
    # before: iterations of the blocks before this one
    descriptor = args.descriptors.dq
    iterations = block.num_blocks * args.work.group_size
    position = first_queries(block, args.work)
    for iteration in range(before, before + iterations):
        stage = iteration % META.DQ_STAGES
        row = query_block(position.n, block.block_range, META)[0]
        sums_row = place_of_sums(row, position.head, args, block, META)
        wait_full(ring.full, iteration, META.DQ_STAGES)
        # A listed block may be past the end, with no row of this head. (The engine cannot add to rows outside of a tensor.)
        if META.BLOCK_SIZE_Q == 0 or row < block.sequence.len_q:
            for part in gl.static_range(2):
                if META.BLOCK_M == ROWS:
                    reduce_add(descriptor, [sums_row, part * (META.DIM // 2)], ring.tiles.index(2 * stage + part))
                else:
                    reduce_add(descriptor, [sums_row + part * ROWS, 0], ring.tiles.index(2 * stage + part))
        tma.store_wait(0)  # the engine has read the tile
        release(ring.empty, iteration, META.DQ_STAGES)
        position = next_queries(position, block, args.work)


@gluon.jit
def add_dq(args, tiles, barriers, block: Block, META: gl.constexpr):
    # A separate partition, which adds each tile of dq to the sums. block: of a program that has one
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    if META.NUMBERS == 0:
        _add_block(args, ring, block, 0, META)
    else:
        n_tile = 0
        before = 0
        numbers = receive_tile(n_tile, barriers, META)
        while numbers[0] >= 0:
            if META.CONVERTED == 0 or numbers[1] >= 0:
                drawn = key_block(numbers, args, META)
                _add_block(args, ring, drawn, before, META)
                before += drawn.num_blocks * args.work.group_size
                if META.CONVERTED > 0:
                    count_block(args, drawn)
            n_tile += 1
            numbers = receive_tile(n_tile, barriers, META)


class ConversionArguments(NamedTuple):
    sums_ptr: WidePointer  # fp32 [tiles * SIZE, HEAD_DIM_QK]
    dq: Rows
    lengths_q: Lengths
    scale: float
    num_heads: int
    tiles_of_statistics: Any  # tiles of one head


@kernel
def _attn_bwd_dq_conversion_kernel(args: ConversionArguments, SIZE: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    blocks = tl.cdiv(args.lengths_q.max_seqlen, BLOCK_M)
    block, h, b = place_of_program(blocks, args.num_heads)
    start_q, len_q = load_sequence(args.lengths_q, b, META.IS_RAGGED_Q)
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    place_q = packed_start(args.lengths_q, b, start_q)
    first_tile = statistics_tile(b, h, args.num_heads, place_q, args.tiles_of_statistics, META, SIZE)
    rows = tl.arange(0, BLOCK_M)
    sums = args.sums_ptr + tl.cast(first_tile * SIZE + first_row, tl.int64) * HEAD_DIM
    sum_offsets = place_in_sums(rows) * HEAD_DIM
    dq_pointer = row_pointer(args.dq, b, h, start_q + first_row, META)
    _, dq_offsets = row_steps(args.dq.stride_s, BLOCK_M, META)
    dq0 = load_tile(sums, sum_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM, True)
    store_tile(dq_pointer, dq0 * args.scale, dq_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        dq1 = load_tile(sums, sum_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM, True)
        store_tile(dq_pointer, dq1 * args.scale, dq_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM)


def convert_dq(problem: Problem, dq_sums: Tensor, tiles: Tensor | None, size: int, dq: Tensor) -> None:
    """Converts dq from its fp32 sums, which are in tiles of `size` queries like the statistics."""
    x = problem
    portable = x.meta(_CONVERSION_TILE, (dq,))
    arguments = ConversionArguments(
        sums_ptr=dq_sums,
        dq=rows(dq, portable),
        lengths_q=x.lengths_q,
        scale=float(x.softmax_scale),
        num_heads=x.num_heads,
        tiles_of_statistics=tiles,
    )
    launch(
        _attn_bwd_dq_conversion_kernel,
        triton.cdiv(x.longest_q, _CONVERSION_TILE.block_m) * x.num_heads * x.batch,
        x.device,
        _CONVERSION_TILE,
        (arguments, size, portable),
    )
