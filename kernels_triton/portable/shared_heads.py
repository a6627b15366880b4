"""A forward's tile that several query heads share: its rows are the first query of each head, then the second."""

from __future__ import annotations

import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_steps


# Returns the query of each row of a forward's tile.
@triton.jit
def queries_of_tile(first_row, META: tl.constexpr):
    rows = tl.arange(0, META.BLOCK_M)
    if META.GROUP > 1:
        rows = rows // META.GROUP
    return first_row + rows


# Returns the head of each row of a forward's tile, or one head for all rows.
@triton.jit
def heads_of_tile(h, META: tl.constexpr):
    if META.GROUP > 1:
        return h + _head_in_tile(META)
    else:
        return h


# Rows that belong to no head repeat the last head: the same numbers, written to the same addresses.
@triton.jit
def _head_in_tile(META: tl.constexpr):
    head = tl.arange(0, META.BLOCK_M) % META.GROUP
    if META.HEADS < META.GROUP:
        head = tl.minimum(head, META.HEADS - 1)
    return head


# Returns the offsets of the rows of a forward's tile from its first query and head.
@triton.jit
def offsets_of_tile(x, META: tl.constexpr):
    if META.GROUP > 1:
        rows = tl.arange(0, META.BLOCK_M).to(tl.int64)
        return (rows // META.GROUP * x.stride_s + _head_in_tile(META).to(tl.int64) * x.stride_h) * META.ALIGN
    else:
        return row_steps(x.stride_s, META.BLOCK_M, META)[1]
