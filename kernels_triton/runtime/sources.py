"""The source of a function for Triton, found by the margin of its lines, and a hash of sources that names compiled kernels on disk.

`triton.jit` calls `inspect.getsourcelines`, which tokenises the function in Python to find its last line. A process's first call
imports 120 to 240 functions, and tokenising took half of its time. A function of a kernel's file begins at the margin, so the next
line at the margin ends it. Triton has no hook for this, so its module gets a replacement for `inspect`. The replacement handles
these functions and forwards everything else.

Triton's own hash, `JITFunction.cache_key`, parses each function into a syntax tree to find its references, which takes a third of a
process's first call. `source_key` instead takes each name in the source that has a meaning in the function's scope. That may be
more than the function reads, because a name may be a word of a comment. Then a file that could serve is not found, but a wrong file
never is. Triton's version, which `store` adds to the hash, covers references to Triton's modules.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import re
import types
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.runtime import jit
from triton.runtime.jit import JITCallable

_NAME = re.compile(r"[^\W\d]\w*")


def source_key(function: Any) -> str:
    """Returns the hash of a Triton function with the functions that it calls, its constants, and its named tuples' fields."""
    parts: list[str] = []
    seen = {id(function)}
    pending = [function]
    while pending:
        caller = pending.pop()
        parts.append(f"{caller.fn.__module__}.{caller.fn.__qualname__} {getattr(caller, 'noinline', False)}\n{caller.src}")
        for name, value in _referred(caller):
            referred = value.value if isinstance(value, tl.constexpr) else value
            if not isinstance(referred, JITCallable):
                parts.append(f"{name} = {type(referred).__name__} {_fields(referred) or repr(referred)}")
            elif id(referred) not in seen:
                seen.add(id(referred))
                pending.append(referred)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _referred(function: Any) -> Iterator[tuple[str, object]]:
    """Yields the names and values that a kernel may read from a function's scope: functions, constants, dtypes and named tuples."""
    names = _names(function.src)
    code, cells = function.fn.__code__, function.fn.__closure__ or ()
    yield from _known({name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}, names)
    yield from _known(function.fn.__globals__, names)


def _known(scope: Mapping[str, object], names: frozenset[str]) -> Iterator[tuple[str, object]]:
    for name in sorted(names & scope.keys()):
        value = scope[name]
        if isinstance(value, (JITCallable, tl.constexpr, tl.dtype, int, float, str)) or _fields(value):
            yield name, value
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("flexattn"):
            yield from ((f"{name}.{inner}", referred) for inner, referred in _known(vars(value), names - {name}))


def _fields(kind: Any) -> str:
    """Returns the fields of a named tuple's class and their defaults; "" for any other value."""
    is_class = isinstance(kind, type) and hasattr(kind, "_fields")
    return f"{kind._fields} {kind._field_defaults}" if is_class else ""


@functools.lru_cache(maxsize=4096)
def _names(source: str) -> frozenset[str]:
    return frozenset(_NAME.findall(source))


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
