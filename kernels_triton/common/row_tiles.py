"""Tiles of rows in kernels that recompute weights from lse: their loads and products, and the blocks that a block of rows sees."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Parts
from flexattn.kernels_triton.common.band import visible_range_of_keys, visible_range_of_queries
from flexattn.kernels_triton.common.block_lists import every_tile, every_tile_of_queries
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile


class Place(NamedTuple):
    """Some rows of a head of a sequence, inside a kernel: those from `first` on."""

    b: tl.tensor
    h: tl.tensor
    start: int | tl.tensor  # first token of the sequence
    first: tl.tensor
    length: tl.tensor  # tokens of the sequence


@triton.jit
def load_parts(x, place: Place, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    pointer = row_pointer(x, place.b, place.h, place.start + place.first, META)
    _, offsets = row_steps(x.stride_s, ROWS, META)
    part0 = load_tile(pointer, offsets, place.first, place.length, 0, D0, D, True)
    part1 = part0
    if D1 > 0:
        part1 = load_tile(pointer, offsets, place.first, place.length, D0, D1, D, True)
    return Parts(first=part0, second=part1)


@triton.jit
def store_parts(x, parts: Parts, place: Place, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    pointer = row_pointer(x, place.b, place.h, place.start + place.first, META)
    _, offsets = row_steps(x.stride_s, parts.first.shape[0], META)
    store_tile(pointer, parts.first, offsets, place.first, place.length, 0, D0, D)
    if D1 > 0:
        store_tile(pointer, parts.second, offsets, place.first, place.length, D0, D1, D)


@triton.jit
def load_qk(x, place: Place, ROWS: tl.constexpr, META: tl.constexpr):
    # Loads rows of q, of k or of their tangents.
    return load_parts(x, place, ROWS, META.QK0, META.QK1, META.HEAD_DIM_QK, META)


@triton.jit
def load_v(x, place: Place, ROWS: tl.constexpr, META: tl.constexpr):
    # Loads rows of v, of out or of their tangents.
    return load_parts(x, place, ROWS, META.V0, META.V1, META.HEAD_DIM_V, META)


@triton.jit
def _product(a, b, total, HAS_SECOND: tl.constexpr, META: tl.constexpr):
    if total is None:
        result = tl.dot(a.first, tl.trans(b.first), input_precision=META.PRECISION)
    else:
        result = tl.dot(a.first, tl.trans(b.first), total, input_precision=META.PRECISION)
    if HAS_SECOND:
        result = tl.dot(a.second, tl.trans(b.second), result, input_precision=META.PRECISION)
    return result


@triton.jit
def product(queries, keys, total, HAS_SECOND: tl.constexpr, BY_KEYS: tl.constexpr, META: tl.constexpr):
    # queries, keys: `Parts` of rows. Returns a tile of their products, added to `total` if that is a tile.
    if BY_KEYS:
        return _product(keys, queries, total, HAS_SECOND, META)
    else:
        return _product(queries, keys, total, HAS_SECOND, META)


@triton.jit
def keys_of_block(lists, head, first_row, inputs, META: tl.constexpr):
    # Returns the tiles of keys that a block of queries sees, a `TileRange`. They are for one loop, which masks each tile: a second
    # loop for tiles that need no mask makes ptxas serialise wgmma (C7515), and costs registers, which are scarce.
    visible = visible_range_of_keys(first_row, head.len_kv, head.shift, inputs.band, META)
    return every_tile(visible, lists, head.b, head.h, first_row, META)


@triton.jit
def queries_of_block(lists, head, n, inputs, META: tl.constexpr):
    # Returns the tiles of queries that see a block of keys, a `TileRange`.
    visible = visible_range_of_queries(n, head.len_q, head.shift, inputs.band, META)
    return every_tile_of_queries(visible, lists, head.b, head.h, n, META)
