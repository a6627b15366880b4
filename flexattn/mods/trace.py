"""From a user's score_mod and mask_mod to a `Program`: traced with make_fx once, its backward derived, cached by contents.

The callables see scalars: 0-d tensors for the score and the four indices, and stand-ins for what they capture. Reads of captured
tensors are normalised to one index per dim, whatever views they went through.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.mod_program import (
    ARGUMENTS,
    GRADIENT,
    Capture,
    Program,
    decode_graph,
    encode_graph,
    evaluate,
    make_program,
    new_graph,
    op_name,
)
from flexattn.dispatch.neutral import neutral_state
from flexattn.mods.bands import conjunction, implied_band, is_identity, split_hidden
from flexattn.mods.captures import Captures, find_captures, runs_as_it_is
from flexattn.mods.graph import as_dtype, cancel_factors, converted
from flexattn.mods.tracer import NeedsValueError, Recorder, fake_mode, trace
from flexattn.warn import warn_once

Mod = Callable[..., Any]
_CACHE_SIZE = 256  # of each cache of traces


class Traced(NamedTuple):
    """Mods as a call hands them to the operators: the program, the values of its captures, and the band beside its mask."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    left: int | None = None  # query i sees no key before i - left, and none after i + right; None: open
    right: int | None = None
    looked_at: tuple[Tensor, ...] = ()  # captured tensors whose shapes decide what the program is


class _Trace(NamedTuple):
    """Same as `tracer.Trace` with the graph as text, which is equal for equal graphs: a mod without a key is derived once too."""

    text: str
    captures: tuple[Capture, ...]
    used: tuple[tuple[bool, int], ...]
    looked_at: tuple[int, ...]


_tracing = threading.RLock()  # held while a mod runs; nothing that is held meanwhile waits for another thread
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
    """Forgets every trace and the counts."""
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
    """Returns the program of a call's mods and the values of what they capture.

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
    graphs = tuple((kept.text, kept.captures) for kept, _ in parts)
    roles = tuple(role for role, mod in mods.items() if mod is not None)
    with _tracing:
        program, left, right = _joined(graphs, roles, needs_grad, find_band)
    tensors: list[Tensor] = []
    numbers: list[float] = []
    looked_at: list[Tensor] = []
    for kept, found in parts:
        looked_at += [found.tensors[i][1] for i in kept.looked_at]
        for is_float, position in kept.used:
            if is_float:
                numbers.append(found.floats[position][1])
            else:
                tensors.append(found.tensors[position][1])
    return Traced(program, tuple(tensors), tuple(numbers), left, right, tuple(looked_at))


runs_as_it_is(trace_mods)


def mod_source(
    score_mod: Mod | None = None, mask_mod: Mod | None = None, score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = ()
) -> str:
    """Returns the Triton functions that kernels inline for these mods: forward, gradient of the score, gradients of captures, mask.

    Raises what `trace_mods` raises, and ImportError without Triton.
    """
    traced = trace_mods(score_mod, mask_mod, score_mod_tensors, needs_grad=True)
    return triton_backend.mod_source(traced.program, traced.tensors)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _joined(
    graphs: tuple[tuple[str, tuple[Capture, ...]], ...], roles: tuple[str, ...], needs_grad: bool, find_band: bool
) -> tuple[Program, int | None, int | None]:
    """Returns one program for both mods, whose captures follow one another, each with a name of its own; and the band beside it."""
    taken: set[str] = {*ARGUMENTS, GRADIENT}
    captures: list[Capture] = []
    joined: list[Graph] = []
    for text, of_graph in graphs:
        graph = cast(Graph, decode_graph(json.loads(text)))
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
    """Returns a graph with its output in a list, as the outputs of a derivative are."""
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
    kept = _look_up(role, whole)
    if kept is None:
        with _tracing:
            return _look_up(role, whole) or _new_trace(role, mod, whole)
    if not torch.compiler.is_compiling() and options.check_values():
        _check_trace(role, mod, whole, *kept)
    return kept


def _found(role: str, whole: Mod) -> tuple[Captures, Hashable | None]:
    """Returns what a mod depends on, and the key of its traces; the default dtype is in it, as an index times a number has that."""
    found = find_captures(whole)
    if found.key is None:
        return found, None
    key = (role, found.key, torch.get_default_dtype())
    if key in _unlifted:
        found = find_captures(whole, lift=False)
        key = (role, found.key, torch.get_default_dtype())
    return found, key


def _look_up(role: str, whole: Mod) -> tuple[_Trace, Captures] | None:
    found, key = _found(role, whole)
    if key is None:
        return None
    with _lock:
        shapes = _looked_at.get(key)
        if shapes is None:
            return None
        known = _traces.get((key, _sizes(found, shapes)))
        if known is not None:
            _traces.move_to_end((key, _sizes(found, shapes)))
            _counts["hits"] += 1
            return known, found
    return None


def _new_trace(role: str, mod: Mod, whole: Mod) -> tuple[_Trace, Captures]:
    found, key = _found(role, whole)
    try:
        traced, met = trace(role, whole, found)
    except NeedsValueError:
        if not found.floats:
            raise
        # Python asked for a float's value (an if, math.sqrt): with the value as part of the key there is one.
        with _lock:
            _keep(_unlifted, key, True)
        found, key = _found(role, whole)
        traced, met = trace(role, whole, found)
    text = json.dumps(encode_graph(traced.graph), separators=(",", ":"))
    new = _Trace(text, traced.captures, traced.used, traced.looked_at)
    unkeyed = found.unkeyed or "it changes what it depends on, or reads a tensor that was not found beforehand"
    with _lock:
        _counts["traces"] += 1
        if key is not None and traced.is_settled:
            _keep(_looked_at, key, new.looked_at)
            _keep(_traces, (key, _sizes(found, new.looked_at)), new)
    if (key is None or not traced.is_settled) and not torch.compiler.is_compiling():
        name = _name(mod)
        warn_once(
            f"{role} {name} {unkeyed}",
            f"{role} {name} is traced again in each call, which takes milliseconds, as what it depends on cannot be known: "
            f"{unkeyed}. Use tensors, numbers, functions, and attributes by their names, of objects of plain classes.",
        )
    return new, met


def _check_trace(role: str, mod: Mod, whole: Mod, kept: _Trace, found: Captures) -> None:
    """Raises, under FLEXATTN_CHECK=1, where a kept trace differs from what would be traced now."""
    with _tracing:
        traced, _ = trace(role, whole, found)
    text = json.dumps(encode_graph(traced.graph), separators=(",", ":"))
    if (text, traced.captures, traced.used) != kept[:3]:
        raise RuntimeError(
            f"{role} {_name(mod)} is another graph now than when it was traced, and the state that changed it is not in its key: "
            "calls without FLEXATTN_CHECK=1 use the old graph, until flexattn.mods.trace.clear_cache(). Please report this"
        )


def _name(mod: Mod) -> str:
    return str(getattr(mod, "__qualname__", type(mod).__qualname__))


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


def derive(score: Graph, captures: Sequence[Capture]) -> Graph:
    """Derives the gradient of the score, and of each read of a capture that needs one, from that of score_mod's result.

    torch's autograd on the graph gives it, traced in turn. Outputs as `Program` says.
    """
    reads = [node for node in score.nodes if node.op == "call_function" and op_name(node) == "index"]
    wants = {capture.name: capture.needs_grad for capture in captures}
    positions = {capture.name: i for i, capture in enumerate(captures)}
    differentiable = [node for node in reads if wants[node.args[0].target]]
    placeholders = [node for node in score.nodes if node.op == "placeholder" and node.target not in positions]
    numbers = [capture.name for capture in captures if capture.is_number]
    assert any(node.target == "score" for node in placeholders)
    with neutral_state(), fake_mode():
        recorder = Recorder()
        gradient = recorder.input(GRADIENT, (), torch.float32)
        inputs: dict[str, Any] = {node.target: None for node in score.nodes if node.op == "placeholder"}
        inputs |= {node.target: recorder.input(node.target, (), node.meta["dtype"]) for node in placeholders}
        inputs |= {name: recorder.input(name, (), torch.float32) for name in numbers}
        leaves = [recorder.input(node.name, (), node.meta["dtype"]) for node in reads]
        with recorder:
            inputs["score"] = inputs["score"].detach().requires_grad_()
            values_read = [
                leaf.detach().requires_grad_() if node in differentiable else leaf for node, leaf in zip(reads, leaves, strict=True)
            ]
            wanted = [inputs["score"], *(x for x, node in zip(values_read, reads, strict=True) if node in differentiable)]
            left = iter(values_read)
            out = evaluate(score, inputs, torch.float32, read=lambda _tensor, _indices: next(left))
            if out.requires_grad:
                gradients = torch.autograd.grad(out, wanted, gradient, allow_unused=True, materialize_grads=True)
            else:
                gradients = tuple(torch.zeros((), dtype=torch.float32) for _ in wanted)
        traced = recorder.finish([*gradients])

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
    values: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), stand_for, strict=True))
    for node in traced.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "call_function":
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
