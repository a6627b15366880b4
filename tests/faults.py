"""Mutation run: each fault of faults.json is put into a copy of the checkout, and the tests named beside it must fail.

    python tests/faults.py --processes 2 --page docs/faults.md

A fault that no test kills is a hole in the tests, or changes no result; `survives_because` says why it is accepted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".json")

LIMIT_S = 900  # for the tests of one fault

INTRODUCTION = """# Faults that the tests find

Made by `python tests/faults.py --page docs/faults.md`, which puts each fault into a copy of the checkout, one at a time, and runs
the tests named for it in `tests/faults.json`, without a GPU. Listed is the first test that failed. A fault survives when none of
them fails.

"""


class Fault(NamedTuple):
    """One edit of one file: `old`, which stands there exactly once, becomes `new`."""

    says: str  # the defect that a user would have
    file: str
    old: str
    new: str
    tests: Sequence[str]  # arguments of pytest
    survives_because: str = ""


class Outcome(NamedTuple):
    fault: Fault
    killed_by: str  # the first test that failed, "" for none


def faults() -> list[Fault]:
    return [Fault(**entry) for entry in json.loads(LIST.read_text())]


@contextlib.contextmanager
def injected(checkout: Path, fault: Fault) -> Iterator[None]:
    """Inside, the checkout has the fault."""
    path = checkout / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has the text of {fault.says!r} {source.count(fault.old)} times; accepted: once")
    path.write_text(source.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(source)


def first_failure(checkout: Path, tests: Sequence[str]) -> str:
    """The first of the tests that fails in the checkout, "" for none. Raises RuntimeError where pytest ran no test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no test in {LIMIT_S} s: {tests[0]} hangs"
    if ran.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if failed is None:
        if ran.returncode < 0:
            return f"{tests[0]} (the process died of signal {-ran.returncode})"
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return failed[1]


def judge(fault: Fault, checkouts: queue.Queue[Path]) -> Outcome:
    """What the tests make of one fault, in a checkout of its own for as long."""
    checkout = checkouts.get()
    try:
        with injected(checkout, fault):
            outcome = Outcome(fault, first_failure(checkout, fault.tests))
    finally:
        checkouts.put(checkout)
    print(f"{'killed' if outcome.killed_by else 'SURVIVES':8} {fault.file}: {fault.says}  {outcome.killed_by}", flush=True)
    return outcome


def copied(target: Path) -> Path:
    """A copy of every tracked file of the checkout, symbolic links as links."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in names.split("\0")[:-1]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    subprocess.run(["git", "init", "-q", str(target)], check=True)  # tests that list tracked files need one
    return target


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/faults.md of a run."""
    killed = sum(bool(outcome.killed_by) for outcome in outcomes)
    lines = [f"{len(outcomes)} faults, {killed} killed, {len(outcomes) - killed} alive.", ""]
    lines += ["| file | fault | killed by |", "|---|---|---|"]
    for fault, killed_by in outcomes:
        verdict = f"`{killed_by}`" if killed_by else f"survives: {fault.survives_because or 'not explained yet'}"
        lines.append(f"| `{fault.file}` | {fault.says} | {verdict.replace('|', chr(92) + '|')} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose file or text contains this")
    parser.add_argument("--page", type=Path, help="the page to write")
    arguments = parser.parse_args()
    chosen = [fault for fault in faults() if arguments.only in f"{fault.file} {fault.says}"]
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        checkouts: queue.Queue[Path] = queue.Queue()
        for i in range(arguments.processes):
            checkouts.put(copied(Path(scratch) / str(i)))
        outcomes = list(pool.map(functools.partial(judge, checkouts=checkouts), chosen))
    if arguments.page is not None:
        arguments.page.write_text(page(outcomes))
    alive = [outcome.fault for outcome in outcomes if not outcome.killed_by]
    print(f"{len(outcomes)} faults, {len(alive)} alive")
    return 1 if any(not fault.survives_because for fault in alive) else 0


if __name__ == "__main__":
    sys.exit(main())
