"""KV splits by the lengths that a call finds on the device: a plan of who takes which keys, and the kernel that combines the parts.

Where sequences have lengths of their own, one number of splits for all leaves programs idle behind the longest. So a kernel counts
the blocks of keys that each work tile sees, and programs share all of these evenly, one tile after the other (stream-K: Osama,
Merrill, Cecka, Garland, Owens, 2023, arXiv 2301.03598): a program has whole tiles and at most two pieces of others. Nothing is read
on the host, and there are no more parts than tiles and programs together. Work tiles are in the order of sequence, block of
queries, head; those of all heads of a block are an entry of the plan. Neighbouring programs are in different teams, and the heads'
tiles are in different teams too: all teams go through the same tokens at the same time, whose heads lie side by side in memory, and
keys that several tiles read come from memory once.
Each piece has a part of its own: the tile's number in its team plus the program's, neither of which is ever less than the last
piece's. A tile's parts are added in their order: results repeat to the bit. A kernel may write the result of a tile that it has
whole, of which there is no part then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Band, Lengths, Pointer, Rows
from flexattn.kernels_triton.common.launch_order import let_next_begin, overlaps, wait_for_previous
from flexattn.kernels_triton.common.primitives import load_sequence, row_pointer
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.split_kv import PartPointers, Parts, store_padding, sum_of_parts
from flexattn.kernels_triton.common.tiles import SPLIT_KEYS, cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_PLAN_TILE = Tile(512, 64, 4, 1)  # entries at a time
_COMBINE_TILE = Tile(16, 128, 4, 1)  # parts at a time
_WITHOUT_TEAM = 0.05  # share of the programs, at most
ROOM = tl.constexpr(16)
"""A program's share may be greater by one part in so many, for whole tiles: a part takes memory and another kernel's time."""


class Plan(NamedTuple):
    """Shares of programs in the blocks of keys of all work tiles."""

    before_ptr: Pointer  # int32 [entries + 2]: blocks of keys of a team's tiles of all entries before each, of all, of a program
    blocks: int  # blocks of queries of the longest sequence
    entries: int  # blocks * batch
    tiles: int  # work tiles of an entry that a team has
    teams: int
    programs: int  # in each team
    least: int  # blocks of keys of a program, at least
    num_parts: int
    part_rows: int  # rows of a work tile's part

    def empty_parts(self, lse: Tensor, width: int, is_unbounded: bool) -> Parts:
        """Returns memory for the parts: out is fp32 [parts, part_rows, width], lse [1 or 2, parts, part_rows]."""
        size = (self.num_parts, self.part_rows)
        return Parts(lse.new_empty((*size, width)), lse.new_empty((1 + is_unbounded, *size)))


class Piece(NamedTuple):
    """Blocks `first` up to `end` of those that a work tile sees, inside a kernel."""

    entry: Any
    head: Any  # number of the work tile in its entry, of all teams'
    program: Any  # in its team
    first: Any
    end: Any


class PlannedTile(NamedTuple):
    """Numbers of heads, queries and keys that a family's kernel takes at a time."""

    heads: int
    queries: int
    seen: int  # queries whose keys are taken for those that the tile sees
    keys: int
    writes_whole: bool  # whether the kernel writes the results of tiles that are not cut


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
        seen = tl.maximum(tl.cdiv(end, KEYS) - begin, 1)  # where nothing is seen, there is a result to write
        is_tile = is_entry & (first_row < len_q)
        amount = tl.where(is_tile, seen * tiles, 0)
        most = tl.maximum(most, tl.max(tl.where(is_tile, seen, 0), 0))
        tl.store(before_ptr + 1 + entry, total + tl.cumsum(amount, 0), mask=is_entry)
        total += tl.sum(amount, 0)
    tl.store(before_ptr, 0)
    # Where a little more is a number of tiles of the most keys, these are not cut.
    share = tl.maximum(tl.cdiv(total, args.plan.programs), args.plan.least)
    whole = tl.cdiv(share, most) * most
    tl.store(before_ptr + entries + 1, tl.where(whole - share <= share // ROOM, whole, share))


def _number_of_teams(tiles: int, programs: int) -> int:
    # The number of an entry's tiles, or a divisor: the largest that leaves few programs without a team.
    return max(n for n in range(1, tiles + 1) if tiles % n == 0 and programs % n <= _WITHOUT_TEAM * programs)


def make_plan(problem: Problem, tile: PlannedTile, programs: int) -> Plan:
    """Launches the kernel that counts, and returns the plan for so many programs."""
    x = problem
    blocks = cdiv(x.longest_q, tile.queries)
    entries = x.batch * blocks
    groups = x.num_heads // tile.heads
    teams = _number_of_teams(groups, programs)
    own_tiles, own_programs = groups // teams, programs // teams
    plan = Plan(
        before_ptr=torch.empty(entries + 2, dtype=torch.int32, device=x.device),
        blocks=blocks,
        entries=entries,
        tiles=own_tiles,
        teams=teams,
        programs=own_programs,
        least=max(1, SPLIT_KEYS // tile.keys),
        num_parts=(entries * own_tiles + own_programs - 1) * teams,
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


@triton.jit
def first_row_of_part(plan, part):
    return tl.cast(part, tl.int64) * plan.part_rows


@triton.jit
def share_of_program(plan):
    # (blocks of keys of each program of a team, of all)
    return tl.load(plan.before_ptr + plan.entries + 1), tl.load(plan.before_ptr + plan.entries)


@triton.jit
def entry_at(plan, position):
    # The last entry that begins at a block of keys or before it.
    low = 0
    high = plan.entries - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(plan.before_ptr + middle) <= position
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


@triton.jit
def piece_at(plan, pid, position, end, entry):
    # The piece of a program, whose share ends at `end`, from a block of keys on; of this entry or a later one.
    before = tl.load(plan.before_ptr + entry)
    after = tl.load(plan.before_ptr + entry + 1)
    while after <= position:
        entry += 1
        before = after
        after = tl.load(plan.before_ptr + entry + 1)
    count = (after - before) // plan.tiles
    tile = (position - before) // count
    first = position - before - tile * count
    head = tile * plan.teams + pid % plan.teams
    return Piece(entry=entry, head=head, program=pid // plan.teams, first=first, end=tl.minimum(count, first + end - position))


@triton.jit
def part_of_piece(plan, piece):
    # A team's parts are as far apart as there are teams.
    return (piece.entry * plan.tiles + piece.head // plan.teams + piece.program) * plan.teams + piece.head % plan.teams


@triton.jit
def piece_of_part(plan, part):
    # The piece that leaves this part; of parts that no piece leaves, an empty one.
    share, _total = share_of_program(plan)
    tiles = plan.tiles
    team = part % plan.teams
    part = part // plan.teams
    low = 0
    high = plan.entries - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = middle * tiles + tl.load(plan.before_ptr + middle) // share <= part
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    entry = low
    before = tl.load(plan.before_ptr + entry)
    count = (tl.load(plan.before_ptr + entry + 1) - before) // tiles
    low = 0
    high = tiles - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = entry * tiles + middle + (before + middle * count) // share <= part
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    program = tl.minimum(part - entry * tiles - low, plan.programs)
    start = program * share - (before + low * count)
    first = tl.maximum(start, 0)
    return Piece(entry=entry, head=low * plan.teams + team, program=program, first=first, end=tl.minimum(start + share, count))


class PiecesArguments(NamedTuple):
    plan: Plan
    lengths_q: Lengths
    parts: PartPointers
    num_heads: int
    out: Rows
    lse_ptr: Pointer


class PiecesMeta(NamedTuple):
    """Constants that the kernel is compiled for; names that `primitives` and `sum_of_parts` read are those of theirs."""

    HEAD_DIM: int
    WIDTH: int
    COLUMNS: int
    MOST: int
    AT_ONCE: int
    IS_UNBOUNDED: bool
    ALIGN: int
    WIDE_STRIDES: bool
    IS_RAGGED_Q: bool
    HAS_PADDING: bool
    HEADS: int
    GROUP: int
    QUERIES: int
    FEWEST: int  # parts of a tile that are combined
    OVERLAPS: bool


@kernel
def _combine_pieces_kernel(args: PiecesArguments, META: tl.constexpr):
    wait_for_previous(META.OVERLAPS)
    plan = args.plan
    parts = args.parts
    lengths = args.lengths_q
    num_heads = args.num_heads
    longest = lengths.max_seqlen
    row = tl.program_id(0) % longest
    h = tl.program_id(0) // longest % num_heads
    b = tl.program_id(0) // longest // num_heads
    start, length = load_sequence(lengths, b, META.IS_RAGGED_Q)
    lse_ptr = args.lse_ptr + tl.cast(h if META.IS_RAGGED_Q else b * num_heads + h, tl.int64) * lengths.num_tokens + start
    if META.HAS_PADDING:  # noqa: SIM102  # a constant, beside a number of the device
        if row == 0:
            store_padding(args, b, h, start, length, lse_ptr, META)
    if row < length:
        share, _total = share_of_program(plan)
        entry = b * plan.blocks + row // META.QUERIES
        before = tl.load(plan.before_ptr + entry)
        count = (tl.load(plan.before_ptr + entry + 1) - before) // plan.tiles
        head = h // META.HEADS
        begin = before + head // plan.teams * count
        program = begin // share
        num_splits = (begin + count - 1) // share - program + 1
        if num_splits >= META.FEWEST:
            piece = Piece(entry=entry, head=head, program=program, first=0, end=count)
            place = first_row_of_part(plan, part_of_piece(plan, piece)) + row % META.QUERIES * META.GROUP + h % META.HEADS
            num_rows = plan.part_rows * plan.teams
            own = PartPointers(ptr=parts.ptr, lse_ptr=parts.lse_ptr, num_rows=num_rows, num_splits=num_splits)
            out, lse = sum_of_parts(own, place, first_row_of_part(plan, plan.num_parts), META)
            columns = tl.arange(0, META.COLUMNS)
            pointer = row_pointer(args.out, b, h, start + row, META)
            tl.store(pointer + columns, out.to(args.out.ptr.dtype.element_ty), mask=columns < META.HEAD_DIM)
            tl.store(lse_ptr + row, lse)


def combine_pieces(problem: Problem, plan: Plan, tile: PlannedTile, parts: Parts, results: tuple[Tensor, Tensor]) -> None:
    """Writes, of tiles that have parts, out, laid out as q with v's head dim, and lse; 0 and -inf in rows without a token."""
    x, (out, lse) = problem, results
    head_dim = out.shape[-1]
    meta = x.meta(_COMBINE_TILE, (out,))
    args = PiecesArguments(
        plan=plan,
        lengths_q=x.lengths_q,
        parts=PartPointers(ptr=parts.out, lse_ptr=parts.lse, num_rows=plan.part_rows, num_splits=0),
        num_heads=x.num_heads,
        out=rows(out, meta),
        lse_ptr=lse,
    )
    own_meta = PiecesMeta(
        HEAD_DIM=head_dim,
        WIDTH=parts.out.shape[-1],
        COLUMNS=triton.next_power_of_2(head_dim),
        MOST=triton.next_power_of_2(plan.programs),
        AT_ONCE=_COMBINE_TILE.block_m,
        IS_UNBOUNDED=meta.IS_UNBOUNDED,
        ALIGN=meta.ALIGN,
        WIDE_STRIDES=meta.WIDE_STRIDES,
        IS_RAGGED_Q=meta.IS_RAGGED_Q,
        HAS_PADDING=x.has_padding_q,
        HEADS=tile.heads,
        GROUP=slots_of_heads(tile.heads),
        QUERIES=tile.queries,
        FEWEST=2 if tile.writes_whole else 1,
        OVERLAPS=overlaps(x.device),
    )
    launch(_combine_pieces_kernel, x.batch * x.num_heads * x.longest_q, out.device, _COMBINE_TILE, (args, own_meta))
