"""Iteration over the lists of a block mask (`problem.BlockLists`) inside kernels: the tiles that a block sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def blocks_before(pointer, count, bound, SIZE: tl.constexpr):
    # Returns how many of `count` ascending blocks of SIZE begin before `bound`. The search tries the last block first, because
    # usually all do.
    low = count * 0
    high = count
    while low < high:
        middle = tl.where((low == 0) & (high == count), high - 1, (low + high) // 2)
        is_before = tl.load(pointer + middle) * SIZE < bound
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def list_from(indices_ptr, row, list_length, skipped):
    # Returns the pointer to a row's list without its first `skipped` blocks
    return indices_ptr + tl.cast(row, tl.int64) * list_length + skipped


@triton.jit
def cut_list(pointer, count, begin, end, SIZE: tl.constexpr, HAS_BEFORE: tl.constexpr, META: tl.constexpr):
    # Returns (number of a list's blocks before begin .. end, number of blocks that intersect it); end is at most the length
    skipped = count * 0
    if not META.LISTS_ARE_CUT:
        count = blocks_before(pointer, count, end, SIZE)
    if HAS_BEFORE and not META.LISTS_ARE_CUT:
        skipped = blocks_before(pointer, count, begin - SIZE + 1, SIZE)
        count -= skipped
    return skipped, count


class ListedBlocks(NamedTuple):
    """The blocks that a block of rows sees, by a row of a block mask's lists and the band, inside a kernel."""

    masked_ptr: Any
    num_masked: Any
    full_ptr: Any
    first_inside: Any  # first_inside .. last_inside: the full blocks that neither the band nor the end cuts
    last_inside: Any
    num_tiles: Any  # tiles of all other blocks
    num_full_tiles: Any  # tiles of the blocks first_inside .. last_inside


@triton.jit
def load_block_lists(lists, row, visible, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_BEFORE: tl.constexpr, META: tl.constexpr):
    # visible: a `band.VisibleRange`
    pointer = list_from(lists.indices_ptr, row, lists.length, 0)
    count = tl.load(lists.counts_ptr + row)
    skipped, num_masked = cut_list(pointer, count, visible.begin, visible.end, SIZE, HAS_BEFORE, META)
    masked_ptr = list_from(lists.indices_ptr, row, lists.length, skipped)
    pointer = list_from(lists.full_indices_ptr, row, lists.length, 0)
    count = tl.load(lists.full_counts_ptr + row)
    skipped, num_full = cut_list(pointer, count, visible.begin, visible.end, SIZE, HAS_BEFORE, META)
    full_ptr = list_from(lists.full_indices_ptr, row, lists.length, skipped)
    last = blocks_before(full_ptr, num_full, visible.full_end - SIZE + 1, SIZE)
    first = last * 0
    if HAS_BEFORE:
        first = blocks_before(full_ptr, last, visible.full_begin, SIZE)
    tiles: tl.constexpr = SIZE // BLOCK
    return ListedBlocks(
        masked_ptr=masked_ptr,
        num_masked=num_masked,
        full_ptr=full_ptr,
        first_inside=first,
        last_inside=last,
        num_tiles=(num_masked + num_full - last + first) * tiles,
        num_full_tiles=(last - first) * tiles,
    )


class TileList(NamedTuple):
    """The blocks of a loop over tiles: the masked ones, then the full ones without `skipped` of them from `skip_from` on."""

    masked_ptr: tl.tensor
    num_masked: tl.tensor
    full_ptr: tl.tensor
    skip_from: int
    skipped: int


@triton.jit
def full_tiles(blocks):
    # The fully visible blocks.
    return TileList(masked_ptr=blocks.masked_ptr, num_masked=0, full_ptr=blocks.full_ptr, skip_from=0, skipped=blocks.first_inside)


@triton.jit
def other_tiles(blocks):
    return TileList(
        masked_ptr=blocks.masked_ptr,
        num_masked=blocks.num_masked,
        full_ptr=blocks.full_ptr,
        skip_from=blocks.first_inside,
        skipped=blocks.last_inside - blocks.first_inside,
    )


class TileRange(NamedTuple):
    """The tiles of a loop: rows `begin` to `end`, or with a block mask tiles number `begin` to `end` of `listed`.

    Without a block mask `listed` is any number, because a function returns no None in a tuple with Triton 3.6.
    """

    begin: tl.tensor
    end: tl.tensor
    listed: Any


@triton.jit
def key_lists(lists, b, h, first_row, visible, META: tl.constexpr):
    # Returns the blocks of keys that BLOCK_M queries see.
    row = b * lists.stride_b + h * lists.stride_h + first_row // META.BLOCK_SIZE_Q
    return load_block_lists(lists, row, visible, META.BLOCK_SIZE_KV, META.BLOCK_N, META.HAS_LEFT, META)


@triton.jit
def query_lists(lists, b, h, first_column, visible, META: tl.constexpr):
    # Returns the blocks of queries that see BLOCK_N keys.
    row = b * lists.stride_b + h * lists.stride_h + first_column // META.BLOCK_SIZE_KV
    return load_block_lists(lists, row, visible, META.BLOCK_SIZE_Q, META.BLOCK_M, META.HAS_RIGHT, META)


@triton.jit
def _one_loop(visible, blocks):
    if blocks is None:
        return TileRange(begin=visible.begin, end=visible.end, listed=visible.begin)
    else:
        masked_ptr, full_ptr = blocks.masked_ptr, blocks.full_ptr
        listed = TileList(masked_ptr=masked_ptr, num_masked=blocks.num_masked, full_ptr=full_ptr, skip_from=0, skipped=0)
        return TileRange(begin=0, end=blocks.num_tiles + blocks.num_full_tiles, listed=listed)


@triton.jit
def every_tile(visible, lists, b, h, first_row, META: tl.constexpr):
    # Returns all tiles of keys that BLOCK_M queries see.
    return _one_loop(visible, key_lists(lists, b, h, first_row, visible, META) if META.BLOCK_SIZE_Q > 0 else None)


@triton.jit
def every_tile_of_queries(visible, lists, b, h, first_column, META: tl.constexpr):
    # Returns all tiles of queries that see BLOCK_N keys.
    return _one_loop(visible, query_lists(lists, b, h, first_column, visible, META) if META.BLOCK_SIZE_Q > 0 else None)


class Loops(NamedTuple):
    """The tiles of the other side that a block of rows sees, for three loops over a `TileRange`, inside a kernel."""

    first: Any  # the tiles that the band's first side cuts; with a block mask it is not used
    full: TileRange  # the tiles that every row sees, which need no mask
    rest: TileRange  # the tiles that the band's other side or the end cuts; with a block mask, all that are not full


@triton.jit
def _loops(visible, blocks):
    if blocks is None:
        unused = visible.begin
        first = TileRange(begin=visible.begin, end=visible.full_begin, listed=unused)
        full = TileRange(begin=visible.full_begin, end=visible.full_end, listed=unused)
        return Loops(first=first, full=full, rest=TileRange(begin=visible.full_end, end=visible.end, listed=unused))
    else:
        full = TileRange(begin=0, end=blocks.num_full_tiles, listed=full_tiles(blocks))
        return Loops(first=full, full=full, rest=TileRange(begin=0, end=blocks.num_tiles, listed=other_tiles(blocks)))


@triton.jit
def key_loops(visible, lists, b, h, first_row, META: tl.constexpr):
    # For the queries from first_row on.
    return _loops(visible, key_lists(lists, b, h, first_row, visible, META) if META.BLOCK_SIZE_Q > 0 else None)


@triton.jit
def query_loops(visible, lists, b, h, first_column, META: tl.constexpr):
    # For the keys from first_column on.
    return _loops(visible, query_lists(lists, b, h, first_column, visible, META) if META.BLOCK_SIZE_Q > 0 else None)


@triton.jit
def loops_in_order(visible, lists, b, h, first_row, META: tl.constexpr):
    # Returns the tiles of `visible` in one loop, in their order. lists: from `BlockLists.in_order`.
    SIZE: tl.constexpr = META.BLOCK_SIZE_KV
    BLOCK: tl.constexpr = META.BLOCK_N
    row = b * lists.stride_b + h * lists.stride_h + first_row // META.BLOCK_SIZE_Q
    pointer = list_from(lists.indices_ptr, row, lists.length, 0)
    count = tl.load(lists.counts_ptr + row)
    skipped, count = cut_list(pointer, count, visible.begin, visible.end, SIZE, True, META)
    pointer += skipped
    begin = count * 0
    end = begin
    if count > 0:  # a block of the mask may begin before `visible`, and end after it
        begin = tl.maximum(visible.begin - tl.load(pointer) * SIZE, 0) // BLOCK
        end = count * (SIZE // BLOCK) - tl.maximum((tl.load(pointer + count - 1) + 1) * SIZE - visible.end, 0) // BLOCK
    full_ptr = list_from(lists.full_indices_ptr, row, lists.length, skipped)
    listed = TileList(masked_ptr=pointer, num_masked=count, full_ptr=full_ptr, skip_from=0, skipped=0)
    none = TileRange(begin=0, end=0, listed=listed)
    return Loops(first=none, full=none, rest=TileRange(begin=begin, end=end, listed=listed))


@triton.constexpr_function
def first_loop(HAS_LEFT, BLOCK_SIZE_Q):
    """Returns the place in `Loops` of the first loop over keys that may have tiles."""
    return 0 if HAS_LEFT and BLOCK_SIZE_Q == 0 else 1


@triton.jit
def listed_tile(t, listed, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_IN_ORDER: tl.constexpr = False):
    # Returns (first row of tile t of a `TileList`, whether its block is full). If SIZE is 0 there is no block mask: tile t then
    # begins at row t. IS_IN_ORDER: the list is from `loops_in_order`.
    if SIZE == 0:
        return t, False
    elif IS_IN_ORDER:
        tiles_of_block: tl.constexpr = SIZE // BLOCK
        place = t // tiles_of_block
        return tl.load(listed.masked_ptr + place) * SIZE + t % tiles_of_block * BLOCK, tl.load(listed.full_ptr + place) != 0
    else:
        tiles: tl.constexpr = SIZE // BLOCK
        block = t // tiles
        is_full = block >= listed.num_masked
        place = block - listed.num_masked
        place += tl.where(place >= listed.skip_from, listed.skipped, 0)
        pointer = tl.where(is_full, listed.full_ptr + place, listed.masked_ptr + block)
        return tl.load(pointer) * SIZE + t % tiles * BLOCK, is_full
