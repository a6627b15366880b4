"""A run: every cell checked, measured and written in turn, until all is done or the time is spent."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from flexattn.bench import counts, record
from flexattn.bench.check import CHECK, Checker
from flexattn.bench.implementations import Implementation
from flexattn.bench.inputs import make_tensors
from flexattn.bench.measure import HOST, MEASURES, MEMORY, Timer, measure, measure_ceilings, time_on_cpu, time_on_device
from flexattn.bench.peers import PEERS_NOTE
from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import Workload
from flexattn.progress import progress_bar


class Plan(NamedTuple):
    command: str
    workloads: Sequence[Workload]
    directions: Sequence[str]
    implementations: Sequence[Implementation]
    device: str
    budget_ms: float  # device time for each implementation in each cell
    budget_s: float  # seconds of the whole run; the record names cells that do not fit
    only_check: bool = False
    out: Path | None = None
    time: str | None = None  # how a given timer times, in words
    kernel: str = ""  # the only kernel whose operations and bytes count


def run(plan: Plan, show: Callable[[str], object] = print, timer: Timer | None = None) -> Record:
    """Measures the plan's cells in order. After each cell its rows are shown and the file is written."""
    began = time.monotonic()
    timer = timer or functools.partial(time_on_device if plan.device == "cuda" else time_on_cpu, budget_ms=plan.budget_ms)
    ceilings = None if plan.only_check else measure_ceilings(timer, plan.device)
    rows: list[Row] = []
    left_out: list[dict[str, str]] = []
    refused: set[tuple[str, str | None]] = set()
    known = record.facts(plan.command, ceilings, method(plan), plan.workloads)
    so_far = Record(**known, rows=rows, left_out=left_out, complete=False)
    cells = [(w, direction) for w in plan.workloads for direction in plan.directions if direction in w.directions]
    with progress_bar(len(cells), "bench", "cell") as advance:
        for workload, directions in _by_workload(cells):
            if time.monotonic() - began > plan.budget_s:
                reason = f"the budget of {plan.budget_s:.0f} s was spent"
                left_out += [{"workload": workload.name, "direction": d, "reason": reason} for d in directions]
                continue
            tensors = make_tensors(workload, plan.device)
            checker = Checker(workload, tensors)
            for direction in directions:
                work = counts.kernel_work(workload, plan.kernel) if plan.kernel else counts.work(workload, direction)
                asked = [i for i in plan.implementations if i.serves(workload, direction)]
                arguments = (asked, tensors, checker, work, ceilings, None if plan.only_check else timer)
                new = measure(workload, direction, *arguments)
                if plan.device == "cuda":
                    torch.cuda.synchronize()  # raises after a fault of a kernel, with which no later cell can run
                rows += new
                for row in new:
                    if row.status == "refused" and (row.implementation, row.reason) in refused:
                        continue  # the same reason was shown before
                    refused.add((row.implementation, row.reason))
                    show(line(row))
                advance()
                if plan.out is not None:  # after each cell, so that an interruption loses no measurement
                    record.write(plan.out, so_far)
            del tensors, checker
            if plan.device == "cuda":
                torch.cuda.empty_cache()
    done = so_far._replace(complete=not left_out)
    if plan.out is not None:
        record.write(plan.out, done)
    return done


def _by_workload(cells: Iterable[tuple[Workload, str]]) -> Iterator[tuple[Workload, list[str]]]:
    """Yields each workload with its directions, because they share tensors, reference and compiled kernels."""
    grouped: dict[str, tuple[Workload, list[str]]] = {}
    for workload, direction in cells:
        grouped.setdefault(workload.name, (workload, []))[1].append(direction)
    yield from grouped.values()


def method(plan: Plan) -> dict[str, str]:
    texts = {"check": CHECK, "peers": PEERS_NOTE, "inputs": "standard normal"}
    flops, moved = (counts.KERNEL_FLOPS, counts.KERNEL_BYTES) if plan.kernel else (counts.FLOPS, counts.BYTES)
    texts |= {"flops": flops, "bytes": moved}
    if not plan.only_check:
        texts["time"] = plan.time or MEASURES[plan.device]
    return texts | ({"host": HOST, "memory": MEMORY} if plan.device == "cuda" and not plan.only_check else {})


def line(row: Row) -> str:
    """A row on one line of a terminal."""
    head = f"{row.workload:26} {row.direction:8} {row.implementation:28}"
    if row.us is None:
        return f"{head} {row.status}" + (f": {shortened(row.reason)}" if row.reason else "")
    quartiles = f"[{row.us_q1:.1f}, {row.us_q3:.1f}]"
    memory = "" if row.peak_mib is None else f" {row.peak_mib:8.1f} MiB"
    host = "" if row.host_us is None else f", host {row.host_us:6.1f} us"
    figures = f"{row.tflops:6.4g} TFLOP/s {row.share:4.0%} {row.gb_s:7.1f} GB/s"
    return f"{head} {row.us:9.1f} us {quartiles:20} {figures}{host}{memory}"


def shortened(reason: str) -> str:
    """A wrong result's worst elements as they are; else so much of a refusal as a terminal has room for."""
    return reason if "\n" in reason else reason[:200] + ("..." if len(reason) > 200 else "")


def compile_only(plan: Plan) -> None:
    """Runs each compiling implementation once in each cell, to fill the caches on disk. Nothing is recorded."""
    compiling = [i for i in plan.implementations if i.compiles]
    for workload in plan.workloads:
        tensors = make_tensors(workload, plan.device)
        directions = [d for d in plan.directions if d in workload.directions]
        for direction, implementation in itertools.product(directions, compiling):
            if not implementation.serves(workload, direction):
                continue
            with contextlib.suppress(Exception):  # the run shows the reason in the cell
                implementation.prepare(workload, tensors, direction).results()


def compile_in_processes(arguments: Sequence[str], names: Sequence[str], processes: int, seconds: float) -> float:
    """Runs `compile_only` of the workloads in several processes at once, and returns the seconds.

    A single process compiles one kernel after another, which is most of the time of a first run.
    """
    began = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "flexattn", "bench", *arguments, "--compile-only", "--shapes"]
    shares = [names[n::processes] for n in range(processes)]
    started = [subprocess.Popen([*command, *s], env=environment, stdin=subprocess.DEVNULL) for s in shares if s]
    while any(process.poll() is None for process in started) and time.monotonic() - began < seconds:
        time.sleep(0.2)
    for process in started:
        process.kill()
        process.wait()
    return time.monotonic() - began
