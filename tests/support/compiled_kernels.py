"""The compiler's reports on kernels, for every gate that compiles ahead of time."""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, CompileRequest, compile_many


def compile_sound(requests: Sequence[CompileRequest]) -> list[CompileReport]:
    """Returns the reports of `compile_many`, and fails where ptxas made code of a kernel that is wrong whatever its speed."""
    reports = compile_many(requests)
    for request, report in zip(requests, reports, strict=True):
        assert not report.undefined_registers, f"{report.undefined_registers} are read and nothing writes them: {request}"
    return reports
