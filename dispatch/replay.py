"""A backend's run of a call, recorded once and replayed: the allocations, the launches and torch's own ops, and no decision.

What a launcher does depends on nothing but the shapes, strides, dtypes, numbers and device that it is given, so a call that is like
an earlier one in all of these (`flexattn.call_cache` has the key) can skip everything between its tensors and the driver. Taken
down are torch's ops, by a dispatch mode, and the launches and cuDNN's plans, which the backend tells. Of a tensor that only kernels
see, the address is enough: views are not made again.
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
        self.roots: dict[int, tuple[int, int]] = {}  # by view: its tensor, and its offset in that tensor in bytes
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
                if is_new:
                    self.made.add(self.slot(x))
                    self._find_root(x, leaves)
            else:
                outs.append(None)
                if x is not None:
                    self.trouble = f"{func} gives a {type(x).__name__}"
        self.steps.append(_Op(func, leaves, tree, tuple(outs), func._schema.is_mutable))
        return out

    def root(self, slot: int) -> tuple[int, int]:
        """Returns the tensor of a view and the view's offset in bytes. A tensor that is no view is its own, with offset 0."""
        return self.roots.get(slot, (slot, 0))

    def _find_root(self, out: Tensor, leaves: Sequence[Any]) -> None:
        """Notes the argument of an op that its result is a view of. Other tensors in the same storage may lie elsewhere."""
        storage = out.untyped_storage()._cdata
        for x in leaves:
            if type(x) is _Slot and self.tensors[x].untyped_storage()._cdata == storage:
                root, offset = self.root(int(x))
                self.roots[self.slot(out)] = root, offset + out.data_ptr() - self.tensors[x].data_ptr()
                return

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
        roots = [recorder.root(i) for i in range(len(tensors))]
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
                begins = tuple(places[i if roots[i][1] else roots[i][0]] for i in step.tensors)
                kept.append((_LAUNCH, step.prepared, begins))
            elif isinstance(step, _Run):
                needed |= set(step.buffers.values())
                buffers = tuple(places[slot] for slot in step.buffers.values())
                kept.append((_CALL, _runner(step.plan, tuple(step.buffers), device), (buffers, ())))
            elif step.writes or any(i in needed or i in addressed for i in step.outs):
                for i in step.outs:
                    if i is not None and born[i] == n:
                        kept += view_steps(i)
                new = [i for i in step.outs if i in recorder.made and born[i] == n]
                kept.append(_op_step(step, new, tensors, needed, places))
        for root in list(views):  # inputs and constants
            kept += view_steps(root)
        kept.reverse()
        self.prepared = [what for kind, what, _ in kept if kind is _LAUNCH]
        self.steps = tuple((kind, None if kind is _LAUNCH else what, how) for kind, what, how in kept)
        # Without torch's own operators and plans, which may have numbers in them that nobody sees.
        self.can_vary = all(kind in (_ALLOCATE, _VIEW, _ZERO, _LAUNCH) for kind, *_ in kept)
        self.num_inputs = len(recorder.inputs)
        given = {*recorder.inputs, *recorder.made}
        constants = [i for i in range(len(tensors)) if i not in given and (i in needed or i in addressed)]
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
        # From inputs like those that it was recorded with, and their addresses (0 for None), to results. Not to be called where
        # `can_replay()` is false: when someone wants to see launches, which Triton then has to make.
        self.replay = self._player()

    def with_numbers(self, values: Sequence[float]) -> Recording:
        """Returns the recording of a call with other numbers in the place of those that vary; only where `can_vary`."""
        made = copy.copy(self)
        made.prepared = [prepared.with_numbers(values) for prepared in self.prepared]
        made.replay = made._player()
        return made

    def _names(self) -> dict[str, Any]:
        """Returns what the statements of `_lines` name, but for the launches."""
        names: dict[str, Any] = {"allocate": self.allocate, "current_stream": self.stream, "set_to_zero": self.set_to_zero}
        if self.device.type == "cuda":
            names |= {"device": self.device, "on": torch.cuda.device, "current_device": torch._C._cuda_getDevice}
        for n, (kind, what, how) in enumerate(self.steps):
            if kind is _CALL:
                names[f"call{n}"] = what
            elif kind is _ALLOCATE:
                names |= {f"shape{n}": how[0], f"strides{n}": how[1], f"dtype{n}": how[2]}
        for place, t in self.constants.items():
            names |= {f"t{place}": t, f"a{place}": t.data_ptr()}
        return names

    def _player(self) -> Callable[[Sequence[Tensor | None], Sequence[int]], tuple[Any, ...]]:
        """Returns the function that makes the steps, with the launches in `prepared`: generated, as a loop takes twice its time."""
        names = {**self.names, **{f"launch{i}": prepared.launch for i, prepared in enumerate(self.prepared)}}
        exec(self.code, names)
        return names["replay"]  # type: ignore[no-any-return]

    def _lines(self) -> Iterator[str]:
        """Yields the statements of `replay`: t1 is the tensor at place 1, and a1 its address."""
        if self.device.type == "cuda":
            yield f"if current_device() != {self.device.index}:"
            yield "    with on(device):"
            yield "        return replay(inputs, addresses)"
        launches = itertools.count()
        places = range(self.num_inputs)
        called = (place for kind, _, how in self.steps if kind is _CALL for place in how[0])
        if not {*places}.isdisjoint((*self.results, *called)):
            yield f"{_listed('t', places)} = inputs"
        if places:
            yield f"{_listed('a', places)} = addresses"
        if any(kind in (_LAUNCH, _ZERO) for kind, *_ in self.steps):
            yield "stream = current_stream()"
        for n, (kind, what, how) in enumerate(self.steps):
            if kind is _LAUNCH:
                yield f"launch{next(launches)}(stream, ({_listed('a', how)}))"
            elif kind is _ALLOCATE:
                yield f"t{what} = allocate(shape{n}, strides{n}, dtype{n})"
                yield f"a{what} = t{what}.data_ptr()"
            elif kind is _VIEW:
                yield f"a{what} = a{how[0]} + {how[1]}"
            elif kind is _ZERO:
                yield f"set_to_zero(stream, a{how[0]} + {how[1]}, {how[2]})"
            else:
                given, made = how
                yield f"{_listed('t', made)}{' = ' if made else ''}call{n}(({_listed('t', given)}))"
                yield from (f"a{place} = t{place}.data_ptr()" for place in made)
        yield f"return ({''.join('None, ' if place is None else f't{place}, ' for place in self.results)})"


def _listed(name: str, places: Iterable[int]) -> str:
    return "".join(f"{name}{place}, " for place in places)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<flexattn replay>", "exec")


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
    recording = Recording(recorder, results, device)
    of_inputs = {t.untyped_storage()._cdata for t in inputs if t is not None}
    if any(t.untyped_storage()._cdata in of_inputs for t in recording.constants.values()):
        return result, None  # no operator made this part of an input, such as `x.data`, so its tensor is not known
    return result, recording


def _runner(plan: Any, uids: tuple[int, ...], device: torch.device) -> Callable[[Sequence[Tensor]], None]:
    from flexattn.kernels_cudnn.execute import execute

    return lambda tensors: execute(plan, dict(zip(uids, tensors, strict=True)), device)


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


def _op_step(
    op: _Op, new: Sequence[int | None], tensors: Sequence[Tensor], needed: set[int], places: dict[int, int]
) -> tuple[str, Any, Any]:
    """Returns an op to be played; its tensors join those `needed`. For an allocation torch's op is not needed.

    new: those of its results that no step before it had.
    """
    out = None if op.outs[0] is None else tensors[op.outs[0]]
    if op.func in _ALLOCATIONS and op.outs[0] is not None and out is not None:
        return _ALLOCATE, places[op.outs[0]], (tuple(out.shape), out.stride(), out.dtype)
    needed |= {int(x) for x in op.leaves if type(x) is _Slot}
    given = sorted({int(x) for x in op.leaves if type(x) is _Slot})
    order = {slot: i for i, slot in enumerate(given)}
    leaves = [_Slot(order[x]) if type(x) is _Slot else x for x in op.leaves]
    made = tuple(i if i in new else None for i in op.outs)
    call = _caller(op._replace(leaves=leaves, outs=made))
    return _CALL, call, (tuple(places[i] for i in given), tuple(places[i] for i in made if i is not None))


def _caller(op: _Op) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Returns a closure from the tensors that an op takes, each once, to those that are new: its slots are their positions."""
    args, kwargs = tree_unflatten(op.leaves, op.tree)
    own_args = [(i, int(x)) for i, x in enumerate(args) if type(x) is _Slot]
    own_kwargs = [(name, int(x)) for name, x in kwargs.items() if type(x) is _Slot]
    is_flat = len(own_args) + len(own_kwargs) == sum(type(x) is _Slot for x in op.leaves)
    func, outs = op.func._op, op.outs

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        if is_flat:
            given, named = list(args), dict(kwargs)
            for i, slot in own_args:
                given[i] = tensors[slot]
            for name, slot in own_kwargs:
                named[name] = tensors[slot]
        else:
            given, named = tree_unflatten([tensors[x] if type(x) is _Slot else x for x in op.leaves], op.tree)
        out = func(*given, **named)
        made = out if isinstance(out, (tuple, list)) else (out,)
        return [t for slot, t in zip(outs, made, strict=True) if slot is not None]

    return call


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """empty_strided(shape, strides, dtype) on the current device of `device`'s kind, the quickest that torch has."""
    guards = getattr(torch._C, "_dynamo", None)
    quick = getattr(getattr(guards, "guards", None), f"_empty_strided_{device.type}", None)  # what Inductor's code allocates with
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
