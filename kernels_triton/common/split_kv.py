"""KV splits for few queries: their number or their plan, their partial results, and the kernel that combines these.

If there are few tiles, one program for all keys of a tile leaves most of a device idle. So several programs share each tile's key
blocks (Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023). Each writes out and lse in fp32 as if there were no other keys. The number
of splits depends only on shapes and the device, and parts are combined in a fixed order. So results are bitwise identical from run
to run. Only the first split adds a softmax sink.

If sequences have different lengths, one number of splits for all leaves programs idle after the longest ones. So a kernel makes a
plan: it counts the key blocks that each work tile sees. Programs share all blocks evenly, one tile after the other (stream-K:
Osama, Merrill, Cecka, Garland, Owens, 2023, arXiv 2301.03598). A program computes some tiles alone and at most two pieces of other
tiles. The host reads no length, and there are at most as many parts as tiles and programs together.

Work tiles are in the order of sequence, query block, head; all heads of a query block are one entry of the plan. Neighbouring
programs are in different teams, and so are the tiles of neighbouring heads. So all teams process the same tokens at the same time.
The heads of a token are neighbours in memory, and keys that several tiles read are loaded from memory once.

The index of a piece's part is the tile's number in its team plus the program's number. Each of the two is at least that of the
piece before, so each piece has its own part. A kernel that computes a whole tile may write its result directly, without a part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Band, Lengths, Pointer, Rows
from flexattn.kernels_triton.common.crossovers import (
    SPLIT_COST,
    SPLIT_FEW_ROWS,
    SPLIT_KEYS,
    SPLIT_MOST,
    SPLIT_ROW_COST,
    Facts,
    deciding,
    slower,
)
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.facts import key_bytes
from flexattn.kernels_triton.common.launch_order import let_next_begin, overlaps, wait_for_previous
from flexattn.kernels_triton.common.padding import load_padding, store_zeros
from flexattn.kernels_triton.common.plan_pieces import Piece, Plan, first_row_of_part, part_of_piece, share_of_program
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.split_ranges import Parts
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import QueryTile, cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch

_LSE_AT_ONCE = tl.constexpr(SPLIT_MOST)  # parts of a row whose lse is loaded at once
_MOST_ROWS = 2  # maximum rows to combine per row of q if the combining kernel also writes the padding
_PLAN_TILE = Tile(512, 64, 4, 1)  # entries at a time
_WITHOUT_TEAM = 0.05  # maximum share of the programs
ROOM = tl.constexpr(16)
"""A program's share may exceed an even share by one part in ROOM to avoid cutting tiles: a part costs memory and work in the next
kernel.
"""


BY_LENGTHS = 0
"""Stands for the number of KV splits if a plan splits each work tile by the lengths."""


class Splits(NamedTuple):
    """The number of KV splits, or BY_LENGTHS, and the reason; the reason is "" if there are too many queries for any split."""

    count: int
    why: str


def tiles_and_room(problem: Problem, tile: QueryTile, group: int, programs: int = 1) -> tuple[int, int]:
    """Returns (number of query tiles, each with `group` heads, number of programs that the device runs at once).

    programs: of a processor.
    """
    queries = tile.block_m // slots_of_heads(group)
    tiles = cdiv(problem.longest_q, queries) * problem.batch * problem.num_heads // group
    return tiles, programs * num_processors(problem.device)


def number_of_splits(problem: Problem, tiles: int, programs: int) -> int:
    """Returns the number of KV splits for `tiles` tiles of queries, on a device that runs `programs` programs at once.

    Returns BY_LENGTHS if a good number depends on lengths that are only on the device.
    """
    if problem.is_batch_invariant:  # at least two, because a single part would be rounded differently
        return max(2, cdiv(problem.longest_kv, problem.piece))
    if _unsplit(problem) is not None:
        return 1
    if _is_split_by_lengths(problem):
        return BY_LENGTHS
    count = _most_splits(problem, tiles, programs)
    return count if _saves_time(problem, count) else 1


def _most_splits(problem: Problem, tiles: int, programs: int) -> int:
    return max(1, min(programs // tiles, most_keys(problem) // SPLIT_KEYS, SPLIT_MOST))


def _rows_of_out(problem: Problem) -> int:
    return problem.batch * problem.num_heads * problem.longest_q


def _saves_time(problem: Problem, count: int) -> bool:
    """Returns whether a program passes enough keys less than without a split to make up for combining the parts."""
    keys = most_keys(problem)
    return keys - keys // count >= SPLIT_COST + SPLIT_ROW_COST * _rows_of_out(problem)


def _unsplit(problem: Problem) -> str | None:
    """Returns the reason if one program for each tile is faster or there are no queries, otherwise None."""
    return "there are no queries" if problem.q.shape[-3] == 0 else slower("split keys", _split_facts(problem))


def _split_facts(problem: Problem) -> Facts:
    """Returns the columns of the rules for splits."""
    return {"queries": problem.longest_q, "keys": most_keys(problem), "bytes": key_bytes(problem)}


def _is_split_by_lengths(problem: Problem) -> bool:
    x = problem
    has_lengths = x.batch > 1 and (x.cu_seqlens_kv is not None or x.seqused_kv is not None)
    if not has_lengths or x.block_mask is not None:
        return False
    return slower("split plan", _split_facts(x)) is None


def splits_of(problem: Problem, tiles: int, programs: int) -> Splits:
    """Returns `number_of_splits`, with the reason."""
    count, keys = number_of_splits(problem, tiles, programs), most_keys(problem)
    if problem.is_batch_invariant:
        return Splits(count, f"pieces of {problem.piece} keys, as in any batch")
    if deciding("split keys", _split_facts(problem)) is None:
        return Splits(count, "")
    if (reason := _unsplit(problem)) is not None:
        return Splits(count, reason)
    if count == BY_LENGTHS:
        return Splits(count, f"{programs} programs evenly share the work of {tiles} tiles with up to {keys} keys each")
    if _most_splits(problem, tiles, programs) > count:
        return Splits(count, f"combining parts of {_rows_of_out(problem)} rows takes longer than passing up to {keys} keys")
    return Splits(count, f"{tiles} tiles of up to {keys} keys, on a device with room for {programs} programs")


def most_keys(problem: Problem) -> int:
    """Returns the maximum number of keys that a tile of all queries may see, by the band."""
    x = problem
    keys = x.longest_kv
    if x.window_right is not None:
        if not x.bottom_right:
            keys = min(keys, x.longest_q + x.window_right)
        if x.window_left is not None:
            keys = min(keys, x.longest_q + x.window_left + x.window_right)
    return max(0, keys)


class PlannedTile(NamedTuple):
    """Numbers of heads, queries and keys of a tile of a family's kernel."""

    heads: int
    queries: int
    seen: int  # the tile counts as seeing all keys of so many queries
    keys: int
    writes_whole: bool  # whether the kernel writes results of tiles that are not cut


class PlanArguments(NamedTuple):
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    plan: Plan


class PlanMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    CHUNK: int
    QUERIES: int
    SEEN: int
    KEYS: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    OVERLAPS: bool


@kernel
def _split_plan_kernel(args: PlanArguments, META: tl.constexpr):
    let_next_begin(META.OVERLAPS)
    CHUNK: tl.constexpr = META.CHUNK
    KEYS: tl.constexpr = META.KEYS
    band = args.band
    before_ptr = args.plan.before_ptr
    blocks = args.plan.blocks
    entries = args.plan.entries
    tiles = args.plan.tiles
    total = 0
    most = 1
    for first in range(0, entries, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        is_entry = entry < entries
        b = tl.minimum(entry, entries - 1) // blocks
        first_row = entry % blocks * META.QUERIES
        _start_q, len_q = load_sequence(args.lengths_q, b, META.IS_RAGGED_Q)
        _start_kv, len_kv = load_sequence(args.lengths_kv, b, META.IS_RAGGED_KV)
        shift = (len_kv - len_q) * band.bottom_right
        end = len_kv + tl.zeros([CHUNK], tl.int32)
        begin = tl.zeros([CHUNK], tl.int32)
        if META.HAS_RIGHT:
            end = tl.minimum(end, tl.maximum(first_row + META.SEEN + shift + band.right, 0))
        if META.HAS_LEFT:
            begin = tl.maximum(first_row + shift - band.left, 0) // KEYS
        seen = tl.maximum(tl.cdiv(end, KEYS) - begin, 1)  # at least 1: a tile that sees nothing still has a result to write
        is_tile = is_entry & (first_row < len_q)
        amount = tl.where(is_tile, seen * tiles, 0)
        most = tl.maximum(most, tl.max(tl.where(is_tile, seen, 0), 0))
        tl.store(before_ptr + 1 + entry, total + tl.cumsum(amount, 0), mask=is_entry)
        total += tl.sum(amount, 0)
    tl.store(before_ptr, 0)
    # If a slightly larger share is a multiple of the largest tile, use it, so that these tiles are not cut.
    share = tl.maximum(tl.cdiv(total, args.plan.programs), args.plan.least)
    uncut_share = tl.cdiv(share, most) * most
    tl.store(before_ptr + entries + 1, tl.where(uncut_share - share <= share // ROOM, uncut_share, share))


def _number_of_teams(tiles: int, programs: int) -> int:
    # Returns the number of an entry's tiles or the largest divisor of it that leaves few programs without a team.
    return max(n for n in range(1, tiles + 1) if tiles % n == 0 and programs % n <= _WITHOUT_TEAM * programs)


def make_plan(problem: Problem, tile: PlannedTile, programs: int) -> Plan:
    """Launches the kernel that counts, and returns the plan for `programs` programs."""
    x = problem
    blocks = cdiv(x.longest_q, tile.queries)
    entries = x.batch * blocks
    groups = x.num_heads // tile.heads
    teams = _number_of_teams(groups, programs)
    team_tiles, team_programs = groups // teams, programs // teams
    plan = Plan(
        before_ptr=torch.empty(entries + 2, dtype=torch.int32, device=x.device),
        blocks=blocks,
        entries=entries,
        tiles=team_tiles,
        teams=teams,
        programs=team_programs,
        least=max(1, SPLIT_KEYS // tile.keys),
        num_parts=(entries * team_tiles + team_programs - 1) * teams,
        part_rows=min(tile.queries, x.longest_q) * slots_of_heads(tile.heads),
    )
    args = PlanArguments(lengths_q=x.lengths_q, lengths_kv=x.lengths_kv, band=x.band, plan=plan)
    meta = PlanMeta(
        CHUNK=_PLAN_TILE.block_m,
        QUERIES=tile.queries,
        SEEN=tile.seen,
        KEYS=tile.keys,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        OVERLAPS=overlaps(x.device),
    )
    launch(_split_plan_kernel, 1, x.device, _PLAN_TILE, (args, meta))
    return plan


def split_results(
    problem: Problem, planned: PlannedTile, splits: int, programs: int, lse: Tensor, head_dim_v: int
) -> tuple[Plan | None, Parts | None]:
    """Returns the plan of a split by lengths, and memory for the parts; None for what a call does not have."""
    if splits == BY_LENGTHS:
        plan = make_plan(problem, planned, programs)
        return plan, plan.empty_parts(lse, head_dim_v, problem.is_unbounded)
    return None, Parts.empty(splits, lse, head_dim_v, problem.is_unbounded) if splits > 1 else None


class PartPointers(NamedTuple):
    """`Parts` as arguments of the kernel that combines them."""

    ptr: WidePointer
    lse_ptr: Pointer
    num_rows: int  # rows from one part to the next
    num_splits: int


class CombineArguments(NamedTuple):
    plan: Plan | None
    parts: PartPointers
    lengths_q: Lengths
    num_heads: int
    out: Rows
    lse_ptr: Pointer


class CombineMeta(NamedTuple):
    """Constants that the kernel is compiled for; shared functions read some by their names in `Meta`."""

    HEAD_DIM: int
    WIDTH: int  # elements of a part's row
    COLUMNS: int  # the head dim, rounded up to a power of two
    ROWS: int  # rows of out that a program computes
    AT_ONCE: int  # parts of a row whose loads do not wait for each other
    IS_UNBOUNDED: bool
    ALIGN: int
    WIDE_STRIDES: bool
    IS_RAGGED_Q: bool
    HAS_PADDING: bool
    OVERLAPS: bool
    # rows are numbered by sequence, head and query, and the program of a head's first query also writes the padding;
    # otherwise rows are numbered as in lse
    BY_SEQUENCE: bool
    # With a plan, the heads, the rows of a query and the queries of a tile, and the minimum parts of a tile to combine
    HEADS: int = 0
    GROUP: int = 0
    QUERIES: int = 0
    FEWEST: int = 0


class RowParts(NamedTuple):
    """The parts of each row of a program, inside a kernel."""

    first_row: tl.tensor  # the row's number in its first part, int64
    num_rows: int | tl.tensor  # rows from one part to the next
    count: int | tl.tensor  # parts of each row
    num_all_rows: tl.tensor  # rows of all parts together


# Returns (out, lse) of a program's rows. Parts are added one by one, so no sum depends on the other rows or on the tile.
@triton.jit
def sum_of_parts(parts, rows, is_row, META: tl.constexpr):
    AT_ONCE: tl.constexpr = META.AT_ONCE
    COLUMNS: tl.constexpr = META.COLUMNS
    ROWS: tl.constexpr = META.ROWS
    count = tl.where(is_row, rows.count, 0)
    most = tl.max(count, 0)
    largest_of_columns = tl.full([ROWS, _LSE_AT_ONCE], float("-inf"), tl.float32)
    for first in range(0, most, _LSE_AT_ONCE):
        part = first + tl.arange(0, _LSE_AT_ONCE)[None, :]
        lse_pointers = parts.lse_ptr + (rows.first_row[:, None] + part.to(tl.int64) * rows.num_rows)
        lse_of_parts = tl.load(lse_pointers, mask=part < count[:, None], other=float("-inf"))
        largest_of_columns = tl.maximum(largest_of_columns, lse_of_parts)
    largest = tl.max(largest_of_columns, 1)
    scaled_max = tl.where(largest == float("-inf"), 0.0, largest)  # if a row sees nothing, exp2(-inf - 0) is 0
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, most, AT_ONCE):
        for n in tl.static_range(AT_ONCE):
            has_part = first + n < count
            row = rows.first_row + tl.cast(first + n, tl.int64) * rows.num_rows
            lse = tl.load(parts.lse_ptr + row, mask=has_part, other=float("-inf"))
            log_weight = lse - scaled_max
            if META.IS_UNBOUNDED:  # padding has neither number
                log_weight += tl.load(parts.lse_ptr + rows.num_all_rows + row, mask=lse > float("-inf"), other=0.0)
            weight = tl.exp2(log_weight * LOG2E)
            inside = has_part[:, None] & (columns < META.HEAD_DIM)[None, :]
            part = tl.load(parts.ptr + (row * META.WIDTH)[:, None] + columns[None, :], mask=inside, other=0.0)
            total += weight
            out += part * weight[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    return out / total[:, None], largest + tl.log2(total) * LN2


# Returns the row of lse of a head's first query.
@triton.jit
def _first_row_of_head(lengths, b, h, num_heads, start, META: tl.constexpr):
    return tl.cast(h if META.IS_RAGGED_Q else b * num_heads + h, tl.int64) * lengths.num_tokens + start


# Writes 0 in out and -inf in lse, in one head's rows of one sequence that have no token.
@triton.jit
def store_padding(args, b, h, META: tl.constexpr):
    lengths = args.lengths_q
    ROWS: tl.constexpr = 16
    start, length = load_sequence(lengths, b, META.IS_RAGGED_Q)
    lse_ptr = args.lse_ptr + _first_row_of_head(lengths, b, h, args.num_heads, start, META)
    front, slot = load_padding(lengths, b, start, length, META.IS_RAGGED_Q)
    step, offsets = row_steps(args.out.stride_s, ROWS, META)
    base = row_pointer(args.out, b, h, start, META)
    for n in tl.static_range(2 if META.IS_RAGGED_Q else 1):
        first, end = (length, slot) if n == 0 else (-start, front)
        store_zeros(base, step, offsets, first, end, META.HEAD_DIM, META.COLUMNS, 0)
        for first_hidden in range(first, end, ROWS):
            hidden = first_hidden + tl.arange(0, ROWS)
            tl.store(lse_ptr + hidden, tl.full([ROWS], float("-inf"), tl.float32), mask=hidden < end)


# Returns the `RowParts` of queries by the plan.
@triton.jit
def _planned_parts(args, b, h, token, META: tl.constexpr):
    plan = args.plan
    share, _total = share_of_program(plan)
    entry = b * plan.blocks + token // META.QUERIES
    before = tl.load(plan.before_ptr + entry)
    count = (tl.load(plan.before_ptr + entry + 1) - before) // plan.tiles
    head = h // META.HEADS
    begin = before + head // plan.teams * count
    program = begin // share
    piece = Piece(entry=entry, head=head, program=program, first=0, end=count)
    return RowParts(
        first_row=first_row_of_part(plan, part_of_piece(plan, piece)) + token % META.QUERIES * META.GROUP + h % META.HEADS,
        num_rows=plan.part_rows * plan.teams,
        count=(begin + count - 1) // share - program + 1,
        num_all_rows=first_row_of_part(plan, plan.num_parts),
    )


@kernel
def _combine_splits_kernel(args: CombineArguments, META: tl.constexpr):
    wait_for_previous(META.OVERLAPS)
    lengths = args.lengths_q
    parts = args.parts
    ROWS: tl.constexpr = META.ROWS
    queries = lengths.max_seqlen if META.BY_SEQUENCE else lengths.num_tokens
    num_rows = lengths.batch * args.num_heads * queries if META.BY_SEQUENCE else parts.num_rows
    first = tl.program_id(0) * ROWS
    if META.BY_SEQUENCE and META.HAS_PADDING:
        for padded_row in range(first, tl.minimum(first + ROWS, num_rows)):
            if padded_row % queries == 0:
                head = padded_row // queries
                store_padding(args, head // args.num_heads, head % args.num_heads, META)
    row = first + tl.arange(0, ROWS)
    is_row = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    token = row % queries
    h = row // queries % args.num_heads
    b = row // queries // args.num_heads  # 0 for rows of packed sequences
    start = 0
    if META.BY_SEQUENCE:
        start, length = load_sequence(lengths, b, META.IS_RAGGED_Q)
        is_row &= token < length
        row = _first_row_of_head(lengths, b, h, args.num_heads, start, META) + token
    if META.FEWEST > 0:
        rows = _planned_parts(args, b, h, token, META)
        is_row &= rows.count >= META.FEWEST
    else:
        rows = RowParts(
            first_row=tl.cast(row, tl.int64),
            num_rows=parts.num_rows,
            count=parts.num_splits,
            num_all_rows=tl.cast(parts.num_splits, tl.int64) * parts.num_rows,
        )
    out, lse = sum_of_parts(parts, rows, is_row, META)
    columns = tl.arange(0, META.COLUMNS)
    pointers = row_pointer(args.out, b, h, token + start, META)[:, None] + columns[None, :]
    tl.store(pointers, out.to(args.out.ptr.dtype.element_ty), mask=is_row[:, None] & (columns < META.HEAD_DIM)[None, :])
    tl.store(args.lse_ptr + row, lse, mask=is_row)


def _combining_tile(num_rows: int, columns: int, device: torch.device) -> Tile:
    # Returns a tile of (rows, parts at once). If rows are few, one warp for each row keeps more loads in flight.
    if num_rows <= SPLIT_FEW_ROWS * num_processors(device):
        return Tile(1, min(16, 4096 // columns), 1, 1)
    return Tile(8, 4, 4 * max(1, columns // 128), 1)


def combine_parts(problem: Problem, parts: Parts, results: tuple[Tensor, Tensor], plan: Plan | None, tile: PlannedTile) -> None:
    """Writes out and lse of tiles that have parts, and 0 and -inf in rows without a token. out has q's layout with v's head dim.

    tile: of the kernel that computed the parts.
    """
    x, (out, lse) = problem, results
    head_dim = out.shape[-1]
    by_sequence = plan is not None or (x.has_padding_q and x.batch * x.longest_q <= _MOST_ROWS * x.q.shape[:-2].numel())
    num_splits, num_rows = (0, plan.part_rows) if plan is not None else parts.out.shape[:2]
    rows_of_out = _rows_of_out(x) if by_sequence else num_rows
    columns = triton.next_power_of_2(head_dim)
    combining = _combining_tile(rows_of_out, columns, x.device)
    meta = x.meta(combining, (out,))
    args = CombineArguments(
        plan=plan,
        parts=PartPointers(ptr=parts.out, lse_ptr=parts.lse, num_rows=num_rows, num_splits=num_splits),
        lengths_q=x.lengths_q,
        num_heads=x.num_heads,
        out=rows(out, meta),
        lse_ptr=lse,
    )
    combine_meta = CombineMeta(
        HEAD_DIM=head_dim,
        WIDTH=parts.out.shape[-1],
        COLUMNS=columns,
        ROWS=combining.block_m,
        AT_ONCE=combining.block_n,
        IS_UNBOUNDED=x.is_unbounded,
        ALIGN=meta.ALIGN,
        WIDE_STRIDES=meta.WIDE_STRIDES,
        IS_RAGGED_Q=x.q.dim() == 3,
        HAS_PADDING=x.has_padding_q,
        OVERLAPS=overlaps(x.device),
        BY_SEQUENCE=by_sequence,
    )
    if plan is not None:
        combine_meta = combine_meta._replace(
            HEADS=tile.heads, GROUP=slots_of_heads(tile.heads), QUERIES=tile.queries, FEWEST=2 if tile.writes_whole else 1
        )
    launch(_combine_splits_kernel, cdiv(rows_of_out, combining.block_m), out.device, combining, (args, combine_meta))
    if x.has_padding_q and not by_sequence:
        zero_padding(x, out, "q", lse)
