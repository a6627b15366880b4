"""Blocks of keys that a tile of queries sees, and blocks of queries that see a tile of keys: by the band, or by a block mask.

Each is given as (number of blocks, block range). With the band alone the block range is the first block; with a block mask it is a
`TileList`. `key_block` and `query_block` find a block in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import BlockMaskLists
from flexattn.kernels_triton.common.block_lists import TileList, cut_list, list_from, listed_tile
from flexattn.kernels_triton.common.split_kv import share_of_split
from flexattn.kernels_triton.hopper.masking import SequenceBand
from flexattn.kernels_triton.hopper.operands import ROWS


@gluon.jit
def _key_blocks(first_row, band: SequenceBand, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # (first, end) of the blocks of keys that some of BLOCK_M (or QUERIES) queries from first_row on may see; first <= end.
    NUM_QUERIES: gl.constexpr = META.BLOCK_M if QUERIES == 0 else QUERIES
    begin = 0
    end = gl.cdiv(band.len_kv, META.BLOCK_N)
    if META.HAS_RIGHT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + NUM_QUERIES + band.shift + band.right, 0), META.BLOCK_N))
    if META.HAS_LEFT:
        begin = gl.minimum(gl.maximum(first_row + band.shift - band.left, 0) // META.BLOCK_N, end)
    return begin, end


@gluon.jit
def _query_blocks(first_row, band: SequenceBand, META: gl.constexpr):
    # (first, end) of the blocks of queries that may see some of BLOCK_N keys from first_row on; first <= end.
    begin = 0
    end = gl.cdiv(band.len_q, META.BLOCK_M)
    if META.HAS_RIGHT:
        begin = gl.minimum(gl.maximum(first_row - band.shift - band.right, 0) // META.BLOCK_M, end)
    if META.HAS_LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + META.BLOCK_N - band.shift + band.left, 0), META.BLOCK_M))
    return begin, gl.maximum(begin, end)


@gluon.jit
def _row_of_lists(lists: BlockMaskLists, b, h, first_row, SIZE: gl.constexpr):
    # The list of the block of SIZE tokens that first_row lies in
    return b * lists.stride_b + h * lists.stride_h + first_row // SIZE


class TokenRange(NamedTuple):
    begin: Any
    end: Any


class ListCut(NamedTuple):
    """The part of a row of a block mask's lists that the band leaves."""

    num_masked: Any
    num_full: Any
    masked_before: Any  # blocks of the masked list that come before these
    full_before: Any


@gluon.jit
def _cut_lists(lists: BlockMaskLists, row, seen: TokenRange, HAS_BEFORE: gl.constexpr, SIZE: gl.constexpr, META: gl.constexpr):
    # seen: tokens of the other side that the band leaves; SIZE: tokens of that side's blocks.
    pointer = list_from(lists.indices_ptr, row, lists.length, 0)
    before, num_masked = cut_list(pointer, gl.load(lists.counts_ptr + row), seen.begin, seen.end, SIZE, HAS_BEFORE, META)
    pointer = list_from(lists.full_indices_ptr, row, lists.length, 0)
    full_before, num_full = cut_list(pointer, gl.load(lists.full_counts_ptr + row), seen.begin, seen.end, SIZE, HAS_BEFORE, META)
    return ListCut(num_masked=num_masked, num_full=num_full, masked_before=before, full_before=full_before)


@gluon.jit
def _tiles_of_lists(cut: ListCut, lists: BlockMaskLists, row, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    # (number of tiles of BLOCK tokens, TileList); SIZE: tokens of a block of the block mask.
    masked_ptr = list_from(lists.indices_ptr, row, lists.length, cut.masked_before)
    full_ptr = list_from(lists.full_indices_ptr, row, lists.length, cut.full_before)
    tiles = TileList(masked_ptr=masked_ptr, num_masked=cut.num_masked, full_ptr=full_ptr, skip_from=0, skipped=0)
    return (cut.num_masked + cut.num_full) * (SIZE // BLOCK), tiles


@gluon.jit
def cut_key_lists(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # The reads of a block mask that wait for each other; `blocks_by_lists` does the rest.
    begin, end = _key_blocks(first_row, band, META, QUERIES)
    seen = TokenRange(begin=begin * META.BLOCK_N, end=gl.minimum(end * META.BLOCK_N, band.len_kv))
    row = _row_of_lists(lists, b, h, first_row, META.BLOCK_SIZE_Q)
    return _cut_lists(lists, row, seen, META.HAS_LEFT, META.BLOCK_SIZE_KV, META)


@gluon.jit
def blocks_by_lists(cut: ListCut, first_row, b, h, lists: BlockMaskLists, META: gl.constexpr):
    # `blocks_of_keys` with a block mask
    row = _row_of_lists(lists, b, h, first_row, META.BLOCK_SIZE_Q)
    return _tiles_of_lists(cut, lists, row, META.BLOCK_SIZE_KV, META.BLOCK_N)


@gluon.jit
def blocks_of_keys(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # (number of blocks, block range) of the keys that some of BLOCK_M (or QUERIES) queries from first_row on see
    if META.BLOCK_SIZE_Q > 0:
        cut = cut_key_lists(first_row, b, h, band, lists, META, QUERIES)
        return blocks_by_lists(cut, first_row, b, h, lists, META)
    else:
        begin, end = _key_blocks(first_row, band, META, QUERIES)
        return end - begin, begin


@gluon.jit
def key_block(n, block_range, META: gl.constexpr):
    # (first key of the n-th block, whether the block mask calls the block full)
    if META.BLOCK_SIZE_Q > 0:
        return listed_tile(n, block_range, META.BLOCK_SIZE_KV, META.BLOCK_N)
    else:
        return (block_range + n) * META.BLOCK_N, False


@gluon.jit
def blocks_of_split(split, num_splits, num_blocks, block_range, META: gl.constexpr):
    # (number of blocks, block range) of a split's share of the keys; with a block mask, in whole blocks of that
    if META.BLOCK_SIZE_Q > 0:
        TILES: gl.constexpr = META.BLOCK_SIZE_KV // META.BLOCK_N
        first, last = share_of_split(num_blocks // TILES, split, num_splits)
        share = TileList(
            masked_ptr=block_range.masked_ptr + first,
            num_masked=block_range.num_masked - first,
            full_ptr=block_range.full_ptr,
            skip_from=0,
            skipped=0,
        )
        return (last - first) * TILES, share
    else:
        first, last = share_of_split(num_blocks, split, num_splits)
        return last - first, block_range + first


@gluon.jit
def blocks_of_queries(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr):
    # (number of blocks, block range) of the queries that see some of BLOCK_N keys from first_row on
    begin, end = _query_blocks(first_row, band, META)
    if META.BLOCK_SIZE_Q > 0:
        seen = TokenRange(begin=begin * META.BLOCK_M, end=gl.minimum(end * META.BLOCK_M, band.len_q))
        row = _row_of_lists(lists, b, h, first_row, META.BLOCK_SIZE_KV)
        cut = _cut_lists(lists, row, seen, META.HAS_RIGHT, META.BLOCK_SIZE_Q, META)
        return _tiles_of_lists(cut, lists, row, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return end - begin, begin


@gluon.jit
def query_block(n, block_range, META: gl.constexpr):
    # (first query of the n-th block, whether the block mask calls the block full)
    if META.BLOCK_SIZE_Q > 0:
        return listed_tile(n, block_range, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return (block_range + n) * META.BLOCK_M, False


@gluon.jit
def blocks_of_consumer(m_start, num_blocks, block_range, band: SequenceBand, META: gl.constexpr):
    # (blocks to skip first, number of blocks, block range) of the keys that one consumer's queries, from m_start on, see, among
    # those of the whole work tile. The last blocks come first.
    if not META.SKIPS:
        return 0, num_blocks, block_range
    else:
        begin = block_range
        end = block_range + num_blocks
        if META.HAS_RIGHT:
            last = gl.cdiv(gl.maximum(m_start + ROWS // META.GROUP + band.shift + band.right, 0), META.BLOCK_N)
            end = gl.minimum(gl.maximum(last, block_range), end)
        if META.HAS_LEFT:
            left = gl.maximum(m_start + band.shift - band.left, 0) // META.BLOCK_N
            begin = gl.minimum(gl.maximum(left, block_range), end)
        if META.HAS_IDLE:
            end = gl.where(m_start < band.len_q, end, begin)
        return block_range + num_blocks - end, end - begin, begin
