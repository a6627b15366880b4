"""Numbers of sm_90: rounding, casts and bit patterns by Triton dtype.

Values of a floating dtype of up to 32 bits are stored in float32 arrays, which contain only values of that dtype. fp64, integers
and booleans have arrays of the same width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language.core as tl

from flexattn.emulator.report import GluonError

Array = npt.NDArray[Any]
DType = Any  # a triton.language.core.dtype. Triton has no annotations for mypy.
Layout = Any  # a Gluon layout object.

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")  # the same names in numpy and torch
_NUMPY: dict[str, object] = {name: getattr(np, name) for name in _INTEGERS} | {"int1": np.bool_, "fp64": np.float64}
_TORCH: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int1": torch.bool,
    **{name: getattr(torch, name) for name in _INTEGERS},
}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # casts to these dtypes saturate (cvt.rn.satfinite; PTX ISA, "cvt").
_SIGNED = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

_FLOATS = (tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16, tl.float32, tl.float64)
BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in (tl.int1, *(getattr(tl, name) for name in _INTEGERS), *_FLOATS)}


def from_torch(dtype: torch.dtype) -> DType:
    """Returns the Triton dtype of a torch dtype. Raises TypeError if there is none here."""
    for name, torch_dtype in _TORCH.items():
        if torch_dtype is dtype:
            return BY_NAME[name]
    raise TypeError(f"a tensor is {dtype}; accepted: {', '.join(map(str, _TORCH.values()))}")


def is_float(dtype: DType) -> bool:
    return bool(dtype.name[0] in "fb")


def numpy_dtype(dtype: DType) -> Any:
    return _NUMPY.get(dtype.name, np.float32)


def size_of(dtype: DType) -> int:
    """Returns the number of bytes of an element."""
    return max(1, int(dtype.primitive_bitwidth) // 8)


def poison(dtype: DType) -> Any:
    """Returns the value of memory that was not written: NaN, or an integer that is unlikely to be right."""
    if is_float(dtype):
        return np.nan
    return dtype.name == "int1" or 0x5A


def round_to(values: npt.ArrayLike, dtype: DType) -> Array:
    """Returns floating values rounded to nearest even in `dtype`, as float32 (float64 for fp64). fp8 saturates, even infinities."""
    name = dtype.name
    if name in ("fp32", "fp64"):
        return np.asarray(values, dtype=numpy_dtype(dtype))
    exact = np.require(values, np.float32, ("C", "W"))
    if name in _LARGEST:
        exact = np.clip(exact, -_LARGEST[name], _LARGEST[name])
    rounded: Array = torch.from_numpy(exact).to(_TORCH[name]).float().numpy()
    return rounded.reshape(np.shape(values))


def cast(values: Array, source: DType, target: DType) -> Array:
    """Returns the values in another dtype. As in Triton, floats are truncated to integers, and integers wrap."""
    if source.name == target.name:
        return values
    if is_float(target):
        return round_to(values, target)
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(numpy_dtype(target))


def to_bits(values: Array, dtype: DType) -> Array:
    """Returns bit patterns as signed integers of the dtype's width."""
    if not is_float(dtype):
        return np.ascontiguousarray(values)
    tensor = torch.from_numpy(np.require(values, requirements=("C", "W"))).to(_TORCH[dtype.name])
    bits: Array = tensor.view(_SIGNED[dtype.primitive_bitwidth]).numpy()
    return bits


def from_bits(bits: Array, dtype: DType) -> Array:
    """Returns the values of bit patterns. Raises GluonError if the widths differ."""
    if bits.dtype.itemsize * 8 != dtype.primitive_bitwidth:
        raise GluonError(f"bitcast of {bits.dtype} to {dtype.name}: the widths differ")
    if not is_float(dtype):
        return bits.view(numpy_dtype(dtype))
    tensor = torch.from_numpy(np.require(bits, requirements=("C", "W"))).view(_TORCH[dtype.name])
    values: Array = (tensor if dtype.name == "fp64" else tensor.float()).numpy()
    return values


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the complete storage of a tensor as a flat tensor of its dtype."""
    return torch.as_strided(tensor.detach(), (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def to_array(flat: torch.Tensor) -> Array:
    """Returns a copy of a flat tensor's values in the arrays of this file."""
    dtype = from_torch(flat.dtype)
    values: Array = (flat.float() if is_float(dtype) and dtype.name != "fp64" else flat).numpy()
    return values.astype(numpy_dtype(dtype), copy=True)
