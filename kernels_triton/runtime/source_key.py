"""A hash of a kernel's source and of all that it refers to, which names compiled kernels on disk.

Triton's own hash, `JITFunction.cache_key`, parses each function into a syntax tree to find its references, which takes a third of a
process's first call. This module instead takes each name in the source that has a meaning in the function's scope. That may be more
than the function reads, because a name may be a word of a comment. Then a file that could serve is not found, but a wrong file
never is. Triton's version, which `store` adds to the hash, covers references to Triton's modules.
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
