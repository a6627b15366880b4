"""Copies of rows to shared memory by cp.async. A row past the end is the last row again, so that copies need no mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Pages, Parts, Rows
from flexattn.kernels_triton.gluon.forward_rows import rows_and_heads
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile
from flexattn.kernels_triton.mma.arguments import rows_layout
from flexattn.kernels_triton.runtime.gluon_names import load_elements


class Head(NamedTuple):
    """The keys, or the values, of one head and sequence in global memory."""

    x: Rows
    base: Any  # a pointer to the first key
    b: Any
    length: Any
    pages: Pages | None


@gluon.jit
def _copy_rows(tile, pointers, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr):
    # Copies the columns of a part, from FIRST on, of the rows at `pointers`; columns past the head dim are zeros
    WIDTH: gl.constexpr = tile.shape[1]
    columns = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    places = pointers[:, None] + columns[None, :]
    if FIRST + WIDTH > HEAD_DIM:
        inside = gl.full(tile.shape, True, gl.int1, layout=LAYOUT) & (columns < HEAD_DIM)[None, :]
        load_elements(tile, places, mask=inside)
    else:
        load_elements(tile, places)


@gluon.jit
def _copy_part_of_queries(x: Rows, tile, FIRST: gl.constexpr, received: ReceivedTile, META: gl.constexpr):
    LAYOUT: gl.constexpr = rows_layout(tile.shape[1], META.WARPS)
    work, len_q = received.tile, received.band.len_q
    rows, heads = rows_and_heads(work.first_row, work.h, len_q, gl.SliceLayout(1, LAYOUT), META)
    pointers = row_pointer(x, work.b, heads, received.start_q + gl.minimum(rows, len_q - 1), META)
    _copy_rows(tile, pointers, FIRST, META.HEAD_DIM_QK, LAYOUT)


@gluon.jit
def copy_queries(x: Rows, tiles: Parts, received: ReceivedTile, META: gl.constexpr):
    _copy_part_of_queries(x, tiles.first.index(0), 0, received, META)
    if META.QK1 > 0:
        _copy_part_of_queries(x, tiles.second.index(0), META.QK0, received, META)


@gluon.jit
def _copy_part_of_keys(head: Head, tile, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, column, META: gl.constexpr):
    LAYOUT: gl.constexpr = rows_layout(tile.shape[1], META.WARPS)
    x, pages = head.x, head.pages
    rows = gl.minimum(gl.arange(0, META.BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), head.length - 1 - column)
    if META.HAS_PAGES:  # ids out of range are clamped
        rows = column + rows
        page = gl.load(pages.table_ptr + head.b.to(gl.int64) * pages.stride + rows // pages.page_size)
        page = gl.minimum(gl.maximum(page, 0), pages.num_pages - 1).to(gl.int64)
        pointers = head.base + (page * x.stride_b + (rows % pages.page_size).to(gl.int64) * x.stride_s) * META.ALIGN
    else:  # one 64-bit number for the block, and 32 bits for each row
        pointers = (head.base + column.to(gl.int64) * x.stride_s * META.ALIGN) + rows * (x.stride_s * META.ALIGN)
    _copy_rows(tile, pointers, FIRST, HEAD_DIM, LAYOUT)


@gluon.jit
def copy_keys(head: Head, tiles: Parts, slot, column, FIRST_WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, META: gl.constexpr):
    # Copies the block of keys, or of values, at `column`
    _copy_part_of_keys(head, tiles.first.index(slot), 0, HEAD_DIM, column, META)
    if HEAD_DIM > FIRST_WIDTH:
        _copy_part_of_keys(head, tiles.second.index(slot), FIRST_WIDTH, HEAD_DIM, column, META)


@gluon.jit
def _copy_part_of_block(x: Rows, tile, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, base, left, META: gl.constexpr):
    LAYOUT: gl.constexpr = rows_layout(tile.shape[1], META.WARPS)
    rows = gl.minimum(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT)), left - 1)
    _copy_rows(tile, base + rows * (x.stride_s * META.ALIGN), FIRST, HEAD_DIM, LAYOUT)


@gluon.jit
def copy_block(x: Rows, tiles: Parts, slot, FIRST_WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, base, left, META: gl.constexpr):
    # Copies rows of one head from `base` on, of which `left` exist
    _copy_part_of_block(x, tiles.first.index(slot), 0, HEAD_DIM, base, left, META)
    if HEAD_DIM > FIRST_WIDTH:
        _copy_part_of_block(x, tiles.second.index(slot), FIRST_WIDTH, HEAD_DIM, base, left, META)


@gluon.jit
def keep_until_here(tiles: Parts, SECOND: gl.constexpr):
    # If a mod ignores its score, the compiler removes all loads of a tile, but not its copies, which may still be under way.
    # Without this use, other tiles would have the same memory.
    tiles.first._keep_alive()
    if SECOND > 0:
        tiles.second._keep_alive()
