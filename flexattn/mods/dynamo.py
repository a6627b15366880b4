"""Mods under torch.compile: Dynamo runs a mod once on stand-ins for scalars, and the operations on them are recorded.

A recording is plain data, so it can leave the trace and go through `trace_mods` like any other mod. Its tensors stay in the graph,
even if the mod reads them from globals, closures or attributes, or if the compiled function computes them. Dynamo guards all other
objects that the mod read.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.overrides import TorchFunctionMode

from flexattn import compat
from flexattn.dispatch.mod_program import GRADIENT, Capture, read_dtype
from flexattn.mods.bands import Masks
from flexattn.mods.trace import Mod, trace_mods
from flexattn.mods.tracer import ANY_SIZE, ARGUMENTS_OF

_with_side_effects = compat.side_effects_allowed()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _imported(name: str, package: str | None) -> str:
    return importlib.import_module(name, package).__name__


def _import_module(name: str, package: str | None = None) -> object:
    return sys.modules[_imported(name, package)]


# Dynamo traces `import cudnn`, but not importlib.import_module, which TransformerEngine's callbacks call.
with contextlib.suppress(ValueError):  # raised if another library has registered a substitute
    compat.substitute_in_graph(importlib.import_module)(_import_module)


class Text(NamedTuple):
    """The fields of a Program that a call reads."""

    text: str
    captures: tuple[Capture, ...]
    tensor_needs_grad: tuple[bool, ...]
    is_empty: bool


class Recorded(NamedTuple):
    """Same as `trace.Traced`, with the program as text."""

    program: Text
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    left: int | None
    right: int | None
    has_floor: bool


def record_mods(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor],
    needs_grad: bool,
    masks: Masks,
    q: Tensor,
) -> Recorded:
    """Same as `trace_mods`, but traceable by Dynamo. If a number changes between calls, it becomes a 0-d tensor on q's device."""
    gradient = getattr(score_mod, "score_mod_gradient", None)
    named = dict(score_mod_tensors) if isinstance(score_mod_tensors, Mapping) else {}
    listed = () if isinstance(score_mod_tensors, Mapping) else tuple(score_mod_tensors)
    recordings: list[_Recording] = []
    facts: list[tuple[object, ...]] = []
    for role, mod in (("score_mod", score_mod), ("mask_mod", mask_mod), ("score_mod_gradient", gradient)):
        if mod is None:
            continue
        recording = _Recording(role, q)
        # Within a checkpoint, Dynamo counts entering a mode as a side effect, although it ends when the mode is left.
        result = _with_side_effects(_run, recording, mod, *((listed, named) if role == "score_mod" else ((), {})))
        output = recording.written(result)
        recordings.append(recording)
        facts.append((role, tuple(recording.nodes), output))
    is_grad = torch.is_grad_enabled()
    looked_at = _shapes_looked_at(
        tuple(facts), tuple(_forms(recording, ()) for recording in recordings), needs_grad, int(masks), is_grad
    )
    forms = tuple(_forms(recording, looked_at[i]) for i, recording in enumerate(recordings))
    text, captures, flags, is_empty, left, right, has_floor, positions = _program(
        tuple(facts), forms, needs_grad, int(masks), is_grad
    )
    program = Text(text, tuple(Capture(*capture) for capture in captures), flags, is_empty)
    return Recorded(program, tuple(recordings[i].tensors[n] for i, n in positions), (), left, right, has_floor)


def _run(recording: _Recording, mod: Mod, listed: tuple[Tensor, ...], named: dict[str, Tensor]) -> object:
    with _Recorder(recording):
        return mod(*tuple(recording.values), *listed, **named)


class _Recording:
    """Operations of one mod: the tensors among their arguments, and a meta tensor for each scalar argument and each result."""

    def __init__(self, role: str, q: Tensor) -> None:
        self.q = q
        self.nodes: list[tuple[object, ...]] = []
        self.tensors: list[Tensor] = []
        # On meta: if the mod computes from one of these without the recording, torch refuses the device.
        self.values = [
            torch.zeros((), dtype=torch.float32 if name in ("score", GRADIENT) else torch.int64, device="meta")
            for name in ARGUMENTS_OF[role]
        ]

    def append(self, function: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Records an operation on values of the recording, and returns the stand-in of its result.

        A stand-in has the dtype and shape of its result, so that a mod which reads them takes the same branch as without
        torch.compile. If the result is not a tensor, such as the number of dims, it is returned unchanged.
        """
        written = tuple(self.written(x) for x in args)
        node = function, written, tuple((name, self.written(x)) for name, x in kwargs.items())
        on_meta = self.on_meta(args)
        if _is_read(function):  # meta tensors have no entries for an index, and an empty dim has no entry 0
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            table = on_meta[0].new_zeros([size if size > 0 else 1 for size in on_meta[0].shape])
            on_meta = table, tuple(0 if isinstance(part, Tensor) else part for part in index)
        result = function(*on_meta, **{name: self.on_meta(x) for name, x in kwargs.items()})
        if not isinstance(result, Tensor):
            return result
        self.nodes.append(node)
        # A new tensor: values are compared by identity, and an in-place operation returns its argument.
        self.values.append(torch.zeros(result.shape, dtype=result.dtype, device="meta"))
        return self.values[-1]

    def written(self, x: object) -> tuple[object, ...]:
        if isinstance(x, Tensor):
            position = _position(self.values, x)
            return ("tensor", self._capture(x)) if position < 0 else ("value", position)
        if isinstance(x, (tuple, list)):
            return ("tuple", tuple(self.written(item) for item in x))
        if isinstance(x, slice):
            return ("slice", (self.written(x.start), self.written(x.stop), self.written(x.step)))
        if isinstance(x, float):
            if has_static_value(x):
                return ("float", x.hex())
            dtype = torch.float64 if self.q.dtype is torch.float64 else torch.float32
            # A product: torch.compile keeps a changing float as an input only if it meets a tensor in arithmetic.
            return ("tensor", self._capture(torch.ones((), dtype=dtype, device=self.q.device) * x))
        if isinstance(x, int) and not isinstance(x, bool):
            if has_static_value(x):
                return ("constant", operator.index(x))  # also of a difference of sizes that are always equal
            return ("tensor", self._capture(torch.full((), x, dtype=torch.int64, device=self.q.device)))
        return ("constant", x)

    def _capture(self, x: Tensor) -> int:
        position = _position(self.tensors, x)
        if x.device.type == "meta" and self.q.device.type != "meta":
            raise ValueError(
                "a score_mod or mask_mod computes with a score or an index in a way that torch.compile does not show; use the "
                "function of torch, such as torch.abs(x) for abs(x)"
            )
        if position < 0:
            self.tensors.append(x)
            return len(self.tensors) - 1
        return position

    def on_meta(self, x: object) -> Any:
        """Returns x with meta tensors for tensors. Those of captured tensors have the dtypes in which a program reads them."""
        if isinstance(x, Tensor):
            dtype = x.dtype if _position(self.values, x) >= 0 else read_dtype(x.dtype)
            return torch.zeros(x.shape, dtype=dtype, device="meta")
        if isinstance(x, (tuple, list)):
            return type(x)([self.on_meta(item) for item in x])
        return x

    def is_on(self, values: Any) -> bool:
        """Returns whether a result of the recording is among the values, at any depth."""
        for x in values:
            if isinstance(x, Tensor) and _position(self.values, x) >= 0:
                return True
            if isinstance(x, (tuple, list)) and self.is_on(x):
                return True
            if isinstance(x, slice) and self.is_on((x.start, x.stop, x.step)):
                return True
        return False


def _is_read(function: object) -> bool:
    return getattr(function, "__name__", "") in ("__getitem__", "getitem")


def _position(tensors: Sequence[Tensor], x: Tensor) -> int:
    for n, t in enumerate(tensors):
        if t is x:
            return n
    return -1


class _Recorder(TorchFunctionMode):
    """Records the torch operations on tensors of the recording, and runs all others."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording
        self.is_grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if self.recording.is_on(args) or self.recording.is_on(tuple(kwargs.values())):
            out = self.recording.append(func, args, kwargs)
            if self.is_grad and not torch.is_grad_enabled() and isinstance(out, Tensor) and out.is_floating_point():
                return self.recording.append(torch.detach, (out,), {})  # the mod's own no_grad()
            return out
        return func(*args, **kwargs)


def _forms(recording: _Recording, looked_at: tuple[int, ...]) -> tuple[object, ...]:
    """Returns dtype, shape and requires_grad of each tensor. A size that changes is fixed only if the mod reads that shape."""
    forms = []
    for n, t in enumerate(recording.tensors):
        shape = []
        for size in t.shape:
            is_fixed = n in looked_at or has_static_value(size)  # fixed too if it equals a size that is fixed
            shape.append(operator.index(size) if is_fixed else ANY_SIZE)
        forms.append((t.dtype, tuple(shape), t.requires_grad))
    return tuple(forms)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _shapes_looked_at(*recordings: Any) -> tuple[tuple[int, ...], ...]:
    """Returns for each recording the positions of the tensors whose shapes the mod depends on."""
    traced, tensors = _traced(*recordings)
    return tuple(tuple(n for n, t in enumerate(part) if any(t is x for x in traced.looked_at)) for part in tensors)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _program(*recordings: Any) -> tuple[object, ...]:
    """Returns the fields of the recordings' program, its band, whether the band has a floor, and the tensors that it reads."""
    traced, stand_ins = _traced(*recordings)
    places = {id(t): (i, n) for i, tensors in enumerate(stand_ins) for n, t in enumerate(tensors)}
    program = traced.program
    return (
        program.text,
        tuple(tuple(capture) for capture in program.captures),
        program.tensor_needs_grad,
        program.is_empty,
        traced.left,
        traced.right,
        traced.has_floor,
        tuple(places[id(t)] for t in traced.tensors),
    )


def _traced(facts: Any, forms: Any, needs_grad: bool, masks: int, is_grad: bool) -> tuple[Any, list[list[Tensor]]]:
    mods: dict[str, Any] = {}
    tensors = []
    for (role, nodes, output), tensor_forms in zip(facts, forms, strict=True):
        tensors.append([_stand_in(dtype, shape, grad) for dtype, shape, grad in tensor_forms])
        mods[role] = _replayed(nodes, output, tuple(tensors[-1]))
    if "score_mod_gradient" in mods:
        mods["score_mod"].score_mod_gradient = mods["score_mod_gradient"]
    with torch.set_grad_enabled(is_grad):
        return trace_mods(mods.get("score_mod"), mods.get("mask_mod"), (), needs_grad, Masks(masks)), tensors


def _stand_in(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def _replayed(nodes: Any, output: object, tensors: tuple[Tensor, ...]) -> Mod:
    """Returns a function that replays a recording held in its closure, so that `trace_mods` can trace it."""
    steps = tuple((operator.getitem if _is_read(function) else function, *arguments) for function, *arguments in nodes)

    def mod(*scalars: object) -> object:
        return _replay(steps, output, scalars, tensors)

    return mod


def _replay(steps: Any, output: object, scalars: Any, tensors: Any) -> object:
    values = list(scalars)

    def read(written: Any) -> object:
        kind, x = written
        if kind == "tuple":
            return tuple(read(item) for item in x)
        if kind == "slice":
            return slice(*(read(part) for part in x))
        if kind == "float":
            return float.fromhex(x)
        return {"value": values, "tensor": tensors}[kind][x] if kind != "constant" else x

    for function, args, kwargs in steps:
        values.append(function(*(read(x) for x in args), **{name: read(x) for name, x in kwargs}))
    return read(output)
