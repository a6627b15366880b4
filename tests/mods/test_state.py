"""Python state that a mod reads: each call has the result of the current state, however many calls came before."""

from __future__ import annotations

import abc
import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import sys
import threading
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.integrations.te import TEScoreMod
from flexattn.mods.captures import _Walk, find_captures
from flexattn.mods.trace import cache_info, clear_cache

Q = torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(0))
Mask = Callable[..., Any]
Case = tuple[Mask, Callable[[int], Any]]  # a mask_mod whose window is 2, and a function that changes the window

pytestmark = pytest.mark.filterwarnings("ignore:.*is traced again in each call")


def plain(mask_mod: Mask) -> Tensor:
    """softmax over the keys that the mod, called directly, makes visible."""
    at = torch.arange(9)
    visible = torch.as_tensor(mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :]))
    scores = torch.einsum("bqhd,bkhd->bhqk", Q, Q) / math.sqrt(8)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), Q)


def within(window: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() <= window


def reads(read: Callable[[], Any]) -> Mask:
    return lambda b, h, i, j: within(read(), i, j)


# Each of these makes a new state, so that no test depends on another.


class Mode(enum.Enum):
    NARROW, WIDE = 2, 5


class IntMode(enum.IntEnum):
    NARROW, WIDE = 2, 5


class TextMode(str, enum.Enum):
    NARROW, WIDE = "2", "5"


class Plain:
    window: Any = 2


def of_an_object(kind: type, name: str = "window", body: Callable[[Any], Any] = lambda x: x.window) -> Case:
    x = kind()
    return reads(lambda: body(x)), lambda n: setattr(x, name, n)


def global_int() -> Case:
    scope: dict[str, Any] = {"WINDOW": 2}
    exec("def mod(b, h, i, j): return (i - j).abs() <= WINDOW", scope)
    return scope["mod"], lambda n: scope.update(WINDOW=n)


def nonlocal_int() -> Case:
    window = 2

    def change(n: int) -> None:
        nonlocal window
        window = n

    return lambda b, h, i, j: (i - j).abs() <= window, change


def default() -> Case:
    def mod(b: Any, h: Any, i: Any, j: Any, window: int = 2) -> Any:
        return (i - j).abs() <= window

    return mod, lambda n: setattr(mod, "__defaults__", (n,))


def keyword_default() -> Case:
    def mod(b: Any, h: Any, i: Any, j: Any, *, window: int = 2) -> Any:
        return (i - j).abs() <= window

    return mod, lambda n: mod.__kwdefaults__.update(window=n)  # type: ignore[union-attr]


def function_attribute() -> Case:
    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() <= mod.window  # type: ignore[attr-defined]

    mod.window = 2  # type: ignore[attr-defined]
    return mod, lambda n: setattr(mod, "window", n)


def class_attribute() -> Case:
    class Config:
        window = 2

    return reads(lambda: Config.window), lambda n: setattr(Config, "window", n)


def inherited_class_attribute() -> Case:
    class Base:
        window = 2

    class Config(Base):
        pass

    return reads(lambda: Config.window), lambda n: setattr(Base, "window", n)


def class_attribute_through_an_object() -> Case:
    class Config:
        window = 2

    x = Config()
    return reads(lambda: x.window), lambda n: setattr(Config, "window", n)


def nested_class() -> Case:
    class Outer:
        class Inner:
            window = 2

    return reads(lambda: Outer.Inner.window), lambda n: setattr(Outer.Inner, "window", n)


def class_method() -> Case:
    class Config:
        window = 2

        @classmethod
        def get(cls) -> int:
            return cls.window

    x = Config()
    return reads(lambda: x.get()), lambda n: setattr(Config, "window", n)


def static_method() -> Case:
    class Config:
        @staticmethod
        def get() -> int:
            return 2

    return reads(lambda: Config.get()), lambda n: setattr(Config, "get", staticmethod(lambda: n))


def inherited_method_by_super() -> Case:
    class Base:
        def get(self) -> int:
            return 2

    class Config(Base):
        def get(self) -> int:
            return super().get()

    x = Config()
    return reads(lambda: x.get()), lambda n: setattr(Base, "get", lambda self: n)


def method_global() -> Case:
    """A float in a global of a method: a class is not copied, so no copy could have another value."""
    scope: dict[str, Any] = {"WINDOW": 2.0}
    exec("class Config:\n def get(self): return WINDOW", scope)
    x = scope["Config"]()
    return reads(lambda: x.get()), lambda n: scope.update(WINDOW=float(n))


def added_base() -> Case:
    class Other:
        pass

    class Base:
        window = 2

    class Config(Base):
        pass

    Wide = type("Wide", (), {"window": 5})
    x = Config()
    return reads(lambda: x.window), lambda n: setattr(Config, "__bases__", (Wide,) if n == 5 else (Base,))


def changed_class() -> Case:
    class Narrow:
        window = 2

    class Wide:
        window = 5

    x = Narrow()
    return reads(lambda: x.window), lambda n: setattr(x, "__class__", Wide if n == 5 else Narrow)


def property_of_an_attribute() -> Case:
    class Config:
        def __init__(self) -> None:
            self._window = 2

        @property
        def window(self) -> int:
            return self._window

    x = Config()
    return reads(lambda: x.window), lambda n: setattr(x, "_window", n)


def cached_property() -> Case:
    class Config:
        size = 2

        @functools.cached_property
        def window(self) -> int:
            return self.size

    x = Config()

    def change(n: int) -> None:
        x.size = n
        vars(x).pop("window", None)

    return reads(lambda: x.window), change


def slots() -> Case:
    class Config:
        __slots__ = ("window",)

        def __init__(self) -> None:
            self.window = 2

    return of_an_object(Config)


def descriptor() -> Case:
    class Field:
        value = 2

        def __get__(self, owner: Any, kind: Any) -> int:
            return self.value

    field = Field()
    Config = type("Config", (), {"window": field})
    x = Config()
    return reads(lambda: x.window), lambda n: setattr(field, "value", n)


def by_operator(name: str, use: Callable[[Any], Any], give: Callable[[Any], Any] = lambda x: x) -> Callable[[], Case]:
    """A class that defines an operator, which reads an attribute."""

    def case() -> Case:
        class Config:
            window: Any = 2

            def get(self, *_: Any) -> Any:
                return give(self.window)

        setattr(Config, name, Config.get)
        x = Config()
        return reads(lambda: use(x)), lambda n: setattr(x, "window", n)

    return case


def getattr_of_a_class() -> Case:
    class Config:
        def __init__(self) -> None:
            self.values = {"window": 2}

        def __getattr__(self, name: str) -> Any:
            return self.values[name]

    x = Config()
    return reads(lambda: x.window), lambda n: x.values.update(window=n)


def getattribute_of_a_class() -> Case:
    class Config:
        def __init__(self) -> None:
            self.wide = 2

        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, "wide" if name == "window" else name)

    x = Config()
    return reads(lambda: x.window), lambda n: setattr(x, "wide", n)


def module_getattr() -> Case:
    module = types.ModuleType("settings")
    values = {"window": 2}
    module.__getattr__ = lambda name: values[name]  # type: ignore[method-assign]
    return reads(lambda: module.window), lambda n: values.update(window=n)


def metaclass() -> Case:
    class Meta(type):
        size = 2

        @property
        def window(cls) -> int:
            return cls.size

    class Config(metaclass=Meta):
        pass

    return reads(lambda: Config.window), lambda n: setattr(Meta, "size", n)


def lru_cache() -> Case:
    state = [2]

    @functools.lru_cache
    def get() -> int:
        return state[0]

    def change(n: int) -> None:
        state[0] = n
        get.cache_clear()

    return reads(get), change


def wraps() -> Case:
    state = types.SimpleNamespace(window=2)

    @functools.wraps(torch.exp)  # a library's name and module
    def get() -> int:
        return int(state.window)

    return reads(get), lambda n: setattr(state, "window", n)


def imported() -> Case:
    module = types.ModuleType("settings_of_a_test")
    module.window = 2  # type: ignore[attr-defined]
    sys.modules["settings_of_a_test"] = module

    def read() -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return settings_of_a_test.window

    return reads(read), lambda n: setattr(module, "window", n)


def environment() -> Case:
    os.environ["FLEXATTN_TEST_WINDOW"] = "2"

    def change(n: int) -> None:
        os.environ["FLEXATTN_TEST_WINDOW"] = str(n)

    return reads(lambda: int(os.environ["FLEXATTN_TEST_WINDOW"])), change


def environment_by_getenv() -> Case:
    _, change = environment()
    return reads(lambda: int(os.getenv("FLEXATTN_TEST_WINDOW", "0"))), change


def thread_local() -> Case:
    state = threading.local()
    state.window = 2
    return reads(lambda: state.window), lambda n: setattr(state, "window", n)


def context_variable() -> Case:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("window", default=2)
    return reads(lambda: variable.get()), lambda n: variable.set(n)


def container(make: Callable[[], Any], read: Callable[[Any], Any], write: Callable[[Any, int], Any]) -> Callable[[], Case]:
    def case() -> Case:
        x = make()
        return reads(lambda: read(x)), lambda n: write(x, n)

    return case


class ListOfTwice(list):  # type: ignore[type-arg]
    factor = 1

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at) * self.factor


class DictOf(dict):  # type: ignore[type-arg]
    pass


class TupleOf(tuple):  # type: ignore[type-arg]
    window = 2


class Named(typing.NamedTuple):
    window: int

    def get(self) -> int:
        return self.window + shift


shift = 0


def namedtuple_method() -> Case:
    x = Named(2)
    return reads(lambda: x.get()), lambda n: globals().update(shift=n - 2)


@dataclasses.dataclass
class Settings:
    window: int = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    window: int = 2


def handed_to_a_helper() -> Case:
    a = Plain()  # before the helpers, because variables of a function are sorted by their names

    def helper(settings: Any) -> Any:
        return settings.window

    def middle(settings: Any) -> Any:
        return helper(settings)

    return reads(lambda: middle(a)), lambda n: setattr(a, "window", n)


def module_handed_to_a_helper() -> Case:
    module = types.ModuleType("settings")
    module.window = 2  # type: ignore[attr-defined]

    def helper(settings: Any) -> Any:
        return settings.window

    return reads(lambda: helper(module)), lambda n: setattr(module, "window", n)


def through_names_in_text(use: Callable[[Any], Any]) -> Callable[[], Case]:
    return lambda: of_an_object(type("Config", (), {"window": 2}), body=use)


def replaced_dict() -> Case:
    x = Plain()
    x.window = 2
    return reads(lambda: x.window), lambda n: setattr(x, "__dict__", {"window": n})


def user_of_two_objects() -> Case:
    a, b = Plain(), Plain()
    pair = {"now": a}
    a.window, b.window = 2, 5

    def change(n: int) -> None:
        pair["now"] = a if n == 2 else b

    return reads(lambda: pair["now"].window), change


def module_buffer() -> Case:
    layer = torch.nn.Module()
    layer.window = 2
    return reads(lambda: layer.window), lambda n: setattr(layer, "window", n)


def submodule_forward() -> Case:
    class Reader(torch.nn.Module):
        window = 2

        def forward(self) -> int:
            return self.window

    layer = torch.nn.Module()
    layer.reader = Reader()
    return reads(lambda: layer.reader()), lambda n: setattr(layer.reader, "window", n)


def tensor_attribute() -> Case:
    t = torch.zeros(3)
    t.window = 2  # type: ignore[attr-defined]
    return reads(lambda: t.window), lambda n: setattr(t, "window", n)  # type: ignore[attr-defined]


def tensor_method() -> Case:
    t = torch.zeros(3)
    torch.Tensor.window_of_a_test = lambda self: 2

    def change(n: int) -> None:
        torch.Tensor.window_of_a_test = lambda self: n

    return reads(lambda: t.window_of_a_test()), change  # type: ignore[attr-defined]


def patched_library() -> Case:
    library = types.SimpleNamespace(sqrt=math.sqrt)

    def change(n: int) -> None:
        library.sqrt = lambda x: n

    return reads(lambda: library.sqrt(4)), change


def counter() -> Case:
    """Changes the state that it reads."""
    state = types.SimpleNamespace(window=2, calls=0)

    def read() -> Any:
        state.calls += 1
        return state.window

    return reads(read), lambda n: setattr(state, "window", n)


def iterator() -> Case:
    state = {"window": 2}

    def values() -> Iterator[int]:
        while True:
            yield state["window"]

    source = values()
    return reads(lambda: next(source)), lambda n: state.update(window=n)


def matched() -> Case:
    scope: dict[str, Any] = {"Plain": Plain, "x": Plain()}
    exec("def read():\n match x:\n  case Plain(window=w): return w", scope)
    scope["x"].window = 2
    return reads(scope["read"]), lambda n: setattr(scope["x"], "window", n)


def abstract() -> Case:
    class Config(abc.ABC):  # noqa: B024
        window = 2

    class Concrete(Config):
        pass

    return of_an_object(Concrete)


def caught() -> Case:
    x = types.SimpleNamespace()

    def read() -> Any:
        try:
            return x.window
        except AttributeError:
            return 2

    return reads(read), lambda n: setattr(x, "window", n)


def counter_of_floats() -> Case:
    """Changes the state that it reads, on a copy if its floats are inputs."""

    class Config:  # it has no key from then on
        window, calls = 2, 0.0

    state = Config()
    state.calls = 0.0

    def read() -> Any:
        state.calls += 1.0
        return state.window + state.calls * 0.0

    return reads(read), lambda n: setattr(state, "window", n)


def made_in_the_mod(body: Callable[[Any], Any], method: str) -> Callable[[], Case]:
    """A class that is called, or indexed, while the mod runs."""

    def case() -> Case:
        scope: dict[str, Any] = {"WINDOW": 2}
        exec(f"class Config:\n    def {method} WINDOW", scope)
        kind = scope["Config"]
        return reads(lambda: body(kind)), lambda n: scope.update(WINDOW=n)

    return case


def reached_in_two_ways() -> Case:
    """A float of an object that is reached in two ways: one is copied, the other is not."""
    a, module = Plain(), types.ModuleType("settings")  # variables of a function are sorted by their names
    a.window, module.held = 2.0, a  # type: ignore[attr-defined]
    return reads(lambda: a.window * 0.5 + module.held.window * 0.5), lambda n: setattr(a, "window", float(n))


def reached_from_itself() -> Case:
    x = Plain()
    x.window, x.held = 2.0, x  # type: ignore[attr-defined]
    return reads(lambda: x.window * 0.5 + x.held.window * 0.5), lambda n: setattr(x, "window", float(n))


def special_method_added_later() -> Case:
    class Config:
        pass

    x = Config()
    Config.other = 5  # type: ignore[attr-defined]

    def change(n: int) -> None:
        if n == 5:
            Config.__eq__ = lambda self, other: True  # type: ignore[assignment,method-assign]
        elif "__eq__" in vars(Config):
            del Config.__eq__

    return reads(lambda: 5 if x == 0 else 2), change


def keyword_of_a_partial() -> Case:
    get = functools.partial(lambda window: window, window=2)
    return reads(lambda: get()), lambda n: get.keywords.update(window=n)


def default_of_a_helper() -> Case:
    def get(window: int = 2) -> int:
        return window

    return reads(lambda: get()), lambda n: setattr(get, "__defaults__", (n,))


def caught_attribute_of_a_function() -> Case:
    def get() -> Any:
        try:
            return get.window  # type: ignore[attr-defined]
        except AttributeError:
            return 2

    return reads(get), lambda n: setattr(get, "window", n)


def replaced_store_of_a_torch_module() -> Case:
    layer = torch.nn.Module()
    layer._buffers = {"window": 2}  # type: ignore[dict-item]
    return reads(lambda: layer.window), lambda n: setattr(layer, "_buffers", {"window": n})


def caught_special_method() -> Case:
    class Config:
        size = 2

        def __len__(self) -> int:
            return self.size

    x = Config()

    def read() -> Any:
        try:
            return len(x)
        except BaseException:
            return 0

    return reads(read), lambda n: setattr(x, "size", n)


def special_property() -> Case:
    x = type("Config", (), {"__dict__": property(lambda self: {"window": 1})})()
    x.window = 2
    return reads(lambda: x.window), lambda n: setattr(x, "window", n)


def numpy_scalar(kind: Any) -> Callable[[], Case]:
    return container(lambda: {"window": kind(2)}, lambda x: x["window"], lambda x, n: x.update(window=kind(n)))


CASES: dict[str, Callable[[], Case]] = {
    "global": global_int,
    "nonlocal": nonlocal_int,
    "default": default,
    "keyword default": keyword_default,
    "a function's attribute": function_attribute,
    "a list": container(lambda: [2], lambda x: x[0], lambda x, n: operator.setitem(x, 0, n)),
    "a tuple in a list": container(lambda: [(2,)], lambda x: x[0][0], lambda x, n: operator.setitem(x, 0, (n,))),
    "a dict": container(lambda: {"w": 2}, lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a dict of floats": container(lambda: {"w": 2.0}, lambda x: x["w"], lambda x, n: x.update(w=float(n))),
    "a set": container(lambda: {2}, lambda x: max(x), lambda x, n: (x.clear(), x.add(n))),
    "an OrderedDict": container(lambda: collections.OrderedDict(w=2), lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a defaultdict": container(lambda: collections.defaultdict(int, w=2), lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a UserDict": container(lambda: collections.UserDict(w=2), lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a ChainMap": container(lambda: collections.ChainMap({"w": 2}), lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a deque": container(lambda: collections.deque([2]), lambda x: x[0], lambda x, n: (x.clear(), x.append(n))),
    "a list's subclass": container(lambda: ListOfTwice([2]), lambda x: x[0], lambda x, n: operator.setitem(x, 0, n)),
    "a dict's subclass": container(lambda: DictOf(w=2), lambda x: x["w"], lambda x, n: x.update(w=n)),
    "a tuple's subclass": container(lambda: TupleOf(), lambda x: x.window, lambda x, n: setattr(x, "window", n)),
    "a mapping proxy": container(lambda: [{"w": 2}], lambda x: types.MappingProxyType(x[0])["w"], lambda x, n: x[0].update(w=n)),
    "a list's bound method": container(
        lambda: (lambda values: (values, values.__getitem__))([2]), lambda x: x[1](0), lambda x, n: operator.setitem(x[0], 0, n)
    ),
    "a method of a namedtuple": namedtuple_method,
    "a dataclass": lambda: of_an_object(Settings),
    "a frozen dataclass": container(lambda: [Frozen()], lambda x: x[0].window, lambda x, n: operator.setitem(x, 0, Frozen(n))),
    "a SimpleNamespace": lambda: of_an_object(lambda: types.SimpleNamespace(window=2)),  # type: ignore[arg-type]
    "an argparse.Namespace": lambda: of_an_object(lambda: argparse.Namespace(window=2)),  # type: ignore[arg-type]
    "an Enum": container(lambda: [Mode.NARROW], lambda x: x[0].value, lambda x, n: operator.setitem(x, 0, Mode(n))),
    "an Enum by comparison": container(
        lambda: [Mode.NARROW], lambda x: 2 if x[0] is Mode.NARROW else 5, lambda x, n: operator.setitem(x, 0, Mode(n))
    ),
    "an IntEnum": container(lambda: [IntMode.NARROW], lambda x: x[0], lambda x, n: operator.setitem(x, 0, IntMode(n))),
    "a str Enum": container(lambda: [TextMode.NARROW], lambda x: int(x[0]), lambda x, n: operator.setitem(x, 0, TextMode(str(n)))),
    "a class's attribute": class_attribute,
    "a base's attribute": inherited_class_attribute,
    "a class's attribute through an object": class_attribute_through_an_object,
    "a nested class": nested_class,
    "a class method": class_method,
    "a static method": static_method,
    "super()": inherited_method_by_super,
    "a float in a method's globals": method_global,
    "another base": added_base,
    "another class": changed_class,
    "an abstract base": abstract,
    "a metaclass": metaclass,
    "a property": property_of_an_attribute,
    "a cached_property": cached_property,
    "slots": slots,
    "a descriptor": descriptor,
    "__getattr__": getattr_of_a_class,
    "__getattribute__": getattribute_of_a_class,
    "a module's __getattr__": module_getattr,
    "__getitem__": by_operator("__getitem__", lambda x: x[0]),
    "__radd__": by_operator("__radd__", lambda x: 0 + x),
    "__add__": by_operator("__add__", lambda x: x + 0),
    "__neg__": by_operator("__neg__", lambda x: -x),
    "__len__": by_operator("__len__", lambda x: len(x)),
    "__bool__": by_operator("__bool__", lambda x: 5 if x else 2, lambda n: n == 5),
    "__iter__": by_operator("__iter__", lambda x: sum(x), lambda n: iter((n,))),
    "__contains__": by_operator("__contains__", lambda x: 5 if 7 in x else 2, lambda n: n == 5),
    "__index__": by_operator("__index__", lambda x: operator.index(x)),
    "__call__": by_operator("__call__", lambda x: x()),
    "__int__": by_operator("__int__", lambda x: int(x)),
    "__abs__": by_operator("__abs__", lambda x: abs(x)),
    "__rsub__": by_operator("__rsub__", lambda x: 0 - x + 0),
    "__mul__": by_operator("__mul__", lambda x: x * 1),
    "__str__ in an f-string": lambda: of_an_object(
        type("Config", (), {"window": 2, "__str__": lambda self: str(self.window)}), body=lambda x: int(f"{x}")
    ),
    "getattr": through_names_in_text(lambda x: getattr(x, "window")),  # noqa: B009
    "vars": container(Plain, lambda x: vars(x).get("window", 2), lambda x, n: setattr(x, "window", n)),
    "__dict__": container(Plain, lambda x: x.__dict__.get("window", 2), lambda x, n: setattr(x, "window", n)),
    "attrgetter": through_names_in_text(lambda x: operator.attrgetter("window")(x)),
    "str.format": through_names_in_text(lambda x: int("{0.window}".format(x))),  # noqa: UP030, UP032
    "globals()": lambda: (reads(lambda: globals()["shift"] + 2), lambda n: globals().update(shift=n - 2)),
    "eval": lambda: (reads(lambda: eval("shift + 2")), lambda n: globals().update(shift=n - 2)),
    "a match": matched,
    "a replaced __dict__": replaced_dict,
    "an attribute that is not there at first": caught,
    "an object in a helper": handed_to_a_helper,
    "a module in a helper": module_handed_to_a_helper,
    "one of two objects": user_of_two_objects,
    "a torch module's attribute": module_buffer,
    "a submodule that is called": submodule_forward,
    "a tensor's attribute": tensor_attribute,
    "a tensor's method": tensor_method,
    "lru_cache": lru_cache,
    "wraps": wraps,
    "an import": imported,
    "os.environ": environment,
    "os.getenv": environment_by_getenv,
    "threading.local": thread_local,
    "ContextVar": context_variable,
    "a patched function": patched_library,
    "a counter": counter,
    "a counter of floats": counter_of_floats,
    "a class that is called": made_in_the_mod(lambda kind: kind().window, "__init__(self): self.window ="),
    "an object made in the mod": made_in_the_mod(lambda kind: kind()[0], "__getitem__(self, at): return"),
    "__class_getitem__": made_in_the_mod(lambda kind: kind[0], "__class_getitem__(cls, at): return"),
    "an object reached in two ways": reached_in_two_ways,
    "an object reached from itself": reached_from_itself,
    "a special method added later": special_method_added_later,
    "a partial's keyword": keyword_of_a_partial,
    "a helper's default": default_of_a_helper,
    "a function's attribute that is not there at first": caught_attribute_of_a_function,
    "a replaced store of a torch module": replaced_store_of_a_torch_module,
    "a special method whose errors are caught": caught_special_method,
    "a special property": special_property,
    "an iterator": iterator,
    "itertools": container(lambda: [2], lambda x: next(itertools.chain(x)), lambda x, n: operator.setitem(x, 0, n)),
    "a numpy array": container(lambda: np.array([2]), lambda x: int(x[0]), lambda x, n: operator.setitem(x, 0, n)),
    "a numpy int": numpy_scalar(np.int64),
    "a numpy float": numpy_scalar(np.float64),
    "bytes": container(lambda: [b"2"], lambda x: int(x[0]), lambda x, n: operator.setitem(x, 0, b"%d" % n)),
    "a str": container(lambda: ["2"], lambda x: int(x[0]), lambda x, n: operator.setitem(x, 0, str(n))),
    "a complex": container(lambda: [2 + 0j], lambda x: x[0].real, lambda x, n: operator.setitem(x, 0, n + 0j)),
    "a range": container(lambda: [range(2)], lambda x: x[0].stop, lambda x, n: operator.setitem(x, 0, range(n))),
    "a slice": container(lambda: [slice(2)], lambda x: x[0].stop, lambda x, n: operator.setitem(x, 0, slice(n))),
    "a partial": container(
        lambda: [functools.partial(pow, 2)], lambda x: x[0](1), lambda x, n: operator.setitem(x, 0, functools.partial(pow, n))
    ),
    "a generator expression": container(lambda: [2], lambda x: sum(y for y in x), lambda x, n: operator.setitem(x, 0, n)),
}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clear_cache()
    globals()["shift"] = 0
    yield
    os.environ.pop("FLEXATTN_TEST_WINDOW", None)
    sys.modules.pop("settings_of_a_test", None)
    if hasattr(torch.Tensor, "window_of_a_test"):
        del torch.Tensor.window_of_a_test


# These are traced once. The others are traced in each call: they read values of C or attributes by names that are text, or call
# special methods.
CACHED = frozenset(
    (
        *("global", "nonlocal", "default", "keyword default", "a list", "a tuple in a list", "a dict", "a dict of floats"),
        *("a dataclass", "a frozen dataclass", "an argparse.Namespace", "one of two objects", "an object in a helper"),
        *("a class's attribute through an object", "another base", "another class", "an abstract base", "super()"),
        *("a class's attribute", "a base's attribute", "a nested class", "a float in a method's globals"),
        *("a property", "a replaced __dict__", "__call__", "a module in a helper", "a tensor's method"),
        *("bytes", "a str", "a partial", "itertools", "a generator expression", "a torch module's attribute"),
        *("a special method added later", "a partial's keyword", "a helper's default", "a replaced store of a torch module"),
        *("a function's attribute that is not there at first", "a class that is called", "an object made in the mod"),
    )
)


@pytest.mark.sample
@pytest.mark.parametrize("kind", CASES)
def test_a_changed_state_is_seen(kind: str) -> None:
    mod, change = CASES[kind]()
    for window, calls in ((2, 3), (5, 1), (2, 1)):
        change(window)
        want = plain(mod)
        torch.testing.assert_close(want, plain(lambda b, h, i, j: within(window, i, j)))  # noqa: B023
        for _ in range(calls):
            torch.testing.assert_close(attention(Q, Q, Q, mask_mod=mod), want)


@pytest.mark.sample
@pytest.mark.parametrize("kind", CASES)
def test_another_state_of_the_same_code_is_seen(kind: str) -> None:
    for window in (2, 5, 2):
        mod, change = CASES[kind]()
        change(window)
        torch.testing.assert_close(attention(Q, Q, Q, mask_mod=mod), plain(lambda b, h, i, j: within(window, i, j)))  # noqa: B023


@pytest.mark.sample
@pytest.mark.parametrize("kind", CASES)
def test_ordinary_mods_are_traced_once_and_others_in_each_call(kind: str) -> None:
    mod, _ = CASES[kind]()
    name = getattr(mod, "__qualname__", "")
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexattn.warn._warned", set())
        warnings.simplefilter("always")
        attention(Q, Q, Q, mask_mod=mod)
    said = [str(w.message) for w in caught if "is traced again in each call" in str(w.message)]
    traces = [cache_info()["traces"]]
    for _ in range(2):
        attention(Q, Q, Q, mask_mod=mod)
        traces.append(cache_info()["traces"])
    assert traces == ([1, 1, 1] if kind in CACHED else [1, 2, 3]), find_captures(mod).unkeyed
    assert [name in text for text in said] == ([] if kind in CACHED else [True]), said
    if kind in CACHED:
        assert find_captures(mod).key == find_captures(mod).key is not None


def test_a_subclass_of_a_class_of_the_library_is_followed() -> None:
    """The captures of the class's own call are known without a walk."""

    class Scaled(TEScoreMod):
        factor = 1

        def __call__(self, score: Any, *others: Any) -> Any:
            return score * self.factor

    mod = Scaled(lambda graph, score, tensors: score)
    for factor in (1, 3, 1):
        mod.factor = factor
        want = attention(Q, Q, Q, softmax_scale=factor / math.sqrt(8))
        for _ in range(2):
            torch.testing.assert_close(attention(Q, Q, Q, score_mod=mod), want)


def test_a_walk_ends_where_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of such a mod walks, and the rest of the mod's state may be most of the process: here 1000 dictionaries."""
    a_queue, later = collections.deque([2]), [{} for _ in range(1000)]
    visit, visited = _Walk.visit, []

    def count(*args: Any, **named: Any) -> Any:
        visited.append(args[1])  # its name
        return visit(*args, **named)

    monkeypatch.setattr(_Walk, "visit", count)
    found = find_captures(lambda b, h, i, j: (a_queue[0] >= i) & (len(later) > j))
    assert found[:5] == (None, "a_queue is a collections.deque, whose contents are not followed", (), (), ())
    assert len(visited) < 10, visited


def test_no_address_in_a_walk_is_anothers() -> None:
    """If the walk made a value, its address could go to the next value, which then sometimes had no key."""
    walk, value = _Walk(None, set(), True, None), lambda: 0
    gone = weakref.ref(value)
    walk.visit("value", value)
    del value
    assert gone() is not None
    del walk
    assert gone() is None
