"""First checks on a machine with a GPU, in under ten minutes: compiled tests, memory checks, the benchmark.

    python -m flexattn.bench.gpu_check                    # all steps
    python -m flexattn.bench.gpu_check memcheck bench     # some of them, in this order

Logs and results go to $OUT (default ./out). A step that fails or runs out of time does not keep the next one from running; the last
lines say how each one ended, and the exit status is 0 if all ended well. A step that is run again replaces what it wrote.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import flexattn

ROOT = Path(flexattn.__file__).parent.parent  # the checkout: its tests are what runs
TOTAL_SECONDS = 570.0
WORKERS = 8
SANITIZER_FAILED = 99
PORTABLE = "tests/portable/test_attention.py"
# Every kernel under what makes addresses hard: gaps, uneven and wrong lengths, odd head dims, bias, dropout, split gradients.
MEMCHECK_TESTS = (
    "everything_together or bias_of_ragged or wrong_cu_seqlens or head_dims or dropout or (test_grouped_heads and 12)"
    " or (test_format_mask_dtype and thd and bfloat16)"
)


class Step(NamedTuple):
    name: str
    command: Sequence[str]
    seconds: float  # at most
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    step: str
    status: str  # "ok", "failed (2)", "timed out" or "not run"
    seconds: float
    last_words: str


def steps(out: Path) -> list[Step]:
    python, pytest = [sys.executable], [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    memcheck = [sanitizer, "--tool", "memcheck", "--kernel-name", "kns=_attn", "--report-api-errors", "no", "--print-limit", "20"]
    return [
        Step("triton", [*pytest, "-n", str(WORKERS), PORTABLE], 180),
        # its largest tests take some 40 GiB each
        Step("gpu", [*pytest, "-n", "2", "tests/gpu/test_gpu.py"], 120),
        Step(
            "memcheck",
            [*memcheck, "--error-exitcode", str(SANITIZER_FAILED), *pytest, PORTABLE, "-k", MEMCHECK_TESTS],
            100,
            # an allocation of its own for each tensor: inside a cached block nothing is out of bounds
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        Step("bench", [*python, "-m", "flexattn", "bench", "--quick", "--budget-s", "240", "--out", str(out / "bench.json")], 260),
    ]


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """Runs a step for at most `seconds`, with its log in `out`; what it has started ends with it."""
    if seconds <= 0:
        return Outcome(step.name, "not run", 0.0, "no time was left for it")
    log = out / f"{step.name}.log"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **step.environment}
    start = time.monotonic()
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as e:
            file.write(f"{e}\n")
            return Outcome(step.name, "failed (not started)", 0.0, str(e))
        try:
            code = process.wait(timeout=seconds)
            status = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            stop(process)
    return Outcome(step.name, status, time.monotonic() - start, last_words(log.read_text(errors="replace")))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group that `run` started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def last_words(log: str) -> str:
    """The lines that sum up a log: pytest's counts, the sanitizer's errors, the verdict on the benchmark; else its last line."""
    patterns = (
        r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s)",
        r"(ERROR SUMMARY: .*)",
        r"(matrix product .*TFLOP/s)",
        r"(faster than .*)",
    )
    found = [match[1].strip() for line in log.splitlines() for pattern in patterns if (match := re.search(pattern, line))]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return "; ".join(found) or (lines[-1] if lines else "it wrote nothing")


def table(outcomes: Sequence[Outcome]) -> str:
    width = max(len(outcome.status) for outcome in outcomes)
    return "\n".join(f"{o.step:10} {o.status:{width}} {o.seconds:6.0f} s  {o.last_words[:200]}" for o in outcomes)


def check(todo: Sequence[Step], out: Path, total_seconds: float) -> list[Outcome]:
    """Runs the steps one after the other, whatever becomes of each, in `total_seconds` together."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total_seconds
    outcomes = []
    for step in todo:
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        outcomes.append(run(step, out, min(step.seconds, end - time.monotonic())))
        print(table(outcomes[-1:]), flush=True)
        (out / "summary.txt").write_text(table(outcomes) + "\n")
    return outcomes


def main(arguments: Sequence[str]) -> int:
    out = Path(os.environ.get("OUT") or "out").resolve()
    known = {step.name: step for step in steps(out)}
    parser = argparse.ArgumentParser(
        prog="python -m flexattn.bench.gpu_check", description="tests, memory checks and the benchmark on a GPU"
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(known)}; default all")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all steps together")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.steps if name not in known]:
        parser.error(f"unknown steps {', '.join(unknown)}; accepted: {', '.join(known)}")
    if not (ROOT / "tests").is_dir():
        parser.error(f"it runs the tests of a checkout, and {ROOT} has none; clone the repository and run it there")
    outcomes = check([known[name] for name in args.steps or known], out, args.seconds)
    print(f"\n{table(outcomes)}\nlogs in {out}")
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
