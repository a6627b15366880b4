"""Recording and replay of a backend's run of a call: its allocations, its launches and torch's own ops, without any decision.

A launcher depends only on shapes, strides, dtypes, numbers and the device. If a later call has the same ones (`flexattn.call_cache`
has the key), it can skip all work between its tensors and the driver. `recorder` records torch's operators, and the backend reports
its launches and cuDNN's plans. If only kernels read a tensor, its address is enough, so such views are not made again.
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

from flexattn import compat
from flexattn.compat import storage_of
from flexattn.dispatch.recorder import Executed, Launched, Op, Recorder, Slot, Step
from flexattn.dispatch.select import Backend

R = TypeVar("R")


class _Zero(NamedTuple):
    slot: int
    size: int  # bytes.


class Recording:
    """The steps that `record` recorded. `replay` is thread-safe, because each launch's buffer has a lock."""

    def __init__(
        self, recorder: Recorder, results: Sequence[int | None], device: torch.device, numbers: Sequence[float] | None = None
    ) -> None:
        """numbers: the call's numbers (`runtime.call_numbers`) if only launches use them, otherwise None."""
        self.device = device
        tensors = recorder.tensors
        roots = [recorder.root(i) for i in range(len(tensors))]
        needed = {i for i in results if i is not None}  # slots that are needed as tensors.
        addressed: set[int] = set()  # slots that are needed only as addresses.
        replayed: list[Any] = []
        has_launches = any(isinstance(step, Launched) for step in recorder.steps)
        places = _places(recorder)
        steps = [part for whole in recorder.steps for part in _parts(whole, tensors, has_launches)]
        born: dict[int | None, int] = {}  # for each tensor the step that makes it.
        for n, step in enumerate(steps):
            for i in step.outs if isinstance(step, Op) else ():
                born.setdefault(i, n)
        views: dict[int, set[int]] = {}  # for each base tensor the views at other addresses that launches use.

        def view_steps(root: int) -> list[object]:
            return [(_VIEW, places[view], (places[root], roots[view][1])) for view in views.pop(root, ())]

        for n, step in reversed(list(enumerate(steps))):
            if isinstance(step, _Zero):
                root, offset = roots[step.slot]
                replayed.append((_ZERO, None, (places[root], offset, step.size)))
                addressed.add(root)
            elif isinstance(step, Launched):
                addressed |= {roots[i][0] for i in step.tensors}
                for i in step.tensors:
                    if roots[i][1]:
                        views.setdefault(roots[i][0], set()).add(i)
                begins = tuple(places[i if roots[i][1] else roots[i][0]] for i in step.tensors)
                replayed.append((_LAUNCH, step.target, begins))
            elif isinstance(step, Executed):
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
        # Torch's operators and cuDNN's plans may contain a call's numbers, which only launches have by name.
        has_names = numbers is not None and all(kind is not _CALL for kind, *_ in replayed)
        self.numbers = numbers if has_names and all(launch.has_numbers(numbers) for launch in self.prepared) else None
        self.num_inputs = len(recorder.inputs)
        not_constant = {*recorder.inputs, *recorder.made}
        constants = [i for i in range(len(tensors)) if i not in not_constant and (i in needed or i in addressed)]
        self.constants = {places[i]: tensors[i] for i in constants}
        self.results = tuple(None if i is None else places[i] for i in results)
        self.allocate = _allocator(device)
        self.stream: Callable[[], int] = lambda: 0
        self.set_to_zero: Callable[[int, int, int], None] = lambda stream, address, size: None
        self.can_replay: Callable[[], bool] = lambda: True
        self.choices: Callable[[Sequence[float]], object] = tuple  # all that launchers ask about numbers
        if has_launches:
            from flexattn.kernels_triton.runtime import call_numbers, direct, launch

            self.choices = call_numbers.choices
            self.stream, self.can_replay, self.set_to_zero = launch.stream_of(device), launch.is_plain, direct.set_to_zero
        self.names = self._names()
        self.code = _compiled("\n    ".join(["def replay(inputs, addresses):", *self._lines()]))
        # A function from inputs like the recorded ones, and their addresses (0 for None), to results. If `can_replay()` is false,
        # do not call it: a watcher must see the launches, so Triton has to make them.
        self.replay = self._player()

    def with_numbers(self, numbers: Sequence[float]) -> Recording | None:
        """Returns the recording of a call that differs only in its numbers, or None if it cannot be derived from this one."""
        if self.numbers is None:
            return None
        if len(numbers) != len(self.numbers) or self.choices(numbers) != self.choices(self.numbers):
            return None
        recording = copy.copy(self)
        recording.numbers = numbers
        recording.prepared = [prepared.with_numbers(numbers) for prepared in self.prepared]
        recording.replay = recording._player()
        return recording

    def _names(self) -> dict[str, object]:
        """Returns the names in the statements of `_lines`, without the launches."""
        names: dict[str, Any] = {"allocate": self.allocate, "current_stream": self.stream, "set_to_zero": self.set_to_zero}
        if self.device.type == "cuda":
            names |= {"device": self.device, "on": torch.cuda.device, "current_device": compat.current_device}
        for n, (kind, target, details) in enumerate(self.steps):
            if kind is _CALL:
                names[f"call{n}"] = target
            elif kind is _ALLOCATE:
                names |= {f"shape{n}": details[0], f"strides{n}": details[1], f"dtype{n}": details[2]}
        for place, t in self.constants.items():
            names |= {f"t{place}": t, f"a{place}": t.data_ptr()}
        return names

    def _player(self) -> Callable[[Sequence[Tensor | None], Sequence[int]], tuple[object, ...]]:
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


def _places(recorder: Recorder) -> dict[int, int]:
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
    numbers: Sequence[float] | None = None,
) -> tuple[R, Recording | None]:
    """Returns the result of `call`, a run of the backend, and its recording, or None if a recording cannot contain the run.

    inputs: every tensor that the call reads and that may differ in a replay. In a replay, they have the same alignment, and equal
        tensors stay equal.
    results_of: returns the tensors of a result, in a fixed order.
    also: another backend that runs a part of the call.
    numbers: the call's numbers if a recording with other numbers may be derived, see `Recording.with_numbers`.
    """
    recorder = Recorder(inputs)
    with (
        recorder,
        backend.watched(recorder.on_launch),
        contextlib.nullcontext() if also is None else also.watched(recorder.on_launch),
    ):
        result = call()
    results = [None if t is None else recorder.slot_of.get(id(t), -1) for t in results_of(result)]
    if recorder.trouble or -1 in results or all(isinstance(step, Op) for step in recorder.steps):
        return result, None
    recording = Recording(recorder, results, device, numbers)
    input_storages = {storage_of(t) for t in inputs if t is not None}
    if any(storage_of(t) in input_storages for t in recording.constants.values()):
        return result, None  # no operator made this part of an input (such as `x.data`), so its base tensor is unknown.
    return result, recording


def _runner(plan: Any, uids: tuple[int, ...], device: torch.device) -> Callable[[Sequence[Tensor]], None]:
    from flexattn.kernels_cudnn.execute import execute

    return lambda tensors: execute(plan, dict(zip(uids, tensors, strict=True)), device)


def _parts(step: Step, tensors: Sequence[Tensor], by_driver: bool) -> list[Step | _Zero]:
    """Returns a step in parts. If it writes zeros to new memory or to a dense tensor, the driver can do that part."""
    if not (by_driver and isinstance(step, Op) and step.sets_to_zero) or step.outs[0] is None:
        return [step]
    out = tensors[step.outs[0]]
    if not out.numel() or not out.permute(sorted(range(out.dim()), key=out.stride, reverse=True)).is_contiguous():
        return [step]
    allocation, zero = step.as_allocation(), _Zero(step.outs[0], out.numel() * out.element_size())
    return [zero] if allocation is None else [allocation, zero]


def _op_step(
    op: Op, new: Sequence[int | None], tensors: Sequence[Tensor], needed: set[int], places: dict[int, int]
) -> tuple[str, object, object]:
    """Returns the replay's step for an op, and adds the op's tensors to `needed`. An allocation does not need torch's op.

    new: the results that no earlier step made.
    """
    if op.allocates and op.outs[0] is not None:
        out = tensors[op.outs[0]]
        return _ALLOCATE, places[op.outs[0]], (tuple(out.shape), out.stride(), out.dtype)
    inputs = op.slots
    needed |= {*inputs}
    order = {slot: i for i, slot in enumerate(inputs)}
    leaves = [Slot(order[x]) if type(x) is Slot else x for x in op.leaves]
    outs = tuple(i if i in new else None for i in op.outs)
    call = _caller(op._replace(leaves=leaves, outs=outs))
    return _CALL, call, (tuple(places[i] for i in inputs), tuple(places[i] for i in outs if i is not None))


def _caller(op: Op) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Returns a function from an op's tensors, each once, to its new results. The op's slots are positions of tensors."""
    args, kwargs = op.arguments([Slot(i) for i in range(len(op.slots))])
    tensor_args = [(i, int(x)) for i, x in enumerate(args) if type(x) is Slot]
    tensor_kwargs = [(name, int(x)) for name, x in kwargs.items() if type(x) is Slot]
    is_flat = len(tensor_args) + len(tensor_kwargs) == sum(type(x) is Slot for x in op.leaves)
    func, outs = op.func._op, op.outs

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        if is_flat:
            positional, named = list(args), dict(kwargs)
            for i, slot in tensor_args:
                positional[i] = tensors[slot]
            for name, slot in tensor_kwargs:
                named[name] = tensors[slot]
            out = func(*positional, **named)
        else:
            nested, named = op.arguments(tensors)
            out = func(*nested, **named)
        results = out if isinstance(out, (tuple, list)) else (out,)
        return [t for slot, t in zip(outs, results, strict=True) if slot is not None]

    return call


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Returns torch's fastest empty_strided(shape, strides, dtype) on the current device of `device`'s kind."""
    fastest = compat.empty_strided(device.type)
    if fastest is not None:
        return fastest
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
