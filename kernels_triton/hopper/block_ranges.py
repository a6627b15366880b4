"""Which blocks of keys a tile of queries sees, and of queries a tile of keys: by the band, or by a block mask's lists."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.block_lists import TileList, cut_list, list_from, listed_tile
from flexattn.kernels_triton.common.split_kv import share_of_split
from flexattn.kernels_triton.hopper.operands import ROWS


@gluon.jit
def key_blocks(first_row, len_kv, shift, window_left, window_right, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # Blocks of keys that some of BLOCK_M (or QUERIES) queries from first_row on may see: begin <= end.
    NUM_QUERIES: gl.constexpr = META.BLOCK_M if QUERIES == 0 else QUERIES
    begin = 0
    end = gl.cdiv(len_kv, META.BLOCK_N)
    if META.HAS_RIGHT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + NUM_QUERIES + shift + window_right, 0), META.BLOCK_N))
    if META.HAS_LEFT:
        begin = gl.minimum(gl.maximum(first_row + shift - window_left, 0) // META.BLOCK_N, end)
    return begin, end


@gluon.jit
def query_blocks(first_row, ROWS: gl.constexpr, len_q, shift, window_left, window_right, META: gl.constexpr):
    # Blocks of queries that see some of ROWS keys from first_row on: begin <= end.
    begin = 0
    end = gl.cdiv(len_q, META.BLOCK_M)
    if META.HAS_RIGHT:
        begin = gl.minimum(gl.maximum(first_row - shift - window_right, 0) // META.BLOCK_M, end)
    if META.HAS_LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + ROWS - shift + window_left, 0), META.BLOCK_M))
    return begin, gl.maximum(begin, end)


@gluon.jit
def _row_of_lists(lists, b, h, first, SIZE: gl.constexpr):
    # Of the block of SIZE tokens that begins at or before `first`
    _, _, _, _, stride_b, stride_h, _ = lists
    return b * stride_b + h * stride_h + first // SIZE


class ListCut(NamedTuple):
    """The part of a row of a block mask's lists that the band leaves."""

    num_masked: Any
    num_full: Any
    masked_before: Any  # blocks of the masked list that come before these
    full_before: Any


@gluon.jit
def _listed(
    lists,
    b,
    h,
    first,
    begin,
    end,
    HAS_BEFORE: gl.constexpr,
    SIZE: gl.constexpr,
    OTHER: gl.constexpr,
    META: gl.constexpr,
):
    # SIZE: tokens of a block; OTHER: of the other side, on which the band goes from begin to end.
    counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, _, _, list_length = lists
    row = _row_of_lists(lists, b, h, first, SIZE)
    pointer = list_from(indices_ptr, row, list_length, 0)
    before, num_masked = cut_list(pointer, gl.load(counts_ptr + row), begin, end, OTHER, HAS_BEFORE, META)
    pointer = list_from(full_indices_ptr, row, list_length, 0)
    full_before, num_full = cut_list(pointer, gl.load(full_counts_ptr + row), begin, end, OTHER, HAS_BEFORE, META)
    return ListCut(num_masked=num_masked, num_full=num_full, masked_before=before, full_before=full_before)


@gluon.jit
def _listed_blocks(listed, lists, b, h, first, SIZE: gl.constexpr, OTHER: gl.constexpr, BLOCK: gl.constexpr):
    # (how many tiles of BLOCK tokens of the other side are seen, what `listed_tile` finds them by)
    _, indices_ptr, _, full_indices_ptr, _, _, list_length = lists
    row = _row_of_lists(lists, b, h, first, SIZE)
    masked_ptr = list_from(indices_ptr, row, list_length, listed.masked_before)
    full_ptr = list_from(full_indices_ptr, row, list_length, listed.full_before)
    found = TileList(masked_ptr=masked_ptr, num_masked=listed.num_masked, full_ptr=full_ptr, skip_from=0, skipped=0)
    return (listed.num_masked + listed.num_full) * (OTHER // BLOCK), found


@gluon.jit
def listed_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # Of a block mask, what `blocks_by_lists` needs besides: it takes reads that wait for each other
    begin, end = key_blocks(first_row, len_kv, shift, window_left, window_right, META, QUERIES)
    band = (begin * META.BLOCK_N, gl.minimum(end * META.BLOCK_N, len_kv), META.HAS_LEFT)
    return _listed(lists, b, h, first_row, *band, META.BLOCK_SIZE_Q, META.BLOCK_SIZE_KV, META)


@gluon.jit
def blocks_by_lists(listed, first_row, b, h, lists, META: gl.constexpr):
    # `blocks_of_keys` of a block mask
    return _listed_blocks(listed, lists, b, h, first_row, META.BLOCK_SIZE_Q, META.BLOCK_SIZE_KV, META.BLOCK_N)


@gluon.jit
def blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # (how many blocks of keys some of BLOCK_M queries from first_row on see, what `key_block` finds them by)
    if META.BLOCK_SIZE_Q > 0:
        listed = listed_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META, QUERIES)
        return blocks_by_lists(listed, first_row, b, h, lists, META)
    else:
        begin, end = key_blocks(first_row, len_kv, shift, window_left, window_right, META, QUERIES)
        return end - begin, begin


@gluon.jit
def key_block(t, found, META: gl.constexpr):
    # (the first key of block t, whether it is full to a block mask)
    if META.BLOCK_SIZE_Q > 0:
        return listed_tile(t, found, META.BLOCK_SIZE_KV, META.BLOCK_N)
    else:
        return (found + t) * META.BLOCK_N, False


@gluon.jit
def blocks_of_split(split, num_splits, num_blocks, found, META: gl.constexpr):
    # Of what `blocks_of_keys` says a split's share, of a block mask in whole blocks of it
    if META.BLOCK_SIZE_Q > 0:
        TILES: gl.constexpr = META.BLOCK_SIZE_KV // META.BLOCK_N
        first, last = share_of_split(num_blocks // TILES, split, num_splits)
        own = TileList(
            masked_ptr=found.masked_ptr + first,
            num_masked=found.num_masked - first,
            full_ptr=found.full_ptr,
            skip_from=0,
            skipped=0,
        )
        return (last - first) * TILES, own
    else:
        first, last = share_of_split(num_blocks, split, num_splits)
        return last - first, found + first


@gluon.jit
def blocks_of_queries(first_row, b, h, len_q, shift, window_left, window_right, lists, META: gl.constexpr):
    # (how many blocks of queries see some of BLOCK_N keys from first_row on, what `query_block` finds them by)
    begin, end = query_blocks(first_row, META.BLOCK_N, len_q, shift, window_left, window_right, META)
    if META.BLOCK_SIZE_Q > 0:
        band = (begin * META.BLOCK_M, gl.minimum(end * META.BLOCK_M, len_q), META.HAS_RIGHT)
        listed = _listed(lists, b, h, first_row, *band, META.BLOCK_SIZE_KV, META.BLOCK_SIZE_Q, META)
        return _listed_blocks(listed, lists, b, h, first_row, META.BLOCK_SIZE_KV, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return end - begin, begin


@gluon.jit
def query_block(t, found, META: gl.constexpr):
    # (the first query of block t, whether it is full to a block mask)
    if META.BLOCK_SIZE_Q > 0:
        return listed_tile(t, found, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return (found + t) * META.BLOCK_M, False


@gluon.jit
def own_blocks(own_row, num_blocks, found, len_q, shift, window_left, window_right, META: gl.constexpr):
    # Of a tile's blocks of keys, of which the last come first: (how many to pass over, how many this consumer's queries see, what
    # `key_block` finds these by).
    if not META.SKIPS:
        return 0, num_blocks, found
    else:
        begin = found
        end = found + num_blocks
        if META.HAS_RIGHT:
            last = gl.cdiv(gl.maximum(own_row + ROWS // META.GROUP + shift + window_right, 0), META.BLOCK_N)
            end = gl.minimum(gl.maximum(last, found), end)
        if META.HAS_LEFT:
            begin = gl.minimum(gl.maximum(gl.maximum(own_row + shift - window_left, 0) // META.BLOCK_N, found), end)
        if META.HAS_IDLE:
            end = gl.where(own_row < len_q, end, begin)
        return found + num_blocks - end, end - begin, begin
