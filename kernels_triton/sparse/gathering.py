"""Gluon parts for sm_90: warps that gather listed keys into a ring of tiles by cp.async, and the scores and results of consumers.

A program's item is one query and up to 64 of its heads, which are the rows of its products. A row that the query does not see is
filled with zeros, and its key is -1, so that consumers mask its score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Pointer, Rows
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.barriers import named_barrier_sync
from flexattn.kernels_triton.gluon.forward_rows import sums_with_sink
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.softmax import sums_of_threads
from flexattn.kernels_triton.runtime.gluon_names import load_elements
from flexattn.kernels_triton.sparse.lists import KeyLists, Query, key_offsets, load_entries_at, lse_rows_of, query_at

_LOADED = gl.constexpr(9)  # named barrier of the first loader's threads; the second's follows


@with_features
class SparseMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    QK0: int  # widths of the one or two parts of q and k
    QK1: int
    V0: int
    ALIGN: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    LAZY: bool = True  # rows are rescaled only if their maximum has risen by much
    IS_FP8: bool = False


class Arguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    out: Rows
    lse_ptr: Pointer
    items: int  # all items, of `lists.programs_of`


class Ring(NamedTuple):
    """Two stages of gathered tiles, and one of q. The first columns of k are v."""

    q: Pair
    k: Pair
    keys: gl.shared_memory_descriptor  # int32 [stages, BLOCK_N]: the key of each row, or -1 if the query does not see it
    q_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Item(NamedTuple):
    """The query of an item; an item past the end or without a query has no blocks and no heads."""

    query: Query
    num_blocks: Any
    num_heads: Any


@gluon.constexpr_function
def _layout(width, warps):
    # Copies of 16 bytes, as many as possible in one row's 128 bytes
    across = min(width, 64) // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shared_layout(width, dtype):
    return gl.NVMMASharedLayout.get_default_for([64, width], dtype)


@gluon.jit
def allocate(STAGES: gl.constexpr, ROWS_OF_TILE: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    LAYOUT: gl.constexpr = _shared_layout(WIDTH, DTYPE)
    return gl.allocate_shared_memory(DTYPE, [STAGES, ROWS_OF_TILE, WIDTH], LAYOUT)


@gluon.jit
def _allocate_pair(STAGES: gl.constexpr, ROWS_OF_TILE: gl.constexpr, DTYPE: gl.constexpr, META: gl.constexpr):
    first = allocate(STAGES, ROWS_OF_TILE, META.QK0, DTYPE)
    if META.QK1 > 0:
        return Pair(first=first, second=allocate(STAGES, ROWS_OF_TILE, META.QK1, DTYPE))
    else:
        return Pair(first=first, second=first)


@gluon.jit
def allocate_ring(DTYPE: gl.constexpr, META: gl.constexpr):
    # Two partitions load a part of q each, and two release a stage.
    k = _allocate_pair(META.STAGES, META.BLOCK_N, DTYPE, META)
    return Ring(
        q=_allocate_pair(1, ROWS, DTYPE, META),
        k=k,
        keys=gl.allocate_shared_memory(gl.int32, [META.STAGES, META.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        q_full=allocate_barriers(1, 2),
        full=allocate_barriers(META.STAGES, 1),
        empty=allocate_barriers(META.STAGES, 2),
    )


@gluon.jit
def item_at(number, args: Arguments, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    query = query_at(gl.minimum(number, args.items - 1), args.inputs, args.lists, KV_BLOCK, META)
    exists = (number < args.items) & (query.i < query.len_q)
    num_blocks = gl.where(exists, gl.cdiv(query.num_entries, META.BLOCK_N), 0)
    return Item(query=query, num_blocks=num_blocks, num_heads=gl.where(exists, query.num_heads, 0))


@gluon.jit
def _copy_rows(tile, pointers, is_row, COLUMN: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr):
    # Copies columns of the rows at `pointers` from COLUMN on. The tile gets zeros past the head dim and in rows that do not exist.
    WIDTH: gl.constexpr = tile.shape[1]
    PANEL: gl.constexpr = min(WIDTH, 64)
    columns = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))
    places = pointers[:, None] + columns[None, :]
    for panel in gl.static_range(WIDTH // PANEL):
        mask = is_row[:, None]
        if COLUMN + (panel + 1) * PANEL > HEAD_DIM:
            mask = mask & (columns < HEAD_DIM - (COLUMN + panel * PANEL))[None, :]
        load_elements(tile.slice(panel * PANEL, PANEL, 1), places + (COLUMN + panel * PANEL), mask=mask)


@gluon.jit
def _copy_heads(tile, COLUMN: gl.constexpr, item: Item, args: Arguments, META: gl.constexpr):
    LAYOUT: gl.constexpr = _layout(tile.shape[1], gl.num_warps())
    query = item.query
    x = args.inputs.q
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    heads = query.h + gl.minimum(row, gl.maximum(item.num_heads - 1, 0))
    pointers = row_pointer(x, query.b, heads, query.start_q + query.i, META)
    _copy_rows(tile, pointers, row < item.num_heads, COLUMN, META.HEAD_DIM_QK, LAYOUT)


@gluon.jit
def _copy_keys(tile, place, COLUMN: gl.constexpr, item: Item, args: Arguments, META: gl.constexpr):
    # place: (keys, whether the query sees them) of the tile's rows
    LAYOUT: gl.constexpr = _layout(tile.shape[1], gl.num_warps())
    query = item.query
    b = query.b
    if args.inputs.pages.table_ptr is not None:
        b = b * 0
    j, is_seen = place
    k = args.inputs.k
    base = row_pointer(k, b, query.h_kv, query.start_kv, META)
    pointers = base + key_offsets(k, args.inputs, query.b, j, META)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    _copy_rows(tile, gl.convert_layout(pointers, ROW), gl.convert_layout(is_seen, ROW), COLUMN, META.HEAD_DIM_QK, LAYOUT)


@gluon.jit
def gather_block(n, ring: Ring, item: Item, args: Arguments, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    # Copies the n-th block of the list's keys into its stage, as one group.
    stage = Stage(n, META.STAGES)
    slot = pipeline.index(stage)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _layout(META.QK0, gl.num_warps()))
    places = n * META.BLOCK_N + gl.arange(0, META.BLOCK_N, layout=LAYOUT)
    place = load_entries_at(places, args.lists, item.query, args.inputs, KV_BLOCK, META)
    j, is_seen = place
    pipeline.wait_empty(ring.empty, stage)
    ring.keys.index(slot).store(gl.where(is_seen, j, -1))
    _copy_keys(ring.k.first.index(slot), place, 0, item, args, META)
    if META.QK1 > 0:
        _copy_keys(ring.k.second.index(slot), place, META.QK0, item, args, META)
    async_copy.commit_group()


@gluon.jit
def _fence_copies(LOADER: gl.constexpr):
    # wgmma reads the rows that cp.async has written only behind a fence in each thread that copied some.
    fence_async_shared()
    named_barrier_sync(_LOADED + LOADER, gl.num_warps() * 32)


@gluon.jit
def announce(ring: Ring, n, LOADER: gl.constexpr, META: gl.constexpr):
    # Tells the consumers that the n-th block has landed.
    _fence_copies(LOADER)
    mbarrier.arrive(ring.full.index(pipeline.index(Stage(n, META.STAGES))), count=1)


@gluon.jit
def load_query(ring: Ring, item: Item, LOADER: gl.constexpr, args: Arguments, META: gl.constexpr):
    # Each loader loads a part of the rows of q.
    if LOADER == 0:
        _copy_heads(ring.q.first.index(0), 0, item, args, META)
    elif META.QK1 > 0:
        _copy_heads(ring.q.second.index(0), META.QK0, item, args, META)
    async_copy.commit_group()
    async_copy.wait_group(0)
    _fence_copies(LOADER)
    mbarrier.arrive(ring.q_full.index(0), count=1)


@gluon.jit
def score_product(ring: Ring, q_slot, slot, zeros, META: gl.constexpr):
    # S = Q K^T, asynchronously
    s = warpgroup_mma(ring.q.first.index(q_slot), ring.k.first.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if META.QK1 > 0:
        s = warpgroup_mma(ring.q.second.index(q_slot), ring.k.second.index(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def visible_scores(qk, ring: Ring, slot, item: Item, args: Arguments, META: gl.constexpr):
    # Returns (scores, -inf if hidden; their factor in the exponent)
    query = item.query
    keys = ring.keys.index(slot).load(gl.SliceLayout(0, qk.type.layout))
    head = head_of(args.inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    s, factor, _, _ = logits(qk, query.i, keys[None, :], args.inputs.scores.scale, head, None, META)
    return gl.where((keys >= 0)[None, :], s, float("-inf")), factor


@gluon.jit
def first_statistics(item: Item, zeros, HAS_SINK: gl.constexpr, args: Arguments, META: gl.constexpr):
    # Returns (row maximum, row sum) before the first block. HAS_SINK: the sum counts the sink
    ROW: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    row_sum = sums_of_threads(zeros, META.BLOCK_N)
    if META.HAS_SINK:
        row = gl.minimum(gl.arange(0, ROWS, layout=ROW), gl.maximum(item.num_heads - 1, 0))
        sink = gl.zeros([ROWS], gl.float32, layout=ROW)
        if META.HAS_OFFSET:
            sink += gl.load(args.inputs.softmax_offset_ptr + item.query.h + row).to(gl.float32) * LOG2E
        with_sink, sum_with_sink = sums_with_sink(row_max, row_sum, sink)
        row_max = with_sink
        if HAS_SINK:
            row_sum = sum_with_sink
    return row_max, row_sum


@gluon.jit
def correction_of(before, after):
    # Returns the factor of sums relative to the maximum `before`, for the maximum `after`
    return gl.exp2(before - gl.where(after == float("-inf"), 0.0, after))


@gluon.jit
def store_lse(row_max, row_sum_or_1, item: Item, args: Arguments, META: gl.constexpr):
    query = item.query
    row = gl.arange(0, ROWS, layout=row_max.type.layout)
    rows = lse_rows_of(query.h + row, query, args.inputs, META)
    gl.store(args.lse_ptr + rows, (row_max + gl.log2(row_sum_or_1)) * LN2, mask=row < item.num_heads)


@gluon.jit
def store_out(acc, COLUMN: gl.constexpr, item: Item, args: Arguments, META: gl.constexpr):
    # Stores columns of out from COLUMN on, from registers
    LAYOUT: gl.constexpr = acc.type.layout
    query = item.query
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    pointers = row_pointer(args.out, query.b, query.h + row, query.start_q + query.i, META)
    columns = COLUMN + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    inside = (row < item.num_heads)[:, None] & (columns < META.HEAD_DIM_V)[None, :]
    gl.store(pointers[:, None] + columns[None, :], acc.to(args.out.ptr.dtype.element_ty), mask=inside)
