"""Loads of the forwards, in 16 bits and in FP8, by the producer warp: q of a work tile, and a block of keys."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.pairs import Origin, Pair, load_pair, pair_bytes
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage


class LoadedRows(NamedTuple):
    """Rows of one sequence and head: from `first` on, up to `length`."""

    origin: Origin
    first: gl.tensor
    length: gl.tensor


@gluon.jit
def load_queries(descriptors: Pair, tiles: Pair, rows: LoadedRows, n_tile, barriers: ForwardBarriers, META: gl.constexpr):
    # Loads q of the n_tile-th work tile of this program: a tile for each consumer
    BYTES: gl.constexpr = pair_bytes(descriptors.first.block_type.nbytes, descriptors.second.block_type.nbytes, META.QK1)
    CONSUMERS: gl.constexpr = META.CONSUMERS
    QUERIES: gl.constexpr = META.BLOCK_M // CONSUMERS // META.GROUP
    q_stage = Stage(n_tile, META.Q_STAGES)
    for consumer in gl.static_range(CONSUMERS):
        row = rows.first + consumer * QUERIES
        slot = consumer + pipeline.index(q_stage) * CONSUMERS
        full = barriers.q_full.index(slot)
        mbarrier.wait(barriers.q_empty.index(slot), pipeline.phase(q_stage) ^ 1)
        mbarrier.expect(full, BYTES)
        load_pair(descriptors, rows.origin, rows.length, row, full, tiles, slot, META)


@gluon.jit
def load_keys(descriptors: Pair, tiles: Pair, rows: LoadedRows, n_block, barriers: ForwardBarriers, META: gl.constexpr):
    # Loads k of the n_block-th key block of this program
    BYTES: gl.constexpr = pair_bytes(descriptors.first.block_type.nbytes, descriptors.second.block_type.nbytes, META.QK1)
    stage = Stage(n_block, META.STAGES)
    index = pipeline.index(stage)
    full = barriers.k_full.index(index)
    pipeline.wait_empty(barriers.k_empty, stage)
    mbarrier.expect(full, BYTES)
    load_pair(descriptors, rows.origin, rows.length, rows.first, full, tiles, index, META)
