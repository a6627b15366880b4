"""Addresses of rows in tensors and in pages of a cache."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


# Returns (pointer, offsets) of BLOCK_N keys of a sequence from `first` on, a multiple of BLOCK_N. base: the first key of page
# 0. Page ids are clamped, so they are inside the tensor whatever the table contains, and no entry past the sequence is read.
# PAGE_ROWS keys are contiguous in a page, so one entry is read for all of them.
@triton.jit
def paged_rows(pages, x, base, b, first, num_rows, META: tl.constexpr):
    BLOCK_N: tl.constexpr = META.BLOCK_N
    PAGE_ROWS: tl.constexpr = META.PAGE_ROWS
    table_ptr = pages.table_ptr + tl.cast(b, tl.int64) * pages.stride
    if PAGE_ROWS == BLOCK_N:
        page = tl.cast(_clamped(tl.load(table_ptr + first // pages.page_size), pages), tl.int64)
        offset = page * x.stride_b + tl.cast(first % pages.page_size, tl.int64) * x.stride_s
        return base + offset * META.ALIGN, row_steps(x.stride_s, BLOCK_N, META)[1]
    else:
        rows = first + tl.arange(0, BLOCK_N // PAGE_ROWS) * PAGE_ROWS
        page = _clamped(tl.load(table_ptr + rows // pages.page_size, mask=rows < num_rows, other=0), pages)
        offsets = tl.cast(page, tl.int64) * x.stride_b + tl.cast(rows % pages.page_size, tl.int64) * x.stride_s
        if PAGE_ROWS > 1:
            offsets = offsets[:, None] + tl.arange(0, PAGE_ROWS).to(tl.int64)[None, :] * x.stride_s
            offsets = tl.reshape(offsets, [BLOCK_N])
        return base, offsets * META.ALIGN


@triton.jit
def _clamped(page, pages):
    return tl.minimum(tl.maximum(page, 0), pages.num_pages - 1)


# Strides are passed divided by ALIGN, so the compiler knows their divisor without compiling for their values.
@triton.jit
def row_pointer(x, b, h, row, META: tl.constexpr):
    offset = tl.cast(b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_h + tl.cast(row, tl.int64) * x.stride_s
    return x.ptr + offset * META.ALIGN


# Returns (elements from one row to the next, offsets of a tile's rows from its first row). The offsets fit 32 bits unless the
# stride is very large. Then a tile's address is one 64-bit scalar, which a loop increments, and a 32-bit register for each row.
@triton.jit
def row_steps(stride_s, ROWS: tl.constexpr, META: tl.constexpr):
    step = tl.cast(stride_s, tl.int64) * META.ALIGN
    rows = tl.arange(0, ROWS)
    if META.WIDE_STRIDES:
        rows = rows.to(tl.int64)
    return step, rows * stride_s * META.ALIGN


class HeadRows(NamedTuple):
    """The rows of one head of a tensor, inside a kernel."""

    base: tl.tensor  # pointer to the first row of the sequence
    step: tl.tensor  # elements from one row to the next
    offsets: tl.tensor  # from a tile's first row to each of its rows


@triton.jit
def row_at(rows, row):
    return rows.base + tl.cast(row, tl.int64) * rows.step


# Returns (pointer, offsets) of a tile's rows from `row` on, which is at `pointer`. With 32 bits a thread keeps half as many
# registers for addresses.
@triton.jit
def rows_from(rows, pointer, row, META: tl.constexpr):
    if META.IS_NEAR:
        return rows.base, rows.offsets + row * tl.cast(rows.step, tl.int32)
    else:
        return pointer, rows.offsets
