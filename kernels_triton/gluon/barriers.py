"""Named barriers, with which warpgroups wait for each other, and their numbers in each kernel.

Kernels may reuse each other's numbers; Triton uses the first few of the sixteen itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BOTH = gl.constexpr(2 * 128)  # threads of two warpgroups

# Forward
PINGPONG = gl.constexpr(9)  # first of one for each consumer, which waits there until the previous consumer has issued its products

# Fused backward. ds has two tiles, for even and odd iterations, and so two barriers for each warpgroup.
READ = gl.constexpr(5)  # first of four, by parity of the iteration whose ds was read and by the consumer that has read it
WRITTEN = gl.constexpr(9)  # first of four, by parity of the iteration and by the consumer that has written its ds
LAST = gl.constexpr(13)
TURN = gl.constexpr(14)  # first of two, one for each consumer, which computes p after the other has

# dk and dv, columns split between the warpgroups
P_WRITTEN = gl.constexpr(9)
DS_WRITTEN = gl.constexpr(10)

# Backward for head dims above 256, with DS_WRITTEN
S_WRITTEN = gl.constexpr(9)


@gluon.constexpr_function
def _barrier_assembly(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly("sync", BARRIER, THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly("arrive", BARRIER, THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_assembly_at(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.b32 $0, 0;"


# The same for a barrier that is known only at run time.
@gluon.jit
def named_barrier_sync_at(barrier, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly_at("sync", THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive_at(barrier, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly_at("arrive", THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


# The consumers of a forward take turns: each waits until the previous one has issued its products.
@gluon.jit
def wait_for_turn(CONSUMER: gl.constexpr):
    named_barrier_sync(PINGPONG + CONSUMER, BOTH)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    named_barrier_arrive(PINGPONG + (CONSUMER + 1) % CONSUMERS, BOTH)


# The consumers of a fused backward exchange ds. A slot has one tile of each.
@gluon.jit
def ds_slot(iteration):
    return (iteration & 1) * 2


@gluon.jit
def announce_written(slot, CONSUMER: gl.constexpr):
    named_barrier_arrive_at(WRITTEN + CONSUMER + slot, BOTH)


@gluon.jit
def wait_written(slot, CONSUMER: gl.constexpr):
    # Waits until the other consumer has written its tile
    named_barrier_sync_at(WRITTEN + 1 - CONSUMER + slot, BOTH)


@gluon.jit
def announce_read(slot, CONSUMER: gl.constexpr):
    named_barrier_arrive_at(READ + CONSUMER + slot, BOTH)


@gluon.jit
def wait_read(slot, CONSUMER: gl.constexpr):
    # Waits until the other consumer has read this one's tile
    named_barrier_sync_at(READ + 1 - CONSUMER + slot, BOTH)
