"""Rings of tiles in shared memory that a producer warp fills and consumer warpgroups empty: their full and empty barriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.hopper.barriers import BOTH, PINGPONG, named_barrier_arrive, named_barrier_sync

STAGES = gl.constexpr(2)  # of q and of dout in the backward in one kernel


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


# The n-th tile that goes through a ring of STAGES tiles is in stage n % STAGES, in the phase n // STAGES of its barriers.
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
def pass_over(count, loaded, barriers, CONSUMER: gl.constexpr, META: gl.constexpr):
    _, _, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    for _ in range(count):
        slot = loaded % META.STAGES
        phase = (loaded // META.STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        if META.TAKES_TURNS:
            named_barrier_sync(PINGPONG + CONSUMER, BOTH)
            named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot), count=1)
        loaded += 1
    return loaded
