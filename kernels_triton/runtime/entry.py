"""Kernels whose arguments have names: the fields of a NamedTuple give the flat signature that Triton needs.

Triton specialises a kernel for an integer in a tuple if it is 1 or a multiple of 16, whatever `do_not_specialize` says (3.6 and
3.7). So no kernel is launched with a tuple of its numbers. A kernel is written as a function of named groups. The function that is
launched is generated: it has one parameter for each field, builds the groups and calls the kernel. That does not change the machine
code, because Triton flattens tuples before it compiles.

The order of the fields does change it: it is the order of the parameters, and ptxas then schedules differently. On an H200 the
fused backward with a softcap took 5 % longer if the descriptors' strides preceded the band, and the softcap the bias.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton.language as tl

if typing.TYPE_CHECKING:
    WidePointer = Any
else:

    class WidePointer:
        """Annotates a field for a tensor that is accessed 16 bytes at a time: a kernel is specialised for its alignment."""


class Field(NamedTuple):
    """One parameter of the generated function."""

    name: str  # the field names on the path to it, joined by "_"
    is_wide: bool


def is_group(kind: object) -> bool:
    """Returns whether a field of this annotation is itself a group of fields."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@functools.cache
def _hints(group: type) -> dict[str, Any]:
    """Returns the annotations of a group by field; for a field that is a group or None, the group."""
    return {name: _without_none(kind) for name, kind in typing.get_type_hints(group).items()}


def _without_none(kind: object) -> object:
    groups = [part for part in typing.get_args(kind) if is_group(part)]
    return groups[0] if groups else kind


@functools.cache
def fields_of(group: type) -> tuple[Field, ...]:
    """Returns the leaves of a NamedTuple class, depth first; its fields may be such classes themselves, or one or None.

    Raises TypeError if two leaves have one name.
    """
    found = tuple(_walk(group, ""))
    names = [field.name for field in found]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TypeError(f"{group.__name__} has several fields named {', '.join(twice)}; rename a field or its group")
    return found


def _walk(group: type, path: str) -> Iterator[Field]:
    for name, kind in _hints(group).items():
        if is_group(kind):
            yield from _walk(kind, f"{path}{name}_")
        else:
            yield Field(f"{path}{name}", kind is WidePointer)


@functools.cache
def flattening(group: type) -> Callable[[object], tuple[object, ...]]:
    """Returns a function from an instance of `group` to the values of its leaves, in the order of `fields_of`.

    If a group of the instance is None, each of its leaves is None. The function is generated, because every launch that is not
    replayed calls it: one assignment unpacks each group.
    """
    leaves = ", ".join(field.name for field in fields_of(group))
    source = "\n    ".join(["def flatten(_):", *_assignments(group, ""), f"return ({leaves},)"])
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<flexattn flattening of {group.__name__}>", "exec"), namespace)
    found: Callable[[Any], tuple[Any, ...]] = namespace["flatten"]
    return found


def _assignments(group: type, path: str) -> Iterator[str]:
    """Yields the statements that unpack the variable of a group, "_" and its path, and then the variables of its groups."""
    hints = _hints(group)
    names = [f"{'_' if is_group(kind) else ''}{path}{name}" for name, kind in hints.items()]
    yield f"{', '.join(names)}, = _{path.removesuffix('_')} or {(None,) * len(names)}"
    for name, kind in hints.items():
        if is_group(kind):
            yield from _assignments(kind, f"{path}{name}_")


def flat_function(body: Callable[..., None], jit: Callable[..., object]) -> tuple[Callable[..., None], type]:
    """Returns (the flat function of a kernel, the class of its first argument).

    body: the kernel as written: `args`, annotated with a NamedTuple class, and constants, annotated tl.constexpr.
    jit: makes a device function of it: triton.jit or gluon.jit.
    """
    first, *constants = inspect.signature(body).parameters
    group = typing.get_type_hints(body)[first]
    flat = [field.name for field in fields_of(group)]
    name = body.__name__
    parameters = ", ".join([*flat, *(f"{constant}: tl.constexpr" for constant in constants)])
    groups: dict[str, type] = {}
    value = _construction(group, "", groups)
    source = f"def {name}({parameters}):\n    body({', '.join([value, *constants])})\n"
    file = f"<flexattn {body.__module__}.{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # inspect finds the source there
    namespace: dict[str, Any] = {"tl": tl, "body": jit(body), "__name__": body.__module__, **groups}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name], group


def _construction(group: type, path: str, groups: dict[str, type]) -> str:
    """Returns the expression that makes a group from the flat parameters, and adds its classes to `groups` by name.

    Raises TypeError if two different classes have one name.
    """
    if groups.setdefault(group.__name__, group) is not group:
        raise TypeError(f"two groups of a kernel's arguments are different classes named {group.__name__}; rename one")
    parts = [
        _construction(kind, f"{path}{name}_", groups) if is_group(kind) else f"{path}{name}" for name, kind in _hints(group).items()
    ]
    return f"{group.__name__}({', '.join(parts)})"
