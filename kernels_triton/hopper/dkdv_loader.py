"""Arguments of the 16-bit kernels for dk and dv, and their loading warp: k and v of a program, q and dout block by block."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.preprocess import Tiled
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.descriptors import (
    load_rows,
    load_statistics,
    ragged_descriptor,
    statistics_descriptor,
    step_of,
    store_rows,
)
from flexattn.kernels_triton.gluon.fp32_gradients import fp32_rows
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import Pair, load_pair, origin_of, origin_of_head, pair_bytes, pair_descriptor, store_pair
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DkdvDescriptors, DkdvSteps


class DkdvTiles(NamedTuple):
    """In shared memory: k and v by consumer, q, dout and statistics by stage."""

    q: Pair
    dout: gl.shared_memory_descriptor
    k: Pair
    v: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    dout1: Any = None  # for this and the next, the second parts if META.V1 > 0
    v1: Any = None


class DkdvBarriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor  # None if dout is released with q
    kv_full: gl.shared_memory_descriptor
    dkdv_full: gl.shared_memory_descriptor


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
        full = barriers.q_full.index(q_index)
        pipeline.wait_empty(barriers.q_empty, q_stage)
        mbarrier.expect(full, Q_BYTES + descriptors.statistics.block_type.nbytes)
        load_pair(descriptors.q, origin_of_head(q, position.head), len_q, row, full, tiles.q, q_index, META)
        head_statistics = block.first_statistics + position.head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, head_statistics, row, len_q, full, tiles.statistics.index(q_index), META)
        dout_stage = Stage(m_block, META.STAGES_DP)
        dout_index = pipeline.index(dout_stage)
        full = barriers.dout_full.index(dout_index)
        if barriers.dout_empty is not None:
            pipeline.wait_empty(barriers.dout_empty, dout_stage)
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


def arguments_of_dkdv(call: Backward, tiled: Tiled, work: Work, tile: tuple[int, tuple[int, int], int]) -> DkdvArguments:
    """Returns the arguments of a kernel for dk and dv, without those of FP8.

    tile: queries of a block; widths of both parts of q's and k's head dim; v's head dim.
    """
    x, dout, dk, dv = call.problem, call.dout, call.dk, call.dv
    size, widths, v0 = tile
    dk32, dv32 = fp32_rows(dk), fp32_rows(dv)
    return DkdvArguments(
        descriptors=DkdvDescriptors(
            q=pair_descriptor(x.q, size, widths),
            dout=ragged_descriptor(dout, size, v0),
            k=pair_descriptor(x.k, ROWS.value, widths),
            v=ragged_descriptor(x.v, ROWS.value, v0),
            statistics=statistics_descriptor(tiled.statistics, size),
            dk=pair_descriptor(dk, ROWS.value, widths) if dk32 is None else None,
            dv=ragged_descriptor(dv, ROWS.value, v0) if dv32 is None else None,
        ),
        steps=DkdvSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dk=step_of(dk), dv=step_of(dv)),
        work=work,
        dropout=x.dropout,
        lists=x.lists("q"),
        dk32=dk32,
        dv32=dv32,
        **shared_arguments(x, tiled),
    )
