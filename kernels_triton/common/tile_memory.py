"""Loads and stores of tiles of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    pointer, offsets, first, num_rows, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    # Loads columns COLUMN .. COLUMN + WIDTH of the rows at `offsets` from `pointer`. `first` is the first row's number in its
    # sequence. The result is 0 past HEAD_DIM and, with CHECK_ROWS, from row num_rows on.
    columns = COLUMN + tl.arange(0, WIDTH)
    pointers = pointer + (offsets[:, None] + columns[None, :])
    inside = (first + tl.arange(0, offsets.shape[0]) < num_rows)[:, None]
    if CHECK_ROWS and COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=inside & (columns < HEAD_DIM)[None, :], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(pointer, tile, offsets, first, num_rows, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    columns = COLUMN + tl.arange(0, WIDTH)
    inside = (first + tl.arange(0, offsets.shape[0]) < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointer + (offsets[:, None] + columns[None, :]), tile.to(pointer.dtype.element_ty), mask=inside)
