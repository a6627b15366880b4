"""Key blocks that a query tile sees, and query blocks that see a key tile: by the band, or by a block mask.

Both are returned as (number of blocks, block range). With only the band, the block range is the first block; with a block mask it
is a `TileList`. `key_block` and `query_block` return a block of it.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import BlockMaskLists
from flexattn.kernels_triton.common.block_lists import TileList, cut_list, list_from, listed_tile
from flexattn.kernels_triton.common.split_ranges import share_of_split
from flexattn.kernels_triton.gluon.masking import SequenceBand


class Seen(NamedTuple):
    """Constants of the blocks that a tile sees: keys that its queries see, or queries that see its keys."""

    ARE_KEYS: bool
    TILE: int  # tokens of the tile
    BLOCK: int  # tokens of a block
    MASK_TILE: int  # tokens of the block mask's blocks on the tile's side
    MASK_BLOCK: int  # tokens of the block mask's blocks on the other side
    HAS_BEGIN: bool  # the band may hide tokens before the visible ones


@gluon.constexpr_function
def _keys_seen(META, QUERIES=0):
    return Seen(
        ARE_KEYS=True,
        TILE=QUERIES or META.BLOCK_M,
        BLOCK=META.BLOCK_N,
        MASK_TILE=META.BLOCK_SIZE_Q,
        MASK_BLOCK=META.BLOCK_SIZE_KV,
        HAS_BEGIN=META.HAS_LEFT,
    )


@gluon.constexpr_function
def _queries_seen(META):
    return Seen(
        ARE_KEYS=False,
        TILE=META.BLOCK_N,
        BLOCK=META.BLOCK_M,
        MASK_TILE=META.BLOCK_SIZE_KV,
        MASK_BLOCK=META.BLOCK_SIZE_Q,
        HAS_BEGIN=META.HAS_RIGHT,
    )


@gluon.jit
def _blocks_in_band(first_row, band: SequenceBand, SEEN: gl.constexpr, META: gl.constexpr):
    # Returns (first, end) of the blocks that some row of the tile from first_row on may see, or that may see it; first <= end.
    # Queries are keys with a mirrored band, but with one formula for both the fused backward with a window gets different machine
    # code.
    begin = 0
    if SEEN.ARE_KEYS:
        end = gl.cdiv(band.len_kv, SEEN.BLOCK)
        if META.HAS_RIGHT:
            end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + SEEN.TILE + band.shift + band.right, 0), SEEN.BLOCK))
        if META.HAS_LEFT:
            begin = gl.minimum(gl.maximum(first_row + band.shift - band.left, 0) // SEEN.BLOCK, end)
        return begin, end
    else:
        end = gl.cdiv(band.len_q, SEEN.BLOCK)
        if META.HAS_RIGHT:
            begin = gl.minimum(gl.maximum(first_row - band.shift - band.right, 0) // SEEN.BLOCK, end)
        if META.HAS_LEFT:
            end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + SEEN.TILE - band.shift + band.left, 0), SEEN.BLOCK))
        return begin, gl.maximum(begin, end)


@gluon.jit
def _row_of_lists(lists: BlockMaskLists, b, h, first_row, SIZE: gl.constexpr):
    # Returns the list of the block of SIZE tokens that contains first_row
    return b * lists.stride_b + h * lists.stride_h + first_row // SIZE


class ListCut(NamedTuple):
    """The part of a row of a block mask's lists that intersects the band."""

    num_masked: gl.tensor
    num_full: gl.tensor
    masked_before: gl.tensor  # blocks of the masked list before this part
    full_before: gl.tensor


@gluon.jit
def _cut_lists(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, SEEN: gl.constexpr, META: gl.constexpr):
    first_block, end_block = _blocks_in_band(first_row, band, SEEN, META)
    begin = first_block * SEEN.BLOCK
    end = gl.minimum(end_block * SEEN.BLOCK, band.len_kv if SEEN.ARE_KEYS else band.len_q)
    row = _row_of_lists(lists, b, h, first_row, SEEN.MASK_TILE)
    SIZE: gl.constexpr = SEEN.MASK_BLOCK
    IS_CUT: gl.constexpr = SEEN.HAS_BEGIN
    pointer = list_from(lists.indices_ptr, row, lists.length, 0)
    before, num_masked = cut_list(pointer, gl.load(lists.counts_ptr + row), begin, end, SIZE, IS_CUT, META)
    pointer = list_from(lists.full_indices_ptr, row, lists.length, 0)
    full_before, num_full = cut_list(pointer, gl.load(lists.full_counts_ptr + row), begin, end, SIZE, IS_CUT, META)
    return ListCut(num_masked=num_masked, num_full=num_full, masked_before=before, full_before=full_before)


@gluon.jit
def _blocks_of_lists(cut: ListCut, first_row, b, h, lists: BlockMaskLists, SEEN: gl.constexpr):
    # Returns (number of blocks, TileList)
    row = _row_of_lists(lists, b, h, first_row, SEEN.MASK_TILE)
    masked_ptr = list_from(lists.indices_ptr, row, lists.length, cut.masked_before)
    full_ptr = list_from(lists.full_indices_ptr, row, lists.length, cut.full_before)
    tiles = TileList(masked_ptr=masked_ptr, num_masked=cut.num_masked, full_ptr=full_ptr, skip_from=0, skipped=0)
    return (cut.num_masked + cut.num_full) * (SEEN.MASK_BLOCK // SEEN.BLOCK), tiles


@gluon.jit
def _blocks_seen(first_row, b, h, cut, band: SequenceBand, lists: BlockMaskLists, SEEN: gl.constexpr, META: gl.constexpr):
    # Returns (number of blocks, block range). cut: with a block mask, the result of `_cut_lists`
    if META.BLOCK_SIZE_Q > 0:
        return _blocks_of_lists(cut, first_row, b, h, lists, SEEN)
    else:
        begin, end = _blocks_in_band(first_row, band, SEEN, META)
        return end - begin, begin


@gluon.jit
def _block(n, block_range, SEEN: gl.constexpr, META: gl.constexpr):
    # Returns (first token of the n-th block, whether the block mask calls the block full)
    if META.BLOCK_SIZE_Q > 0:
        return listed_tile(n, block_range, SEEN.MASK_BLOCK, SEEN.BLOCK)
    else:
        return (block_range + n) * SEEN.BLOCK, False


@gluon.jit
def cut_key_lists(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr):
    # Makes the reads of a block mask that depend on each other; `blocks_by_lists` does the rest.
    return _cut_lists(first_row, b, h, band, lists, _keys_seen(META), META)


@gluon.jit
def blocks_by_lists(cut: ListCut, first_row, b, h, lists: BlockMaskLists, META: gl.constexpr):
    # `blocks_of_keys` with a block mask
    return _blocks_of_lists(cut, first_row, b, h, lists, _keys_seen(META))


@gluon.jit
def blocks_of_keys(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # Returns (number of blocks, block range) of the keys that some of BLOCK_M (or QUERIES) queries from first_row on see
    SEEN: gl.constexpr = _keys_seen(META, QUERIES)
    cut = ()
    if META.BLOCK_SIZE_Q > 0:
        cut = _cut_lists(first_row, b, h, band, lists, SEEN, META)
    return _blocks_seen(first_row, b, h, cut, band, lists, SEEN, META)


@gluon.jit
def cut_query_lists(first_row, b, h, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr):
    # Makes the reads of a block mask for `blocks_of_queries`
    return _cut_lists(first_row, b, h, band, lists, _queries_seen(META), META)


@gluon.jit
def blocks_of_queries(first_row, b, h, cut, band: SequenceBand, lists: BlockMaskLists, META: gl.constexpr):
    # Returns (number of blocks, block range) of the queries that see some of BLOCK_N keys from first_row on. cut: from
    # `cut_query_lists`
    return _blocks_seen(first_row, b, h, cut, band, lists, _queries_seen(META), META)


@gluon.jit
def key_block(n, block_range, META: gl.constexpr):
    # Returns (first key of the n-th block, whether the block mask calls the block full)
    return _block(n, block_range, _keys_seen(META), META)


@gluon.jit
def query_block(n, block_range, META: gl.constexpr):
    # Returns (first query of the n-th block, whether the block mask calls the block full)
    return _block(n, block_range, _queries_seen(META), META)


@gluon.jit
def blocks_of_split(split, num_splits, num_blocks, block_range, META: gl.constexpr):
    # Returns (number of blocks, block range) of a split's share of the keys; with a block mask, whole blocks of it
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
    elif META.PIECE > 0:
        PIECE: gl.constexpr = META.PIECE // META.BLOCK_N
        first = gl.minimum(gl.maximum(split * PIECE - block_range, 0), num_blocks)
        last = gl.minimum(gl.maximum((split + 1) * PIECE - block_range, first), num_blocks)
        return last - first, block_range + first
    else:
        first, last = share_of_split(num_blocks, split, num_splits)
        return last - first, block_range + first


@gluon.jit
def blocks_of_consumer(m_start, num_blocks, block_range, band: SequenceBand, META: gl.constexpr):
    # Returns (blocks to skip first, number of blocks, block range) of the keys that one consumer's queries see, from m_start on.
    # They are a part of the work tile's blocks. Iterations run from the last block down.
    if not META.SKIPS:
        return 0, num_blocks, block_range
    else:
        QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
        begin = block_range
        end = block_range + num_blocks
        if META.HAS_RIGHT:
            last = gl.cdiv(gl.maximum(m_start + QUERIES + band.shift + band.right, 0), META.BLOCK_N)
            end = gl.minimum(gl.maximum(last, block_range), end)
        if META.HAS_LEFT:
            left = gl.maximum(m_start + band.shift - band.left, 0) // META.BLOCK_N
            begin = gl.minimum(gl.maximum(left, block_range), end)
        if META.HAS_IDLE:
            end = gl.where(m_start < band.len_q, end, begin)
        return block_range + num_blocks - end, end - begin, begin
