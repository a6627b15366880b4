"""Global memory: the buffers of torch tensors, and TMA descriptors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flexattn.emulator import context
from flexattn.emulator.dtypes import Array, DType, Layout, from_torch, is_float, numpy_dtype, round_to, size_of, storage, to_array
from flexattn.emulator.report import GluonError, Site, show

REDUCED = -1  # the writer of an element that reductions and atomics change, in any order.

MAX_RANK = 5  # a tensor map has 1 to 5 dimensions (PTX ISA, "Tensors").
MAX_BOX = 256  # elements of a box along a dimension (CUDA driver API, cuTensorMapEncodeTiled).
ALIGNMENT = 16  # bytes, for the base, all strides except for the innermost, and the innermost dimension of a box (see MAX_BOX).

_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


class GlobalBuffer:
    """The storage of torch tensors, as a flat array that is written back at the end of the launch.

    writers: the writer of each element: 0 for none, REDUCED, or a partition's number, which is unique in the grid.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = from_torch(tensor.dtype)
        self._storage = storage(tensor)
        self.data = to_array(self._storage)
        self.writers = np.zeros(self.data.shape, np.int32)
        self._dirty = False

    def write(self, index: Array, values: Array, writer: int, site: Site, who: str) -> None:
        """Writes elements. A second writer of an element is a finding, unless it resets an int32 counter of atomics."""
        before = self.writers[index]
        is_counter = self.dtype.name == "int32" and before.size and bool((before == REDUCED).all())
        if not is_counter:
            others = before[(before != 0) & (before != writer)]
            if others.size:
                first = int(others.flat[0])
                context.program().find(
                    "global-write-race",
                    f"{who} overwrites {others.size} global elements that {_name_writer(first)} wrote; stored at {show(site)}",
                    site,
                )
            self.writers[index] = writer
        self.data[index] = values
        self._dirty = True

    def flush(self) -> None:
        """Writes the changed elements back. The rest of the storage may belong to tensors of another dtype."""
        if self._dirty:
            written = torch.from_numpy(self.writers != 0)
            self._storage[written] = torch.from_numpy(self.data).to(self._storage.dtype)[written]


def writer_number(program: int, partition: int) -> int:
    return 32 * program + partition + 1


def _name_writer(number: int) -> str:
    if number == REDUCED:
        return "a reduction"
    program, partition = divmod(number - 1, 32)
    return f"partition {partition} of the program that ran as number {program}"


class Shape(tuple[int, ...]):
    """A shape that can be added to lists and tuples, like sequences inside of kernels."""

    __slots__ = ()

    def __add__(self, other: Any) -> Shape:
        return Shape((*self, *other))

    def __radd__(self, other: Any) -> Shape:
        return Shape((*other, *self))

    def __getitem__(self, index: Any) -> Any:
        part = tuple.__getitem__(self, index)
        return Shape(part) if isinstance(index, slice) else part


class BlockType:
    """The fields of `descriptor.block_type` in a kernel."""

    def __init__(self, dtype: DType, shape: Sequence[int]) -> None:
        self.element_ty = self.scalar = dtype
        self.shape = Shape(shape)
        self.nbytes = math.prod(shape) * size_of(dtype)


class Descriptor:
    """A TMA descriptor for boxes of `block_shape` in a strided tensor in a buffer.

    An address is base + sum(coordinate * stride) modulo 2**64 bytes. So a tensor may exceed its buffer if no box is read or written
    there. triton/tools/ragged_tma.py relies on that: its boxes end at the end of a sequence.

    Raises GluonError if cuTensorMapEncodeTiled would refuse the descriptor.
    """

    def __init__(
        self,
        buffer: GlobalBuffer,
        offset: int,
        shape: Sequence[Any],
        strides: Sequence[Any],
        block_shape: Sequence[Any],
        layout: Layout,
        padding: str = "zero",
    ) -> None:
        self.buffer, self.dtype, self.layout, self.padding = buffer, buffer.dtype, layout, padding
        self.offset, self.shape, self.strides = int(offset), [int(n) for n in shape], [int(n) for n in strides]
        self.block_type = BlockType(self.dtype, [int(n) for n in block_shape])
        self._relative: dict[tuple[int, ...], tuple[Array, int]] = {}
        ranks, size = {len(self.shape), len(self.strides), len(self.block_shape)}, size_of(self.dtype)
        if len(ranks) != 1 or not ranks <= set(range(1, MAX_RANK + 1)):
            raise GluonError(
                f"a descriptor of shape {self.shape}, strides {self.strides}, block {self.block_shape}; ranks are 1 to 5"
            )
        if self.strides[-1] != 1 or any(n * size % ALIGNMENT for n in (self.offset, *self.strides[:-1])):
            raise GluonError(
                f"a descriptor with strides {self.strides} and offset {self.offset} of {size}-byte elements; the last stride must "
                f"be 1, the others and the offset multiples of {ALIGNMENT} bytes"
            )
        if any(n > MAX_BOX for n in self.block_shape[:-1]) or self.block_shape[-1] * size < ALIGNMENT:
            raise GluonError(
                f"a descriptor with block {list(self.block_shape)}; at most {MAX_BOX} elements in a dimension, {ALIGNMENT} bytes "
                "or more in the last"
            )
        if padding == "nan" and not is_float(self.dtype):
            raise GluonError(f"a descriptor of {self.dtype.name} that pads with NaN")

    @property
    def block_shape(self) -> Shape:
        return self.block_type.shape

    @property
    def nbytes(self) -> int:
        return self.block_type.nbytes

    nbytes_per_cta = nbytes

    @property
    def handle(self) -> Descriptor:
        return self

    def lies_outside(self, coord: Sequence[int]) -> bool:
        """Returns whether no element of the box at `coord` is in the tensor."""
        return any(c <= -block or c >= n for c, block, n in zip(coord, self.block_shape, self.shape, strict=True))

    def overrun(self, coord: Sequence[int]) -> str | None:
        """Returns a text about a box at `coord` that exceeds the buffer, or None if it does not."""
        _, start, extents = self._clip(coord)
        if min(extents) <= 0:
            return None
        _, furthest = self._steps(extents)
        size = self.buffer.data.size
        if start >= 0 and start + furthest < size:
            return None
        return (
            f"the box at {list(coord)} of a descriptor of shape {self.shape}, strides {self.strides} reaches elements {start} to "
            f"{start + furthest} of a buffer of {size}"
        )

    def read(self, coord: Sequence[int]) -> Array:
        """Returns the box at `coord`. Elements outside the tensor are 0, or NaN if the padding is "nan"."""
        box = np.full(self.block_shape, np.nan if self.padding == "nan" else 0, numpy_dtype(self.dtype))
        inside, index = self._locate(coord)
        if index is not None:
            box[inside] = self.buffer.data[index]
        return box

    def write(self, coord: Sequence[int], box: Array, reduction: str | None, writer: int, site: Site, who: str) -> None:
        """Writes the box at `coord`. Elements outside the tensor are dropped."""
        inside, index = self._locate(coord)
        if index is None:
            return
        values = box[inside]
        if reduction is not None:
            values = _REDUCTIONS[reduction](self.buffer.data[index], values)
            values = round_to(values, self.dtype) if is_float(self.dtype) else values
        self.buffer.write(index, values, writer if reduction is None else REDUCED, site, who)

    def _locate(self, coord: Sequence[int]) -> tuple[tuple[slice, ...], Array | None]:
        """Returns the part of the box in the tensor, and its elements' places in the buffer.

        The places are None if the part is empty or exceeds the buffer.
        """
        inside, start, extents = self._clip(coord)
        if min(extents) <= 0 or self.overrun(coord) is not None:
            return inside, None
        return inside, self._steps(extents)[0] + start

    def _clip(self, coord: Sequence[int]) -> tuple[tuple[slice, ...], int, tuple[int, ...]]:
        """Returns the part of the box in the tensor, the place of its first element in the buffer, and its extents."""
        ranges = [(max(c, 0), min(c + block, n)) for c, block, n in zip(coord, self.block_shape, self.shape, strict=True)]
        inside = tuple(slice(low - c, high - c) for (low, high), c in zip(ranges, coord, strict=True))
        wrap = 2**64 // size_of(self.dtype)
        start = sum(low * stride for (low, _), stride in zip(ranges, self.strides, strict=True)) % wrap
        start = self.offset + (start - wrap if start >= wrap // 2 else start)
        return inside, start, tuple(high - low for low, high in ranges)

    def _steps(self, extents: tuple[int, ...]) -> tuple[Array, int]:
        """Returns each element's place relative to the first element of the box, and the largest one."""
        if extents not in self._relative:
            steps: Array = np.zeros((1,) * len(extents), np.int64)
            for dim, (n, stride) in enumerate(zip(extents, self.strides, strict=True)):
                along = np.arange(n, dtype=np.int64) * (stride if n > 1 else 0)
                steps = steps + along.reshape([-1 if i == dim else 1 for i in range(len(extents))])
            self._relative[extents] = steps, int(steps.max())
        return self._relative[extents]
