"""Which work tile a program computes, and next: the order that shares L2, where a tile's sequence lies, the tile broadcast."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.common.arguments import Lengths
from flexattn.kernels_triton.common.primitives import load_sequence
from flexattn.kernels_triton.common.problem import Problem

_L2_BYTES = 32 * 2**20  # of what is read, or added to, again and again while it is in L2


def heads_per_section(heads: int, bytes_per_head: int) -> int:
    """How many of `heads` heads share L2, at least one: see `in_sections`."""
    return min(heads, max(1, _L2_BYTES // bytes_per_head))


def query_heads_per_section(problem: Problem) -> int:
    """How many heads' tiles `piece_of_work` hands out together; with lengths those of all sequences come together."""
    x = problem
    heads, tokens = x.batch * x.num_heads_kv, x.longest_kv
    if x.cu_seqlens_q is not None:
        heads, tokens = x.num_heads_kv, x.k.numel() // (x.num_heads_kv * x.k.shape[-1])
    return heads_per_section(heads, tokens * (x.q.shape[-1] + x.v.shape[-1]) * x.k.element_size()) * x.group_size


def section_of(problem: Problem, heads: int, bytes_per_head: int) -> int:
    """How many heads `block_of` takes together; two of packed batches (bench/results/packed_orders_h200.json)."""
    x = problem
    return min(heads, 2) if x.cu_seqlens_q is not None else heads_per_section(heads * x.batch, bytes_per_head)


class Sequence(NamedTuple):
    """Where the queries and the keys of one sequence are, inside a kernel."""

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
def in_sections(t, length, heads, heads_per_section):
    # Of `heads` lists of `length` pieces each, piece t: (place in its list, head). Within a section, as many heads as L2 has room
    # for, the first pieces of all heads come first: they are the longest, and what is short fills up the end.
    section = t // (heads_per_section * length)
    rest = t - section * heads_per_section * length
    heads_here = gl.minimum(heads_per_section, heads - section * heads_per_section)
    return rest // heads_here, section * heads_per_section + rest % heads_here


@gluon.jit
def amount_of_work(table_ptr, batch, num_heads, blocks, META: gl.constexpr):
    if META.HAS_LENGTHS:
        return gl.load(table_ptr + 1) * num_heads
    else:
        return batch * num_heads * blocks


@gluon.jit
def piece_of_work(t, amount, table_ptr, batch, num_heads, blocks, heads_per_section, META: gl.constexpr):
    # (first query, head, batch) of piece t. The longest come first; heads of one section, whose keys and values fit L2, together.
    if META.HAS_LENGTHS:
        place, head = in_sections(t, amount // num_heads, num_heads, heads_per_section)
        entry = gl.load(table_ptr + 2 + place)
        return entry % blocks * META.BLOCK_M, head, entry // blocks
    else:
        block, b_h = in_sections(t, blocks, batch * num_heads, heads_per_section)
        if META.HAS_RIGHT:
            block = blocks - 1 - block
        return block * META.BLOCK_M, b_h % num_heads, b_h // num_heads


@gluon.jit
def block_of(table_ptr, num_heads, blocks, section, LAST_FIRST: gl.constexpr, META: gl.constexpr):
    # (block, head, batch) of this program: of a section of heads, so that what their programs share is in L2, the blocks with the
    # most to do first. With lengths one sequence of a section comes after the other, as `work_table` has them, and where there
    # are fewer blocks than programs, a block is past every sequence's end.
    pid = gl.program_id(0)
    if META.HAS_LENGTHS:
        t, head = in_sections(pid, gl.num_programs(0) // num_heads, num_heads, section)
        is_there = t < gl.load(table_ptr + 1)
        entry = gl.where(is_there, gl.load(table_ptr + 2 + gl.where(is_there, t, 0)), blocks)
        return gl.where(is_there, entry % blocks, blocks), head, gl.where(is_there, entry // blocks, 0)
    else:
        block, b_h = in_sections(pid, blocks, gl.num_programs(0) // blocks, section)
        if LAST_FIRST:
            block = blocks - 1 - block
        return block, b_h % num_heads, b_h // num_heads


@gluon.jit
def tell(tile, turn, barriers, META: gl.constexpr):
    # The producer, which runs ahead, tells the consumers a work tile: they need not wait for what it read for that.
    _, _, _, _, _, _, told_full, told_empty, told = barriers
    NUMBERS: gl.constexpr = META.NUMBERS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(told_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    for i in gl.static_range(NUMBERS):
        told.index((turn & 1) * NUMBERS + i).store(gl.full([1], tile[i], gl.int32, layout=LAYOUT))
    mbarrier.arrive(told_full.index(turn & 1), count=1)


@gluon.jit
def hear(turn, barriers, META: gl.constexpr):
    # As many numbers as were told
    _, _, _, _, _, _, told_full, told_empty, told = barriers
    NUMBERS: gl.constexpr = META.NUMBERS
    mbarrier.wait(told_full.index(turn & 1), (turn >> 1) & 1)
    tile = ()
    for i in gl.static_range(NUMBERS):
        number = told.index((turn & 1) * NUMBERS + i).load(gl.BlockedLayout([1], [32], [4], [0]))
        tile = tile + (gl.max(number, 0),)
    mbarrier.arrive(told_empty.index(turn & 1), count=1)
    return tile
