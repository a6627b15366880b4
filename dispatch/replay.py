"""A backend's run of a call, recorded once and replayed: the allocations, the launches and torch's own ops, and no decision.

What a launcher does depends on nothing but the shapes, strides, dtypes, numbers and device that it is given, so a call that is like
an earlier one in all of these (`flexattn.call_cache` has the key) can skip everything between its tensors and the driver. Taken
down are torch's ops, by a dispatch mode, and the launches and cuDNN's plans, which the backend tells. Of a tensor that only kernels
see, the address is enough: views are not made again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from flexattn.dispatch.select import Backend

R = TypeVar("R")
_aten = torch.ops.aten
_ZEROS = frozenset((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default))
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)


class _Op(NamedTuple):
    func: Any
    leaves: list[Any]  # the launch's arguments, with slots for tensors
    tree: Any
    outs: tuple[int | None, ...]
    writes: bool


class _Launch(NamedTuple):
    prepared: Any
    tensors: list[int]


class _Run(NamedTuple):
    plan: Any  # cuDNN's plan
    buffers: dict[int, int]


class _Zero(NamedTuple):
    slot: int
    size: int  # bytes


class _Slot(int):
    """A tensor's number in a recorded op's arguments, told apart from their integers by its type."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for which torch does not import Dynamo at its first op: half a second or more of a process's second call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is wrapped to keep Dynamo out, which compiles no frame that runs inside a mode anyway."""
        return False


class _Recorder(Watch):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []  # all of them, so that none is freed, and no other gets its id or its memory
        self.also: list[Tensor] = []  # those that stand for another
        self.slot_of: dict[int, int] = {}
        self.made: set[int] = set()  # by an op; the others are inputs and constants
        self.steps: list[_Op | _Launch | _Run] = []
        self.trouble = ""
        self.inputs = [None if t is None else self.slot(t) for t in inputs]

    def slot(self, tensor: Tensor) -> int:
        found = self.slot_of.get(id(tensor))
        if found is None:
            found = self.slot_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves, tree = tree_flatten((args, kwargs or {}))
        if func is _aten.detach.default and self.slot(args[0]) in self.made:  # the same tensor, as nothing here has a graph
            self.slot_of[id(out)] = self.slot(args[0])
            self.also.append(out)
            return out
        leaves = [_Slot(self.slot(x)) if isinstance(x, Tensor) else x for x in leaves]
        outs: list[int | None] = []
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                is_new = id(x) not in self.slot_of
                outs.append(self.slot(x))
                self.made |= {self.slot(x)} if is_new else set()
            else:
                outs.append(None)
                if x is not None:
                    self.trouble = f"{func} gives a {type(x).__name__}"
        self.steps.append(_Op(func, leaves, tree, tuple(outs), func._schema.is_mutable))
        return out

    def ran(self, plan: Any, buffers: dict[int, Tensor]) -> None:
        self.steps.append(_Run(plan, {uid: self.slot(t) for uid, t in buffers.items()}))

    def on_launch(self, *what: Any) -> None:
        """Records a launch (kernel, programs, arguments) or the execution of a plan (plan, buffers)."""
        if len(what) == 2:
            self.ran(*what)
        else:
            self.launched(*what)

    def launched(self, direct: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        if direct is None:
            self.trouble = "a kernel can be launched by Triton alone"
            return
        tensors = [self.slot(t) for t in direct.tensors_of(arguments)]
        self.steps.append(_Launch(direct.prepare(programs, arguments), tensors))


class Recording:
    """The steps that `record` wrote down. `replay` is safe in threads, as each launch's buffer has a lock."""

    def __init__(self, recorder: _Recorder, results: Sequence[int | None], device: torch.device) -> None:
        self.device = device
        self.notes: Any = None  # on the numbers that vary, for who asks for a recording with other ones
        tensors = recorder.tensors
        roots = [_root(i, tensors, recorder) for i in range(len(tensors))]
        needed = {i for i in results if i is not None}  # as tensors
        addressed: set[int] = set()
        kept: list[Any] = []
        has_launches = any(isinstance(step, _Launch) for step in recorder.steps)
        places = _places(recorder)
        steps = [part for whole in recorder.steps for part in _parts(whole, tensors, has_launches)]
        born: dict[int | None, int] = {}  # the step that makes a tensor
        for n, step in enumerate(steps):
            for i in step.outs if isinstance(step, _Op) else ():
                born.setdefault(i, n)
        views: dict[int, set[int]] = {}  # by tensor: those that begin further on in it and are launched with

        def view_steps(root: int) -> list[Any]:
            return [(_VIEW, places[view], (places[root], roots[view][1])) for view in views.pop(root, ())]

        for n, step in reversed(list(enumerate(steps))):
            if isinstance(step, _Zero):
                root, offset = roots[step.slot]
                kept.append((_ZERO, None, (places[root], offset, step.size)))
                addressed.add(root)
            elif isinstance(step, _Launch):
                addressed |= {roots[i][0] for i in step.tensors}
                for i in step.tensors:
                    if roots[i][1]:
                        views.setdefault(roots[i][0], set()).add(i)
                begins = [places[i if roots[i][1] else roots[i][0]] for i in step.tensors]
                kept.append((_LAUNCH, step.prepared, _getter(begins)))
            elif isinstance(step, _Run):
                needed |= set(step.buffers.values())
                buffers = tuple((uid, places[slot]) for uid, slot in step.buffers.items())
                kept.append((_CALL, _runner(step.plan, buffers, device), None))
            elif step.writes or any(i in needed or i in addressed for i in step.outs):
                for i in step.outs:
                    if i is not None and born[i] == n:
                        kept += view_steps(i)
                kept.append(_op_step(step, tensors, needed, places))
        for root in list(views):  # inputs and constants
            kept += view_steps(root)
        kept.reverse()
        self.prepared = [what for kind, what, _ in kept if kind is _LAUNCH]
        self.steps = tuple((kind, what.launch if kind is _LAUNCH else what, how) for kind, what, how in kept)
        # Without torch's own operators and plans, which may have numbers in them that nobody sees.
        self.can_vary = all(kind in (_ALLOCATE, _VIEW, _ZERO, _LAUNCH) for kind, *_ in kept)
        self.num_inputs = len(recorder.inputs)
        given = set(recorder.inputs)
        others = [i for i in range(len(tensors)) if i not in given]  # in the order of their places, which come after the inputs'
        is_constant = [i not in recorder.made and (i in needed or i in addressed) for i in others]
        self.constants = {places[i]: tensors[i] for i, kept_alive in zip(others, is_constant, strict=True) if kept_alive}
        self.more = [tensors[i] if kept_alive else None for i, kept_alive in zip(others, is_constant, strict=True)] + [None]
        self.more_addresses = [0 if t is None else t.data_ptr() for t in self.more]
        self.size = self.num_inputs + len(self.more)
        self.results = _getter([self.size - 1 if i is None else places[i] for i in results])
        self.allocate = _allocator(device)
        self.stream: Callable[[], int] = lambda: 0
        self.set_to_zero: Callable[[int, int, int], None] = lambda stream, address, size: None
        self.can_replay: Callable[[], bool] = lambda: True
        if has_launches:
            from flexattn.kernels_triton.runtime import direct, launch

            self.stream, self.can_replay, self.set_to_zero = launch.stream_of(device), launch.is_plain, direct.set_to_zero
        self.current_device = torch._C._cuda_getDevice if device.type == "cuda" else lambda: device.index

    def with_numbers(self, values: Sequence[float]) -> Recording:
        """Returns the recording of a call with other numbers in the place of those that vary; only where `can_vary`."""
        made = copy.copy(self)
        made.prepared = [prepared.with_numbers(values) for prepared in self.prepared]
        launches = iter(made.prepared)
        made.steps = tuple((kind, next(launches).launch if kind is _LAUNCH else what, how) for kind, what, how in self.steps)
        return made

    def replay(self, inputs: Sequence[Tensor | None], addresses: Sequence[int]) -> tuple[Any, ...]:
        """The results, for inputs like those that it was recorded with; `addresses` are theirs, 0 for None.

        Not to be called where `can_replay()` is false: when someone wants to see launches, which Triton then has to make.
        """
        if self.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.replay(inputs, addresses)
        tensors: list[Any] = [*inputs, *self.more]
        places = [*addresses, *self.more_addresses]
        stream = self.stream()
        allocate = self.allocate
        for kind, what, how in self.steps:
            if kind is _LAUNCH:
                what(stream, how(places))
            elif kind is _ALLOCATE:
                tensors[what] = made = allocate(*how)
                places[what] = made.data_ptr()
            elif kind is _VIEW:
                places[what] = places[how[0]] + how[1]
            elif kind is _ZERO:
                self.set_to_zero(stream, places[how[0]] + how[1], how[2])
            else:
                what(tensors, places)
        return self.results(tensors)


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    return itemgetter(*places) if len(places) > 1 else lambda found: tuple(found[place] for place in places)


def _places(recorder: _Recorder) -> dict[int, int]:
    """Returns the position of each slot in `replay`: an input where it is given first, the others after all inputs."""
    places: dict[int, int] = {}
    for i, slot in enumerate(recorder.inputs):
        if slot is not None:
            places.setdefault(slot, i)
    others = (slot for slot in range(len(recorder.tensors)) if slot not in places)
    return {**places, **{slot: len(recorder.inputs) + i for i, slot in enumerate(others)}}


_ALLOCATE, _VIEW, _ZERO, _LAUNCH, _CALL = "allocate", "view", "zero", "launch", "call"


def record(
    backend: Backend,
    call: Callable[[], R],
    inputs: Sequence[Tensor | None],
    results_of: Callable[[R], Sequence[Tensor | None]],
    device: torch.device,
    also: Backend | None = None,
) -> tuple[R, Recording | None]:
    """Returns what `call`, a run of the backend, gives, and a recording of it, or None where it did what none can hold.

    inputs: every tensor that the call reads and that another call may have another of; aligned alike then, and the same where they
    are the same here.
    results_of: the tensors of what it gives, in an order.
    also: another backend that runs a part of it.
    """
    recorder = _Recorder(inputs)
    with (
        recorder,
        backend.watched(recorder.on_launch),
        contextlib.nullcontext() if also is None else also.watched(recorder.on_launch),
    ):
        result = call()
    results = [None if t is None else recorder.slot_of.get(id(t), -1) for t in results_of(result)]
    if recorder.trouble or -1 in results or all(isinstance(step, _Op) for step in recorder.steps):
        return result, None
    return result, Recording(recorder, results, device)


def _root(slot: int, tensors: Sequence[Tensor], recorder: _Recorder) -> tuple[int, int]:
    """(the first tensor with the same memory, how many bytes further this one begins); an input is its own."""
    tensor = tensors[slot]
    if slot in recorder.made:
        storage = tensor.untyped_storage()
        for i, other in enumerate(tensors[:slot]):
            if other.untyped_storage()._cdata == storage._cdata:
                return i, tensor.data_ptr() - other.data_ptr()
    return slot, 0


def _runner(plan: Any, buffers: tuple[tuple[int, int], ...], device: torch.device) -> Callable[[list[Any], list[int]], None]:
    from flexattn.kernels_cudnn.execute import execute

    return lambda tensors, places: execute(plan, {uid: tensors[place] for uid, place in buffers}, device)


def _parts(step: _Op | _Launch | _Run, tensors: Sequence[Tensor], by_driver: bool) -> list[_Op | _Launch | _Run | _Zero]:
    """A step; zeros of new memory, or of a tensor without gaps, as the driver makes them."""
    if not by_driver or not isinstance(step, _Op) or not step.outs or step.outs[0] is None:
        return [step]
    out = tensors[step.outs[0]]
    is_dense = out.numel() > 0 and out.permute(sorted(range(out.dim()), key=out.stride, reverse=True)).is_contiguous()
    zero = _Zero(step.outs[0], out.numel() * out.element_size())
    if step.func in _ZEROS and is_dense:
        return [step._replace(func=_aten.empty.memory_format), zero]
    if step.func is _aten.zero_.default and is_dense:
        return [zero]
    return [step]


def _op_step(op: _Op, tensors: Sequence[Tensor], needed: set[int], places: dict[int, int]) -> tuple[str, Any, Any]:
    """An op to be played; its tensors join those `needed`. For an allocation torch's op is not needed."""
    out = None if op.outs[0] is None else tensors[op.outs[0]]
    if op.func in _ALLOCATIONS and op.outs[0] is not None and out is not None:
        return _ALLOCATE, places[op.outs[0]], (tuple(out.shape), out.stride(), out.dtype)
    needed |= {int(x) for x in op.leaves if type(x) is _Slot}
    leaves = [_Slot(places[x]) if type(x) is _Slot else x for x in op.leaves]
    return _CALL, _caller(op._replace(leaves=leaves, outs=tuple(None if i is None else places[i] for i in op.outs))), None


def _caller(op: _Op) -> Callable[[list[Any], list[int]], None]:
    """Returns a closure that replays one op on the tensors at the given positions."""
    args, kwargs = tree_unflatten(op.leaves, op.tree)
    own_args = [(i, int(x)) for i, x in enumerate(args) if type(x) is _Slot]
    own_kwargs = [(name, int(x)) for name, x in kwargs.items() if type(x) is _Slot]
    is_flat = len(own_args) + len(own_kwargs) == sum(type(x) is _Slot for x in op.leaves)
    func, outs = op.func._op, op.outs

    def call(tensors: list[Any], places: list[int]) -> None:
        if is_flat:
            given, named = list(args), dict(kwargs)
            for i, slot in own_args:
                given[i] = tensors[slot]
            for name, slot in own_kwargs:
                named[name] = tensors[slot]
        else:
            given, named = tree_unflatten([tensors[x] if type(x) is _Slot else x for x in op.leaves], op.tree)
        out = func(*given, **named)
        for into, made in zip(outs, out if isinstance(out, (tuple, list)) else (out,), strict=True):
            if into is not None:
                tensors[into], places[into] = made, made.data_ptr()

    return call


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """empty_strided(shape, strides, dtype) on the current device of `device`'s kind, the quickest that torch has."""
    guards = getattr(torch._C, "_dynamo", None)
    quick = getattr(getattr(guards, "guards", None), f"_empty_strided_{device.type}", None)  # what Inductor's code allocates with
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
