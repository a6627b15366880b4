"""A call of the Triton backend as data: its buffers, its launches in order, and torch's own operators between them.

A plan is recorded on meta tensors for a target GPU, so that another framework can own the memory and launch the kernels. `replay`
records a call on tensors with memory, so that torch can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.compat import storage_of
from flexattn.dispatch import recorder
from flexattn.dispatch.recorder import Launched, Recorder, first_byte

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.launch import Launch


class PlanError(NotImplementedError):
    """Raised if a plan cannot represent a call."""


class Device(NamedTuple):
    """The target GPU of a plan. This machine may not have it."""

    capability: tuple[int, int]
    processors: int  # streaming multiprocessors.
    has_large_l2: bool = True  # see `runtime.device.has_large_l2`.

    @property
    def architecture(self) -> int:
        """Returns the compute capability as a number, such as 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


def large_l2_by_name(name: str) -> bool:
    """Returns `has_large_l2` from a GPU's name. H100s and H800s have the small L2 of sm_90."""
    return not any(small in name for small in ("H100", "H800"))


class Buffer(NamedTuple):
    """Memory that no other buffer shares."""

    size: int  # elements; 0 if a kernel gets its address, but neither reads nor writes there.
    dtype: torch.dtype


class View(NamedTuple):
    """A tensor without gaps in a buffer. If `buffer` is None, it has no elements."""

    buffer: int | None
    offset: int  # elements.
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()  # its dims from the outermost to the innermost in memory, or () if it is contiguous.


class Zero(NamedTuple):
    """A step that sets memory to 0."""

    view: View


class Op(NamedTuple):
    """A step that runs one of torch's own operators. Tensors in its arguments are Views."""

    func: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: dict[str, object]
    results: tuple[View, ...]


class Kernel(NamedTuple):
    """A launch, and a buffer for each tensor in its arguments. Each tensor begins at the start of its buffer."""

    launch: Launch
    buffers: tuple[int, ...]


class Plan(NamedTuple):
    """A call: its inputs' buffers, its steps, and its results."""

    buffers: tuple[Buffer, ...]
    inputs: tuple[int | None, ...]  # the buffer of each input, or None if it has no elements.
    steps: tuple[Zero | Op | Kernel, ...]
    results: tuple[View, ...]
    updated: frozenset[int] = frozenset()  # buffers of inputs that a step may write.

    def written(self) -> frozenset[int]:
        """Returns the buffers that a step may write: all with elements, except for inputs that are not updated."""
        with_elements = frozenset(i for i, buffer in enumerate(self.buffers) if buffer.size)
        return with_elements - frozenset(i for i in self.inputs if i is not None) | self.updated


def record(run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], device: Device, updated: Sequence[int] = ()) -> Plan:
    """Returns the plan of `run`, a function of the inputs, which are contiguous tensors on the meta device.

    updated: the inputs that `run` may write.

    Raises PlanError if two inputs share memory, if a kernel's tensor does not begin at the start of a buffer, or if a tensor of
    torch's operators has gaps.
    """
    from flexattn.kernels_triton.runtime.device import pretended_device
    from flexattn.kernels_triton.runtime.launch import redirected_launches

    if len({storage_of(t) for t in inputs}) < len(inputs):
        raise PlanError("two inputs of a call share their memory; pass tensors that do not share memory")
    recorded = Recorder(inputs)
    pretended = pretended_device(device.architecture, device.processors, has_large_l2=device.has_large_l2)
    with torch.no_grad(), pretended, redirected_launches(recorded.on_planned_launch), recorded:
        results = [recorded.slot(t) for t in run()]
    if recorded.trouble:
        raise PlanError(f"{recorded.trouble}, which is no tensor; such a call has no plan")
    tensors = recorded.tensors
    steps = [step for step in recorded.steps if not isinstance(step, recorder.Op) or not (step.allocates or recorded.is_view(step))]
    used = [*range(len(inputs)), *results]
    for step in steps:
        if isinstance(step, Launched):
            used += step.tensors
        elif isinstance(step, recorder.Op) and not step.sets_to_zero:
            used += [*step.slots, *(i for i in step.outs if i is not None)]
    memory = _Memory([tensors[i] for i in used])
    places = tuple(memory.view_of(t).buffer for t in inputs)
    parts = tuple(part for step in steps for part in _parts(step, tensors, memory))
    return Plan(
        buffers=tuple(memory.buffers),
        inputs=places,
        steps=parts,
        results=tuple(memory.view_of(tensors[i]) for i in results),
        updated=frozenset(place for i in updated if (place := places[i]) is not None),
    )


def _parts(step: recorder.Step, tensors: Sequence[Tensor], memory: _Memory) -> Iterator[Zero | Op | Kernel]:
    """Yields the steps of a plan for a recorded step: one for each buffer that it sets to 0, or itself."""
    if isinstance(step, Launched):
        yield Kernel(step.target, tuple(memory.start_of(tensors[i], step.target) for i in step.tensors))
        return
    assert isinstance(step, recorder.Op)  # cuDNN does not run here.
    outs = [tensors[i] for i in step.outs if i is not None]
    if step.sets_to_zero:
        yield from map(Zero, memory.parts_of(outs[0]))
    else:
        views = {i: memory.view_of(tensors[i]) for i in step.slots}
        yield Op(step.func, *step.arguments(views), tuple(map(memory.view_of, outs)))


def _extent(t: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the byte after its last one. t must have elements."""
    begin = first_byte(t)
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (int(last) + 1) * t.element_size()


class _Memory:
    """Buffers for tensors. Each buffer is a part of a storage that no tensor crosses, or stands for empty tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.buffers: list[Buffer] = []
        self.empty: dict[int, int] = {}  # for the storage of an empty tensor that a kernel gets: its buffer.
        self.parts: dict[int, list[tuple[int, int, int]]] = {}  # for each storage: (first byte, byte after the last, buffer).
        extents_by_storage: dict[int, list[tuple[int, int, torch.dtype]]] = {}
        for t in tensors:
            if t.numel():
                extents_by_storage.setdefault(storage_of(t), []).append((*_extent(t), t.dtype))
        for storage, extents in extents_by_storage.items():
            parts: list[tuple[int, int, torch.dtype]] = []
            for begin, end, dtype in sorted(extents, key=lambda extent: (extent[0], -extent[1])):
                if parts and begin < parts[-1][1]:
                    parts[-1] = (parts[-1][0], max(end, parts[-1][1]), parts[-1][2])
                else:
                    parts.append((begin, end, dtype))
            self.parts[storage] = []
            for begin, end, dtype in parts:
                self.parts[storage].append((begin, end, len(self.buffers)))
                self.buffers.append(Buffer(-((begin - end) // dtype.itemsize), dtype))

    def _place(self, t: Tensor) -> tuple[int, int]:
        """Returns the buffer of a tensor, and the tensor's first byte in it."""
        begin, _ = _extent(t)
        return next((buffer, begin - first) for first, end, buffer in self.parts[storage_of(t)] if first <= begin < end)

    def parts_of(self, t: Tensor) -> Iterator[View]:
        """Yields the parts of a contiguous tensor that are in buffers, as flat views. Other parts are used by no other tensor."""
        begin, end = _extent(t) if t.numel() else (0, 0)
        for first, last, place in self.parts.get(storage_of(t), ()):
            low, high, dtype = max(begin, first), min(end, last), self.buffers[place].dtype
            if low < high:
                yield View(place, (low - first) // dtype.itemsize, ((high - low) // dtype.itemsize,), dtype)

    def start_of(self, t: Tensor, launch: Launch) -> int:
        """Returns the buffer whose address a kernel gets. Each storage of empty tensors has one of its own."""
        if not t.numel():
            if storage_of(t) not in self.empty:
                self.empty[storage_of(t)] = len(self.buffers)
                self.buffers.append(Buffer(0, t.dtype))
            return self.empty[storage_of(t)]
        buffer, offset = self._place(t)
        if offset:
            raise PlanError(f"{launch.kernel.__name__} gets a tensor that begins within another's memory")
        return buffer

    def view_of(self, t: Tensor) -> View:
        if not t.numel():
            return View(None, 0, tuple(t.shape), t.dtype)
        order: tuple[int, ...] = ()
        if not t.is_contiguous():
            order = tuple(sorted(range(t.dim()), key=lambda dim: (-t.stride()[dim], -t.shape[dim])))
            if not t.permute(order).is_contiguous():
                raise PlanError(f"a tensor of shape {tuple(t.shape)} has gaps in memory: its strides are {t.stride()}")
        buffer, offset = self._place(t)
        return View(buffer, offset // t.element_size(), tuple(t.shape), t.dtype, order)
