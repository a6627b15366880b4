"""Captures of a mod: a key that is equal only if the same graph would be traced, and the tensors and floats that are its inputs.

A walk from the mod visits each value that its code can reach. The contents of the values are the key, so a lambda made in each call
finds the trace of the last one. A value that the walk does not know ends it with `Unkeyed`: such a mod is traced in each call.

- Function: the walk visits its code, variables, globals and defaults. A mod can only call functions that it can read, so the walk
  meets these too. `names` finds the names in the code, and the functions of C and torch that read nothing but their arguments.
- Module, object or class of an object: the walk visits each attribute whose name is in any code that the walk has met.
- Tuple, list or dict: the walk visits all items.
- Special methods of an object, such as __len__: Python calls them without a name in the code, and most are never called. The mod is
  traced on copies of its objects, whose special methods report their calls (`copied`). After a report the object has no key.
- Writes: if a copy or the key is not the same after the trace as before, the trace is not kept.

Floats are not in the key: in the copy of a mod each float is an input of the trace. A float in a module or class, which has no
copy, is in the key. `trace` adds facts that only a run shows: values of floats that Python asks for, and shapes that the mod reads.

A function remembers its captures and the places that were read (`_Memo`). The walk is made again if one of them has another object.
"""

from __future__ import annotations

import abc
import functools
import marshal
import operator
import types
import typing
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.compat import runs_as_it_is
from flexattn.mods.names import is_pure, is_special, names_of


class Captures(NamedTuple):
    """key: None if a value that may be read has no key; `unkeyed` names it. Names are for generated code and errors."""

    key: Hashable | None
    unkeyed: str
    tensors: tuple[tuple[str, Tensor], ...]
    floats: tuple[tuple[str, float], ...]
    values: tuple[str, ...]  # bits of the floats
    has_special: bool = False  # only a trace shows whether special methods are called, which may read more


class Unkeyed(Exception):
    """Ends a walk at a value that has no key."""


class _TooManyFloats(Exception):
    """Ends a walk that would make inputs of more than _MOST_INPUTS floats."""


# A part of the key, then names and values of the parts to visit, and a function that makes a copy from copies of the parts.
_Parts = tuple[Hashable, Sequence[str], Sequence[Any], Callable[[list[Any]], Any] | None]
_Entry = tuple[Callable[[str, object], object], str, object]  # a function, a name, and the object that it gave for the name
_Read = tuple[Callable[[Any], Sequence[object]], Any, Sequence[object]]  # a function, its argument, and the objects that it gave

ABSENT: Any = type("Absent", (), {})()  # stands for an attribute or global that is not there
MEMO = "_flexattn_captures"  # attribute of a function, so that the memo goes when the function goes
_has_grad = torch.is_grad_enabled  # looked up once: each look into torch takes 20 ns of each call
_MOST_INPUTS = 1000  # floats that are inputs of a program: a trace takes a millisecond for each
_NUMBERS = frozenset((int, bool, float))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONSTANTS = frozenset((int, bool, str, bytes, type(None), type(...), type(ABSENT), *_OF_TORCH))
_SYMBOLIC = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ROOT_CLASSES = frozenset((object, typing.Generic, typing.Protocol, abc.ABC, torch.nn.Module))
_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MemberDescriptorType)
_OF_CLASSES = frozenset(("__new__", "__init__", "__post_init__", "__class_getitem__"))  # no operator on an object calls these
_NOT_CALLED = _OF_CLASSES | {"__annotate__", "__annotate_func__"}
_READ_ALL = frozenset(name for name in vars(torch.nn.Module) if not (is_special(name) or hasattr(Tensor, name))) - {"forward"}
_LAZY = ("torch", "numpy")  # packages that import their parts when they are asked for

_unkeyed: weakref.WeakSet[Any] = weakref.WeakSet()  # classes whose special methods a mod has called, and code that changed copies
_num_reports = 0


class _Walk:
    """Visits the values that a mod can reach. numbers: replace the floats, if the walk makes a copy of the mod.

    names: attributes that any code asks for, which grow with the functions that are met: then there must be another walk.
    """

    def __init__(self, root: object, names: set[str], lift: bool, numbers: Iterator[object] | None) -> None:
        self.root, self.names, self.lift, self.numbers = root, names, lift, numbers
        self.tensors: list[tuple[str, Tensor]] = []
        self.floats: list[tuple[str, float]] = []
        # By address: how many came before, whether it may be copied, and when it is done the copy and whether it differs.
        self.seen: dict[int, tuple[int, bool, tuple[Any, bool] | None]] = {}
        self.cyclic: set[int] = set()  # addresses that are met again before they are done
        self.alive: list[object] = []  # so that no address is taken anew
        self.num_replaced, self.has_special = 0, False
        self.code: types.CodeType | None = None  # code of the first function
        self.copies: list[tuple[object, _Read]] = []  # code or class of a copy, and its contents
        self.reports: list[type] = []  # classes whose special methods are called on copies
        # Places that were read, for a memo:
        self.is_all_known = True  # no other place was read
        self.entries: list[_Entry] = []
        self.forms: list[_Entry] = []  # fields of tensors
        self.reads: list[_Read] = []

    def visit_all(self) -> tuple[Hashable, Any]:
        """Returns the key of the mod and its copy; in the key are attributes of Tensor that are not torch's."""
        key, new = self.visit(getattr(self.root, "__name__", "mod"), self.root)
        members = [(name, self.entry(vars(Tensor), name)) for name in sorted(self.names)]
        return (key, *[(n, self.visit(n, x, False)[0]) for n, x in members if x is not ABSENT and not is_pure(x)]), new

    def entry(self, mapping: Mapping[str, object], name: str) -> Any:
        """Returns mapping[name], or ABSENT."""
        value = mapping.get(name, ABSENT)
        self.entries.append((mapping.get, name, value))
        return value

    def fields(self, value: object, *names: str) -> list[Any]:
        """Returns fields of a function, cell or partial."""
        get = functools.partial(getattr, self.without_circle(value))
        found = [(get, name, get(name)) for name in names]
        self.entries += found
        return [field for _, _, field in found]

    def without_circle(self, value: Any) -> Any:
        """Returns a value for a memo, in which nothing may lead back to the mod, which would not die then."""
        return weakref.proxy(value) if value is self.root else value

    def refuse_attributes(self, name: str, value: Any) -> None:
        """Raises Unkeyed if a value whose attributes are not visited has one that is asked for."""
        own, owner = vars(value), self.without_circle(value)
        if own and not self.names.isdisjoint(own):
            raise Unkeyed(f"{name} has an attribute {min(self.names.intersection(own))} of its own")
        self.is_all_known = self.is_all_known and own.keys() <= {MEMO}
        self.entries.append((lambda *_: len(owner.__dict__), "", len(own)))

    def visit(self, name: str, value: Any, may_copy: bool = True) -> tuple[Hashable, object]:
        """Returns the key of a value, and its copy, or the value itself if nothing in it is replaced."""
        kind: Any = type(value)
        if kind in _SYMBOLIC:  # a size that torch.export leaves open is fixed by a graph that has its value
            value = _SYMBOLIC[kind](value)
            kind, self.num_replaced = type(value), self.num_replaced + 1
        if kind in _CONSTANTS:
            return (kind, value), value
        if kind is float:
            if not (self.lift and may_copy):
                return (kind, value.hex()), value
            if len(self.floats) == _MOST_INPUTS:
                raise _TooManyFloats
            self.num_replaced += 1
            self.floats.append((name, value))
            return (kind,), value if self.numbers is None else next(self.numbers)
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and is_pure(value):
            if kind is types.FunctionType:
                self.refuse_attributes(name, value)
            return ("pure", value), value
        if id(value) in self.seen:
            number, could_copy, done = self.seen[id(value)]
            if done is None:
                self.cyclic.add(id(value))
            new, is_replaced = done or (value, False)
            if is_replaced and could_copy is not may_copy:
                raise Unkeyed(f"{name} is reached in two ways, of which one cannot be copied")
            return ("seen", number), new
        number, before = len(self.seen), self.num_replaced
        self.seen[id(value)] = number, may_copy, None
        self.alive.append(value)
        take_apart = _Walk.tensor if is_tensor else _TAKE_APART.get(kind, _Walk.object)
        token, names, parts, remake = take_apart(self, name, value, may_copy)
        visited = [self.visit(*part, may_copy and remake is not None) for part in zip(names, parts, strict=True)]
        new, is_replaced = value, self.num_replaced > before
        if is_replaced and id(value) in self.cyclic:
            raise Unkeyed(f"{name} is reached from itself, and has a part that is copied")
        if is_replaced and remake is not None and self.numbers is not None:
            new = remake([part for _, part in visited])
        self.seen[id(value)] = number, may_copy, (new, is_replaced)
        return (kind, token, *[key for key, _ in visited]), new

    # Values taken apart, by their type:

    def tensor(self, name: str, value: Tensor, may_copy: bool) -> _Parts:
        self.tensors.append((name, value))
        self.forms += [(functools.partial(getattr, value), n, getattr(value, n)) for n in ("dtype", "ndim", "requires_grad")]
        self.refuse_attributes(name, value)
        kind = type(value)
        for owner in () if kind in _PLAIN_TENSORS else kind.__mro__[: kind.__mro__.index(Tensor)]:
            self.refuse_attributes(f"{name}, a {kind.__name__},", owner)
        return (value.dtype, value.dim(), value.requires_grad and torch.is_grad_enabled()), (), (), None

    def function(self, name: str, function: Any, may_copy: bool) -> _Parts:
        code, defaults, keywords = self.fields(function, "__code__", "__defaults__", "__kwdefaults__")
        found, known = names_of(code), function.__globals__
        if found.hidden:
            raise Unkeyed(f"{function.__qualname__} uses {found.hidden}, which reads what no name in the code says")
        if code in _unkeyed:
            raise Unkeyed(f"{function.__qualname__} changes its own dependencies")
        self.code = self.code or code
        self.names |= found.attributes
        self.refuse_attributes(function.__qualname__, function)
        values = [self.entry(known, name) for name in found.globals]
        values = [self.entry(function.__builtins__, n) if x is ABSENT else x for n, x in zip(found.globals, values, strict=True)]
        cells = [self.fields(cell, "cell_contents")[0] for cell in function.__closure__ or ()]
        parts = (*cells, *values, defaults, keywords)

        def remake(news: list[Any]) -> object:
            named = zip(found.globals, news[len(cells) :], strict=False)
            scope = {**known, **{name: new for name, new in named if new is not ABSENT}}
            new_cells = tuple(map(types.CellType, news[: len(cells)]))
            new = types.FunctionType(code, scope, function.__name__, news[-2], new_cells)
            new.__kwdefaults__ = news[-1]
            self.copies += [(code, _read(_items, scope)), (code, _read(_contents, new_cells))]
            return new

        return code, (*code.co_freevars, *found.globals, "default", "default"), parts, remake

    def method(self, name: str, method: types.MethodType, may_copy: bool) -> _Parts:
        function, owner = method.__func__, method.__self__
        kind = vars(type(owner))
        if "_flexattn_reads" in kind and kind.get(function.__name__) is function:
            return function.__name__, (name,), (owner,), lambda news: types.MethodType(function, *news)
        return "", (name, name), (function, owner), lambda news: types.MethodType(*news)

    def module(self, _: str, module: types.ModuleType, may_copy: bool) -> _Parts:
        found = {name: self.entry(vars(module), name) for name in sorted(self.names)}
        missing = [name for name, value in found.items() if value is ABSENT]
        if missing and "__getattr__" in vars(module) and module.__name__.partition(".")[0] not in _LAZY:
            raise Unkeyed(f"the module {module.__name__} may make {missing[0]} when it is asked for")
        return (module.__name__, *found), [*found], [*found.values()], None

    def partial(self, name: str, value: functools.partial[Any], may_copy: bool) -> _Parts:
        self.refuse_attributes(name, value)
        parts = self.fields(value, "func", "args", "keywords")
        return "", (name, name, ""), parts, lambda news: functools.partial(news[0], *news[1], **news[2])

    def container(self, name: str, value: Any, may_copy: bool) -> _Parts:
        kind: Any = type(value)
        keys, items = ([*value], [*value.values()]) if kind is dict else ([], [*value])
        if kind is not tuple:
            self.reads.append(_read(_items, value))
        token: Hashable = _key_of_numbers(keys)
        if token is not None and (digest := _key_of_numbers(items, self.lift and may_copy)) is not None:
            return (token, digest), (), (), None

        def remake(news: list[Any]) -> object:
            new = dict(zip(keys, news, strict=True)) if kind is dict else kind(news)
            self.copies.append((self.code, _read(_items, new)))
            return new

        if token is None:
            token = tuple(self.visit(name, key, may_copy=False)[0] for key in keys)
        names = [f"{name}_{key}" if name else str(key) for key in keys or range(len(items))]
        return token, names, items, remake

    def object(self, name: str, value: Any, may_copy: bool) -> _Parts:
        kind = type(value)
        if "_flexattn_reads" in vars(kind):  # a class of this library, which lists its captures
            self.is_all_known, reads, state = False, kind._flexattn_reads, value._flexattn_state()
            return "", reads, [state[n] for n in reads], lambda news: _copy(value, kind, dict(zip(reads, news, strict=True)))
        if getattr(kind, "is_trace_state", False):  # no trace depends on it
            return "", (), (), None
        if kind in _unkeyed:
            raise Unkeyed(f"{name} is a {_named(kind)}, whose special methods a mod calls, or which it changes")
        keys, special = self.class_keys(name, kind)
        stores: tuple[str, ...] = ("__dict__",)
        if isinstance(value, torch.nn.Module):
            stores = ("__dict__", "_parameters", "_buffers", "_modules")
            special |= {"__call__", "__repr__", "__dir__"}
            if self.names & _READ_ALL:
                raise Unkeyed(f"{min(self.names & _READ_ALL)} of a torch.nn.Module may read all of it")
        if special and not may_copy:
            raise Unkeyed(f"{name} is a {_named(kind)}, which has special methods, in a value that is not copied")
        self.num_replaced, self.has_special = self.num_replaced + bool(special), self.has_special or bool(special)
        self.reads.append(_read(_stores, (value, stores)))
        asked = [(n, self.entry(getattr(value, store), n)) for store in stores for n in sorted(self.names)]
        found = [(n, part) for n, part in asked if part is not ABSENT]

        def remake(news: list[Any]) -> object:
            changed = {n: new for (n, part), new in zip(found, news, strict=True) if new is not part}
            new = _copy(value, _reporting_class(kind, special, self.reports) if special else kind, changed)
            self.copies.append((kind, _read(_items, object.__getattribute__(new, "__dict__"))))
            return new

        names = [n for n, _ in found]
        return (*names, *sorted(special), *keys), names, [part for _, part in found], remake

    def class_as_value(self, name: str, kind: type, may_copy: bool) -> _Parts:
        """Takes a class apart that may be called: with its constructors and the special methods of its objects."""
        if issubclass(kind, torch.nn.Module):
            raise Unkeyed(f"{name} is a class of torch.nn.Module, whose objects may be called")
        keys, special = self.class_keys(name, kind)
        owners = [vars(owner) for owner in kind.__mro__ if owner not in _ROOT_CLASSES]
        members = [(attr, owner[attr]) for owner in owners for attr in sorted(special | _OF_CLASSES) if attr in owner]
        return (kind, *keys), [attr for attr, _ in members], [member for _, member in members], None

    def class_keys(self, name: str, kind: type) -> tuple[list[Hashable], set[str]]:
        """Returns keys of the members of a class whose names are in the code, and its special methods."""
        owners = [owner for owner in kind.__mro__ if owner not in _ROOT_CLASSES]
        if type(kind) not in (type, abc.ABCMeta) or any(map(_is_of_c, owners)) or not kind.__dictoffset__:
            raise Unkeyed(f"{name} is a {_named(kind)}, whose contents are not followed")
        self.reads.append(_read(_members, (kind, owners)))
        asked = self.names if issubclass(kind, torch.nn.Module) else {"__call__", *self.names}
        keys: list[Hashable] = []
        special = set()
        for at, attr, member in [(at, *item) for at, owner in enumerate(owners) for item in vars(owner).items()]:
            opened = (member.fget, member.fset, member.fdel) if type(member) is property else member
            is_plain = type(member) in (types.FunctionType, types.GetSetDescriptorType) or not hasattr(type(member), "__get__")
            if attr in asked and (is_plain or type(member) is property):
                keys.append((at, attr, type(member), self.visit(attr, opened, may_copy=False)[0]))
            elif type(member) is types.FunctionType and is_special(attr):
                special |= {attr} - _NOT_CALLED
            elif (attr in asked or (is_special(attr) and attr not in _NOT_CALLED)) and (not is_plain or callable(member)):
                raise Unkeyed(f"{attr} of {_named(kind)} is a {_named(type(member))}")
        return keys, special


_TAKE_APART: dict[type, Callable[[_Walk, str, Any, bool], _Parts]] = dict.fromkeys((tuple, list, dict), _Walk.container)
_TAKE_APART |= {types.FunctionType: _Walk.function, types.MethodType: _Walk.method, types.ModuleType: _Walk.module}
_TAKE_APART |= {functools.partial: _Walk.partial, type: _Walk.class_as_value}


def _key_of_numbers(values: list[Any], is_lifted: bool = False) -> bytes | None:
    """Returns the key of numbers at once, as a visit of each takes microseconds; None for other values, and for floats to lift."""
    kinds = {*map(type, values)}
    return marshal.dumps(values, 2) if kinds <= _NUMBERS and not (is_lifted and float in kinds) else None


# The functions below return the objects that a walk reads of a value. `_are_same` reads them again before a later call.


def _read(get: Callable[[Any], Sequence[object]], owner: object) -> _Read:
    return get, owner, get(owner)


def _are_same(reads: Sequence[_Read]) -> bool:
    for get, owner, then in reads:
        now = get(owner)
        if len(now) != len(then) or not all(map(operator.is_, now, then)):
            return False
    return True


def _items(container: Any) -> Sequence[object]:
    return (*container, *container.values()) if type(container) is dict else (*container,)


def _contents(cells: Sequence[types.CellType]) -> Sequence[Any]:
    return [cell.cell_contents for cell in cells]


def _stores(found: tuple[object, Sequence[str]]) -> Sequence[Any]:
    value, stores = found
    return (type(value), *[getattr(value, store) for store in stores])


def _members(found: tuple[type, Sequence[type]]) -> Sequence[Any]:
    kind, owners = found
    return (*kind.__mro__, *[x for owner in owners for x in (*vars(owner), *vars(owner).values())])


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_of_c(kind: type) -> bool:
    """Returns whether objects of a class may hold more than their attributes."""
    return not kind.__flags__ & 1 << 9 or any(type(member) in _OF_C for member in vars(kind).values())


def _copy(value: object, kind: type, attributes: Mapping[str, object]) -> object:
    copy: object = object.__new__(kind)
    object.__getattribute__(copy, "__dict__").update(vars(value), **attributes)
    return copy


def _reporting_class(kind: type, special: set[str], reports: list[type]) -> type:
    """Returns a subclass whose special methods add their class to `reports`, and then call those of the class."""

    def reporting(method: Callable[..., object]) -> Callable[..., Any]:
        def report(*args: object, **kwargs: object) -> Any:
            reports.append(kind)
            return method(*args, **kwargs)

        return report

    body = {"__module__": kind.__module__, "__hash__": kind.__hash__, **{attr: reporting(getattr(kind, attr)) for attr in special}}
    if "__del__" in special:  # a copy owns nothing
        body["__del__"] = lambda self: None
    return types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(body))


class _Memo:
    """Captures of a function, and the places that were read."""

    def __init__(self, function: object, walk: _Walk, captures: Captures) -> None:
        self.function = weakref.ref(function)  # functools.wraps copies attributes
        self.captures, self.entries, self.forms, self.reads = captures, walk.entries, walk.forms, walk.reads
        self.has_grad, self.num_reports = torch.is_grad_enabled(), _num_reports

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the function has none

    def holds(self, function: object, tensors_too: bool) -> bool:
        """Returns whether each place that was read still has the object that was there."""
        if self.function() is not function or _has_grad() is not self.has_grad or _num_reports != self.num_reports:
            return False
        for entries in (self.entries, self.forms) if tensors_too else (self.entries,):
            for get, name, value in entries:
                if get(name, ABSENT) is not value:
                    return False
        return not self.reads or _are_same(self.reads)


def find_captures(function: object, lift: bool = True, tensors_too: bool = True) -> Captures:
    """Returns the captures of `function`; without `lift`, floats are part of the key too.

    Without `tensors_too`, the key may have the dtype, dims and requires_grad that a tensor had before it was changed in place: for
    callers that check these themselves.
    """
    can_remember = lift and type(function) in (types.FunctionType, functools.partial)
    memo = function.__dict__.setdefault(MEMO, None) if can_remember else None
    try:
        if memo is not None and memo.holds(function, tensors_too):
            return memo.captures  # type: ignore[no-any-return]
        walk, key, _ = _walked(function, lift)
    except (Unkeyed, RecursionError, ValueError) as e:  # ValueError: a variable that has no value
        return Captures(None, str(e), (), (), ())
    values = tuple(value.hex() for _, value in walk.floats)
    captures = Captures(key, "", tuple(walk.tensors), tuple(walk.floats), values, walk.has_special)
    if can_remember and walk.is_all_known:
        function.__dict__[MEMO] = _Memo(function, walk, captures)
    return captures


def _walked(function: object, lift: bool, numbers: Sequence[object] | None = None) -> tuple[_Walk, Hashable, Any]:
    """Returns a walk that knew all names from its beginning, the key of the mod and its copy."""
    root = _function_of(function)
    inner = getattr(root, "func", getattr(root, "__func__", root))
    names = {*names_of(inner.__code__).attributes} if type(inner) is types.FunctionType else set()
    num_names = -1
    while num_names != len(names):
        num_names = len(names)
        walk = _Walk(root, names, lift, None)
        try:
            key, new = walk.visit_all()
        except _TooManyFloats:
            lift, num_names = False, -1
    if numbers is not None:
        walk = _Walk(root, names, lift, iter(numbers))
        key, new = walk.visit_all()
    return walk, key, new


def _function_of(mod: object) -> Any:
    """Returns the function that a call of an object calls."""
    if isinstance(mod, torch.nn.Module):
        state = {**vars(torch.nn.modules.module), **vars(mod)}
        if state.get("_compiled_call_impl") or any(x for name, x in state.items() if "ward" in name and name.endswith("_hooks")):
            raise Unkeyed(f"{_named(type(mod))} is a module with hooks, or compiled")
        return mod.forward
    call = getattr(type(mod), "__call__", None)  # noqa: B004
    return types.MethodType(call, mod) if type(call) is types.FunctionType else mod


def copied(function: object, numbers: Sequence[object]) -> tuple[Any, Callable[[], str]]:
    """Returns a copy of `function` with `numbers` in place of its floats, in the order of `find_captures`.

    After a trace of the copy, the function beside it returns why the trace does not hold for other calls, or "".
    """
    walk, _, new = _walked(function, bool(numbers), numbers)

    def why_unsettled() -> str:
        global _num_reports
        changed = [owner for owner, read in walk.copies if not _are_same([read])]
        if walk.reports or changed:
            _unkeyed.update([*walk.reports, *changed])
            _num_reports += 1
        reported = f"it calls special methods of {_named(walk.reports[0])}" if walk.reports else ""
        return reported or ("it changes its own dependencies" if changed else "")

    return new, why_unsettled


runs_as_it_is(find_captures)
