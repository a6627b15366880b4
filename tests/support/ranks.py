"""Processes of a group, each forked from one that has torch imported."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import FreshPython

MODULE = "tests.support.context_parallel_cases"


def run_ranks(python: FreshPython, folder: Path, suite: str, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Runs a suite on as many ranks, and asserts that all of them end well."""

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return python("-m", MODULE, suite, str(rank), str(ranks), str(folder / "rendezvous"), env=settings)

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, range(ranks)))
    assert [one.returncode for one in found] == [0] * ranks, "\n".join(one.stdout + one.stderr for one in found)
    return found
