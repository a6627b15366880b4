"""A plan of pieces of key blocks as kernels read it: the piece of a program, and the part that it writes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.split_ranges import Parts


class Plan(NamedTuple):
    """Shares of programs in the key blocks of all work tiles."""

    # int32 [entries + 2]: key blocks of a team's tiles before each entry, then their total, then a program's share
    before_ptr: Pointer
    blocks: int  # query blocks of the longest sequence
    entries: int  # blocks * batch
    tiles: int  # work tiles of an entry in one team
    teams: int
    programs: int  # in each team
    least: int  # minimum key blocks of a program
    num_parts: int
    part_rows: int  # rows of a part

    def empty_parts(self, lse: Tensor, width: int, is_unbounded: bool) -> Parts:
        """Returns memory for the parts: out is fp32 [parts, part_rows, width], lse [1 or 2, parts, part_rows]."""
        size = (self.num_parts, self.part_rows)
        return Parts(lse.new_empty((*size, width)), lse.new_empty((1 + is_unbounded, *size)))


class Piece(NamedTuple):
    """Blocks `first` up to `end` of the key blocks that a work tile sees, inside a kernel."""

    entry: int | tl.tensor
    head: tl.tensor  # number of the work tile in its entry, over all teams
    program: tl.tensor  # number in its team
    first: int | tl.tensor
    end: tl.tensor


@triton.jit
def first_row_of_part(plan, part):
    return tl.cast(part, tl.int64) * plan.part_rows


# Returns (key blocks of each program of a team, key blocks of all)
@triton.jit
def share_of_program(plan):
    return tl.load(plan.before_ptr + plan.entries + 1), tl.load(plan.before_ptr + plan.entries)


# Returns the last entry that begins at this key block or before it.
@triton.jit
def entry_at(plan, position):
    low = 0
    high = plan.entries - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(plan.before_ptr + middle) <= position
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


# Returns a program's piece from key block `position` on, in this entry or a later one. Its share ends at `end`.
@triton.jit
def piece_at(plan, pid, position, end, entry):
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


# A team's parts are `plan.teams` apart.
@triton.jit
def part_of_piece(plan, piece):
    return (piece.entry * plan.tiles + piece.head // plan.teams + piece.program) * plan.teams + piece.head % plan.teams


# Returns the piece that writes this part, or an empty piece if none does.
@triton.jit
def piece_of_part(plan, part):
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
