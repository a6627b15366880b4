"""Processes of a group, each forked from one that has torch imported."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import FreshPython

MODULE = "tests.support.context_parallel_cases"


def run_ranks(
    python: FreshPython, folder: Path, what: str, ranks: int, env: dict[str, str] | None = None, module: str = MODULE
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a suite of a module, or a script with its arguments, on as many ranks, and asserts that all of them end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        of_group = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | of_group | (env or {})
        command = what.split() if ".py" in what else ["-m", module, what, str(rank), str(ranks), str(folder / "rendezvous")]
        return python(*command, env=settings)

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, range(ranks)))
    assert [one.returncode for one in found] == [0] * ranks, "\n".join(one.stdout + one.stderr for one in found)
    return found
