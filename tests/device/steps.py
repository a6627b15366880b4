"""The steps of a device run. Each tells its part of the result as it runs, so that a run that is killed keeps it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.processes import STRIDE, VALUES, Found, Job, Process, command_of, failures, run_all

Tell = Callable[[dict[str, Any]], None]  # receives the findings of a step so far

ROOT = Path(__file__).parent.parent.parent
# Tests that use the GPU if there is one: two folders, and files that ask whether there is.
FOLDERS = ("tests/gpu", "tests/hopper")
TESTS = FOLDERS + tuple(
    name
    for name in sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/test_*.py"))
    if not name.startswith((*FOLDERS, "tests/cudnn/")) and "torch.cuda.is_available()" in (ROOT / name).read_text("utf-8")
)
MARKS = "not slow and not exhaustive"
FIRST = "tests/gpu/"
CHUNK = 8  # tests
LARGE = "tests/gpu/test_gpu.py"  # its tests take up to 40 GiB each, so one process runs them all
JAX = "tests/gpu/test_jax"  # JAX's client has threads whose calls end a capture of the same process in CUDA's default mode
JAX_AROUND = 25.0
GRACE = 110.0  # most seconds that a kernel takes to compile beside those of other processes
JAX_CALLS = "python -m tests.fuzz.jax_calls --device cuda"
SANITIZER_FAILED = 99
COMPILING = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TRITON_INTERPRET": ""}
SANITIZE = ("--kernel-name", "kns=_attn", "--print-limit", "20")
TOOLS = {"memcheck": ("--tool", "memcheck", "--report-api-errors", "no"), "racecheck": ("--tool", "racecheck")}
ERRORS = re.compile(r"(?:ERROR SUMMARY: |hazards? displayed \()(\d+) error")
SANITIZED_VALUES = 4  # calls of each configuration


# Numbers of which one is above 0 if a step made any call.
MADE = {
    "tests": ("passed", "failed"),
    "fuzz": ("compositions", "wrong"),
    "jax": ("compositions",),
    "memcheck": ("calls of attention", "wrong", "errors"),
    "racecheck": ("calls of attention", "wrong", "errors"),
}


def has_run(step: str, found: dict[str, Any]) -> bool:
    """Returns whether a step made a call, from its findings. A step without calls shows nothing."""
    return any(found.get(name) for name in MADE[step])


class Run(NamedTuple):
    """The machine's share of a step."""

    folder: Path  # for logs
    seconds: float
    processes: int
    seed: int
    device: str = "cuda"
    tests: Sequence[str] = TESTS
    marks: str = MARKS  # of the tests
    values: int = VALUES  # calls of each configuration of `fuzz`


def tests(run: Run, tell: Tell) -> dict[str, Any]:
    """Runs pytest in several processes, each on one of the `shares` of the tests."""
    end = time.monotonic() + run.seconds
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", run.marks]
    environment = {**os.environ, **{name: value for name, value in COMPILING.items() if value}}
    listing = subprocess.run([*pytest, "--collect-only", *run.tests], capture_output=True, text=True, env=environment)
    names = [line for line in listing.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    processes, logs = [], []
    for n, share in enumerate(shares(names, run.processes)):
        (run.folder / f"tests{n}.txt").write_text("\n".join(share) + "\n")
        logs.append(run.folder / f"tests{n}.jsonl")
        logs[-1].write_text("")
        with (run.folder / f"tests{n}.out").open("w") as out:
            processes.append(
                subprocess.Popen(
                    [*pytest, "-p", "tests.device.report", f"@{run.folder / f'tests{n}.txt'}"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**environment, "FLEXATTN_DEVICE_LOG": str(logs[-1])},
                    start_new_session=True,
                )
            )
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(2.0)
        tell(_outcomes(names, logs))
    crashed = [n for n, process in enumerate(processes) if process.poll() not in (None, 0, 1)]  # 1: a test failed
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    ends = [(run.folder / f"tests{n}.out").read_text(errors="replace")[-600:] for n in crashed]
    no_tests = {"not run": (listing.stdout + listing.stderr)[-600:] or "no test was found"}
    return _outcomes(names, logs) | {"crashed": len(crashed), "ends": ends} if names else no_tests


def shares(names: Sequence[str], processes: int) -> list[list[str]]:
    """Returns the tests of each process, in the order of `chunks_in_order`: LARGE and JAX have processes without other tests."""
    large, jax_tests = ([name for name in names if name.startswith(prefix)] for prefix in (LARGE, JAX))
    others = [name for name in names if not name.startswith((LARGE, JAX))]
    found = [large] if large else []
    left = max(1, processes - len(found))
    for_jax = 0 if not jax_tests else max(1, left // 4) if others else left
    for group, count in ((jax_tests, for_jax), (others, max(1, left - for_jax))):
        chunks = chunks_in_order(group)
        found += [[name for chunk in chunks[n::count] for name in chunk] for n in range(count)]
    return [share for share in found if share]


def chunks_in_order(names: Sequence[str]) -> list[list[str]]:
    """Returns chunks of neighbours, which share kernels: the first of each file in tests/gpu, their second ones, then others."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(name.split("::")[0], []).append(name)
    chunks = [
        (not file.startswith(FIRST), n, tests[n : n + CHUNK])
        for file, tests in by_file.items()
        for n in range(0, len(tests), CHUNK)
    ]
    return [chunk for _, _, chunk in sorted(chunks, key=lambda chunk: chunk[:2])]


def _outcomes(names: Sequence[str], logs: Sequence[Path]) -> dict[str, Any]:
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.endswith("}")]
    outcomes = Counter(line["outcome"] for line in lines)
    done = {line["test"] for line in lines}
    by_file: dict[str, Counter[str]] = {}
    for line in lines:
        by_file.setdefault(line["test"].split("::")[0], Counter())[line["outcome"]] += 1
    for name in set(names) - done:
        by_file.setdefault(name.split("::")[0], Counter())["not run"] += 1
    return {
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "not run": len(set(names) - done),
        "files": {name: dict(count) for name, count in sorted(by_file.items())},
        "skipped for": dict(Counter(line["text"] for line in lines if line["outcome"] == "skipped").most_common()),
        "failures": [{"name": line["test"], "text": line["text"][-700:]} for line in lines if line["outcome"] == "failed"][:40],
        "families": sorted({family for line in lines for family in line["families"]}),
        "slowest": [f"{line['test']} {line['seconds']} s" for line in sorted(lines, key=lambda line: -line["seconds"])[:8]],
    }


def fuzz(run: Run, tell: Tell) -> dict[str, Any]:
    """Makes random calls on the Triton backend, and random calls of JAX in another process if JAX is installed."""
    jobs = [
        Job(command_of("triton", run.device, run.values), run.seed * 10**9 + n * STRIDE, COMPILING if run.device == "cuda" else {})
        for n in range(run.processes)
    ]
    where = f"--backend triton --device {run.device}"

    def result(found: Found) -> dict[str, Any]:
        return {"seed": run.seed, "wrong": len(found.failures), "failures": failures(where, found), **found.summary()}

    found, _ = run_all(jobs, run.folder, run.seconds, GRACE, lambda found: tell(result(found)))
    return result(found)


def jax(run: Run, tell: Tell) -> dict[str, Any]:
    """Makes random calls in JAX, by `tests.fuzz.jax_calls`, in processes side by side."""
    if importlib.util.find_spec("tests.fuzz.jax_calls") is None or importlib.util.find_spec("jax") is None:
        return {"not run": "jax, or tests.fuzz.jax_calls, is not there"}
    # Each process needs time to begin, and for the call that it makes when its time is up.
    seconds = max(run.seconds - JAX_AROUND, run.seconds / 4)
    logs = [run.folder / f"jax{n}.json.log" for n in range(run.processes)]
    processes = []
    for n, log in enumerate(logs):
        log.write_text("")
        command = [sys.executable, "-m", "tests.fuzz.jax_calls", "--device", run.device, "--seconds", f"{seconds:.0f}"]
        command += ["--seed", str(run.seed * 1000 + n), "--out", str(log.with_suffix(""))]
        with log.with_suffix(".err").open("w") as errors:
            environment = {**os.environ, **{name: value for name, value in COMPILING.items() if value}}
            processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, start_new_session=True))
    end = time.monotonic() + run.seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(1.0)
        tell(_of_jax(logs))
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return _of_jax(logs)


def _of_jax(logs: Sequence[Path]) -> dict[str, Any]:
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.endswith("}")]
    lines = [line for line in lines if "name" in line]
    wrong = [line for line in lines if line["wrong"]]
    has = Counter(feature for line in lines for feature in line.get("has", ()))
    is_wrong = Counter(feature for line in wrong for feature in line.get("has", ()))
    return {
        "compositions": len(lines),
        "wrong": len(wrong),
        "failures": [
            {"name": line["name"], "again": f"{JAX_CALLS} --only {line['name']}", "what": line["wrong"]} for line in wrong[:20]
        ],
        "features": {name: [count, is_wrong[name]] for name, count in sorted(has.items())},
        "ended": [log.with_suffix(".err").read_text(errors="replace")[-400:] for log in logs] if not lines else [],
    }


def memcheck(run: Run, tell: Tell) -> dict[str, Any]:
    """Random calls of the configurations of `fuzz` under compute-sanitizer, every tensor in an allocation of its own."""
    return _sanitized("memcheck", run, tell)


def racecheck(run: Run, tell: Tell) -> dict[str, Any]:
    """The same calls under the tool that finds hazards of shared memory. It knows cp.async, and not the copy engine of sm_90."""
    return _sanitized("racecheck", run, tell)


def _sanitized(tool: str, run: Run, tell: Tell) -> dict[str, Any]:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        return {"not run": "compute-sanitizer is not there"}
    # The capture of a graph needs the caching allocator, which is off in this step.
    command = [sanitizer, *TOOLS[tool], *SANITIZE, "--error-exitcode", str(SANITIZER_FAILED)]
    command += command_of("triton", "cuda", SANITIZED_VALUES, "--no-guards", "--without", "modes")
    environment = {**COMPILING, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    jobs = [Job(command, run.seed * 10**9 + n * STRIDE, environment) for n in range(run.processes)]

    def result(found: Found, processes: Sequence[Process] = ()) -> dict[str, Any]:
        reports = [ERRORS.findall(process.errors) for process in processes]
        summary = found.summary()
        lines = [line for process in processes for line in process.errors.splitlines()]
        first = [line for line in lines if any(word in line for word in ("Invalid", "Race reported", " at "))]
        return {
            "calls of attention": summary["calls of attention"],
            "wrong": len(found.failures),
            "failures": failures("--backend triton --device cuda --without modes --no-guards", found, 20),
            "errors": sum(int(count) for report in reports for count in report),
            "processes": len(processes),
            "processes with a summary": sum(bool(report) for report in reports),
            "reports": [line[:200] for line in first[:20]],
            "families": summary["families"],
            "kernels": summary["kernels compiled or loaded"],
        }

    found, processes = run_all(jobs, run.folder, run.seconds, GRACE, lambda found: tell(result(found)))
    return result(found, processes)
