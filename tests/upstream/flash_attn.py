"""Runs a sample of FlashAttention's own test files through `flexattn.integrations.flash_attn.install()`, on a CPU.

    python -m tests.upstream.flash_attn CHECKOUT [--sample 16] [--seed 0] [--out FILE] [--only FILE]

CHECKOUT is one of https://github.com/Dao-AILab/flash-attention; its tests need einops. Each test function runs `--sample` cases,
for 20 seconds at most. The seed draws them from the cases that are short enough for a CPU. If one skips itself, another replaces
it. The program prints a line for each file, and writes counts and reasons as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.upstream import checkout

FILES = (
    "tests/test_flash_attn.py",
    "hopper/test_flash_attn.py",
    "hopper/test_attn_kvcache.py",
    "tests/cute/test_flash_attn.py",
    "tests/cute/test_flash_attn_combine.py",
    "tests/cute/test_flash_attn_fast.py",
    "tests/cute/test_flash_attn_varlen.py",
)
DIFFERENT = {  # test cases, by a pattern, that check FlashAttention's internals alone
    "test_flash_attn_invalid_head_dim": "expects an error for head dims that flexattn takes",
    "test_flash_attn_varlen_seqlen_k_per_split": "expects other bits for other splits, which flexattn chooses itself",
    r"test_flash_attn_varlen_cumsum_metadata_paths\[.*metadata": "reads the plan of FlashAttention's scheduler",
    "test_flash3_bw_compatibility": "reads the schema of FlashAttention's C++ operator",
    "test_flash_attn_kvcache_paged_block_table_bounds": "expects a RuntimeError where flexattn raises a ValueError",
    "test_flash_attn_generator_arg_must_be_none": "calls FlashAttention's C++ operator",
}
MOST_WORK = 320 * 320 * 128  # queries * keys * head dim of a case: about two seconds
MOST_SECONDS, FUNCTION_SECONDS = 10, 20  # for a case, and for all of a function before the next one begins
CANDIDATES = 6  # cases drawn for each one that is to run


def work_of(function: str, parameters: dict[str, Any]) -> float:
    """Returns queries * keys * head dim of a case, by the files' own names."""
    lengths = [value for name, value in parameters.items() if "seq" in name and "len" in name and type(value) is int]
    pairs = math.prod(lengths[:2]) if len(lengths) > 1 else math.prod(lengths) ** 2
    dims = [value for name, value in parameters.items() if name in ("d", "D", "headdim", "head_dim")]
    return pairs * max(dims, default=128) * (64 if "mla" in function else 1)  # with 128 heads, and 512 dims of v


class Sample:
    """A pytest plugin: draws cases, and counts their outcomes."""

    def __init__(self, cases: int, seed: int) -> None:
        self.cases, self.draw = cases, random.Random(seed)
        self.collected = self.too_long = 0
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.different: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.failures: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        functions: dict[str, list[Any]] = {}
        self.collected = len(items)
        for item in items:
            if (
                reason := next((reason for pattern, reason in DIFFERENT.items() if re.match(pattern, item.name)), None)
            ) is not None:
                self.different[reason] += 1
            elif work_of(item.originalname, item.callspec.params if hasattr(item, "callspec") else {}) <= MOST_WORK:
                functions.setdefault(item.originalname, []).append(item)
        self.too_long = self.collected - self.different.total() - sum(map(len, functions.values()))
        items[:] = [
            item for found in functions.values() for item in self.draw.sample(found, min(len(found), CANDIDATES * self.cases))
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        # If there are enough of them, nothing runs and nothing is reported.
        return True if self.ran[item.originalname] >= self.cases or self.seconds[item.originalname] >= FUNCTION_SECONDS else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        def stop(*_: Any) -> None:
            pytest.skip(f"takes longer than {MOST_SECONDS} s on a CPU")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(MOST_SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if call.when != "call" and report.passed:
            return report
        error = call.excinfo.value if call.excinfo else None
        refusal = None if error is None else refused(error)
        if refusal:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {refusal}")
        self.ran[item.originalname] += report.outcome != "skipped"
        self.seconds[item.originalname] += call.duration
        self.outcomes["refused" if refusal else report.outcome] += 1
        if report.skipped:
            self.reasons[refusal or reason_of(report)] += 1
        elif report.failed:
            self.failures[item.nodeid.split("/")[-1]] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return report


def refused(error: BaseException) -> str | None:
    """Returns the sentence with which an integration refuses an argument, or None for another error."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = "flexattn" in frames[-1].filename
    if is_ours and (isinstance(error, NotImplementedError) or "page_table is given with" in str(error)):
        return re.sub(r" \(\w+\)", "", str(error).split(";")[0])
    if isinstance(error, TypeError) and (name := re.search(r"unexpected keyword argument '(\w+)'", str(error))):
        return f"passes `{name[1]}`, which FlashAttention's function does not take any more"
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return "takes more memory than the machine has"
    return None


def reason_of(report: Any) -> str:
    """Returns a skipped test's own reason."""
    text = getattr(report, "wasxfail", "") or report.longrepr[2]
    return re.sub(r"^Skipped:?\s*", "", text) or "skips itself, without a reason"


def run_file(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sample of one file in this process, and returns its counts."""
    torch.set_num_threads(1)
    sample = Sample(options.sample, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = checkout.written(options.checkout, options.only, Path(folder))
        checkout.provide(options.checkout, options.only)
        begin = time.process_time()
        pytest.main(
            ["-vv", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--durations=8", "-c", "/dev/null", str(path)],
            plugins=[sample],
        )
    return {
        "file": options.only,
        "collected": sample.collected,
        "too long for a CPU": sample.too_long,
        **{name: sample.outcomes[name] for name in ("passed", "failed", "refused", "skipped")},
        "reasons": dict(sample.reasons.most_common()),
        "do not apply": dict(sample.different),
        "failures": sample.failures,
        "CPU seconds": round(time.process_time() - begin),
    }


def summary(result: dict[str, Any]) -> str:
    """Returns a result in the format of docs/doors.md: counts of each file, and the reasons of cases that did not run."""
    columns = ("collected", "too long for a CPU", "passed", "failed", "refused", "skipped")
    lines = [f"| file | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    lines += [f"| `{file['file']}` | {' | '.join(str(file[name]) for name in columns)} |" for file in result["files"]]
    lines += ["", "| why not | refused, skipped, or not drawn |", "|---|---:|"]
    reasons: Counter[str] = Counter()
    for file in result["files"]:
        reasons.update(file["reasons"])
        reasons.update(file["do not apply"])
    return "\n".join([*lines, *(f"| {reason} | {count} |" for reason, count in reasons.most_common())])


def commit_of(path: Path) -> str:
    return subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sample", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=FILES)
    options = parser.parse_args()
    if options.only:
        result = run_file(options)
        if options.out:
            options.out.write_text(json.dumps(result), "utf-8")
        return
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:  # each in a process of its own, because their helpers have the same names
            part = Path(folder) / "part.json"
            arguments = [str(options.checkout), "--only", file, "--sample", str(options.sample), "--seed", str(options.seed)]
            command = [sys.executable, "-m", "tests.upstream.flash_attn", *arguments, "--out", str(part)]
            subprocess.run(command, check=True)
            files.append(json.loads(part.read_text("utf-8")))
            counts = ", ".join(f"{files[-1][name]} {name}" for name in ("passed", "failed", "refused", "skipped"))
            print(f"{file}: {counts}", flush=True)
    result = {
        "source": "https://github.com/Dao-AILab/flash-attention",
        "commit": commit_of(options.checkout),
        "command": f"python -m tests.upstream.flash_attn CHECKOUT --sample {options.sample} --seed {options.seed}",
        "device": "cpu",
        "backend": "eager",
        "torch": torch.__version__,
        "files": files,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(summary(result))


if __name__ == "__main__":
    main()
