"""Cases of attention over ranks, run in gloo processes: `python -m tests.support.context_parallel_cases SUITE RANK RANKS FILE`."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from flexattn.distributed.plans import STRATEGIES
from tests.support import context_parallel_calls as calls


def features() -> None:
    """Every feature under two strategies, and the most used ones under all."""
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, *calls.sampled(problem, number + dist.get_world_size()))
    for name in ("causal", "documents"):
        calls.compare(calls.FEATURES[name], [None], STRATEGIES)
    calls.compare_drawn(range(12))


def all_features() -> None:
    """Every feature under every strategy in every layout."""
    for problem in calls.FEATURES.values():
        calls.compare(problem, calls.LAYOUTS, STRATEGIES)


def drawn() -> None:
    calls.compare_drawn(range(100, 400))


def in_float32() -> None:
    """Errors within those that one process makes in float32."""
    for name in ("causal", "a sink and a softcap", "a causal window", "documents", "documents with mods and a sink"):
        calls.compare(calls.FEATURES[name], [None], STRATEGIES, torch.float32)
    calls.compare_drawn(range(400, 420), torch.float32)


SUITES: dict[str, Any] = {f.__name__: f for f in (features, all_features, drawn, in_float32)}


def main(suite: str, rank: int, ranks: int, file: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timeout)
    SUITES[suite]()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291); whatever failed has raised


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
