"""The lists of keys: their entries inside a kernel, the rows that they name, and the query of a program."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import visible_keys
from flexattn.kernels_triton.common.padding import padding_rows
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.common.tiles import cdiv


class KeyLists(NamedTuple):
    """kv_indices [tokens, heads, length] and the counts [tokens, heads], contiguous int32."""

    indices_ptr: Pointer
    counts_ptr: Pointer  # None: all entries count
    heads: int  # 1: all key heads share the lists
    length: int


def key_lists(problem: Problem) -> KeyLists:
    indices = problem.kv_indices
    assert isinstance(indices, Tensor)
    return KeyLists(indices_ptr=indices, counts_ptr=problem.kv_index_counts, heads=indices.shape[-2], length=indices.shape[-1])


def has_no_queries(problem: Problem) -> bool:
    """Returns whether no program writes, so that the launcher fills the results."""
    return problem.batch == 0 or problem.q.shape[:-2].numel() == 0


def write_zeros(call: Backward) -> None:
    """Fills the gradients of a call without queries."""
    for gradient in (call.dq, call.dk, call.dv, call.dsoftmax_offset):
        if gradient is not None:
            gradient.zero_()


def programs_of(problem: Problem, block_m: int) -> int:
    """Returns the number of programs with a query, and up to block_m of its heads, each."""
    x = problem
    return cdiv(x.group_size, block_m) * x.num_heads_kv * x.longest_q * x.batch


class Query(NamedTuple):
    """The query of a program, inside a kernel, and its heads, which share key head h_kv."""

    b: tl.tensor
    i: tl.tensor  # position in its sequence
    h_kv: tl.tensor
    h: tl.tensor  # first head
    num_heads: tl.tensor  # from h on
    start_q: int | tl.tensor
    len_q: tl.tensor
    start_kv: int | tl.tensor
    len_kv: tl.tensor
    shift: tl.tensor
    list_row: tl.tensor  # row of its list
    num_entries: tl.tensor


@triton.jit
def query_at(pid, inputs: Inputs, lists: KeyLists, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Returns query number `pid`. Queries with the same list and keys have numbers next to each other.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    group = inputs.group_size
    blocks = tl.cdiv(group, BLOCK_M)
    first = pid % blocks * BLOCK_M
    pid = pid // blocks
    heads_kv = inputs.num_heads // group
    h_kv = pid % heads_kv
    pid = pid // heads_kv
    i = pid % inputs.lengths_q.max_seqlen
    b = pid // inputs.lengths_q.max_seqlen
    start_q, len_q = load_sequence(inputs.lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    token = tl.cast(start_q + i if META.IS_RAGGED_Q else b * inputs.lengths_q.num_tokens + i, tl.int64)
    list_row = token * lists.heads + tl.where(lists.heads > 1, h_kv, 0)
    num_entries = b * 0 + lists.length
    if lists.counts_ptr is not None:
        num_entries = tl.load(lists.counts_ptr + list_row, mask=i < len_q, other=0)
        num_entries = tl.minimum(tl.maximum(num_entries, 0), lists.length)
    h = h_kv * group + first
    return Query(
        b=b,
        i=i,
        h_kv=h_kv,
        h=h,
        num_heads=tl.minimum(group - first, BLOCK_M),
        start_q=start_q,
        len_q=len_q,
        start_kv=start_kv,
        len_kv=len_kv,
        shift=(len_kv - len_q) * inputs.band.bottom_right,
        list_row=list_row,
        num_entries=num_entries * KV_BLOCK,
    )


@triton.jit
def query_of_token(token, part, slots_ptr, inputs: Inputs, lists: KeyLists, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Returns (query, row of the token in the query's sequence, whether the token is a query). part: key head and heads, as in a
    # number of `query_at`. slots_ptr: batch index * longest_q + position of each packed token, and -1 for padding
    lengths = inputs.lengths_q
    group = inputs.group_size
    parts = tl.cdiv(group, META.BLOCK_M) * (inputs.num_heads // group)
    if META.IS_RAGGED_Q:
        slot = tl.load(slots_ptr + token)
        query = query_at(tl.maximum(slot, 0) * parts + part, inputs, lists, KV_BLOCK, META)
        row = token - query.start_q
        is_query = slot >= 0
    else:
        row = token % lengths.num_tokens
        slot = token // lengths.num_tokens * lengths.max_seqlen + tl.minimum(row, lengths.max_seqlen - 1)
        query = query_at(slot * parts + part, inputs, lists, KV_BLOCK, META)
        is_query = row < query.len_q
    return query, row, is_query


@triton.jit
def load_entries(lists: KeyLists, query: Query, inputs: Inputs, first, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    # Returns (keys, whether the query sees them) of BLOCK_N entries from `first` on. A key that it does not see is 0.
    return load_entries_at(first + tl.arange(0, META.BLOCK_N), lists, query, inputs, KV_BLOCK, META)


@triton.jit
def load_entries_at(place, lists: KeyLists, query: Query, inputs: Inputs, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    is_entry = place < query.num_entries
    index = tl.load(lists.indices_ptr + query.list_row * lists.length + place // KV_BLOCK, mask=is_entry, other=-1)
    is_entry = is_entry & (index >= 0) & (index < tl.cdiv(query.len_kv, KV_BLOCK))
    j = tl.where(is_entry, index, 0) * KV_BLOCK + place % KV_BLOCK
    is_seen = is_entry & visible_keys(query.i, j, query.len_kv, query.shift, inputs.band, META)
    return tl.where(is_seen, j, 0), is_seen


@triton.jit
def _page_and_row(pages, b, j):
    # Returns (page, int64; row in it) of keys j of a sequence. Page ids are clamped.
    page = tl.load(pages.table_ptr + tl.cast(b, tl.int64) * pages.stride + j // pages.page_size)
    return tl.minimum(tl.maximum(page, 0), pages.num_pages - 1).to(tl.int64), j % pages.page_size


@triton.jit
def key_offsets(x, inputs: Inputs, b, j, META: tl.constexpr):
    # Returns the offsets of the rows of keys j from the first key of the sequence, or of the pool of pages.
    offsets = j.to(tl.int64) * x.stride_s
    if inputs.pages.table_ptr is not None:
        page, row = _page_and_row(inputs.pages, b, j)
        offsets = page * x.stride_b + row.to(tl.int64) * x.stride_s
    return offsets * META.ALIGN


@triton.jit
def gather(base, offsets, is_seen, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    # Returns columns of the rows at `offsets`, and 0 for rows that are not seen.
    columns = COLUMN + tl.arange(0, WIDTH)
    mask = is_seen[:, None]
    if COLUMN + WIDTH > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)[None, :]
    return tl.load(base + (offsets[:, None] + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_scales(scale, inputs: Inputs, query: Query, j, is_seen, META: tl.constexpr):
    # Returns the factors of keys in FP8 that each have one, and 0 for keys that are not seen.
    place = j * 0 + query.b
    row = j
    if inputs.pages.table_ptr is not None:
        place, row = _page_and_row(inputs.pages, query.b, j)
    offsets = place.to(tl.int64) * scale.stride_b + row.to(tl.int64) * scale.stride_block
    return tl.load(scale.ptr + offsets + tl.cast(query.h_kv, tl.int64) * scale.stride_h, mask=is_seen, other=0.0)


class Keys(NamedTuple):
    """A tile of gathered keys, inside a kernel, and their products with the query's heads."""

    j: tl.tensor
    is_seen: tl.tensor
    k0: tl.tensor
    k1: tl.tensor
    qk: tl.tensor  # [BLOCK_M, BLOCK_N]


@triton.jit
def load_keys(query: Query, q: Parts, k_base, first, lists: KeyLists, inputs: Inputs, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    j, is_seen = load_entries(lists, query, inputs, first, KV_BLOCK, META)
    offsets = key_offsets(inputs.k, inputs, query.b, j, META)
    k0 = gather(k_base, offsets, is_seen, 0, META.QK0, META.HEAD_DIM_QK)
    if META.IS_KV_FP8:
        k0 = k0.to(q.first.dtype)
    k1 = k0
    qk = tl.dot(q.first, tl.trans(k0), input_precision=META.PRECISION)
    if META.QK1 > 0:
        k1 = gather(k_base, offsets, is_seen, META.QK0, META.QK1, META.HEAD_DIM_QK)
        if META.IS_KV_FP8:
            k1 = k1.to(q.first.dtype)
        qk = tl.dot(q.second, tl.trans(k1), qk, input_precision=META.PRECISION)
    if META.HAS_TOKEN_SCALES_K:
        qk *= load_scales(inputs.scales.k, inputs, query, j, is_seen, META)[None, :]
    return Keys(j=j, is_seen=is_seen, k0=k0, k1=k1, qk=qk)


@triton.jit
def load_latents(
    query: Query, q: Parts, rows: Rows, first, lists: KeyLists, inputs: Inputs, KV_BLOCK: tl.constexpr, META: tl.constexpr
):
    # The keys of rows of bytes (`latent_rows`): 512 numbers in E4M3, the fp32 factors of each 128 of them, and 64 bf16 numbers.
    DTYPE: tl.constexpr = q.first.dtype
    GROUP: tl.constexpr = 128
    GROUPS: tl.constexpr = META.QK0 // GROUP
    j, is_seen = load_entries(lists, query, inputs, first, KV_BLOCK, META)
    b = query.b if inputs.pages.table_ptr is None else 0
    places = row_pointer(rows, b, 0, query.start_kv, META) + key_offsets(rows, inputs, query.b, j, META)
    mask = is_seen[:, None]
    numbers = tl.load(places[:, None] + tl.arange(0, META.QK0)[None, :], mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    scales = (places + META.QK0).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales[:, None] + tl.arange(0, GROUPS)[None, :], mask=mask, other=0.0)
    k0 = tl.reshape(numbers.to(tl.float32), [META.BLOCK_N, GROUPS, GROUP]) * scales[:, :, None]
    k0 = tl.reshape(k0, [META.BLOCK_N, META.QK0]).to(DTYPE)
    k1 = (places + (META.QK0 + 4 * GROUPS)).to(tl.pointer_type(tl.bfloat16))
    k1 = tl.load(k1[:, None] + tl.arange(0, META.QK1)[None, :], mask=mask, other=0.0).to(DTYPE)
    qk = tl.dot(q.first, tl.trans(k0), input_precision=META.PRECISION)
    qk = tl.dot(q.second, tl.trans(k1), qk, input_precision=META.PRECISION)
    return Keys(j=j, is_seen=is_seen, k0=k0, k1=k1, qk=qk)


@triton.jit
def load_values(query: Query, keys: Keys, v_base, inputs: Inputs, META: tl.constexpr):
    # Returns both parts of the values. If v lies in k, its first part is the keys'.
    v0 = keys.k0
    if not META.IS_LATENT:
        offsets = key_offsets(inputs.v, inputs, query.b, keys.j, META)
        v0 = gather(v_base, offsets, keys.is_seen, 0, META.V0, META.HEAD_DIM_V)
    v1 = v0
    if META.V1 > 0:
        v1 = gather(v_base, offsets, keys.is_seen, META.V0, META.V1, META.HEAD_DIM_V)
    if META.HAS_TOKEN_SCALES_V:
        scales = load_scales(inputs.scales.v, inputs, query, keys.j, keys.is_seen, META)[:, None]
        v0, v1 = v0.to(tl.float32) * scales, v1.to(tl.float32) * scales
    if META.IS_KV_FP8:
        v0, v1 = v0.to(keys.k0.dtype), v1.to(keys.k0.dtype)
    return v0, v1


@triton.jit
def load_heads(x, query: Query, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr):
    # Returns both parts of the rows of the query's heads in a tensor with q's layout.
    pointer = row_pointer(x, query.b, query.h, query.start_q + query.i, META)
    offsets = head_offsets(x, META)
    x0 = load_tile(pointer, offsets, 0, query.num_heads, 0, WIDTH0, HEAD_DIM, True)
    x1 = x0
    if WIDTH1 > 0:
        x1 = load_tile(pointer, offsets, 0, query.num_heads, WIDTH0, WIDTH1, HEAD_DIM, True)
    return Parts(first=x0, second=x1)


@triton.jit
def store_heads(
    x, parts: Parts, row, query: Query, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr
):
    # Stores both parts of the query's heads into row `row` of its sequence.
    pointer = row_pointer(x, query.b, query.h, query.start_q + row, META)
    offsets = head_offsets(x, META)
    store_tile(pointer, parts.first, offsets, 0, query.num_heads, 0, WIDTH0, HEAD_DIM)
    if WIDTH1 > 0:
        store_tile(pointer, parts.second, offsets, 0, query.num_heads, WIDTH0, WIDTH1, HEAD_DIM)


@triton.jit
def head_offsets(x, META: tl.constexpr):
    # Returns the offsets of a query's heads from the first of them.
    return tl.arange(0, META.BLOCK_M).to(tl.int64) * x.stride_h * META.ALIGN


@triton.jit
def clear_padding(
    x, lse_ptr, query: Query, inputs: Inputs, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr
):
    # Writes 0 into the rows of x, out or dq, and -inf into their lse, if no query has them and this program is responsible.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    lengths = inputs.lengths_q
    is_last = query.i == lengths.max_seqlen - 1
    padding = padding_rows(lengths, query.b, query.start_q, query.len_q, query.i, is_last, 1, META.IS_RAGGED_Q)
    zeros0 = tl.zeros([BLOCK_M, WIDTH0], tl.float32)
    zeros1 = zeros0
    if WIDTH1 > 0:
        zeros1 = tl.zeros([BLOCK_M, WIDTH1], tl.float32)
    for side in tl.static_range(2 if META.IS_RAGGED_Q else 1):
        begin, end = (padding.begin, padding.end) if side == 0 else (padding.front_begin, padding.front)
        for row in range(begin, end):
            store_heads(x, Parts(first=zeros0, second=zeros1), row, query, WIDTH0, WIDTH1, HEAD_DIM, META)
            if lse_ptr is not None:
                rows = rows_of_heads(query, inputs, META) + (row - query.i)
                is_head = tl.arange(0, BLOCK_M) < query.num_heads
                tl.store(lse_ptr + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_head)


@triton.jit
def heads_of(query: Query, META: tl.constexpr):
    # Returns the heads of a program's rows; rows from num_heads on have no head.
    return query.h + tl.arange(0, META.BLOCK_M)


@triton.jit
def rows_of_heads(query: Query, inputs: Inputs, META: tl.constexpr):
    return lse_rows_of(heads_of(query, META), query, inputs, META)


@triton.jit
def lse_rows_of(heads, query: Query, inputs: Inputs, META: tl.constexpr):
    # Returns the indices of the query's heads in lse.
    h = heads if META.IS_RAGGED_Q else query.b * inputs.num_heads + heads
    return tl.cast(h, tl.int64) * inputs.lengths_q.num_tokens + query.start_q + query.i
