"""A call of the Triton backend as data: its buffers, its launches in order, and torch's own operators between them.

A plan is recorded on meta tensors for a target GPU, so that another framework can own the memory and launch the kernels. `replay`
records a call on tensors with memory, so that torch can repeat it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from flexattn.dispatch.replay import Watch

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
_ZEROS = frozenset((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero_.default))


class PlanError(NotImplementedError):
    """Raised if a plan cannot represent a call."""


class Device(NamedTuple):
    """The target GPU of a plan. This machine may not have it."""

    capability: tuple[int, int]
    processors: int  # streaming multiprocessors.
    has_large_l2: bool = True  # see `runtime.launch.has_large_l2`.

    @property
    def architecture(self) -> int:
        """Returns the compute capability as a number, such as 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


def large_l2_by_name(name: str) -> bool:
    """Returns `has_large_l2` from a GPU's name. H100s and H800s have the small L2 of sm_90."""
    return not any(small in name for small in ("H100", "H800"))


class Buffer(NamedTuple):
    """Memory that no other buffer shares."""

    size: int  # elements.
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

    func: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[View, ...]


class Kernel(NamedTuple):
    """A launch, and a buffer for each tensor in its arguments. Each tensor begins at the start of its buffer."""

    launch: Any  # kernels_triton.runtime.launch.Launch.
    buffers: tuple[int, ...]


class Plan(NamedTuple):
    """A call: its inputs' buffers, its steps, and its results."""

    buffers: tuple[Buffer, ...]
    inputs: tuple[int | None, ...]  # the buffer of each input, or None if it has no elements.
    steps: tuple[Zero | Op | Kernel, ...]
    results: tuple[View, ...]
    updated: frozenset[int] = frozenset()  # buffers of inputs that a step may write.

    def written(self) -> frozenset[int]:
        """Returns the buffers that a step may write: all except for inputs that are not updated."""
        return frozenset(range(len(self.buffers))) - frozenset(i for i in self.inputs if i is not None) | self.updated


class _Watch(Watch):  # type: ignore[no-untyped-call]
    """Records torch's operators, each with the number of launches before it."""

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self.launches = launches
        self.events: list[Any] = []  # (launches before, func, arguments, keywords, results).
        self.alive: list[Any] = []  # tensors that must live, so that no storage's address is reused.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.alive.append((args, kwargs, out))
        if func not in _ALLOCATIONS and not _is_view(func, args, out):
            self.events.append((len(self.launches), func, args, kwargs, out))
        return out


def _is_view(func: Any, args: Sequence[Any], out: Any) -> bool:
    if func._schema.is_mutable or not args or not isinstance(args[0], Tensor):
        return False
    storage = _storage(args[0])
    return all(isinstance(t, Tensor) and _storage(t) == storage for t in (out if isinstance(out, (tuple, list)) else (out,)))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]


def record(run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], device: Device, updated: Sequence[int] = ()) -> Plan:
    """Returns the plan of `run`, a function of the inputs, which are contiguous tensors on the meta device.

    updated: the inputs that `run` may write.

    Raises PlanError if two inputs share memory, if a kernel's tensor does not begin at the start of a buffer, or if a tensor of
    torch's operators has gaps.
    """
    from flexattn.kernels_triton.runtime.launch import pretended_device, recorded_launches

    if len({_storage(t) for t in inputs}) < len(inputs):
        raise PlanError("two inputs of a call share their memory; pass tensors that do not share memory")
    pretended = pretended_device(device.architecture, device.processors, has_large_l2=device.has_large_l2)
    with torch.no_grad(), pretended, recorded_launches() as launches:
        watch = _Watch(launches)
        with watch:
            results = list(run())
    ops = [event[1:] for event in watch.events]
    tensors = [*inputs, *results, *(t for launch in launches for t in tensors_of(launch.arguments))]
    tensors += [t for op in ops if op[0] not in _ZEROS for t in tree_flatten(op)[0] if isinstance(t, Tensor)]
    memory = _Memory(tensors)
    steps: list[Zero | Op | Kernel] = []
    count = 0
    for before, func, args, kwargs, out in [*watch.events, (len(launches), None, (), {}, ())]:
        steps += (Kernel(x, tuple(memory.start_of(t, x) for t in tensors_of(x.arguments))) for x in launches[count:before])
        count = before
        if func in _ZEROS:
            steps += map(Zero, memory.parts_of(out))
        elif func is not None:
            in_memory = functools.partial(tree_map_only, Tensor, memory.view_of)
            outs = out if isinstance(out, (tuple, list)) else (out,)
            steps.append(Op(func, in_memory(tuple(args)), in_memory(kwargs), tuple(memory.view_of(t) for t in outs)))
    places = tuple(memory.view_of(t).buffer for t in inputs)
    writes = frozenset(place for i in updated if (place := places[i]) is not None)
    return Plan(tuple(memory.buffers), places, tuple(steps), tuple(memory.view_of(t) for t in results), writes)


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the tensors in a launch's flat arguments in order, including those in descriptors and tuples."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif hasattr(x, "block_shape"):  # a descriptor.
            yield x.base
        elif isinstance(x, tuple):
            yield from tensors_of(x)


def _extent(t: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the byte after its last one. t must have elements."""
    begin = int(t.storage_offset()) * t.element_size()
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (int(last) + 1) * t.element_size()


class _Memory:
    """Buffers for tensors. Each buffer is a part of a storage that no tensor crosses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.buffers: list[Buffer] = []
        self.parts: dict[int, list[tuple[int, int, int]]] = {}  # for each storage: (first byte, byte after the last, buffer).
        extents_by_storage: dict[int, list[tuple[int, int, torch.dtype]]] = {}
        for t in tensors:
            if t.numel():
                extents_by_storage.setdefault(_storage(t), []).append((*_extent(t), t.dtype))
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
        return next((buffer, begin - first) for first, end, buffer in self.parts[_storage(t)] if first <= begin < end)

    def parts_of(self, t: Tensor) -> Iterator[View]:
        """Yields the parts of a contiguous tensor that are in buffers, as flat views. Other parts are used by no other tensor."""
        begin, end = _extent(t) if t.numel() else (0, 0)
        for first, last, place in self.parts.get(_storage(t), ()):
            low, high, dtype = max(begin, first), min(end, last), self.buffers[place].dtype
            if low < high:
                yield View(place, (low - first) // dtype.itemsize, ((high - low) // dtype.itemsize,), dtype)

    def start_of(self, t: Tensor, launch: Any) -> int:
        if not t.numel():
            raise PlanError(f"{launch.kernel.__name__} gets a tensor of no elements")
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
