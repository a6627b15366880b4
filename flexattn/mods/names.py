"""Names that a function's code can read, and values that behave the same in every call.

A code object lists its constants, with the code of each function inside it. `dis` tells names of globals from names of attributes:
a name in an instruction that is in neither list below counts as both, so no instruction of a new Python can hide a name.
"""

from __future__ import annotations

import builtins
import cmath
import dis
import functools
import importlib
import itertools
import math
import operator
import types
import typing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.compat import C_FUNCTIONS, TENSOR_FUNCTIONS


class Names(NamedTuple):
    """Names in a code object and in the code inside it; `hidden`: a read without a name, or ""."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    hidden: str


_OF_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL"))
_OF_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"))
_HIDDEN = {"MATCH_CLASS": "a class pattern", "IMPORT_NAME": "an import"}
# Attributes that lead to frames, or read attributes whose names are texts; all other __names__ do so too.
_REFLECTIVE = frozenset(("gi_frame", "cr_frame", "ag_frame", "tb_frame", "f_back", "f_locals", "mro", "format", "format_map"))
_SPOKEN = frozenset(("__call__", "__init__", "__getitem__", "__len__", "__iter__", "__abs__", "__add__", "__mul__", "__neg__"))
_CUDNN = (("importlib", "import_module"), {None, "cudnn"})  # names and constants of a function that imports it, and does no more


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    """Returns the names in `code`."""
    inner = [names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    read = {(i.opname, str(i.argval)) for i in dis.get_instructions(code) if i.opcode in dis.hasname or i.opname in _HIDDEN}
    roots = {name for op, name in read if op not in _OF_ATTRIBUTES}.union(*(n.globals for n in inner))
    attributes = {name for op, name in read if op not in _OF_GLOBALS}
    hidden = [_HIDDEN[op] for op, _ in read if op in _HIDDEN] + [n.hidden for n in inner if n.hidden]
    hidden += [f"the attribute {n}" for n in sorted(attributes) if n in _REFLECTIVE or (is_special(n) and n not in _SPOKEN)]
    has_variables = bool(code.co_varnames or code.co_freevars)
    if "import_module" in code.co_names and (has_variables or (code.co_names, {*code.co_consts}) != _CUDNN):
        hidden.append("import_module of a name that is no constant")
    return Names(tuple(sorted(roots)), frozenset(attributes.union(*(n.attributes for n in inner))), "".join(hidden[:1]))


def is_special(name: str) -> bool:
    """Returns whether Python may look for an attribute by itself: __len__, for example."""
    return name.startswith("__") and name.endswith("__")


# Builtins that read nothing but their arguments, by operators alone: not getattr, vars, globals, eval, type, id or hash.
_BUILTINS = (
    "abs all any ascii bin bool bytes callable chr complex dict divmod enumerate filter float format frozenset hex int isinstance "
    "issubclass iter len list map max min next object oct ord pow print range repr reversed round set slice sorted str sum super "
    "tuple zip NotImplemented"
)
_BY_NAME = (operator.attrgetter, operator.methodcaller)  # they read attributes whose names are texts
_OTHERS = (functools.partial, functools.reduce, typing.cast, importlib.import_module, Tensor, torch.get_default_dtype)
_TORCH_TYPES = (torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo)
_TORCH_PYTHON = (vars(torch.functional), vars(torch.nn.functional), TENSOR_FUNCTIONS)


@functools.cache
def _listed() -> dict[int, object]:
    """Returns pure values by their addresses; it keeps them alive, so that no address becomes another value's."""
    errors = [x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException)]
    functions = [x for module in (math, cmath, operator, itertools) for x in vars(module).values() if callable(x)]
    values = [*map(vars(builtins).get, _BUILTINS.split()), *errors, *functions, *_OTHERS, *_TORCH_TYPES]
    return {id(x): x for x in values if x not in _BY_NAME}


def is_pure(value: Any) -> bool:
    """Returns whether a function or class reads nothing but its arguments: builtins, math, torch, names of cuDNN."""
    kind = type(value)
    if id(value) in _listed() or (kind is types.FunctionType and any(value.__globals__ is known for known in _TORCH_PYTHON)):
        return True
    if kind is types.BuiltinFunctionType:
        return any(getattr(owner, value.__name__, None) == value for owner in C_FUNCTIONS)
    if kind in (types.MethodDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType):
        return value.__objclass__ in Tensor.__mro__[:-1]
    if kind is types.ModuleType:
        return value.__name__ == "cudnn" and hasattr(value, "pygraph")
    owner = (value if isinstance(value, type) else kind).__module__
    return str(owner).partition(".")[0] == "cudnn" and hasattr(value, "__members__")
