"""The warpgroup of the backward for sm_100 that reads dq from tensor memory, block by block, and adds it to the fp32 sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tma

from flexattn.kernels_triton.blackwell.backward_pipeline import DQ_COLUMNS, DQ_STAGES, Buffers
from flexattn.kernels_triton.blackwell.tensor_memory import fence_after_sync, fence_before_sync, row_layout
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.dq_sums import in_order_of_sums, place_of_sums
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.runtime.gluon_names import reduce_add


@gluon.jit
def add_dq(args: FusedArguments, buffers: Buffers, block: Block, META: gl.constexpr):
    barriers, tiles = buffers.barriers, buffers.tiles
    LAYOUT: gl.constexpr = row_layout(DQ_COLUMNS)
    PARTS: gl.constexpr = META.DQ_PARTS
    n_tile = 0  # counts the tiles that are stored
    position = first_queries(block, args.work)
    for iteration in range(block.num_blocks * block.heads):
        row = query_block(position.n, block.block_range, META)[0]
        mbarrier.wait(barriers.dq_full.index(0), iteration & 1)
        fence_after_sync()
        # A listed block may be past the end, with no row of this head.
        if META.BLOCK_SIZE_Q == 0 or row < block.sequence.len_q:
            for part in gl.static_range(PARTS):
                dq = buffers.sums.dp.slice(part * DQ_COLUMNS, DQ_COLUMNS).load(LAYOUT)
                tile = tiles.dq.index(pipeline.index(Stage(n_tile, DQ_STAGES)))
                tma.store_wait(DQ_STAGES - 1)  # the engine has read the tile
                tile.store(in_order_of_sums(dq))
                fence_async_shared()
                reduce_add(args.descriptors.dq, [place_of_sums(row, position.head, args, block, META), part * DQ_COLUMNS], tile)
                n_tile += 1
        fence_before_sync()
        mbarrier.arrive(barriers.dq_empty.index(0), count=1)
        position = next_queries(position, block, args.work)
    tma.store_wait(0)
