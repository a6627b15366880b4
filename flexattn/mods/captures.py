"""Captures of a callable: a key that is equal only where the same graph would be traced, and the values that are its inputs.

Tensors and floats are inputs: their values are in no key. All else that the callable can read is in the key, by its contents and
never by an address: closures, defaults, globals, the attributes that its code names of objects, classes and modules, and what
those reach. Functions are followed where they are Python, and believed where `mod_code.is_pure` lists them. Whatever is left, as an
object of a C type or a function that takes an attribute's name as a string, is not guessed at: there is no key, and `unkeyed` says
why.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.mods.walk import ABSENT, MEMO, Scope, TooManyFloats, Unkeyed, Walk


class Captures(NamedTuple):
    """key: None, and nothing else known, where something that may be read has no key; `unkeyed` says what.

    Names are for generated code and errors.
    """

    key: Hashable | None
    unkeyed: str
    tensors: tuple[tuple[str, Tensor], ...]
    floats: tuple[tuple[str, float], ...]  # empty if floats are part of the key, as more than 1000 are
    values: tuple[str, ...]  # bits of the floats


class _Memo:
    """Result of a walk through a function, and where it was read: while all of that is still there, the walk is not repeated.

    It holds nothing that leads back to the function, which else would live until the garbage collector finds the cycle.
    """

    def __init__(self, function: Any, walk: Walk, captures: Captures) -> None:
        self.function: Any = weakref.ref(function)  # functools.wraps copies attributes
        self.captures = captures
        self.is_partial = type(function) is functools.partial
        if not self.is_partial:
            self.code, self.defaults, self.keywords = function.__code__, function.__defaults__, function.__kwdefaults__
        self.cells, self.entries = walk.cells, walk.entries
        self.tensors = [(t, t.dtype, t.dim(), t.requires_grad) for _, t in captures.tensors]
        self.is_grad_enabled = torch.is_grad_enabled()
        functions = [known for known in walk.functions if known[0] is not function]
        self.others = functions, walk.objects, walk.classes, walk.shapes, walk.empty
        self.has_others = any(self.others)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the function has none

    def holds(self, function: Any, tensors_too: bool) -> bool:
        if self.function() is not function or torch.is_grad_enabled() is not self.is_grad_enabled:
            return False
        if not self.is_partial and (
            function.__code__ is not self.code
            or function.__defaults__ is not self.defaults
            or function.__kwdefaults__ is not self.keywords
        ):
            return False
        try:
            for cell, value in self.cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:  # not bound
            return False
        for owner, name, value in self.entries:
            if owner.get(name, ABSENT) is not value:
                return False
        if self.has_others and not self._hold_others():
            return False
        if tensors_too:
            for t, dtype, dims, requires_grad in self.tensors:
                if t.dtype is not dtype or t.dim() != dims or t.requires_grad is not requires_grad:
                    return False
        return True

    def _hold_others(self) -> bool:
        functions, objects, classes, shapes, empty = self.others
        for known, code, defaults, keywords in functions:
            if known.__code__ is not code or known.__defaults__ is not defaults or known.__kwdefaults__ is not keywords:
                return False
        for known, kind, attributes in objects:
            if type(known) is not kind or known.__dict__ is not attributes:
                return False
        for kind, owners in classes:
            if kind.__mro__ is not owners:
                return False
        for mapping, names in shapes:
            if tuple(mapping) != names:
                return False
        return not any(empty)


def find_captures(function: Any, lift: bool = True, tensors_too: bool = True) -> Captures:
    """Returns what `function` depends on; without `lift`, floats are part of the key too.

    Without `tensors_too` the key may say of a tensor what it was before its dtype, dims or requires_grad were changed in place: for
    callers that check these themselves.
    """
    can_remember = lift and type(function) in (types.FunctionType, functools.partial)
    if can_remember:
        memo = function.__dict__.get(MEMO)
        if memo is not None and memo.holds(function, tensors_too):
            found: Captures = memo.captures
            return found
    try:
        walk, key, _ = _walked(function, lift, None)
    except TooManyFloats:
        return find_captures(function, lift=False)
    except Unkeyed as e:
        return Captures(None, str(e), (), (), ())
    if lift and walk.is_tied:  # it cannot be rebuilt with other floats
        return find_captures(function, lift=False)
    values = tuple(value.hex() for _, value in walk.floats)
    captures = Captures(key, "", tuple(walk.tensors), tuple(walk.floats), values)
    if can_remember and walk.is_all_read:
        function.__dict__[MEMO] = _Memo(function, walk, captures)
    return captures


def with_floats(function: Any, values: Iterator[Any]) -> Any:
    """Returns `function` with each of its floats, in the order of `find_captures`, replaced; the function itself is not touched."""
    return _walked(function, True, values)[2]


def _walked(function: Any, lift: bool, values: Iterator[Any] | None) -> tuple[Walk, Hashable, Any]:
    """Returns a walk that began with all names of the code that it meets, its key, and what replaces the function."""
    name = getattr(function, "__name__", "mod")
    scope = Scope()
    walks = []  # they keep alive what they met, so that no address is taken anew
    while True:
        scope.begin()
        walk = Walk(lift, scope, None)
        key, _ = walk.visit_all(name, function)
        walks.append(walk)
        if not scope.has_grown:
            break
    if values is None:
        return walk, key, function
    walk = Walk(lift, scope, values)
    return (walk, *walk.visit_all(name, function))


def runs_as_it_is(function: Any) -> None:
    """Keeps torch.compile away from a function and all that it calls, behind a graph break, at no cost.

    What torch.compiler.disable does takes a microsecond in each call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skip)


runs_as_it_is(find_captures)
