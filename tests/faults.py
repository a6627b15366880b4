"""Mutation run: each fault of faults.json is put into a copy of the checkout, and the tests named beside it must fail.

    python -m tests.faults --processes 2 --kept outcomes.json --record

A fault is an edit by syntax (tests/support/syntax.py): the code `old` becomes `new`. If the file has `old` more than once, `where`
names the function or class. Layout and comments do not matter.

A fault that no test kills is a hole in the tests, or changes no result; `survives_because` says why it is accepted. `--record`
writes the first test that fails into faults.json as `found_by`, if it passes without the fault; tests/conftest.py runs these tests
by default. With `--kept`, the tests that kill are written to a file as they are found, and a killed fault is not tried again while
it, its file and the names of its tests are as they were.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import syntax

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".json")
LIMIT_S = 300  # for the tests of one fault
DIED = " (the process died of signal "


class Fault(NamedTuple):
    """One edit of one file: the code `old`, which is there once, becomes `new`."""

    says: str  # the defect that a user would have
    file: str
    old: str
    new: str
    tests: Sequence[str]  # arguments of pytest
    survives_because: str = ""
    found_by: str = ""  # the first of the tests that failed in the last recorded run
    where: str = ""  # the function or class that has `old`, such as "f" or "Class.method"; "" if the file has it once


class Outcome(NamedTuple):
    fault: Fault
    killed_by: str  # the first test that failed, "" for none


class Kept:
    """The tests that killed faults, in a file, each under a digest; without a file nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.killed_by: dict[str, str] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def add(self, key: str, killed_by: str) -> None:
        with self.lock:
            self.killed_by[key] = killed_by
            if self.path is not None:
                self.path.write_text(json.dumps(self.killed_by, indent=1))


def faults() -> list[Fault]:
    return [Fault(**entry) for entry in json.loads(LIST.read_text("utf-8"))]


def test_files(tests: Sequence[str]) -> list[str]:
    """The files that arguments of pytest name."""
    return [path for path, _, _ in (test.partition("::") for test in tests) if path.endswith(".py")]


def digest(checkout: Path, fault: Fault) -> str:
    """Digest of an edit, of the file that it is in, and of the names of its tests."""
    source = (checkout / fault.file).read_text()
    return hashlib.sha256(json.dumps([fault.file, source, fault.where, fault.old, fault.new, *fault.tests]).encode()).hexdigest()


def edit(source: str, fault: Fault) -> str:
    """Returns the source with the fault. Raises ValueError if its place is not found once."""
    try:
        return syntax.replaced(source, fault.old, fault.new, fault.where)
    except ValueError as e:
        raise ValueError(f"{fault.file}: {fault.says}: {e}") from e


@contextlib.contextmanager
def injected(checkout: Path, fault: Fault) -> Iterator[None]:
    """Inside, the checkout has the fault."""
    path = checkout / fault.file
    source = path.read_text()
    edited = edit(source, fault)
    compiled = Path(importlib.util.cache_from_source(str(path)))  # by size and second, which the edit may leave as they are
    try:
        path.write_text(edited)
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(source)
        compiled.unlink(missing_ok=True)


def first_failure(checkout: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """The first of the tests that fails in the checkout, "" for none. Raises RuntimeError where pytest ran no test, or cannot."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = _SERVER.Process(target=_run_tests, args=(checkout, tests, output.name))
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise RuntimeError(f"pytest {' '.join(tests)} took more than {limit_s} s; name fewer tests")
        text, ended_with = output.read(), process.exitcode or 0
    if ended_with == 0:
        return ""
    if ended_with < 0 and ended_with != -signal.SIGKILL:  # that one is the machine's, short of memory
        return f"{tests[0]}{DIED}{-ended_with})"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed is None or ended_with != 1:
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {ended_with}:\n{text[-2000:]}")
    return failed[1]


# Each run of pytest is forked from a process that has imported what no fault is in, which takes as long as many a test.
_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["numpy", "pytest", "torch", "torch.fx.experimental.proxy_tensor", "triton", "triton.language"]


def _run_tests(checkout: Path, tests: Sequence[str], output: str) -> None:
    """pytest's main in a process of its own, on the modules of the checkout."""
    with open(output, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path[:] = [str(checkout), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests")))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # of this checkout
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *tests]))


def judge(fault: Fault, checkouts: queue.Queue[Path], kept: Kept) -> Outcome | None:
    """Returns the verdict of the tests on one fault, in a checkout of its own for as long; None where it cannot be put in, or
    no test runs.
    """
    checkout = checkouts.get()
    begin = time.monotonic()
    try:
        key = digest(checkout, fault)
        if key in kept.killed_by:
            return Outcome(fault, kept.killed_by[key])
        with injected(checkout, fault):
            outcome = Outcome(fault, first_failure(checkout, fault.tests))
    except (RuntimeError, ValueError) as e:
        print(f"BROKEN   {fault.file}: {fault.says}: {e}", flush=True)
        return None
    finally:
        checkouts.put(checkout)
    if outcome.killed_by:
        kept.add(key, outcome.killed_by)
    verdict = f"{'killed' if outcome.killed_by else 'SURVIVES':8} {time.monotonic() - begin:4.0f} s"
    print(f"{verdict} {fault.file}: {fault.says}  {outcome.killed_by}", flush=True)
    return outcome


def copied(target: Path) -> Path:
    """A copy of every tracked file of the checkout, symbolic links as links."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in names.split("\0")[:-1]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    subprocess.run(["git", "init", "-q", str(target)], check=True)  # tests that list tracked files need one
    return target


def record(outcomes: Sequence[Outcome]) -> None:
    """Writes the tests that found the faults into faults.json."""
    found = {(outcome.fault.file, outcome.fault.says): outcome.killed_by for outcome in outcomes}
    entries = json.loads(LIST.read_text("utf-8"))
    for entry in entries:
        test = found.get((entry["file"], entry["says"]), entry.get("found_by", ""))
        entry.pop("found_by", None)
        if test:
            entry["found_by"] = test
    LIST.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose file or text contains this")
    parser.add_argument("--kept", type=Path, help="a file of outcomes, read first and written as they come")
    parser.add_argument("--record", action="store_true", help="write what found the faults into faults.json")
    arguments = parser.parse_args()
    chosen = [fault for fault in faults() if arguments.only in f"{fault.file} {fault.says}"]
    kept = Kept(arguments.kept)
    # Before torch and triton are imported, as tests/conftest.py sets them.
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _SERVER.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        checkouts: queue.Queue[Path] = queue.Queue()
        for i in range(arguments.processes):
            checkouts.put(copied(Path(scratch) / str(i)))
        judged = list(pool.map(functools.partial(judge, checkouts=checkouts, kept=kept), chosen))
        outcomes = [outcome for outcome in judged if outcome is not None]
        if len(outcomes) < len(chosen):
            return 2
        killers = sorted({outcome.killed_by.partition(DIED)[0] for outcome in outcomes if outcome.killed_by})
        if arguments.record and killers and (failed := first_failure(checkouts.get(), killers, 10 * LIMIT_S)):
            print(f"{failed} fails without a fault, too")
            return 2
    if arguments.record:
        record(outcomes)
    alive = [outcome.fault for outcome in outcomes if not outcome.killed_by]
    print(f"{len(outcomes)} faults, {len(alive)} alive")
    return 1 if any(not fault.survives_because for fault in alive) else 0


if __name__ == "__main__":
    sys.exit(main())
