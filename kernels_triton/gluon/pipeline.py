"""Pipelines: rings of tiles in shared memory, with full and empty barriers, that a producer warp fills and consumers empty."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.gluon.barriers import pass_turn, wait_for_turn

STAGES = gl.constexpr(2)  # stages of q and of dout in the fused backward


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


class Stage(NamedTuple):
    """The stage of a ring's `count`-th tile. `index` and `phase` are computed at each use, so that no register keeps them."""

    count: int | gl.tensor
    stages: int  # number of stages of the ring


@gluon.jit
def index(stage: Stage):
    return stage.count % stage.stages


@gluon.jit
def phase(stage: Stage):
    # Returns the parity that the stage's full barrier completes with this tile
    return (stage.count // stage.stages) & 1


@gluon.jit
def wait_full(full, stage: Stage):
    mbarrier.wait(full.index(index(stage)), phase(stage))


@gluon.jit
def wait_empty(empty, stage: Stage):
    mbarrier.wait(empty.index(index(stage)), phase(stage) ^ 1)


@gluon.jit
def release(empty, stage: Stage):
    mbarrier.arrive(empty.index(index(stage)), count=1)


@gluon.jit
def allocate_tile_slots(NUMBERS: gl.constexpr):
    # Two slots for tile messages of NUMBERS integers
    return gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


class ForwardBarriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor  # for this and the next two: barriers of the two slots for tile messages, and the slots
    tile_empty: gl.shared_memory_descriptor
    tile_slots: gl.shared_memory_descriptor


@gluon.jit
def allocate_forward_barriers(READERS: gl.constexpr, RECEIVERS: gl.constexpr, META: gl.constexpr):
    # READERS: partitions that release each stage of k and of v. RECEIVERS: partitions that receive work tiles
    STAGES: gl.constexpr = META.STAGES
    Q_TILES: gl.constexpr = META.CONSUMERS * META.Q_STAGES
    return ForwardBarriers(
        q_full=allocate_barriers(Q_TILES, 1),
        q_empty=allocate_barriers(Q_TILES, 1),
        k_full=allocate_barriers(STAGES, 1),
        k_empty=allocate_barriers(STAGES, READERS),
        v_full=allocate_barriers(STAGES, 1),
        v_empty=allocate_barriers(STAGES, READERS),
        tile_full=allocate_barriers(2, 1),
        tile_empty=allocate_barriers(2, RECEIVERS),
        tile_slots=allocate_tile_slots(META.NUMBERS),
    )


@gluon.jit
def skip_blocks(count, n_block, barriers: ForwardBarriers, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Waits for `count` blocks of k and v that a consumer's queries do not see, and releases their stages unread.
    for _ in range(count):
        stage = Stage(n_block, META.STAGES)
        slot = index(stage)
        parity = phase(stage)
        mbarrier.wait(barriers.k_full.index(slot), parity)
        release(barriers.k_empty, stage)
        if META.PINGPONG:
            wait_for_turn(CONSUMER)
            pass_turn(CONSUMER, META.CONSUMERS)
        mbarrier.wait(barriers.v_full.index(slot), parity)
        release(barriers.v_empty, stage)
        n_block += 1
    return n_block
