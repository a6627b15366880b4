"""Conversion of dq by the persistent programs of a fused backward: in parts, which they draw like key blocks.

A part reads sums that any program may have added to, so it waits until all key blocks of its head have been counted. In the terms
of PTX's memory consistency model, the chain from an addition to a part's loads is:

- The copy engine's additions are complete, and visible to the warp that issued them, when it counts (`finish_additions`).
- It counts by an atomic with release semantics at GPU scope. The warp that has drawn the part reads the count by an atomic with
  acquire semantics. Each count in the number read precedes that read in observation order, which includes atomics. So each of these
  releases synchronizes with the acquire.
- The part is broadcast through an mbarrier. Its arrive has release semantics within the program, and its wait acquire semantics
  (PTX ISA, mbarrier.arrive and mbarrier.try_wait: the default .sem and .scope). So the consumers' loads come after it too.

The counts are zeros before each launch: the preprocess kernel, which precedes it in the same stream, writes them like dq's zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Pointer, Rows
from flexattn.kernels_triton.common.statistics_tiles import statistics_tile
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.descriptors import finish_additions
from flexattn.kernels_triton.gluon.tile_scheduler import take
from flexattn.kernels_triton.runtime.entry import WidePointer

_ELEMENTS_AT_ONCE = gl.constexpr(64 * 128)  # elements of a part that a warpgroup has in registers


class SumsOfDq(NamedTuple):
    """The sums of dq of a fused kernel that converts them."""

    arrivals_ptr: Pointer  # int32 [b, h_kv]: number of key blocks that have been added
    ptr: WidePointer  # fp32 [tiles * BLOCK_M, DIM]
    dq: Rows  # strides are in units of DIM


def sums_of_dq(arrivals: Tensor | None, sums: Tensor, dq: Tensor) -> SumsOfDq:
    width = dq.shape[-1]
    stride_b, stride_s, stride_h = (n // width for n in dq.stride()[:-1])
    return SumsOfDq(arrivals_ptr=arrivals, ptr=sums, dq=Rows(ptr=dq, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h))


@triton.jit
def place_in_sums(rows):
    # Returns the row of the sums for row `rows` of dq: in each group of eight, row r is at 2 * (r % 4) + r // 4
    # (`dq_sums.in_order_of_sums`).
    return rows // 8 * 8 + rows % 4 * 2 + rows // 4 % 2


@gluon.jit
def count_block(args, block: Block):
    # Called by the warp that has issued the additions of all of the block's tiles of dq
    finish_additions()
    heads = args.work.num_heads // args.work.group_size
    gl.atomic_add(args.sums.arrivals_ptr + block.b * heads + block.h_kv, 1, sem="release")


class Task(NamedTuple):
    """A work tile of a kernel that converts dq: a key block, or a part of dq."""

    converts: gl.tensor
    index: gl.tensor  # its index among the key blocks, or among the parts


@gluon.jit
def find_task(t, blocks, args, META: gl.constexpr):
    # Returns work tile t, of `blocks` key blocks and all parts. The parts of a section of heads come after the blocks of the next
    # section. So almost no part waits, and the sums are still in L2.
    work = args.work
    parts = gl.cdiv(args.lengths_q.max_seqlen, META.CONVERTED) * work.group_size  # parts of a key head
    section_blocks = work.heads_per_l2_section * work.blocks
    section_parts = work.heads_per_l2_section * parts
    last = gl.cdiv(blocks, section_blocks) - 1
    # The blocks of this section are the last ones before t.
    section = gl.minimum(gl.maximum(t - section_blocks, 0) // (section_blocks + section_parts) + 1, last)
    blocks_before = gl.minimum((section + 1) * section_blocks, blocks)
    parts_before = gl.maximum(section - 1, 0) * section_parts
    converts = t >= blocks_before + parts_before
    return Task(converts=converts, index=gl.where(converts, t - blocks_before, t - parts_before))


@gluon.jit
def num_tasks(blocks, args, META: gl.constexpr):
    return blocks + args.lengths_q.batch * args.work.num_heads * gl.cdiv(args.lengths_q.max_seqlen, META.CONVERTED)


class Part(NamedTuple):
    """A part of dq, in a message whose second integer is below 0: -1 - h. There a key block has its head."""

    first_row: gl.tensor
    h: gl.tensor
    b: gl.tensor


@gluon.jit
def is_key_block(numbers):
    # Returns whether a message has a key block, and not a part of dq
    return _unpack_part(numbers).h < 0


@gluon.jit
def _unpack_part(numbers):
    fields, _ = take(numbers, 3)
    sent = Part(*fields)
    return Part(first_row=sent.first_row, h=-1 - sent.h, b=sent.b)


@gluon.jit
def find_part(index, args, META: gl.constexpr):
    # Returns the message of part `index`, which `_unpack_part` reads
    parts = gl.cdiv(args.lengths_q.max_seqlen, META.CONVERTED)
    b_h = index // parts
    numbers = (index % parts * META.CONVERTED, -1 - b_h % args.work.num_heads, b_h // args.work.num_heads)
    for _ in gl.static_range(META.NUMBERS - 3):
        numbers = numbers + (0,)
    return numbers


@gluon.jit
def wait_for_sums(numbers, args):
    # Waits until all key blocks of a part's head have been added. They were drawn before it, by programs that run, so the wait
    # ends.
    heads = args.work.num_heads // args.work.group_size
    part = _unpack_part(numbers)
    pointer = args.sums.arrivals_ptr + part.b * heads + part.h // args.work.group_size
    arrived = gl.atomic_add(pointer, 0, sem="acquire")
    while arrived < args.work.blocks:
        arrived = gl.atomic_add(pointer, 0, sem="acquire")


@gluon.jit
def convert_part(numbers, args, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Converts a warpgroup's half of a part, from `find_part`
    DIM: gl.constexpr = META.DIM
    STEP: gl.constexpr = _ELEMENTS_AT_ONCE // DIM
    dq = args.sums.dq
    DTYPE: gl.constexpr = dq.ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    part = _unpack_part(numbers)
    h, b = part.h, part.b
    len_q = args.lengths_q.max_seqlen
    tile = statistics_tile(b, h, args.work.num_heads, 0, args.tiles_of_statistics, META, META.BLOCK_M)
    sums_ptr = args.sums.ptr + (tile * META.BLOCK_M).to(gl.int64) * DIM
    dq_ptr = dq.ptr + (b.to(gl.int64) * dq.stride_b + h.to(gl.int64) * dq.stride_h) * DIM
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for step in range(CONSUMER, META.CONVERTED // STEP, 2):
        rows = part.first_row + step * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(1, LAYOUT))
        exists = (rows < len_q)[:, None]
        offsets = place_in_sums(rows) * DIM
        sums = gl.load(sums_ptr + offsets[:, None] + columns, mask=exists, other=0.0, cache_modifier=".cg")  # they are in L2
        offsets = rows.to(gl.int64) * dq.stride_s * DIM
        gl.store(dq_ptr + offsets[:, None] + columns, (sums * args.scores.scale).to(DTYPE), mask=exists)
