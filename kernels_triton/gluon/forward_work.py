"""Work tiles of the forward: the tile of a program, the key blocks that a tile sees, and those that need no mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.plan_pieces import part_of_piece, piece_at
from flexattn.kernels_triton.common.sequences import Sequence, sequence_of
from flexattn.kernels_triton.gluon.block_ranges import ListCut, blocks_by_lists, blocks_of_keys, blocks_of_split, key_block
from flexattn.kernels_triton.gluon.forward_arguments import Arguments
from flexattn.kernels_triton.gluon.masking import SequenceBand, band_of_sequence
from flexattn.kernels_triton.gluon.tile_scheduler import num_work_tiles, take, work_tile

_FEWEST = gl.constexpr(4)  # minimum key blocks for a separate loop: no other product overlaps its first and last product


class WorkTile(NamedTuple):
    first_row: gl.tensor
    h: gl.tensor  # the first of HEADS heads
    b: gl.tensor
    split: int | gl.tensor  # number of the split; with a plan, its first key block
    split_end: int | gl.tensor  # with a plan, the end of its key blocks, and the number of its part
    part: int | gl.tensor


class Span(NamedTuple):
    """A consumer's iterations from `begin` up to `end`."""

    begin: int | gl.tensor
    end: int | gl.tensor


class ReceivedTile(NamedTuple):
    """A work tile with the properties that a consumer needs."""

    tile: WorkTile
    start_q: int | gl.tensor
    band: SequenceBand
    num_blocks: gl.tensor  # key blocks of the tile, or of its split, that some of its queries see
    block_range: int | gl.tensor
    is_whole: bool | gl.tensor  # with a plan, whether no other program has key blocks of this tile
    unmasked: Any  # with SENDS_LISTS, the `Span` of iterations that need no mask
    descales: Any  # see `TileMessage`


@gluon.jit
def num_tiles_of_programs(args: Arguments, META: gl.constexpr):
    amount = num_work_tiles(args.work, args.work.num_heads // META.HEADS, args.lengths_q.batch, META)
    if META.IS_SPLIT:
        amount = amount * args.num_splits
    return amount


@gluon.jit
def tile_of_work(t, amount, args: Arguments, META: gl.constexpr):
    split = 0
    if META.IS_SPLIT:
        split = t % args.num_splits
        t = t // args.num_splits
        amount = amount // args.num_splits
    first_row, h, b = work_tile(t, amount, args.work, args.work.num_heads // META.HEADS, args.lengths_q.batch, META)
    return WorkTile(first_row=first_row // META.GROUP, h=h * META.HEADS, b=b, split=split, split_end=0, part=0)


@gluon.jit
def planned_tile(t, end, entry, args: Arguments, META: gl.constexpr):
    # Returns (work tile at block t of the key blocks of all work tiles, its entry in the plan)
    plan = args.plan
    piece = piece_at(plan, gl.program_id(0), t, end, entry)
    tile = WorkTile(
        first_row=piece.entry % plan.blocks * (META.BLOCK_M // META.GROUP),
        h=piece.head * META.HEADS,
        b=piece.entry // plan.blocks,
        split=piece.first,
        split_end=piece.end,
        part=part_of_piece(plan, piece),
    )
    return tile, piece.entry


@gluon.jit
def _seen_blocks(tile: WorkTile, cut, band: SequenceBand, args: Arguments, META: gl.constexpr):
    # Returns (number of blocks, block range) of all keys of a tile. cut: with SENDS_LISTS, the result of `cut_key_lists`
    if META.SENDS_LISTS:
        return blocks_by_lists(cut, tile.first_row, tile.b, tile.h, args.lists, META)
    else:
        QUERIES: gl.constexpr = META.BLOCK_M // META.GROUP
        return blocks_of_keys(tile.first_row, tile.b, tile.h, band, args.lists, META, QUERIES)


@gluon.jit
def blocks_of_tile(tile: WorkTile, cut, band: SequenceBand, args: Arguments, META: gl.constexpr):
    # Returns (number of blocks, block range) of a tile's split, or of all its keys if they are not split
    num_blocks, block_range = _seen_blocks(tile, cut, band, args, META)
    if META.IS_PLANNED:
        end = gl.minimum(tile.split_end, num_blocks)  # the plan has one block even if the tile sees none
        first = gl.minimum(tile.split, end)
        num_blocks, block_range = end - first, block_range + first
    elif META.IS_SPLIT:
        num_blocks, block_range = blocks_of_split(tile.split, args.num_splits, num_blocks, block_range, META)
    return num_blocks, block_range


# Returns the iterations [begin, end) over key blocks that need no mask for queries [m_start, m_start + QUERIES). Iterations run
# from the last key block down, and those before FIRST are always masked. end = 0 if there are too few of these blocks for a
# separate loop.
@gluon.jit
def unmasked_blocks(
    m_start, QUERIES: gl.constexpr, num_blocks, block_range, band: SequenceBand, FIRST: gl.constexpr, META: gl.constexpr
):
    begin = FIRST
    end = num_blocks
    right_end = band.len_kv  # keys from left_end to right_end are visible to all queries
    left_end = 0
    if META.HAS_RIGHT:
        right_end = gl.minimum(band.len_kv, m_start + band.shift + 1 + band.right)
    if META.HAS_LEFT:
        left_end = gl.maximum(m_start + band.shift + QUERIES - 1 - band.left, 0)
    if META.BLOCK_SIZE_Q > 0:  # the full blocks come first in memory order
        end = gl.maximum(num_blocks - gl.maximum(block_range.num_masked, 0) * (META.BLOCK_SIZE_KV // META.BLOCK_N), 1)
        if num_blocks > 0:  # otherwise the lists may end before the entry that is read
            while (begin < end) & (
                key_block(gl.maximum(num_blocks - 1 - begin, 0), block_range, META)[0] + META.BLOCK_N > right_end
            ):
                begin += 1
            if META.HAS_LEFT:
                while (begin < end) & (key_block(gl.minimum(num_blocks - end, num_blocks - 1), block_range, META)[0] < left_end):
                    end -= 1
    else:
        if META.HAS_RIGHT or FIRST == 0:
            right_end = gl.maximum(right_end, 0) if META.HAS_RIGHT else right_end
            begin = block_range + num_blocks - right_end // META.BLOCK_N
            begin = gl.minimum(gl.maximum(begin, FIRST), num_blocks)
        if META.HAS_LEFT:
            end = gl.maximum(gl.minimum(block_range + num_blocks - gl.cdiv(left_end, META.BLOCK_N), num_blocks), begin)
    if META.HAS_CUT_LOOP:
        end = gl.where((end - begin >= _FEWEST) | (end == num_blocks), end, 0)
    return Span(begin=begin, end=end)


class TileMessage(NamedTuple):
    """A work tile as the loader broadcasts it. Fields that no consumer of a kernel reads are not sent."""

    first_row: gl.tensor
    h: gl.tensor
    b: gl.tensor
    split: int | gl.tensor
    start_q: int | gl.tensor  # this and the next two: if there are lengths
    len_q: int | gl.tensor
    len_kv: int | gl.tensor
    split_end: int | gl.tensor  # this and the next: with a plan
    part: int | gl.tensor
    cut: Any  # this and the next, a `ListCut` and a `Span`: with SENDS_LISTS
    unmasked: Any
    descales: Any  # in FP8: result of `first_descales`


@gluon.jit
def message_of_tile(tile: WorkTile, sequence: Sequence, cut, unmasked, descales):
    place = tile.first_row, tile.h, tile.b, tile.split
    lengths = sequence.start_q, sequence.len_q, sequence.len_kv
    return TileMessage(*place, *lengths, tile.split_end, tile.part, cut, unmasked, descales)


@gluon.jit
def pack_tile(message: TileMessage, META: gl.constexpr):
    # Returns the META.NUMBERS integers that `unpack_tile` reads
    numbers = (message.first_row, message.h, message.b)
    if not META.IS_FP8:
        numbers = numbers + (message.split,)
    if META.HAS_LENGTHS:
        numbers = numbers + (message.start_q, message.len_q, message.len_kv)
    if META.IS_PLANNED:
        numbers = numbers + (message.split_end, message.part)
    if META.SENDS_LISTS:
        cut, unmasked = message.cut, message.unmasked
        numbers = numbers + (cut.num_masked, cut.num_full, cut.masked_before, cut.full_before)
        numbers = numbers + (unmasked.begin, unmasked.end)
    return numbers + message.descales


@gluon.jit
def unpack_tile(numbers, META: gl.constexpr):
    place, rest = take(numbers, 3)
    split, lengths, planned, cut, unmasked = (0,), (0, 0, 0), (0, 0), (), ()
    if not META.IS_FP8:
        split, rest = take(rest, 1)
    if META.HAS_LENGTHS:
        lengths, rest = take(rest, 3)
    if META.IS_PLANNED:
        planned, rest = take(rest, 2)
    if META.SENDS_LISTS:
        fields, rest = take(rest, 4)
        cut = ListCut(*fields)
        fields, rest = take(rest, 2)
        unmasked = Span(*fields)
    return TileMessage(*place, *split, *lengths, *planned, cut=cut, unmasked=unmasked, descales=rest)  # type: ignore[call-arg, misc]


@gluon.jit
def received_tile(numbers, args: Arguments, META: gl.constexpr):
    # Returns the work tile of a tile message from the loader
    message = unpack_tile(numbers, META)
    tile = WorkTile(
        first_row=message.first_row, h=message.h, b=message.b, split=message.split, split_end=message.split_end, part=message.part
    )
    start_q, len_q, len_kv = message.start_q, message.len_q, message.len_kv
    if not META.HAS_LENGTHS:
        sequence = sequence_of(args.lengths_q, args.lengths_kv, tile.b, META)
        start_q, len_q, len_kv = sequence.start_q, sequence.len_q, sequence.len_kv
    band = band_of_sequence(args.band, len_q, len_kv)
    num_blocks, block_range = blocks_of_tile(tile, message.cut, band, args, META)
    is_whole = True
    if META.IS_PLANNED:
        is_whole = num_blocks == _seen_blocks(tile, message.cut, band, args, META)[0]
    return ReceivedTile(
        tile=tile,
        start_q=start_q,
        band=band,
        num_blocks=num_blocks,
        block_range=block_range,
        is_whole=is_whole,
        unmasked=message.unmasked,
        descales=message.descales,
    )
