"""Loads and stores of tiles of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Parts


# Loads columns COLUMN .. COLUMN + WIDTH of the rows at `offsets` from `pointer`. `first` is the first row's number in its
# sequence. The result is 0 past HEAD_DIM and, with CHECK_ROWS, from row num_rows on.
@triton.jit
def load_tile(
    pointer, offsets, first, num_rows, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK_ROWS: tl.constexpr
):
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


# Loads both parts of the head dim, 0 from row num_rows on.
@triton.jit
def load_parts(pointer, offsets, first, num_rows, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr):
    part0 = load_tile(pointer, offsets, first, num_rows, 0, WIDTH0, HEAD_DIM, True)
    part1 = part0
    if WIDTH1 > 0:
        part1 = load_tile(pointer, offsets, first, num_rows, WIDTH0, WIDTH1, HEAD_DIM, True)
    return Parts(first=part0, second=part1)


# Returns zeros in fp32 for sums
@triton.jit
def zero_parts(ROWS: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr):
    zeros = tl.zeros([ROWS, WIDTH0], tl.float32)
    return Parts(first=zeros, second=tl.zeros([ROWS, WIDTH1], tl.float32) if WIDTH1 > 0 else zeros)


class StoredRows(NamedTuple):
    """Rows of a result, inside a kernel."""

    pointer: tl.tensor  # to the first row
    offsets: tl.tensor  # from the first row to each row
    first: tl.tensor  # number of the first row in its sequence
    end: tl.tensor  # rows from here on are not stored
    is_real: Any  # whether a row has a token; other rows are stored as zeros. None: all rows before `end` have one


@triton.jit
def _store_part(rows, tile, scale, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    if scale is not None:
        tile *= scale
    if rows.is_real is not None:
        tile = tl.where(rows.is_real, tile, 0.0)
    store_tile(rows.pointer, tile, rows.offsets, rows.first, rows.end, COLUMN, WIDTH, HEAD_DIM)


# Stores both parts of the head dim in `StoredRows`, multiplied by `scale`; None: 1.
@triton.jit
def store_parts(rows, parts, scale, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr):
    _store_part(rows, parts.first, scale, 0, WIDTH0, HEAD_DIM)
    if WIDTH1 > 0:
        _store_part(rows, parts.second, scale, WIDTH0, WIDTH1, HEAD_DIM)
