"""Slices of heads in which keys travel, the next one while one is attended to."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.distributed.layout import Run, cut

SLICE_BYTES = 16 << 20  # that a rank receives for a slice on average: below, a collective's latency is more than a slice hides
# A forward's products of a slice on average: below, the host takes longer to begin slices than a GPU to compute them, as four H200s
# showed (three slices of 7e11 products took the host 15 to 20 ms forward and backward, and the GPUs 13).
SLICE_PRODUCTS = 1.25e12
MIDDLE_BYTES = 256 << 20  # most of a slice of keys, but for the first and the last one: as much of others' keys is held twice
# Most of a slice of keys that ranks read where they lie. Nothing hides it: kernels of attention leave no multiprocessor to the one
# that reads, so such keys come in slices only where they would take too much memory.
NEAR_BYTES = 512 << 20
END_SHARE = 4  # the first slice, whose keys nothing hides, and the last one, whose gradients nothing hides, have a fourth each


class Slice(NamedTuple):
    q: Run
    kv: Run


class Load(NamedTuple):
    """Bytes that the busiest rank receives in a forward, and products that it computes: the same numbers on all ranks.

    is_near: whether ranks read each other's memory.
    """

    bytes: float
    products: float
    is_near: bool = False


def key_slices(heads: int, heads_kv: int, load: Load, ends: int) -> list[Slice]:
    """Returns the slices of heads in which keys come, whose number is the same on all ranks. ends: small ones, 1 or 2."""
    if load.is_near:
        runs = cut(heads_kv, min(heads_kv, max(1, int(-(-load.bytes // NEAR_BYTES)))))
    elif heads_kv == 1 or load.bytes < 2 * SLICE_BYTES or load.products < 2 * SLICE_PRODUCTS:
        runs = [Run(0, heads_kv)]
    else:
        end = max(1, heads_kv // END_SHARE)
        middle = heads_kv - min(ends, heads_kv // end - 1) * end
        count = min(middle, int(-(-load.bytes * middle // heads_kv // MIDDLE_BYTES)))
        stop = end + middle
        runs = [Run(0, end), *(Run(run.start + end, run.stop + end) for run in cut(middle, max(1, count)))]
        runs += [Run(stop, heads_kv)] if stop < heads_kv else []
    group = heads // heads_kv
    return [Slice(Run(group * run.start, group * run.stop), run) for run in runs]
