"""FP8 tensors and quantizers under TransformerEngine's names, with one scale per tensor; its own are recognised by attributes.

x = data * scale_inv, scale = largest FP8 number / amax ("FP8 Formats for Deep Learning", Micikevicius et al., 2022). Current
scaling uses the amax of the tensor itself; delayed scaling uses an earlier scale, and records the amax for later scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexattn import fp8, fp8_ops
from flexattn.validation import FP8_DTYPES, describe

_BY_NAME = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Float8Tensor:
    """An FP8 tensor with one scale, under the names of TransformerEngine's `Float8Tensor`.

    _data: uint8, in the tensor's shape. _scale_inv: float32 [1]. _fp8_dtype: torch.float8_e4m3fn or float8_e5m2. dtype: the dtype
    that the tensor represents.
    """

    _data: Tensor
    _scale_inv: Tensor
    _fp8_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the data."""
        return self._data.shape

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self._data.device

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns data * scale_inv in `dtype`, or in the dtype that the tensor represents."""
        data = self._data.view(self._fp8_dtype)
        return (data.to(torch.float32) * self._scale_inv).to(self.dtype if dtype is None else dtype)


class Quantizer(Protocol):
    """Converter of a tensor to FP8; TransformerEngine's quantizers have the same signature."""

    def __call__(self, tensor: Tensor) -> Any: ...


class Float8Quantizer:
    """Quantizer of delayed scaling: multiplies by an external scale, and records the tensor's amax.

    Args:
        scale: float32 [1], read when a tensor is quantised.
        amax: float32 [1], updated to the largest magnitude since it was set to 0.
        fp8_dtype: torch.float8_e4m3fn, torch.float8_e5m2, or TransformerEngine's DType of the same name.

    Raises:
        TypeError, ValueError: if the dtype is another, or scale or amax is not a float32 tensor of one element.
    """

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: object) -> None:
        for name, t in (("scale", scale), ("amax", amax)):
            if not isinstance(t, Tensor) or t.dtype is not torch.float32 or t.numel() != 1:
                raise TypeError(f"{name} is {describe(t)}; accepted: a float32 tensor of shape (1,)")
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype_of(fp8_dtype)

    def __call__(self, tensor: Tensor) -> Float8Tensor:
        """Returns the tensor in FP8; values beyond the range saturate. It has at least 3 dims, with heads and head dim last."""
        return _quantize(tensor, self.dtype, self.scale.view(1), self.amax.view(1, 1))


class Float8CurrentScalingQuantizer:
    """Quantizer of current scaling: computes the scale from the tensor's own amax.

    Args:
        fp8_dtype: torch.float8_e4m3fn, torch.float8_e5m2, or TransformerEngine's DType of the same name.
        device: ignored; a tensor is quantised on its own device.

    Raises:
        ValueError: if the dtype is another.
    """

    def __init__(self, fp8_dtype: object, device: torch.device | str | None = None) -> None:
        self.dtype = fp8_dtype_of(fp8_dtype)

    def __call__(self, tensor: Tensor) -> Float8Tensor:
        """Returns the tensor in FP8. It has at least 3 dims, with heads and head dim last."""
        return _quantize(tensor, self.dtype, None, None)


def fp8_dtype_of(value: object) -> torch.dtype:
    """Returns the torch dtype for a torch dtype or TransformerEngine's DType, by its name; raises ValueError for others."""
    dtype = value if isinstance(value, torch.dtype) else _BY_NAME.get(str(getattr(value, "name", value)).rpartition(".")[2])
    if dtype not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype is {value!r}; accepted: torch.float8_e4m3fn, torch.float8_e5m2, or a DType of the same name")
    return dtype


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None, amax: Tensor | None) -> Float8Tensor:
    if not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
        raise TypeError(f"tensor is {describe(x)}; accepted: a float16, bfloat16 or float32 tensor with heads and head dim last")
    rows = x.detach().reshape(1, -1, *x.shape[-2:])
    settings = (str(dtype).removeprefix("torch."), "tensor", 0, 0, False)
    data, descale, _ = fp8_ops.quantize(rows, None, None, rows.shape[1], scale, amax, "bshd", *settings)
    return Float8Tensor(data.view(torch.uint8).view(x.shape), descale.view(1), dtype, x.dtype)


class InFp8(NamedTuple):
    """An FP8 tensor in the form that `flexattn.attention` accepts."""

    data: Tensor  # in a float8 dtype
    descale: Tensor  # float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns data * descale in `dtype`, for a tensor with one scale."""
        return (self.data.to(torch.float32) * self.descale.reshape(())).to(dtype)


def in_fp8(x: object, name: str) -> InFp8 | None:
    """Returns an FP8 tensor of any accepted kind, or None for a plain tensor; raises TypeError for anything else.

    Accepted are `Float8Tensor`, TransformerEngine's (by _data, _scale_inv and _fp8_dtype), and `flexattn.fp8.QuantizedTensor`.
    name: the argument's name.
    """
    if type(x) is Tensor:
        return None
    if isinstance(x, fp8.QuantizedTensor):
        if x.descale.numel() != 1:
            raise ValueError(
                f"{name} has descales of shape {tuple(x.descale.shape)}; accepted: one scale for the tensor, from a recipe with "
                "granularity 'tensor'"
            )
        return InFp8(x.data, x.descale)
    data, scale_inv, kind = (getattr(x, attribute, None) for attribute in ("_data", "_scale_inv", "_fp8_dtype"))
    if isinstance(data, Tensor) and isinstance(scale_inv, Tensor) and kind is not None:
        return InFp8(data.view(fp8_dtype_of(kind)), scale_inv)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {describe(x)}; accepted: a tensor, or a Float8Tensor")
    return None
