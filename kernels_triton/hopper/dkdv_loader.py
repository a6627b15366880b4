"""The loading warp of the 16-bit kernels for dk and dv: k and v of a program, q and dout block by block."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import load_pair, origin_of, origin_of_head, pair_bytes, store_pair
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DkdvBarriers, DkdvTiles


@gluon.jit
def load_dkdv(args: DkdvArguments, tiles: DkdvTiles, barriers: DkdvBarriers, block: Block, META: gl.constexpr):
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    dk = origin_of(steps.dk, sequence.start_kv, h_kv, b)
    dv = origin_of(steps.dv, sequence.start_kv, h_kv, b)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.kv_full.index(0)
    K_BYTES: gl.constexpr = pair_bytes(descriptors.k.first.block_type.nbytes, descriptors.k.second.block_type.nbytes, META.QK1)
    V_BYTES: gl.constexpr = descriptors.v.block_type.nbytes
    V1_BYTES: gl.constexpr = descriptors.v1.block_type.nbytes if META.V1 > 0 else 0
    mbarrier.expect(full, PARTS * (K_BYTES + V_BYTES + V1_BYTES))
    for part in gl.static_range(PARTS):
        row = block.first_row + part * ROWS
        load_pair(descriptors.k, k, len_kv, row, full, tiles.k, part, META)
        load_rows(descriptors.v, v.token, len_kv, row, v.head, 0, full, tiles.v.index(part))
        if META.V1 > 0:
            load_rows(descriptors.v1, v.token, len_kv, row, v.head, META.V0, full, tiles.v1.index(part))
    Q_BYTES: gl.constexpr = pair_bytes(descriptors.q.first.block_type.nbytes, descriptors.q.second.block_type.nbytes, META.QK1)
    position = first_queries(block, args.work)
    for m_block in range(block.num_blocks * block.heads):  # counts the blocks of all query heads
        row = query_block(position.n, block.block_range, META)[0]
        q_stage = Stage(m_block, META.STAGES_SCORES)
        q_index = pipeline.index(q_stage)
        full = barriers.scores_full.index(q_index)
        pipeline.wait_empty(barriers.ds_empty, q_stage)
        mbarrier.expect(full, Q_BYTES + descriptors.statistics.block_type.nbytes)
        load_pair(descriptors.q, origin_of_head(q, position.head), len_q, row, full, tiles.q, q_index, META)
        head_statistics = block.first_statistics + position.head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, head_statistics, row, len_q, full, tiles.statistics.index(q_index), META)
        dout_stage = Stage(m_block, META.STAGES_DP)
        dout_index = pipeline.index(dout_stage)
        full = barriers.dp_full.index(dout_index)
        if barriers.dp_empty is not None:
            pipeline.wait_empty(barriers.dp_empty, dout_stage)
        if META.V1 > 0:
            mbarrier.expect(full, descriptors.dout.block_type.nbytes + descriptors.dout1.block_type.nbytes)
        else:
            mbarrier.expect(full, descriptors.dout.block_type.nbytes)
        dout_head = dout.head + position.head
        load_rows(descriptors.dout, dout.token, len_q, row, dout_head, 0, full, tiles.dout.index(dout_index))
        if META.V1 > 0:
            load_rows(descriptors.dout1, dout.token, len_q, row, dout_head, META.V0, full, tiles.dout1.index(dout_index))
        position = next_queries(position, block, args.work)
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    if args.dk32.ptr is None:
        for part in gl.static_range(PARTS):
            row = block.first_row + part * ROWS
            store_pair(descriptors.dk, dk, len_kv, row, tiles.k, part, META)
            store_rows(descriptors.dv, dv.token, len_kv, row, dv.head, 0, tiles.v.index(part))
            if META.V1 > 0:
                store_rows(descriptors.dv1, dv.token, len_kv, row, dv.head, META.V0, tiles.v1.index(part))
    tma.store_wait(0)
