"""Slices of heads in which keys are fetched. The next slice travels during attention to the present one."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.distributed.layout import Run, cut

SLICE_BYTES = 16 << 20  # Least mean bytes that a rank receives for a slice. Smaller slices hide less than a collective's latency.
# Least mean FLOPs of a slice in a forward. With less, the host takes longer to launch slices than a GPU takes to compute them. On
# four H200s, three slices of 7e11 FLOPs took the host 15 to 20 ms forward and backward, and the GPUs 13 ms.
SLICE_PRODUCTS = 1.25e12
MIDDLE_BYTES = 256 << 20  # Most bytes of a slice between the first and the last. As many bytes of fetched keys are in memory twice.
# Most bytes of a slice that is read from symmetric memory. Nothing hides such reads, because kernels of attention leave no
# multiprocessor free. So keys come in several slices only to save memory.
NEAR_BYTES = 512 << 20
# the first and the last slice have a fourth each: nothing hides the transfer of the first one's keys, nor of the last one's
# gradients
END_SHARE = 4


class Slice(NamedTuple):
    q: Run
    kv: Run


class Load(NamedTuple):
    """Bytes that the busiest rank receives in a forward, and its FLOPs. Equal on all ranks.

    is_near: whether ranks use symmetric memory.
    """

    bytes: float
    products: float
    is_near: bool = False


def key_slices(heads: int, heads_kv: int, load: Load, ends: int) -> list[Slice]:
    """Returns the slices of heads in which keys come, the same on all ranks. ends: number of small slices, 1 or 2."""
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
