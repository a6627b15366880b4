"""The compiler's reports on kernels, for every gate that compiles ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import triton

from flexattn.kernels_triton.ahead_of_time import compile_report
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, CompileRequest
from tests.support import forked

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
"""Gates are for the Tritons that rates were measured with, 3.6 and 3.7. Where a later one's figures differ, the gate says why."""

UNIFORM_MOVES = ("UMOV", "R2UR") if TRITON >= (3, 9) else ()
"""Instructions that no gate counts. Triton 3.9 computes the lower half of a wgmma descriptor; each product moves an upper one."""


def check_loops(case: tuple[Any, ...], loops: Sequence[Mapping[str, int]], expected: int, slack: float) -> None:
    """Fails if a loop's instructions are not about as many as are expected."""
    counts = [sum(loop.values()) for loop in loops]
    if UNIFORM_MOVES:  # of which the expected number has some too
        moves = [sum(loop.get(name, 0) for name in UNIFORM_MOVES) for loop in loops]
        fewer = [count - moved for count, moved in zip(counts, moves, strict=True)]
        assert all(count <= (1 + slack) * expected for count in fewer), f"{case}: {fewer} beside {moves}, not {expected}"
    else:
        assert all(abs(count - expected) <= slack * expected for count in counts), f"{case}: {counts}, not {expected}"


def compile_beside(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Returns the reports of `compile_many` from one process for all tests: its imports take longer than a small kernel."""
    with mock.patch.object(compile_report, "_run_python", forked.run_main):
        return compile_report.compile_many(requests)


def compile_sound(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Returns the reports. Fails if the code that Triton or ptxas made is wrong at any speed."""
    reports = compile_beside(requests)
    for request, report in zip(requests, reports, strict=True):
        assert not report.undefined_registers, f"{report.undefined_registers} are read and nothing writes them: {request}"
        assert not report.folded_operands, f"{report.folded_operands} are multiplied only in part: {request}"
    return reports
