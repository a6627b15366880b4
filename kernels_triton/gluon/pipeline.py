"""Pipelines: rings of tiles in shared memory, with full and empty barriers, that a producer warp fills and consumers empty."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.gluon.barriers import BOTH, PINGPONG, named_barrier_arrive, named_barrier_sync

STAGES = gl.constexpr(2)  # stages of q and of dout in the fused backward


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


# The n-th tile of a ring of STAGES tiles is in stage n % STAGES, in phase n // STAGES of its barriers.
@gluon.jit
def wait_full(full, n, STAGES: gl.constexpr):
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(empty, n, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def release(empty, n, STAGES: gl.constexpr):
    mbarrier.arrive(empty.index(n % STAGES), count=1)


@gluon.jit
def allocate_tile_slots(NUMBERS: gl.constexpr):
    # Two slots for tile messages of NUMBERS integers
    return gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


class ForwardBarriers(NamedTuple):
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    tile_full: Any  # for this and the next two: barriers of the two slots for tile messages, and the slots
    tile_empty: Any
    tile_slots: Any


@gluon.jit
def allocate_forward_barriers(META: gl.constexpr):
    CONSUMERS: gl.constexpr = META.CONSUMERS
    STAGES: gl.constexpr = META.STAGES
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    return ForwardBarriers(
        q_full=allocate_barriers(Q_TILES, 1),
        q_empty=allocate_barriers(Q_TILES, 1),
        k_full=allocate_barriers(STAGES, 1),
        k_empty=allocate_barriers(STAGES, CONSUMERS),
        v_full=allocate_barriers(STAGES, 1),
        v_empty=allocate_barriers(STAGES, CONSUMERS),
        tile_full=allocate_barriers(2, 1),
        tile_empty=allocate_barriers(2, CONSUMERS),
        tile_slots=allocate_tile_slots(META.NUMBERS),
    )


@gluon.jit
def skip_blocks(count, n_block, barriers: ForwardBarriers, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Waits for `count` blocks of k and v that a consumer's queries do not see, and releases their stages unread.
    for _ in range(count):
        stage = n_block % META.STAGES
        phase = (n_block // META.STAGES) & 1
        mbarrier.wait(barriers.k_full.index(stage), phase)
        mbarrier.arrive(barriers.k_empty.index(stage), count=1)
        if META.PINGPONG:
            named_barrier_sync(PINGPONG + CONSUMER, BOTH)
            named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        mbarrier.arrive(barriers.v_empty.index(stage), count=1)
        n_block += 1
    return n_block
