"""Facts about a function's code: its globals, the attributes that it names, and which values behave the same in every call.

Python reads an attribute by a name in the code, or by a function that is given the name as a string. So once every function that a
mod can reach is either Python code that was looked at or in `is_pure`'s list, there is no other way to read anything.
"""

from __future__ import annotations

import builtins
import cmath
import dis
import functools
import itertools
import math
import operator
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Chain = tuple[str, ...]
BARE: frozenset[Chain] = frozenset(((),))


class Facts(NamedTuple):
    """Names in a code object and those inside it. A chain follows a variable: ("a", "b") in x.a.b, () in other uses of x."""

    roots: tuple[str, ...]  # names of globals, sorted
    attributes: frozenset[str]
    chains: dict[str, frozenset[Chain]]  # chains of each global and free variable
    first: frozenset[Chain]  # chains of the first argument, a method's self
    imports: tuple[str, ...]
    hidden: str  # how it reads what no name in it says, or ""
    formats: bool  # makes text of values, and so may call __repr__
    catches: bool  # may find that an attribute is missing, and go on
    writes: bool  # writes to what is not its own


_ROOTS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"))
_VARIABLES = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_LOCALS = frozenset(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_OF_LOCALS = frozenset(dis.haslocal) - {dis.opmap.get(name) for name in ("MAKE_CELL", "LOAD_CLOSURE")}
_HIDDEN = frozenset(("MATCH_CLASS", "IMPORT_STAR"))  # the former has its attributes' names in a constant
_FORMATS = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"))
_FORMATTERS = frozenset(("str", "repr", "format", "ascii", "print", "bytes"))
_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"))
_CATCHES = frozenset(("SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO"))

# Attributes by which functions, frames, classes and texts lead to what no name says; of __names__ only the operators' do not.
_REFLECTIVE = frozenset(("gi_frame", "cr_frame", "ag_frame", "tb_frame", "f_back", "f_locals", "mro", "format", "format_map"))
_OPERATORS = frozenset(
    (
        *(f"__{name.strip('_')}__" for name in operator.__all__),
        *("__call__", "__len__", "__iter__", "__next__", "__bool__", "__int__", "__float__", "__round__", "__init__"),
        *("__enter__", "__exit__", "__post_init__", "__torch_function__", "__class__"),
        *(f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")),
    )
)


IMPORT_MODULE = "import_module"  # importlib's, which is followed where it is called by this name, with the name of a module

_facts: dict[int, tuple[types.CodeType, Facts]] = {}  # by address, as code's own hash takes longer than the rest of a walk
_MOST_FACTS = 4096


def facts_of(code: types.CodeType) -> Facts:
    found = _facts.get(id(code))
    if found is None:
        if len(_facts) >= _MOST_FACTS:
            _facts.clear()
        found = _facts[id(code)] = (code, _new_facts(code))
    return found[1]


def _new_facts(code: types.CodeType) -> Facts:
    roots: set[str] = set()
    attributes: set[str] = set()
    chains: dict[str, set[Chain]] = {}
    first: set[Chain] = set()
    argument = code.co_varnames[0] if code.co_argcount else None
    imports: set[str] = set()
    hidden = ""
    formats = any(isinstance(constant, str) and "%" in constant for constant in code.co_consts)
    catches, writes = bool(getattr(code, "co_exceptiontable", b"")), False
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    for at, instruction in enumerate(instructions):
        op, name = instruction.opname, instruction.argval
        chain = tuple(i.argval for i in itertools.takewhile(lambda i: i.opname in _ATTRIBUTES, instructions[at + 1 :]))
        if name == IMPORT_MODULE and op not in _LOCALS:
            called_with = _constant_argument(instructions[at + 1 :])
            if called_with:
                imports.add(called_with)
            else:
                hidden = hidden or "import_module of a name that is no constant"
        if op in _ROOTS or op in _VARIABLES:
            if op in _ROOTS:
                roots.add(name)
            chains.setdefault(name, set()).add(chain)
        elif op in _LOCALS and name == argument:
            first.add(chain)
        elif instruction.opcode in _OF_LOCALS and (name == argument or (isinstance(name, tuple) and argument in name)):
            first.add(())
        elif op == "IMPORT_NAME":
            imports.add(name)
        elif instruction.opcode in dis.hasname:
            attributes.add(name)
        if op in _HIDDEN or (op == "CALL_INTRINSIC_1" and "IMPORT_STAR" in instruction.argrepr):
            hidden = hidden or f"a {op.lower().replace('_', ' ')}"
        formats = formats or op in _FORMATS
        catches = catches or op in _CATCHES
        writes = writes or op in _WRITES or (op == "STORE_DEREF" and name in code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = facts_of(constant)
            roots |= {*inner.roots}
            attributes |= inner.attributes
            imports |= {*inner.imports}
            for name, found in inner.chains.items():
                chains.setdefault(name, set()).update(found)  # a free variable is a variable here, by its name
            hidden, formats = hidden or inner.hidden, formats or inner.formats
            catches, writes = catches or inner.catches, writes or inner.writes
    for name in sorted(attributes):
        is_special = name.startswith("__") and name.endswith("__")
        if name in _REFLECTIVE or (is_special and name not in _OPERATORS):
            hidden = hidden or f"the attribute {name}"
    formats = formats or not _FORMATTERS.isdisjoint(roots | attributes)
    found_chains = {name: frozenset(found) for name, found in chains.items()}
    first |= chains.get(argument, set()) if argument in code.co_cellvars else set()
    names = tuple(sorted(roots)), frozenset(attributes), found_chains, frozenset(first), tuple(sorted(imports))
    return Facts(*names, hidden, formats, catches, writes)


def _constant_argument(instructions: Sequence[dis.Instruction]) -> str:
    """Returns the absolute name of a module that a function just loaded is called with, where it is its one argument; else ""."""
    following = [i for i in instructions[:4] if i.opname not in ("PUSH_NULL", "PRECALL")][:2]
    if [i.opname for i in following] not in (
        ["LOAD_CONST", "CALL"],
        ["LOAD_CONST", "CALL_FUNCTION"],
        ["LOAD_CONST", "CALL_METHOD"],
    ):
        return ""
    name = following[0].argval
    return name if isinstance(name, str) and following[1].arg == 1 and not name.startswith(".") else ""


# Builtins that read nothing but their arguments, these only by operators; not getattr, vars, globals, eval, id, hash, type, open.
# fmt: off
_BUILTINS = (
    "abs", "all", "any", "ascii", "bin", "bool", "bytes", "callable", "chr", "complex", "dict", "divmod", "enumerate", "filter",
    "float", "format", "frozenset", "hex", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next",
    "object", "oct", "ord", "pow", "print", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super",
    "tuple", "zip", "staticmethod", "classmethod", "property", "__build_class__",
)
_FACTORIES = (
    "tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones", "arange", "eye", "is_tensor", "finfo", "iinfo", "can_cast",
    "promote_types", "result_type", "get_default_dtype", "Size", "device", "dtype",
)
# fmt: on
_BY_NAME = (operator.attrgetter, operator.methodcaller)  # they read attributes whose names are strings
_REPR_FILES = (reprlib.__file__, getattr(sys.modules.get("dataclasses"), "__file__", reprlib.__file__))


@functools.cache
def _pure() -> dict[int, Any]:
    """Returns pure functions by address, kept alive, so that no address becomes another's."""

    def found() -> Iterator[Any]:
        yield from (vars(builtins)[name] for name in _BUILTINS)
        yield from (x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException))
        for module in (math, cmath, operator, itertools):
            yield from (x for x in vars(module).values() if callable(x) and x not in _BY_NAME)
        yield from (functools.partial, functools.reduce, typing.cast)
        yield from (getattr(torch, name) for name in _FACTORIES)
        yield from (Tensor, torch.nn.Parameter, torch.nn.Module)
        for owner in Tensor.__mro__[:-1]:
            yield from (x for x in vars(owner).values() if callable(x) and _is_of_torch(x))
        for functions in torch.overrides.get_overridable_functions().values():
            yield from functions

    return {id(x): x for x in found()}


def _is_of_torch(function: Any) -> bool:
    return not isinstance(function, types.FunctionType) or str(function.__globals__.get("__name__")).startswith("torch.")


def is_pure(value: Any) -> bool:
    """Returns whether a function or class depends on nothing but its arguments: torch's, math's, some builtins."""
    if id(value) in _pure():
        return True
    kind = type(value)
    if kind in (types.FunctionType, types.ModuleType, dict, list, tuple):
        return False
    if kind is types.BuiltinFunctionType:  # a class's own, as float.fromhex
        return isinstance(value.__self__, type) and id(value.__self__) in _pure()
    if kind in (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType):
        return id(value.__objclass__) in _pure() or value.__objclass__ in Tensor.__mro__
    if kind is types.MethodWrapperType:  # a tensor's property
        return isinstance(value.__self__, types.GetSetDescriptorType) and value.__self__.__objclass__ in Tensor.__mro__
    if isinstance(value, torch._ops.OpOverloadPacket):
        return bool(value._qualified_op_name.startswith(("aten::", "prims::")))
    if isinstance(value, torch._ops.OpOverload):
        return value.namespace in ("aten", "prims")
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.ufunc) or (isinstance(value, type) and issubclass(value, numpy.generic))


def unwrapped_repr(function: types.FunctionType) -> types.FunctionType:
    """Returns the function itself, or the one that reprlib or dataclasses guard against recursion."""
    inner = getattr(function, "__wrapped__", None)
    return inner if function.__code__.co_filename in _REPR_FILES and isinstance(inner, types.FunctionType) else function
