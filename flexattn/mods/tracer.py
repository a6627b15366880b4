"""Traces a mod: it runs once on scalars without values, and the torch ops that it calls become a graph of a program's ops.

The tracer changes nothing process-wide. torch.fx's tracers patch functions; this one does not, so other threads may compile and
trace at the same time.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from flexattn.compat import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    core_aten_decompositions,
    get_decompositions,
    tree_leaves,
    tree_map,
)
from flexattn.dispatch.mod_program import ARGUMENTS, GRADIENT, Capture, read_dtype
from flexattn.dispatch.neutral import neutral_state, sizes_of
from flexattn.mods.captures import Captures, copied, find_captures
from flexattn.mods.graph import INTEGERS, normalised, place_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__)
# Files whose frames do not belong to the mod:
_NOT_THE_MOD = (
    *(os.path.join(_HERE, name) for name in ("tracer.py", "trace.py", "dynamo.py")),
    *(os.path.join(os.path.dirname(_HERE), "integrations") + os.sep, _TORCH, "<"),
)
_aten = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AND_TENSORS = {"score_mod": " (and of score_mod_tensors)"}
ARGUMENTS_OF = {"score_mod": ARGUMENTS, "mask_mod": ARGUMENTS[1:], "score_mod_gradient": (GRADIENT, *ARGUMENTS)}
ANY_SIZE = 4099  # stands in for a size that changes from call to call, if the mod does not read it


class Trace(NamedTuple):
    """Graph of a mod, as `graph.normalised` returns it, and the captures that it uses."""

    graph: Graph
    captures: tuple[Capture, ...]
    used: tuple[tuple[bool, int], ...]  # for each capture: (is a float, its position among the captured floats or tensors)
    looked_at: tuple[int, ...]  # positions of the captured tensors whose shapes the mod read
    unsettled: str  # why the trace does not hold for other calls with the same key, or ""


class NeedsValueError(ValueError):
    """Raised if a mod asks for a value that is known only when a kernel runs."""


class Misuse(Exception):
    """Base of errors of a mod that keep their type through a trace. `place` is ` at file:line: text` when the line is known."""

    place = ""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text + self.place


class MisusedType(Misuse, TypeError):
    """Raised if a node of a graph does not accept an argument."""


class MisusedName(Misuse, KeyError, ValueError):
    """Raised if a name is not among the tensors of the call."""


class MisusedNode(Misuse, AttributeError, ValueError):
    """Raised if a graph does not have a node."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the aten ops that run on fake tensors, decomposed into ops of a program if a decomposition exists."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}
        self.alive: list[object] = []  # keeps results alive, so that no address is reused
        self.is_paused = False
        self.role = ""  # the role of the mod that runs; "": no mod runs
        self.views: set[int] = set()  # ids of tensors that share memory with others

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a new fake tensor, which is an input of the graph."""
        was_paused, self.is_paused = self.is_paused, True
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self.is_paused = was_paused
        self._note(tensor, self.graph.placeholder(name))
        return tensor

    def finish(self, result: object) -> Graph:
        """Returns the graph that returns the tensor, or the list of them."""
        self.graph.output(tree_map(self._node_of, result))
        self.graph.eliminate_dead_code()
        return self.graph

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        decomposition = _decompositions().get(func)
        if decomposition is None and func.namespace == "aten" and not func.has_kernel_for_dispatch_key(DispatchKey.CPU):
            decomposition = func.decompose  # autograd does the same, and its formulas rely on that
        if decomposition is not None:
            with self:
                out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        node = self.graph.call_function(func, tree_map(self._node_of, tuple(args)), tree_map(self._node_of, kwargs))
        out = func(*args, **kwargs)
        if self.role and isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            self._check_views(args[0], out)
        if isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for i, part in enumerate(out):
                self._note(part, self.graph.call_function(operator.getitem, (node, i)))
        else:
            self._note(out, node)
        return out

    def _check_views(self, x: Tensor, out: Tensor) -> None:
        """Raises ValueError if an op on x, whose result is `out`, wrote to a tensor that has views: only x got its new value."""
        if out is x and id(x) in self.views:
            line = _user_line()
            raise ValueError(
                f"{self.role} changes a tensor in place that it has a view of{'' if line is None else place_of(line)}; accepted: a "
                "new tensor, as in x = x + 1"
            )
        if out is not x and out.untyped_storage()._cdata == x.untyped_storage()._cdata:
            self.views |= {id(x), id(out)}

    def _note(self, out: object, node: Node) -> None:
        node.meta["val"] = out
        self.alive.append(out)
        self.nodes[id(out)] = node

    def _node_of(self, x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            self._note(x, self.graph.create_node("get_attr", "tensor"))  # made from numbers; a program has no op for that
        return self.nodes[id(x)]


def trace(
    role: str, mod: Callable[..., object], found: Captures, shapes: Sequence[Sequence[int]] | None = None
) -> tuple[Trace, Captures]:
    """Returns the mod's graph, and `found` plus the tensors that only the run showed. shapes: replace the shapes of the tensors.

    Raises ValueError if the mod cannot be traced, with the line of the mod and a replacement.
    """
    own_shapes = [sizes_of(t) for _, t in found.tensors]
    if shapes is None:
        shapes = [[size if type(size) is int else ANY_SIZE for size in shape] for shape in own_shapes]
    has_gradients = role == "score_mod" and torch.is_grad_enabled()
    names = distinct([name for name, _ in (*found.tensors, *found.floats)])
    captures = [_capture(role, name, t, has_gradients) for name, (_, t) in zip(names, found.tensors, strict=False)]
    captures += [Capture(name, torch.float32, -1, False) for name in names[len(found.tensors) :]]
    before = find_captures(mod, lift=False)

    with neutral_state(), fake_mode() as fakes:  # with gradients on, so that a mod's own no_grad() shows
        recorder = Recorder()
        scalars = [
            recorder.input(name, (), torch.float32 if name in ("score", GRADIENT) else torch.int64) for name in ARGUMENTS_OF[role]
        ]
        stand_ins = [
            recorder.input(name, shape, read_dtype(t.dtype))
            for name, (_, t), shape in zip(names, found.tensors, shapes, strict=False)
        ]
        numbers = [recorder.input(name, (), torch.float32) for name in names[len(found.tensors) :]]
        run, why_unsettled = copied(mod, numbers) if found.key is not None else (mod, lambda: found.unkeyed)
        recorder.role = role
        watch = _Watch(role, recorder, fakes, names)
        watch.numbers = numbers
        watch.has_own_gradient = hasattr(getattr(mod, "func", mod), "score_mod_gradient")
        watch.stand_in([t for _, t in found.tensors], stand_ins)
        try:
            with recorder, watch:
                result = run(*scalars)
                if isinstance(result, (bool, int, float)):
                    result = torch.full((), result, device="cpu")
                elif isinstance(result, Tensor):
                    result = watch.known(result)
                else:
                    raise ValueError(f"{role} returned {result!r} ({type(result).__name__}); accepted: a 0-d tensor or a number")
            traced = recorder.finish(result)
        except Misuse as e:
            e.place = _place_of(e) or watch.place()
            raise
        except ValueError:
            raise
        except Exception as e:
            raise ValueError(
                f"{role} cannot be traced{_place_of(e) or watch.place()}: {type(e).__name__}: {e}; accepted: a function of "
                f"{', '.join(ARGUMENTS_OF[role])}{_AND_TENSORS.get(role, '')}, in torch ops on 0-d tensors"
            ) from e
    unsettled = why_unsettled()
    if found.key is not None and unsettled:  # run the mod itself instead of a copy, so that its changes persist
        return trace(role, mod, Captures(None, unsettled, found.tensors, (), ()), shapes)
    if watch.met:
        unsettled = unsettled or "it reads a tensor that was not found before the trace"
    elif not _is_same(before, find_captures(mod, lift=False)) or found.key != find_captures(mod, lift=bool(found.floats)).key:
        unsettled = unsettled or "it changes its own dependencies"
    captures += [_capture(role, name, t, has_gradients) for name, t in watch.met]
    whole = found._replace(tensors=(*found.tensors, *watch.met))
    own_shapes += [sizes_of(t) for _, t in watch.met]
    looked_at = sorted(watch.looked_at)
    if any(tuple(shapes[i]) != own_shapes[i] for i in looked_at if i < len(shapes)):
        # Symbolic sizes that the mod read: int() tells torch.export that they are fixed.
        return trace(role, mod, found, [[int(size) for size in shape] for shape in own_shapes[: len(shapes)]])
    graph = normalised(role, traced, ARGUMENTS_OF[role], captures)
    used = {node.target for node in graph.nodes if node.op == "placeholder" and node.users}
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target not in ARGUMENTS_OF[role]:
            graph.erase_node(node)
    kept, positions, seen = [], [], [0, 0]
    for capture in captures:
        if capture.name in used:
            kept.append(capture)
            positions.append((capture.is_number, seen[capture.is_number]))
        seen[capture.is_number] += 1
    return Trace(graph, tuple(kept), tuple(positions), tuple(looked_at), unsettled), whole


def _is_same(before: Captures, after: Captures) -> bool:
    tensors = zip(before.tensors, after.tensors, strict=False)
    return before.key == after.key and all(a is b for (_, a), (_, b) in tensors)


def fake_mode() -> FakeTensorMode:
    _imported()
    return FakeTensorMode()


@functools.cache
def _imported() -> None:
    """Makes torch import the modules of its first fake tensor in a thread of its own.

    If such an import fails, torch keeps the error and all frames below it. A call's frames would keep its tensors alive forever;
    the thread's frames hold none.
    """
    thread = threading.Thread(target=FakeTensorMode)
    thread.start()
    thread.join()


def _capture(role: str, name: str, tensor: Tensor, has_gradients: bool) -> Capture:
    if tensor.dtype not in (*_FLOATS, *INTEGERS) or tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(
            f"{role} captures {name}, a {tensor.dtype} tensor of layout {tensor.layout}; accepted: a plain tensor of "
            f"{', '.join(str(dtype) for dtype in (*_FLOATS, *INTEGERS))}"
        )
    return Capture(name, tensor.dtype, tensor.dim(), has_gradients and tensor.requires_grad)


@functools.cache
def _decompositions() -> dict[object, Callable[..., object]]:
    """Returns decompositions of every pointwise op into ops of a program."""
    more = (
        *(_aten.gelu, _aten.elu, _aten.leaky_relu, _aten.hardtanh, _aten.copysign, _aten.hypot, _aten.masked_fill, _aten.where),
        *(_aten.tanh_backward, _aten.sigmoid_backward, _aten.gelu_backward, _aten.threshold_backward, _aten.isfinite),
    )
    table = {**core_aten_decompositions(), **get_decompositions(list(more))}
    return {op: table[op] for op in table if op is not _aten.detach.default}  # torch's leaves no trace of it


def distinct(names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Returns identifiers made of the names, all different from each other, from the arguments and from `others`."""
    taken = {*ARGUMENTS, GRADIENT, *others}
    distinct = []
    for name in names:
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_") or "capture"
        base = f"t_{base}" if base[0].isdigit() else base
        new, n = base, 2
        while new in taken:
            new, n = f"{base}_{n}", n + 1
        taken.add(new)
        distinct.append(new)
    return distinct


# Attributes of a tensor that depend on no size. They may depend on its number of dims, which is in the key.
_SHAPELESS = frozenset(
    ("__getitem__", "dim", "detach", "permute", "transpose", "swapaxes", "swapdims", "t", "unsqueeze", "is_floating_point", "clone")
)
_SHAPELESS_ATTRIBUTES = frozenset(("ndim", "dtype", "T", "mT", "device", "requires_grad", "data", "layout", "is_cuda"))
_VALUES = frozenset(
    ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__array__", "__contains__", "nonzero")
)


class _Watch(TorchFunctionMode):
    """Mode for the run of a mod: replaces captures by stand-ins, keeps indices symbolic, and notes the line of the mod."""

    def __init__(self, role: str, recorder: Recorder, fakes: FakeTensorMode, names: Sequence[str]) -> None:
        super().__init__()
        self.role = role
        self.recorder = recorder
        self.fakes = fakes
        self.names = list(names)
        self.stand_in_of: dict[int, Tensor] = {}
        self.position: dict[int, int] = {}  # id of a stand-in or of a view of one: position of the tensor that it replaces
        self.num_tensors = 0
        self.numbers: Sequence[Tensor] = ()  # stand-ins of floats
        self.has_own_gradient = False  # True: the mod has a score_mod_gradient
        self.met: list[tuple[str, Tensor]] = []  # tensors that `find_captures` did not find
        self.looked_at: set[int] = set()
        self.line: tuple[str, int] | None = None

    def stand_in(self, captured: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> None:
        for tensor, new in zip(captured, stand_ins, strict=True):
            self.stand_in_of[id(tensor)] = new
            if new.dim() > 0:
                self.position[id(new)] = self.num_tensors
            self.num_tensors += 1

    def known(self, x: object) -> Any:
        """Returns the stand-in of a tensor that does not belong to the trace."""
        if not isinstance(x, Tensor) or (type(x) is FakeTensor and x.fake_mode is self.fakes):
            return x
        if id(x) not in self.stand_in_of:
            (name,) = distinct(["tensor"], self.names)
            self.names.append(name)
            self.met.append((name, x))
            shape = [size if type(size) is int else int(size) for size in x.shape]
            self.stand_in([x], [self.recorder.input(name, shape, read_dtype(x.dtype))])
        return self.stand_in_of[id(x)]

    def place(self) -> str:
        """Returns ' at file:line: text' for the current line of the mod."""
        return "" if self.line is None else place_of(self.line)

    def __torch_function__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        self.line = _user_line() or self.line
        name = getattr(func, "__name__", "")
        if name in _VALUES:
            hint = "use torch.where instead of if, and & | ~ instead of and, or, not" if name == "__bool__" else "use torch ops"
            raise NeedsValueError(
                f"{self.role} asks for the value of a tensor ({name}){self.place()}; it is known only in the kernel: {hint}"
            )
        if name == "__set__" or func is torch.Tensor.__setitem__:
            raise ValueError(f"{self.role} writes to a tensor{self.place()}; a mod can only read: return the new score instead")
        args, kwargs = tree_map(self.known, (args, kwargs))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        read = {self.position[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.position}
        if not (name in _SHAPELESS or attribute in _SHAPELESS_ATTRIBUTES):
            self.looked_at |= read
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            dtype = kwargs.get("dtype") or {bool: torch.bool, int: torch.int64, float: torch.float32}[type(args[0])]
            func, args, kwargs = torch.full, ((), args[0]), {"dtype": dtype}
        if func is torch.Tensor.__getitem__:
            func, kwargs = self._item, {}
        if name.endswith("_") and not name.startswith("_") and any(args[0] is number for number in self.numbers):
            func = getattr(Tensor, name[:-1])  # x += y binds the name x to a new float, and does not change the old one
        out = self._marked(func, args, kwargs)
        if not torch.is_grad_enabled() and isinstance(out, Tensor) and out.is_floating_point():
            out = self._without_gradient(out)
        if isinstance(out, Tensor) and out.dim() > 0 and len(read) == 1:  # a view: reading its shape reads the tensor's shape
            self.recorder.alive.append(out)
            self.position[id(out)] = next(iter(read))
        return out

    def _marked(self, func: Any, args: Any, kwargs: Any) -> object:
        """Returns func(*args), with this line noted on the nodes that it adds."""
        out = func(*args, **kwargs)
        if self.line is not None:
            for node in reversed(self.recorder.graph.nodes):
                if "line" in node.meta:
                    break
                node.meta["line"] = self.line
        return out

    def _without_gradient(self, out: Tensor) -> Tensor:
        """Returns a result of the mod's own no_grad(), detached."""
        if _is_in_function() and not self.has_own_gradient:
            raise ValueError(
                f"{self.role} calls a torch.autograd.Function{self.place()}, whose backward no kernel runs; accepted: torch ops, "
                "whose derivative is derived, with score_mod.score_mod_gradient for a derivative of your own"
            )
        self.recorder.role = ""  # the mod has no other name for this result
        out = out.detach()
        self.recorder.role = self.role
        return out

    def _item(self, tensor: Tensor, index: object) -> Tensor:
        """Returns tensor[index] for integers, slices, ... and scalar tensors, which stay symbolic."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [p for p in parts if not isinstance(p, Tensor)]:
            at = next(i for i, p in enumerate(parts) if p is Ellipsis)
            missing = tensor.dim() - sum(p is not None for p in parts) + 1
            parts[at : at + 1] = [slice(None)] * missing
        indices: list[Tensor | None] = []
        for dim, part in enumerate(parts):
            if part is None:
                tensor = tensor.unsqueeze(dim)
                indices.append(None)
            elif isinstance(part, slice):
                if any(isinstance(x, Tensor) for x in (part.start, part.stop, part.step)):
                    raise ValueError(f"{self.role} slices with a tensor{self.place()}; accepted: indices, as in t[h, q_idx]")
                if part != slice(None):
                    self.looked_at |= {self.position[id(tensor)]} if id(tensor) in self.position else set()
                    tensor = _aten.slice.Tensor(tensor, dim, part.start, part.stop, 1 if part.step is None else part.step)
                indices.append(None)
            elif isinstance(part, Tensor) and part.dim() == 0 and not part.is_floating_point() and part.dtype is not torch.bool:
                indices.append(part)
            elif isinstance(part, int) and not isinstance(part, bool):
                indices.append(torch.full((), part, dtype=torch.int64, device="cpu"))
            else:
                shown = f"a {part.dtype} tensor of {part.dim()} dims" if isinstance(part, Tensor) else repr(part)
                raise ValueError(
                    f"{self.role} indexes with {shown}{self.place()}; accepted: integers and 0-d integer tensors, as in t[h, q_idx]"
                )
        if len(indices) > tensor.dim():
            raise ValueError(
                f"{self.role} indexes a tensor of {tensor.dim()} dims with {len(indices)} indices{self.place()}; accepted: at most "
                "one for each dim"
            )
        return tensor if all(i is None for i in indices) else _aten.index.Tensor(tensor, indices)


def _user_line() -> tuple[str, int] | None:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not trace.__code__:
        name = frame.f_code.co_filename
        if name.endswith(f"mods{os.sep}dynamo.py"):  # under torch.compile the mod's own frame is not available
            return None
        if not name.startswith(_NOT_THE_MOD):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def _is_in_function() -> bool:
    """Returns whether the mod runs the forward of a torch.autograd.Function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not trace.__code__:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back
    return False


def _place_of(error: BaseException) -> str:
    """Returns ' at file:line: text' for the mod's innermost line that led to an error."""
    line = None
    entry = error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if not name.startswith(_NOT_THE_MOD):
            line = name, entry.tb_lineno
        entry = entry.tb_next
    return "" if line is None else place_of(line)
