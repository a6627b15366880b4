"""What a callable depends on: a key that is equal iff it would be traced to the same graph, and the values that are inputs of it.

Tensors and floats are inputs: their values are in no key. Integers, booleans, strings and code are the key, by their contents and
never by an address. Found are closures, defaults, globals, what those reach, partial's arguments, and the attributes that code
names, of bound methods' objects, of modules and of objects.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CONSTANTS = frozenset((int, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, range))
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy"}  # whose functions do not change
_MOST_DEEP = 16


class Captures(NamedTuple):
    """key: None where something found has no key, and `unkeyed` says what. Names are for generated code and errors."""

    key: Hashable | None
    unkeyed: str
    tensors: tuple[tuple[str, Tensor], ...]
    floats: tuple[tuple[str, float], ...]  # empty where floats are part of the key
    values: tuple[str, ...]  # of the floats, told apart to the last bit


_MEMO = "_flexattn_captures"  # a function's attribute, so that it goes when the function goes
_ABSENT: Any = object()


class _Memo:
    """What was found of a function, and where: while all that was read is still there, it is found again without looking for it."""

    def __init__(self, function: Any, walk: _Walk, captures: Captures) -> None:
        self.function = weakref.ref(function)  # functools.wraps copies attributes
        self.captures = captures
        self.functions, self.cells, self.entries = walk.functions, walk.cells, walk.entries
        self.tensors = [(t, t.dtype, t.dim(), t.requires_grad) for _, t in captures.tensors]
        self.is_grad_enabled = torch.is_grad_enabled()

    def holds(self, function: Any, tensors_too: bool) -> bool:
        if self.function() is not function or torch.is_grad_enabled() is not self.is_grad_enabled:
            return False
        for known, code, defaults, keywords in self.functions:
            if known.__code__ is not code or known.__defaults__ is not defaults or known.__kwdefaults__ is not keywords:
                return False
        try:
            for cell, value in self.cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:  # not bound
            return False
        for owner, name, value in self.entries:
            if owner.get(name, _ABSENT) is not value:
                return False
        for t, dtype, dims, requires_grad in self.tensors if tensors_too else ():
            if t.dtype is not dtype or t.dim() != dims or t.requires_grad is not requires_grad:
                return False
        return True


def find_captures(function: Any, lift: bool = True, tensors_too: bool = True) -> Captures:
    """What `function` depends on; without `lift`, floats are part of the key too.

    Without `tensors_too` the key may say of a tensor what it was before its dtype, dims or requires_grad were changed in place: for
    who looks at all of these himself.
    """
    can_remember = lift and type(function) is types.FunctionType
    if can_remember:
        memo = function.__dict__.get(_MEMO)
        if memo is not None and memo.holds(function, tensors_too):
            found: Captures = memo.captures
            return found
    walk = _Walk(lift, None)
    key, _ = walk.visit(getattr(function, "__name__", "mod"), function, frozenset(), 0)
    if lift and walk.is_cyclic:  # it cannot be rebuilt with other floats
        return find_captures(function, lift=False)
    values = tuple(value.hex() for _, value in walk.floats)
    captures = Captures(None if walk.unkeyed else key, walk.unkeyed, tuple(walk.tensors), tuple(walk.floats), values)
    if can_remember and captures.key is not None and walk.is_all_read:
        function.__dict__[_MEMO] = _Memo(function, walk, captures)
    return captures


def with_floats(function: Any, values: Iterator[Any]) -> Any:
    """`function` with each of its floats, in the order of `find_captures`, replaced; the function itself is not touched."""
    _, replaced = _Walk(True, values).visit("mod", function, frozenset(), 0)
    return replaced


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The global and attribute names in a function's code and in the functions that it defines."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _sorted_names(code: types.CodeType) -> tuple[str, ...]:
    return tuple(sorted(_names(code)))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


_FIXED = (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _is_fixed(value: Any) -> bool:
    """Classes, builtins and what belongs to a library: equal to themselves alone, and kept alive by the key that holds them."""
    kind = type(value)
    if kind is types.ModuleType:
        return value.__name__.partition(".")[0] in _LIBRARIES
    if kind is types.FunctionType:
        return str(value.__module__).partition(".")[0] in _LIBRARIES
    return isinstance(value, (*_FIXED, torch._ops.OpOverload, torch._ops.OpOverloadPacket))


class _Walk:
    def __init__(self, lift: bool, values: Iterator[Any] | None) -> None:
        self.lift = lift
        self.values = values  # the floats' replacements; None: nothing is rebuilt
        self.tensors: list[tuple[str, Tensor]] = []
        self.floats: list[tuple[str, float]] = []
        self.unkeyed = ""
        self.seen: dict[int, int] = {}  # by address, of what lives as long as the walk does
        self.replaced: dict[int, Any] = {}
        self.is_cyclic = False
        self.tensor_at: dict[int, int] = {}
        # Where everything was read, and what was there:
        self.functions: list[tuple[Any, Any, Any, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.entries: list[tuple[Any, str, Any]] = []
        self.is_all_read = True  # there was nothing else to read

    def visit(self, name: str, value: Any, names: frozenset[str], depth: int) -> tuple[Hashable, Any]:
        """(key, the value or what replaces it). `names`: the attributes that the code around it can ask of an object."""
        kind = type(value)
        if kind in _CONSTANTS:
            return (kind, value), value
        if kind is float:
            if not self.lift:
                return (kind, value.hex()), value
            self.floats.append((name, value))
            return (kind,), value if self.values is None else next(self.values)
        if isinstance(value, Tensor):
            if id(value) not in self.tensor_at:
                self.tensor_at[id(value)] = len(self.tensors)
                self.tensors.append((name, value))
            needs_grad = value.requires_grad and torch.is_grad_enabled()
            return (Tensor, self.tensor_at[id(value)], value.dtype, value.dim(), needs_grad), value
        if _is_fixed(value):
            return (kind, value), value
        if getattr(kind, "is_trace_state", False):
            return (kind,), value
        if depth > _MOST_DEEP:
            return self._give_up(name, value, f"more than {_MOST_DEEP} references away")
        if id(value) in self.seen:
            self.is_cyclic = self.is_cyclic or id(value) not in self.replaced
            return ("seen", self.seen[id(value)]), self.replaced.get(id(value), value)
        self.seen[id(value)] = len(self.seen)
        key, self.replaced[id(value)] = self._compound(name, value, names, depth)
        return key, self.replaced[id(value)]

    def _compound(self, name: str, value: Any, names: frozenset[str], depth: int) -> tuple[Hashable, Any]:
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, depth)
        self.is_all_read = self.is_all_read and kind not in (list, dict) and not isinstance(value, functools.partial)
        if kind in (tuple, list):
            parts = [self.visit(f"{name}_{i}", item, names, depth + 1) for i, item in enumerate(value)]
            return (kind, *(key for key, _ in parts)), self._rebuilt(value, lambda: kind(new for _, new in parts))
        if kind is dict:
            items = {key: self.visit(f"{name}_{key}", item, names, depth + 1) for key, item in value.items()}
            if not all(type(key) in _CONSTANTS for key in value):
                return self._give_up(name, value, "a dict whose keys are not numbers or strings")
            return (dict, *((k, key) for k, (key, _) in items.items())), self._rebuilt(
                value, lambda: {k: new for k, (_, new) in items.items()}
            )
        if isinstance(value, functools.partial):
            parts = [self.visit(name, part, names, depth + 1) for part in (value.func, value.args, value.keywords)]
            return (kind, *(key for key, _ in parts)), self._rebuilt(
                value, lambda: functools.partial(parts[0][1], *parts[1][1], **parts[2][1])
            )
        if isinstance(value, types.MethodType):
            function, new_function = self.visit(name, value.__func__, names, depth + 1)
            owner, new_owner = self.visit(name, value.__self__, names | _names(value.__func__.__code__), depth + 1)
            return ("method", function, owner), self._rebuilt(value, lambda: types.MethodType(new_function, new_owner))
        if isinstance(value, types.ModuleType):
            return self._module(name, value, names, depth)
        if hasattr(value, "__dict__"):
            return self._object(name, value, names, depth)
        return self._give_up(name, value, f"a {kind.__module__}.{kind.__qualname__}")

    def _function(self, function: types.FunctionType, depth: int) -> tuple[Hashable, Any]:
        code, names = function.__code__, _names(function.__code__)
        cells = dict(zip(code.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
        known = function.__globals__
        found = {name: known[name] for name in _sorted_names(code) if name in known}
        self.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        self.cells += [(cell, _contents(cell)) for cell in function.__closure__ or ()]
        self.entries += [(known, name, known.get(name, _ABSENT)) for name in _sorted_names(code)]
        self.is_all_read = self.is_all_read and not function.__kwdefaults__
        groups: list[Mapping[str, Any]] = [cells, found, function.__kwdefaults__ or {}]
        keys: list[Hashable] = [types.FunctionType, code]
        news: list[dict[str, Any]] = []
        for group in groups:
            visited = {name: self.visit(name, value, names, depth + 1) for name, value in group.items()}
            keys.append(tuple((name, key) for name, (key, _) in visited.items()))
            news.append({name: new for name, (_, new) in visited.items()})
        defaults = [self.visit(f"default_{i}", value, names, depth + 1) for i, value in enumerate(function.__defaults__ or ())]
        keys.append(tuple(key for key, _ in defaults))

        def rebuild() -> types.FunctionType:
            closure = tuple(types.CellType(news[0][name]) for name in code.co_freevars)
            new = types.FunctionType(code, {**known, **news[1]}, function.__name__, tuple(n for _, n in defaults), closure)
            new.__kwdefaults__ = news[2]
            return new

        return tuple(keys), self._rebuilt(function, rebuild)

    def _module(self, name: str, module: types.ModuleType, names: frozenset[str], depth: int) -> tuple[Hashable, Any]:
        attributes = vars(module)
        self.entries += [(attributes, attr, attributes.get(attr, _ABSENT)) for attr in names]
        visited = {attr: self.visit(attr, attributes[attr], names, depth + 1) for attr in sorted(names) if attr in attributes}

        def rebuild() -> types.SimpleNamespace:
            return types.SimpleNamespace(**{**attributes, **{attr: new for attr, (_, new) in visited.items()}})

        key = ("module", module.__name__, *((attr, key) for attr, (key, _) in visited.items()))
        return key, self._rebuilt(module, rebuild)

    def _object(self, name: str, value: Any, names: frozenset[str], depth: int) -> tuple[Hashable, Any]:
        kind = type(value)
        methods: dict[str, Hashable] = {}
        todo = [*names, "__call__"] if callable(value) else [*names]
        wanted = set(todo)
        while todo:  # a method that is called names further attributes
            attr = todo.pop()
            method = self._of_class(kind, attr)
            method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType) and attr not in methods and not _is_fixed(method):
                methods[attr], _ = self.visit(attr, method, names, depth + 1)
                further = _names(method.__code__) - wanted
                wanted |= further
                todo += further
        held = dict(vars(value))
        owners = [vars(value)]
        if isinstance(value, torch.nn.Module):
            owners += [value._parameters, value._buffers, value._modules]
        self.entries += [(owner, attr, owner.get(attr, _ABSENT)) for owner in owners for attr in wanted]
        if isinstance(value, torch.nn.Module):
            held |= {**value._parameters, **value._buffers, **value._modules}
        visited = {attr: self.visit(attr, held[attr], frozenset(wanted), depth + 1) for attr in sorted(wanted) if attr in held}

        def rebuild() -> Any:
            clone = copy.copy(value)
            for attr, (_, new) in visited.items():
                if new is not held[attr]:
                    vars(clone)[attr] = new
            return clone

        constants = {
            attr: vars(kind)[attr]
            for attr in sorted(wanted)
            if attr in vars(kind) and type(vars(kind)[attr]) in (*_CONSTANTS, float)
        }
        key = (
            "object",
            kind,
            tuple(sorted(methods.items(), key=lambda item: item[0])),
            tuple((attr, key) for attr, (key, _) in visited.items()),
            tuple((attr, repr(constant)) for attr, constant in constants.items()),
        )
        return key, self._rebuilt(value, rebuild)

    def _of_class(self, kind: type, attr: str) -> Any:
        for owner in kind.__mro__:
            found = vars(owner).get(attr, _ABSENT)
            self.entries.append((vars(owner), attr, found))
            if found is not _ABSENT:
                return found
        return None

    def _rebuilt(self, value: Any, rebuild: Any) -> Any:
        return value if self.values is None else rebuild()

    def _give_up(self, name: str, value: Any, what: str) -> tuple[Hashable, Any]:
        self.unkeyed = self.unkeyed or f"{name} is {what}"
        return None, value
