"""The band of visible pairs: the blocks that a block of rows sees, and the mask of a tile.

A tile is [queries, keys] or [keys, queries]. Arguments `i` and `j` are positions within their sequence, in a shape that broadcasts
against the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class VisibleRange(NamedTuple):
    """The rows of the other side that a block of rows sees, inside a kernel: all but `end` are multiples of that side's block."""

    begin: int | tl.tensor
    full_begin: tl.tensor  # full_begin .. full_end: every row of the block sees all of these
    full_end: tl.tensor
    end: tl.tensor


# Rows first .. first + BLOCK of one side see row + shift - before .. row + shift + after of the other side; None: no limit.
@triton.jit
def _visible_range(first, BLOCK: tl.constexpr, STEP: tl.constexpr, length, shift, before, after):
    begin = 0
    full_begin = 0
    end = length
    full_end = length
    if before is not None:
        begin = tl.maximum(first + shift - before, 0) // STEP * STEP
        full_begin = tl.maximum(first + BLOCK - 1 + shift - before, 0)
    if after is not None:
        end = tl.minimum(length, first + BLOCK + shift + after)
        full_end = tl.minimum(length, first + 1 + shift + after)
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.cdiv(full_begin, STEP), tl.cdiv(end, STEP)) * STEP
    full_end = tl.maximum(tl.maximum(full_end, 0) // STEP * STEP, full_begin)
    return VisibleRange(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


# Returns the keys that BLOCK_M queries see.
@triton.jit
def visible_range_of_keys(first_row, len_kv, shift, band, META: tl.constexpr):
    before = band.left if META.HAS_LEFT else None
    after = band.right if META.HAS_RIGHT else None
    return _visible_range(first_row, META.BLOCK_M, META.BLOCK_N, len_kv, shift, before, after)


# Returns the queries that see BLOCK_N keys.
@triton.jit
def visible_range_of_queries(first_column, len_q, shift, band, META: tl.constexpr):
    before = band.right if META.HAS_RIGHT else None
    after = band.left if META.HAS_LEFT else None
    return _visible_range(first_column, META.BLOCK_N, META.BLOCK_M, len_q, -shift, before, after)


# For a tile [queries, keys]. The bounds are computed for each query, so an element costs one comparison a side.
@triton.jit
def visible_keys(i, j, len_kv, shift, band, META: tl.constexpr):
    last = len_kv - 1
    if META.HAS_RIGHT:
        last = tl.minimum(last, i + shift + band.right)
    visible = j <= last
    if META.HAS_LEFT:
        visible = visible & (j >= i + shift - band.left)
    return visible


# For a tile [keys, queries]; the bounds are computed for each key. Keys and queries past the end need no mask here: results of
# a key past the end are not stored, and a query past the end has probability 0.
@triton.jit
def visible_queries(i, j, shift, band, META: tl.constexpr):
    visible = i >= j - shift - band.right
    if META.HAS_LEFT:
        in_window = i <= j - shift + band.left
        visible = (visible & in_window) if META.HAS_RIGHT else in_window
    return visible
