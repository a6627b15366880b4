"""Emulation of gl.*: tensors, reductions, pointers, shared memory, partitions. The translation looks functions up in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import triton.language.core as tl
from triton.experimental.gluon.language import _layouts as layouts

from flexattn.emulator.context import program
from flexattn.emulator.dtypes import Array, DType, Layout, cast, is_float, numpy_dtype, poison, round_to
from flexattn.emulator.report import GluonError
from flexattn.emulator.rules import static, static_shape
from flexattn.emulator.values import (
    Operand,
    Pointer,
    Scalar,
    Tensor,
    binary,
    broadcast_shape,
    common_layout,
    expand_dims,
    like,
    scalar,
    sliced_layout,
    unary,
    where,
)

FUNCTIONS: dict[str, Callable[..., object]] = {}
"""The emulation of each function of triton.experimental.gluon.language, by name."""

Function = TypeVar("Function", bound=Callable[..., Any])


def _emulates(*names: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for name in names or (function.__name__,):
            FUNCTIONS[name] = function
        return function

    return register


FUNCTIONS |= {
    "where": where,
    "expand_dims": expand_dims,
    "to_tensor": scalar,
    "cdiv": lambda x, div: (x + div - 1) // div,
}
for _name, _op in {"add": "add", "sub": "sub", "mul": "mul", "fdiv": "truediv", "div_rn": "truediv"}.items():
    FUNCTIONS[_name] = lambda a, b, _op=_op, **_: binary(_op, a, b)


def _extremum(op: str) -> Callable[..., object]:
    def extremum(a: Operand, b: Operand, propagate_nan: object = tl.PropagateNan.NONE, **_: object) -> Operand:
        return binary(op if static(propagate_nan, "propagate_nan") == tl.PropagateNan.NONE else f"{op}_nan", a, b)

    return extremum


FUNCTIONS |= {"maximum": _extremum("max"), "minimum": _extremum("min")}
for _name in ("assume", "static_print", "device_print"):
    FUNCTIONS[_name] = lambda *_, **__: None
FUNCTIONS["max_contiguous"] = lambda x, *_: x
for _name, _function in {
    **{name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "floor", "ceil")},
    "sqrt_rn": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "erf": np.vectorize(math.erf, otypes=[np.float32]),
}.items():
    FUNCTIONS[_name] = lambda x, _function=_function: unary(_function, x)


# Facts that the compiler believes, and that are wrong values on a GPU if they do not hold.


@_emulates()
def multiple_of(x: Operand, values: Sequence[object] | object) -> Operand:
    if isinstance(x, Tensor):
        for axis, n in enumerate(_counts(values)):
            if (x.data.take(range(0, x.shape[axis], n), axis) % n).any():
                raise GluonError(f"multiple_of: the first of {n} neighbours in dim {axis} is no multiple of {n}")
    return x


@_emulates()
def max_constancy(x: Operand, values: Sequence[object] | object) -> Operand:
    if isinstance(x, Tensor):
        for axis, n in enumerate(_counts(values)):
            size = x.shape[axis]
            if (x.data != x.data.take([i // n * n for i in range(size)], axis)).any():
                raise GluonError(f"max_constancy: {n} neighbours in dim {axis} differ")
    return x


def _counts(values: Sequence[object] | object) -> list[int]:
    return [int(static(n, "a number of neighbours")) for n in (values if isinstance(values, Sequence) else [values])]


# The grid.


FUNCTIONS |= {"num_ctas": lambda: 1, "num_warps": lambda: program().current.warps}


@_emulates()
def program_id(axis: Operand) -> Scalar:
    return Scalar(program().program_id[int(axis)], tl.int32)


@_emulates()
def num_programs(axis: Operand) -> Scalar:
    return Scalar(program().grid[int(axis)], tl.int32)


@_emulates("barrier", "thread_barrier")
def barrier(**_: object) -> None:
    """Executes a barrier of a partition's threads. It does nothing more, because a partition is one actor."""
    program().step()


@_emulates()
def static_range(*bounds: object) -> range:
    return range(*[int(static(bound, "a bound of static_range")) for bound in bounds])


# Tensors.


@_emulates()
def arange(start: int, end: int, layout: Layout = None) -> Tensor:
    static_shape([static(end, "end") - static(start, "start")], "arange")
    layout = _checked(layout, 1)
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32, layout)


@_emulates()
def full(shape: Sequence[Operand], value: Operand, dtype: DType, layout: Layout = None) -> Tensor:
    sizes = static_shape(shape, "full")
    layout = _checked(layout, len(sizes))
    number = value.value if isinstance(value, Scalar) else value
    filled: Array = np.full(sizes, number, np.float64 if is_float(dtype) else numpy_dtype(dtype))
    return Tensor(round_to(filled, dtype) if is_float(dtype) else filled, dtype, layout)


@_emulates()
def full_like(x: Tensor, value: Operand, shape: Any = None, dtype: DType = None, layout: Layout = None) -> Tensor:
    return full(x.shape if shape is None else shape, value, dtype or x.dtype, layout or x.layout)


FUNCTIONS |= {
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype, layout),
    "zeros_like": lambda x, shape=None, dtype=None, layout=None: full_like(x, 0, shape, dtype, layout),
    "cast": lambda x, dtype, **options: (x if isinstance(x, Tensor) else scalar(x)).to(dtype, **options),
    "permute": lambda x, *dims: Tensor(x.data.transpose(_flat(dims)), x.dtype, layouts.AutoLayout()),
    "reshape": lambda x, *shape, **_: Tensor(x.data.reshape(_flat(shape)), x.dtype, layouts.AutoLayout()),
}


@_emulates("abs")
def absolute(x: Operand) -> Operand:
    return Tensor(np.abs(x.data), x.dtype, x.layout) if isinstance(x, Tensor) else Scalar(abs(x.value), x.dtype)


@_emulates()
def fma(a: Operand, b: Operand, c: Operand) -> Tensor:
    """Returns a * b + c with one rounding, because a product of two fp32 numbers is exact in fp64."""
    result: Tensor = binary("add", binary("mul", a, b), c)
    x, y, z = (operand.data.astype(np.float64) if isinstance(operand, Tensor) else float(operand) for operand in (a, b, c))
    return Tensor(round_to(np.asarray(x * y + z), result.dtype), result.dtype, result.layout)


@_emulates()
def umulhi(a: Tensor, b: Operand) -> Tensor:
    """Returns the upper 32 bits of a product of two uint32."""
    x, y = (v.data.astype(np.uint64) if isinstance(v, Tensor) else np.uint64(int(v) & 0xFFFFFFFF) for v in (a, b))
    return Tensor(np.asarray((x * y) >> np.uint64(32)).astype(np.uint32), tl.uint32, a.layout)


@_emulates()
def convert_layout(x: Operand, layout: Layout, assert_trivial: bool = False) -> Operand:
    if not isinstance(x, Tensor | Pointer) or not isinstance(layout, layouts.DistributedLayout):
        raise GluonError(f"convert_layout of {x!r} to {layout}; accepted: a tensor and a distributed layout")
    return like(x, x.data if isinstance(x, Tensor) else x.offset, _checked(layout, len(x.shape)))


@_emulates()
def set_auto_layout(x: Operand, layout: Layout) -> Operand:
    if not isinstance(x.layout, layouts.AutoLayout):
        raise GluonError(f"set_auto_layout of a tensor that has layout {x.layout}")
    return like(x, x.data if isinstance(x, Tensor) else x.offset, layout)


@_emulates()
def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    layout = common_layout(a.layout, b.layout, "broadcast")
    shape = broadcast_shape(a.data.shape, b.data.shape, "broadcast")
    return Tensor(np.broadcast_to(a.data, shape), a.dtype, layout), Tensor(np.broadcast_to(b.data, shape), b.dtype, layout)


@_emulates()
def split(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.data.shape[-1] != 2:
        raise GluonError(f"split of shape {x.shape}; the last dimension must be 2")
    first, second = (Tensor(np.ascontiguousarray(x.data[..., i]), x.dtype, layouts.AutoLayout()) for i in range(2))
    return first, second


@_emulates()
def join(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.name != b.dtype.name or a.shape != b.shape:
        raise GluonError(f"join of {a!r} and {b!r}; they must be alike")
    return Tensor(np.stack([a.data, b.data], -1), a.dtype, layouts.AutoLayout())


@_emulates("static_assert", "device_assert")
def assert_all(condition: Operand, message: str = "", **_: object) -> None:
    if not (condition.data.all() if isinstance(condition, Tensor) else condition):
        program().fatal("assertion", f"assertion failed {message}".strip())


def _checked(layout: Layout, rank: int) -> Layout:
    """Returns a layout. Raises GluonError if its rank differs, or if its number of warps is not that of the partition."""
    if layout is None:
        return layouts.AutoLayout()
    program().check_layout(layout)
    if isinstance(layout, layouts.SliceLayout) and isinstance(layout.parent, layouts.AutoLayout):
        return layouts.AutoLayout()  # a slice of a reshaped tensor, whose layout is not tracked.
    if not isinstance(layout, layouts.AutoLayout | layouts.CoalescedLayout) and layout.rank != rank:
        raise GluonError(f"a tensor of rank {rank} with the layout {layout} of rank {layout.rank}")
    return layout


def _flat(numbers: tuple[Any, ...]) -> list[int]:
    """Returns the numbers of f(1, 2) or of f([1, 2])."""
    return [int(n) for n in (numbers[0] if isinstance(numbers[0], list | tuple) else numbers)]


# Reductions.


def _reduction(on_floats: np.ufunc, on_integers: np.ufunc) -> Callable[..., object]:
    def reduce_with(x: Tensor, axis: Operand = None, return_indices: bool = False, keep_dims: bool = False, **_: Any) -> Operand:
        if return_indices:
            raise NotImplementedError("return_indices of a reduction")
        if axis is None:
            x, axis = Tensor(x.data.reshape(-1), x.dtype, layouts.AutoLayout()), 0
        dtype = tl.float32 if x.dtype.name == "bf16" else x.dtype
        if on_floats is np.add and not is_float(dtype) and dtype.primitive_bitwidth < 32:
            dtype = tl.int32
        ufunc = on_floats if is_float(dtype) else on_integers
        data = ufunc.reduce(x.data.astype(numpy_dtype(dtype), copy=False), axis=int(axis), keepdims=keep_dims)
        return _reduced(x, int(axis), round_to(data, dtype) if is_float(dtype) else np.asarray(data), dtype, keep_dims)

    return reduce_with


def _reduced(x: Tensor, axis: int, data: Array, dtype: DType, keep_dims: bool) -> Operand:
    if keep_dims:
        return Tensor(data, dtype, x.layout)
    return Tensor(data, dtype, sliced_layout(x.layout, axis % x.data.ndim)) if data.ndim else Scalar(data.item(), dtype)


FUNCTIONS["sum"] = _reduction(np.add, np.add)
FUNCTIONS["max"] = _reduction(np.fmax, np.maximum)  # NaNs are ignored (PTX ISA, "max" and "min").
FUNCTIONS["min"] = _reduction(np.fmin, np.minimum)
FUNCTIONS["xor_sum"] = _reduction(np.bitwise_xor, np.bitwise_xor)
FUNCTIONS["reduce_or"] = _reduction(np.bitwise_or, np.bitwise_or)


@_emulates()
def reduce(x: Tensor, axis: int, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Operand:
    """Combines slices one after the other. A GPU combines them in a tree."""
    slices = [Tensor(np.take(x.data, i, axis=axis), x.dtype, layouts.AutoLayout()) for i in range(x.data.shape[axis])]
    result = slices[0]
    for following in slices[1:]:
        result = combine_fn(result, following)
    data = np.expand_dims(result.data, axis) if keep_dims else result.data
    return _reduced(x, axis, data, result.dtype, keep_dims)


# Global memory through pointers.


@_emulates()
def load(pointer: Pointer, mask: Operand = None, other: Operand = None, **_: object) -> Operand:
    """Loads elements. Masked elements are `other`, or poison if it is not given."""
    offset, active = addresses(pointer, mask, "load")
    dtype = pointer.buffer.dtype
    data = pointer.buffer.data[np.where(active, offset, 0)]
    if not active.all():
        fill = poison(dtype) if other is None else other.data if isinstance(other, Tensor) else scalar(other).to(dtype).value
        data = np.where(active, data, np.asarray(fill).astype(data.dtype))
    return Tensor(data, dtype, pointer.layout) if pointer.offset.ndim else Scalar(data.item(), dtype)


@_emulates()
def store(pointer: Pointer, value: Operand, mask: Operand = None, **_: object) -> None:
    offset, active = addresses(pointer, mask, "store")
    values = _stored(pointer, value, "store")
    program().global_write(pointer.buffer, offset[active], np.broadcast_to(values, offset.shape)[active], reduction=False)


def _atomic(name: str, update: Callable[[Array, Array, Array], None]) -> None:
    def atomic(pointer: Pointer, val: Operand, mask: Operand = None, **_: object) -> Operand:
        offset, active = addresses(pointer, mask, name)
        buffer = pointer.buffer
        if name == "atomic_add" and not offset.ndim and not isinstance(val, Tensor) and int(scalar(val).value) == 0:
            program().poll(buffer, int(offset))
        values = np.broadcast_to(_stored(pointer, val, name), offset.shape)[active].astype(buffer.data.dtype)
        before = buffer.data[np.where(active, offset, 0)]
        index, places = np.unique(offset[active], return_inverse=True)
        after = buffer.data[index]
        update(after, places.reshape(-1), values)
        program().global_write(buffer, index, round_to(after, buffer.dtype) if is_float(buffer.dtype) else after, reduction=True)
        return Tensor(before, buffer.dtype, pointer.layout) if pointer.offset.ndim else Scalar(before.item(), buffer.dtype)

    FUNCTIONS[name] = atomic


_atomic("atomic_add", np.add.at)
_atomic("atomic_max", np.maximum.at)
_atomic("atomic_min", np.minimum.at)


def _stored(pointer: Pointer, value: Operand, what: str) -> Array:
    dtype = pointer.buffer.dtype
    if not isinstance(value, Tensor):
        return np.asarray(scalar(value).to(dtype).value)
    if pointer.layout is not None:
        common_layout(pointer.layout, value.layout, what)
    return cast(value.data, value.dtype, dtype)


def addresses(pointer: object, mask: Operand, what: str) -> tuple[Array, Array]:
    """Returns offsets and a mask of the active ones. Offsets outside the buffer are a finding, and are not active."""
    if not isinstance(pointer, Pointer):
        raise GluonError(f"{what} through {pointer!r}; accepted: a pointer")
    offset: Array = pointer.offset
    active: Array = np.ones(offset.shape, np.bool_)
    if isinstance(mask, Tensor):
        if pointer.layout is not None:
            common_layout(pointer.layout, mask.layout, f"{what} with a mask")
        offset, active = np.broadcast_arrays(offset, mask.data)
    elif mask is not None and not mask:
        active = np.zeros(offset.shape, np.bool_)
    size = pointer.buffer.data.size
    outside = active & ((offset < 0) | (offset >= size))
    if outside.any():
        first = int(np.extract(outside, offset)[0])
        program().find("out-of-bounds", f"{what} of {int(outside.sum())} elements outside a buffer of {size}, such as {first}")
        active = active & ~outside
    return offset, active


# Shared memory and partitions.


@_emulates()
def allocate_shared_memory(element_ty: DType, shape: Sequence[Operand], layout: Layout, value: Tensor | None = None) -> Any:
    sizes = [int(static(n, "a shape in shared memory")) for n in shape]
    return program().allocate(element_ty, sizes, layout, value)


@_emulates()
def warp_specialize(functions_and_args: Sequence[Any], worker_num_warps: Sequence[Any], worker_num_regs: Any = None) -> Any:
    warps = [int(static(n, "worker_num_warps")) for n in worker_num_warps]
    registers = None if worker_num_regs is None else [int(static(n, "worker_num_regs")) for n in worker_num_regs]
    return program().warp_specialize([(function, tuple(args)) for function, args in functions_and_args], warps, registers)


# The same functions as methods of a tensor.


def _as_method(name: str) -> Callable[..., object]:
    return lambda self, *arguments, **options: FUNCTIONS[name](self, *arguments, **options)


for _name in ("max", "min", "sum", "reshape", "permute", "expand_dims", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs"):
    setattr(Tensor, _name, _as_method(_name))
