"""The loading warp of the forwards, in 16 bits and in FP8: it draws work tiles, broadcasts them, and loads their q, k and v.

If keys are in pages, the copy engine copies a page, or the largest part of it that divides a block, at a time. Only a row's address
differs from a dense tensor: positions, masks and lengths count through a sequence's pages.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flexattn.kernels_triton.common.arguments import Pages
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.plan_pieces import entry_at, share_of_program
from flexattn.kernels_triton.common.sequences import sequence_of
from flexattn.kernels_triton.gluon import forward_work, pipeline
from flexattn.kernels_triton.gluon.block_ranges import cut_key_lists, key_block
from flexattn.kernels_triton.gluon.descriptors import Step, load_rows
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Buffers
from flexattn.kernels_triton.gluon.fp8_operands import BLOCK, first_descales, first_transposed_block
from flexattn.kernels_triton.gluon.masking import band_of_sequence
from flexattn.kernels_triton.gluon.pairs import Origin, Pair, load_pair, origin_of, pair_bytes
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage
from flexattn.kernels_triton.gluon.tile_scheduler import broadcast_end, broadcast_tile
from flexattn.kernels_triton.runtime.gluon_names import load_tile

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


class LoadedRows(NamedTuple):
    """Rows of one sequence and head: from `first` on, up to `length`."""

    origin: Origin
    first: gl.tensor
    length: gl.tensor


@gluon.jit
def load_queries(descriptors: Pair, tiles: Pair, rows: LoadedRows, n_tile, barriers: ForwardBarriers, META: gl.constexpr):
    # Loads q of the n_tile-th work tile of this program: a tile for each consumer
    BYTES: gl.constexpr = pair_bytes(descriptors.first.block_type.nbytes, descriptors.second.block_type.nbytes, META.QK1)
    CONSUMERS: gl.constexpr = META.CONSUMERS
    QUERIES: gl.constexpr = META.BLOCK_M // CONSUMERS // META.GROUP
    q_stage = Stage(n_tile, META.Q_STAGES)
    for consumer in gl.static_range(CONSUMERS):
        row = rows.first + consumer * QUERIES
        slot = consumer + pipeline.index(q_stage) * CONSUMERS
        full = barriers.q_full.index(slot)
        mbarrier.wait(barriers.q_empty.index(slot), pipeline.phase(q_stage) ^ 1)
        mbarrier.expect(full, BYTES)
        load_pair(descriptors, rows.origin, rows.length, row, full, tiles, slot, META)


@gluon.jit
def load_keys(descriptors: Pair, tiles: Pair, rows: LoadedRows, n_block, barriers: ForwardBarriers, META: gl.constexpr):
    # Loads k of the n_block-th key block of this program
    BYTES: gl.constexpr = pair_bytes(descriptors.first.block_type.nbytes, descriptors.second.block_type.nbytes, META.QK1)
    stage = Stage(n_block, META.STAGES)
    index = pipeline.index(stage)
    full = barriers.k_full.index(index)
    pipeline.wait_empty(barriers.k_empty, stage)
    mbarrier.expect(full, BYTES)
    load_pair(descriptors, rows.origin, rows.length, rows.first, full, tiles, index, META)


@gluon.jit
def load_partition(args: Arguments, buffers: Buffers, META: gl.constexpr):
    descriptors, steps = args.descriptors, args.steps
    tiles, barriers = buffers.tiles, buffers.barriers
    STAGES: gl.constexpr = META.STAGES
    V1_BYTES: gl.constexpr = descriptors.v1.block_type.nbytes if META.VALUES1 > 0 else 0
    V_BYTES: gl.constexpr = descriptors.v.block_type.nbytes + V1_BYTES
    IS_ALONE: gl.constexpr = not META.IS_PLANNED and args.work.table_ptr is None  # a program has one tile
    # A late draw keeps the counter's address in registers that the ids of pages need; its gain was measured without pages.
    DRAWS_EARLY: gl.constexpr = META.PAGE_ROWS > 0 and not IS_ALONE
    if not META.IS_PLANNED:
        amount = forward_work.num_tiles_of_programs(args, META)
    n_block = 0  # counts the blocks of all work tiles
    n_tile = 0
    t = gl.program_id(0)
    entry = 0
    if META.IS_PLANNED:  # t counts the key blocks of all work tiles
        share, total = share_of_program(args.plan)
        t = t // args.plan.teams * share
        amount = gl.minimum(t + share, total)
        entry = entry_at(args.plan, t)
    while t < amount:
        if META.IS_PLANNED:
            tile, entry = forward_work.planned_tile(t, amount, entry, args, META)
            following = t + tile.split_end - tile.split
        else:
            if DRAWS_EARLY:
                drawn = gl.atomic_add(args.work.table_ptr, 1, sem="relaxed")
            tile = forward_work.tile_of_work(t, amount, args, META)
        sequence = sequence_of(args.lengths_q, args.lengths_kv, tile.b, META)
        len_q, len_kv = sequence.len_q, sequence.len_kv
        band = band_of_sequence(args.band, len_q, len_kv)
        cut, unmasked, descales = (), (), ()
        if META.SENDS_LISTS:
            cut = cut_key_lists(tile.first_row, tile.b, tile.h, band, args.lists, META)
        num_blocks, block_range = forward_work.blocks_of_tile(tile, cut, band, args, META)
        if META.SENDS_LISTS:
            unmasked = forward_work.unmasked_blocks(tile.first_row, META.BLOCK_M, num_blocks, block_range, band, 1, META)
        if META.IS_FP8:
            descales = first_descales(args.descales, tile.b, tile.h, tile.h // args.work.group_size)
        message = forward_work.message_of_tile(tile, sequence, cut, unmasked, descales)
        broadcast_tile(forward_work.pack_tile(message, META), n_tile, barriers, META)
        h_kv = tile.h // args.work.group_size
        origin = origin_of(steps.q, sequence.start_q, tile.h, tile.b)
        queries = LoadedRows(origin=origin, first=tile.first_row, length=len_q)
        load_queries(descriptors.q, tiles.q, queries, n_tile, barriers, META)
        if META.IS_FP8:
            place = packed_start(args.lengths_kv, tile.b, sequence.start_kv)
            v_block = first_transposed_block(tile.b, place, args.lengths_kv.num_tokens, META.IS_RAGGED_KV)
            v_block = h_kv * args.v_blocks + v_block
        row = 0
        ids = 0
        if META.PAGE_ROWS > 0:
            row = len_kv  # without a block, ids are read too
            if num_blocks > 0:
                row = key_block(num_blocks - 1, block_range, META)[0]
            ids = page_ids(tile.b, row, len_kv, args.pages, META)
        for n in range(num_blocks):
            if META.PAGE_ROWS > 0:
                block = KeyBlock(h_kv=h_kv, first=row, length=len_kv, page_size=args.pages.page_size, ids=ids)
                row = key_block(gl.maximum(num_blocks - 2 - n, 0), block_range, META)[0]
                ids = page_ids(tile.b, row, len_kv, args.pages, META)
                load_key_pages(descriptors.k, tiles.k, steps.k, block, n_block, barriers, META)
                if not META.IS_LATENT:
                    load_value_pages(descriptors.v, tiles.v, steps.v, block, n_block, barriers, META)
            else:
                row = key_block(num_blocks - 1 - n, block_range, META)[0]
                stage = Stage(n_block, STAGES)
                index = pipeline.index(stage)
                full = barriers.v_full.index(index)
                origin = origin_of(steps.k, sequence.start_kv, h_kv, tile.b)
                load_keys(descriptors.k, tiles.k, LoadedRows(origin=origin, first=row, length=len_kv), n_block, barriers, META)
                if not META.IS_LATENT:
                    pipeline.wait_empty(barriers.v_empty, stage)
                    mbarrier.expect(full, V_BYTES)
                    if META.IS_FP8:
                        load_tile(descriptors.v, [v_block + row // BLOCK, 0, row % BLOCK], full, tiles.v.index(index))
                    else:
                        origin = origin_of(steps.v, sequence.start_kv, h_kv, tile.b)
                        load_rows(descriptors.v, origin.token, len_kv, row, origin.head, 0, full, tiles.v.index(index))
                        if META.VALUES1 > 0:
                            v1_tile = tiles.v1.index(index)
                            load_rows(descriptors.v1, origin.token, len_kv, row, origin.head, META.VALUES0, full, v1_tile)
            n_block += 1
        if META.IS_PLANNED:
            t = following
        elif IS_ALONE:
            t = amount
        elif DRAWS_EARLY:
            t = drawn + gl.num_programs(0)
        else:  # after the loads of this tile: no other program takes a tile that a program has drawn, however long that is busy
            t = gl.atomic_add(args.work.table_ptr, 1, sem="relaxed") + gl.num_programs(0)
        n_tile += 1
    broadcast_end(n_tile, barriers, META)
