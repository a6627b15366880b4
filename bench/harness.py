"""The harness of benchmark programs with rows of their own: options, cases, facts of the run, times, and the result file."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flexattn.bench import record
from flexattn.bench.measure import quartiles, time_on_device
from flexattn.cli import Parser, program

T = TypeVar("T")
Row = dict[str, Any]
Call = Callable[[], Any]


WORST = 2.0**-6  # the largest `distance` of a right result: several times the rounding of bf16, far below a wrong result


def make_parser(method: str | None, only: str = "", prog: str | None = None) -> Parser:
    """Returns a parser with --out, described by the first line of a program's docstring. only: the help of --only, see `chosen`."""
    parser = Parser(prog=prog, description=method.splitlines()[0] if method else None)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the result here, after every row")
    if only:
        parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help=only)
    return parser


def chosen(cells: Mapping[str, T], patterns: Iterable[str]) -> dict[str, T]:
    """Returns the cells whose names match a pattern, in the order of the patterns."""
    return {name: cells[name] for pattern in patterns for name in cells if fnmatch.fnmatchcase(name, pattern)}


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the program with an error if there is no CUDA device."""
    if not torch.cuda.is_available():
        parser.error("no CUDA device; this program measures device time")


class Run:
    """A run of a program: `content` has its facts and its rows, and becomes the result file.

    module: name after `python -m` of the command. method: the program's docstring. facts: further keys of the result file.
    """

    def __init__(
        self, module: str, method: str | None, out: Path | None, arguments: Sequence[str] | None = None, **facts: Any
    ) -> None:
        self.out = out
        self.rows: list[Row] = []
        self.content: dict[str, Any] = {
            "command": record.command_line(module, sys.argv[1:] if arguments is None else arguments, out),
            "started": record.now(),
            "device": record.device_facts(),
            "versions": record.versions(),
            "method": method,
            **facts,
            "rows": self.rows,
        }

    def add(self, row: Row, line: str = "") -> None:
        """Prints and writes a row as soon as it is measured, because a run may be cut short."""
        self.rows.append(row)
        if line:
            print(line, flush=True)
        self.write()

    def write(self) -> None:
        if self.out is not None:
            record.replace(self.out, self.content)

    def status(self, implementation: str | None = None) -> int:
        """Returns the exit status: 1 if a result is wrong, of this implementation if it is named."""
        rows = (row for row in self.rows if implementation in (None, row.get("implementation")))
        return int(any(row.get("status") == "wrong" for row in rows))


@dataclass(frozen=True)
class Program(Generic[T]):
    """A program that measures cases by name. Each of its rows is printed and written as soon as it is measured.

    module: name after `python -m`. method: its docstring. case: the field of a row that has the case's name. add_options: adds
    options for `measure`. facts: further keys of the result file. fails: the implementation whose wrong results make the exit
    status 1; None: all of them.
    """

    module: str
    method: str | None
    case: str
    cases: Mapping[str, T]
    measure: Callable[[T, argparse.Namespace], Iterable[Row]]
    line: Callable[[Row], str]
    add_options: Callable[[Parser], object] = lambda parser: None
    facts: Callable[[], Mapping[str, Any]] = dict
    fails: str | None = None
    needs_gpu: bool = True

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Measures the cases that the options name. Returns the exit status."""
        _, is_command, command = self.module.partition(" ")
        prog = program(command) if is_command else None
        parser = make_parser(self.method, "measure cases whose name matches a pattern, in the order of the patterns", prog)
        parser.add_argument("--list", action="store_true", help="print the names of the cases, and measure nothing")
        parser.add_target()
        self.add_options(parser)
        options = parser.parse_args(argv)
        cases = chosen(self.cases, options.only)
        if options.list:
            print("\n".join(cases))
            return 0
        if self.needs_gpu:
            need_gpu(parser)
        parser.imitate(options.target)
        run = Run(self.module, self.method, options.out, argv, **self.facts())
        for name, case in cases.items():
            for row in self.measure(case, options):
                row = {self.case: name, **row}
                run.add(row, self.line(row))
            free_memory()
        return run.status(self.fails)


def distance(got: Tensor, exact: Tensor) -> float:
    """Returns |got - exact| / |exact| in the Euclidean norm, in float32 or in exact's wider dtype."""
    exact = exact.to(torch.promote_types(exact.dtype, torch.float32))
    return float((got.to(exact.dtype) - exact).norm() / exact.norm())


def times(calls: Mapping[str, Call], budget_ms: float, name: str = "us") -> dict[str, Row]:
    """Returns the `quartiles` of each call's device time, of calls in turns (`measure.time_on_device`). name: "us" or "ms"."""
    factor = {"us": 1e3, "ms": 1.0}[name]
    return {key: quartiles([factor * ms for ms in taken.ms], name) for key, taken in time_on_device(calls, budget_ms).items()}


def host_us(call: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    """Returns the median time until a call returns to Python, in microseconds. wait: empties the device's queue before each."""
    times = []
    for _ in range(calls):
        wait()
        before = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - before))
    wait()
    return statistics.median(times)


def capture(call: Call, wait: Callable[[], object] = torch.cuda.synchronize) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures the call in a CUDA graph, after three calls that compile kernels and fill caches; returns the graph and its results.

    wait: runs before the capture.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads keep running
        results = call()
    return graph, results


def free_memory() -> None:
    """Returns the memory of dropped tensors to the device."""
    gc.collect()
    torch.cuda.empty_cache()
