"""The result of a kernel under many seeds, as a text for its developer: each finding, its number of seeds, and its place."""

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
"""A function that launches a kernel under a seed and checks its numbers. It returns the report, or raises AssertionError."""


@dataclass(frozen=True)
class Verdict:
    """The result of many seeds. name: the name of the run. reports: by seed. wrong: by seed, the text about wrong numbers."""

    name: str
    reports: dict[int, Report]
    wrong: dict[int, str]

    @property
    def is_clean(self) -> bool:
        """Returns whether no seed has a bug or wrong numbers."""
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
                by_seed = {
                    seed: finding for seed, report in self.reports.items() for finding in report.findings if finding.kind == kind
                }
                if by_seed:
                    lines += ["", f"{title}: {kind}, on {len(by_seed)} of {seeds} seeds: {meaning}", *_indented(_first(by_seed))]
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
    """Calls run(seed) for each seed and returns the results."""
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
    """Returns the report of a run, or the text about wrong numbers."""
    try:
        return run(seed)
    except AssertionError as error:
        return str(error) or "an assertion without a message"


def judge_by_name(target: str, seeds: Iterable[int] = range(24)) -> Verdict:
    """Does the same for a run that is named as `package.module:function` or `path/to/file.py:function`.

    Raises ValueError if the target has another form, or if the function does not exist.
    """
    place, _, function = target.rpartition(":")
    if not place or not function.isidentifier():
        raise ValueError(f"{target!r} names no run; accepted: package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ValueError(f"{target!r}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Triton looks here for a kernel's source.
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    run = getattr(module, function, None)
    if not callable(run):
        raise ValueError(f"{target!r}: {place} has no function {function}")
    return judge(run, seeds, target)
