"""How kernels walk the lists of a block mask (`problem.BlockLists`): which tiles a block sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocks_before(pointer, count, bound, SIZE: tl.constexpr):
    # How many of `count` ascending blocks of SIZE begin before `bound`, which most often is after all of them.
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
    # Where a row's list is, but for its first blocks
    return indices_ptr + tl.cast(row, tl.int64) * list_length + skipped


@triton.jit
def load_block_list(
    counts_ptr,
    indices_ptr,
    row,
    list_length,
    begin,
    end,
    SIZE: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    META: tl.constexpr,
):
    # (how many blocks of a row's list come before those that have something of begin .. end, how many these are); end is at most
    # the length
    pointer = list_from(indices_ptr, row, list_length, 0)
    count = tl.load(counts_ptr + row)
    skipped = count * 0
    if not META.LISTS_ARE_CUT:
        count = blocks_before(pointer, count, end, SIZE)
    if HAS_BEFORE and not META.LISTS_ARE_CUT:
        skipped = blocks_before(pointer, count, begin - SIZE + 1, SIZE)
        count -= skipped
    return skipped, count


@triton.jit
def load_block_lists(
    counts_ptr,
    indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    row,
    list_length,
    begin,
    full_begin,
    full_end,
    end,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    META: tl.constexpr,
):
    # With what `visible_range` says: the list of masked blocks and their number, the list of the full ones and which of these,
    # from the first to the last, neither the band nor the end cuts; and the number of tiles in all others, and in these.
    sides = (row, list_length, begin, end)
    skipped, num_masked = load_block_list(counts_ptr, indices_ptr, *sides, SIZE, HAS_BEFORE, META)
    masked_ptr = list_from(indices_ptr, row, list_length, skipped)
    skipped, num_full = load_block_list(full_counts_ptr, full_indices_ptr, *sides, SIZE, HAS_BEFORE, META)
    full_ptr = list_from(full_indices_ptr, row, list_length, skipped)
    last = blocks_before(full_ptr, num_full, full_end - SIZE + 1, SIZE)
    first = last * 0
    if HAS_BEFORE:
        first = blocks_before(full_ptr, last, full_begin, SIZE)
    tiles: tl.constexpr = SIZE // BLOCK
    return masked_ptr, num_masked, full_ptr, first, last, (num_masked + num_full - last + first) * tiles, (last - first) * tiles


@triton.jit
def listed_tile(t, masked_ptr, num_masked, full_ptr, skip_from, skipped, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # (where tile t begins, whether its block is full), counting first the masked blocks, then the full ones but `skipped` of them
    # from skip_from on.
    tiles: tl.constexpr = SIZE // BLOCK
    block = t // tiles
    is_full = block >= num_masked
    place = block - num_masked
    place += tl.where(place >= skip_from, skipped, 0)
    pointer = tl.where(is_full, full_ptr + place, masked_ptr + block)
    return tl.load(pointer) * SIZE + t % tiles * BLOCK, is_full
