"""Loads of key blocks from pages: the copy engine copies a page, or the largest part of it that divides a block, at a time.

Only a row's address differs from a dense tensor: positions, masks and lengths count through a sequence's pages.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.common.arguments import Pages
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.descriptors import Step, load_rows
from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage

_LANES = gl.constexpr(32)  # threads of the loading warp, at least as many as copies of a block
_LANE_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class KeyBlock(NamedTuple):
    """A block of keys of one sequence and head: from `first` on, of a sequence of `length` keys."""

    h_kv: gl.tensor
    first: gl.tensor
    length: gl.tensor
    page_size: gl.tensor
    ids: gl.tensor  # result of `page_ids`


@gluon.jit
def page_ids(b, first, length, pages: Pages, META: gl.constexpr):
    # Returns the page of each copy of the key block at `first`, one in each thread. It takes one load, and nothing waits for it if
    # it is issued a block ahead. A copy past the sequence's end has no entry of its own; ids out of range are clamped.
    copy = gl.minimum(gl.arange(0, _LANES, layout=_LANE_LAYOUT), META.BLOCK_N // META.PAGE_ROWS - 1)
    last = gl.maximum(length - 1, 0) // pages.page_size
    place = gl.minimum((first + copy * META.PAGE_ROWS) // pages.page_size, last)
    page = gl.load(pages.table_ptr + b.to(gl.int64) * pages.stride + place)
    return gl.minimum(gl.maximum(page, 0), pages.num_pages - 1)


@gluon.jit
def _page_of_copy(copy: gl.constexpr, ids):
    return gl.sum(gl.where(gl.arange(0, _LANES, layout=_LANE_LAYOUT) == copy, ids, 0), 0)


@gluon.jit
def _load_whole_pages(descriptor, step: Step, block: KeyBlock, COLUMN: gl.constexpr, barrier, tile, META: gl.constexpr):
    # Each copy loads a page that is completely inside the sequence.
    ROWS: gl.constexpr = META.PAGE_ROWS
    for copy in gl.static_range(META.BLOCK_N // ROWS):
        page = _page_of_copy(copy, block.ids)
        rows = tile.slice(copy * ROWS, ROWS, 2)
        load_rows(descriptor, page * step.tokens, ROWS, 0, block.h_kv + page * step.heads, COLUMN, barrier, rows)


@gluon.jit
def _load_any_pages(descriptor, step: Step, block: KeyBlock, COLUMN: gl.constexpr, barrier, tile, META: gl.constexpr):
    # Positions in a page are counted, because a division for each copy takes longer than the copy.
    ROWS: gl.constexpr = META.PAGE_ROWS
    page_size = block.page_size
    first_key = block.first // page_size * page_size
    in_page = block.first - first_key
    remaining = block.length - first_key  # keys of the sequence from the page's first key on
    for copy in gl.static_range(META.BLOCK_N // ROWS):
        page = _page_of_copy(copy, block.ids)
        valid = gl.minimum(gl.maximum(remaining, 0), page_size)
        rows = tile.slice(copy * ROWS, ROWS, 2)
        load_rows(descriptor, page * step.tokens, valid, in_page, block.h_kv + page * step.heads, COLUMN, barrier, rows)
        in_page += ROWS
        is_over = in_page == page_size
        in_page = gl.where(is_over, 0, in_page)
        remaining -= gl.where(is_over, page_size, 0)


@gluon.jit
def load_pages(descriptor, step: Step, block: KeyBlock, COLUMN: gl.constexpr, barrier, tile, META: gl.constexpr):
    # Many small copies are bound by the loading warp's instructions, and whole pages need the fewest. With wide rows the copies are
    # large, and two code paths would lack registers.
    if META.QK0 <= 256 or META.BLOCK_N == META.PAGE_ROWS:
        if (block.page_size == META.PAGE_ROWS) & (block.first + META.BLOCK_N <= block.length):
            _load_whole_pages(descriptor, step, block, COLUMN, barrier, tile, META)
        else:
            _load_any_pages(descriptor, step, block, COLUMN, barrier, tile, META)
    else:
        _load_any_pages(descriptor, step, block, COLUMN, barrier, tile, META)


@gluon.jit
def load_key_pages(
    descriptors: Pair, tiles: Pair, step: Step, block: KeyBlock, n_block, barriers: ForwardBarriers, META: gl.constexpr
):
    # Loads k of the n_block-th key block of this program
    stage = Stage(n_block, META.STAGES)
    index = pipeline.index(stage)
    full = barriers.k_full.index(index)
    pipeline.wait_empty(barriers.k_empty, stage)
    mbarrier.expect(full, 2 * META.BLOCK_N * (META.QK0 + META.QK1))
    load_pages(descriptors.first, step, block, 0, full, tiles.first.index(index), META)
    if META.QK1 > 0:
        load_pages(descriptors.second, step, block, META.QK0, full, tiles.second.index(index), META)


@gluon.jit
def load_value_pages(descriptors, tiles, step: Step, block: KeyBlock, n_block, barriers: ForwardBarriers, META: gl.constexpr):
    # Loads v of the same block
    stage = Stage(n_block, META.STAGES)
    index = pipeline.index(stage)
    full = barriers.v_full.index(index)
    pipeline.wait_empty(barriers.v_empty, stage)
    mbarrier.expect(full, 2 * META.BLOCK_N * META.V0)
    load_pages(descriptors, step, block, 0, full, tiles.index(index), META)
