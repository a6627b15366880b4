"""One walk through all that a callable can read, which `captures` makes a key of."""

from __future__ import annotations

import abc
import array
import collections
import enum
import functools
import hashlib
import importlib
import sys
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module

from flexattn.mods.code import BARE, IMPORT_MODULE, Chain, Facts, facts_of, is_pure, unwrapped_repr

_CONSTANTS = frozenset((int, bool, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
_METACLASSES = frozenset((type, abc.ABCMeta))
_MOST_DEEP = 24
_MOST_INPUTS = 1000  # floats that are inputs of a program: a trace takes a millisecond for each
_MOST_VISITED = 64  # floats of a list or tuple that get a key one by one
ABSENT: Any = object()
MEMO = "_flexattn_captures"  # a function's attribute that is `captures`' own, so that it goes when the function goes


_FIELD: Any = type(vars(collections.namedtuple("_Pair", "a b"))["a"])  # a namedtuple's field: the items are all in its key


class Scope:
    """Names that the code which is reached can ask for, of objects wherever they were handed to.

    It grows while objects are visited; once something grew that an object had been asked by before, there must be another walk.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()  # attributes of an object that may be anywhere
        self.whole: set[int] = set()  # the objects that may be, by address
        self.chains: dict[int, set[Chain]] = {}  # by other objects: what is asked of them
        self.alive: list[Any] = []  # what has these addresses, some of it made by the walk, so that nothing else gets them
        self.formats = False  # values are made text, which may call __repr__
        self.constructs = False  # an object's class may be called
        self.copies = False
        self.begin()

    def begin(self) -> None:
        self.is_used = False  # names and flags
        self.used: set[int] = set()
        self.has_grown = False

    def all_names(self) -> set[str]:
        self.is_used = True
        return self.names

    def add(self, facts: Facts, ignoring: frozenset[str] = frozenset()) -> None:
        names = facts.attributes - ignoring if ignoring else facts.attributes
        if not names <= self.names:
            self.names |= names
            self.has_grown = self.has_grown or self.is_used
        self.flag(formats=facts.formats, constructs="__class__" in names)

    def flag(self, **flags: bool) -> None:
        for name, is_set in flags.items():
            if is_set and not getattr(self, name):
                setattr(self, name, True)
                self.has_grown = self.has_grown or self.is_used

    def expose(self, value: Any, chains: frozenset[Chain]) -> None:
        at = id(value)
        self.alive.append(value)
        if () in chains:
            if at not in self.whole:
                self.whole.add(at)
                self.has_grown = self.has_grown or at in self.used
            return
        known = self.chains.setdefault(at, set())
        if not chains <= known:
            known |= chains
            self.has_grown = self.has_grown or at in self.used

    def names_of(self, value: Any) -> set[str]:
        self.used.add(id(value))
        self.alive.append(value)
        return self.all_names() if id(value) in self.whole else {chain[0] for chain in self.chains.get(id(value), ())}

    def beyond(self, value: Any, name: str) -> frozenset[Chain]:
        """Returns the chains that are asked of an attribute of `value`."""
        if id(value) in self.whole:
            return BARE
        return frozenset(chain[1:] for chain in self.chains.get(id(value), ()) if chain[0] == name)


_FORMATTING = frozenset(("__repr__", "__str__", "__format__", "__bytes__"))
_CONSTRUCTING = frozenset(("__init__", "__new__", "__post_init__"))
_COPYING = frozenset(("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"))
# Attributes that Python calls or reads only where a name in the code says so, or before a call.
# fmt: off
_NOT_IMPLICIT = _FORMATTING | _CONSTRUCTING | _COPYING | frozenset((
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__class_getitem__",
    "__classcell__", "__classdict__", "__classdictcell__", "__constants__", "__dataclass_fields__", "__dataclass_params__",
    "__deepcopy__", "__del__", "__dict__", "__dir__", "__doc__", "__firstlineno__", "__getnewargs__", "__getnewargs_ex__",
    "__init_subclass__", "__instancecheck__", "__jit_ignored_attributes__", "__jit_unused_properties__", "__match_args__",
    "__module__", "__new_member__", "__non_callable_proto_members__", "__orig_bases__", "__parameters__", "__prepare__",
    "__protocol_attrs__", "__qualname__", "__replace__", "__set_name__", "__signature__", "__sizeof__", "__slotnames__",
    "__slots__", "__static_attributes__", "__subclasscheck__", "__subclasshook__", "__text_signature__", "__type_params__",
    "__weakref__",
))
# fmt: on
_OF_A_DATACLASS = frozenset(
    ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__setattr__", "__delattr__")
)
_ROOT_CLASSES = frozenset((object, types.SimpleNamespace, typing.Generic, typing.Protocol, abc.ABC, torch.nn.Module))
_FORWARD = facts_of((lambda module: module.forward).__code__)
_LOOK_UPS = frozenset(("__getattr__", "__getattribute__"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(vars(nn_module)[f"_global{name}"] for name in _HOOKS if f"_global{name}" in vars(nn_module))
# The methods of torch.nn.Module whose names tensors have too, so that they may be meant for those.
_OF_TENSORS_TOO = frozenset(name for name in vars(torch.nn.Module) if hasattr(Tensor, name))


def _namedtuple_names(kind: type) -> tuple[str, ...] | None:
    fields = getattr(kind, "_fields", None)
    return fields if issubclass(kind, tuple) and isinstance(fields, tuple) else None


class Unkeyed(Exception):
    """Says of something that may be read that it has no key, which ends a walk: a callable that reads it has none either."""


class TooManyFloats(Exception):
    """Ends a walk that would make inputs of more than _MOST_INPUTS floats."""


class Walk:
    def __init__(self, lift: bool, scope: Scope, values: Iterator[Any] | None) -> None:
        self.lift = lift
        self.scope = scope
        self.values = values  # the floats' replacements; None: nothing is rebuilt
        self.tensors: list[tuple[str, Tensor]] = []
        self.floats: list[tuple[str, float]] = []
        self.seen: dict[int, tuple[int, bool]] = {}  # by address: how many came before, and whether it was lifted
        self.alive: list[Any] = []  # so that no address is taken anew
        self.replaced: dict[int, tuple[Any, bool]] = {}  # and whether there are floats in it
        self.num_floats = 0
        self.is_tied = False  # an object is reached in ways of which not all can be rebuilt
        self.tensor_at: dict[int, int] = {}
        # Where everything was read, and what was there:
        self.functions: list[tuple[Any, Any, Any, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.entries: list[tuple[Mapping[str, Any], str, Any]] = []
        self.objects: list[tuple[Any, type, Any]] = []  # and their classes and dicts
        self.classes: list[tuple[type, Any]] = []  # and their bases
        self.shapes: list[tuple[Mapping[str, Any], tuple[str, ...]]] = []  # all names in it
        self.empty: list[Any] = []
        self.is_all_read = True  # there was nothing else to read

    def visit_all(self, name: str, function: Any) -> tuple[Hashable, Any]:
        key, new = self.visit(name, function, self.lift, 0)
        added = []
        for attr in sorted(self.scope.names):  # attributes of the score and of tensors: someone may have put methods there
            member = vars(Tensor).get(attr, ABSENT)
            self.entries.append((vars(Tensor), attr, member))
            if type(member) is types.FunctionType and not is_pure(member):
                added.append((attr, self.visit(attr, member, False, 0)[0]))
        return (key, *added), new

    def visit(self, name: str, value: Any, lift: bool, depth: int, chains: frozenset[Chain] = BARE) -> tuple[Hashable, Any]:
        """Returns the key and the value or its replacement; with `lift` its floats are inputs. chains: what is asked of it here."""
        kind = type(value)
        if kind in _CONSTANTS:
            return (kind, value), value
        if kind is float:
            self.num_floats += 1
            if not lift:
                return (kind, value.hex()), value
            if len(self.floats) >= _MOST_INPUTS:
                raise TooManyFloats
            self.floats.append((name, value))
            return (kind,), value if self.values is None else next(self.values)
        if kind is str:
            if "%" in value:
                self.scope.flag(formats=True)
            return (kind, value), value
        if kind is complex:
            return (kind, repr(value)), value
        if isinstance(value, Tensor):
            return self._tensor(name, value, depth), value
        if is_pure(value) or (value is importlib.import_module and name == IMPORT_MODULE):
            return ("pure", value), value
        if _is_of_cudnn(value):  # it describes nodes of a graph, and no trace depends on it
            return ("cudnn", kind, str(value)), value
        if getattr(kind, "is_trace_state", False):
            return (kind,), value
        if depth > _MOST_DEEP:
            raise Unkeyed(f"{name} is more than {_MOST_DEEP} references away")
        self.scope.expose(value, chains)
        if id(value) in self.seen:
            number, was_lifted = self.seen[id(value)]
            new, has_floats = self.replaced.get(id(value), (value, True))  # or it is met inside itself
            self.is_tied = self.is_tied or id(value) not in self.replaced or (has_floats and was_lifted is not lift)
            return ("seen", number), new
        self.seen[id(value)] = len(self.seen), lift
        self.alive.append(value)
        before = self.num_floats
        key, new = self._compound(name, value, lift, depth + 1)
        self.replaced[id(value)] = new, self.num_floats > before
        return key, new

    def _compound(self, name: str, value: Any, lift: bool, depth: int) -> tuple[Hashable, Any]:
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, lift, depth)
        if kind is types.MethodType:
            function, new_function = self.visit(name, value.__func__, lift, depth)
            owner, new_owner = self.visit(name, value.__self__, lift, depth, _first(value.__func__))
            is_same = new_function is value.__func__ and new_owner is value.__self__
            return ("method", function, owner), value if is_same else types.MethodType(new_function, new_owner)
        if kind is types.BuiltinFunctionType and not isinstance(value.__self__, (types.ModuleType, type, type(None))):
            return ("method of", value.__name__, self.visit(name, value.__self__, False, depth)[0]), value
        if kind is types.ModuleType:
            return self._module(value, depth), value
        if isinstance(value, type):
            return self._class_as_value(name, value, depth), value
        if isinstance(value, enum.Enum):
            return self._enum_member(name, value, depth), value
        if kind.__module__ == "numpy" and "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic):
            return (kind, value.tobytes()), value
        if kind in (tuple, list, dict, set, frozenset, slice, range, torch.Size, functools.partial) or kind in _DICTS:
            return self._container(name, value, lift, depth)
        return self._object(name, value, lift, depth)

    def _tensor(self, name: str, value: Tensor, depth: int) -> Hashable:
        if id(value) in self.tensor_at:
            return (Tensor, self.tensor_at[id(value)])
        position = self.tensor_at[id(value)] = len(self.tensors)
        self.tensors.append((name, value))
        attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
        self.is_all_read = self.is_all_read and not attributes
        names = self.scope.all_names() if attributes else set()
        own = [(attr, self.visit(attr, attributes[attr], False, depth)[0]) for attr in sorted(names & attributes.keys())]
        kind = type(value)
        if kind not in _PLAIN_TENSORS:
            for owner in kind.__mro__[: kind.__mro__.index(Tensor)]:
                for attr in sorted(self.scope.all_names() & vars(owner).keys()):
                    raise Unkeyed(f"{name} is a {kind.__name__}, which has {attr} of its own")
        needs_grad = value.requires_grad and torch.is_grad_enabled()
        return (Tensor, position, value.dtype, value.dim(), needs_grad, *own)

    def _container(self, name: str, value: Any, lift: bool, depth: int) -> tuple[Hashable, Any]:
        kind: Any = type(value)
        lift = lift and (kind in (tuple, functools.partial) or (kind in (list, dict) and _WRITERS.isdisjoint(self.scope.names)))
        self.is_all_read = self.is_all_read and kind in (tuple, range, slice, frozenset, torch.Size, functools.partial)
        if kind in (range, slice):
            return (kind, *(self.visit(name, part, False, depth)[0] for part in (value.start, value.stop, value.step))), value
        if kind in (set, frozenset):  # in the order in which a loop meets them
            return (kind, *(self.visit(name, item, False, depth)[0] for item in list(value))), value
        if kind is functools.partial:
            (function, new_function), (given, new_given) = (
                self.visit(name, part, lift, depth) for part in (value.func, value.args)
            )
            named, news = self._items(value.keywords, value.keywords, lift, depth)
            has_own = bool(vars(value).keys() - {MEMO})
            own = self._items(vars(value), self.scope.all_names() - {MEMO}, False, depth)[0] if has_own else ()
            self.is_all_read = self.is_all_read and not has_own
            self.shapes.append((value.keywords, tuple(value.keywords)))
            is_same = new_function is value.func and new_given is value.args and not news
            new = value if is_same else functools.partial(new_function, *new_given, **{**value.keywords, **news})
            return (kind, function, given, tuple(value.keywords), named, own), new
        if kind in (tuple, list, torch.Size):
            held = list(value)
            constants = self._constants(held, lift)
            if constants is not None:
                return (kind, constants), value
            visited = [self.visit(f"{name}_{i}", item, lift, depth) for i, item in enumerate(held)]
            is_same = all(new is item for (_, new), item in zip(visited, held, strict=True))
            return (kind, *(key for key, _ in visited)), value if is_same else kind(new for _, new in visited)
        own = self.visit(name, value.default_factory, False, depth)[0] if kind is collections.defaultdict else None
        if getattr(value, "__dict__", None):
            raise Unkeyed(f"{name} is a {kind.__name__} with attributes")
        parts = self._constants(list(value), False), self._constants(list(value.values()), lift)
        if None not in parts:
            return (kind, own, *parts), value
        held = list(value.items())
        keys = [self.visit(f"{name}_key", key, False, depth)[0] for key, _ in held]
        visited = [self.visit(f"{name}_{key}", item, lift, depth) for key, item in held]
        is_same = all(new is item for (_, new), (_, item) in zip(visited, held, strict=True))
        news = value if is_same else {key: new for (key, _), (_, new) in zip(held, visited, strict=True)}
        return (kind, own, *zip(keys, (key for key, _ in visited), strict=True)), news

    def _constants(self, items: list[Any], lift: bool) -> Hashable | None:
        """Returns the key of many ints, bools or floats at once, as a visit of each takes microseconds; None for other items."""
        kinds = set(map(type, items)) if len(items) > _MOST_VISITED else set()
        if kinds == {float}:
            if not lift:
                self.num_floats += len(items)
                return (float, hashlib.sha256(array.array("d", items)).digest())
            if len(items) > _MOST_INPUTS:
                raise TooManyFloats
        elif kinds == {int} or kinds == {bool}:
            return (*kinds, tuple(items))
        return None

    def _items(
        self, attributes: Mapping[str, Any], names: Iterable[str], lift: bool, depth: int, of: Any = ABSENT
    ) -> tuple[Hashable, dict[str, Any]]:
        """Returns the key of the entries, and those of them that are replaced. of: the object whose attributes they are."""
        keys, news = [], {}
        for name in sorted(names):
            value = attributes.get(name, ABSENT)
            self.entries.append((attributes, name, value))
            if value is not ABSENT:
                key, new = self.visit(name, value, lift, depth, BARE if of is ABSENT else self.scope.beyond(of, name))
                keys.append((name, key))
                if new is not value:
                    news[name] = new
        return tuple(keys), news

    def _met(self, facts: Facts, ignoring: frozenset[str] = frozenset()) -> None:
        """Notes what code asks for."""
        self.scope.add(facts, ignoring)
        self.is_all_read = self.is_all_read and not facts.catches
        self.is_tied = self.is_tied or facts.writes  # on a copy it would have no effect

    def _function(self, function: types.FunctionType, lift: bool, depth: int) -> tuple[Hashable, Any]:
        code, facts = function.__code__, facts_of(function.__code__)
        self._met(facts)
        if facts.hidden:
            raise Unkeyed(f"{function.__qualname__} uses {facts.hidden}, which reads what no name in the code says")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        keys: list[Hashable] = [types.FunctionType, code]
        changed = False
        new_cells = []
        for name, cell in cells.items():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                keys.append((name, "unbound"))
                self.is_all_read = False
                new_cells.append(cell)
                continue
            self.cells.append((cell, value))
            key, new = self.visit(name, value, lift, depth, facts.chains.get(name, BARE))
            keys.append((name, key))
            new_cells.append(cell if new is value else types.CellType(new))
            changed = changed or new is not value
        any_function: Any = function  # whose __builtins__ only some of the stubs know
        known, builtins = any_function.__globals__, any_function.__builtins__
        new_globals = {}
        for name in facts.roots:
            value = known.get(name, ABSENT)
            self.entries.append((known, name, value))
            if value is ABSENT:
                value = builtins.get(name, ABSENT)
                self.entries.append((builtins, name, value))
                if value is not ABSENT:
                    keys.append((name, self.visit(name, value, False, depth, facts.chains[name])[0]))
                continue
            key, new = self.visit(name, value, lift, depth, facts.chains[name])
            keys.append((name, key))
            if new is not value:
                new_globals[name] = new
        for name in facts.imports:
            if name.partition(".")[0] == _CUDNN:
                continue
            for imported in (name.partition(".")[0], name):
                if type(sys.modules.get(imported)) is not types.ModuleType:
                    raise Unkeyed(f"{function.__qualname__} imports {name}")
                keys.append((name, self.visit(imported, sys.modules.get(imported), False, depth)[0]))
        defaults, new_defaults = self.visit("default", function.__defaults__ or (), lift, depth)
        keywords, new_keywords = self._items(function.__kwdefaults__ or {}, frozenset(function.__kwdefaults__ or ()), lift, depth)
        attributes = function.__dict__
        has_own = bool(attributes) and (len(attributes) > 1 or MEMO not in attributes)
        own = self._items(attributes, self.scope.all_names() - {MEMO}, False, depth)[0] if has_own else ()
        self.is_all_read = self.is_all_read and not function.__kwdefaults__ and not has_own
        keys += (defaults, keywords, own)
        if not (changed or new_globals or new_keywords or new_defaults is not (function.__defaults__ or ())):
            return tuple(keys), function
        rebuilt = types.FunctionType(code, {**known, **new_globals}, function.__name__, new_defaults or None, tuple(new_cells))
        rebuilt.__kwdefaults__ = {**function.__kwdefaults__, **new_keywords} if function.__kwdefaults__ else None
        rebuilt.__dict__.update({name: value for name, value in function.__dict__.items() if name != MEMO})
        return tuple(keys), rebuilt

    def _module(self, module: types.ModuleType, depth: int) -> Hashable:
        attributes, names = vars(module), self.scope.names_of(module)
        missing = sorted(names - attributes.keys()) if "__getattr__" in attributes else []
        if missing:
            raise Unkeyed(f"the module {module.__name__} may make {missing[0]} when it is asked for")
        # Floats are part of the key, as nothing can take the module's place.
        return ("module", module.__name__, self._items(attributes, names, False, depth, of=module)[0])

    def _object(self, name: str, value: Any, lift: bool, depth: int) -> tuple[Hashable, Any]:
        kind = type(value)
        if type(kind) not in _METACLASSES:
            raise Unkeyed(f"{name} is a {_named(kind)}, whose class is a {_named(type(kind))}")
        reads = vars(kind).get("_flexattn_reads")
        if reads is not None:  # a class of this library, which says what decides what it does
            self.scope.flag(copies=True)
            was_tied = self.is_tied  # what it writes, it writes to a copy
            state = getattr(value, "_flexattn_state", None)  # where some attributes stand for what they hold at this moment
            self.is_all_read = self.is_all_read and state is None
            key, news = self._items(vars(value) if state is None else state(), frozenset(reads), lift, depth)
            self.is_tied = was_tied
            return ("object", kind, key), _clone(value, news)
        fields = _namedtuple_names(kind)
        if any(not _LOOK_UPS.isdisjoint(vars(owner)) for owner in kind.__mro__ if owner not in _ROOT_CLASSES):
            self.scope.expose(value, BARE)
        if isinstance(value, torch.nn.Module):
            self._check_module(name, value)
        keys: list[Any] = ["object", kind, self._class(name, value, kind, (tuple,) if fields is not None else (), depth)]
        names = self.scope.names_of(value)
        slots = [
            (attr, member)
            for owner in kind.__mro__
            for attr, member in vars(owner).items()
            if type(member) is types.MemberDescriptorType and attr in names and owner not in _ROOT_CLASSES
        ]
        lift = lift and not any(vars(owner).get("__slots__") for owner in kind.__mro__)
        for attr, member in slots:
            self.is_all_read = False
            try:
                keys.append((attr, self.visit(attr, member.__get__(value, kind), False, depth, self.scope.beyond(value, attr))[0]))
            except AttributeError:
                keys.append((attr, "unbound"))
        if fields is not None:
            lift = False
            keys += [self.visit(f"{name}_{i}", item, False, depth)[0] for i, item in enumerate(tuple.__iter__(value))]
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            return tuple(keys), value
        self.objects.append((value, kind, attributes))
        key, news = self._items(attributes, names, lift, depth, of=value)
        keys.append(key)
        if isinstance(value, torch.nn.Module):
            for owner in (value._parameters, value._buffers, value._modules):
                key, more = self._items(owner, names, lift, depth, of=value)
                keys.append(key)
                news |= more
        return tuple(keys), _clone(value, news)

    def _check_module(self, name: str, module: torch.nn.Module) -> None:
        """Checks a torch.nn.Module: all is covered but hooks, and methods of torch's that go through all its parts."""
        attributes = vars(module)
        if id(module) in self.scope.whole:  # and may be called
            self.scope.add(_FORWARD)
        hooks = [*_GLOBAL_HOOKS, *(attributes.get(hook) or {} for hook in _HOOKS)]
        self.empty += hooks
        self.entries.append((attributes, "_compiled_call_impl", attributes.get("_compiled_call_impl", ABSENT)))
        if any(hooks) or attributes.get("_compiled_call_impl") is not None:
            raise Unkeyed(f"{name} is a module with hooks, or compiled")
        for attr in sorted(
            self.scope.names_of(module) & vars(torch.nn.Module).keys() - _OF_TENSORS_TOO - {"forward", "__call__", "training"}
        ):
            if not attr.startswith("__"):
                raise Unkeyed(f"{attr} of a torch.nn.Module may read all of it")

    def _class(self, name: str, value: Any, kind: type, beside: tuple[type, ...], depth: int) -> Hashable:
        """Returns the key of what a class or its objects can be asked, by name or operator. beside: bases in C that it may have."""
        scope, names, is_whole = self.scope, self.scope.names_of(value), id(value) in self.scope.whole
        implicit = frozenset(
            (_FORMATTING if scope.formats else frozenset())
            | (_CONSTRUCTING if scope.constructs or value is kind else frozenset())
            | (_COPYING if scope.copies else frozenset())
        )
        keys: list[Hashable] = []
        owners = [owner for owner in kind.__mro__ if owner not in _ROOT_CLASSES and owner not in beside]
        self.classes.append((kind, kind.__mro__))
        self.shapes += [(vars(owner), tuple(vars(owner))) for owner in owners]
        for at, owner in enumerate(owners):
            if not _is_python(owner) and not issubclass(kind, enum.Enum):  # which takes over int's functions
                raise Unkeyed(f"{name} is a {_named(kind)}, whose contents are not followed")
            for attr, member in list(vars(owner).items()):
                is_special = attr.startswith("__") and attr.endswith("__")
                is_called = is_whole and (attr in implicit or (is_special and attr not in _NOT_IMPLICIT))
                if not (is_called or attr in names) or attr in getattr(kind, "__members__", ()):
                    continue
                self.entries.append((vars(owner), attr, member))
                keys.append((at, attr, self._member(value, owner, attr, member, depth)))
        return tuple(keys)

    def _member(self, value: Any, owner: type, attr: str, member: Any, depth: int) -> Hashable:
        if type(member) is property:
            accessors = (member.fget, member.fset, member.fdel)
            for function in accessors:
                self.scope.expose(value, _first(function))
            return ("property", *(self.visit(attr, function, False, depth)[0] for function in accessors))
        if type(member) in (staticmethod, classmethod):
            if type(member) is classmethod:
                kind = value if isinstance(value, type) else type(value)
                self.scope.expose(value, _first(member.__func__))
                if kind is not value:
                    self.visit(attr, kind, False, depth, _first(member.__func__))
            return (type(member), self.visit(attr, member.__func__, False, depth)[0])
        if type(member) in (types.MemberDescriptorType, _FIELD) or attr in ("__dict__", "__weakref__"):
            return "slot"
        if isinstance(member, types.FunctionType):
            plain = unwrapped_repr(member)
            if attr in _OF_A_DATACLASS and "__dataclass_params__" in vars(owner) and plain.__code__.co_filename == "<string>":
                # As dataclasses wrote it: it reads the fields, and the class, which is in the key.
                self._met(facts_of(plain.__code__), ignoring=frozenset(("__class__", "__qualname__")))
                return ("dataclass", plain.__code__)
            self.scope.expose(value, _first(member))
            return self.visit(attr, member, False, depth)[0]
        if not isinstance(member, type) and hasattr(type(member), "__get__"):
            raise Unkeyed(f"{attr} of {_named(owner)} is a {_named(type(member))}")
        return self.visit(attr, member, False, depth, self.scope.beyond(value, attr))[0]

    def _class_as_value(self, name: str, kind: type, depth: int) -> Hashable:
        if issubclass(kind, enum.Enum):
            return self._enumeration(name, kind, depth)
        if type(kind) is not type:  # an abstract one's isinstance() asks a registry
            raise Unkeyed(f"{name} is a class whose class is {_named(type(kind))}")
        beside = tuple(owner for owner in kind.__mro__ if is_pure(owner))
        return ("class", kind, self._class(name, kind, kind, beside, depth))

    def _enumeration(self, name: str, kind: type[enum.Enum], depth: int) -> Hashable:
        self.is_all_read = False
        return ("enum", kind, tuple((attr, self._enum_member(attr, member, depth)) for attr, member in kind.__members__.items()))

    def _enum_member(self, name: str, member: enum.Enum, depth: int) -> Hashable:
        kind = type(member)
        bases = tuple(owner for owner in kind.__mro__ if owner.__module__ in ("enum", "builtins"))
        if not {owner for owner in bases if owner.__module__ == "builtins"} <= {int, str, object}:
            raise Unkeyed(f"{name} is a {_named(kind)}, whose contents are not followed")
        plain = int.__int__(member) if isinstance(member, int) else str.__str__(member) if isinstance(member, str) else None
        self.objects.append((member, kind, member.__dict__))
        self.scope.expose(member, BARE)
        key, _ = self._items(vars(member), {"_value_", "_name_"} | self.scope.all_names(), False, depth)
        others = self.scope.all_names() & kind.__members__.keys()
        if others and id(kind) not in self.seen:  # member.other
            self.visit(name, kind, False, depth)
        return ("member", kind, plain, key, self._class(name, member, kind, bases, depth))


_WRITERS = frozenset(("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"))
_DICTS = (collections.OrderedDict, collections.defaultdict)


_CUDNN = "cudnn"  # cuDNN frontend


def _is_of_cudnn(value: Any) -> bool:
    """Returns whether a value is cuDNN frontend's module, or one of its enumerations or their members."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == _CUDNN
    kind = value if isinstance(value, type) else type(value)
    return str(kind.__module__).partition(".")[0] == _CUDNN and hasattr(kind, "__members__")


def _first(function: Any) -> frozenset[Chain]:
    """Returns the chains that a method asks of its object."""
    if function is None:
        return frozenset()
    return facts_of(function.__code__).first if type(function) is types.FunctionType else BARE


def _clone(value: Any, attributes: Mapping[str, Any]) -> Any:
    """Returns an object like `value` but for these attributes; itself where there are none."""
    if not attributes:
        return value
    clone = object.__new__(type(value))
    clone.__dict__.update({**vars(value), **attributes})
    return clone


def _is_python(kind: type) -> bool:
    """Returns whether a class was written in Python, so that its objects hold no more than their attributes."""
    is_heap = bool(kind.__flags__ & 1 << 9)
    return is_heap and not any(type(member) in _OF_C for member in vars(kind).values())


_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
