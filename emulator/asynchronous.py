"""Asynchronous operations: cp.async, wgmma, tcgen05, TMA loads and TMA stores. The scheduler decides when they act."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from flexattn.emulator.barriers import MBarrier
from flexattn.emulator.dtypes import Array, DType, Layout, poison
from flexattn.emulator.memory import Descriptor, writer_number
from flexattn.emulator.ordering import Actor, Knowledge, overlap
from flexattn.emulator.report import GluonError, Site, show
from flexattn.emulator.shared import SharedView
from flexattn.emulator.tensor import TensorView
from flexattn.emulator.values import Tensor

if TYPE_CHECKING:
    from flexattn.emulator.scheduler import Partition


class Operation(Protocol):
    """An operation in flight."""

    done: bool

    def act(self) -> None:
        """Executes one step: the complete operation, or one part of a load."""


class _Numbered(Operation, Protocol):
    number: int
    site: Site


Queued = TypeVar("Queued", bound=_Numbered)


@dataclass
class Queue(Generic[Queued]):
    """A partition's operations of one kind, numbered from 1. A wait gives the number of operations that may be outstanding."""

    actor: Actor
    issued: int = 0
    waited: int = 0
    last: Site = ()  # the site of the last issue.
    pending: list[Queued] = field(default_factory=list)

    def retire(self, outstanding: int) -> list[Queued]:
        """Completes all operations except for the `outstanding` last ones, and returns them."""
        last = self.issued - outstanding
        retired = [operation for operation in self.pending if operation.number <= last]
        for operation in retired:
            if not operation.done:
                operation.act()
        self.pending = [operation for operation in self.pending if operation.number > last]
        self.waited = max(self.waited, last)
        return retired


def _product(a: Any, b: Any, sees_old_data: bool) -> Array:
    """Returns a b in fp64, in which a row's sum does not depend on its place in the tile. In fp32 it may, depending on the BLAS."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return np.full_like(product, np.nan) if sees_old_data else product


@dataclass(eq=False)
class Wgmma:
    """An asynchronous matrix product. Until a wait retires it, it may read its operands in shared memory at any moment."""

    number: int
    a: Tensor | SharedView
    b: SharedView
    accumulator: Tensor | Accumulator
    use_accumulator: bool
    sees_old_data: bool
    site: Site
    done: bool = False
    result: Array = field(init=False)

    def act(self) -> None:
        product = _product(self.a, self.b, self.sees_old_data)
        if self.use_accumulator:
            before = self.accumulator
            product = product + (before.operation.result if isinstance(before, Accumulator) else before.data)
        self.result, self.done = product.astype(np.float32), True


class Accumulator:
    """The result of a wgmma in flight. It may be the accumulator of the next wgmma, or an argument of warpgroup_mma_wait."""

    def __init__(self, operation: Wgmma) -> None:
        self.operation = operation
        self.dtype: DType = operation.accumulator.dtype
        self.layout: Layout = operation.accumulator.layout
        self.shape: list[int] = [operation.a.shape[0], operation.b.shape[1]]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise GluonError(f"the result of a wgmma is used before warpgroup_mma_wait; issued at {show(self.operation.site)}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = to = _refuse

    @property
    def data(self) -> Array:
        self._refuse()


@dataclass(eq=False)
class Product:
    """A tcgen05.mma. Until a later commit arrives, it may read its operands and write its accumulator at any moment.

    The products of a partition act in the order of issue.
    """

    number: int
    a: SharedView | TensorView
    b: SharedView
    accumulator: TensorView
    use_accumulator: bool
    sees_old_data: bool
    site: Site
    done: bool = False

    def writes(self, view: object) -> bool:
        """Returns whether it writes a part of the view."""
        target = self.accumulator
        return isinstance(view, TensorView) and view.allocation is target.allocation and overlap(view.region, target.region)

    def act(self) -> None:
        product = _product(self.a, self.b, self.sees_old_data)
        if self.use_accumulator:
            product = product + self.accumulator.data
        self.accumulator.write(product.astype(np.float32))
        self.done = True


class Commit:
    """A tcgen05.commit: an arrival at an mbarrier when all earlier products of the partition have ended."""

    def __init__(self, number: int, partition: Partition, queue: Actor, barrier: MBarrier, site: Site) -> None:
        self.number, self.site, self.done = number, site, False
        self.name, self.line = partition.name, partition.line
        self._barrier = barrier
        self._knowledge = Knowledge(partition.knowledge)  # the events before the products were issued, and the products.
        self._knowledge.reach(queue, number)
        self._knowledge.offered[queue] = number  # a commit is also a fence.

    def release_to(self, other: Knowledge) -> None:
        other.join(self._knowledge)

    def act(self) -> None:
        self._barrier.commit(self)
        self.done = True


class TmaLoad:
    """A TMA load. Its destination is poison until it lands. It lands in one to three parts of rows, and each counts its bytes."""

    def __init__(
        self,
        partition: Partition,
        descriptor: Descriptor,
        coord: list[int],
        barrier: MBarrier,
        target: SharedView,
        site: Site,
        rng: random.Random,
    ) -> None:
        self.partition, self.site, self.phase, self.done = partition, site, barrier.phase, False
        self._barrier, self._target, self._descriptor, self._coord = barrier, target, descriptor, coord
        self._axis = next((dim for dim, n in enumerate(target.shape) if n > 1), 0)
        rows = target.shape[self._axis]
        cuts = sorted(rng.sample(range(1, rows), min(rng.randint(0, 2), rows - 1))) if rows > 1 else []
        self._parts = list(zip([0, *cuts], [*cuts, rows], strict=True))
        self._row_bytes = descriptor.nbytes // rows
        self._box: Array | None = None

    def act(self) -> None:
        if self._box is None:
            self._box = self._descriptor.read(self._coord)
        low, high = self._parts.pop(0)
        rows = (slice(None),) * self._axis + (slice(low, high),)
        self._target.data[rows] = self._box[rows]
        self.done = not self._parts
        if self.done:
            self._target.written[...] = True
        self._barrier.land(self._row_bytes * (high - low), self)


class AsyncCopy:
    """A cp.async of a tile. Its destination is poison until it lands, at the latest when a wait covers its group."""

    def __init__(self, number: int, target: SharedView, source: Array, offset: Array, active: Array, site: Site) -> None:
        self.number, self.site, self.done = number, site, False  # number: of its group
        self._target, self._source, self._offset, self._active = target, source, offset, active

    def act(self) -> None:
        elements = self._source[np.where(self._active, self._offset, 0)]
        self._target.data[...] = np.where(self._active, elements, np.zeros((), elements.dtype))
        self._target.written[...] = True
        self.done = True


@dataclass(eq=False)
class TmaStore:
    """A TMA store or reduction. Until a store_wait covers it, it may read its source at any moment."""

    number: int
    partition: Partition
    program: int  # its number in the grid.
    descriptor: Descriptor
    coord: list[int]
    source: SharedView
    reduction: str | None
    sees_old_data: bool
    site: Site
    done: bool = False

    def act(self) -> None:
        box = self.source.data
        if self.sees_old_data:
            box = np.full_like(box, poison(self.descriptor.dtype))
        writer = writer_number(self.program, self.partition.number)
        self.descriptor.write(self.coord, box, self.reduction, writer, self.site, self.partition.name)
        self.done = True
