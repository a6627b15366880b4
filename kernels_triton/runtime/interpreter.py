"""Triton's interpreter (TRITON_INTERPRET=1) with right bf16 and fp8: the arithmetic of the compiled kernel, on the CPU.

Triton's interpreter stores a bf16 or fp8 value as an unsigned integer of its width and mostly computes on that integer. So sums and
products of bf16 are wrong, casts to bf16 truncate, and casts to fp8 lose the carry. This is known upstream, and no fix is planned
(triton-lang/triton issues 10945, 11584 and 11585). `right_arithmetic` corrects it for launches inside of it:

    with right_arithmetic():
        kernel[grid](...)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir

from flexattn.forks import fork_safe

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets this process's kernels. Triton decides when it decorates a kernel, so this is read at import."""

if INTERPRETED:  # Triton's interpreter needs numpy; the compiler does not, and numpy may not be installed
    import numpy as np
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

    _BOOL = np.dtype(bool)
    _PROMOTED = {
        "fp32": {"fp32": tl.float32},
        "int32": {"int32": tl.int32, "int64": tl.int64},
        "int64": {"int32": tl.int64, "int64": tl.int64},
    }
    _OPERATORS = {
        "__add__": np.add,
        "__radd__": np.add,
        "__sub__": np.subtract,
        "__rsub__": np.subtract,
        "__mul__": np.multiply,
        "__rmul__": np.multiply,
        "__lt__": np.less,
        "__le__": np.less_equal,
        "__gt__": np.greater,
        "__ge__": np.greater_equal,
        "__eq__": np.equal,
        "__ne__": np.not_equal,
    }
    _NO_CONSTEXPR = frozenset((tl.tensor, tl.dtype, int, str, type(None)))
    _BUILTIN = tl.core.builtin(lambda: None).__code__  # the code of each function that is marked as a builtin

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}  # by tl.dtype.name
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # casts to these saturate
_INFINITY = float("inf")
_ALL = slice(None)
_new = object.__new__

_numpy_dtypes: dict[str, object] = {}  # by tl.dtype.name, "" for pointers
_block_types: dict[tuple[object, ...], dict[str, object]] = {}  # attributes of a tl.block_type, by its element type and shape
_tensor_shapes: dict[tuple[int, ...], tuple[object, object]] = {}  # `shape` and `numel` of a tl.tensor, by its shape in integers
_blocks: dict[tuple[str, object, tuple[int, ...]], object] = {}  # a tl.block_type, by its element type and shape

_lock = fork_safe(threading.RLock())  # Triton's interpreter has one grid index for all threads, and patches affect all threads
_open_contexts = 0
_undo = ExitStack()
_patches: list[tuple[Any, str, object, object]] = []  # (owner, name, outside, inside) in the last context


@contextmanager
def right_arithmetic() -> Iterator[None]:
    """Inside, interpreted kernels compute on bf16 and fp8 (e4m3fn, e5m2) as compiled kernels do on sm_90 and later.

    - A cast rounds to nearest even (toward zero if the kernel requests it), bitwise identical to torch's casts. Past its range bf16
      becomes infinite. fp8 saturates at 448 (e4m3fn) or 57344 (e5m2), infinities too, like `cvt.rn.satfinite` of the PTX ISA and
      unlike torch. Not imitated: sm_89 converts fp32 to fp8 through fp16, and rounds toward zero on the way.
    - + - * round the fp32 result once, as torch does, and so does fma, of fp32 operands too. / and % give fp32, and comparisons
      compare values. (Triton compiles none of these for fp8: cast first.)
    - tl.dot multiplies exactly. It rounds once if the accumulator is fp32, so a product and its transpose are bitwise equal. fp32
      operands are not rounded to tf32.
    - tl.sum, tl.cumsum and tl.cumprod over bf16 compute in fp32 and round once, as torch does. A compiled tl.sum rounds after each
      addition, in its own order: cast to fp32 first if that matters.
    - tl.minimum, tl.maximum and tl.clamp ignore NaN, in fp32 and fp16 too, unless the kernel requests propagate_nan.
    - With triton 3.6 and numpy 2.4 or later, loops over run-time bounds work.
    - A `tl.device_assert` that fails raises AssertionError. Triton's does so only if a variable requests it.
    - The assembly that orders launches (`griddepcontrol`) does nothing, because launches run one after another. Other assembly
      raises.

    Everything else is Triton's own, such as fp32 and fp16 arithmetic, and atomics, which raise on bf16.

    Kernels run several times faster. Device functions are patched once. A type and a shape are created once and not for every
    value. Operators on fp32 and signed integers call numpy at once, and so do columns and rows of a vector. No common type is
    computed if operands have the same type. No sum is repeated for an overflow check whose result the interpreter drops.

    The context may be nested. One thread at a time is inside, and when it leaves, the interpreter is as before. Put only launches
    inside, because triton.language is patched there. If nothing is interpreted, the context does nothing.
    """
    global _open_contexts
    if not INTERPRETED:
        yield
        return
    with _lock:
        if _open_contexts == 0:
            _install()
        _open_contexts += 1
        try:
            yield
        finally:
            _open_contexts -= 1
            if _open_contexts == 0:
                _undo.close()


def _install() -> None:
    for owner, name, original, _ in _patches:
        if getattr(owner, name, interpreter._MISSING) is not original:  # another patch, which stays
            _patches.clear()
            break
    if not _patches:  # once, because it takes longer than a small launch
        _patches.extend(_find_patches())
    for owner, name, _, replacement in _patches:
        setattr(owner, name, replacement)
    _undo.callback(_uninstall)
    _undo.enter_context(np.errstate(invalid="ignore", over="ignore"))  # NaN and infinity are valid operands


def _uninstall() -> None:
    for owner, name, original, _ in _patches:
        if original is interpreter._MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _find_patches() -> list[tuple[Any, str, object, object]]:
    """Patches Triton. Returns (owner, name, attribute before or _MISSING, attribute after) of each part."""
    # Triton patches triton.language for each launch and again for each call of a device function. That takes longer than most
    # operations on a tile. Once is enough, before `_patch_lang` is replaced.
    patch_attr, interpreter._patch_attr = interpreter._patch_attr, _patch_attr
    try:
        language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    finally:
        interpreter._patch_attr = patch_attr
    language.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    for name, operation in _OPERATORS.items():
        language.set_attr(tl.tensor, name, _operator(vars(tl.tensor)[name], operation, name.startswith("__r")))
    for owner, name, replacement in (
        (
            InterpreterBuilder,
            "get_bf16",
            lambda _, builder, value: _narrow(np.array([value]), tl.bfloat16),
        ),  # not in triton 3.6, 3.7
        (InterpreterBuilder, "cast_impl", _cast_impl),
        (InterpreterBuilder, "create_fp_to_fp", _create_fp_to_fp),
        (InterpreterBuilder, "unary_op", lambda original, builder, x, op: _narrow_like(x, original(builder, _widen(x), op))),
        (InterpreterBuilder, "create_fma", _create_fma),
        (InterpreterBuilder, "create_dot", _create_dot),
        (InterpreterBuilder, "create_minnumf", lambda _, builder, lhs, rhs: builder.binary_op(lhs, rhs, np.fmin)),
        (InterpreterBuilder, "create_maxnumf", lambda _, builder, lhs, rhs: builder.binary_op(lhs, rhs, np.fmax)),
        (InterpreterBuilder, "create_clampf", _create_clampf),
        (InterpreterBuilder, "create_inline_asm", _create_inline_asm),
        (ReduceOps, "sum", _reduce),
        (ReduceOps, "min_max", _reduce),
        (ScanOps, "cumsum", _scan),
        (ScanOps, "cumprod", _scan),
        (interpreter, "_patch_lang", _patch_lang),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", _sanitize_overflow),
        (TritonSemantic, "device_assert", _device_assert),
    ):
        language.set_attr(owner, name, _bind(replacement, vars(owner).get(name)))
    make: Callable[..., Any]
    for owner, name, make in (  # functions that run several times for every operation
        (TritonSemantic, "binary_op_type_checking_impl", _check_operands),
        (TritonSemantic, "broadcast_impl_value", _broadcast),
        (TritonSemantic, "cast", _cast),
        (TritonSemantic, "to_tensor", _to_tensor),
        (tl.tensor, "__getitem__", _get_item),
        (tl.core, "_unwrap_if_constexpr", _unwrap),
        (InterpreterBuilder, "binary_op", _binary_op),
        (interpreter, "_get_np_dtype", _get_np_dtype),
        (tl.block_type, "__init__", _make_block_type),
        (tl.tensor, "__init__", _make_tensor),
        (TensorHandle, "__init__", _make_handle),
    ):
        language.set_attr(owner, name, make(vars(owner)[name]))
    originals: dict[tuple[Any, str], object] = {}
    for owner, name, original in language._changes:
        originals.setdefault((owner, name), original)
    return [(owner, name, original, getattr(owner, name)) for (owner, name), original in originals.items()]


def _bind(replacement: Callable[..., object], original: Callable[..., object] | None) -> Callable[..., object]:
    return lambda *args, **kwargs: replacement(original, *args, **kwargs)


def _widen(handle: TensorHandle) -> TensorHandle:
    """Returns a handle's values in fp32, or the handle itself if its dtype is already right."""
    dtype = _TORCH_DTYPES.get(handle.dtype.scalar.name)
    if dtype is None:
        return handle
    bits = torch.from_numpy(np.require(handle.data, requirements=["C", "W"]))
    return TensorHandle(bits.view(dtype).float().numpy(), tl.float32)


def _narrow(values: np.ndarray[Any, Any], dtype: tl.dtype, toward_zero: bool = False) -> TensorHandle:
    exact = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    if dtype.name in _LARGEST:
        exact = exact.clamp(-_LARGEST[dtype.name], _LARGEST[dtype.name])
    rounded = exact.to(_TORCH_DTYPES[dtype.name])
    bits = rounded.view(torch.uint16 if dtype.primitive_bitwidth == 16 else torch.uint8).numpy()
    if toward_zero:  # sign and magnitude: one less in the bits is one step nearer to 0
        bits = bits - (rounded.float().abs() > exact.abs()).numpy()
    return TensorHandle(bits, dtype)


def _narrow_like(operand: TensorHandle, result: TensorHandle) -> TensorHandle:
    """Returns `result` in the dtype of `operand`, if `_widen` widened it."""
    dtype = operand.dtype.scalar
    return _narrow(result.data, dtype) if dtype.name in _TORCH_DTYPES else result


def _cast_impl(original, builder, src, dst_type):
    dtype = dst_type.scalar
    if dtype.name in _TORCH_DTYPES:
        return _narrow(_widen(src).data, dtype)
    return original(builder, _widen(src), dst_type)


def _create_fp_to_fp(original, builder, src, dst_type, rounding_mode):
    dtype = dst_type.scalar
    if dtype.name in _TORCH_DTYPES:
        return _narrow(_widen(src).data, dtype, toward_zero=rounding_mode == ir.ROUNDING_MODE.RTZ)
    if src.dtype.scalar.name in _TORCH_DTYPES:
        return builder.cast_impl(src, dst_type)
    return original(builder, src, dst_type, rounding_mode)


def _binary_op(original):
    def binary_op(builder, lhs, rhs, op):
        dtype = lhs.dtype.scalar
        if dtype.name not in _TORCH_DTYPES:
            return original(builder, lhs, rhs, op)
        result = op(_widen(lhs).data, _widen(rhs).data)
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _narrow(result, dtype)

    return binary_op


def _create_fma(original, builder, x, y, z):
    exact = (_widen(t).data.astype(np.float64) for t in (x, y, z))  # a product of two fp32 numbers is exact in fp64
    result = original(builder, *(TensorHandle(values, tl.float64) for values in exact))
    return builder.cast_impl(result, z.dtype)


def _create_dot(original, builder, a, b, accumulator, *options):
    if accumulator.dtype.scalar.name != "fp32":
        return original(builder, _widen(a), _widen(b), accumulator, *options)
    # In fp64, because BLAS sums a product and its transpose in different orders, and kernels rely on the two being equal.
    exact = np.matmul(_widen(a).data, _widen(b).data, dtype=np.float64) + accumulator.data
    return TensorHandle(exact.astype(np.float32), tl.float32)


def _create_clampf(original, builder, x, low, high, propagate_nans):
    if propagate_nans == ir.PROPAGATE_NAN.NONE:
        return builder.create_minnumf(builder.create_maxnumf(x, low), high)
    return _narrow_like(x, original(builder, _widen(x), _widen(low), _widen(high), propagate_nans))


def _create_inline_asm(original, builder, asm, constraints, values, *options):
    if "griddepcontrol" not in asm:
        return original(builder, asm, constraints, values, *options)
    (value,) = values  # the assembly returns it unchanged, because the interpreter runs launches one after another
    return SimpleNamespace(get_result=lambda _: value)


def _reduce(original, reduction, input, **operators):
    if input.dtype.name not in _TORCH_DTYPES:
        return original(reduction, input, **operators)
    out = original(reduction, input.to(tl.float32), **operators)
    if isinstance(out, tuple):
        value, index = out
        return value.to(input.dtype), index
    return out.to(input.dtype)


def _scan(original, scan, input):
    if input.dtype.name not in _TORCH_DTYPES:
        return original(scan, input)
    return [out.to(input.dtype) for out in original(scan, input.to(tl.float32))]


def _patch_attr(owner, name, member, builder, scope):
    """Makes a builtin of the language use the interpreter's semantic; Triton's way copies and checks the keywords of each call."""
    semantic = getattr(interpreter, "interpreter_semantic", None) or TritonSemantic(builder)  # triton 3.6 has none to share
    # the wrapper only checks for a semantic
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member

    def builtin(*args, **keywords):
        keywords["_semantic"] = semantic
        return function(*args, **keywords)

    scope.set_attr(owner, name, builtin)


def _patch_lang(_original, _fn):
    return interpreter._LangPatchScope()


def _operator(original, operation, is_reflected):
    """Applies a function of numpy, which promotes integers and broadcasts as Triton does, to fp32 and signed integers."""

    def operator(tensor, other):
        if type(other) is tl.constexpr:
            other = other.value
        dtype, data, operand = tensor.dtype, tensor.handle.data, None
        if type(other) is tl.tensor:
            kind = tensor.type if other.shape is tensor.shape else None
            if dtype.name in _PROMOTED:
                dtype = _PROMOTED[dtype.name].get(other.dtype.name)
                operand = None if dtype is None else other.handle.data
            elif operation is np.add and dtype.is_ptr() and other.dtype.name in _PROMOTED["int32"]:
                operand = other.handle.data.astype(np.uint64) * max(1, dtype.element_ty.primitive_bitwidth // 8)
        elif dtype.name in _PROMOTED and _becomes(other, dtype):
            kind, operand = tensor.type, np.array([other], data.dtype)
        if operand is None:
            return original(tensor, other)
        result = operation(operand, data) if is_reflected else operation(data, operand)
        element = tl.int1 if result.dtype is _BOOL else dtype
        if kind is None:
            return _tensor_of(result, dtype, _block_of(element, result.shape))
        if kind.scalar is not element:
            kind = _block_of(element, tuple(kind.shape.values)) if kind.is_block() else element
        return _tensor_of(result, dtype, kind, (tensor.shape, tensor.numel))

    return operator


def _block_of(element, sizes):
    """Returns a tl.block_type, one for all values of this element type and shape, because nothing changes it."""
    key = element.name, getattr(element, "address_space", None), sizes
    block = _blocks.get(key)
    if block is None:
        block = _blocks[key] = tl.block_type(element, list(sizes))
    return block


def _tensor_of(data, dtype, kind, sizes=None):
    """Returns tl.tensor(TensorHandle(data, dtype), kind). sizes: `shape` and `numel` of the tensor if a tensor has them."""
    if sizes is None and (sizes := _tensor_shapes.get(data.shape)) is None:
        return tl.tensor(TensorHandle(data, dtype), kind)
    tensor, handle = _new(tl.tensor), _new(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = sizes
    return tensor


def _get_np_dtype(original):  # Triton's function builds a table of all dtypes for each look-up
    def get_np_dtype(dtype):
        key = "" if dtype.is_ptr() or dtype.scalar.is_ptr() else dtype.scalar.name
        found = _numpy_dtypes.get(key)
        if found is None:
            found = _numpy_dtypes[key] = original(dtype)
        return found

    return get_np_dtype


def _sanitize_overflow(original, semantic, lhs, rhs, binary_op):
    if semantic.builder.options.debug:  # otherwise device_assert ignores the result of the check, which runs in int64
        original(semantic, lhs, rhs, binary_op)


def _device_assert(original, semantic, condition, message, mask):
    holds = condition.handle.data if mask is None else condition.handle.data | ~mask.handle.data
    assert holds.all(), message  # in every kernel, because the interpreter does not know which kernels are compiled with assertions


def _make_block_type(original):
    def make_block_type(block, element_ty, shape):
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        known = _block_types.get(key)
        if known is None:
            original(block, element_ty, shape)
            _block_types[key] = dict(vars(block))
        else:
            vars(block).update(known)

    return make_block_type


def _make_tensor(original):
    def make_tensor(tensor, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = _tensor_shapes.get(sizes)
        if known is None:
            original(tensor, handle, type)
            _tensor_shapes[sizes] = (tensor.shape, tensor.numel)
        else:
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            tensor.shape, tensor.numel = known

    return make_tensor


def _make_handle(original):
    def make_handle(handle, data, dtype, attr=None):
        if attr is not None or (data.itemsize > 1 and not dtype.is_ptr() and data.itemsize * 8 > dtype.primitive_bitwidth):
            original(handle, data, dtype, {} if attr is None else attr)  # the original raises if the data is wider than its type
        else:
            handle.data, handle.dtype, handle.attr = data, dtype, {}

    return make_handle


def _check_operands(original):
    """Skips Triton's promotion for operands of one type, for a pointer and an offset, and for a number with a tensor."""

    def check_operands(semantic, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if type(lhs) is tl.tensor:
            dtype = lhs.dtype
            if type(rhs) is not tl.tensor:
                if arithmetic_check and _becomes(rhs, dtype):
                    return semantic.broadcast_impl_value(lhs, _constant(rhs, dtype))
            elif dtype.is_ptr():
                if allow_lhs_ptr and rhs.dtype.name in ("int32", "int64"):
                    return semantic.broadcast_impl_value(lhs, rhs)
            elif dtype is rhs.dtype and not (div_or_mod and dtype.is_floating() and dtype.name != "fp32"):
                # Triton decides about quotients: in 16 bits they are fp32, from triton 3.9 on also in 8 bits
                return semantic.broadcast_impl_value(lhs, rhs)
        elif type(rhs) is tl.tensor and arithmetic_check and _becomes(lhs, rhs.dtype):
            return semantic.broadcast_impl_value(_constant(lhs, rhs.dtype), rhs)
        return original(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check_operands


def _becomes(number, dtype):
    """Returns whether a tensor of `dtype` surely takes the number as its own type; otherwise Triton decides."""
    if type(number) is int:
        return -(2**31) <= number < 2**31 and dtype.name in ("int32", "int64", "fp32")
    if type(number) is not float or dtype.name != "fp32":
        return False
    if number == 0:
        return math.copysign(1, number) > 0  # the sign of -0.0 is lost until triton 3.8
    return 2.0**-126 <= abs(number) < 3e38 or number in (_INFINITY, -_INFINITY)  # Triton compares with less in fp64


def _constant(number, dtype):
    values = np.array([number], interpreter._get_np_dtype(dtype))
    return tl.tensor(TensorHandle(values, dtype), dtype)


def _broadcast(original):
    def broadcast(semantic, lhs, rhs):
        left, right = lhs.type, rhs.type
        if not right.is_block():
            return (lhs, _spread(rhs, left.shape.values)) if left.is_block() else (lhs, rhs)
        if not left.is_block():
            return _spread(lhs, right.shape.values), rhs
        left_sizes, right_sizes = left.shape.values, right.shape.values
        if left_sizes == right_sizes:
            return lhs, rhs
        if len(left_sizes) != len(right_sizes) or any(
            a != b and a != 1 and b != 1 for a, b in zip(left_sizes, right_sizes, strict=True)
        ):
            return original(semantic, lhs, rhs)
        sizes = list(map(max, left_sizes, right_sizes))
        return tuple(
            tensor if have == sizes else _spread(tensor, sizes) for tensor, have in ((lhs, left_sizes), (rhs, right_sizes))
        )

    return broadcast


def _cast(original):
    def cast(semantic, tensor, dtype, fp_downcast_rounding=None):
        return tensor if tensor.dtype is dtype else original(semantic, tensor, dtype, fp_downcast_rounding)

    return cast


def _get_item(original):
    """Makes a column, tile[:, None], or a row, tile[None, :], at once, and leaves other indices to Triton."""

    def get_item(tensor, index):
        data = tensor.handle.data
        if type(index) is not tuple or len(tensor.shape) != 1:
            return original(tensor, index)
        if index == (_ALL, None):
            sizes = (data.size, 1)
        elif index == (None, _ALL):
            sizes = (1, data.size)
        else:
            return original(tensor, index)
        return _tensor_of(data.reshape(sizes), tensor.handle.dtype.scalar, _block_of(tensor.dtype, sizes))

    return get_item


def _to_tensor(original):  # for each value that a kernel assigns
    def to_tensor(semantic, value, check_type=True):
        return value if type(value) is tl.tensor else original(semantic, value, check_type)

    return to_tensor


def _unwrap(original):
    return lambda value: value if type(value) in _NO_CONSTEXPR else original(value)


def _spread(tensor, sizes):
    data = tensor.handle.data
    # The handle of a comparison has the dtype of its operands, and Triton 3.9 takes no mask of integers.
    values = np.empty(sizes, data.dtype if tensor.type.is_block() else interpreter._get_np_dtype(tensor.dtype))
    values[...] = data
    return _tensor_of(values, tensor.dtype, _block_of(tensor.dtype, values.shape))
