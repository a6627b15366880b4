"""Tile scheduler: a program's work tiles and their order, the location of a tile's sequence, and messages to the consumers."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.gluon.query_walk import HeadParts, Walk


class Work(NamedTuple):
    """Work tiles: blocks of a head's queries or keys, and the order in which programs compute them."""

    # From `tile_schedule`. Without lengths, a persistent kernel has only its counter, and other kernels None. A persistent kernel
    # also has None if there is a program for each tile, or a plan
    table_ptr: Pointer
    num_heads: int
    group_size: int  # query heads that share a key head
    blocks: int  # blocks of the longest sequence
    heads_per_l2_section: int  # see `swizzle_heads_for_l2`
    walk: Walk | None = None  # for a backward's key blocks
    parts: HeadParts | None = None  # for a backward's key blocks; None: a program visits all query heads of its key head
    # First head of a last section that is larger than the others; None: there is none, and the last section has the remaining heads
    last_section: int | None = None


@gluon.jit
def swizzle_heads_for_l2(t, length, heads, heads_per_l2_section):
    # Returns (index in its head's list, head) of work tile t, for `heads` lists of `length` tiles each. A section has as many heads
    # as fit in L2, and the first tiles of all its heads come first. They are the longest, and short tiles fill up the end.
    section = t // (heads_per_l2_section * length)
    index_in_section = t - section * heads_per_l2_section * length
    heads_in_section = gl.minimum(heads_per_l2_section, heads - section * heads_per_l2_section)
    return index_in_section // heads_in_section, section * heads_per_l2_section + index_in_section % heads_in_section


@gluon.jit
def num_work_tiles(work: Work, num_heads, batch, META: gl.constexpr):
    # num_heads: of tiles, each of which may contain several query heads
    if META.HAS_LENGTHS and work.table_ptr is not None:
        return gl.load(work.table_ptr + 1) * num_heads
    else:
        return batch * num_heads * work.blocks


@gluon.jit
def work_tile(t, num_tiles, work: Work, num_heads, batch, META: gl.constexpr):
    # Returns (first row, head, batch) of work tile t of a persistent forward. The longest come first.
    if META.HAS_LENGTHS and work.table_ptr is not None:
        place, head = swizzle_heads_for_l2(t, num_tiles // num_heads, num_heads, work.heads_per_l2_section)
        entry = gl.load(work.table_ptr + 2 + place)
        return entry % work.blocks * META.BLOCK_M, head, entry // work.blocks
    else:
        block, b_h = swizzle_heads_for_l2(t, work.blocks, batch * num_heads, work.heads_per_l2_section)
        if META.HAS_RIGHT:
            block = work.blocks - 1 - block
        return block * META.BLOCK_M, b_h % num_heads, b_h // num_heads


@gluon.jit
def backward_tile(t, num_tiles, work: Work, num_heads, LAST_FIRST: gl.constexpr, META: gl.constexpr):
    # Returns (block, head, batch) of work tile t of a backward: in a section of heads, the blocks with the most work come first.
    # With lengths, the sequences of a section follow one another, in the order of `tile_schedule`. If there are fewer blocks than
    # tiles, the block of the other tiles is past every sequence's end.
    if META.HAS_LENGTHS:
        t, head = swizzle_heads_for_l2(t, num_tiles // num_heads, num_heads, work.heads_per_l2_section)
        exists = t < gl.load(work.table_ptr + 1)
        entry = gl.where(exists, gl.load(work.table_ptr + 2 + gl.where(exists, t, 0)), work.blocks)
        return gl.where(exists, entry % work.blocks, work.blocks), head, gl.where(exists, entry // work.blocks, 0)
    else:
        heads, section, first = num_tiles // work.blocks, work.heads_per_l2_section, 0
        if work.last_section is not None:
            is_last = t >= work.last_section * work.blocks
            first = gl.where(is_last, work.last_section, 0)
            heads = gl.where(is_last, heads - first, work.last_section)
            section = gl.where(is_last, heads, section)
        block, b_h = swizzle_heads_for_l2(t - first * work.blocks, work.blocks, heads, section)
        b_h += first
        if LAST_FIRST:
            block = work.blocks - 1 - block
        return block, b_h % num_heads, b_h // num_heads


@gluon.jit
def broadcast_tile(integers, n, barriers, META: gl.constexpr):
    # Sends the n-th work tile, META.NUMBERS integers, from the producer to the consumers. The producer runs ahead, so
    # that consumers do not wait for the reads that locate the tile.
    NUMBERS: gl.constexpr = META.NUMBERS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(barriers.tile_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    for i in gl.static_range(NUMBERS):
        barriers.tile_slots.index((n & 1) * NUMBERS + i).store(gl.full([1], integers[i], gl.int32, layout=LAYOUT))
    mbarrier.arrive(barriers.tile_full.index(n & 1), count=1)


@gluon.jit
def take(integers, COUNT: gl.constexpr):
    # Returns (the first COUNT integers of a message, the others), for a reader that names the fields in their order
    return integers[:COUNT], integers[COUNT:]


@gluon.jit
def is_tile(numbers):
    # Returns whether a message has a work tile, and not the end
    first, _ = take(numbers, 1)
    (first_row,) = first
    return first_row >= 0


@gluon.jit
def broadcast_end(n, barriers, META: gl.constexpr):
    # Sends a message with first row -1 instead of an n-th work tile.
    tile = (-1,)
    for _ in gl.static_range(META.NUMBERS - 1):
        tile = tile + (0,)
    broadcast_tile(tile, n, barriers, META)


@gluon.jit
def receive_tile(n, barriers, META: gl.constexpr):
    # Receives the n-th work tile, for a partition that the producer broadcasts to
    NUMBERS: gl.constexpr = META.NUMBERS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(barriers.tile_full.index(n & 1), (n >> 1) & 1)
    tile = ()
    for i in gl.static_range(NUMBERS):
        number = barriers.tile_slots.index((n & 1) * NUMBERS + i).load(LAYOUT)
        tile = tile + (gl.max(number, 0),)
    mbarrier.arrive(barriers.tile_empty.index(n & 1), count=1)
    return tile
