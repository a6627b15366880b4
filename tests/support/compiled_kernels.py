"""The compiler's reports on kernels, for every gate that compiles ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import triton

from flexattn.kernels_triton.ahead_of_time import compile_report
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, CompileRequest
from tests.support import forked

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
"""Gates are for the Tritons that rates were measured with, 3.6 and 3.7. Where a later one's figures differ, the gate says why."""


def compile_beside(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Returns the reports of `compile_many`, whose process begins with torch imported: that takes longer than a small kernel."""
    with mock.patch.object(compile_report, "_run_python", forked.run):
        return compile_report.compile_many(requests)


def compile_sound(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Returns the reports, and fails where Triton or ptxas made code of a kernel that is wrong whatever its speed."""
    reports = compile_beside(requests)
    for request, report in zip(requests, reports, strict=True):
        assert not report.undefined_registers, f"{report.undefined_registers} are read and nothing writes them: {request}"
        assert not report.folded_operands, f"{report.folded_operands} are multiplied only in part: {request}"
    return reports
