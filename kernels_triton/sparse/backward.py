"""The backward over lists of keys.

One kernel computes dq of a query's heads. It also adds the gradients of the listed keys to fp32 sums, by atomics in an arbitrary
order. For repeatable gradients it does not: another kernel computes them for one key at a time, from the sorted lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Head, Inputs, Parts, Pointer, Rows, Saved
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Backward, Meta, Problem, rows
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tiles import slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse.lists import (
    KeyLists,
    clear_padding,
    gather,
    heads_of,
    key_lists,
    key_offsets,
    load_entries,
    load_heads,
    load_keys,
    load_values,
    programs_of,
    query_of_program,
    rows_of_heads,
    store_heads,
)

_WIDE = 512  # from these head dims on, of q and v together, 32 rows of both would not fit in registers


class RowStatistics(NamedTuple):
    """Numbers of each query and head, fp32 with lse's indices, from the kernel of dq for that of dk and dv."""

    lse_log2_ptr: Pointer  # lse in units of log2, +inf for a row that sees nothing
    delta_ptr: Pointer  # sum(out * dout) - dlse
    p_scale_ptr: Pointer  # the factor that corrects probabilities of fp32


class DqArguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    saved: Saved
    dout: Rows
    dq: Rows
    sums_k: Rows | None  # fp32 sums of dk and dv; None: another kernel computes these
    sums_v: Rows | None
    statistics: RowStatistics | None
    dsink_ptr: Pointer  # [h, b, longest_q], or None: the parts of the gradient of softmax_offset


class _Loss(NamedTuple):
    """The rows of a query's heads: dout, and the statistics of their softmax."""

    dout: Parts
    lse_log2: tl.tensor
    delta: tl.tensor


@triton.jit
def _load_loss(args: DqArguments, query, META: tl.constexpr):
    dout = load_heads(args.dout, query, META.V0, META.V1, META.HEAD_DIM_V, META)
    out = load_heads(args.saved.out, query, META.V0, META.V1, META.HEAD_DIM_V, META)
    delta = tl.sum(out.first.to(tl.float32) * dout.first.to(tl.float32), 1)
    if META.V1 > 0:
        delta += tl.sum(out.second.to(tl.float32) * dout.second.to(tl.float32), 1)
    row = rows_of_heads(query, args.inputs, META)
    is_head = tl.arange(0, META.BLOCK_M) < query.num_heads
    if args.saved.dlse_ptr is not None:
        delta -= tl.load(args.saved.dlse_ptr + row, mask=is_head, other=0.0)
    lse = tl.load(args.saved.lse_ptr + row, mask=is_head, other=float("inf"))
    return _Loss(dout=dout, lse_log2=tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E, delta=delta)


@triton.jit
def _add_to_keys(
    sums, parts: Parts, keys, query, COLUMN1: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr
):
    # Adds rows of gradients [BLOCK_N, columns] to those of the keys.
    base = row_pointer(sums, query.b, query.h_kv, query.start_kv, META)
    offsets = keys.j.to(tl.int64) * sums.stride_s * META.ALIGN
    columns = tl.arange(0, COLUMN1)
    mask = keys.is_seen[:, None] & (columns < HEAD_DIM)[None, :]
    tl.atomic_add(base + (offsets[:, None] + columns[None, :]), parts.first, mask=mask, sem="relaxed")
    if WIDTH1 > 0:
        columns1 = COLUMN1 + tl.arange(0, WIDTH1)
        mask1 = keys.is_seen[:, None] & (columns1 < HEAD_DIM)[None, :]
        tl.atomic_add(base + (offsets[:, None] + columns1[None, :]), parts.second, mask=mask1, sem="relaxed")


@kernel
def _sparse_bwd_dq_kernel(args: DqArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    inputs = args.inputs
    query = query_of_program(inputs, args.lists, KV_BLOCK, META)
    is_head = tl.arange(0, BLOCK_M) < query.num_heads
    dsink = args.dsink_ptr
    if dsink is not None:
        longest = inputs.lengths_q.max_seqlen
        dsink += (heads_of(query, META).to(tl.int64) * inputs.lengths_q.batch + query.b) * longest + query.i
    if META.HAS_LENGTHS:
        clear_padding(args.dq, None, query, inputs, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
        if query.i >= query.len_q:
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
    row = rows_of_heads(query, inputs, META)
    if args.statistics.delta_ptr is not None:
        tl.store(args.statistics.lse_log2_ptr + row, loss.lse_log2, mask=is_head)
        tl.store(args.statistics.delta_ptr + row, loss.delta, mask=is_head)
        tl.store(args.statistics.p_scale_ptr + row, p_scale, mask=is_head)
    if dsink is not None:
        tl.store(dsink, -p_sink * p_scale * loss.delta, mask=is_head)
    dq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    dq1 = dq0
    if QK1 > 0:
        dq1 = tl.zeros([BLOCK_M, QK1], tl.float32)
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
        if args.sums_k.ptr is not None:
            dk0 = tl.dot(tl.trans(ds), q.first, input_precision=META.PRECISION) * inputs.scores.scale
            dk1 = dk0
            if META.QK1 > 0:
                dk1 = tl.dot(tl.trans(ds), q.second, input_precision=META.PRECISION) * inputs.scores.scale
            _add_to_keys(args.sums_k, Parts(first=dk0, second=dk1), keys, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
            dv0 = tl.dot(tl.trans(p), loss.dout.first, input_precision=META.PRECISION)
            dv1 = dv0
            if META.V1 > 0:
                dv1 = tl.dot(tl.trans(p), loss.dout.second, input_precision=META.PRECISION)
            _add_to_keys(args.sums_v, Parts(first=dv0, second=dv1), keys, query, META.V0, META.V1, META.HEAD_DIM_V, META)
    scale = inputs.scores.scale
    store_heads(args.dq, Parts(first=dq0 * scale, second=dq1 * scale), query.i, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)


class EntryArguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    keys_ptr: Pointer  # int32 [list heads, tokens, entries]
    entries: int


@kernel
def _sparse_entries_kernel(args: EntryArguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Writes the row of each entry's key among all keys, if the query sees it. BLOCK_M is at least the heads of a group.
    inputs = args.inputs
    query = query_of_program(inputs, args.lists, KV_BLOCK, META)
    if (query.i >= query.len_q) | (query.h_kv >= args.lists.heads):
        return
    tokens = inputs.lengths_q.num_tokens * (1 if META.IS_RAGGED_Q else inputs.lengths_q.batch)
    token = query.list_row // args.lists.heads
    target = args.keys_ptr + (tl.cast(query.h_kv, tl.int64) * tokens + token) * args.entries
    first_key = query.start_kv if META.IS_RAGGED_KV else query.b * inputs.lengths_kv.num_tokens
    for first in range(0, query.num_entries, META.BLOCK_N):
        j, is_seen = load_entries(args.lists, query, inputs, first, KV_BLOCK, META)
        tl.store(target + first + tl.arange(0, META.BLOCK_N), first_key + j, mask=is_seen)


class DkdvArguments(NamedTuple):
    inputs: Inputs
    dout: Rows
    dk: Rows
    dv: Rows
    statistics: RowStatistics
    order_ptr: Pointer  # int64 [list heads, tokens * entries]: the entries by key
    starts_ptr: Pointer  # int64 [list heads, keys + 1]: the first of each key's
    list_heads: int
    entries: int


class _KeyRow(NamedTuple):
    """A key, its value, and the sums of their gradients."""

    k0: tl.tensor
    k1: tl.tensor
    v0: tl.tensor
    v1: tl.tensor


@triton.jit
def _rows_at(x, offsets, is_row, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr):
    x0 = gather(x.ptr, offsets, is_row, 0, WIDTH0, HEAD_DIM).to(tl.float32)
    x1 = x0
    if WIDTH1 > 0:
        x1 = gather(x.ptr, offsets, is_row, WIDTH0, WIDTH1, HEAD_DIM).to(tl.float32)
    return x0, x1


@triton.jit
def _store_row(pointer, x0, x1, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr):
    columns = tl.arange(0, WIDTH0)
    tl.store(pointer + columns, x0.to(pointer.dtype.element_ty), mask=columns < HEAD_DIM)
    if WIDTH1 > 0:
        columns1 = WIDTH0 + tl.arange(0, WIDTH1)
        tl.store(pointer + columns1, x1.to(pointer.dtype.element_ty), mask=columns1 < HEAD_DIM)


class _Entries(NamedTuple):
    """BLOCK_M // HEADS entries of a key from `first` on, and HEADS heads from `head` of its group on."""

    first: tl.tensor
    end: tl.tensor  # the end of all entries of the key
    head: int | tl.tensor


@triton.jit
def _add_queries(sums, key, entries: _Entries, args, head: Head, HEADS: tl.constexpr, META: tl.constexpr):
    # Adds the gradients from some entries to the sums of a key. head: with the key head as its h
    BLOCK_M: tl.constexpr = META.BLOCK_M
    inputs = args.inputs
    tokens = inputs.lengths_q.num_tokens
    rows = tl.arange(0, BLOCK_M)
    place = entries.first + rows // HEADS
    in_group = entries.head + rows % HEADS
    is_row = (place < entries.end) & (in_group < inputs.group_size)
    token = tl.load(args.order_ptr + place, mask=is_row, other=0) // args.entries
    h = (head.h * inputs.group_size + in_group).to(tl.int64)
    b = token * 0 if META.IS_RAGGED_Q else token // tokens
    row = token if META.IS_RAGGED_Q else token % tokens
    q_offsets = (b * inputs.q.stride_b + row * inputs.q.stride_s + h * inputs.q.stride_h) * META.ALIGN
    dout_offsets = (b * args.dout.stride_b + row * args.dout.stride_s + h * args.dout.stride_h) * META.ALIGN
    q0, q1 = _rows_at(inputs.q, q_offsets, is_row, META.QK0, META.QK1, META.HEAD_DIM_QK)
    dout0, dout1 = _rows_at(args.dout, dout_offsets, is_row, META.V0, META.V1, META.HEAD_DIM_V)
    qk = tl.sum(q0 * key.k0, 1)
    if META.QK1 > 0:
        qk += tl.sum(q1 * key.k1, 1)
    dp = tl.sum(dout0 * key.v0, 1)
    if META.V1 > 0:
        dp += tl.sum(dout1 * key.v1, 1)
    statistic = (h if META.IS_RAGGED_Q else b * inputs.num_heads + h) * tokens + row
    lse_log2 = tl.load(args.statistics.lse_log2_ptr + statistic, mask=is_row, other=float("inf"))
    delta = tl.load(args.statistics.delta_ptr + statistic, mask=is_row, other=0.0)
    p_scale = tl.load(args.statistics.p_scale_ptr + statistic, mask=is_row, other=0.0)
    s, factor, cap_tanh, score = logits(qk, 0, 0, inputs.scores.scale, head, None, META)
    p = tl.where(is_row, tl.exp2(tl.fma(s, factor, -lse_log2)) * p_scale, 0.0)
    ds = through_mods(p * (dp - delta), cap_tanh, score, 0, 0, head, None, META)
    dk1, dv1 = sums.k1, sums.v1
    if META.QK1 > 0:
        dk1 += tl.sum(ds[:, None] * q1, 0)
    if META.V1 > 0:
        dv1 += tl.sum(p[:, None] * dout1, 0)
    dk0 = sums.k0 + tl.sum(ds[:, None] * q0, 0)
    return _KeyRow(k0=dk0, k1=dk1, v0=sums.v0 + tl.sum(p[:, None] * dout0, 0), v1=dv1)


@kernel
def _sparse_bwd_dkdv_kernel(args: DkdvArguments, HEADS: tl.constexpr, META: tl.constexpr):
    # One key of one key head: a fixed order of sums, without atomics. HEADS: heads of an iteration, a power of two
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    inputs = args.inputs
    tokens_kv = inputs.lengths_kv.num_tokens
    heads_kv = inputs.num_heads // inputs.group_size
    h_kv = tl.program_id(0) % heads_kv
    place = tl.program_id(0) // heads_kv
    b = place * 0 if META.IS_RAGGED_KV else place // tokens_kv
    row = place if META.IS_RAGGED_KV else place % tokens_kv
    num_keys = tl.num_programs(0) // heads_kv
    list_head = tl.where(args.list_heads > 1, h_kv, 0)
    starts = args.starts_ptr + tl.cast(list_head, tl.int64) * (num_keys + 1) + place
    begin, end = tl.load(starts), tl.load(starts + 1)
    all_tokens = inputs.lengths_q.num_tokens * (1 if META.IS_RAGGED_Q else inputs.lengths_q.batch)
    first_of_head = tl.cast(list_head, tl.int64) * all_tokens * args.entries
    one = tl.arange(0, 1)
    is_key = one == 0
    k_offsets = key_offsets(inputs.k, inputs, b, row + one, META) + tl.cast(b, tl.int64) * inputs.k.stride_b * META.ALIGN
    v_offsets = key_offsets(inputs.v, inputs, b, row + one, META) + tl.cast(b, tl.int64) * inputs.v.stride_b * META.ALIGN
    k_offsets += tl.cast(h_kv, tl.int64) * inputs.k.stride_h * META.ALIGN
    v_offsets += tl.cast(h_kv, tl.int64) * inputs.v.stride_h * META.ALIGN
    k0, k1 = _rows_at(inputs.k, k_offsets, is_key, META.QK0, META.QK1, META.HEAD_DIM_QK)
    v0, v1 = _rows_at(inputs.v, v_offsets, is_key, META.V0, META.V1, META.HEAD_DIM_V)
    key = _KeyRow(k0=k0, k1=k1, v0=v0, v1=v1)
    head = head_of(inputs.scores, b, h_kv, tokens_kv, tokens_kv, 0, None, META)
    dk0, dv0 = tl.zeros([QK0], tl.float32), tl.zeros([V0], tl.float32)
    dk1, dv1 = dk0, dv0
    if QK1 > 0:
        dk1 = tl.zeros([QK1], tl.float32)
    if V1 > 0:
        dv1 = tl.zeros([V1], tl.float32)
    for entry in range(first_of_head + begin, first_of_head + end, META.BLOCK_M // HEADS):
        for first_head in range(0, inputs.group_size, HEADS):
            sums = _KeyRow(k0=dk0, k1=dk1, v0=dv0, v1=dv1)
            entries = _Entries(first=entry, end=first_of_head + end, head=first_head)
            sums = _add_queries(sums, key, entries, args, head, HEADS, META)
            dk0, dk1, dv0, dv1 = sums.k0, sums.k1, sums.v0, sums.v1
    scale = inputs.scores.scale
    dk, dv = row_pointer(args.dk, b, h_kv, row, META), row_pointer(args.dv, b, h_kv, row, META)
    _store_row(dk, dk0 * scale, dk1 * scale, META.QK0, META.QK1, META.HEAD_DIM_QK)
    _store_row(dv, dv0, dv1, META.V0, META.V1, META.HEAD_DIM_V)


def sparse_backward(call: Backward, tile: Tile) -> None:
    """Writes the gradients of a call whose queries have lists of keys."""
    x, dsoftmax_offset = call.problem, call.dsoftmax_offset
    if x.batch == 0:  # no program writes
        for gradient in (call.dq, call.dk, call.dv, dsoftmax_offset):
            if gradient is not None:
                gradient.zero_()
        return
    sums_k = sums_v = statistics = None
    if call.deterministic:
        statistics = RowStatistics(*torch.empty((3, call.lse.numel()), dtype=torch.float32, device=x.device))
    else:
        sums_k, sums_v = (torch.zeros(t.shape, dtype=torch.float32, device=x.device) for t in (x.k, x.v))
    sums = [t for t in (sums_k, sums_v) if t is not None]
    meta = x.meta(tile, (call.out, call.dout, call.dq, *sums))._replace(IS_LATENT=x.is_latent)
    dsink = None
    if dsoftmax_offset is not None:
        dsink = dsoftmax_offset.new_empty((x.num_heads, x.batch * x.longest_q))
    args = DqArguments(
        inputs=x.inputs(meta),
        lists=key_lists(x),
        saved=Saved(out=rows(call.out, meta), lse_ptr=call.lse, dlse_ptr=call.dlse),
        dout=rows(call.dout, meta),
        dq=rows(call.dq, meta),
        sums_k=None if sums_k is None else rows(sums_k, meta),
        sums_v=None if sums_v is None else rows(sums_v, meta),
        statistics=statistics,
        dsink_ptr=dsink,
    )
    launch(_sparse_bwd_dq_kernel, programs_of(x, tile.block_m), x.device, tile, (args, x.kv_block, meta))
    if dsoftmax_offset is not None and dsink is not None:
        torch.sum(dsink, 1, out=dsoftmax_offset)
    if sums_k is not None and sums_v is not None:
        call.dk.copy_(sums_k)
        call.dv.copy_(sums_v)
    elif statistics is not None:
        _repeatable_key_gradients(call, tile, statistics)


def _repeatable_key_gradients(call: Backward, tile: Tile, statistics: RowStatistics) -> None:
    x = call.problem
    order, starts = _by_key(x, tile)
    if x.head_dims > _WIDE:
        tile = tile._replace(block_m=16)
    meta: Meta = x.meta(tile, (call.dout, call.dk, call.dv))
    args = DkdvArguments(
        inputs=x.inputs(meta),
        dout=rows(call.dout, meta),
        dk=rows(call.dk, meta),
        dv=rows(call.dv, meta),
        statistics=statistics,
        order_ptr=order,
        starts_ptr=starts,
        list_heads=order.shape[0],
        entries=_entries(x),
    )
    heads = min(slots_of_heads(x.group_size), meta.BLOCK_M)
    launch(_sparse_bwd_dkdv_kernel, x.num_keys * x.num_heads_kv, x.device, tile, (args, heads, meta))


def _by_key(problem: Problem, tile: Tile) -> tuple[Tensor, Tensor]:
    """Returns the entries that queries see by key: their order, int64 [list heads, tokens * entries], and each key's first."""
    x = problem
    assert x.kv_indices is not None
    tokens = x.q.shape[:-2].numel()
    list_heads = x.kv_indices.shape[-2]
    keys = torch.full((list_heads, tokens * _entries(x)), x.num_keys, dtype=torch.int32, device=x.device)
    tile = tile._replace(block_m=max(16, slots_of_heads(x.group_size)))
    meta = x.meta(tile)
    args = EntryArguments(inputs=x.inputs(meta), lists=key_lists(x), keys_ptr=keys, entries=_entries(x))
    launch(_sparse_entries_kernel, programs_of(x, tile.block_m), x.device, tile, (args, x.kv_block, meta))
    ordered, order = torch.sort(keys, dim=1, stable=True)
    places = torch.arange(x.num_keys + 1, dtype=torch.int32, device=x.device).expand(list_heads, -1).contiguous()
    return order, torch.searchsorted(ordered, places)


def _entries(problem: Problem) -> int:
    assert problem.kv_indices is not None
    return problem.kv_indices.shape[-1] * problem.kv_block
