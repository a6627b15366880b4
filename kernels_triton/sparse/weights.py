"""The weights of queries on their listed keys, for a backward, and dq.

One kernel computes both. If heads and head dims are large, its tiles do not fit in registers. Then one kernel computes the weights,
with few columns of q and k at a time, and another kernel multiplies them with the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Parts, Pointer, Rows, Saved
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Backward, rows
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import lists as sparse_lists
from flexattn.kernels_triton.sparse import tiles

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
    lists: sparse_lists.KeyLists
    saved: Saved
    dout: Rows
    dq: Rows
    chunk: Chunk
    delta_ptr: Pointer  # fp32 with lse's indices: sum(out * dout) - dlse; None: each program computes it
    dsink_ptr: Pointer  # [h, tokens], or None: the parts of the gradient of softmax_offset


@triton.jit
def _delta_of(args: DqArguments, query, META: tl.constexpr):
    # Returns sum(out * dout) - dlse. Few columns at a time are in registers.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_V
    WIDTH: tl.constexpr = min(META.V0, 64)
    out = row_pointer(args.saved.out, query.b, query.h, query.start_q + query.i, META)
    dout = row_pointer(args.dout, query.b, query.h, query.start_q + query.i, META)
    out_heads, dout_heads = sparse_lists.head_offsets(args.saved.out, META), sparse_lists.head_offsets(args.dout, META)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, WIDTH):
        x = load_tile(out, out_heads, 0, query.num_heads, column, WIDTH, HEAD_DIM, True)
        y = load_tile(dout, dout_heads, 0, query.num_heads, column, WIDTH, HEAD_DIM, True)
        delta += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    row = sparse_lists.rows_of_heads(query, args.inputs, META)
    if args.saved.dlse_ptr is not None:
        delta -= tl.load(args.saved.dlse_ptr + row, mask=tl.arange(0, BLOCK_M) < query.num_heads, other=0.0)
    return delta


@triton.jit
def _lse_log2_of(args: DqArguments, query, META: tl.constexpr):
    # Returns lse in units of log2, +inf for a head that sees nothing.
    is_head = tl.arange(0, META.BLOCK_M) < query.num_heads
    lse = tl.load(args.saved.lse_ptr + sparse_lists.rows_of_heads(query, args.inputs, META), mask=is_head, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def _query_of(number, args: DqArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Returns (token's number in the chunk, query and heads number `number`, row and whether there is a query of `query_of_token`).
    inputs, chunk = args.inputs, args.chunk
    parts = tl.cdiv(inputs.group_size, META.BLOCK_M) * (inputs.num_heads // inputs.group_size)
    local = number // parts
    query, row, is_query = sparse_lists.query_of_token(
        chunk.first + local, number % parts, chunk.slots_ptr, inputs, args.lists, KV_BLOCK, META
    )
    return local, query, row, is_query


@triton.jit
def _p_sink_of(args: DqArguments, query, lse_log2, META: tl.constexpr):
    p_sink = tl.zeros_like(lse_log2)
    if META.HAS_SINK:
        heads = tl.where(tl.arange(0, META.BLOCK_M) < query.num_heads, sparse_lists.heads_of(query, META), 0)
        p_sink = tl.exp2(load_sink(args.inputs.softmax_offset_ptr, heads, LOG2E, META) - lse_log2)
    return p_sink


@triton.jit
def _store_dsink(args: DqArguments, local, query, dsink, META: tl.constexpr):
    if args.dsink_ptr is not None:
        lengths = args.inputs.lengths_q
        tokens = lengths.num_tokens * (1 if META.IS_RAGGED_Q else lengths.batch)
        target = args.dsink_ptr + sparse_lists.heads_of(query, META).to(tl.int64) * tokens + args.chunk.first + local
        tl.store(target, dsink, mask=tl.arange(0, META.BLOCK_M) < query.num_heads)


@triton.jit
def _weight_rows(args: DqArguments, local, query, META: tl.constexpr):
    # Returns the places of the weights of the query's heads.
    row = tl.cast(local, tl.int64) * args.inputs.num_heads + sparse_lists.heads_of(query, META)
    return row * (args.chunk.lines * LINE)


@triton.jit
def _store_weights(args: DqArguments, p, ds, weight_rows, first, query, META: tl.constexpr):
    place = first + tl.arange(0, META.BLOCK_N)
    mask = (tl.arange(0, META.BLOCK_M) < query.num_heads)[:, None] & (place < args.chunk.lines * LINE)[None, :]
    offsets = weight_rows[:, None] + place[None, :]
    tl.store(args.chunk.p_ptr + offsets, p, mask=mask)
    tl.store(args.chunk.ds_ptr + offsets, ds, mask=mask)


@kernel
def _sparse_bwd_dq_kernel(args: DqArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    inputs = args.inputs
    local, query, row, is_query = _query_of(tl.program_id(0), args, KV_BLOCK, META)
    dq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    dq1 = dq0
    if QK1 > 0:
        dq1 = tl.zeros([BLOCK_M, QK1], tl.float32)
    if not is_query:
        sparse_lists.store_heads(args.dq, Parts(first=dq0, second=dq1), row, query, QK0, QK1, META.HEAD_DIM_QK, META)
        _store_dsink(args, local, query, tl.zeros([BLOCK_M], tl.float32), META)
        return
    q = sparse_lists.load_heads(inputs.q, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    dout = sparse_lists.load_heads(args.dout, query, META.V0, META.V1, META.HEAD_DIM_V, META)
    delta, lse_log2 = _delta_of(args, query, META), _lse_log2_of(args, query, META)
    k_base = row_pointer(inputs.k, query.b, query.h_kv, query.start_kv, META)
    v_base = row_pointer(inputs.v, query.b, query.h_kv, query.start_kv, META)
    head = head_of(inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    p_sink = _p_sink_of(args, query, lse_log2, META)
    p_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if META.NORMALIZES:  # the probabilities from an lse in fp32 do not sum to 1 exactly enough for fp32 results
        row_sum = p_sink
        for first in tl.range(0, query.num_entries, BLOCK_N):
            keys = sparse_lists.load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
            s, factor, _, _ = logits(keys.qk, query.i, keys.j[None, :], inputs.scores.scale, head, None, META)
            p = tl.exp2(tl.fma(s, factor, -lse_log2[:, None]))
            row_sum += tl.sum(tl.where(keys.is_seen[None, :], p, 0.0), 1)
        p_scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    _store_dsink(args, local, query, -p_sink * p_scale * delta, META)
    weight_rows = _weight_rows(args, local, query, META)
    for first in tl.range(0, query.num_entries, BLOCK_N):
        keys = sparse_lists.load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
        v0, v1 = sparse_lists.load_values(query, keys, v_base, inputs, META)
        dp = tl.dot(dout.first, tl.trans(v0), input_precision=META.PRECISION)
        if META.V1 > 0:
            dp = tl.dot(dout.second, tl.trans(v1), dp, input_precision=META.PRECISION)
        s, factor, cap_tanh, score = logits(keys.qk, query.i, keys.j[None, :], inputs.scores.scale, head, None, META)
        p = tl.exp2(tl.fma(s, factor, -lse_log2[:, None])) * p_scale[:, None]
        p = tl.where(keys.is_seen[None, :], p, 0.0)
        ds = through_mods(p * (dp - delta[:, None]), cap_tanh, score, query.i, keys.j, head, None, META)
        p = p.to(q.first.dtype)
        ds = ds.to(q.first.dtype)
        dq0 = tl.dot(ds, keys.k0, dq0, input_precision=META.PRECISION)
        if META.QK1 > 0:
            dq1 = tl.dot(ds, keys.k1, dq1, input_precision=META.PRECISION)
        _store_weights(args, p, ds, weight_rows, first, query, META)
    scale = inputs.scores.scale
    sparse_lists.store_heads(
        args.dq, Parts(first=dq0 * scale, second=dq1 * scale), query.i, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META
    )


@kernel
def _sparse_delta_kernel(args: DqArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Writes the delta of a query's heads, and their parts of the gradient of softmax_offset.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    local, query, _, is_query = _query_of(tl.program_id(0), args, KV_BLOCK, META)
    delta = tl.zeros([BLOCK_M], tl.float32)
    p_sink = delta
    if is_query:
        delta = _delta_of(args, query, META)
        p_sink = _p_sink_of(args, query, _lse_log2_of(args, query, META), META)
        is_head = tl.arange(0, BLOCK_M) < query.num_heads
        tl.store(args.delta_ptr + sparse_lists.rows_of_heads(query, args.inputs, META), delta, mask=is_head)
    _store_dsink(args, local, query, -p_sink * delta, META)


@triton.jit
def _columns(rows, is_row, column, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr):
    # Returns columns of the rows at pointers `rows`.
    columns = column + tl.arange(0, COLUMNS)[None, :]
    return tl.load(rows[:, None] + columns, mask=is_row[:, None] & (columns < HEAD_DIM), other=0.0)


@kernel
def _sparse_weights_kernel(args: DqArguments, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Writes the weights of BLOCK_N entries. The products are sums over COLUMNS columns at a time.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    HEAD_DIM_QK: tl.constexpr = META.HEAD_DIM_QK
    HEAD_DIM_V: tl.constexpr = META.HEAD_DIM_V
    inputs = args.inputs
    blocks = tl.cdiv(args.chunk.lines * LINE, BLOCK_N)
    local, query, _, is_query = _query_of(tl.program_id(0) // blocks, args, KV_BLOCK, META)
    first = tl.program_id(0) % blocks * BLOCK_N
    if first >= tl.where(is_query, query.num_entries, 0):
        return
    j, is_seen = sparse_lists.load_entries(args.lists, query, inputs, first, KV_BLOCK, META)
    k_rows = row_pointer(inputs.k, query.b, query.h_kv, query.start_kv, META) + sparse_lists.key_offsets(
        inputs.k, inputs, query.b, j, META
    )
    q_rows = row_pointer(inputs.q, query.b, query.h, query.start_q + query.i, META) + sparse_lists.head_offsets(inputs.q, META)
    dout_rows = row_pointer(args.dout, query.b, query.h, query.start_q + query.i, META) + sparse_lists.head_offsets(args.dout, META)
    is_head = tl.arange(0, BLOCK_M) < query.num_heads
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for column in tl.range(0, HEAD_DIM_QK, COLUMNS):
        k = tl.trans(_columns(k_rows, is_seen, column, COLUMNS, HEAD_DIM_QK))
        s = tl.dot(_columns(q_rows, is_head, column, COLUMNS, HEAD_DIM_QK), k, s)
        if META.IS_LATENT:  # v is k's first columns
            dp = tl.dot(_columns(dout_rows, is_head, column, COLUMNS, HEAD_DIM_V), k, dp)
    if not META.IS_LATENT:
        v_rows = row_pointer(inputs.v, query.b, query.h_kv, query.start_kv, META) + sparse_lists.key_offsets(
            inputs.v, inputs, query.b, j, META
        )
        for column in tl.range(0, HEAD_DIM_V, COLUMNS):
            v = tl.trans(_columns(v_rows, is_seen, column, COLUMNS, HEAD_DIM_V))
            dp = tl.dot(_columns(dout_rows, is_head, column, COLUMNS, HEAD_DIM_V), v, dp)
    head = head_of(inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    delta = tl.load(args.delta_ptr + sparse_lists.rows_of_heads(query, inputs, META), mask=is_head, other=0.0)
    s, factor, cap_tanh, score = logits(s, query.i, j[None, :], inputs.scores.scale, head, None, META)
    p = tl.exp2(tl.fma(s, factor, -_lse_log2_of(args, query, META)[:, None]))
    p = tl.where(is_seen[None, :], p, 0.0)
    ds = through_mods(p * (dp - delta[:, None]), cap_tanh, score, query.i, j, head, None, META)
    dtype: tl.constexpr = inputs.q.ptr.dtype.element_ty
    _store_weights(args, p.to(dtype), ds.to(dtype), _weight_rows(args, local, query, META), first, query, META)


@kernel
def _sparse_dq_kernel(args: DqArguments, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Multiplies the gradients of a query's logits with COLUMNS columns of its keys.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    inputs = args.inputs
    blocks: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS
    local, query, row, is_query = _query_of(tl.program_id(0) // blocks, args, KV_BLOCK, META)
    k_base = row_pointer(inputs.k, query.b, query.h_kv, query.start_kv, META)
    weights = args.chunk.ds_ptr + _weight_rows(args, local, query, META)
    is_head = (tl.arange(0, BLOCK_M) < query.num_heads)[:, None]
    dq = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for first in tl.range(0, tl.where(is_query, query.num_entries, 0), BLOCK_N):
        j, is_seen = sparse_lists.load_entries(args.lists, query, inputs, first, KV_BLOCK, META)
        k_rows = k_base + sparse_lists.key_offsets(inputs.k, inputs, query.b, j, META)
        place = first + tl.arange(0, BLOCK_N)[None, :]
        ds = tl.load(weights[:, None] + place, mask=is_head & (place < args.chunk.lines * LINE), other=0.0)
        dq = tl.dot(ds, _columns(k_rows, is_seen, column, COLUMNS, HEAD_DIM), dq)
    target = row_pointer(args.dq, query.b, query.h, query.start_q + row, META) + sparse_lists.head_offsets(args.dq, META)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    dq = (dq * inputs.scores.scale).to(args.dq.ptr.dtype.element_ty)
    tl.store(target[:, None] + columns, dq, mask=is_head & (columns < HEAD_DIM))


class Weights:
    """The launches that write dq, the weights of chunks, and the gradient of softmax_offset."""

    def __init__(self, call: Backward, tile: Tile):
        self.call, self.tile, x = call, tile, call.problem
        self.delta = torch.empty_like(call.lse) if tile.apart else None
        dsoftmax_offset = call.dsoftmax_offset
        tokens = x.q.shape[:-2].numel()
        self.dsink = None if dsoftmax_offset is None else dsoftmax_offset.new_empty((x.num_heads, tokens))

    def write(self, chunk: Chunk, tokens: int) -> None:
        """Writes the weights of a chunk of so many tokens, and their dq."""
        x, tile = self.call.problem, self.tile
        if not tile.apart:
            self._launch(_sparse_bwd_dq_kernel, tile, chunk, tokens, 1, ())
            return
        self.write_delta(chunk, tokens)
        columns = tiles.columns(x)
        blocks = cdiv(chunk.lines * LINE.value, tile.block_n)
        self._launch(_sparse_weights_kernel, tile, chunk, tokens, blocks, (columns[0],))
        blocks = cdiv(x.q.shape[-1], columns[1])
        self._launch(_sparse_dq_kernel, tiles.dq_tile(x), chunk, tokens, blocks, (columns[1],))

    def write_delta(self, chunk: Chunk, tokens: int) -> None:
        self._launch(_sparse_delta_kernel, tiles.delta_tile(self.call.problem), chunk, tokens, 1, ())

    def _launch(self, kernel: Any, tile: Tile, chunk: Chunk, tokens: int, blocks: int, constants: tuple[int, ...]) -> None:
        call, x = self.call, self.call.problem
        meta = x.meta(tile, (call.out, call.dout, call.dq))._replace(IS_LATENT=x.is_latent)
        args = DqArguments(
            inputs=x.inputs(meta),
            lists=sparse_lists.key_lists(x),
            saved=Saved(out=rows(call.out, meta), lse_ptr=call.lse, dlse_ptr=call.dlse),
            dout=rows(call.dout, meta),
            dq=rows(call.dq, meta),
            chunk=chunk,
            delta_ptr=self.delta,
            dsink_ptr=self.dsink,
        )
        programs = blocks * cdiv(x.group_size, tile.block_m) * x.num_heads_kv * tokens
        launch(kernel, programs, x.device, tile, (args, *constants, x.kv_block, meta))

    def finish(self) -> None:
        if self.dsink is not None:
            torch.sum(self.dsink, 1, out=self.call.dsoftmax_offset)
