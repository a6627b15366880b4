"""The backward over lists of keys.

The queries of a chunk have their weights, and the gradients of their logits, in memory together. One kernel writes these, with dq.
Products of them with q and dout are the gradients of the listed keys:

- If entries name keys, a kernel computes a row for each entry. It adds the row to fp32 sums by atomics. For repeatable gradients it
  stores the row instead, and another kernel sums the rows of each key in the order of the queries.
- If entries name blocks of keys, one program computes the rows of a block for all queries that list it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Rows
from flexattn.kernels_triton.common.problem import Backward, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import tiles
from flexattn.kernels_triton.sparse.inversion import Chunks, Listed, listed_rows, row_offsets, unit_at, units_of_token
from flexattn.kernels_triton.sparse.lists import has_no_queries, write_zeros
from flexattn.kernels_triton.sparse.tiles import BLOCKS
from flexattn.kernels_triton.sparse.weights import LINE, Chunk, Weights


class TargetArguments(NamedTuple):
    """The arguments of a kernel that adds to the gradient of k or of v."""

    inputs: Inputs
    chunk: Chunk
    listed: Listed
    weights_ptr: WidePointer  # the chunk's ds for k, and p for v
    x: Rows  # q or dout
    rows_ptr: WidePointer  # fp32 [tokens of the chunk, key heads, entries, head dim]; None: atomics add to the sums
    sums_ptr: WidePointer  # fp32 [keys, key heads, head dim]


class Target(NamedTuple):
    """The constants of such a kernel. Columns and heads are powers of two."""

    IS_K: bool
    HEAD_DIM: int
    HEADS: int


@kernel
def _sparse_rows_kernel(args: TargetArguments, TARGET: tl.constexpr, META: tl.constexpr):
    # Computes the rows of BLOCK_N entries of one token and key head, BLOCK_M columns at a time.
    HEAD_DIM: tl.constexpr = TARGET.HEAD_DIM
    HEADS: tl.constexpr = TARGET.HEADS
    BLOCK_N: tl.constexpr = META.BLOCK_N
    COLUMNS: tl.constexpr = META.BLOCK_M
    inputs, chunk, listed = args.inputs, args.chunk, args.listed
    group = inputs.group_size
    heads_kv = inputs.num_heads // group
    tiles = tl.cdiv(listed.entries, BLOCK_N)
    tile = tl.program_id(0) % tiles
    h_kv = tl.program_id(0) // tiles % heads_kv
    local = tl.program_id(0) // tiles // heads_kv
    tokens = inputs.lengths_q.num_tokens
    token = chunk.first + local
    b = 0 if META.IS_RAGGED_Q else token // tokens
    x = row_pointer(args.x, b, h_kv * group, token if META.IS_RAGGED_Q else token % tokens, META)
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_entry = place < listed.entries
    keys = tl.load(units_of_token(local, h_kv, listed) + place, mask=is_entry, other=listed.units)
    is_seen = keys < listed.units
    if tl.max(is_seen.to(tl.int32), 0) == 0:
        return
    weights = args.weights_ptr + (tl.cast(local, tl.int64) * inputs.num_heads + h_kv * group) * (chunk.lines * LINE)
    if args.rows_ptr is not None:
        target = args.rows_ptr + ((tl.cast(local, tl.int64) * heads_kv + h_kv) * listed.entries + tile * BLOCK_N) * HEAD_DIM
        rows = tl.arange(0, BLOCK_N) * HEAD_DIM
    else:
        target = args.sums_ptr
        rows = (keys.to(tl.int64) * heads_kv + h_kv) * HEAD_DIM
    scale = inputs.scores.scale if TARGET.IS_K else 1.0
    h = tl.arange(0, HEADS)[:, None]
    is_head = h < group
    # places past the entries, or without one, have arbitrary weights in rows that are not stored
    w = tl.load(
        weights + (h.to(tl.int64) * (chunk.lines * LINE) + (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]),
        mask=is_head,
        other=0.0,
    )
    w = tl.trans(w)
    x_heads = h.to(tl.int64) * args.x.stride_h * META.ALIGN
    for column in tl.range(0, HEAD_DIM, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        is_column = columns < HEAD_DIM
        y = tl.load(x + (x_heads + columns), mask=is_head & is_column, other=0.0)
        added = tl.dot(w, y, input_precision=META.PRECISION) * scale
        if args.rows_ptr is not None:
            tl.store(target + (rows[:, None] + columns), added, mask=is_seen[:, None] & is_column)
        else:
            tl.atomic_add(target + (rows[:, None] + columns), added, mask=is_seen[:, None] & is_column, sem="relaxed")


@kernel
def _sparse_sums_kernel(args: TargetArguments, TARGET: tl.constexpr, META: tl.constexpr):
    # Adds the rows of one key and key head to its sums, in the order of the queries, for BLOCK_M columns.
    HEAD_DIM: tl.constexpr = TARGET.HEAD_DIM
    BLOCK_N: tl.constexpr = META.BLOCK_N
    COLUMNS: tl.constexpr = META.BLOCK_M
    inputs, listed = args.inputs, args.listed
    heads_kv = inputs.num_heads // inputs.group_size
    blocks: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    h_kv = tl.program_id(0) // blocks % heads_kv
    number = tl.program_id(0) // blocks // heads_kv
    unit = unit_at(number, h_kv, listed)
    begin, end = unit.begin, unit.end
    if begin == end:
        return
    is_column = (columns < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        entry = tl.load(unit.order_ptr + place, mask=place < end, other=0)
        row = (entry // listed.entries * heads_kv + h_kv) * listed.entries + entry % listed.entries
        mask = (place < end)[:, None] & is_column
        acc += tl.load(args.rows_ptr + (row[:, None] * HEAD_DIM + columns[None, :]), mask=mask, other=0.0)
    sums = args.sums_ptr + (tl.cast(number, tl.int64) * heads_kv + h_kv) * HEAD_DIM + columns
    before = tl.load(sums, mask=columns < HEAD_DIM, other=0.0)
    tl.store(sums, before + tl.sum(acc, 0), mask=columns < HEAD_DIM)


@kernel
def _sparse_blocks_kernel(args: TargetArguments, KV_BLOCK: tl.constexpr, TARGET: tl.constexpr, META: tl.constexpr):
    # Adds to the sums of a block of keys of one key head, for BLOCK_N columns. An iteration has BLOCK_M queries and heads.
    HEAD_DIM: tl.constexpr = TARGET.HEAD_DIM
    HEADS: tl.constexpr = TARGET.HEADS
    BLOCK_M: tl.constexpr = META.BLOCK_M
    COLUMNS: tl.constexpr = META.BLOCK_N
    inputs, chunk, listed = args.inputs, args.chunk, args.listed
    group = inputs.group_size
    heads_kv = inputs.num_heads // group
    parts: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    columns = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    h_kv = tl.program_id(0) // parts % heads_kv
    number = tl.program_id(0) // parts // heads_kv
    unit = unit_at(number, h_kv, listed)
    if unit.begin == unit.end:
        return
    is_column = (columns < HEAD_DIM)[None, :]
    keys = tl.arange(0, KV_BLOCK)
    places = tl.arange(0, BLOCK_M)
    acc = tl.zeros([KV_BLOCK, COLUMNS], tl.float32)
    steps = tl.cdiv(group, HEADS)
    for step in tl.range(0, tl.cdiv(unit.end - unit.begin, BLOCK_M // HEADS) * steps):
        place = unit.begin + step // steps * (BLOCK_M // HEADS) + places // HEADS
        rows = listed_rows(unit, place, step % steps * HEADS + places % HEADS, inputs, chunk, listed, META)
        is_row = rows.is_row[:, None]
        w_rows = (rows.local.to(tl.int64) * inputs.num_heads + rows.h) * (chunk.lines * LINE) + rows.entry * KV_BLOCK
        w = tl.load(args.weights_ptr + (w_rows[:, None] + keys[None, :]), mask=is_row, other=0.0)
        x_rows = row_offsets(args.x, rows, META)
        y = tl.load(args.x.ptr + (x_rows[:, None] + columns[None, :]), mask=is_row & is_column, other=0.0)
        acc = tl.dot(tl.trans(w), y, acc, input_precision=META.PRECISION)
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, KV_BLOCK)
    b = number // blocks
    start, length = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    first_key = start if META.IS_RAGGED_KV else b * inputs.lengths_kv.num_tokens
    j = number % blocks * KV_BLOCK + keys
    target = args.sums_ptr + ((first_key + j).to(tl.int64) * heads_kv + h_kv)[:, None] * HEAD_DIM + columns[None, :]
    mask = (j < length)[:, None] & is_column
    scale = inputs.scores.scale if TARGET.IS_K else 1.0
    tl.store(target, tl.load(target, mask=mask, other=0.0) + acc * scale, mask=mask)


def sparse_backward(call: Backward, tile: Tile) -> None:
    """Writes the gradients of a call whose queries have lists of keys."""
    x = call.problem
    if has_no_queries(x):  # no program writes
        write_zeros(call)
        return
    weights, products = Weights(call, tile), _Products(call)
    for chunk, listed in products.chunks:
        chunk = products.with_memory(chunk)
        weights.write(chunk, listed.tokens)
        products.add(chunk, listed)
    weights.finish()
    call.dk.copy_(products.sums_k)
    call.dv.copy_(products.sums_v)


class _Products:
    """The memory of a chunk's weights and rows, and the fp32 sums of the gradients of k and v."""

    def __init__(self, call: Backward):
        self.call, x = call, call.problem
        assert x.kv_indices is not None
        self.by_block = x.kv_block in BLOCKS
        entries = x.kv_indices.shape[-1] * x.kv_block
        self.lines = cdiv(entries, LINE.value)
        weights = x.num_heads * self.lines * LINE.value
        row_elements = (
            0 if self.by_block or not call.deterministic else x.num_heads_kv * entries * max(x.q.shape[-1], x.v.shape[-1])
        )
        bytes_of_query = 2 * weights * x.q.element_size() + 4 * row_elements
        self.chunks = Chunks(x, bytes_of_query, by_block=self.by_block, is_sorted=self.by_block or call.deterministic)
        make = functools.partial(torch.empty, device=x.device)
        self.rows = make(self.chunks.size * row_elements, dtype=torch.float32) if row_elements else None
        self.p, self.ds = (make(self.chunks.size * weights + tiles.MOST_ENTRIES, dtype=x.q.dtype) for _ in range(2))
        self.sums_k, self.sums_v = (torch.zeros(t.shape, dtype=torch.float32, device=x.device) for t in (x.k, x.v))

    def with_memory(self, chunk: Chunk) -> Chunk:
        return chunk._replace(p_ptr=self.p, ds_ptr=self.ds, lines=self.lines)

    def add(self, chunk: Chunk, listed: Listed) -> None:
        """Adds the products of the chunk's weights with q and dout to the sums."""
        call, x = self.call, self.call.problem
        for weights, other, sums in ((chunk.ds_ptr, x.q, self.sums_k), (chunk.p_ptr, call.dout, self.sums_v)):
            dim = other.shape[-1]
            tile = tiles.blocks_tile(x) if self.by_block else tiles.rows_tile(x)
            meta = x.meta(tile, (call.dout,))
            heads = tiles.padded_heads(x)
            target = Target(IS_K=sums is self.sums_k, HEAD_DIM=dim, HEADS=min(heads, tile.block_m) if self.by_block else heads)
            args = TargetArguments(
                inputs=x.inputs(meta),
                chunk=chunk,
                listed=listed,
                weights_ptr=weights,
                x=rows(other, meta),
                rows_ptr=self.rows,
                sums_ptr=sums,
            )
            if self.by_block:
                programs = cdiv(dim, tile.block_n) * x.num_heads_kv * listed.units
                launch(_sparse_blocks_kernel, programs, x.device, tile, (args, x.kv_block, target, meta))
                continue
            programs = cdiv(listed.entries, tile.block_n) * x.num_heads_kv * listed.tokens
            launch(_sparse_rows_kernel, programs, x.device, tile, (args, target, meta))
            if self.rows is not None:
                tile = tiles.sums_tile(x)
                programs = cdiv(dim, tile.block_m) * x.num_heads_kv * listed.units
                launch(_sparse_sums_kernel, programs, x.device, tile, (args, target, x.meta(tile, (call.dout,))))
