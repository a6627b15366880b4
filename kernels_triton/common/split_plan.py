"""KV splits by lengths on the device: a plan of the keys of each program, and the kernel that combines the parts.

If sequences have different lengths, one number of splits for all leaves programs idle after the longest ones. So a kernel counts
the key blocks that each work tile sees. Programs share all blocks evenly, one tile after the other (stream-K: Osama, Merrill,
Cecka, Garland, Owens, 2023, arXiv 2301.03598). A program computes some tiles alone and at most two pieces of other tiles. The host
reads no length, and there are at most as many parts as tiles and programs together.

Work tiles are in the order of sequence, query block, head; all heads of a query block are one entry of the plan. Neighbouring
programs are in different teams, and so are the tiles of neighbouring heads. So all teams process the same tokens at the same time.
The heads of a token are neighbours in memory, and keys that several tiles read are loaded from memory once.

The index of a piece's part is the tile's number in its team plus the program's number. Each of the two is at least that of the
piece before, so each piece has its own part. A tile's parts are combined in order, so results are bitwise identical from run to
run. A kernel that computes a whole tile may write its result directly, without a part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Band, Lengths, Pointer, Rows
from flexattn.kernels_triton.common.launch_order import let_next_begin, overlaps, wait_for_previous
from flexattn.kernels_triton.common.plan_pieces import Piece, Plan, first_row_of_part, part_of_piece, share_of_program
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.split_kv import PartPointers, store_padding, sum_of_parts
from flexattn.kernels_triton.common.split_ranges import Parts
from flexattn.kernels_triton.common.tiles import SPLIT_KEYS, cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_PLAN_TILE = Tile(512, 64, 4, 1)  # entries at a time
_COMBINE_TILE = Tile(16, 128, 4, 1)  # parts at a time
_WITHOUT_TEAM = 0.05  # maximum share of the programs
ROOM = tl.constexpr(16)
"""A program's share may exceed an even share by one part in ROOM to avoid cutting tiles: a part costs memory and work in the next
kernel.
"""


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


class PiecesArguments(NamedTuple):
    plan: Plan
    lengths_q: Lengths
    parts: PartPointers
    num_heads: int
    out: Rows
    lse_ptr: Pointer


class PiecesMeta(NamedTuple):
    """Constants that the kernel is compiled for; shared functions read some by their names in `Meta`."""

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
    FEWEST: int  # minimum parts of a tile to combine
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
    if META.HAS_PADDING:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
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
            tile_parts = PartPointers(ptr=parts.ptr, lse_ptr=parts.lse_ptr, num_rows=num_rows, num_splits=num_splits)
            out, lse = sum_of_parts(tile_parts, place, first_row_of_part(plan, plan.num_parts), META)
            columns = tl.arange(0, META.COLUMNS)
            pointer = row_pointer(args.out, b, h, start + row, META)
            tl.store(pointer + columns, out.to(args.out.ptr.dtype.element_ty), mask=columns < META.HEAD_DIM)
            tl.store(lse_ptr + row, lse)


def combine_pieces(problem: Problem, plan: Plan, tile: PlannedTile, parts: Parts, results: tuple[Tensor, Tensor]) -> None:
    """Writes out and lse of tiles that have parts, and 0 and -inf in rows without a token. out has q's layout with v's head dim."""
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
    pieces_meta = PiecesMeta(
        HEAD_DIM=head_dim,
        WIDTH=parts.out.shape[-1],
        COLUMNS=triton.next_power_of_2(head_dim),
        MOST=triton.next_power_of_2(plan.programs),
        AT_ONCE=_COMBINE_TILE.block_m,
        IS_UNBOUNDED=x.is_unbounded,
        ALIGN=meta.ALIGN,
        WIDE_STRIDES=meta.WIDE_STRIDES,
        IS_RAGGED_Q=x.q.dim() == 3,
        HAS_PADDING=x.has_padding_q,
        HEADS=tile.heads,
        GROUP=slots_of_heads(tile.heads),
        QUERIES=tile.queries,
        FEWEST=2 if tile.writes_whole else 1,
        OVERLAPS=overlaps(x.device),
    )
    launch(_combine_pieces_kernel, x.batch * x.num_heads * x.longest_q, out.device, _COMBINE_TILE, (args, pieces_meta))
