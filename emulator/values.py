"""Values of a kernel's variables (run-time scalars, register tensors, tensors of pointers), their arithmetic and layout rules."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import triton.language.core as tl
from triton.experimental.gluon.language import _layouts as layouts

from flexattn.emulator import context
from flexattn.emulator.dtypes import BY_NAME, Array, DType, Layout, cast, from_bits, is_float, numpy_dtype, round_to, to_bits
from flexattn.emulator.memory import GlobalBuffer
from flexattn.emulator.report import GluonError

Operand = Any  # an operand in a kernel: a Scalar, Tensor, Pointer or Python number.

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_INTEGERS_ONLY = ("floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_ARITHMETIC = ("add", "sub", "mul", "truediv", *_INTEGERS_ONLY)


class _Operators:
    """Python's operators with Triton's rules (see `binary`)."""

    __slots__ = ()

    def __neg__(self) -> Operand:
        return binary("sub", 0, self)


def _operator(op: str, is_reflected: bool) -> Callable[[Operand, Operand], Operand]:
    def on_the_left(self: Operand, other: Operand) -> Operand:
        return binary(op, self, other)

    def on_the_right(self: Operand, other: Operand) -> Operand:
        return binary(op, other, self)

    return on_the_right if is_reflected else on_the_left


for _op in (*_ARITHMETIC, *COMPARISONS):
    setattr(_Operators, f"__{_op}__", _operator(_op, is_reflected=False))
for _op in _ARITHMETIC:
    setattr(_Operators, f"__r{_op}__", _operator(_op, is_reflected=True))


class Scalar(_Operators):
    """A number known only at run time: a program id, a loop index, a kernel argument. A signed integer that wraps is a finding."""

    __slots__ = ("dtype", "value")
    shape: tuple[int, ...] = ()

    def __init__(self, value: Any, dtype: DType) -> None:
        self.dtype = dtype
        self.value: int | float
        if is_float(dtype):
            self.value = float(value) if dtype.name == "fp64" else float(round_to(np.float32(value), dtype))
            return
        value, bits = int(value), int(dtype.primitive_bitwidth)
        lowest = -(1 << bits - 1) if dtype.name.startswith("int") and bits > 1 else 0
        if not lowest <= value < lowest + (1 << bits):
            if lowest < 0:
                context.program().find("int-overflow", f"{value} does not fit {dtype.name}")
            value = (value - lowest) % (1 << bits) + lowest
        self.value = value

    @property
    def type(self) -> DType:
        return self.dtype

    def __index__(self) -> int:
        if is_float(self.dtype):
            raise TypeError(f"{self!r} used as an index")
        return int(self.value)

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __invert__(self) -> Scalar:
        return Scalar(not self.value if self.dtype.name == "int1" else ~int(self), self.dtype)

    def __repr__(self) -> str:
        return f"{self.value}:{self.dtype.name}"

    def to(self, dtype: DType, bitcast: bool = False, **_: Any) -> Scalar:
        if bitcast:
            value = np.full(1, self.value, np.float64 if self.dtype.name == "fp64" else numpy_dtype(self.dtype))
            return Scalar(from_bits(to_bits(value, self.dtype), dtype)[0], dtype)
        return Scalar(self.value if is_float(dtype) else math.trunc(self.value), dtype)


def scalar(value: Any) -> Scalar:
    """Returns a Python number as a run-time scalar, with Triton's dtype for a kernel argument: int1, int32, int64 or fp32."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, bool | np.bool_):
        return Scalar(value, tl.int1)
    if isinstance(value, int | np.integer):
        return Scalar(value, tl.int32 if -(2**31) <= value < 2**31 else tl.int64)
    return Scalar(float(value), tl.float32)


class Tensor(_Operators):
    """A tensor in registers: values, dtype and layout. The layout is a tag, checked by Gluon's rules."""

    __slots__ = ("data", "dtype", "layout")

    def __init__(self, data: Array, dtype: DType, layout: Layout) -> None:
        self.data, self.dtype, self.layout = data, dtype, layout

    __hash__ = object.__hash__

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype, scalar=self.dtype)

    def __repr__(self) -> str:
        return f"{self.dtype.name}{self.shape}"

    def __bool__(self) -> NoReturn:
        raise GluonError("a tensor cannot be a condition")

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype, self.layout)

    def __getitem__(self, key: Operand) -> Any:
        return subscript(self, key)

    def to(self, dtype: DType, bitcast: bool = False, **_: Any) -> Tensor:
        if bitcast:
            return Tensor(from_bits(to_bits(self.data, self.dtype), dtype), dtype, self.layout)
        return Tensor(cast(self.data, self.dtype, dtype), dtype, self.layout)


_NUMBERS = (Scalar, int, float)
RUN_TIME = (Scalar, Tensor)


class Pointer:
    """A pointer, or a tensor of pointers, into one global buffer. `offset` is in elements."""

    __slots__ = ("buffer", "layout", "offset")

    def __init__(self, buffer: GlobalBuffer, offset: Array, layout: Layout = None) -> None:
        self.buffer, self.offset, self.layout = buffer, offset, layout

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.buffer.dtype, name=f"pointer<{self.buffer.dtype.name}>")

    @property
    def shape(self) -> list[int]:
        return list(self.offset.shape)

    def __repr__(self) -> str:
        return f"{self.dtype.name}{self.shape or ''}"

    def __add__(self, other: Operand) -> Pointer:
        return self._moved(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Pointer:
        return self._moved(other, -1)

    def __getitem__(self, key: Operand) -> Any:
        return subscript(self, key)

    def _moved(self, by: Operand, sign: int) -> Pointer:
        if not isinstance(by, Tensor):
            return Pointer(self.buffer, self.offset + sign * int(by), self.layout)
        layout = by.layout
        if self.layout is not None:
            layout = common_layout(self.layout, by.layout, "pointer arithmetic")
            broadcast_shape(self.offset.shape, by.data.shape, "pointer arithmetic")
        return Pointer(self.buffer, self.offset + sign * by.data.astype(np.int64), layout)


# Layouts and shapes.


def common_layout(a: Layout, b: Layout, what: str) -> Layout:
    """Returns the layout of an elementwise result. Raises GluonError if the operands' layouts differ, as in Gluon."""
    if isinstance(a, layouts.AutoLayout):
        return b
    if isinstance(b, layouts.AutoLayout) or a is b or a == b:
        return a
    raise GluonError(f"{what} of tensors with different layouts, {a} and {b}; convert one with gl.convert_layout")


def broadcast_shape(a: Sequence[int], b: Sequence[int], what: str) -> tuple[int, ...]:
    """Returns the shape of a result. As in Gluon, ranks must be equal, and dimensions of 1 are broadcast."""
    if a == b:
        return tuple(a)
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise GluonError(f"{what} of shapes {list(a)} and {list(b)}")
    return tuple(map(max, a, b))


def sliced_layout(layout: Layout, dim: int) -> Layout:
    """Returns the layout after a reduction along `dim`."""
    return layout if isinstance(layout, layouts.AutoLayout) else layouts.SliceLayout(dim, layout)


def expand_dims(x: Operand, axis: int) -> Operand:
    """Adds a dimension. As in Gluon, it must be the dimension that the layout was sliced along."""
    data = x.offset if isinstance(x, Pointer) else x.data
    layout = x.layout
    axis = axis % (data.ndim + 1)
    if isinstance(layout, layouts.SliceLayout):
        if layout.dim != axis:
            raise GluonError(f"expand_dims along {axis} of a tensor whose SliceLayout has dim={layout.dim}")
        layout = layout.parent
    elif not isinstance(layout, layouts.AutoLayout | layouts.CoalescedLayout):
        raise GluonError(f"expand_dims needs a SliceLayout, and the layout is {layout}")
    return like(x, np.expand_dims(data, axis), layout)


def like(x: Operand, data: Array, layout: Layout) -> Operand:
    """Returns a Tensor or Pointer like `x` with other data and another layout."""
    return Pointer(x.buffer, data, layout) if isinstance(x, Pointer) else Tensor(data, x.dtype, layout)


def subscript(x: Operand, key: Operand) -> Operand:
    """Returns x[key]. The key may have only `:` and None, which adds a dimension."""
    for axis, index in enumerate(key if isinstance(key, tuple) else (key,)):
        if index is None:
            x = expand_dims(x, axis)
        elif index != slice(None):
            raise GluonError(f"a tensor indexed with {index!r}; only ':' and None may index one")
    return x


# Arithmetic.


def _truncating_div(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _truncating_divs(a: Array, b: Array) -> Array:
    quotient = np.abs(a) // np.where(b == 0, 1, np.abs(b))
    return np.where(b == 0, 0, np.sign(a) * np.sign(b) * quotient).astype(a.dtype)


# Python's own operators serve numbers and arrays. Only those whose rules differ have a function for each.
_OPERATORS: dict[str, Callable[[Operand, Operand], Operand]] = {
    op: getattr(operator, f"{op}_" if op in ("and", "or") else op) for op in (*_ARITHMETIC, *COMPARISONS)
}
_ON_NUMBERS: dict[str, Callable[[Operand, Operand], Operand]] = _OPERATORS | {
    "floordiv": _truncating_div,
    "mod": lambda a, b: a - b * _truncating_div(a, b),
    "max": max,
    "min": min,
}
_ON_ARRAYS: dict[str, Callable[[Array, Array], Array]] = _OPERATORS | {
    "floordiv": _truncating_divs,
    "mod": lambda a, b: a - b * _truncating_divs(a, b),
    # If one operand is NaN, the result is the other one (PTX ISA, "max" and "min").
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max_nan": np.maximum,
    "min_nan": np.minimum,
}


def promote(a: DType, b: DType) -> DType:
    """Returns the dtype of an operation on two run-time values, as `computation_type_impl` of triton/language/semantic.py."""
    if a.name == b.name:
        return a
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    names = {a.name, b.name}
    if is_float(a):
        for name in ("fp64", "fp32"):
            if name in names:
                return BY_NAME[name]
        if names <= {"fp16", "fp8e4nv", "fp8e5"}:
            return tl.float16
        return tl.float32 if "fp16" in names else tl.bfloat16
    if a.primitive_bitwidth != b.primitive_bitwidth:
        return a if a.primitive_bitwidth > b.primitive_bitwidth else b
    return a if a.name.startswith("u") else b


def constant_dtype(constant: object, other: DType) -> DType:
    """Returns the dtype of a Python number in an operation with a run-time value of dtype `other`."""
    if type(constant) is int and other.name == "int32" and -(2**31) <= constant < 2**31:
        return other  # most constants are in offsets
    if isinstance(constant, bool):
        return promote(tl.int1, other)
    if isinstance(constant, int):
        if is_float(other):
            return other
        dtype = tl.int32 if -(2**31) <= constant < 2**31 else tl.uint32 if 0 <= constant < 2**32 else tl.int64
        return dtype if other.name == "int1" else promote(dtype, other)
    return other if is_float(other) else tl.float32


def _result_dtype(op: str, a: DType, b: DType) -> DType:
    dtype = promote(a, b)
    if op == "truediv" and not is_float(dtype):
        return tl.float32
    if op in _INTEGERS_ONLY and is_float(dtype):
        raise GluonError(f"{op} needs integers, and the operands are {dtype.name}")
    return dtype


def binary(op: str, a: Operand, b: Operand) -> Operand:
    """Returns `a op b` of Python numbers, Scalars and Tensors, rounded to the result's dtype. Integers divide as in C."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return _binary_of_tensors(op, a, b)
    if not isinstance(a, Scalar) and not isinstance(b, Scalar):
        return _ON_NUMBERS[op](a, b)
    if not all(isinstance(x, _NUMBERS) for x in (a, b)):
        return NotImplemented
    result = _ON_NUMBERS[op](a.value if isinstance(a, Scalar) else a, b.value if isinstance(b, Scalar) else b)
    if op in COMPARISONS:
        return Scalar(result, tl.int1)
    a_dtype = a.dtype if isinstance(a, Scalar) else constant_dtype(a, b.dtype)
    b_dtype = b.dtype if isinstance(b, Scalar) else constant_dtype(b, a.dtype)
    return Scalar(result, _result_dtype(op, a_dtype, b_dtype))


def _binary_of_tensors(op: str, a: Operand, b: Operand) -> Operand:
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return NotImplemented
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        layout = common_layout(a.layout, b.layout, op)
        broadcast_shape(a.data.shape, b.data.shape, op)
        dtype = _result_dtype(op, a.dtype, b.dtype)
    else:
        tensor, other = (a, b) if isinstance(a, Tensor) else (b, a)
        if not isinstance(other, (*_NUMBERS, np.number)):
            raise GluonError(f"{op} of a tensor and a {type(other).__name__}")
        layout = tensor.layout
        other_dtype = other.dtype if isinstance(other, Scalar) else constant_dtype(other, tensor.dtype)
        if is_float(other_dtype) == is_float(tensor.dtype) and isinstance(other, Scalar):  # scalars do not widen tensors.
            other_dtype = tensor.dtype if other_dtype.primitive_bitwidth > tensor.dtype.primitive_bitwidth else other_dtype
        dtype = _result_dtype(op, tensor.dtype, other_dtype)
    array_dtype = numpy_dtype(dtype)
    x, y = (np.asarray(v.data if isinstance(v, Tensor) else v.value if isinstance(v, Scalar) else v) for v in (a, b))
    result = _ON_ARRAYS[op](x.astype(array_dtype, copy=False), y.astype(array_dtype, copy=False))
    if op in COMPARISONS:
        return Tensor(result, tl.int1, layout)
    if is_float(dtype):
        return Tensor(round_to(result, dtype), dtype, layout)
    return Tensor(result.astype(array_dtype, copy=False), dtype, layout)


def unary(function: Callable[[Operand], Operand], x: Operand) -> Operand:
    """Returns a function of floats, computed in fp32 (fp64 for fp64) and rounded to the operand's dtype."""
    if isinstance(x, Tensor):
        if not is_float(x.dtype):
            raise GluonError(f"a function of floats on {x!r}")
        return Tensor(round_to(function(x.data), x.dtype), x.dtype, x.layout)
    if isinstance(x, Scalar):
        return Scalar(function(np.float32(x.value)), x.dtype)
    return float(function(np.float32(x)))


def where(condition: Operand, x: Operand, y: Operand) -> Operand:
    if not isinstance(condition, Tensor):
        return x if condition else y
    layout, shape = condition.layout, condition.data.shape
    for operand in (x, y):
        if isinstance(operand, Tensor):
            layout = common_layout(layout, operand.layout, "where")
            shape = broadcast_shape(shape, operand.data.shape, "where")
    typed = [operand.dtype for operand in (x, y) if isinstance(operand, Tensor | Scalar)]
    if len(typed) == 2:
        dtype = promote(*typed)
    elif typed:
        dtype = constant_dtype(y if isinstance(x, Tensor | Scalar) else x, typed[0])
    else:
        dtype = promote(scalar(x).dtype, scalar(y).dtype)
    array_dtype = numpy_dtype(dtype)
    values = (np.asarray(v.data if isinstance(v, Tensor) else v.value if isinstance(v, Scalar) else v) for v in (x, y))
    result = np.where(condition.data, *(v.astype(array_dtype) for v in values))
    return Tensor(np.broadcast_to(result, shape), dtype, layout)
