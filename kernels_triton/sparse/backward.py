"""The backward over lists of keys.

The queries of a chunk have their weights, and the gradients of their logits, in memory together. One kernel writes these, with dq.
Products of them with q and dout are the gradients of the listed keys:

- If entries name keys, a kernel computes a row for each entry. It adds the row to fp32 sums by atomics. For repeatable gradients it
  stores the row instead, and another kernel sums the rows of each key in the order of the queries.
- If entries name blocks of keys, one program computes the rows of a block for all queries that list it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Lengths, Parts, Pointer, Rows, Saved
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Backward, rows
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import tiles
from flexattn.kernels_triton.sparse.lists import (
    KeyLists,
    head_offsets,
    heads_of,
    key_lists,
    load_entries_at,
    load_heads,
    load_keys,
    load_values,
    query_of_token,
    rows_of_heads,
    store_heads,
)

MOST_BYTES = 2**30
"""Memory for the weights and rows of a chunk of queries. A chunk has at least one query."""

LINE = tl.constexpr(16)  # the weights of a query and head begin at multiples of this number of elements


class Chunk(NamedTuple):
    """Queries whose weights are in memory together."""

    first: int | tl.tensor  # the first token
    slots_ptr: Pointer  # int32 [tokens]: batch index * longest_q + position of each query, -1 for padding; None: tokens are dense
    p_ptr: WidePointer  # weights [tokens of the chunk, heads, lines * LINE], in q's dtype
    ds_ptr: WidePointer  # likewise gradients of the logits
    lines: int


class DqArguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    saved: Saved
    dout: Rows
    dq: Rows
    chunk: Chunk
    dsink_ptr: Pointer  # [h, tokens], or None: the parts of the gradient of softmax_offset


class _Loss(NamedTuple):
    """The rows of a query's heads: dout, and the statistics of their softmax."""

    dout: Parts
    lse_log2: tl.tensor
    delta: tl.tensor


@triton.jit
def _delta_of(args: DqArguments, query, META: tl.constexpr):
    # Returns sum(out * dout). Few columns at a time are in registers.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_V
    WIDTH: tl.constexpr = min(META.V0, 64)
    out = row_pointer(args.saved.out, query.b, query.h, query.start_q + query.i, META)
    dout = row_pointer(args.dout, query.b, query.h, query.start_q + query.i, META)
    out_heads, dout_heads = head_offsets(args.saved.out, META), head_offsets(args.dout, META)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, WIDTH):
        x = load_tile(out, out_heads, 0, query.num_heads, column, WIDTH, HEAD_DIM, True)
        y = load_tile(dout, dout_heads, 0, query.num_heads, column, WIDTH, HEAD_DIM, True)
        delta += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    return delta


@triton.jit
def _load_loss(args: DqArguments, query, META: tl.constexpr):
    dout = load_heads(args.dout, query, META.V0, META.V1, META.HEAD_DIM_V, META)
    delta = _delta_of(args, query, META)
    row = rows_of_heads(query, args.inputs, META)
    is_head = tl.arange(0, META.BLOCK_M) < query.num_heads
    if args.saved.dlse_ptr is not None:
        delta -= tl.load(args.saved.dlse_ptr + row, mask=is_head, other=0.0)
    lse = tl.load(args.saved.lse_ptr + row, mask=is_head, other=float("inf"))
    return _Loss(dout=dout, lse_log2=tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E, delta=delta)


@kernel
def _sparse_bwd_dq_kernel(args: DqArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    inputs = args.inputs
    chunk = args.chunk
    parts = tl.cdiv(inputs.group_size, BLOCK_M) * (inputs.num_heads // inputs.group_size)
    part = tl.program_id(0) % parts
    local = tl.program_id(0) // parts
    token = chunk.first + local
    query, row, is_query = query_of_token(token, part, chunk.slots_ptr, inputs, args.lists, KV_BLOCK, META)
    is_head = tl.arange(0, BLOCK_M) < query.num_heads
    dsink = args.dsink_ptr
    if dsink is not None:
        tokens = inputs.lengths_q.num_tokens * (1 if META.IS_RAGGED_Q else inputs.lengths_q.batch)
        dsink += heads_of(query, META).to(tl.int64) * tokens + token
    dq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    dq1 = dq0
    if QK1 > 0:
        dq1 = tl.zeros([BLOCK_M, QK1], tl.float32)
    if META.HAS_LENGTHS:
        if not is_query:
            store_heads(args.dq, Parts(first=dq0, second=dq1), row, query, QK0, QK1, META.HEAD_DIM_QK, META)
            if dsink is not None:
                tl.store(dsink, tl.zeros([BLOCK_M], tl.float32), mask=is_head)
            return
    q = load_heads(inputs.q, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    loss = _load_loss(args, query, META)
    k_base = row_pointer(inputs.k, query.b, query.h_kv, query.start_kv, META)
    v_base = row_pointer(inputs.v, query.b, query.h_kv, query.start_kv, META)
    head = head_of(inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    p_sink = tl.zeros([BLOCK_M], tl.float32)
    if META.HAS_SINK:
        sink = load_sink(inputs.softmax_offset_ptr, tl.where(is_head, heads_of(query, META), 0), LOG2E, META)
        p_sink = tl.exp2(sink - loss.lse_log2)
    p_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if META.NORMALIZES:  # the probabilities from an lse in fp32 do not sum to 1 exactly enough for fp32 results
        row_sum = p_sink
        for first in tl.range(0, query.num_entries, BLOCK_N):
            keys = load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
            s, factor, _, _ = logits(keys.qk, query.i, keys.j[None, :], inputs.scores.scale, head, None, META)
            p = tl.exp2(tl.fma(s, factor, -loss.lse_log2[:, None]))
            row_sum += tl.sum(tl.where(keys.is_seen[None, :], p, 0.0), 1)
        p_scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if dsink is not None:
        tl.store(dsink, -p_sink * p_scale * loss.delta, mask=is_head)
    stride = chunk.lines * LINE
    weights = (tl.cast(local, tl.int64) * inputs.num_heads + heads_of(query, META)) * stride
    weights = weights[:, None] + tl.arange(0, BLOCK_N)[None, :]
    for first in tl.range(0, query.num_entries, BLOCK_N):
        keys = load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
        v0, v1 = load_values(query, keys, v_base, inputs, META)
        dp = tl.dot(loss.dout.first, tl.trans(v0), input_precision=META.PRECISION)
        if META.V1 > 0:
            dp = tl.dot(loss.dout.second, tl.trans(v1), dp, input_precision=META.PRECISION)
        s, factor, cap_tanh, score = logits(keys.qk, query.i, keys.j[None, :], inputs.scores.scale, head, None, META)
        p = tl.exp2(tl.fma(s, factor, -loss.lse_log2[:, None])) * p_scale[:, None]
        p = tl.where(keys.is_seen[None, :], p, 0.0)
        ds = through_mods(p * (dp - loss.delta[:, None]), cap_tanh, score, query.i, keys.j, head, None, META)
        p = p.to(q.first.dtype)
        ds = ds.to(q.first.dtype)
        dq0 = tl.dot(ds, keys.k0, dq0, input_precision=META.PRECISION)
        if META.QK1 > 0:
            dq1 = tl.dot(ds, keys.k1, dq1, input_precision=META.PRECISION)
        is_weight = is_head[:, None] & (first + tl.arange(0, BLOCK_N) < query.num_entries)[None, :]
        tl.store(chunk.p_ptr + first + weights, p, mask=is_weight)
        tl.store(chunk.ds_ptr + first + weights, ds, mask=is_weight)
    scale = inputs.scores.scale
    store_heads(args.dq, Parts(first=dq0 * scale, second=dq1 * scale), query.i, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)


class SlotArguments(NamedTuple):
    lengths: Lengths
    slots_ptr: Pointer


@kernel
def _sparse_slots_kernel(args: SlotArguments, META: tl.constexpr):
    # Writes the slot of each packed query.
    slot = tl.program_id(0)
    longest = args.lengths.max_seqlen
    start, length = load_sequence(args.lengths, slot // longest, META.IS_RAGGED_Q)
    if slot % longest < length:
        tl.store(args.slots_ptr + start + slot % longest, slot)


class Listed(NamedTuple):
    """The entries of a chunk by unit, which is a key or a block of keys, in the order of the queries."""

    keys_ptr: Pointer  # int32 [list heads, tokens * entries]: the unit of each entry, or the number of units if it is not seen
    order_ptr: Pointer  # int64, likewise: the entries by unit
    starts_ptr: Pointer  # int32 [list heads, units + 1]: the first of each unit
    tokens: int  # of the chunk
    entries: int  # of a query
    units: int  # of all sequences


class EntryArguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    chunk: Chunk
    listed: Listed


@kernel
def _sparse_entries_kernel(args: EntryArguments, KV_BLOCK: tl.constexpr, BY_BLOCK: tl.constexpr, META: tl.constexpr):
    # Writes the key or block of each entry of a query. BLOCK_M is at least the heads of a group.
    inputs, lists, listed = args.inputs, args.lists, args.listed
    head = tl.program_id(0) % lists.heads
    local = tl.program_id(0) // lists.heads
    query, _, is_query = query_of_token(args.chunk.first + local, head, args.chunk.slots_ptr, inputs, lists, KV_BLOCK, META)
    target = listed.keys_ptr + (tl.cast(head, tl.int64) * listed.tokens + local) * listed.entries
    for first in range(0, listed.entries, META.BLOCK_N):
        place = first + tl.arange(0, META.BLOCK_N)
        if BY_BLOCK:
            blocks = tl.cdiv(query.len_kv, KV_BLOCK)
            is_seen = is_query & (place < query.num_entries // KV_BLOCK)
            index = tl.load(lists.indices_ptr + query.list_row * lists.length + place, mask=is_seen, other=-1)
            is_seen = is_seen & (index >= 0) & (index < blocks)
            unit = query.b * tl.cdiv(inputs.lengths_kv.max_seqlen, KV_BLOCK) + index
        else:
            j, is_seen = load_entries_at(place, lists, query, inputs, KV_BLOCK, META)
            is_seen = is_seen & is_query
            unit = (query.start_kv if META.IS_RAGGED_KV else query.b * inputs.lengths_kv.num_tokens) + j
        tl.store(target + place, tl.where(is_seen, unit, listed.units), mask=place < listed.entries)


class TargetArguments(NamedTuple):
    """The arguments of a kernel that adds to the gradient of k or of v."""

    inputs: Inputs
    chunk: Chunk
    listed: Listed
    list_heads: int
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
    list_head = tl.where(args.list_heads > 1, h_kv, 0)
    keys = tl.load(
        listed.keys_ptr + (tl.cast(list_head, tl.int64) * listed.tokens + local) * listed.entries + place,
        mask=is_entry,
        other=listed.units,
    )
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
    unit = tl.program_id(0) // blocks // heads_kv
    list_head = tl.where(args.list_heads > 1, h_kv, 0)
    starts = listed.starts_ptr + tl.cast(list_head, tl.int64) * (listed.units + 1) + unit
    begin, end = tl.load(starts), tl.load(starts + 1)
    if begin == end:
        return
    order = listed.order_ptr + tl.cast(list_head, tl.int64) * listed.tokens * listed.entries
    is_column = (columns < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        entry = tl.load(order + place, mask=place < end, other=0)
        row = (entry // listed.entries * heads_kv + h_kv) * listed.entries + entry % listed.entries
        mask = (place < end)[:, None] & is_column
        acc += tl.load(args.rows_ptr + (row[:, None] * HEAD_DIM + columns[None, :]), mask=mask, other=0.0)
    sums = args.sums_ptr + (tl.cast(unit, tl.int64) * heads_kv + h_kv) * HEAD_DIM + columns
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
    unit = tl.program_id(0) // parts // heads_kv
    list_head = tl.where(args.list_heads > 1, h_kv, 0)
    starts = listed.starts_ptr + tl.cast(list_head, tl.int64) * (listed.units + 1) + unit
    begin, end = tl.load(starts), tl.load(starts + 1)
    if begin == end:
        return
    order = listed.order_ptr + tl.cast(list_head, tl.int64) * listed.tokens * listed.entries
    tokens = inputs.lengths_q.num_tokens
    is_column = (columns < HEAD_DIM)[None, :]
    keys = tl.arange(0, KV_BLOCK)
    rows = tl.arange(0, BLOCK_M)
    acc = tl.zeros([KV_BLOCK, COLUMNS], tl.float32)
    steps = tl.cdiv(group, HEADS)
    for step in tl.range(0, tl.cdiv(end - begin, BLOCK_M // HEADS) * steps):
        place = begin + step // steps * (BLOCK_M // HEADS) + rows // HEADS
        in_group = step % steps * HEADS + rows % HEADS
        is_row = (place < end) & (in_group < group)
        entry = tl.load(order + place, mask=is_row, other=0)
        local = entry // listed.entries
        h = h_kv * group + in_group
        w_rows = (local * inputs.num_heads + h) * (chunk.lines * LINE) + entry % listed.entries * KV_BLOCK
        w = tl.load(args.weights_ptr + (w_rows[:, None] + keys[None, :]), mask=is_row[:, None], other=0.0)
        token = chunk.first + local
        b = token * 0 if META.IS_RAGGED_Q else token // tokens
        row = token if META.IS_RAGGED_Q else token % tokens
        x_rows = (b * args.x.stride_b + row * args.x.stride_s + h.to(tl.int64) * args.x.stride_h) * META.ALIGN
        y = tl.load(args.x.ptr + (x_rows[:, None] + columns[None, :]), mask=is_row[:, None] & is_column, other=0.0)
        acc = tl.dot(tl.trans(w), y, acc, input_precision=META.PRECISION)
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, KV_BLOCK)
    b = unit // blocks
    start, length = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    first_key = start if META.IS_RAGGED_KV else b * inputs.lengths_kv.num_tokens
    j = unit % blocks * KV_BLOCK + keys
    target = args.sums_ptr + ((first_key + j).to(tl.int64) * heads_kv + h_kv)[:, None] * HEAD_DIM + columns[None, :]
    mask = (j < length)[:, None] & is_column
    scale = inputs.scores.scale if TARGET.IS_K else 1.0
    tl.store(target, tl.load(target, mask=mask, other=0.0) + acc * scale, mask=mask)


def sparse_backward(call: Backward, tile: Tile) -> None:
    """Writes the gradients of a call whose queries have lists of keys."""
    x, dsoftmax_offset = call.problem, call.dsoftmax_offset
    if x.batch == 0:  # no program writes
        for gradient in (call.dq, call.dk, call.dv, dsoftmax_offset):
            if gradient is not None:
                gradient.zero_()
        return
    chunks = _Chunks(call)
    meta = x.meta(tile, (call.out, call.dout, call.dq))._replace(IS_LATENT=x.is_latent)
    dsink = None if dsoftmax_offset is None else dsoftmax_offset.new_empty((x.num_heads, chunks.num_tokens))
    for chunk, listed in chunks:
        args = DqArguments(
            inputs=x.inputs(meta),
            lists=key_lists(x),
            saved=Saved(out=rows(call.out, meta), lse_ptr=call.lse, dlse_ptr=call.dlse),
            dout=rows(call.dout, meta),
            dq=rows(call.dq, meta),
            chunk=chunk,
            dsink_ptr=dsink,
        )
        programs = cdiv(x.group_size, tile.block_m) * x.num_heads_kv * listed.tokens
        launch(_sparse_bwd_dq_kernel, programs, x.device, tile, (args, x.kv_block, meta))
        chunks.add_products(chunk, listed)
    if dsoftmax_offset is not None and dsink is not None:
        torch.sum(dsink, 1, out=dsoftmax_offset)
    call.dk.copy_(chunks.sums_k)
    call.dv.copy_(chunks.sums_v)


class _Chunks:
    """The chunks of a call's queries, which share their memory, and the fp32 sums of the gradients of k and v."""

    def __init__(self, call: Backward):
        self.call, x = call, call.problem
        indices = x.kv_indices
        assert indices is not None
        self.num_tokens = x.q.shape[:-2].numel()
        self.list_heads, length = indices.shape[-2:]
        self.by_block = x.kv_block in (16, 32, 64, 128)
        self.entries = length if self.by_block else length * x.kv_block
        self.units = x.batch * cdiv(x.longest_kv, x.kv_block) if self.by_block else x.num_keys
        self.is_sorted = self.by_block or call.deterministic
        lines = cdiv(length * x.kv_block, LINE.value)
        weights = x.num_heads * lines * LINE.value
        row_elements = (
            0 if self.by_block or not call.deterministic else x.num_heads_kv * self.entries * max(x.q.shape[-1], x.v.shape[-1])
        )
        most = max(1, MOST_BYTES // (2 * weights * x.q.element_size() + 4 * row_elements))
        self.size = cdiv(self.num_tokens, cdiv(self.num_tokens, most))
        make = functools.partial(torch.empty, device=x.device)
        self.rows = make(self.size * row_elements, dtype=torch.float32) if row_elements else None
        p, ds = (make(self.size * weights + tiles.MOST_ENTRIES, dtype=x.q.dtype) for _ in range(2))
        self.chunk = Chunk(first=0, slots_ptr=self._slots(), p_ptr=p, ds_ptr=ds, lines=lines)
        self.keys = make(self.list_heads * self.size * self.entries, dtype=torch.int32)
        if self.is_sorted:
            self.ordered, self.order = torch.empty_like(self.keys), make(self.keys.shape, dtype=torch.int64)
            self.starts = make((self.list_heads, self.units + 1), dtype=torch.int32)
            self.places = torch.arange(self.units + 1, dtype=torch.int32, device=x.device).repeat(self.list_heads, 1)
        self.sums_k, self.sums_v = (torch.zeros(t.shape, dtype=torch.float32, device=x.device) for t in (x.k, x.v))

    def _slots(self) -> Tensor | None:
        x = self.call.problem
        if x.q.dim() == 4:
            return None
        slots = torch.full((self.num_tokens,), -1, dtype=torch.int32, device=x.device)
        tile = tiles.entries_tile(x)
        launch(_sparse_slots_kernel, x.batch * x.longest_q, x.device, tile, (SlotArguments(x.lengths_q, slots), x.meta(tile)))
        return slots

    def __iter__(self) -> Iterator[tuple[Chunk, Listed]]:
        for first in range(0, self.num_tokens, self.size):
            chunk = self.chunk._replace(first=first)
            yield chunk, self._listed(chunk)

    def _listed(self, chunk: Chunk) -> Listed:
        x = self.call.problem
        tokens = min(self.size, self.num_tokens - chunk.first)
        shape = (self.list_heads, tokens * self.entries)
        keys = self.keys[: shape[0] * shape[1]].view(shape)
        order = starts = None
        listed = Listed(keys_ptr=keys, order_ptr=None, starts_ptr=None, tokens=tokens, entries=self.entries, units=self.units)
        tile = tiles.entries_tile(x)
        meta = x.meta(tile)
        args = EntryArguments(inputs=x.inputs(meta), lists=key_lists(x), chunk=chunk, listed=listed)
        launch(_sparse_entries_kernel, self.list_heads * tokens, x.device, tile, (args, x.kv_block, self.by_block, meta))
        if self.is_sorted:
            ordered, order = (t[: keys.numel()].view(shape) for t in (self.ordered, self.order))
            torch.sort(keys, dim=1, stable=True, out=(ordered, order))
            starts = torch.searchsorted(ordered, self.places, out_int32=True, out=self.starts)
        return listed._replace(order_ptr=order, starts_ptr=starts)

    def add_products(self, chunk: Chunk, listed: Listed) -> None:
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
                list_heads=self.list_heads,
                weights_ptr=weights,
                x=rows(other, meta),
                rows_ptr=self.rows,
                sums_ptr=sums,
            )
            if self.by_block:
                programs = cdiv(dim, tile.block_n) * x.num_heads_kv * self.units
                launch(_sparse_blocks_kernel, programs, x.device, tile, (args, x.kv_block, target, meta))
                continue
            programs = cdiv(self.entries, tile.block_n) * x.num_heads_kv * listed.tokens
            launch(_sparse_rows_kernel, programs, x.device, tile, (args, target, meta))
            if self.rows is not None:
                tile = tiles.sums_tile(x)
                programs = cdiv(dim, tile.block_m) * x.num_heads_kv * self.units
                launch(_sparse_sums_kernel, programs, x.device, tile, (args, target, x.meta(tile, (call.dout,))))
