"""Shared memory: allocations, and their views, which kernels index, slice, permute and reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon.language import _layouts as layouts

from flexattn.emulator import context
from flexattn.emulator.barriers import MBarrier
from flexattn.emulator.dtypes import Array, DType, Layout, from_bits, is_float, numpy_dtype, poison, size_of
from flexattn.emulator.ordering import History, Rectangle, show_part
from flexattn.emulator.report import GluonError
from flexattn.emulator.values import Scalar, Tensor


class Allocation:
    """One gl.allocate_shared_memory. It starts as poison."""

    def __init__(self, name: str, dtype: DType, shape: Sequence[int], is_barrier: bool) -> None:
        self.name, self.is_barrier = name, is_barrier
        self.data: Array = np.full(shape, poison(dtype), numpy_dtype(dtype))
        self.written: Array = np.zeros(shape, np.bool_)
        self.history = History()
        self.mbarriers: dict[Rectangle, MBarrier] = {}
        self.nbytes = math.prod(shape) * size_of(dtype)


class SharedView:
    """A shared memory descriptor of the language.

    region: the part of the allocation that it covers, in the allocation's coordinates. The race detector uses it.
    dims: for each dimension of the view the dimension of the allocation, or None if a reshape made it.
    """

    def __init__(
        self, allocation: Allocation, data: Array, region: Rectangle, dtype: DType, layout: Layout, dims: Sequence[int | None]
    ) -> None:
        self.allocation, self.data, self.region = allocation, data, region
        self.dtype, self.layout, self.dims = dtype, layout, tuple(dims)

    @classmethod
    def whole(cls, allocation: Allocation, dtype: DType, layout: Layout) -> SharedView:
        shape = allocation.data.shape
        return cls(allocation, allocation.data, tuple((0, n) for n in shape), dtype, layout, range(len(shape)))

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.ndim

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def type(self) -> SharedView:
        return self

    @property
    def handle(self) -> SharedView:
        return self

    @property
    def written(self) -> Array:
        written: Array = self.allocation.written[tuple(slice(low, high) for low, high in self.region)]
        return written

    def __repr__(self) -> str:
        return show_part(self.allocation.name, self.region, self.allocation.data.shape)

    def index(self, index: Any) -> SharedView:
        if self.rank < 2 and not self.allocation.is_barrier:
            raise GluonError(f"index() of {self!r}, which has rank {self.rank}")
        return self._part(0, int(index), int(index) + 1, keep=self.rank == 1)

    def slice(self, start: int, length: int, dim: int = 0) -> SharedView:
        if any(isinstance(argument, Scalar) for argument in (start, length, dim)):
            raise GluonError(f"slice({start!r}, {length!r}, {dim!r}) of {self!r}; all three must be constants")
        layout = self.layout
        if isinstance(layout, layouts.NVMMASharedLayout) and layout.swizzle_byte_width:
            contiguous, size = 0 if layout.transposed else self.rank - 1, size_of(self.dtype)
            if dim == contiguous and (length * size % layout.swizzle_byte_width or start * size % layout.swizzle_byte_width):
                message = f"slice [{start}:{start + length}] of {self!r} cuts its {layout.swizzle_byte_width}-byte swizzled rows"
                context.program().find("slice-in-swizzle", message)
        return self._part(dim, start, start + length, keep=True)

    def permute(self, order: Sequence[int]) -> SharedView:
        order = [int(dim) for dim in order]
        layout = self.layout
        if isinstance(layout, layouts.NVMMASharedLayout) and order == [1, 0]:
            layout = _nvmma(layout, layout.rank, not layout.transposed, layout.cga_layout)
        dims = [self.dims[dim] for dim in order]
        return SharedView(self.allocation, self.data.transpose(order), self.region, self.dtype, layout, dims)

    def reshape(self, shape: Sequence[int]) -> SharedView:
        shape = [int(n) for n in shape]
        if math.prod(shape) != self.numel:
            raise GluonError(f"reshape of {self!r} from {self.shape} to {shape}")
        data = self.data.reshape(shape)
        if not np.shares_memory(data, self.allocation.data):
            raise NotImplementedError("reshape of a permuted view of shared memory")
        dims: list[int | None] = [None] * len(shape)
        if [n for n in shape if n != 1] == [n for n in self.shape if n != 1]:  # only dims of size 1 are added or removed.
            left = iter([dim for dim, n in zip(self.dims, self.shape, strict=True) if n != 1])
            dims = [None if n == 1 else next(left) for n in shape]
        layout = self.layout
        if isinstance(layout, layouts.NVMMASharedLayout) and layout.rank != len(shape):
            layout = _nvmma(layout, len(shape), layout.transposed, None)
        return SharedView(self.allocation, data, self.region, self.dtype, layout, dims)

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Layout) -> SharedView:
        if dtype.name != self.dtype.name:
            return RecastView.from_words(self, dtype, [int(n) for n in shape], layout)
        view = self.reshape(shape)
        view.layout = layout
        return view

    _reinterpret = reinterpret  # its name until triton 3.8

    def load(self, layout: Layout) -> Tensor:
        loaded: Tensor = context.program().shared_load(self, layout)
        return loaded

    def store(self, value: Tensor) -> None:
        context.program().shared_store(self, value)

    def _keep_alive(self) -> None:
        """Shared memory is never reused here."""

    def _part(self, dim: int, low: int, high: int, keep: bool) -> SharedView:
        if not 0 <= low < high <= self.shape[dim]:
            message = f"index {low} to {high - 1} along dimension {dim} of {self!r}, which has {self.shape[dim]}"
            context.program().fatal("shared-index", message)
        axis = self.dims[dim]
        if axis is None:
            raise NotImplementedError("a part of a reshaped view of shared memory")
        region = list(self.region)
        region[axis] = (region[axis][0] + low, region[axis][0] + high)
        data = self.data[(slice(None),) * dim + (slice(low, high) if keep else low,)]
        dims = self.dims if keep else self.dims[:dim] + self.dims[dim + 1 :]
        return SharedView(self.allocation, data, tuple(region), self.dtype, self.layout, dims)


class RecastView(SharedView):
    """A two-dimensional view of integers as narrower numbers, side by side along its columns. It is only loaded, not stored."""

    def __init__(self, source: SharedView, dtype: DType, layout: Layout, is_transposed: bool) -> None:
        self.source, self.dtype, self.layout, self.is_transposed = source, dtype, layout, is_transposed
        self.allocation, self.region = source.allocation, source.region
        self.dims = source.dims[::-1] if is_transposed else source.dims
        self.per_word = size_of(source.dtype) // size_of(dtype)

    @classmethod
    def from_words(cls, source: SharedView, dtype: DType, shape: list[int], layout: Layout) -> RecastView:
        per_word = size_of(source.dtype) // size_of(dtype)
        if is_float(source.dtype) or not per_word or source.rank != 2 or shape != [source.shape[0], source.shape[1] * per_word]:
            raise NotImplementedError(f"shared memory of {source.dtype.name}{source.shape} reinterpreted as {dtype.name}{shape}")
        return cls(source, dtype, layout, False)

    @property
    def data(self) -> Array:  # type: ignore[override]
        signed = np.ascontiguousarray(self.source.data).view(f"i{size_of(self.dtype)}")
        numbers = from_bits(signed, self.dtype)
        return numbers.T if self.is_transposed else numbers

    def index(self, index: Any) -> SharedView:
        raise NotImplementedError("index() of reinterpreted shared memory")

    def slice(self, start: int, length: int, dim: int = 0) -> SharedView:
        source_dim = 1 - dim if self.is_transposed else dim
        per_word = self.per_word if source_dim == 1 else 1
        if start % per_word or length % per_word:
            raise NotImplementedError(f"slice({start!r}, {length!r}, {dim!r}) of {self!r}, which cuts a word of {per_word} numbers")
        part = self.source.slice(start // per_word, length // per_word, source_dim)
        return RecastView(part, self.dtype, self.layout, self.is_transposed)

    def permute(self, order: Sequence[int]) -> SharedView:
        return RecastView(self.source, self.dtype, self.layout, self.is_transposed != (list(order) == [1, 0]))

    def reshape(self, shape: Sequence[int]) -> SharedView:
        raise NotImplementedError("reshape of reinterpreted shared memory")


def _nvmma(layout: Any, rank: int, transposed: bool, cga_layout: Any) -> Layout:
    return layouts.NVMMASharedLayout(
        layout.swizzle_byte_width, layout.element_bitwidth, rank, transposed, layout.fp4_padded, cga_layout
    )
