"""A hash of a kernel's source and of all that it refers to, by which compiled kernels are found on disk.

Triton's own, `JITFunction.cache_key`, takes each function apart into a syntax tree to find what it refers to: a third of a
process's first call. Here that is each name in the source that means something where the function was written. It may be more than
the function reads, as a name may be a word of a comment: then a file is not found that would serve, and never the other way round.
What a kernel reads of Triton's modules goes by Triton's version, which `store` puts beside the hash.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITCallable

_NAME = re.compile(r"[^\W\d]\w*")


def source_key(function: Any) -> str:
    """Returns the hash of a function of Triton's, with the functions that it calls, constants, and fields of named tuples."""
    parts: list[str] = []
    seen = {id(function)}
    pending = [function]
    while pending:
        caller = pending.pop()
        parts.append(f"{caller.fn.__module__}.{caller.fn.__qualname__} {getattr(caller, 'noinline', False)}\n{caller.src}")
        for name, value in _referred(caller):
            found = value.value if isinstance(value, tl.constexpr) else value
            if not isinstance(found, JITCallable):
                parts.append(f"{name} = {type(found).__name__} {_fields(found) or repr(found)}")
            elif id(found) not in seen:
                seen.add(id(found))
                pending.append(found)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _referred(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a kernel may read of a function's surroundings, by name: functions, constants, dtypes and named tuples."""
    names = _names(function.src)
    code, cells = function.fn.__code__, function.fn.__closure__ or ()
    yield from _known({name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}, names)
    yield from _known(function.fn.__globals__, names)


def _known(scope: Mapping[str, Any], names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name in sorted(names & scope.keys()):
        value = scope[name]
        if isinstance(value, (JITCallable, tl.constexpr, tl.dtype, int, float, str)) or _fields(value):
            yield name, value
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("flexattn"):
            yield from ((f"{name}.{inner}", found) for inner, found in _known(vars(value), names - {name}))


def _fields(kind: Any) -> str:
    """Returns the fields of a named tuple's class and their defaults; "" for anything else."""
    return f"{kind._fields} {kind._field_defaults}" if isinstance(kind, type) and hasattr(kind, "_fields") else ""


@functools.lru_cache(maxsize=4096)
def _names(source: str) -> frozenset[str]:
    return frozenset(_NAME.findall(source))
