"""Processes of random calls side by side, and the sum of their logs. A process that a call ends is started again."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

GRACE = 240.0  # seconds for a call with its compilation, and for a process after its time
LEAST = 15.0  # a process is not started again for fewer seconds
VALUES = 200  # calls of each configuration on a GPU: its kernels take longer to compile than a hundred calls
STRIDE = 10**6  # configurations between the first ones of two processes


class Job(NamedTuple):
    """The command of one process, without its time and its first configuration."""

    command: Sequence[str]
    first: int
    environment: Mapping[str, str] = {}  # in addition to this process's own


class Found:
    """Sums over the logs of calls: their number, their defects, and their features, single, in pairs and in triples."""

    def __init__(self) -> None:
        self.calls = self.kept = 0
        self.configurations: set[int] = set()
        self.features: collections.Counter[str] = collections.Counter()
        self.wrong: collections.Counter[str] = collections.Counter()  # by feature
        self.pairs: set[tuple[str, str]] = set()
        self.triples: set[tuple[str, str, str]] = set()
        self.dims: set[tuple[int, int]] = set()
        self.families: collections.Counter[str] = collections.Counter()
        self.kernels: dict[tuple[str, int], collections.Counter[str]] = {}  # by log and the start of its process
        self.failures: list[tuple[str, list[str]]] = []
        self.seconds = {"that compiled": [0.0, 0], "other": [0.0, 0]}  # of compositions, and how many these are
        self._known: set[tuple[str, ...]] = set()

    def take(self, event: dict[str, Any], source: tuple[str, int]) -> None:
        self.calls += 1
        self.kept += event["kept"]
        self.configurations.add(int(event["name"].split(".")[0]))
        has = tuple(event["has"])
        self.features.update(has)
        if has not in self._known:
            self._known.add(has)
            self.pairs.update(combinations(has, 2))
            self.triples.update(combinations(has, 3))
        self.dims.add((event["dims"][0], event["dims"][1]))
        self.families.update(event["families"])
        took = self.seconds["that compiled" if "kernels" in event else "other"]
        took[0] += event["seconds"]
        took[1] += 1
        if "kernels" in event:
            self.kernels[source] = collections.Counter(event["kernels"])
        if event["wrong"]:
            self.wrong.update(has)
            self.failures.append((event["name"], event["wrong"]))

    def summary(self) -> dict[str, Any]:
        groups: dict[str, list[str]] = {}
        for feature in self.features:
            groups.setdefault(feature.split(": ")[0], []).append(feature)
        sizes = [len(group) for group in groups.values()]
        possible = sum(a * b for a, b in combinations(sizes, 2))
        kernels = sum(self.kernels.values(), collections.Counter[str]())
        return {
            "compositions": self.calls,
            "calls of attention": 3 * self.calls,
            "kept calls among them": self.kept,
            "seconds for a composition": {name: round(sum_ / max(1, count), 3) for name, (sum_, count) in self.seconds.items()},
            "configurations": len(self.configurations),
            "kernels compiled or loaded": dict(sorted(kernels.items())),
            "pairs of features": f"{len(self.pairs)} of {possible}",
            "triples of features": len(self.triples),
            "head dims": len({dim for pair in self.dims for dim in pair}),
            "pairs of head dims": len(self.dims),
            "head dims missing": sorted({*range(8, 577, 8)} - {d_qk for d_qk, _ in self.dims}),
            "families": dict(sorted(self.families.items())),
            "features": {name: [count, self.wrong[name]] for name, count in sorted(self.features.items())},
        }


class Process:
    """A process, which is started again until its time is up."""

    def __init__(self, job: Job, log: Path, end: float, grace: float = GRACE) -> None:
        self._job, self._log, self._end, self._grace = job, log, end, grace
        self._starts = 0
        self._position, self._began = 0, None
        self.failures: list[tuple[str, list[str]]] = []
        self._start(job.first)

    def _start(self, first: int) -> None:
        seconds = self._end - time.monotonic()
        command = [*self._job.command, "--seconds", f"{seconds:.1f}", "--first", str(first), "--log", str(self._log)]
        self._log.write_text("")
        self._position, self._began, self._changed = 0, None, time.monotonic()
        self._starts += 1
        with self._log.with_suffix(".err").open("w") as errors:
            environment = {**os.environ, **self._job.environment}
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment, start_new_session=True
            )

    def is_over(self, found: Found) -> bool:
        """Reads the log's new lines. Returns whether the process is done and not started again."""
        status = self._process.poll()
        self._read(found)
        now = time.monotonic()
        has_hung = status is None and (now > self._end + self._grace or now > self._changed + self._grace)
        if status is None and not has_hung:
            return False
        if has_hung:
            self.stop()
        following = None if self._began is None else int(self._began.split(".")[0]) + 1
        if has_hung or status != 0:
            errors = self._log.with_suffix(".err").read_text(errors="replace").splitlines()[-8:]
            found.failures.append((str(self._began), ["hung" if has_hung else f"ended with status {status}", *errors]))
        if now + LEAST < self._end and following is not None:
            self._start(following)
            return False
        return True

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    @property
    def errors(self) -> str:
        return self._log.with_suffix(".err").read_text(errors="replace")

    def _read(self, found: Found) -> None:
        with self._log.open() as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._position += len(whole.encode())
        for line in whole.splitlines():
            event = json.loads(line)
            self._changed = time.monotonic()
            if "begins" in event:
                self._began = event["begins"]
            else:
                found.take(event, (str(self._log), self._starts))


def run_all(
    jobs: Sequence[Job], folder: Path, seconds: float, grace: float = GRACE, watch: Callable[[Found], None] | None = None
) -> tuple[Found, list[Process]]:
    """Runs the jobs side by side until their time is up. `watch` receives the findings every ten seconds."""
    end, told = time.monotonic() + seconds, time.monotonic()
    found = Found()
    processes = [Process(job, folder / f"{n}.log", end, grace) for n, job in enumerate(jobs)]
    waiting = list(processes)
    try:
        while waiting:
            time.sleep(0.2)
            waiting = [process for process in waiting if not process.is_over(found)]
            if watch is not None and time.monotonic() > told + 10.0:
                watch(found)
                told = time.monotonic()
    finally:
        for process in waiting:
            process.stop()
    return found, processes


def command_of(backend: str, device: str, values: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.fuzz", "--backend", backend, "--device", device, "--values", str(values), *more]


def failures(where: str, found: Found, most: int = 60) -> list[dict[str, Any]]:
    """Returns the first failures, each with the command that repeats it."""
    return [
        {"name": name, "again": f"python -m tests.fuzz {where} --only {name}", "what": [line[:300] for line in what]}
        for name, what in found.failures[:most]
    ]
