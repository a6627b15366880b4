"""FP8 tensors and quantizers under TransformerEngine's names, with one scale for a tensor; its own are known by their attributes.

x = data * scale_inv, scale = largest FP8 number / amax ("FP8 Formats for Deep Learning", Micikevicius et al., 2022). Current
scaling takes the amax of the tensor itself; delayed scaling takes a scale that is given, and notes the amax for later ones.
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

    _data: uint8, of the tensor's shape. _scale_inv: float32 [1]. _fp8_dtype: torch.float8_e4m3fn or float8_e5m2. dtype: what it
    stands for.
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
        """Returns data * scale_inv in `dtype`, or in the dtype that the tensor stands for."""
        data = self._data.view(self._fp8_dtype)
        return (data.to(torch.float32) * self._scale_inv).to(self.dtype if dtype is None else dtype)


class Quantizer(Protocol):
    """Makes an FP8 tensor of another; TransformerEngine's quantizers are called so too."""

    def __call__(self, tensor: Tensor) -> Any: ...


class Float8Quantizer:
    """A quantizer of delayed scaling: multiplies with a scale that is given, and notes the tensor's amax.

    Args:
        scale: float32 [1], read when a tensor is quantised.
        amax: float32 [1], in which the largest magnitude since it was last set to 0 is kept.
        fp8_dtype: torch.float8_e4m3fn, torch.float8_e5m2, or TransformerEngine's DType of such a name.

    Raises:
        TypeError, ValueError: another dtype, or a scale or amax that is no float32 tensor of one element.
    """

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: Any) -> None:
        for name, t in (("scale", scale), ("amax", amax)):
            if not isinstance(t, Tensor) or t.dtype is not torch.float32 or t.numel() != 1:
                raise TypeError(f"{name} is {describe(t)}; accepted: a float32 tensor of shape (1,)")
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype_of(fp8_dtype)

    def __call__(self, tensor: Tensor) -> Float8Tensor:
        """Returns the tensor, of 3 dims or more with the head dim last, in FP8; what is beyond the range saturates."""
        return _quantized(tensor, self.dtype, self.scale.view(1), self.amax.view(1, 1))


class Float8CurrentScalingQuantizer:
    """A quantizer of current scaling: takes the scale from the tensor's own amax.

    Args:
        fp8_dtype: torch.float8_e4m3fn, torch.float8_e5m2, or TransformerEngine's DType of such a name.
        device: accepted, and without effect: a tensor is quantised where it is.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, fp8_dtype: Any, device: torch.device | str | None = None) -> None:
        self.dtype = fp8_dtype_of(fp8_dtype)

    def __call__(self, tensor: Tensor) -> Float8Tensor:
        """Returns the tensor, of 3 dims or more with the head dim last, in FP8."""
        return _quantized(tensor, self.dtype, None, None)


def fp8_dtype_of(value: Any) -> torch.dtype:
    """Returns the torch dtype of a torch dtype or of TransformerEngine's DType, by its name; raises ValueError for others."""
    found = value if isinstance(value, torch.dtype) else _BY_NAME.get(str(getattr(value, "name", value)).rpartition(".")[2])
    if found not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype is {value!r}; accepted: torch.float8_e4m3fn, torch.float8_e5m2, or a DType of such a name")
    return found


def _quantized(x: Tensor, dtype: torch.dtype, scale: Tensor | None, amax: Tensor | None) -> Float8Tensor:
    if not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
        raise TypeError(f"tensor is {describe(x)}; accepted: a float16, bfloat16 or float32 tensor with heads and head dim last")
    rows = x.detach().reshape(1, -1, *x.shape[-2:])
    how = (str(dtype).removeprefix("torch."), "tensor", 0, 0, False)
    data, descale, _ = fp8_ops.quantize(rows, None, None, rows.shape[1], scale, amax, "bshd", *how)
    return Float8Tensor(data.view(torch.uint8).view(x.shape), descale.view(1), dtype, x.dtype)


class InFp8(NamedTuple):
    """An FP8 tensor as `flexattn.attention` takes it."""

    data: Tensor  # in a float8 dtype
    descale: Tensor  # float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns data * descale in `dtype`, of a tensor with one scale."""
        return (self.data.to(torch.float32) * self.descale.reshape(())).to(dtype)


def in_fp8(x: Any, name: str) -> InFp8 | None:
    """Returns an FP8 tensor of any of the accepted kinds, None for a plain tensor; raises TypeError for anything else.

    Accepted are `Float8Tensor`, TransformerEngine's (by _data, _scale_inv and _fp8_dtype), and `flexattn.fp8.QuantizedTensor`.
    name: the argument's.
    """
    if type(x) is Tensor:
        return None
    if isinstance(x, fp8.QuantizedTensor):
        if x.descale.numel() != 1:
            raise ValueError(
                f"{name} has descales of shape {tuple(x.descale.shape)}; accepted: one scale for the tensor, as of a recipe with "
                "granularity 'tensor'"
            )
        return InFp8(x.data, x.descale)
    data, scale_inv, kind = (getattr(x, attribute, None) for attribute in ("_data", "_scale_inv", "_fp8_dtype"))
    if isinstance(data, Tensor) and isinstance(scale_inv, Tensor) and kind is not None:
        return InFp8(data.view(fp8_dtype_of(kind)), scale_inv)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {describe(x)}; accepted: a tensor, or a Float8Tensor")
    return None
