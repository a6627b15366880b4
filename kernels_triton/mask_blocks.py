"""A block mask made from a mask_mod on the device, in each call, without a dense mask.

Whether a block of queries sees a block of keys costs a few instructions of interval arithmetic, not its queries times keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.configs import Tile
from flexattn.kernels_triton.launch import kernel, launch
from flexattn.kernels_triton.problem import BlockLists, Problem

BLOCK = 128  # queries, and keys, of a block
SHORTEST = 8 * BLOCK  # where fewer blocks could be skipped, lists save nothing
_MOST_ENTRIES = 2**28  # of all lists
_CHUNK = 32  # blocks that a program looks at together
_TILE = Tile(block_m=BLOCK, block_n=BLOCK, num_warps=8, num_stages=1)


class ListMeta(NamedTuple):
    """What the kernel is compiled for."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    OF_QUERIES: bool  # lists of blocks of queries for each block of keys, not the other way round
    BLOCK: int
    CHUNK: int


@kernel
def _mask_blocks_kernel(
    longest_q,
    longest_kv,
    window_left,
    window_right,
    shift,
    captures,
    heads,
    rows,  # blocks that have a list
    columns,  # blocks that may be in one
    counts_ptr,
    indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK: tl.constexpr = META.BLOCK
    CHUNK: tl.constexpr = META.CHUNK
    pid = tl.program_id(0)
    row = pid % rows
    h = pid // rows % heads
    b = pid // rows // heads
    one = tl.zeros([1], tl.int64)
    list_base = tl.cast(pid, tl.int64) * columns
    count = 0
    full_count = 0
    for column in range(0, columns, CHUNK):
        others = column + tl.arange(0, CHUNK)
        first = one + row * BLOCK
        other_first = others.to(tl.int64) * BLOCK
        q_low, kv_low = (other_first, first) if META.OF_QUERIES else (first, other_first)
        # of a last block, what there is
        q_high = tl.maximum(tl.minimum(q_low + BLOCK, longest_q) - 1, q_low)
        kv_high = tl.maximum(tl.minimum(kv_low + BLOCK, longest_kv) - 1, kv_low)
        surely, possibly = MODS.mask_of_block(one + b, one + h, q_low, q_high, kv_low, kv_high, captures, BLOCK)
        if META.HAS_RIGHT:
            possibly = possibly & (kv_low - q_high - shift <= window_right)
        if META.HAS_LEFT:
            possibly = possibly & (q_low + shift - kv_high <= window_left)
        possibly = possibly & (others < columns)
        is_full = (surely & possibly).to(tl.int32)
        is_part = possibly.to(tl.int32) - is_full
        place = list_base + count + tl.cumsum(is_part, 0) - 1
        tl.store(indices_ptr + place, others, mask=is_part == 1)
        full_place = list_base + full_count + tl.cumsum(is_full, 0) - 1
        tl.store(full_indices_ptr + full_place, others, mask=is_full == 1)
        count += tl.sum(is_part, 0)
        full_count += tl.sum(is_full, 0)
    tl.store(counts_ptr + pid, count)
    tl.store(full_counts_ptr + pid, full_count)


def with_mask_blocks(problem: Problem, direction: Literal["forward", "backward"]) -> Problem:
    """The problem with the block mask that its mask_mod says, where that can hide blocks; else the problem."""
    x = problem
    if x.mods is None or x.mods.mask_of_block is None or x.block_mask is not None or x.batch == 0:
        return problem
    if min(x.longest_q, x.longest_kv) < BLOCK or max(x.longest_q, x.longest_kv) < SHORTEST:
        return problem
    by_batch, by_head = x.mods.mask_depends_on
    batch = x.batch if by_batch else 1
    heads = x.num_heads if by_head else 1
    rows, columns = triton.cdiv(x.longest_q, BLOCK), triton.cdiv(x.longest_kv, BLOCK)
    if 4 * batch * heads * rows * columns > _MOST_ENTRIES:
        return problem
    of_keys = _lists(x, batch, heads, rows, columns, of_queries=False)
    of_queries: tuple[Any, ...] = (None, None, None, None)
    if direction == "backward":
        of_queries = _lists(x, batch, heads, columns, rows, of_queries=True)
    return dataclasses.replace(problem, block_mask=BlockLists(*of_keys, *of_queries, BLOCK, BLOCK, x.cu_seqlens_q is None))


def _lists(x: Problem, batch: int, heads: int, rows: int, columns: int, of_queries: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(counts, indices, counts of the full, indices of the full), of blocks of keys or of queries."""
    assert x.mods is not None
    number = batch * heads * rows
    memory = torch.empty(2 * number * (1 + columns), dtype=torch.int32, device=x.device)
    counts, full_counts, indices, full_indices = memory.split([number, number, number * columns, number * columns])
    # What the band hides is left out where the host knows its diagonal; the kernels that read the lists see to the rest, and to
    # what is past the end of a sequence.
    is_known = not x.bottom_right or x.cu_seqlens_q is None
    meta = ListMeta(
        HAS_LEFT=is_known and x.window_left is not None,
        HAS_RIGHT=is_known and x.window_right is not None,
        OF_QUERIES=of_queries,
        BLOCK=BLOCK,
        CHUNK=_CHUNK,
    )
    shift = x.longest_kv - x.longest_q if x.bottom_right else 0
    sizes = (x.longest_q, x.longest_kv, *x.window, shift)
    arguments = (*sizes, x.captures, heads, rows, columns, counts, indices, full_counts, full_indices, x.mods, meta)
    launch(_mask_blocks_kernel, number, x.device, _TILE, arguments)
    shape = (batch, heads, rows)
    return counts.view(shape), indices.view(*shape, columns), full_counts.view(shape), full_indices.view(*shape, columns)
