"""The source of a function for Triton, found by the margin of its lines.

`triton.jit` calls `inspect.getsourcelines`, which tokenises the function in Python to find its last line. A process's first call
imports 120 to 240 functions, and tokenising took half of its time. A function of a kernel's file begins at the margin, so the next
line at the margin ends it. Triton has no hook for this, so its module gets a replacement for `inspect`. The replacement handles
these functions and forwards everything else.
"""

from __future__ import annotations

import inspect
import linecache
from operator import itemgetter
from pathlib import Path
from typing import Any

from triton.runtime import jit

_OURS = (f"{Path(__file__).parents[1]}/", "<flexattn ")  # files of kernels, and generated functions (`entry`)


class _Inspect:
    """`inspect`, except for the sources of the package's own functions."""

    def __getattr__(self, name: str) -> object:
        return getattr(inspect, name)

    @staticmethod
    def getsourcelines(function: Any) -> tuple[list[str], int]:
        return lines_of(function) or inspect.getsourcelines(function)


def lines_of(function: Any) -> tuple[list[str], int] | None:
    """Returns the result of `inspect.getsourcelines` for a function at the margin of a file of the package; None for others."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or not code.co_filename.startswith(_OURS):
        return None
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first, last = code.co_firstlineno - 1, max(filter(None, map(itemgetter(2), code.co_lines())))
    if last > len(lines) or not lines[first].startswith(("@", "def ")):
        return None
    next_one = end = last
    while next_one < len(lines) and lines[next_one][0] in " \t\n#":
        next_one += 1
        if lines[next_one - 1][0] in " \t" and not lines[next_one - 1].isspace():
            end = next_one
    # the next line at the margin is in brackets
    goes_on = next_one < len(lines) and not (lines[next_one][0].isidentifier() or lines[next_one][0] == "@")
    if goes_on or any("".join(lines[first:end]).count(quotes) % 2 for quotes in ('"""', "'''")):
        return None
    return lines[first:end], first + 1


def read_by_margin() -> None:
    """Makes Triton find sources with this module from now on."""
    if not isinstance(jit.inspect, _Inspect):
        jit.inspect = _Inspect()
