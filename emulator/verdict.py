"""A kernel under many seeds, as a text for whoever develops it: what was found, on how many seeds, and where."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flexattn.emulator.report import BUGS, WARNINGS, Finding, Report

Run = Callable[[int], Report]
"""Launches a kernel under a seed and checks its numbers: returns the report, or raises AssertionError where numbers are wrong."""


@dataclass(frozen=True)
class Verdict:
    """name: of what was run. reports: by seed. wrong: by seed, what the run itself said of the numbers."""

    name: str
    reports: dict[int, Report]
    wrong: dict[int, str]

    @property
    def is_clean(self) -> bool:
        """No bug and no wrong number on any seed."""
        return not self.wrong and not any(report.bugs for report in self.reports.values())

    def __str__(self) -> str:
        seeds = len(self.reports) + len(self.wrong)
        schedules = Counter(report.schedule for report in self.reports.values())
        lines = [f"{self.name}: {seeds} seeds ({', '.join(f'{count} {schedule}' for schedule, count in schedules.items())})"]
        for report in list(self.reports.values())[-1:]:
            registers = f", registers a thread: {', '.join(map(str, report.registers))}" if report.registers else ""
            lines.append(f"grid {report.grid}, {report.shared_bytes} bytes of shared memory{registers}, {report.work}")
        for kinds, title in ((BUGS, "bug"), (WARNINGS, "warning")):
            for kind, meaning in kinds.items():
                found = {
                    seed: finding for seed, report in self.reports.items() for finding in report.findings if finding.kind == kind
                }
                if found:
                    lines += ["", f"{title}: {kind}, on {len(found)} of {seeds} seeds: {meaning}", *_indented(_first(found))]
        if self.wrong:
            seed, message = next(iter(self.wrong.items()))
            lines += ["", f"wrong numbers, on {len(self.wrong)} of {seeds} seeds", *_indented(f"seed {seed}: {message}")]
        return "\n".join([*lines, "", "clean" if self.is_clean else "not clean"])


def _first(found: dict[int, Finding]) -> str:
    seed, finding = next(iter(found.items()))
    return f"seed {seed}: {finding.message}"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def judge(run: Run, seeds: Iterable[int] = range(24), name: str | None = None) -> Verdict:
    """Call run(seed) for each seed."""
    reports: dict[int, Report] = {}
    wrong: dict[int, str] = {}
    for seed in seeds:
        outcome = _outcome(run, seed)
        if isinstance(outcome, Report):
            reports[seed] = outcome
        else:
            wrong[seed] = outcome
    return Verdict(name or str(getattr(run, "__name__", run)), reports, wrong)


def _outcome(run: Run, seed: int) -> Report | str:
    """The report, or what is wrong with the numbers."""
    try:
        return run(seed)
    except AssertionError as error:
        return str(error) or "an assertion without a message"


def judge_by_name(target: str, seeds: Iterable[int] = range(24)) -> Verdict:
    """The same for a run named as `package.module:function` or `path/to/file.py:function`.

    Raises ValueError for a target of another form, and where the function is not there.
    """
    place, _, function = target.rpartition(":")
    if not place or not function.isidentifier():
        raise ValueError(f"{target!r} names no run; accepted: package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ValueError(f"{target!r}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where Triton looks for a kernel's source
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    run = getattr(module, function, None)
    if not callable(run):
        raise ValueError(f"{target!r}: {place} has no function {function}")
    return judge(run, seeds, target)
