"""Tile scheduler: a program's work tiles and their order, the location of a tile's sequence, and messages to the consumers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.common.arguments import Lengths
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_schedule import tile_schedule
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.gluon.query_walk import Walk
from flexattn.kernels_triton.runtime.launch import has_large_l2

_MIB = 2**20
_L2_BYTES = 32 * _MIB  # bytes that are read, or added to, repeatedly while they are in L2


class Work(NamedTuple):
    """Work tiles: blocks of a head's queries or keys, and the order in which programs compute them."""

    # From `tile_schedule`. Without lengths, a persistent kernel has only its counter, and other kernels None. A persistent kernel
    # also has None if there is a program for each tile, or a plan
    table_ptr: Any
    num_heads: int
    group_size: int  # query heads that share a key head
    blocks: int  # blocks of the longest sequence
    heads_per_l2_section: int  # see `swizzle_heads_for_l2`
    walk: Walk | None = None  # for a backward's key blocks


def _heads_in_l2(heads: int, bytes_per_head: int, room: int = _L2_BYTES) -> int:
    """Returns how many of `heads` heads fit in L2 together, at least one."""
    return min(heads, max(1, room // bytes_per_head))


def section_of_one_size(heads: int, most: int) -> int:
    """Returns a size of sections of `heads` heads, about `most`, whose last section is as full as possible.

    A small last section leaves multiprocessors idle: gpt-oss's backward takes 4820 us in sections of 4, 4, 4 and 4 heads, and 5547
    in sections of 5, 5, 5 and 1. Short calls also gain from sections of up to a third more than fits in L2
    (bench/results/sections_h200.json).
    """
    return max(range(cdiv(most, 2), min(heads, most * 4 // 3) + 1), key=lambda size: (-(-heads % size), size))


def _bytes_of_forward_section(problem: Problem) -> int:
    """Returns the maximum bytes of keys and values of a forward's section of heads.

    If all tiles have equal length, small sections run all tiles of a head side by side. At 512 tokens of head dim 128 such a call
    takes 132 us on an NVIDIA H100, and 201 us in sections of 32 MiB (bench/results/forward_sections_h100.json). Its 50 MB of L2, in
    two halves, are too small for those. If there is a band, large sections run the long tiles of many heads first. 16 MiB are best
    for that on an H100, and 32 on an NVIDIA H200, which has 60 MB (bench/results/forward_turns_h200.json).
    """
    x = problem
    if x.window_left is None and x.window_right is None and x.block_mask is None and not x.has_lengths:
        return 8 * _MIB
    return 32 * _MIB if has_large_l2(x.device) else 16 * _MIB


def query_heads_per_l2_section(problem: Problem) -> int:
    """Returns how many query heads a persistent forward processes together; with lengths, in all sequences at once."""
    x = problem
    heads, tokens = x.batch * x.num_heads_kv, x.longest_kv
    if x.has_lengths:
        heads, tokens = x.num_heads_kv, x.num_keys
    bytes_per_head = tokens * (x.q.shape[-1] + x.v.shape[-1]) * x.k.element_size()
    section = _heads_in_l2(heads, bytes_per_head, _bytes_of_forward_section(x))
    return (section if x.has_lengths else section_of_one_size(heads, section)) * x.group_size


def forward_work(problem: Problem, queries: int, group: int = 1, *, has_table: bool = True) -> Work:
    """Returns the work tiles of a persistent forward, `queries` of each of `group` heads, which programs draw dynamically."""
    x = problem
    if not has_table:
        table = None
    elif not x.has_lengths:
        table = torch.zeros(1, dtype=torch.int32, device=x.device)
    else:
        table = tile_schedule(x, queries, "q", by_sequence=False)
    return Work(
        table_ptr=table,
        num_heads=x.num_heads,
        group_size=x.group_size,
        blocks=cdiv(x.longest_q, queries),
        heads_per_l2_section=query_heads_per_l2_section(x) // group,
    )


def heads_per_l2_section(problem: Problem, heads: int, bytes_per_head: int) -> int:
    """Returns how many heads a backward processes together; 2 for packed batches (bench/results/packed_orders_h200.json)."""
    x = problem
    return min(heads, 2) if x.has_lengths else _heads_in_l2(heads * x.batch, bytes_per_head)


class Sequence(NamedTuple):
    """Locations of the queries and the keys of one sequence, inside a kernel."""

    start_q: Any
    len_q: Any
    start_kv: Any
    len_kv: Any


@gluon.jit
def sequence_of(lengths_q: Lengths, lengths_kv: Lengths, b, META: gl.constexpr):
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(lengths_kv, b, META.IS_RAGGED_KV)
    return Sequence(start_q=start_q, len_q=len_q, start_kv=start_kv, len_kv=len_kv)


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
        block, b_h = swizzle_heads_for_l2(t, work.blocks, num_tiles // work.blocks, work.heads_per_l2_section)
        if LAST_FIRST:
            block = work.blocks - 1 - block
        return block, b_h % num_heads, b_h // num_heads


@gluon.jit
def broadcast_tile(tile, n, barriers, META: gl.constexpr):
    # Sends the n-th work tile, a tuple of META.NUMBERS integers, from the producer to the consumers. The producer runs ahead, so
    # that consumers do not wait for the reads that locate the tile.
    NUMBERS: gl.constexpr = META.NUMBERS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(barriers.tile_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    for i in gl.static_range(NUMBERS):
        barriers.tile_slots.index((n & 1) * NUMBERS + i).store(gl.full([1], tile[i], gl.int32, layout=LAYOUT))
    mbarrier.arrive(barriers.tile_full.index(n & 1), count=1)


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
