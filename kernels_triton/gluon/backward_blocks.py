"""Programs of a backward: the block of queries or keys of each, the statistics of its rows, and the heads that it visits."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Head, Pointer, Scores
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.heads import head_values, load_head, with_head_values
from flexattn.kernels_triton.common.lse_rows import is_any_large, load_large, relative_to_lse
from flexattn.kernels_triton.common.sequences import Sequence, sequence_of
from flexattn.kernels_triton.common.statistics_tiles import statistics_tile
from flexattn.kernels_triton.gluon import masking, query_walk
from flexattn.kernels_triton.gluon.block_ranges import ListCut, blocks_of_keys, blocks_of_queries, cut_query_lists
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.tile_scheduler import Work, backward_tile, take


class LargeLse(NamedTuple):
    """Results of `large_rows`, which `load_large` reads."""

    is_any_ptr: Pointer
    lse_ptr: Pointer


class Block(NamedTuple):
    """One program's block of queries or keys, and the blocks of the other side that it visits."""

    first_row: gl.tensor
    b: int | gl.tensor
    h: gl.tensor  # for a key block, the first head that the program visits
    heads: int | gl.tensor  # query heads that the program visits
    h_kv: gl.tensor
    part: int | gl.tensor  # for a key block, see `query_walk.num_parts`
    sequence: Sequence
    band: masking.SequenceBand
    large: Any  # result of `load_large`
    first_head: gl.tensor  # the batch element's first head in dropout's numbering
    num_blocks: int | gl.tensor  # blocks of one head
    turn: int | gl.tensor  # result of `query_walk.turn_of_program`; 0 for a query block
    block_range: Any  # argument of `key_block` or `query_block`
    first_statistics: gl.tensor  # the first tile of the head's statistics


@gluon.jit
def _load_large(args, sequence: Sequence, META: gl.constexpr):
    num_tokens = args.lengths_q.num_tokens
    return load_large(args.large.is_any_ptr, args.large.lse_ptr, args.work.num_heads, num_tokens, sequence.start_q, META)


@gluon.jit
def query_block_of_program(args, META: gl.constexpr):
    # args: of a kernel for dq
    work = args.work
    m_block, h, b = backward_tile(gl.program_id(0), gl.num_programs(0), work, work.num_heads, True, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_q = sequence.len_q
    band = masking.band_of_sequence(args.band, len_q, sequence.len_kv)
    first_row = gl.minimum(m_block * META.BLOCK_M, len_q)
    num_blocks, block_range = blocks_of_keys(first_row, b, h, band, args.lists, META)
    num_blocks = gl.where(first_row < len_q, num_blocks, 0)
    place_q = packed_start(args.lengths_q, b, sequence.start_q)
    return Block(
        first_row=first_row,
        b=b,
        h=h,
        heads=1,
        h_kv=h // work.group_size,
        part=0,
        sequence=sequence,
        band=band,
        large=_load_large(args, sequence, META),
        first_head=b * work.num_heads,
        num_blocks=num_blocks,
        turn=0,
        block_range=block_range,
        first_statistics=statistics_tile(b, h, work.num_heads, place_q, args.tiles_of_statistics, META, META.STATISTICS),
    )


class KeyBlockMessage(NamedTuple):
    """A key block as the loader broadcasts it: everything that must be computed and read. Fields without use are not sent."""

    first_row: gl.tensor
    part: gl.tensor  # see `query_walk.num_parts`
    b: int | gl.tensor
    sequence: Any  # a `Sequence`, if there are lengths
    cut: Any  # a `ListCut`, with a block mask


@gluon.jit
def _pack_key_block(message: KeyBlockMessage, META: gl.constexpr):
    # Returns the integers that `_unpack_key_block` reads (`work_order.key_block_numbers`)
    numbers = (message.first_row, message.part, message.b)
    if META.HAS_LENGTHS:
        sequence = message.sequence
        numbers = numbers + (sequence.start_q, sequence.len_q, sequence.start_kv, sequence.len_kv)
    if META.BLOCK_SIZE_Q > 0:
        cut = message.cut
        numbers = numbers + (cut.num_masked, cut.num_full, cut.masked_before, cut.full_before)
    return numbers


@gluon.jit
def _unpack_key_block(numbers, META: gl.constexpr):
    place, rest = take(numbers, 3)
    sequence, cut = (), ()
    if META.HAS_LENGTHS:
        fields, rest = take(rest, 4)
        sequence = Sequence(*fields)
    if META.BLOCK_SIZE_Q > 0:
        fields, rest = take(rest, 4)
        cut = ListCut(*fields)
    return KeyBlockMessage(*place, sequence=sequence, cut=cut)  # type: ignore[misc]


@gluon.jit
def find_key_block(t, num_tiles, args, META: gl.constexpr):
    # Returns the message from which `key_block` makes work tile t of a kernel for dk and dv
    work = args.work
    n_block, part, b = backward_tile(t, num_tiles, work, query_walk.num_parts(work), False, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_kv = sequence.len_kv
    first_row = gl.minimum(n_block * META.BLOCK_N, len_kv)
    cut = ()
    if META.BLOCK_SIZE_Q > 0:
        band = masking.band_of_sequence(args.band, sequence.len_q, len_kv)
        cut = cut_query_lists(first_row, b, query_walk.heads_of_part(part, work)[1], band, args.lists, META)
    return _pack_key_block(KeyBlockMessage(first_row=first_row, part=part, b=b, sequence=sequence, cut=cut), META)


@gluon.jit
def key_block(numbers, args, META: gl.constexpr):
    # numbers: from `find_key_block`
    work = args.work
    message = _unpack_key_block(numbers, META)
    first_row, part, b = message.first_row, message.part, message.b
    if META.HAS_LENGTHS:
        sequence = message.sequence
    else:
        sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_kv = sequence.len_kv
    band = masking.band_of_sequence(args.band, sequence.len_q, len_kv)
    h_kv, h, heads = query_walk.heads_of_part(part, work)
    num_blocks, block_range = blocks_of_queries(first_row, b, h, message.cut, band, args.lists, META)
    place_q = packed_start(args.lengths_q, b, sequence.start_q)
    return Block(
        first_row=first_row,
        b=b,
        h=h,
        heads=heads,
        h_kv=h_kv,
        part=part,
        sequence=sequence,
        band=band,
        large=_load_large(args, sequence, META),
        first_head=b * work.num_heads,
        num_blocks=gl.where(first_row < len_kv, num_blocks, 0),
        turn=query_walk.turn_of_program(first_row // META.BLOCK_N, part, b, args),
        block_range=block_range,
        first_statistics=statistics_tile(b, h, work.num_heads, place_q, args.tiles_of_statistics, META, META.BLOCK_M),
    )


@gluon.jit
def key_block_of_program(args, META: gl.constexpr):
    return key_block(find_key_block(gl.program_id(0), gl.num_programs(0), args, META), args, META)


class QueryStatistics(NamedTuple):
    """The statistics of the queries of one consumer of dq."""

    minus_lse: gl.tensor  # in units of log2; -inf for a row past the end
    minus_delta: gl.tensor


@gluon.jit
def load_query_statistics(statistics_ptr, rows, len_q, META: gl.constexpr):
    # statistics_ptr: to the statistics of the sequence's head
    SIZE: gl.constexpr = META.STATISTICS
    pointers = statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    return QueryStatistics(minus_lse=minus_lse, minus_delta=minus_delta)


@gluon.jit
def statistics_of_block(args, block: Block, META: gl.constexpr):
    return args.statistics_ptr + block.first_statistics.to(gl.int64) * (2 * META.STATISTICS)


class QueryHead(NamedTuple):
    """Position of a program of dk and dv: one query block of one query head of its group."""

    n: int | gl.tensor  # for this and `end` see `QueryPlace`
    end: int | gl.tensor
    h: gl.tensor
    bias_ptr: float | gl.tensor
    alibi_slope: float


# The values that mods read for the head, `head_values`, are separate: Triton does not carry nested tuples through a loop.
@gluon.jit
def first_query_head(block: Block, work: Work, scores: Scores, MODS: gl.constexpr, META: gl.constexpr):
    bias_ptr, alibi_slope = load_head(scores.bias, scores.alibi, block.b, block.h, META)
    values = head_values(block.b, block.h, scores.captures, MODS, META)
    first = query_walk.first_queries(block, work)
    return QueryHead(n=first.n, end=first.end, h=block.h, bias_ptr=bias_ptr, alibi_slope=alibi_slope), values


@gluon.jit
def next_query_block(position: QueryHead, values, block: Block, work: Work, scores: Scores, MODS: gl.constexpr, META: gl.constexpr):
    bias_ptr, alibi_slope = position.bias_ptr, position.alibi_slope
    following = query_walk.next_queries(
        query_walk.QueryPlace(n=position.n, head=position.h - block.h, end=position.end), block, work
    )
    h = block.h + following.head
    if h != position.h:
        bias_ptr, alibi_slope = load_head(scores.bias, scores.alibi, block.b, h, META)
        values = head_values(block.b, h, scores.captures, MODS, META)
    return QueryHead(n=following.n, end=following.end, h=h, bias_ptr=bias_ptr, alibi_slope=alibi_slope), values


@gluon.jit
def head_at(position: QueryHead, values, block: Block, scores: Scores, META: gl.constexpr):
    # Like `heads.head_of`, from values that are already loaded
    return Head(
        b=block.b,
        h=position.h,
        len_q=block.sequence.len_q,
        len_kv=block.sequence.len_kv,
        shift=block.band.shift,
        softcap=scores.softcap,
        bias_ptr=position.bias_ptr,
        bias_stride_m=scores.bias.stride_m,
        bias_stride_n=scores.bias.stride_n,
        alibi_slope=position.alibi_slope,
        captures=with_head_values(scores.captures, values, META),
    )


class ScorePlace(NamedTuple):
    """Position of a tile of transposed scores: rows are keys, and columns are queries."""

    rows: gl.tensor
    columns: gl.tensor
    row: int | gl.tensor  # the block's first query
    is_cut: bool | gl.tensor  # result of `cuts_block`
    is_full: bool | gl.tensor  # whether the block mask calls the block full


@gluon.jit
def probabilities(s, factor, position: ScorePlace, statistics, head: Head, block: Block, MODS: gl.constexpr, META: gl.constexpr):
    # s and factor: transposed, from `logits`. statistics: -lse of the columns' queries, in shared memory
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    len_q = block.sequence.len_q
    i, j = position.columns[None, :], position.rows[:, None]
    if position.is_cut | is_any_large(block.large, META):
        s = masking.mask_queries_and_end(s, position.rows, position.columns, block.band, META)
        if META.IS_UNBOUNDED:
            minus_lse_of_columns = statistics.load(COLUMNS)
            s = relative_to_lse(s, minus_lse_of_columns[None, :], block.large, block.b, head.h, i, len_q, META)
    s = masking.apply_mask_mod(s, i, j, position.is_full, head, MODS, META)
    s = masking.hide_queries_past_the_end(s, position.row, position.columns, len_q, MODS, META)
    minus_lse = statistics.load(COLUMNS)
    return gl.exp2(s * factor + minus_lse[None, :])


@gluon.jit
def last_key_seen_by_all(m_start, band: masking.SequenceBand, META: gl.constexpr):
    # Key blocks that end past it need a mask for the queries from m_start on.
    last = band.len_kv
    if META.HAS_RIGHT:
        last = gl.minimum(band.len_kv, m_start + band.shift + band.right + 1)
    return last


@gluon.jit
def hides_some_key(column, last, m_start, block: Block, META: gl.constexpr):
    # Returns whether the band or the sequence's end cuts the key block at `column` for the ROWS queries from m_start on: a scalar,
    # so that other blocks do not pay for masks. last: from `last_key_seen_by_all`
    is_cut = column + META.BLOCK_N > last
    if META.HAS_LEFT:
        is_cut = is_cut | (column < m_start + ROWS - 1 + block.band.shift - block.band.left)
    return is_cut


@gluon.jit
def hides_some_query(row, n_start, block: Block, META: gl.constexpr):
    # Returns whether the band or a large lse requires masks for the query block at `row` and the ROWS keys from n_start on
    band = block.band
    is_cut = is_any_large(block.large, META)
    if META.HAS_RIGHT:
        is_cut = is_cut | (row < n_start + ROWS - 1 - band.shift - band.right)
    if META.HAS_LEFT:
        is_cut = is_cut | (row + META.BLOCK_M > n_start - band.shift + band.left + 1)
    return is_cut


@gluon.constexpr_function
def loops_of(META):
    """Returns 2 if a kernel has one loop for calls with a large lse and one for all other calls; otherwise 1. Only one loop runs.

    Without a band, the second loop has no branch except for the last block: a branch on `large` would cost 8 % of the backward at
    head dim 64. It was not measured in FP8.
    """
    return 2 if META.IS_UNBOUNDED and not (META.IS_FP8 or META.HAS_LEFT or META.HAS_RIGHT) else 1
