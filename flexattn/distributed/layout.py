"""Layouts: the runs of a sequence's tokens that each rank holds, in the order in which it holds them."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

LAYOUTS = ("contiguous", "zigzag", "dealt")
CHUNK = 1024  # Tokens of a dealt chunk. 2,048 leave up to 4 % of imbalance, and smaller chunks move more keys.
SLACKS = (0.02, 0.1, 0.3)  # Fractions of the mean by which a rank may lead while chunks are dealt.
MOST_IMBALANCE = 1.02  # accepted in return for fewer fetched keys
MOST_CHOICES = 1 << 18  # Chunks times ranks up to which several deals are tried. More would take longer than a training step.


class Run(NamedTuple):
    """Consecutive positions, from start up to but not including stop."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Runs = tuple[Run, ...]


def cut(length: int, parts: int) -> list[Run]:
    """Returns `parts` runs that cover `length` positions in order. Their sizes differ by at most 1."""
    ends = [length * i // parts for i in range(parts + 1)]
    return [Run(*pair) for pair in itertools.pairwise(ends)]


def contiguous(length: int, ranks: int) -> tuple[Runs, ...]:
    """Returns one run for each rank, in order."""
    return tuple((run,) if run.size else () for run in cut(length, ranks))


def chunks(length: int, ranks: int) -> tuple[Runs, ...]:
    """Returns one run for each rank, as torch.chunk and DTensor's Shard cut: equal sizes, but a shorter or no last one."""
    size = -(-length // ranks)
    ends = [min(length, size * rank) for rank in range(ranks + 1)]
    return tuple((Run(*pair),) if pair[1] > pair[0] else () for pair in itertools.pairwise(ends))


def zigzag(length: int, ranks: int) -> tuple[Runs, ...]:
    """Returns parts r and 2 ranks - 1 - r of 2 ranks for rank r. If causal, one part sees few keys, and one many."""
    parts = cut(length, 2 * ranks)
    return tuple(joined((parts[rank], parts[2 * ranks - 1 - rank])) for rank in range(ranks))


def dealt(
    length: int,
    ranks: int,
    area: Callable[[Run], int],
    needs: Callable[[Run], Iterable[Run]],
    unit: int = 1,
    most_choices: int = MOST_CHOICES,
) -> tuple[Runs, ...]:
    """Returns equally many chunks for each rank, so that their total areas are nearly equal and few keys are fetched.

    Chunks are dealt from the largest to the smallest. Each goes to the rank with the least area so far (longest processing time
    first: Graham, 1969, https://doi.org/10.1137/0117039). Ranks with only a little more compete too: the one that already has most
    of the needed keys gets the chunk. A rank holds its chunks in the order of the sequence.

    area: the scores of the queries of a run. needs: the keys that they see. unit: chunks are multiples of this many tokens, if the
    length allows. most_choices: chunks times ranks, up to which several deals are tried.
    """
    per_rank = max(1, -(-length // (ranks * CHUNK)))
    if length < 16 * ranks * CHUNK:
        per_rank = max(1, min(16, length // (8 * ranks)))  # short sequences have as many chunks, but none under 8 tokens
    if unit > 1:
        per_rank = next((count for count in range(per_rank, 0, -1) if length % (ranks * count * unit) == 0), per_rank)
    chunks = cut(length, ranks * per_rank)
    areas = [area(chunk) for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    wanted = [_bits(needs(chunk), starts) for chunk in chunks]
    even = _deal(areas, wanted, ranks, 0.0)
    best, limit = even, max(MOST_IMBALANCE * sum(areas) / ranks, max(even.loads))
    for slack in SLACKS if len(chunks) * ranks <= most_choices else ():
        deal = _deal(areas, wanted, ranks, slack)
        if max(deal.loads) <= limit and deal.fetched < best.fetched:
            best = deal
    return tuple(joined(chunks[i] for i in sorted(own)) for own in best.chunks)


class _Deal(NamedTuple):
    chunks: list[list[int]]  # by rank
    loads: list[int]
    fetched: int  # chunks of keys, summed over all ranks


def _deal(areas: Sequence[int], wanted: Sequence[int], ranks: int, slack: float) -> _Deal:
    """Returns a deal in which a rank may lead the least loaded one by a fraction `slack` of the mean."""
    per_rank, spare = len(areas) // ranks, slack * sum(areas) / ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    loads, have, held = [0] * ranks, [0] * ranks, [0] * ranks
    least = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(areas)), key=lambda i: -areas[i]):
        while loads[least[0][1]] != least[0][0] or len(own[least[0][1]]) == per_rank:
            heapq.heappop(least)  # an entry that is out of date, or a full rank
        rank, limit = least[0][1], least[0][0] + spare
        if spare:
            open_ranks = [r for r in range(ranks) if len(own[r]) < per_rank and loads[r] <= limit]
            rank = max(open_ranks, key=lambda r: ((have[r] & wanted[i]).bit_count(), -loads[r]))
        own[rank].append(i)
        loads[rank] += areas[i]
        have[rank] |= wanted[i]
        held[rank] |= 1 << i
        heapq.heappush(least, (loads[rank], rank))
    return _Deal(own, loads, sum((a & ~b).bit_count() for a, b in zip(have, held, strict=True)))


def _bits(runs: Iterable[Run], starts: Sequence[int]) -> int:
    """Returns an int with one bit for each chunk that the runs touch. starts: of the chunks; the last one has no end."""
    bits = 0
    for run in runs:
        if run.size:
            first, last = (bisect.bisect_right(starts, position) - 1 for position in (run.start, run.stop - 1))
            bits |= ((1 << (last - first + 1)) - 1) << first
    return bits


def joined(runs: Iterable[Run]) -> Runs:
    """Returns the runs in their order, without empty ones and with adjacent ones joined."""
    result: list[Run] = []
    for run in runs:
        if run.size == 0:
            continue
        if result and result[-1].stop == run.start:
            result[-1] = Run(result[-1].start, run.stop)
        else:
            result.append(run)
    return tuple(result)


def union(runs: Iterable[Run]) -> Runs:
    """Returns the positions of all runs as sorted, disjoint runs."""
    result: list[Run] = []
    for run in sorted(run for run in runs if run.size):
        if result and run.start <= result[-1].stop:
            result[-1] = Run(result[-1].start, max(result[-1].stop, run.stop))
        else:
            result.append(run)
    return tuple(result)


def common(a: Runs, b: Iterable[Run]) -> Iterator[Run]:
    """Yields the positions that a and b have in common, in the order of b. a must be sorted and disjoint."""
    for run in b:
        for other in a[bisect.bisect_right(a, run.start, key=lambda other: other.stop) :]:
            if other.start >= run.stop:
                break
            both = Run(max(run.start, other.start), min(run.stop, other.stop))
            if both.size > 0:
                yield both


def without(runs: Iterable[Run], taken: Iterable[Run]) -> Iterator[Run]:
    """Yields the positions of the runs, which are sorted and disjoint, that are not taken."""
    rest = union(taken)
    for run in runs:
        start = run.start
        for other in common(rest, (run,)):
            if other.start > start:
                yield Run(start, other.start)
            start = other.stop
        if run.stop > start:
            yield Run(start, run.stop)


def size_of(runs: Iterable[Run]) -> int:
    return sum(run.size for run in runs)


def rows_of(runs: Runs) -> list[Run]:
    """Returns the rows of each run in a tensor that holds the runs one after another."""
    ends = list(itertools.accumulate((run.size for run in runs), initial=0))
    return [Run(*pair) for pair in itertools.pairwise(ends)]


def row_of(position: int, runs: Runs, rows: Sequence[Run]) -> int:
    """Returns the row of a position in a tensor that holds these runs."""
    return next(row.start + position - run.start for run, row in zip(runs, rows, strict=True) if run.start <= position < run.stop)


def positions(rows: Run, held: Runs) -> Runs:
    """Returns the positions of some rows of a tensor that holds the runs `held`."""
    result = []
    for run, at in zip(held, rows_of(held), strict=True):
        first, last = max(rows.start, at.start), min(rows.stop, at.stop)
        if first < last:
            result.append(Run(run.start + first - at.start, run.start + last - at.start))
    return tuple(result)


def places(runs: Iterable[Run], held: Runs) -> Runs:
    """Returns the rows of each of `runs` in a tensor that holds the runs `held`. Each run must lie in one of these."""
    rows = rows_of(held)
    starts = [(row_of(run.start, held, rows), run.size) for run in runs]
    return tuple(Run(row, row + size) for row, size in starts)
