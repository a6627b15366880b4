"""Slices of heads in which keys, or heads of everything, travel: the next one while one is attended to."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.distributed.layout import Run, cut

SLICE_BYTES = 16 << 20  # that a rank receives for a slice on average: below, a collective's latency is more than a slice hides
MIDDLE_BYTES = 256 << 20  # most of a slice of keys, but for the first and the last one: as much of others' keys is held twice
END_SHARE = 4  # the first slice, whose keys nothing hides, and the last one, whose gradients nothing hides, have a fourth each
SLICE_ROWS = 1 << 16  # rows of one query head that a rank receives for a slice of heads: SLICE_BYTES at head dim 128 in 16 bits
MOST_HEAD_SLICES = 4


class Slice(NamedTuple):
    q: Run
    kv: Run


def key_slices(heads: int, heads_kv: int, received_bytes: float, ends: int) -> list[Slice]:
    """Returns the slices of heads in which keys come, whose number is the same on all ranks. ends: small ones, 1 or 2."""
    if heads_kv == 1 or received_bytes < 2 * SLICE_BYTES:
        runs = [Run(0, heads_kv)]
    else:
        end = max(1, heads_kv // END_SHARE)
        middle = heads_kv - min(ends, heads_kv // end - 1) * end
        count = min(middle, int(-(-received_bytes * middle // heads_kv // MIDDLE_BYTES)))
        stop = end + middle
        runs = [Run(0, end), *(Run(run.start + end, run.stop + end) for run in cut(middle, max(1, count)))]
        runs += [Run(stop, heads_kv)] if stop < heads_kv else []
    group = heads // heads_kv
    return [Slice(Run(group * run.start, group * run.stop), run) for run in runs]


def head_slices(heads: int, heads_kv: int, ranks: int, received_rows: float) -> int:
    """Returns the number of slices of a rank's heads for its tokens: several only where each rank has as many key heads of its own.

    received_rows: of one query head, on the rank that receives most: the same on all ranks.
    """
    if heads_kv % ranks:
        return 1
    own = heads_kv // ranks
    rows = received_rows * (heads // ranks)
    return next((n for n in range(MOST_HEAD_SLICES, 1, -1) if own % n == 0 and rows >= n * SLICE_ROWS), 1)
