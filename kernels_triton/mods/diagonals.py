"""Tables of a mod's values that depend only on q_idx - kv_idx, computed in each call, so that a score costs one contiguous load.

A relative position bias reads a capture at an index that is computed for each score, or at an index that is itself read. There are
only as many distances as queries and keys together, but a score for each pair.

Each table is stored four times: in the order of keys and in the order of queries, for tiles of either orientation. Each order has a
second copy one word earlier, so that a row of a tile begins at an even word whatever its position (`mod_math.diagonal_pointers`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.crossovers import TABLE_SCORES, TABLE_SCORES_OF_ENTRY
from flexattn.kernels_triton.common.encoded_sizes import encoded_size
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.mods.mod_math import DiagonalTables
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_PAST_THE_END = 256  # positions that the tiles at the ends of a sequence may reach, on either side
_BLOCK = 1024
_TILE = Tile(block_m=_BLOCK, block_n=1, num_warps=4, num_stages=1)


class DiagonalMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    TABLES: int
    BLOCK: int


class DiagonalArguments(NamedTuple):
    captures: Any  # the tuple of tensors and numbers that the mods read
    tables_ptr: Pointer  # fp32 [tables, 2, batch, heads, 2, length]: the order of keys and of queries, with two copies of each
    batch: int
    heads: int
    blocks: int
    length: int
    middle_of_keys: int  # index of distance 0
    middle_of_queries: int


@kernel
def _diagonals_kernel(args: DiagonalArguments, MODS: tl.constexpr, META: tl.constexpr):
    batch = args.batch
    heads = args.heads
    blocks = args.blocks
    length = args.length
    pid = tl.program_id(0)
    index = pid % blocks * META.BLOCK + tl.arange(0, META.BLOCK)
    h = pid // blocks % heads
    b = pid // blocks // heads % batch
    side = pid // blocks // heads // batch
    distance = tl.where(side == 0, args.middle_of_keys - index, index - args.middle_of_queries)
    values = MODS.per_distance(b, h, distance, args.captures)
    TABLES: tl.constexpr = META.TABLES
    for n in tl.static_range(TABLES):
        row = args.tables_ptr + ((tl.cast(n * 2 + side, tl.int64) * batch + b) * heads + h) * (2 * length)
        tl.store(row + index, values[n], mask=index < length)
        tl.store(row + length + index - 1, values[n], mask=(index > 0) & (index < length))


def with_diagonals(problem: Problem) -> Problem:
    """Returns the problem with tables of values that its mods compute from distances, if it has many scores; otherwise the
    problem.
    """
    x = problem
    if x.mods is None or x.mods_of_tables is None:
        return problem
    by_batch, by_head = x.mods.distance_depends_on
    batch = x.batch if by_batch else 1
    heads = x.num_heads if by_head else 1
    block_mask = x.block_mask  # a block of it may begin before a sequence's end and have tiles past it
    past = _PAST_THE_END + (0 if block_mask is None else max(block_mask.block_size_q, block_mask.block_size_kv))
    middle_of_keys, middle_of_queries = (2 * triton.cdiv(longest + past, 2) for longest in (x.longest_q, x.longest_kv))
    length = middle_of_keys + middle_of_queries
    count = x.mods_of_tables.num_tables
    entries = 4 * count * batch * heads * length
    scores = x.q.numel() // x.q.shape[-1] * x.longest_kv
    if scores < max(TABLE_SCORES, TABLE_SCORES_OF_ENTRY * entries):
        return problem
    tables = torch.empty((count, 2, batch, heads, 2, length), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(length, _BLOCK)
    args = DiagonalArguments(
        captures=x.captures,
        tables_ptr=tables,
        batch=batch,
        heads=heads,
        blocks=blocks,
        length=length,
        middle_of_keys=middle_of_keys,
        middle_of_queries=middle_of_queries,
    )
    meta = DiagonalMeta(TABLES=count, BLOCK=_BLOCK)
    launch(_diagonals_kernel, 2 * batch * heads * blocks, x.device, _TILE, (args, x.mods, meta))
    stride_b, stride_h = (tables.stride(dim) if size > 1 else 0 for dim, size in ((2, batch), (3, heads)))
    assert x.captures is not None
    tables_argument = DiagonalTables(
        ptr=tables,
        length=encoded_size(length),
        stride_table=encoded_size(tables.stride(0)),
        stride_side=encoded_size(tables.stride(1)),
        stride_b=encoded_size(stride_b),
        stride_h=encoded_size(stride_h),
        middle_of_keys=encoded_size(middle_of_keys),
        middle_of_queries=encoded_size(middle_of_queries),
    )
    captures = (*x.captures, *tables_argument)
    return dataclasses.replace(problem, mods=x.mods_of_tables, mods_of_tables=None, captures=captures)
