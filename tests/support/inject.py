"""Faults in copies of kernel files: a call that is dropped, comes too early or has another argument.

A call is found by its name and by what it mentions: "wait(v_full)" is the one statement that waits for a barrier and mentions
`v_full` among the arguments. Where several do, `within` names the function, and `nth` counts from 0 in the order of the file. An
`if` around nothing but one such statement goes with it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from triton.experimental.gluon._runtime import GluonJITFunction

from tests.support import syntax

# Kernels wait and arrive by the pipeline's functions, or by the barrier and its phase.
_WAITS = ("mbarrier.wait", "wait_full", "wait_empty")
_SPELLINGS = {"wait": _WAITS, "arrive": ("mbarrier.arrive", "release")}
_MODULE = "pipeline."  # that they may be called by
_OTHER_PHASE = {"wait_full": "wait_empty", "wait_empty": "wait_full"}

_KERNELS = "flexattn.kernels_triton."

_Found = TypeVar("_Found")
Fault = Callable[[ast.Module], None]
"""Changes the syntax tree of a file."""


class _Place(NamedTuple):
    block: list[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]


def drop(call: str, *, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that a statement is not there."""

    def change(tree: ast.Module) -> None:
        place = _find(tree, call, within, nth)
        place.block[place.index] = ast.Pass()

    return change


def move(
    call: str, *, before: str = "", after: str = "", within: str = "", nth: int | None = None, nth_there: int | None = None
) -> Fault:
    """Returns the fault that a statement comes too early: before or after another one."""

    def change(tree: ast.Module) -> None:
        place = _find(tree, call, within, nth)
        moved = place.statement
        place.block[place.index] = ast.Pass()
        there = _find(tree, before or after, within, nth_there)
        there.block.insert(there.index + (not before), moved)

    return change


def add(statement: str, *, before: str, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that a statement stands before another one, beside wherever it stands already."""

    def change(tree: ast.Module) -> None:
        place = _find(tree, before, within, nth)
        place.block[place.index : place.index] = ast.parse(statement).body

    return change


def call_instead(call: str, name: str, *, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that another function is called with the same arguments."""

    def change(tree: ast.Module) -> None:
        _call_in(_find(tree, call, within, nth).statement, call).func = ast.Name(name, ast.Load())

    return change


def wrong_phase(wait: str, *, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that a wait is for the other parity of its barrier."""

    def change(tree: ast.Module) -> None:
        found = _call_in(_find(tree, wait, within, nth).statement, wait)
        name = ast.unparse(found.func)
        function = name.removeprefix(_MODULE)
        if function in _OTHER_PHASE:
            found.func = ast.parse(name.replace(function, _OTHER_PHASE[function]), mode="eval").body
        else:
            found.args[1] = ast.BinOp(found.args[1], ast.BitXor(), ast.Constant(1))

    return change


def with_argument(call: str, argument: int | str, value: str, *, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that an argument, by place or keyword, is another expression; `{}` in it is the right one."""

    def change(tree: ast.Module) -> None:
        found = _call_in(_find(tree, call, within, nth).statement, call)
        keyword = next((keyword for keyword in found.keywords if keyword.arg == argument), None)
        right = keyword.value if keyword is not None else found.args[int(argument)]
        wrong = ast.parse(value.replace("{}", f"({ast.unparse(right)})"), mode="eval").body
        if keyword is not None:
            keyword.value = wrong
        else:
            found.args[int(argument)] = wrong

    return change


def assign(name: str, value: str, *, within: str = "", nth: int | None = None) -> Fault:
    """Returns the fault that a name is given, or changed by, another value."""

    def change(tree: ast.Module) -> None:
        found = [
            node
            for function in _scopes(tree, within)
            for node in ast.walk(function)
            if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
            or (isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name)
        ]
        _one(found, f"assignments to {name}", within, nth).value = ast.parse(value, mode="eval").body

    return change


def copy_with(module: ModuleType, faults: Fault | Sequence[Fault], folder: Path) -> ModuleType:
    """Returns a copy of a module, whose file in the folder has the faults."""
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    for fault in [faults] if callable(faults) else faults:
        fault(tree)
    file = folder / f"{module.__name__.rpartition('.')[2]}_with_a_fault.py"
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)), "utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = loaded  # where the names in annotations are looked up
    spec.loader.exec_module(loaded)
    return loaded


def kernels_with(
    kernels: Sequence[ModuleType], module: ModuleType, faults: Fault | Sequence[Fault], folder: Path
) -> tuple[ModuleType, ...]:
    """Returns the kernels' modules, copies where they have the faults: one of them, or all that take from a part they share."""
    parts = [part for name, part in sorted(sys.modules.items()) if name.startswith(_KERNELS)]
    copies = {module: copy_with(module, faults, folder)}
    while taking := [part for part in parts if part not in copies and any(_shared(part, other) for other in copies)]:
        copies |= {part: copy_with(part, [], folder) for part in taking}
    for part, copy in copies.items():
        for other, wrong in copies.items():
            for name, value in _shared(part, other).items() if part is not other else ():
                setattr(copy, name, wrong if value is other else getattr(wrong, value.__name__))
    return tuple(copies.get(kernel, kernel) for kernel in kernels)


def _shared(part: ModuleType, other: ModuleType) -> dict[str, Any]:
    """Returns the names of a part that are another part, or one of its device functions."""
    functions = [
        value for value in vars(other).values() if isinstance(value, GluonJITFunction) and value.__module__ == other.__name__
    ]
    return {name: value for name, value in vars(part).items() if value is other or any(value is function for function in functions)}


def _scopes(tree: ast.Module, within: str) -> list[syntax.Scope]:
    found = syntax.scopes(tree, within)
    assert found, f"there is no function {within}"
    return found


def _find(tree: ast.Module, call: str, within: str, nth: int | None) -> _Place:
    places = [place for function in _scopes(tree, within) for place in _places(function) if _calls(place.statement, call)]
    places.sort(key=lambda place: getattr(place.statement, "lineno", 0))
    return _one(places, f"statements with {call}", within, nth)


def _one(found: list[_Found], what: str, within: str, nth: int | None) -> _Found:
    assert len(found) == 1 or (nth is not None and nth < len(found) > 0), f"{len(found)} {what} within {within or 'the file'}"
    return found[nth or 0]


def _places(tree: ast.AST) -> Iterator[_Place]:
    """Yields the statements that hold no others, and in their stead an `if` that has one alone."""
    for field in ("body", "orelse"):
        block = getattr(tree, field, None)
        for i, statement in enumerate(block if isinstance(block, list) else []):
            is_guard = isinstance(statement, ast.If) and not statement.orelse and len(statement.body) == 1
            if is_guard and not hasattr(statement.body[0], "body"):
                yield _Place(block, i)
            elif hasattr(statement, "body"):
                yield from _places(statement)
            else:
                yield _Place(block, i)


def _calls(statement: ast.stmt, call: str) -> list[ast.Call]:
    wanted = ast.parse(call, mode="eval").body
    assert isinstance(wanted, ast.Call)
    name = ast.unparse(wanted.func)
    names = _SPELLINGS.get(name, (name,))
    return [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func).removeprefix(_MODULE) in names
            or (isinstance(node.func, ast.Attribute) and node.func.attr == name)
        )
        and {ast.unparse(argument) for argument in wanted.args} <= _mentioned(node)
    ]


def _call_in(statement: ast.stmt, call: str) -> ast.Call:
    return _calls(statement, call)[0]


def _mentioned(call: ast.Call) -> set[str]:
    """Returns the expressions in the arguments of a call, and the names of attributes."""
    inside = [node for argument in (*call.args, *call.keywords) for node in ast.walk(argument)]
    attributes = {node.attr for node in inside if isinstance(node, ast.Attribute)}
    return attributes | {ast.unparse(node) for node in inside if isinstance(node, ast.expr)}
