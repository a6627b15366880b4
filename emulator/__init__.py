"""Emulation of Gluon kernels for Ampere to Blackwell on a CPU, under many schedules, with reports of wrong synchronisation.

    from flexattn import emulator

    report = emulator.launch(kernel, (programs,), *args, num_warps=4, seed=7, BLOCK=128)
    report.check()  # raises with the report if there is a bug

`launch` executes a @gluon.jit function, with its partitions, TMA, mbarriers and products, as Python on numpy arrays. A seed decides
when each partition runs and when each asynchronous operation acts. `BUGS` and `WARNINGS` list the kinds of findings.
docs/emulator.md has a first kernel and the limits. The emulator needs triton and numpy, and no GPU.
"""

from __future__ import annotations

from flexattn.emulator.inline_asm import register_asm
from flexattn.emulator.launcher import Options, launch, sweep
from flexattn.emulator.report import BUGS, WARNINGS, EmulationError, Finding, GluonError, Report
from flexattn.emulator.verdict import Verdict, judge, judge_by_name

__all__ = [
    "BUGS",
    "WARNINGS",
    "EmulationError",
    "Finding",
    "GluonError",
    "Options",
    "Report",
    "Verdict",
    "judge",
    "judge_by_name",
    "launch",
    "register_asm",
    "sweep",
]
