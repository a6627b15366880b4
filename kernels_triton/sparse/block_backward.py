"""The backward over lists of blocks of keys, block by block.

A program loads a block once, and sums the gradients of its keys and values over queries that list it. It stores each query's part
of dq, and a second kernel adds the parts. All sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import visible_keys
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Backward, rows
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tiles import cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import block_forward, tiles
from flexattn.kernels_triton.sparse.inversion import Chunks, listed_rows
from flexattn.kernels_triton.sparse.lists import has_no_queries, query_of_token, store_heads, write_zeros
from flexattn.kernels_triton.sparse.weights import Weights

_PROGRAMS = 1024  # programs from which on the queries of a block are not shared by several


class BackwardArguments(NamedTuple):
    pairs: block_forward.PairArguments
    dout: Rows
    lse_ptr: Pointer
    delta_ptr: Pointer  # fp32 with lse's indices: sum(out * dout) - dlse
    dk_ptr: WidePointer  # fp32 [splits, batch, keys, key heads, head dim]: sums of each program of a block
    dv_ptr: WidePointer
    dq: Rows


@triton.jit
def _add_rows(sums_ptr, rows, is_row, tile, HEAD_DIM: tl.constexpr):
    columns = tl.arange(0, tile.shape[1])[None, :]
    mask = is_row & (columns < HEAD_DIM)
    places = sums_ptr + (rows * HEAD_DIM + columns)
    tl.store(places, tl.load(places, mask=mask, other=0.0) + tile, mask=mask)


@kernel
def _sparse_block_bwd_kernel(args: BackwardArguments, KV_BLOCK: tl.constexpr, HEADS: tl.constexpr, META: tl.constexpr):
    # Adds to the gradients of a block, and stores the parts of dq. Tiles are [keys, queries and heads].
    BLOCK_M: tl.constexpr = META.BLOCK_M
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    QK0: tl.constexpr = META.QK0
    V0: tl.constexpr = META.V0
    pairs = args.pairs
    inputs = pairs.inputs
    block = block_forward.block_at(tl.program_id(0), pairs, KV_BLOCK, QUERIES, META)
    unit, sequence = block.unit, block.sequence
    if unit.begin >= unit.end:
        return
    k = block_forward.load_block(inputs.k, block, KV_BLOCK, QK0, META.HEAD_DIM_QK, META)
    v = block_forward.load_block(inputs.v, block, KV_BLOCK, V0, META.HEAD_DIM_V, META)
    k_transposed = tl.trans(k)
    j = (block.first_key + tl.arange(0, KV_BLOCK))[:, None]
    head = head_of(inputs.scores, block.b, unit.h_kv, sequence.len_q, sequence.len_kv, block.shift, None, META)
    row = tl.arange(0, BLOCK_M)
    dk = tl.zeros([KV_BLOCK, QK0], tl.float32)
    dv = tl.zeros([KV_BLOCK, V0], tl.float32)
    scale = inputs.scores.scale
    for first in tl.range(unit.begin, unit.end, QUERIES):
        listed = listed_rows(unit, first + row // HEADS, row % HEADS, inputs, pairs.chunk, pairs.listed, META)
        q = block_forward.load_rows(inputs.q, listed, QK0, META.HEAD_DIM_QK, META)
        dout = block_forward.load_rows(args.dout, listed, V0, META.HEAD_DIM_V, META)
        h = listed.h if META.IS_RAGGED_Q else listed.b * inputs.num_heads + listed.h
        statistic = h.to(tl.int64) * inputs.lengths_q.num_tokens + listed.row
        lse = tl.load(args.lse_ptr + statistic, mask=listed.is_row, other=float("inf"))
        lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
        delta = tl.load(args.delta_ptr + statistic, mask=listed.is_row, other=0.0)
        i = (listed.row - sequence.start_q)[None, :]
        s, factor, cap_tanh, score = logits(tl.dot(k, tl.trans(q)), i, j, scale, head, None, META)
        p = tl.exp2(tl.fma(s, factor, -lse_log2[None, :]))
        p = tl.where(visible_keys(i, j, sequence.len_kv, block.shift, inputs.band, META), p, 0.0)
        dp = tl.dot(v, tl.trans(dout))
        ds = through_mods(p * (dp - delta[None, :]), cap_tanh, score, i, j, head, None, META).to(q.dtype)
        dv = tl.dot(p.to(q.dtype), dout, dv)
        dk = tl.dot(ds, q, dk)
        dq = tl.trans(tl.dot(k_transposed, ds)) * scale
        block_forward.store_part(pairs, block_forward.part_rows(listed, unit, pairs), listed, dq, META.HEAD_DIM_QK)
    lengths = inputs.lengths_kv
    all_keys = lengths.num_tokens * (1 if META.IS_RAGGED_KV else lengths.batch)
    first_key = sequence.start_kv if META.IS_RAGGED_KV else block.b * lengths.num_tokens
    key = tl.cast(block.split, tl.int64) * all_keys + first_key + j
    target = key * (inputs.num_heads // inputs.group_size) + unit.h_kv
    _add_rows(args.dk_ptr, target, j < sequence.len_kv, dk * scale, META.HEAD_DIM_QK)
    _add_rows(args.dv_ptr, target, j < sequence.len_kv, dv, META.HEAD_DIM_V)


@kernel
def _sparse_block_dq_kernel(args: BackwardArguments, META: tl.constexpr):
    # Adds the parts of dq of a query's heads, BLOCK_N entries at a time.
    HEADS: tl.constexpr = META.BLOCK_M
    ENTRIES: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    pairs = args.pairs
    inputs = pairs.inputs
    heads_kv = inputs.num_heads // inputs.group_size
    local, h_kv = tl.program_id(0) // heads_kv, tl.program_id(0) % heads_kv
    query, row, is_query = query_of_token(pairs.chunk.first + local, h_kv, pairs.chunk.slots_ptr, inputs, pairs.lists, 1, META)
    dq = tl.zeros([HEADS, QK0], tl.float32)
    for first in tl.range(0, tl.where(is_query, pairs.listed.entries, 0), ENTRIES):
        _, _, tile = block_forward.load_part(pairs, local, h_kv, first, QK0, META.HEAD_DIM_QK, HEADS, META)
        dq += tl.sum(tl.reshape(tile, [ENTRIES, HEADS, QK0]), 0)
    store_heads(args.dq, Parts(first=dq, second=dq), row, query, QK0, 0, META.HEAD_DIM_QK, META)


def block_backward(call: Backward, tile: Tile) -> None:
    """Writes the gradients of a call that `conditions.block_unsupported` does not reject."""
    x = call.problem
    if has_no_queries(x):  # no program writes
        write_zeros(call)
        return
    assert x.kv_indices is not None
    dim = x.q.shape[-1]
    parts_of_query = x.num_heads * x.kv_indices.shape[-1] * dim
    chunks = Chunks(x, parts_of_query * x.q.element_size(), by_block=True, is_sorted=True)
    parts = torch.empty(chunks.size * parts_of_query, dtype=x.q.dtype, device=x.device)
    splits = max(1, min(4, cdiv(_PROGRAMS, max(1, chunks.units * x.num_heads_kv))))
    sums_k, sums_v = (torch.zeros((splits, *t.shape), dtype=torch.float32, device=x.device) for t in (x.k, x.v))
    weights = Weights(call, tile._replace(apart=True))
    weights.write_delta(chunks.whole(), chunks.num_tokens)
    dq_tile = tiles.pairs_tile(x)
    for chunk, listed in chunks:
        block_programs = listed.units * x.num_heads_kv * splits
        constants = (x.kv_block, slots_of_heads(x.group_size))
        for kernel_, own, programs, numbers in (
            (_sparse_block_bwd_kernel, tile, block_programs, constants),
            (_sparse_block_dq_kernel, dq_tile, listed.tokens * x.num_heads_kv, ()),
        ):
            meta = block_forward.block_meta(x, own, (call.dout, call.dq))
            args = BackwardArguments(
                pairs=block_forward.pair_arguments(x, meta, chunk, listed, splits, parts),
                dout=rows(call.dout, meta),
                lse_ptr=call.lse,
                delta_ptr=weights.delta,
                dk_ptr=sums_k,
                dv_ptr=sums_v,
                dq=rows(call.dq, meta),
            )
            launch(kernel_, programs, x.device, own, (args, *numbers, meta))
    weights.finish()
    for gradient, sums in ((call.dk, sums_k), (call.dv, sums_v)):
        gradient.copy_(sums[0] if splits == 1 else sums.sum(0))
