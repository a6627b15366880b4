"""From a user's score_mod and mask_mod to a `Program`: traced with make_fx once, its backward derived, cached by contents.

The callables see scalars: 0-d tensors for the score and the four indices, and stand-ins for what they capture. Reads of captured
tensors are normalised to one index per dim, whatever views they went through.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode

from flexattn.captures import Captures, find_captures, with_floats
from flexattn.dispatch import triton_backend
from flexattn.dispatch.neutral import neutral_state
from flexattn.dispatch.program import (
    ARGUMENTS,
    GRADIENT,
    Capture,
    Program,
    evaluate,
    make_program,
    new_graph,
    op_name,
    read_dtype,
)
from flexattn.mod_bands import conjunction, implied_band, is_identity, split_hidden
from flexattn.mod_graph import INTEGERS, as_dtype, cancel_factors, converted, normalised, place_of
from flexattn.warn import warn_once

Mod = Callable[..., Any]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_aten = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AND_TENSORS = {"score_mod": " (and of score_mod_tensors)"}
ARGUMENTS_OF = {"score_mod": ARGUMENTS, "mask_mod": ARGUMENTS[1:], "score_mod_gradient": (GRADIENT, *ARGUMENTS)}
_CACHE_SIZE = 256  # of each cache of traces
ANY_SIZE = 4099  # stands in for a size that changes from call to call, where the mod does not look at it


class Traced(NamedTuple):
    """What a call hands to the operators: the program, the values of its captures, and a band that its mask is beside."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    left: int | None = None  # query i sees no key before i - left, and none after i + right; None: open
    right: int | None = None
    looked_at: tuple[Tensor, ...] = ()  # captured tensors whose shapes decide what the program is


class _Trace(NamedTuple):
    graph: Graph
    captures: tuple[Capture, ...]
    used: tuple[tuple[bool, int], ...]  # of each capture: (is a float, its position among the floats or tensors that were found)
    looked_at: tuple[int, ...]  # the tensors, by position among those found, whose shapes the mod looked at


class _NeedsValueError(ValueError):
    """The mod asked for the value of what is known only when a kernel runs."""


_lock = threading.Lock()
_traces: OrderedDict[Hashable, _Trace] = OrderedDict()
_looked_at: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()  # the tensors whose shapes a trace depends on
_unlifted: OrderedDict[Hashable, bool] = OrderedDict()  # what could only be traced with its floats' values
_counts = {"hits": 0, "traces": 0}


def cache_info() -> dict[str, int]:
    """Hits and traces since the start or `clear_cache`, and how many traces are kept (at most 256, the least recently used go)."""
    with _lock:
        return {**_counts, "size": len(_traces)}


def clear_cache() -> None:
    """Forget every trace and the counts."""
    with _lock:
        for cache in (_traces, _looked_at, _unlifted):
            cache.clear()
        _counts.update(hits=0, traces=0)


def trace_mods(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = (),
    needs_grad: bool = False,
    find_band: bool = False,
) -> Traced:
    """The program of a call's mods and the values of what they capture.

    score_mod(score, b, h, q_idx, kv_idx, *score_mod_tensors) returns the modified score, mask_mod(b, h, q_idx, kv_idx) whether the
    query sees the key; score_mod_tensors may be a mapping, then they are keyword arguments. needs_grad: derive the backward, as is
    done anyhow where a captured tensor requires a gradient. find_band: give what the mods hide by kv_idx - q_idx as a band, and
    leave it out of the program where the band says all of it.

    Raises ValueError for what cannot be traced, with the line of the mod that it is about and what to use instead.
    """
    parts: list[tuple[_Trace, Captures]] = []
    gradient = getattr(score_mod, "score_mod_gradient", None)  # a backward that is given, not derived
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "score_mod_gradient": gradient}
    for role, mod in mods.items():
        if mod is not None:
            explicit = score_mod_tensors if role == "score_mod" else ()
            parts.append(_traced(role, mod, explicit))
    graphs = tuple((trace.graph, trace.captures) for trace, _ in parts)
    roles = tuple(role for role, mod in mods.items() if mod is not None)
    program, left, right = _joined(graphs, roles, needs_grad, find_band)
    tensors: list[Tensor] = []
    numbers: list[float] = []
    looked_at: list[Tensor] = []
    for trace, found in parts:
        looked_at += [found.tensors[i][1] for i in trace.looked_at]
        for is_float, position in trace.used:
            if is_float:
                numbers.append(found.floats[position][1])
            else:
                tensors.append(found.tensors[position][1])
    return Traced(program, tuple(tensors), tuple(numbers), left, right, tuple(looked_at))


def mod_source(
    score_mod: Mod | None = None, mask_mod: Mod | None = None, score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = ()
) -> str:
    """The Triton functions that the kernels inline for these mods: forward, gradient of the score, gradients of captures, mask.

    Raises what `trace_mods` raises, and ImportError without Triton.
    """
    traced = trace_mods(score_mod, mask_mod, score_mod_tensors, needs_grad=True)
    return triton_backend.mod_source(traced.program, traced.tensors)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _joined(
    graphs: tuple[tuple[Graph, tuple[Capture, ...]], ...], roles: tuple[str, ...], needs_grad: bool, find_band: bool
) -> tuple[Program, int | None, int | None]:
    """One program for both mods, whose captures follow one another, each with a name of its own; and the band beside it."""
    taken: set[str] = {*ARGUMENTS, GRADIENT}
    captures: list[Capture] = []
    joined: list[Graph] = []
    for graph, of_graph in graphs:
        names = {}
        for capture in of_graph:
            name, n = capture.name, 2
            while name in taken:
                name, n = f"{capture.name}_{n}", n + 1
            taken.add(name)
            names[capture.name] = name
        joined.append(_renamed(graph, names, taken))
        captures += [capture._replace(name=names[capture.name]) for capture in of_graph]
    by_role = dict(zip(roles, joined, strict=True))
    score, mask, given = (by_role.get(role) for role in ("score_mod", "mask_mod", "score_mod_gradient"))
    mask = None if mask is None or _is_always_true(mask) else mask
    left, right = None, None
    if find_band:
        hidden = None
        if score is not None and given is None:
            score, hidden = split_hidden(score)
            score = None if is_identity(score) else score
        if hidden is not None:
            mask = hidden if mask is None else conjunction(hidden, mask)
        if mask is not None:
            left, right, mask = implied_band(mask)
    wants_derivative = needs_grad or any(capture.needs_grad for capture in captures)
    if given is not None:
        derivative: Graph | None = _listed(given)
    else:
        derivative = derive(score, captures) if score is not None and wants_derivative else None
    return make_program(captures, score, mask, derivative, given is not None), left, right


def _listed(gradient: Graph) -> Graph:
    """A gradient of the score as a derivative's outputs: a list with it alone."""
    output = next(node for node in gradient.nodes if node.op == "output")
    output.args = ([output.args[0]],)
    return gradient


def _renamed(graph: Graph, names: Mapping[str, str], taken: set[str]) -> Graph:
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = new.placeholder(names.get(node.target, node.target))
        elif node.op == "call_function":
            copies[node] = new.node_copy(node, lambda n: copies[n])
        else:
            new.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))
            continue
        copies[node].meta["dtype"] = node.meta["dtype"]
    return new


def _traced(role: str, mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor]) -> tuple[_Trace, Captures]:
    if not callable(mod):
        raise TypeError(f"{role} is {mod!r} ({type(mod).__name__}); accepted: a function, or None")
    whole = _with_tensors(mod, explicit) if explicit else mod
    found = find_captures(whole)
    if found.key is not None and (role, found.key) in _unlifted:
        found = find_captures(whole, lift=False)
    key = None if found.key is None else (role, found.key)
    if key is not None:
        with _lock:
            shapes = _looked_at.get(key)
            if shapes is not None:
                trace = _traces.get((key, _sizes(found, shapes)))
                if trace is not None:
                    _traces.move_to_end((key, _sizes(found, shapes)))
                    _counts["hits"] += 1
                    return trace, found
    elif not torch.compiler.is_compiling():
        name = getattr(mod, "__qualname__", type(mod).__qualname__)
        warn_once(
            f"{role} {name} {found.unkeyed}",
            f"{role} {name} is traced again in each call, which takes milliseconds: {found.unkeyed}, whose contents no key can be "
            "made of. Capture tensors, numbers, functions, or objects with such attributes.",
        )
    try:
        trace = _trace(role, whole, found)
    except _NeedsValueError:
        if not found.floats:
            raise
        # Python asked for a float's value (an if, math.sqrt): with the value as part of the key there is one.
        if found.key is not None:
            with _lock:
                _keep(_unlifted, (role, found.key), True)
        found = find_captures(whole, lift=False)
        key = None if found.key is None else (role, found.key)
        trace = _trace(role, whole, found)
    with _lock:
        _counts["traces"] += 1
        if key is not None:
            _keep(_looked_at, key, trace.looked_at)
            _keep(_traces, (key, _sizes(found, trace.looked_at)), trace)
    return trace, found


def _sizes(found: Captures, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in found.tensors[i][1].shape) for i in positions)


def _keep(cache: OrderedDict[Any, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)


def _with_tensors(mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor]) -> Mod:
    if isinstance(explicit, Mapping):
        return functools.partial(mod, **explicit)
    tensors = tuple(explicit)

    def with_tensors(*arguments: Any) -> Any:
        return mod(*arguments, *tensors)

    return with_tensors


def _trace(role: str, mod: Mod, found: Captures, shapes: Sequence[Sequence[int]] | None = None) -> _Trace:
    """The mod's graph in the ops of a program; shapes: of the captured tensors, where not their own."""
    own_shapes = [t.shape for _, t in found.tensors]
    if shapes is None:
        shapes = [[size if type(size) is int else ANY_SIZE for size in shape] for shape in own_shapes]
    arguments = ARGUMENTS_OF[role]
    names = _distinct([name for name, _ in (*found.tensors, *found.floats)])
    captures = []
    for name, (_, tensor) in zip(names, found.tensors, strict=False):
        if tensor.dtype not in (*_FLOATS, *INTEGERS) or tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(
                f"{role} captures {name}, a {tensor.dtype} tensor of layout {tensor.layout}; accepted: a plain tensor of "
                f"{', '.join(str(dtype) for dtype in (*_FLOATS, *INTEGERS))}"
            )
        grad = role == "score_mod" and torch.is_grad_enabled() and tensor.requires_grad
        captures.append(Capture(name, tensor.dtype, tensor.dim(), grad))
    captures += [Capture(name, torch.float32, -1, False) for name in names[len(found.tensors) :]]

    floating = ("score", GRADIENT)
    with neutral_state(), FakeTensorMode(), torch.no_grad():
        stand_ins = [torch.empty(shape, dtype=read_dtype(t.dtype)) for (_, t), shape in zip(found.tensors, shapes, strict=True)]
        numbers = [torch.empty((), dtype=torch.float32) for _ in found.floats]
        scalars = [torch.empty((), dtype=torch.float32 if name in floating else torch.int64) for name in arguments]

        def traced(*values: Tensor) -> Any:
            given = values[: len(scalars)]
            tensors = values[len(scalars) : len(scalars) + len(stand_ins)]
            floats = values[len(scalars) + len(stand_ins) :]
            run = with_floats(mod, iter(floats)) if floats else mod
            with mode.standing_in([t for _, t in found.tensors], tensors):
                result = run(*given)
            if isinstance(result, (bool, int, float)):
                result = torch.full((), result)
            if not isinstance(result, Tensor):
                raise ValueError(f"{role} returned {result!r} ({type(result).__name__}); accepted: a 0-d tensor or a number")
            return result

        mode = _Watch(role)
        try:
            module = make_fx(traced, decomposition_table=_decompositions())(*scalars, *stand_ins, *numbers)
        except _NeedsValueError:
            raise
        except ValueError:
            raise
        except Exception as e:
            raise ValueError(
                f"{role} cannot be traced{mode.place()}: {type(e).__name__}: {e}; accepted: a function of "
                f"{', '.join(ARGUMENTS_OF[role])}{_AND_TENSORS.get(role, '')}, in torch ops on 0-d tensors"
            ) from e
    if any(tuple(shapes[i]) != own_shapes[i] for i in mode.looked_at):  # symbolic ones: torch.export is told that they are fixed
        return _trace(role, mod, found, [[int(size) for size in shape] for shape in own_shapes])
    graph = normalised(role, module.graph, arguments, captures)
    used = {node.target for node in graph.nodes if node.op == "placeholder" and node.users}
    kept = [(capture, i) for i, capture in enumerate(captures) if capture.name in used]
    positions = tuple((capture.is_number, i - len(found.tensors) if capture.is_number else i) for capture, i in kept)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target not in arguments:
            graph.erase_node(node)
    return _Trace(graph, tuple(capture for capture, _ in kept), positions, tuple(sorted(mode.looked_at)))


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Those that take every pointwise op to one of a program's."""
    more = (
        *(_aten.gelu, _aten.elu, _aten.leaky_relu, _aten.hardtanh, _aten.copysign, _aten.hypot, _aten.masked_fill, _aten.where),
        *(_aten.tanh_backward, _aten.sigmoid_backward, _aten.gelu_backward, _aten.threshold_backward, _aten.isfinite),
    )
    return {**core_aten_decompositions(), **get_decompositions(list(more))}


def _distinct(names: Sequence[str]) -> list[str]:
    taken = {*ARGUMENTS, GRADIENT}
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


class _Watch(TorchFunctionMode):
    """While a mod runs: puts stand-ins for what it captures, keeps indices symbolic, and knows which line of the mod it is at."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.stand_in_of: dict[int, Tensor] = {}
        self.position: dict[int, int] = {}
        self.looked_at: set[int] = set()
        self.line: tuple[str, int] | None = None

    def standing_in(self, captured: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> _Watch:
        self.stand_in_of = {id(t): stand_in for t, stand_in in zip(captured, stand_ins, strict=True)}
        self.position = {id(t): i for i, t in enumerate(captured)} | {id(t): i for i, t in enumerate(stand_ins)}
        return self

    def place(self) -> str:
        """' at file:line: text', where the mod is."""
        return "" if self.line is None else place_of(self.line)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.line = _user_line() or self.line
        name = getattr(func, "__name__", "")
        if name in (
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "item",
            "tolist",
            "numpy",
            "__array__",
            "__contains__",
            "nonzero",
        ):
            hint = "use torch.where instead of if, and & | ~ instead of and, or, not" if name == "__bool__" else "use torch ops"
            raise _NeedsValueError(
                f"{self.role} asks for the value of a tensor ({name}){self.place()}; it is known only in the kernel: {hint}"
            )
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and owner in ("shape", "itemsize")) or name in ("size", "numel", "__len__", "stride"):
            self.looked_at |= {self.position[id(t)] for t in args if id(t) in self.position}
        args, kwargs = torch.utils._pytree.tree_map(lambda x: self.stand_in_of.get(id(x), x), (args, kwargs))
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            dtype = kwargs.get("dtype") or {bool: torch.bool, int: torch.int64, float: torch.float32}[type(args[0])]
            func, args, kwargs = torch.full, ((), args[0]), {"dtype": dtype}
        if func is torch.Tensor.__getitem__:
            return self._marked(self._item, args, {})
        if func is torch.Tensor.__setitem__:
            raise ValueError(f"{self.role} writes to a tensor{self.place()}; a mod can only read: return the new score instead")
        return self._marked(func, args, kwargs)

    def _marked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """func(*args), with this line noted on the nodes that it adds."""
        mode = get_proxy_mode()
        out = func(*args, **kwargs)
        if mode is not None and self.line is not None:
            for node in reversed(mode.tracer.graph.nodes):
                if "line" in node.meta:
                    break
                node.meta["line"] = self.line
        return out

    def _item(self, tensor: Tensor, index: Any) -> Tensor:
        """tensor[index] for integers, slices, ... and scalar tensors, which stay symbolic."""
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
                indices.append(torch.full((), part, dtype=torch.int64))
            else:
                what = f"a {part.dtype} tensor of {part.dim()} dims" if isinstance(part, Tensor) else repr(part)
                raise ValueError(
                    f"{self.role} indexes with {what}{self.place()}; accepted: integers and 0-d integer tensors, as in t[h, q_idx]"
                )
        if len(indices) > tensor.dim():
            raise ValueError(
                f"{self.role} takes {len(indices)} indices of a tensor with {tensor.dim()} dims{self.place()}; accepted: one for "
                "each dim at most"
            )
        return tensor if all(i is None for i in indices) else _aten.index.Tensor(tensor, indices)


def _user_line() -> tuple[str, int] | None:
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("mod_tape.py"):  # under torch.compile the mod's own frame is not to be had
            return None
        if not name.startswith((__file__, _TORCH, "<")):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def derive(score: Graph, captures: Sequence[Capture]) -> Graph:
    """The gradient of the score, and of each read of a capture that needs one, from the gradient of what score_mod returns.

    torch's autograd on the graph gives it, traced in turn. Outputs as `Program` says.
    """
    reads = [node for node in score.nodes if node.op == "call_function" and op_name(node) == "index"]
    wants = {capture.name: capture.needs_grad for capture in captures}
    positions = {capture.name: i for i, capture in enumerate(captures)}
    differentiable = [node for node in reads if wants[node.args[0].target]]
    placeholders = [node for node in score.nodes if node.op == "placeholder" and node.target not in positions]
    numbers = [capture.name for capture in captures if capture.is_number]
    score_placeholder = next((n for n in placeholders if n.target == "score"), None)

    def differentiated(gradient: Tensor, *values: Tensor) -> list[Tensor]:
        given = iter(values)
        inputs: dict[str, Any] = {node.target: next(given) for node in placeholders}
        inputs |= {name: next(given) for name in numbers}
        inputs |= {node.target: None for node in score.nodes if node.op == "placeholder" and node.target not in inputs}
        leaves = list(given)
        left = iter(leaves)
        with torch.enable_grad():
            inputs["score"] = inputs["score"].detach().requires_grad_()
            wanted = [inputs["score"]]
            values_read = []
            for node, leaf in zip(reads, leaves, strict=True):
                values_read.append(leaf.detach().requires_grad_() if node in differentiable else leaf)
                if node in differentiable:
                    wanted.append(values_read[-1])
            left = iter(values_read)
            out = evaluate(score, inputs, torch.float32, read=lambda _tensor, _indices: next(left))
        if not out.requires_grad:
            return [torch.zeros(()) for _ in wanted]
        return list(torch.autograd.grad(out, wanted, gradient, allow_unused=True, materialize_grads=True))

    assert score_placeholder is not None
    with neutral_state(), FakeTensorMode():
        scalars = [torch.empty((), dtype=node.meta["dtype"]) for node in placeholders]
        scalars += [torch.empty((), dtype=torch.float32) for _ in numbers]
        scalars += [torch.empty((), dtype=node.meta["dtype"]) for node in reads]
        traced = make_fx(differentiated, decomposition_table=_decompositions())(torch.empty(()), *scalars).graph

    # The forward's graph stays for the indices of the reads; what of it the derivative does not need is dropped.
    graph, inputs = new_graph((*ARGUMENTS, GRADIENT), captures)
    copies: dict[Node, Node] = {}
    for node in score.nodes:
        if node.op == "placeholder":
            copies[node] = inputs[node.target]
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta["dtype"] = node.meta["dtype"]
    stand_for = [inputs[GRADIENT], *(inputs[node.target] for node in placeholders), *(inputs[name] for name in numbers)]
    stand_for += [copies[node] for node in reads]
    values: dict[Node, Any] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            values[node] = stand_for[len(values)]
        elif node.op == "call_function":
            values[node] = converted("the derivative of score_mod", graph, node, values)
        else:
            results = [
                as_dtype(graph, values[x] if isinstance(x, Node) else x, torch.float32) for x in cast(list[Any], node.args[0])
            ]
    outputs: list[Any] = [None if _is_zero(results[0]) else results[0]]
    for node, value in zip(differentiable, results[1:], strict=True):
        if not _is_zero(value):
            indices = [copies[i] if isinstance(i, Node) else i for i in node.args[1]]
            outputs.append([positions[node.args[0].target], indices, value])
    graph.output(outputs)
    graph.eliminate_dead_code()
    cancel_factors(graph)
    return graph


def _is_always_true(graph: Graph) -> bool:
    result: Any = next(node.args[0] for node in graph.nodes if node.op == "output")
    return op_name(result) == "full" and bool(result.args[1])


def _is_zero(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) == "full" and bool(node.args[1] == 0)
