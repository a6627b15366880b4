"""Tensor memory: allocations, and the descriptors that kernels use to access them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from flexattn.emulator import context
from flexattn.emulator.dtypes import Array, DType, Layout, from_bits, to_bits
from flexattn.emulator.ordering import History, Rectangle, show_part
from flexattn.emulator.report import GluonError
from flexattn.emulator.values import Scalar, Tensor

_POISON = 0x7FFF7FFF  # a NaN in 32 bits, and two NaNs in 16 bits.
_COLUMN_BITS = 32


class TensorAllocation:
    """One allocate_tensor_memory, as 32-bit columns of rows. It starts as poison."""

    def __init__(self, name: str, dtype: DType, shape: Sequence[int], layout: Layout) -> None:
        if not isinstance(layout, TensorMemoryLayout):
            raise NotImplementedError(f"tensor memory with the layout {layout}")
        self.name, self.shape = name, (*shape[:-1], columns_of(shape[-1], dtype, layout))
        self.bits: Array = np.full(self.shape, _POISON, np.uint32)
        self.written: Array = np.zeros(self.shape, np.bool_)
        self.history = History()

    @property
    def columns(self) -> int:
        """Returns the number of columns of tensor memory that it uses."""
        return math.prod(self.shape[:-2]) * self.shape[-1]


def columns_of(elements: int, dtype: DType, layout: Any) -> int:
    """Returns the number of 32-bit columns of a row of elements. Raises GluonError if they do not fill the last column."""
    if layout.col_stride != 1:
        raise NotImplementedError(f"tensor memory with a col_stride of {layout.col_stride}")
    bits = elements * int(dtype.primitive_bitwidth)
    if bits % _COLUMN_BITS:
        raise GluonError(f"{elements} elements of {dtype.name} do not fill the last column of tensor memory")
    return bits // _COLUMN_BITS


@lru_cache
def rows_of_threads(dtype: DType, shape: tuple[int, ...], layout: object, warps: int) -> Layout:
    """Returns the register layout of a tile of tensor memory with one row per thread."""
    if hasattr(blackwell, "get_tmem_reg_layout"):  # in Triton up to 3.7.
        return blackwell.get_tmem_reg_layout(dtype, shape, layout, warps)
    return blackwell.tensor_memory_descriptor_type(dtype, shape, layout, shape).get_reg_layout(warps)


class TensorView:
    """A tensor memory descriptor of the language.

    region: the part of the allocation that it covers, in the allocation's coordinates. The race detector uses it.
    """

    def __init__(self, allocation: TensorAllocation, region: Rectangle, dtype: DType, shape: Sequence[int], layout: Layout) -> None:
        self.allocation, self.region = allocation, region
        self.dtype, self.shape, self.layout = dtype, list(shape), layout

    @classmethod
    def whole(cls, allocation: TensorAllocation, dtype: DType, shape: Sequence[int], layout: Layout) -> TensorView:
        return cls(allocation, tuple((0, n) for n in allocation.shape), dtype, shape, layout)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def type(self) -> TensorView:
        return self

    def __repr__(self) -> str:
        return show_part(self.allocation.name, self.region, self.allocation.shape)

    @property
    def _place(self) -> tuple[slice, ...]:
        return tuple(slice(low, high) for low, high in self.region)

    @property
    def is_written(self) -> bool:
        return bool(self.allocation.written[self._place].all())

    @property
    def data(self) -> Array:
        """Returns a copy of the values."""
        bits = np.ascontiguousarray(self.allocation.bits[self._place])
        width = int(self.dtype.primitive_bitwidth)
        values = from_bits(bits.view(np.int32 if width == _COLUMN_BITS else np.int16), self.dtype)
        return values.reshape(self.shape)

    def write(self, values: Array) -> None:
        place = self._place
        bits = np.ascontiguousarray(to_bits(values, self.dtype)).view(np.uint32)
        self.allocation.bits[place] = bits.reshape(self.allocation.bits[place].shape)
        self.allocation.written[place] = True

    def index(self, index: Any) -> TensorView:
        if self.rank < 3:
            raise GluonError(f"index() of {self!r}, which has rank {self.rank}")
        number = int(index)
        if not 0 <= number < self.shape[0]:
            context.program().fatal("shared-index", f"index {number} of {self!r}, which has {self.shape[0]}")
        low = self.region[0][0] + number
        return TensorView(self.allocation, ((low, low + 1), *self.region[1:]), self.dtype, self.shape[1:], self.layout)

    def slice(self, start: Any, length: Any) -> TensorView:
        if any(isinstance(argument, Scalar) for argument in (start, length)):
            raise GluonError(f"slice({start!r}, {length!r}) of {self!r}; both must be constants")
        if not 0 <= start < start + length <= self.shape[-1]:
            raise GluonError(f"slice({start}, {length}) of {self!r}, which has {self.shape[-1]} columns")
        layout = dataclasses.replace(self.layout, block=(self.layout.block[0], min(self.layout.block[1], length)))
        begin, size = (columns_of(n, self.dtype, self.layout) for n in (start, length))
        low = self.region[-1][0] + begin
        region = (*self.region[:-1], (low, low + size))
        return TensorView(self.allocation, region, self.dtype, [*self.shape[:-1], length], layout)

    def reinterpret(self, dtype: DType, shape: Sequence[Any], layout: Layout) -> TensorView:
        sizes = [int(n) for n in shape]
        low, high = self.region[-1]
        if sizes[:-1] != self.shape[:-1] or columns_of(sizes[-1], dtype, layout) != high - low:
            raise GluonError(f"{self!r}, {self.dtype.name}{self.shape}, reinterpreted as {dtype.name}{sizes}")
        return TensorView(self.allocation, self.region, dtype, sizes, layout)

    _reinterpret = reinterpret  # its name in Triton up to 3.8.

    def get_reg_layout(self, num_warps: int | None = None, instr_variant: str = "32x32b") -> Layout:
        if instr_variant != "32x32b":
            raise NotImplementedError(f"get_reg_layout of {instr_variant}")
        warps = context.program().current.warps if num_warps is None else int(num_warps)
        return rows_of_threads(self.dtype, tuple(self.shape), self.layout, warps)

    def load(self, layout: Layout = None) -> Tensor:
        loaded: Tensor = context.program().tensor_load(self, self.get_reg_layout() if layout is None else layout)
        return loaded

    def store(self, value: Tensor, pred: object = True) -> None:
        context.program().tensor_store(self, value, pred)
