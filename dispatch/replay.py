"""Recording and replay of a backend's run of a call: its allocations, its launches and torch's own ops, without any decision.

A launcher depends only on shapes, strides, dtypes, numbers and the device. If a later call has the same ones (`flexattn.call_cache`
has the key), it can skip all work between its tensors and the driver. A dispatch mode records torch's ops. The backend reports its
launches and cuDNN's plans. If only kernels read a tensor, its address is enough, so such views are not made again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    leaves: list[Any]  # the op's arguments, with slots in place of tensors.
    tree: Any
    outs: tuple[int | None, ...]
    writes: bool


class _Launch(NamedTuple):
    prepared: Any
    tensors: list[int]


class _Run(NamedTuple):
    plan: Any  # cuDNN's plan.
    buffers: dict[int, int]


class _Zero(NamedTuple):
    slot: int
    size: int  # bytes.


class _Slot(int):
    """A tensor's number in a recorded op's arguments. Its type distinguishes it from integer arguments."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for which torch does not import Dynamo. The import would take at least half a second of the second call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, so that ops are not wrapped to exclude Dynamo. Dynamo compiles no frame inside a mode anyway."""
        return False


class _Recorder(Watch):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []  # all tensors are kept, so that no id and no memory is reused.
        self.aliases: list[Tensor] = []  # tensors that share the slot of another one.
        self.slot_of: dict[int, int] = {}
        self.made: set[int] = set()  # tensors that an op made. All others are inputs and constants.
        self.roots: dict[int, tuple[int, int]] = {}  # for each view its base tensor, and its offset there in bytes.
        self.steps: list[_Op | _Launch | _Run] = []
        self.trouble = ""
        self.inputs = [None if t is None else self.slot(t) for t in inputs]

    def slot(self, tensor: Tensor) -> int:
        slot = self.slot_of.get(id(tensor))
        if slot is None:
            slot = self.slot_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves, tree = tree_flatten((args, kwargs or {}))
        if func is _aten.detach.default and self.slot(args[0]) in self.made:  # there are no graphs here, so it is the same tensor.
            self.slot_of[id(out)] = self.slot(args[0])
            self.aliases.append(out)
            return out
        leaves = [_Slot(self.slot(x)) if isinstance(x, Tensor) else x for x in leaves]
        outs: list[int | None] = []
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                is_new = id(x) not in self.slot_of
                outs.append(self.slot(x))
                if is_new:
                    self.made.add(self.slot(x))
                    self._find_root(x, leaves)
            else:
                outs.append(None)
                if x is not None:
                    self.trouble = f"{func} returns a {type(x).__name__}"
        self.steps.append(_Op(func, leaves, tree, tuple(outs), func._schema.is_mutable))
        return out

    def root(self, slot: int) -> tuple[int, int]:
        """Returns the base tensor of a view, and the view's offset in bytes. Other tensors are their own base, with offset 0."""
        return self.roots.get(slot, (slot, 0))

    def _find_root(self, out: Tensor, leaves: Sequence[Any]) -> None:
        """Records the argument of an op that the result is a view of. In a replay, other tensors of its storage may move."""
        storage = out.untyped_storage()._cdata
        for x in leaves:
            if type(x) is _Slot and self.tensors[x].untyped_storage()._cdata == storage:
                root, offset = self.root(int(x))
                self.roots[self.slot(out)] = root, offset + out.data_ptr() - self.tensors[x].data_ptr()
                return

    def ran(self, plan: Any, buffers: dict[int, Tensor]) -> None:
        self.steps.append(_Run(plan, {uid: self.slot(t) for uid, t in buffers.items()}))

    def on_launch(self, *event: Any) -> None:
        """Records a launch (kernel, programs, arguments) or the execution of a plan (plan, buffers)."""
        if len(event) == 2:
            self.ran(*event)
        else:
            self.launched(*event)

    def launched(self, direct: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        if direct is None:
            self.trouble = "only Triton can launch a kernel of the call"
            return
        tensors = [self.slot(t) for t in direct.tensors_of(arguments)]
        self.steps.append(_Launch(direct.prepare(programs, arguments), tensors))


class Recording:
    """The steps that `record` recorded. `replay` is thread-safe, because each launch's buffer has a lock."""

    def __init__(self, recorder: _Recorder, results: Sequence[int | None], device: torch.device) -> None:
        self.device = device
        self.notes: Any = None  # notes on the numbers that vary, to make a recording with other numbers.
        tensors = recorder.tensors
        roots = [recorder.root(i) for i in range(len(tensors))]
        needed = {i for i in results if i is not None}  # slots that are needed as tensors.
        addressed: set[int] = set()  # slots that are needed only as addresses.
        replayed: list[Any] = []
        has_launches = any(isinstance(step, _Launch) for step in recorder.steps)
        places = _places(recorder)
        steps = [part for whole in recorder.steps for part in _parts(whole, tensors, has_launches)]
        born: dict[int | None, int] = {}  # for each tensor the step that makes it.
        for n, step in enumerate(steps):
            for i in step.outs if isinstance(step, _Op) else ():
                born.setdefault(i, n)
        views: dict[int, set[int]] = {}  # for each base tensor the views at other addresses that launches use.

        def view_steps(root: int) -> list[Any]:
            return [(_VIEW, places[view], (places[root], roots[view][1])) for view in views.pop(root, ())]

        for n, step in reversed(list(enumerate(steps))):
            if isinstance(step, _Zero):
                root, offset = roots[step.slot]
                replayed.append((_ZERO, None, (places[root], offset, step.size)))
                addressed.add(root)
            elif isinstance(step, _Launch):
                addressed |= {roots[i][0] for i in step.tensors}
                for i in step.tensors:
                    if roots[i][1]:
                        views.setdefault(roots[i][0], set()).add(i)
                begins = tuple(places[i if roots[i][1] else roots[i][0]] for i in step.tensors)
                replayed.append((_LAUNCH, step.prepared, begins))
            elif isinstance(step, _Run):
                needed |= set(step.buffers.values())
                buffers = tuple(places[slot] for slot in step.buffers.values())
                replayed.append((_CALL, _runner(step.plan, tuple(step.buffers), device), (buffers, ())))
            elif step.writes or any(i in needed or i in addressed for i in step.outs):
                for i in step.outs:
                    if i is not None and born[i] == n:
                        replayed += view_steps(i)
                new = [i for i in step.outs if i in recorder.made and born[i] == n]
                replayed.append(_op_step(step, new, tensors, needed, places))
        for root in list(views):  # inputs and constants.
            replayed += view_steps(root)
        replayed.reverse()
        self.prepared = [target for kind, target, _ in replayed if kind is _LAUNCH]
        self.steps = tuple((kind, None if kind is _LAUNCH else target, details) for kind, target, details in replayed)
        # Torch's operators and cuDNN's plans may contain a call's numbers, so numbers cannot vary if there are any.
        self.can_vary = all(kind in (_ALLOCATE, _VIEW, _ZERO, _LAUNCH) for kind, *_ in replayed)
        self.num_inputs = len(recorder.inputs)
        not_constant = {*recorder.inputs, *recorder.made}
        constants = [i for i in range(len(tensors)) if i not in not_constant and (i in needed or i in addressed)]
        self.constants = {places[i]: tensors[i] for i in constants}
        self.results = tuple(None if i is None else places[i] for i in results)
        self.allocate = _allocator(device)
        self.stream: Callable[[], int] = lambda: 0
        self.set_to_zero: Callable[[int, int, int], None] = lambda stream, address, size: None
        self.can_replay: Callable[[], bool] = lambda: True
        if has_launches:
            from flexattn.kernels_triton.runtime import direct, launch

            self.stream, self.can_replay, self.set_to_zero = launch.stream_of(device), launch.is_plain, direct.set_to_zero
        self.names = self._names()
        self.code = _compiled("\n    ".join(["def replay(inputs, addresses):", *self._lines()]))
        # A function from inputs like the recorded ones, and their addresses (0 for None), to results. If `can_replay()` is false,
        # do not call it: a watcher must see the launches, so Triton has to make them.
        self.replay = self._player()

    def with_numbers(self, values: Sequence[float]) -> Recording:
        """Returns the recording with other values for the numbers that vary. Call it only if `can_vary` is true."""
        recording = copy.copy(self)
        recording.prepared = [prepared.with_numbers(values) for prepared in self.prepared]
        recording.replay = recording._player()
        return recording

    def _names(self) -> dict[str, Any]:
        """Returns the names in the statements of `_lines`, without the launches."""
        names: dict[str, Any] = {"allocate": self.allocate, "current_stream": self.stream, "set_to_zero": self.set_to_zero}
        if self.device.type == "cuda":
            names |= {"device": self.device, "on": torch.cuda.device, "current_device": torch._C._cuda_getDevice}
        for n, (kind, target, details) in enumerate(self.steps):
            if kind is _CALL:
                names[f"call{n}"] = target
            elif kind is _ALLOCATE:
                names |= {f"shape{n}": details[0], f"strides{n}": details[1], f"dtype{n}": details[2]}
        for place, t in self.constants.items():
            names |= {f"t{place}": t, f"a{place}": t.data_ptr()}
        return names

    def _player(self) -> Callable[[Sequence[Tensor | None], Sequence[int]], tuple[Any, ...]]:
        """Returns a generated function that runs the steps with the launches of `prepared`. A loop would take twice its time."""
        names = {**self.names, **{f"launch{i}": prepared.launch for i, prepared in enumerate(self.prepared)}}
        exec(self.code, names)
        return names["replay"]  # type: ignore[no-any-return]

    def _lines(self) -> Iterator[str]:
        """Yields the statements of `replay`. t1 is the tensor at place 1, and a1 is its address."""
        if self.device.type == "cuda":
            yield f"if current_device() != {self.device.index}:"
            yield "    with on(device):"
            yield "        return replay(inputs, addresses)"
        launches = itertools.count()
        places = range(self.num_inputs)
        called = (place for kind, _, details in self.steps if kind is _CALL for place in details[0])
        if not {*places}.isdisjoint((*self.results, *called)):
            yield f"{_listed('t', places)} = inputs"
        if places:
            yield f"{_listed('a', places)} = addresses"
        if any(kind in (_LAUNCH, _ZERO) for kind, *_ in self.steps):
            yield "stream = current_stream()"
        for n, (kind, target, details) in enumerate(self.steps):
            if kind is _LAUNCH:
                yield f"launch{next(launches)}(stream, ({_listed('a', details)}))"
            elif kind is _ALLOCATE:
                yield f"t{target} = allocate(shape{n}, strides{n}, dtype{n})"
                yield f"a{target} = t{target}.data_ptr()"
            elif kind is _VIEW:
                yield f"a{target} = a{details[0]} + {details[1]}"
            elif kind is _ZERO:
                yield f"set_to_zero(stream, a{details[0]} + {details[1]}, {details[2]})"
            else:
                arguments, outputs = details
                yield f"{_listed('t', outputs)}{' = ' if outputs else ''}call{n}(({_listed('t', arguments)}))"
                yield from (f"a{place} = t{place}.data_ptr()" for place in outputs)
        yield f"return ({''.join('None, ' if place is None else f't{place}, ' for place in self.results)})"


def _listed(name: str, places: Iterable[int]) -> str:
    return "".join(f"{name}{place}, " for place in places)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<flexattn replay>", "exec")


def _places(recorder: _Recorder) -> dict[int, int]:
    """Returns the place of each slot in `replay`. Inputs have their first position, and other slots follow all inputs."""
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
    """Returns the result of `call`, a run of the backend, and its recording, or None if a recording cannot contain the run.

    inputs: every tensor that the call reads and that may differ in a replay. In a replay, they have the same alignment, and equal
        tensors stay equal.
    results_of: returns the tensors of a result, in a fixed order.
    also: another backend that runs a part of the call.
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
    recording = Recording(recorder, results, device)
    input_storages = {t.untyped_storage()._cdata for t in inputs if t is not None}
    if any(t.untyped_storage()._cdata in input_storages for t in recording.constants.values()):
        return result, None  # no operator made this part of an input (such as `x.data`), so its base tensor is unknown.
    return result, recording


def _runner(plan: Any, uids: tuple[int, ...], device: torch.device) -> Callable[[Sequence[Tensor]], None]:
    from flexattn.kernels_cudnn.execute import execute

    return lambda tensors: execute(plan, dict(zip(uids, tensors, strict=True)), device)


def _parts(step: _Op | _Launch | _Run, tensors: Sequence[Tensor], by_driver: bool) -> list[_Op | _Launch | _Run | _Zero]:
    """Returns a step in parts. If it writes zeros to new memory or to a dense tensor, the driver can do that part."""
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


def _op_step(
    op: _Op, new: Sequence[int | None], tensors: Sequence[Tensor], needed: set[int], places: dict[int, int]
) -> tuple[str, Any, Any]:
    """Returns the replay's step for an op, and adds the op's tensors to `needed`. An allocation does not need torch's op.

    new: the results that no earlier step made.
    """
    out = None if op.outs[0] is None else tensors[op.outs[0]]
    if op.func in _ALLOCATIONS and op.outs[0] is not None and out is not None:
        return _ALLOCATE, places[op.outs[0]], (tuple(out.shape), out.stride(), out.dtype)
    needed |= {int(x) for x in op.leaves if type(x) is _Slot}
    inputs = sorted({int(x) for x in op.leaves if type(x) is _Slot})
    order = {slot: i for i, slot in enumerate(inputs)}
    leaves = [_Slot(order[x]) if type(x) is _Slot else x for x in op.leaves]
    outs = tuple(i if i in new else None for i in op.outs)
    call = _caller(op._replace(leaves=leaves, outs=outs))
    return _CALL, call, (tuple(places[i] for i in inputs), tuple(places[i] for i in outs if i is not None))


def _caller(op: _Op) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Returns a function from an op's tensors, each once, to its new results. The op's slots are positions of tensors."""
    args, kwargs = tree_unflatten(op.leaves, op.tree)
    tensor_args = [(i, int(x)) for i, x in enumerate(args) if type(x) is _Slot]
    tensor_kwargs = [(name, int(x)) for name, x in kwargs.items() if type(x) is _Slot]
    is_flat = len(tensor_args) + len(tensor_kwargs) == sum(type(x) is _Slot for x in op.leaves)
    func, outs = op.func._op, op.outs

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        if is_flat:
            positional, named = list(args), dict(kwargs)
            for i, slot in tensor_args:
                positional[i] = tensors[slot]
            for name, slot in tensor_kwargs:
                named[name] = tensors[slot]
        else:
            positional, named = tree_unflatten([tensors[x] if type(x) is _Slot else x for x in op.leaves], op.tree)
        out = func(*positional, **named)
        results = out if isinstance(out, (tuple, list)) else (out,)
        return [t for slot, t in zip(outs, results, strict=True) if slot is not None]

    return call


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Returns torch's fastest empty_strided(shape, strides, dtype) on the current device of `device`'s kind."""
    guards = getattr(torch._C, "_dynamo", None)
    fastest = getattr(getattr(guards, "guards", None), f"_empty_strided_{device.type}", None)  # Inductor's code allocates with it.
    if fastest is not None:
        return fastest  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
