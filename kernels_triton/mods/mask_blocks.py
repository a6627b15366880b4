"""Block masks made from a mask_mod on the device, in each call, without a dense mask.

The test whether a block of queries sees a block of keys costs a few instructions of interval arithmetic, not queries times keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.problem import MASK_BLOCK as BLOCK
from flexattn.kernels_triton.common.problem import BlockLists, Problem
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_Four = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
SHORTEST = 8 * BLOCK  # with fewer blocks to skip, lists save nothing
_MOST_ENTRIES = 2**28  # maximum entries of all lists
_CHUNK = 64  # blocks that a program tests together
_READ_TOGETHER = 8  # blocks for which a program reads captures together
_TILE = Tile(block_m=BLOCK, block_n=BLOCK, num_warps=4, num_stages=1)


class ListMeta(NamedTuple):
    """Constants that the kernels are compiled for."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    LISTS_QUERIES: bool  # lists of query blocks for each key block, not of key blocks for each query block
    BLOCK: int
    CHUNK: int
    Q_RANGES: int  # pairs that the mask reads for a block of queries
    KV_RANGES: int


class RangeArguments(NamedTuple):
    longest_q: int
    longest_kv: int
    captures: Any  # the tuple of tensors and numbers that the mods read
    batch: int
    heads: int
    blocks: int  # maximum number of blocks of either side
    ranges_ptr: Pointer  # int64 [2 * (Q_RANGES + KV_RANGES), batch, heads, blocks]


@kernel
def _block_ranges_kernel(args: RangeArguments, MODS: tl.constexpr, META: tl.constexpr):
    captures = args.captures
    heads = args.heads
    blocks = args.blocks
    BLOCK: tl.constexpr = META.BLOCK
    CHUNK: tl.constexpr = META.CHUNK
    Q_ENDS: tl.constexpr = 2 * META.Q_RANGES
    KV_ENDS: tl.constexpr = 2 * META.KV_RANGES
    chunks = tl.cdiv(blocks, CHUNK)
    pid = tl.program_id(0)
    block = pid % chunks * CHUNK + tl.arange(0, CHUNK)
    h = pid // chunks % heads
    b = pid // chunks // heads
    one = tl.zeros([1], tl.int64)
    first = block.to(tl.int64) * BLOCK
    base = args.ranges_ptr + (tl.cast(b, tl.int64) * heads + h) * blocks + block
    step = tl.cast(args.batch, tl.int64) * heads * blocks
    if Q_ENDS > 0:
        last = tl.maximum(tl.minimum(first + BLOCK, args.longest_q) - 1, first)  # the last block ends with the sequence
        ends = MODS.ranges_of_q_block(one + b, one + h, first, last, captures, BLOCK)
        for n in tl.static_range(Q_ENDS):
            tl.store(base + n * step, ends[n], mask=block < blocks)
    if KV_ENDS > 0:
        last = tl.maximum(tl.minimum(first + BLOCK, args.longest_kv) - 1, first)
        ends = MODS.ranges_of_kv_block(one + b, one + h, first, last, captures, BLOCK)
        for n in tl.static_range(KV_ENDS):
            tl.store(base + (Q_ENDS + n) * step, ends[n], mask=block < blocks)


@triton.jit
def _load_ranges(base, step, block, blocks, FIRST: tl.constexpr, COUNT: tl.constexpr):
    ends = ()
    for n in tl.static_range(COUNT):
        ends = ends + (tl.load(base + (FIRST + n) * step + block, mask=block < blocks, other=0),)
    return ends


class BlockBand(NamedTuple):
    """The band of a problem if the host knows its diagonal; 0 for an open side."""

    left: int
    right: int
    shift: int


class ListPointers(NamedTuple):
    """Memory for the lists of a block mask."""

    counts_ptr: Pointer
    indices_ptr: Pointer
    full_counts_ptr: Pointer
    full_indices_ptr: Pointer


class ListArguments(NamedTuple):
    longest_q: int
    longest_kv: int
    band: BlockBand
    captures: Any  # the tuple of tensors and numbers that the mods read
    batch: int
    heads: int
    rows: int  # blocks that have a list
    columns: int  # blocks that may be in a list
    blocks: int  # maximum number of blocks of either side
    ranges_ptr: Pointer  # result of `_block_ranges_kernel`
    lists: ListPointers


@kernel
def _mask_blocks_kernel(args: ListArguments, MODS: tl.constexpr, META: tl.constexpr):
    longest_q = args.longest_q
    longest_kv = args.longest_kv
    band = args.band
    captures = args.captures
    heads = args.heads
    rows = args.rows
    columns = args.columns
    blocks = args.blocks
    lists = args.lists
    BLOCK: tl.constexpr = META.BLOCK
    CHUNK: tl.constexpr = META.CHUNK
    Q_ENDS: tl.constexpr = 2 * META.Q_RANGES
    KV_ENDS: tl.constexpr = 2 * META.KV_RANGES
    pid = tl.program_id(0)
    row = pid % rows
    h = pid // rows % heads
    b = pid // rows // heads
    one = tl.zeros([1], tl.int64)
    base = args.ranges_ptr
    if Q_ENDS + KV_ENDS > 0:
        base += (tl.cast(b, tl.int64) * heads + h) * blocks
    step = tl.cast(args.batch, tl.int64) * heads * blocks
    list_base = tl.cast(pid, tl.int64) * columns
    count = 0
    full_count = 0
    for column in range(0, columns, CHUNK):
        other_blocks = column + tl.arange(0, CHUNK)
        first = one + row * BLOCK
        other_first = other_blocks.to(tl.int64) * BLOCK
        q_low, kv_low = (other_first, first) if META.LISTS_QUERIES else (first, other_first)
        # the last block ends with the sequence
        q_high = tl.maximum(tl.minimum(q_low + BLOCK, longest_q) - 1, q_low)
        kv_high = tl.maximum(tl.minimum(kv_low + BLOCK, longest_kv) - 1, kv_low)
        q_block, kv_block = (other_blocks, one + row) if META.LISTS_QUERIES else (one + row, other_blocks)
        q_ranges = _load_ranges(base, step, q_block, blocks, 0, Q_ENDS)
        kv_ranges = _load_ranges(base, step, kv_block, blocks, Q_ENDS, KV_ENDS)
        surely, possibly = MODS.mask_of_block(one + b, one + h, q_low, q_high, kv_low, kv_high, q_ranges, kv_ranges, captures)
        if META.HAS_RIGHT:
            possibly = possibly & (kv_low - q_high - band.shift <= band.right)
        if META.HAS_LEFT:
            possibly = possibly & (q_low + band.shift - kv_high <= band.left)
        possibly = possibly & (other_blocks < columns)
        is_full = (surely & possibly).to(tl.int32)
        is_part = possibly.to(tl.int32) - is_full
        place = list_base + count + tl.cumsum(is_part, 0) - 1
        tl.store(lists.indices_ptr + place, other_blocks, mask=is_part == 1)
        full_place = list_base + full_count + tl.cumsum(is_full, 0) - 1
        tl.store(lists.full_indices_ptr + full_place, other_blocks, mask=is_full == 1)
        count += tl.sum(is_part, 0)
        full_count += tl.sum(is_full, 0)
    tl.store(lists.counts_ptr + pid, count)
    tl.store(lists.full_counts_ptr + pid, full_count)


def with_mask_blocks(problem: Problem, direction: Literal["forward", "backward", "one pass"]) -> Problem:
    """Returns the problem with the block mask that its mask_mod implies, if that can hide blocks; otherwise the problem.

    direction: the reader of the lists. A fused backward needs only the lists of query blocks (`with_key_lists` adds the others).
    """
    x = problem
    if x.mods is None or not x.mods.can_hide_block or x.block_mask is not None or x.batch == 0:
        return problem
    if min(x.longest_q, x.longest_kv) < BLOCK or max(x.longest_q, x.longest_kv) < SHORTEST:
        return problem
    by_batch, by_head = x.mods.mask_depends_on
    batch = x.batch if by_batch else 1
    heads = x.num_heads if by_head else 1
    blocks_q, blocks_kv = triton.cdiv(x.longest_q, BLOCK), triton.cdiv(x.longest_kv, BLOCK)
    if 4 * batch * heads * blocks_q * blocks_kv > _MOST_ENTRIES:
        return problem
    lists = _Lists(x, batch, heads, blocks_q, blocks_kv)
    nothing = (None, None, None, None)
    key_lists: _Four = lists.make(query_lists=False) if direction != "one pass" else nothing
    query_lists: _Four = lists.make(query_lists=True) if direction != "forward" else nothing
    return dataclasses.replace(problem, block_mask=BlockLists(*key_lists, *query_lists, BLOCK, BLOCK, not x.has_lengths))


def with_key_lists(problem: Problem) -> Problem:
    """Returns the problem with the lists of key blocks too, if it has a block mask without them."""
    mask = problem.block_mask
    if mask is None or mask.kv_num_blocks is not None:
        return problem
    assert mask.q_num_blocks is not None
    batch, heads, columns = mask.q_num_blocks.shape
    lists = _Lists(problem, batch, heads, triton.cdiv(problem.longest_q, BLOCK), columns)
    return dataclasses.replace(problem, block_mask=BlockLists(*lists.make(query_lists=False), *mask[4:8], *mask[8:]))


class _Lists:
    """Makes the lists of key blocks and of query blocks, from the values that the mask reads for each block."""

    def __init__(self, x: Problem, batch: int, heads: int, blocks_q: int, blocks_kv: int) -> None:
        assert x.mods is not None
        self.x, self.batch, self.heads, self.blocks_q, self.blocks_kv = x, batch, heads, blocks_q, blocks_kv
        self.blocks = max(blocks_q, blocks_kv)
        ranges_q, ranges_kv = x.mods.num_ranges_of_block
        self.ranges: Tensor | None = None
        # Blocks that the band hides are omitted if the host knows its diagonal. The kernels that read the lists handle other bands,
        # and positions past the end of a sequence.
        is_known = not x.bottom_right or not x.has_lengths
        self.meta = ListMeta(
            HAS_LEFT=is_known and x.window_left is not None,
            HAS_RIGHT=is_known and x.window_right is not None,
            LISTS_QUERIES=False,
            BLOCK=BLOCK,
            CHUNK=_CHUNK,
            Q_RANGES=ranges_q,
            KV_RANGES=ranges_kv,
        )
        if ranges_q + ranges_kv > 0:
            shape = (2 * (ranges_q + ranges_kv), batch, heads, self.blocks)
            self.ranges = torch.empty(shape, dtype=torch.int64, device=x.device)
            meta = self.meta._replace(CHUNK=_READ_TOGETHER)
            programs = batch * heads * triton.cdiv(self.blocks, _READ_TOGETHER)
            args = RangeArguments(
                longest_q=x.longest_q,
                longest_kv=x.longest_kv,
                captures=x.captures,
                batch=batch,
                heads=heads,
                blocks=self.blocks,
                ranges_ptr=self.ranges,
            )
            launch(_block_ranges_kernel, programs, x.device, _TILE, (args, x.mods, meta))

    def make(self, query_lists: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (counts, indices, counts of the full blocks, indices of the full blocks), of key blocks or of query blocks."""
        x = self.x
        rows, columns = (self.blocks_kv, self.blocks_q) if query_lists else (self.blocks_q, self.blocks_kv)
        shape = (self.batch, self.heads, rows)
        number = self.batch * self.heads * rows
        memory = torch.empty(2 * number * (1 + columns), dtype=torch.int32, device=x.device)
        counts, full_counts, indices, full_indices = memory.split([number, number, number * columns, number * columns])
        shift = x.longest_kv - x.longest_q if x.bottom_right else 0
        left, right = x.window
        args = ListArguments(
            longest_q=x.longest_q,
            longest_kv=x.longest_kv,
            band=BlockBand(left=left, right=right, shift=shift),
            captures=x.captures,
            batch=self.batch,
            heads=self.heads,
            rows=rows,
            columns=columns,
            blocks=self.blocks,
            ranges_ptr=self.ranges,
            lists=ListPointers(counts_ptr=counts, indices_ptr=indices, full_counts_ptr=full_counts, full_indices_ptr=full_indices),
        )
        launch(_mask_blocks_kernel, number, x.device, _TILE, (args, x.mods, self.meta._replace(LISTS_QUERIES=query_lists)))
        return counts.view(shape), indices.view(*shape, columns), full_counts.view(shape), full_indices.view(*shape, columns)
