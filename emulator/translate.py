"""Translation of a kernel to its emulation: the same code object, with globals in which every object of Gluon is replaced.

The kernel's file is not changed, so findings have its lines and its source text.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import triton.language
import triton.language.core as tl
from triton.compiler.code_generator import CodeGenerator
from triton.experimental import gluon
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from flexattn.emulator import language, nvidia
from flexattn.emulator.inline_asm import inline_asm_elementwise
from flexattn.emulator.report import GluonError
from flexattn.emulator.values import RUN_TIME, Scalar, binary

language.FUNCTIONS["inline_asm_elementwise"] = inline_asm_elementwise
# These are not taken from `tl`. If a device function is called, Triton's interpreter patches `tl` and never restores it.
_STATIC_RANGE, _RANGE = triton.language.static_range, triton.language.range


class Function:
    """An emulated jit function. It is called as in a kernel, and checks its constexpr parameters."""

    def __init__(self, function: FunctionType) -> None:
        self.__name__ = function.__name__
        self._jit = gluon.jit(function)
        self.names: list[str] = [parameter.name for parameter in self._jit.params]
        self.constexprs = {place: parameter.name for place, parameter in enumerate(self._jit.params) if parameter.is_constexpr}
        self.defaults: set[str] = {parameter.name for parameter in self._jit.params if parameter.has_default}
        self._python: Callable[..., object] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        for place, name in self.constexprs.items():
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, RUN_TIME):
                raise GluonError(f"the constexpr parameter {name} of {self.__name__} is {value!r}, known only at run time")
        if self._python is None:
            _check_syntax(self._jit)
            self._python = _rebind(self._jit.fn)
        return self._python(*args, **kwargs)


@lru_cache(1024)
def function_for(function: FunctionType) -> Function:
    """Returns the emulation of a Python function. A jit function is not a key, because its hash needs its source.

    If Triton interprets, the source is not available.
    """
    return Function(function)


def translate(value: object, name: str) -> Any:
    """Returns the emulation of an object that a kernel refers to as `name`."""
    if isinstance(value, ModuleType):
        return _Module(value)
    if isinstance(value, JITFunction | InterpretedFunction):
        if value.fn.__module__.startswith("triton."):
            return language.FUNCTIONS.get(value.fn.__name__) or _unknown(value.fn.__name__)
        return function_for(value.fn)  # @triton.jit functions too, compiled or interpreted, because Gluon may call them.
    if isinstance(value, tuple):  # its parts may be jit functions, as in a configuration.
        parts = [translate(part, name) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, ConstexprFunction):
        return value.fn
    if isinstance(value, tl.constexpr):
        return value.value
    if getattr(value, "__triton_builtin__", False):
        return _translate_builtin(value)
    if value is _STATIC_RANGE:
        return language.static_range
    if value is _RANGE:
        return _range
    return value


def _translate_builtin(value: Any) -> Callable[..., object]:
    module = value.__module__
    if not module.startswith("triton."):  # a user's own builtin. Its Python runs on an emulated builder.
        return lambda *args, **kwargs: value(*args, **kwargs, _semantic=nvidia.Semantic)
    last = module.rsplit(".", 1)[-1]
    table = nvidia.MODULES.get(last)
    if table is None:
        table = {} if ".nvidia." in module or ".amd." in module else language.FUNCTIONS
    return table.get(value.__name__) or _unknown(f"{last}.{value.__name__}")


def _unknown(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(name)

    return refuse


class _Module:
    """A module of Triton or of jit functions. Its attributes are translated when they are used."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        translated = translate(getattr(self._module, name), name)
        setattr(self, name, translated)
        return translated


def _check_syntax(kernel: Any) -> None:
    """Raises GluonError for Python that would run here, but that Triton does not compile: its compiler visits only some nodes."""
    function = kernel.parse().body[0]
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    unpacked = {id(argument) for node in nodes if isinstance(node, ast.Call) for argument in node.args}
    for node in nodes:
        kind = type(node).__name__
        is_compiled = hasattr(CodeGenerator, f"visit_{kind}") or (isinstance(node, ast.Starred) and id(node) in unpacked)
        if isinstance(node, ast.expr | ast.stmt) and not is_compiled:
            line = kernel.starting_line_number + node.lineno - 1
            raise GluonError(f"line {line} of {function.name} has Python's {kind}, which Triton does not compile")


def _range(*bounds: Any, **_: object) -> Iterator[object]:
    """Yields the indices of a range. If a bound is a run-time scalar, so are the indices, as int32. Triton's hints are ignored."""
    at_run_time = any(isinstance(bound, Scalar) for bound in bounds)
    for index in range(*[int(bound) for bound in bounds]):
        yield Scalar(index, tl.int32) if at_run_time else index


def _fold(op: str) -> Callable[..., object]:
    return lambda *values: reduce(lambda a, b: binary(op, a, b), values)


def _names_in(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, nested))


def _rebind(function: FunctionType) -> Callable[..., object]:
    namespace = {
        "__builtins__": builtins,
        "__name__": function.__module__,
        "range": _range,
        "min": _fold("min"),
        "max": _fold("max"),
    }
    for name in _names_in(function.__code__) & function.__globals__.keys():
        namespace[name] = translate(function.__globals__[name], name)
    closure = function.__closure__ and tuple(CellType(translate(cell.cell_contents, "?")) for cell in function.__closure__)
    rebound = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound
