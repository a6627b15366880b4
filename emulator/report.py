"""Findings of a launch, with the kernel's own source lines, and the report that contains them."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from dataclasses import dataclass, field

BUGS: dict[str, str] = {
    "race": "two accesses to shared or tensor memory, one of them a write, that no barrier or wait orders",
    "missing-fence": "an ordinary store read by TMA or wgmma with no `fence_async_shared` in between",
    "uninitialised-read": "shared or tensor memory read that nothing wrote, or whose TMA load has not landed",
    "deadlock": "every partition waits and nothing is in flight",
    "timeout": "the wall-clock limit passed: a loop that never synchronises",
    "step-limit": "the limit of scheduling steps passed: partitions that run without getting anywhere",
    "expect-bytes": "an mbarrier phase ended with other bytes than it expected",
    "arrive-overflow": "more arrivals at an mbarrier than its phase has pending",
    "barrier-uninitialised": "an mbarrier used before its init, or not ordered after it",
    "barrier-reinit": "an mbarrier initialised a second time",
    "phase": "an mbarrier wait for a phase other than 0 or 1",
    "phase-alias": "an mbarrier can complete its next phase before a waiter has seen the last one",
    "wgmma-wait": "a wait returns the result of a wgmma that it does not cover",
    "wgmma-not-waited": "a partition ends with wgmma in flight",
    "product-not-waited": "the kernel ends with a tcgen05 product or commit that no wait covers",
    "store-not-waited": "a partition ends with TMA stores that may still read shared memory",
    "copy-not-waited": "a partition ends with a cp.async in flight",
    "named-barrier": "counts that differ, two arrivals in one generation, or an id that Triton uses itself",
    "shared-index": "an index outside an allocation of shared or tensor memory",
    "global-write-race": "one element of global memory written by two programs or partitions",
    "out-of-bounds": "a pointer or a TMA box outside its tensor",
    "int-overflow": "a signed scalar that wraps",
    "assertion": "a `static_assert` or `device_assert` that fails",
    "smem-limit": "more shared memory than sm_90 has",
    "tmem-limit": "more tensor memory than sm_100 has",
    "register-budget": "more registers or threads than sm_90 has",
    "illegal-program": "a program that Gluon refuses: layouts, shapes, dtypes, constexpr rules; or a Python error",
    "not-modelled": "an operation that the emulator does not know",
}
"""The kinds of findings that are bugs. The program is wrong, or it is right only in some schedules."""

WARNINGS: dict[str, str] = {
    "phase-repeat": "a partition waits again for a phase that it has seen",
    "wgmma-register-operand": "registers of operand A that are not among the deps of the wait that retires its wgmma",
    "tensor-fence": "two accesses to tensor memory that a barrier orders, without a tcgen05.fence on both of its sides",
    "named-barrier-leftover": "threads that arrived at a named barrier which the kernel's end leaves open",
    "tma-out-of-bounds": "a TMA box wholly outside its tensor: legal, and seldom meant",
    "slice-in-swizzle": "a slice that cuts the rows of a swizzled layout: addresses are not modelled, look at it on a GPU",
}
"""The kinds of findings that are not bugs by themselves."""

Frame = tuple[str, int, str]  # file, line, function.
Site = tuple[Frame, ...]  # innermost first.

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEPTH = 3  # frames of a site
THREAD_ENTRY = "_thread_main"  # the emulator's function at the bottom of each partition's stack


class EmulationError(Exception):
    """Raised for a finding that ends the run."""


class GluonError(Exception):
    """Raised if a program violates a rule of Gluon about layouts, shapes, dtypes or constexprs."""


@functools.lru_cache(None)
def is_own_frame(filename: str) -> bool:
    return filename.startswith(_OWN_FOLDER)


def current_site() -> Site:
    """Returns the innermost frames of the kernel, without frames of the emulator."""
    frame, frames = sys._getframe(1), list[Frame]()
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        if not is_own_frame(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        elif code.co_name == THREAD_ENTRY:
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    return tuple(frames)


def show(site: Site, who: str | None = None) -> str:
    """Returns a site as text: file:line in function < caller:line [partition] `source line`."""
    if not site:
        return "?"
    filename, line, function = site[0]
    callers = "".join(f" < {name}:{number}" for _, number, name in site[1:])
    partition = f" [{who}]" if who else ""
    source = linecache.getline(filename, line).strip()
    return f"{os.path.basename(filename)}:{line} in {function}{callers}{partition} `{source[:110]}`"


@dataclass
class Finding:
    """One finding of a launch, with the number of times that it happened.

    kind: a key of BUGS or WARNINGS.
    message: the event, with the kernel's lines that cause it.
    site: the innermost frames of the kernel, or () for a finding about the whole program.
    count: the number of times.
    """

    kind: str
    message: str
    site: Site = ()
    count: int = 1

    @property
    def is_bug(self) -> bool:
        return self.kind in BUGS

    def __str__(self) -> str:
        times = f" (x{self.count})" if self.count > 1 else ""
        return f"[{self.kind if self.is_bug else f'warning: {self.kind}'}]{times} {self.message}"


@dataclass
class Report:
    """The outcome of one launch.

    grid, seed, schedule: the grid, the seed, and the order of events.
    findings: each finding once, in order. `bugs` and `kinds` do not include warnings.
    error: the exception that ended the launch early, or None. It is an EmulationError, such as a deadlock, or the kernel's own.
    shared_bytes: the sum of one program's allocations. The compiler adds some 200 bytes for warp specialisation.
    registers: registers per thread, of the default partition and of each worker, if the kernel requests numbers.
    steps, wgmmas, products: the numbers of scheduling points, of wgmma products, and of tcgen05 products in all programs.
    tensor_columns: 32-bit columns of tensor memory in one program.
    trace: (step, partition, source line) of each scheduling point, if the options request it.
    """

    grid: tuple[int, int, int]
    seed: int
    schedule: str
    findings: list[Finding] = field(default_factory=list)
    error: Exception | None = None
    shared_bytes: int = 0
    registers: tuple[int, ...] = ()
    steps: int = 0
    wgmmas: int = 0
    products: int = 0
    tensor_columns: int = 0
    seconds: float = 0.0
    trace: list[tuple[int, str, str]] = field(default_factory=list, repr=False)

    @property
    def bugs(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_bug]

    @property
    def kinds(self) -> list[str]:
        """Returns the kinds of the bugs, each once."""
        return sorted({finding.kind for finding in self.bugs})

    @property
    def work(self) -> str:
        """Describes the matrix products of the launch."""
        if self.products:
            return f"{self.products} tcgen05 products, {self.tensor_columns} columns of tensor memory"
        return f"{self.wgmmas} wgmma"

    def add(self, finding: Finding) -> None:
        """Records a finding. If one of the same kind at the same place exists, its count is increased."""
        for known in self.findings:
            same_place = known.site[:2] == finding.site[:2] if finding.site else known.message == finding.message
            if known.kind == finding.kind and same_place:
                known.count += 1
                return
        self.findings.append(finding)

    def check(self) -> None:
        """Raises EmulationError with the complete report if there is a bug."""
        if self.bugs or self.error is not None:
            raise EmulationError(str(self))

    def __str__(self) -> str:
        bugs = len(self.bugs)
        head = (
            f"seed {self.seed} ({self.schedule}), grid {self.grid}: {bugs} bugs, {len(self.findings) - bugs} warnings, "
            f"{self.shared_bytes} bytes of shared memory, {self.steps} steps, {self.work}, {self.seconds:.2f} s"
        )
        return "\n".join([head, *("  " + str(finding).replace("\n", "\n  ") for finding in self.findings)])
