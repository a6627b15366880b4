"""The forward over lists of blocks of keys, block by block.

If few query heads share a key head, a query's own products with its blocks leave most of a tile empty, and each query loads its
blocks again. So a program loads a block once, for many queries that list it, and stores their partial results. A second kernel
adds the partial results of each query, like those of split keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import visible_keys
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Meta, Problem, rows
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sequences import Sequence, sequence_of
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.split_ranges import share_of_split
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import inversion, tiles
from flexattn.kernels_triton.sparse import lists as sparse_lists
from flexattn.kernels_triton.sparse.weights import Chunk

_SHARE = 128  # queries of a program, on average


class PairArguments(NamedTuple):
    """The partial results of pairs of a query and a block that it lists."""

    inputs: Inputs
    lists: sparse_lists.KeyLists
    chunk: Chunk
    listed: inversion.Listed
    splits: int  # programs that share the queries of a block
    parts_ptr: WidePointer  # [tokens of the chunk, key heads, entries, group, columns], in q's dtype


class ForwardArguments(NamedTuple):
    pairs: PairArguments
    part_lse_ptr: WidePointer  # fp32 [tokens of the chunk, key heads, entries, group], in units of log2
    out: Rows
    lse_ptr: Pointer


class Block(NamedTuple):
    """A program's share of the queries of a block of keys, inside a kernel."""

    unit: inversion.Unit
    split: tl.tensor
    b: tl.tensor
    first_key: tl.tensor  # position in its sequence
    sequence: Sequence
    shift: tl.tensor


@triton.jit
def block_at(pid, pairs: PairArguments, KV_BLOCK: tl.constexpr, QUERIES: tl.constexpr, META: tl.constexpr):
    # Returns block number `pid`, with the program's share of its entries, in multiples of QUERIES.
    inputs = pairs.inputs
    heads_kv = inputs.num_heads // inputs.group_size
    split = pid % pairs.splits
    number = pid // pairs.splits // heads_kv
    unit = inversion.unit_at(number, pid // pairs.splits % heads_kv, pairs.listed)
    first, last = share_of_split(tl.cdiv(unit.end - unit.begin, QUERIES), split, pairs.splits)
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, KV_BLOCK)
    b = number // blocks
    sequence = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    end = tl.minimum(unit.begin + last * QUERIES, unit.end)
    return Block(
        unit=inversion.Unit(order_ptr=unit.order_ptr, begin=unit.begin + first * QUERIES, end=end, h_kv=unit.h_kv),
        split=split,
        b=b,
        first_key=number % blocks * KV_BLOCK,
        sequence=sequence,
        shift=(sequence.len_kv - sequence.len_q) * inputs.band.bottom_right,
    )


@triton.jit
def load_block(x, block: Block, KV_BLOCK: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr):
    # Returns the rows of the block, 0 past the end of its sequence.
    sequence = block.sequence
    pointer = row_pointer(x, block.b, block.unit.h_kv, sequence.start_kv + block.first_key, META)
    offsets = tl.arange(0, KV_BLOCK).to(tl.int64) * x.stride_s * META.ALIGN
    return load_tile(pointer, offsets, block.first_key, sequence.len_kv, 0, WIDTH, HEAD_DIM, True)


@triton.jit
def load_rows(x, listed: inversion.ListedRows, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    mask = listed.is_row[:, None]
    if WIDTH > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)
    return tl.load(x.ptr + (inversion.row_offsets(x, listed, META)[:, None] + columns), mask=mask, other=0.0)


@triton.jit
def part_rows(listed: inversion.ListedRows, unit: inversion.Unit, pairs: PairArguments):
    # Returns the indices of rows in the partial results.
    group = pairs.inputs.group_size
    row = listed.local * (pairs.inputs.num_heads // group) + unit.h_kv
    return (row * pairs.listed.entries + listed.entry) * group + listed.h % group


@triton.jit
def store_part(pairs: PairArguments, index, listed: inversion.ListedRows, tile, HEAD_DIM: tl.constexpr):
    columns = tl.arange(0, tile.shape[1])[None, :]
    mask = listed.is_row[:, None]
    if tile.shape[1] > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)
    tl.store(pairs.parts_ptr + (index[:, None] * HEAD_DIM + columns), tile.to(pairs.parts_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_part(
    pairs: PairArguments, local, h_kv, first, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, META: tl.constexpr
):
    # Returns (indices, whether there is a result, results) of BLOCK_N entries of a query. Rows are entries, then HEADS heads.
    group, entries = pairs.inputs.group_size, pairs.listed.entries
    row = tl.arange(0, META.BLOCK_N * HEADS)
    entry, in_group = first + row // HEADS, row % HEADS
    is_row = (entry < entries) & (in_group < group)
    unit = tl.load(inversion.units_of_token(local, h_kv, pairs.listed) + entry, mask=is_row, other=pairs.listed.units)
    is_row = is_row & (unit < pairs.listed.units)
    index = ((tl.cast(local, tl.int64) * (pairs.inputs.num_heads // group) + h_kv) * entries + entry) * group + in_group
    columns = tl.arange(0, WIDTH)[None, :]
    tile = tl.load(
        pairs.parts_ptr + (index[:, None] * HEAD_DIM + columns), mask=is_row[:, None] & (columns < HEAD_DIM), other=0.0
    ).to(tl.float32)
    return index, is_row, tile


@kernel
def _sparse_block_fwd_kernel(args: ForwardArguments, KV_BLOCK: tl.constexpr, HEADS: tl.constexpr, META: tl.constexpr):
    # Computes the partial results of a block's queries. An iteration has BLOCK_M queries and heads.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    pairs = args.pairs
    inputs = pairs.inputs
    block = block_at(tl.program_id(0), pairs, KV_BLOCK, QUERIES, META)
    unit, sequence = block.unit, block.sequence
    if unit.begin >= unit.end:
        return
    k = tl.trans(load_block(inputs.k, block, KV_BLOCK, META.QK0, META.HEAD_DIM_QK, META))
    v = load_block(inputs.v, block, KV_BLOCK, META.V0, META.HEAD_DIM_V, META)
    j = (block.first_key + tl.arange(0, KV_BLOCK))[None, :]
    head = head_of(inputs.scores, block.b, unit.h_kv, sequence.len_q, sequence.len_kv, block.shift, None, META)
    row = tl.arange(0, BLOCK_M)
    for first in tl.range(unit.begin, unit.end, QUERIES):
        listed = inversion.listed_rows(unit, first + row // HEADS, row % HEADS, inputs, pairs.chunk, pairs.listed, META)
        q = load_rows(inputs.q, listed, META.QK0, META.HEAD_DIM_QK, META)
        qk = tl.dot(q, k)
        i = (listed.row - sequence.start_q)[:, None]
        s, factor, _, _ = logits(qk, i, j, inputs.scores.scale, head, None, META)
        s = tl.where(visible_keys(i, j, sequence.len_kv, block.shift, inputs.band, META), s, float("-inf"))
        row_max = tl.max(s, 1) * factor
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        p = tl.exp2(tl.fma(s, factor, -row_max[:, None]))
        row_sum = tl.sum(p, 1)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.maximum(row_sum, 1.0e-37)))
        acc = tl.dot(p.to(v.dtype), v)
        index = part_rows(listed, unit, pairs)
        store_part(pairs, index, listed, acc * (1.0 / tl.maximum(row_sum, 1.0e-37))[:, None], META.HEAD_DIM_V)
        tl.store(args.part_lse_ptr + index, lse, mask=listed.is_row)


@kernel
def _sparse_block_out_kernel(args: ForwardArguments, META: tl.constexpr):
    # Adds the partial results of a query's heads, BLOCK_N entries at a time.
    HEADS: tl.constexpr = META.BLOCK_M
    ENTRIES: tl.constexpr = META.BLOCK_N
    V0: tl.constexpr = META.V0
    pairs = args.pairs
    inputs = pairs.inputs
    heads_kv = inputs.num_heads // inputs.group_size
    local, h_kv = tl.program_id(0) // heads_kv, tl.program_id(0) % heads_kv
    query, row, is_query = sparse_lists.query_of_token(
        pairs.chunk.first + local, h_kv, pairs.chunk.slots_ptr, inputs, pairs.lists, 1, META
    )
    is_head = tl.arange(0, HEADS) < query.num_heads
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, V0], tl.float32)
    for first in tl.range(0, tl.where(is_query, pairs.listed.entries, 0), ENTRIES):
        index, is_part, tile = load_part(pairs, local, h_kv, first, V0, META.HEAD_DIM_V, HEADS, META)
        lse = tl.load(args.part_lse_ptr + index, mask=is_part, other=float("-inf"))
        lse = tl.reshape(lse, [ENTRIES, HEADS])
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - scaled_max)
        weights = tl.exp2(lse - scaled_max[None, :])
        row_sum = row_sum * correction + tl.sum(weights, 0)
        row_max = new_max
        weighted = tile * tl.reshape(weights, [ENTRIES * HEADS])[:, None]
        acc = acc * correction[:, None] + tl.sum(tl.reshape(weighted, [ENTRIES, HEADS, V0]), 0)
    rescale = tl.full([HEADS], 1.0, tl.float32)
    if META.HAS_SINK:
        sink = tl.zeros([HEADS], tl.float32) + load_sink(
            inputs.softmax_offset_ptr, tl.where(is_head, sparse_lists.heads_of(query, META), 0), LOG2E, META
        )
        sink = tl.where(is_query, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - scaled_max)
        row_sum = row_sum * rescale + tl.exp2(sink - scaled_max)
        row_max = new_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    out = acc * (rescale / row_sum)[:, None]
    sparse_lists.store_heads(args.out, Parts(first=out, second=out), row, query, V0, 0, META.HEAD_DIM_V, META)
    lse_rows = sparse_lists.rows_of_heads(query, inputs, META) + (row - query.i)
    tl.store(args.lse_ptr + lse_rows, (row_max + tl.log2(row_sum)) * LN2, mask=is_head)


def block_meta(problem: Problem, tile: Tile, others: tuple[Tensor, ...]) -> Meta:
    """Returns the constants of a kernel with this tile. A head dim is in one part."""
    x = problem
    qk, v = (max(16, slots_of_heads(t.shape[-1])) for t in (x.q, x.v))
    return x.meta(tile, others)._replace(QK0=qk, QK1=0, V0=v, V1=0)


def pair_arguments(
    problem: Problem, meta: Meta, chunk: Chunk, listed: inversion.Listed, splits: int, parts: Tensor
) -> PairArguments:
    x = problem
    return PairArguments(
        inputs=x.inputs(meta), lists=sparse_lists.key_lists(x), chunk=chunk, listed=listed, splits=splits, parts_ptr=parts
    )


def block_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile) -> None:
    """Writes out and lse of a call that `conditions.block_unsupported` does not reject."""
    x = problem
    if sparse_lists.has_no_queries(x):  # no program writes
        out.zero_()
        lse.fill_(float("-inf"))
        return
    assert x.kv_indices is not None
    pairs = x.num_heads * x.kv_indices.shape[-1]
    dim = x.v.shape[-1]
    chunks = inversion.Chunks(x, pairs * (dim * x.q.element_size() + 4), by_block=True, is_sorted=True)
    parts = torch.empty(chunks.size * pairs * dim, dtype=x.q.dtype, device=x.device)
    part_lse = torch.empty(chunks.size * pairs, dtype=torch.float32, device=x.device)
    out_tile = tiles.pairs_tile(x)

    def arguments(tile: Tile, chunk: Chunk, listed: inversion.Listed, splits: int) -> tuple[ForwardArguments, Any]:
        meta = block_meta(x, tile, (out,))
        return ForwardArguments(
            pairs=pair_arguments(x, meta, chunk, listed, splits, parts), part_lse_ptr=part_lse, out=rows(out, meta), lse_ptr=lse
        ), meta

    for chunk, listed in chunks:
        splits = max(1, cdiv(listed.tokens * listed.entries, max(1, listed.units) * _SHARE))
        args, meta = arguments(tile, chunk, listed, splits)
        programs = listed.units * x.num_heads_kv * splits
        launch(_sparse_block_fwd_kernel, programs, x.device, tile, (args, x.kv_block, slots_of_heads(x.group_size), meta))
        args, meta = arguments(out_tile, chunk, listed, 1)
        launch(_sparse_block_out_kernel, listed.tokens * x.num_heads_kv, x.device, out_tile, (args, meta))
