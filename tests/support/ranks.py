"""Processes of a group, each forked from one that has torch imported."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # ranks import this, and conftest.py sets what a test's processes must not have
    from tests.conftest import FreshPython

MODULE = "tests.support.context_parallel_cases"
# Environment of its cases of compiled kernels, because compiling takes most of their time.
COMPILED_PARTS, EIGHT_BITS_PARTS, CAPTURED_PARTS = 16, 9, 4


def start_ranks(
    python: FreshPython, folder: Path, what: str, ranks: int, env: dict[str, str] | None = None, module: str = MODULE
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a suite of a module, or a script with its arguments, on as many ranks, and returns how each of them ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        group_settings = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | group_settings | (env or {})
        command = what.split() if ".py" in what else ["-m", module, what, str(rank), str(ranks), str(folder / "rendezvous")]
        return python(*command, env=settings)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


def run_ranks(
    python: FreshPython, folder: Path, what: str, ranks: int, env: dict[str, str] | None = None, module: str = MODULE
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `start_ranks`, and asserts that all ranks succeed."""
    found = start_ranks(python, folder, what, ranks, env, module)
    assert [one.returncode for one in found] == [0] * ranks, "\n".join(one.stdout + one.stderr for one in found)
    return found
