"""The kernels for mma.sync as code of an older GPU: tests, random calls and the bench, in a given time.

    python -m tests.device.older --as sm_80 --minutes 7 --out FOLDER
    python -m tests.device.older --as sm_89 --minutes 5 --out FOLDER

FOLDER gets `device_mma_TARGET_tests.json`, `device_mma_TARGET_calls.json`, `mma_TARGET_GPU.json` and logs. Each program writes
its file as it runs, and ends in its share of the time, or is killed a little later.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flexattn.bench.shapes import OLDER

TESTS = "tests/mma/test_device.py"
SHARES = {"tests": 0.24, "calls": 0.14, "bench": 0.62}
GRACE = 20.0  # seconds after its share in which a program may end
CALLS = ("fuzz", "memcheck", "racecheck")
MEASURED = ("mma", "mma deterministic", "portable")
PEERS = ("SDPA flash", "FlexAttention")


def commands(target: str, seconds: float, out: Path, gpu: str, processes: int) -> dict[str, list[str]]:
    """Returns the command of each part."""
    device = ["tests.device", "--as", target, "--processes", str(processes)]
    shares = {name: share * seconds for name, share in SHARES.items()}
    minutes = {name: ["--minutes", f"{share / 60:.2f}"] for name, share in shares.items()}
    parts = {
        "tests": [*device, *minutes["tests"], "--only", "tests", "--tests", TESTS],
        "calls": [*device, *minutes["calls"], "--only", *CALLS],
        "bench": ["flexattn", "bench", "--as", target, "--preset", OLDER, "--backends", *MEASURED, "--peers", *PEERS],
    }
    parts["bench"] += ["--mma-tiles", "--budget-ms", "20", "--budget-s", f"{shares['bench']:.0f}"]
    parts["bench"] += ["--compile-processes", str(processes)]
    files = {
        "tests": f"device_mma_{target}_tests.json",
        "calls": f"device_mma_{target}_calls.json",
        "bench": f"mma_{target}_{gpu}.json",
    }
    return {name: [sys.executable, "-m", *command, "--out", str(out / files[name])] for name, command in parts.items()}


def run(command: list[str], log: Path, seconds: float) -> str:
    """Runs a program with its output in a file; returns how it ended."""
    environment = {**os.environ, "FLEXATTN_HOPPER": "always", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            return f"status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {seconds:.0f} s"


def main() -> int:
    options = parse()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    seconds = 60.0 * options.minutes - GRACE
    for name, command in commands(options.target, seconds, out, gpu_name(), options.processes).items():
        began, log = time.monotonic(), out / f"{name}_{options.target}.log"
        end = run(command, log, SHARES[name] * seconds + GRACE)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-options.lines :])
        sys.stdout.write(f"{name}: {end}, {time.monotonic() - began:.0f} s\n{tail[-3000:]}\n")
        sys.stdout.flush()
    return 0


def gpu_name() -> str:
    """Returns the GPU's short name, as in the names of result files: "h200"."""
    import torch

    name: Any = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return next((word.lower() for word in name.split() if word[:1] in "ABHL" and word[1:].isdigit()), "gpu")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="target", required=True, metavar="sm_80", help="the older target")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the folder for results")
    parser.add_argument("--minutes", type=float, default=7.0, help="for all parts together")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile, or use the GPU")
    parser.add_argument("--lines", type=int, default=12, help="of each log that are printed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
