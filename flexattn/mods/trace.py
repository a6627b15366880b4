"""From a user's score_mod and mask_mod to a `Program`: traced with make_fx once, its backward derived, cached by contents.

The callables see scalars: 0-d tensors for the score and the four indices, and stand-ins for what they capture. Reads of captured
tensors are normalised to one index per dim, whatever views they went through.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.mod_program import ARGUMENTS, Capture, Program, encode_graph
from flexattn.dispatch.neutral import sizes_of
from flexattn.forks import fork_safe
from flexattn.mods.bands import Fact, Fill, Masks, fill_of
from flexattn.mods.captures import Captures, find_captures
from flexattn.mods.eager import runs_as_it_is
from flexattn.mods.tracer import NeedsValueError, trace
from flexattn.warn import warn_once

Mod = Callable[..., Any]
_CACHE_SIZE = 256  # entries of each cache of traces


class Traced(NamedTuple):
    """Mods as a call hands them to the operators: the program, the values of its captures, and the band beside its mask."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    left: int | None = None  # query i sees no key before i - left, and none after i + right; None: open
    right: int | None = None
    looked_at: tuple[Tensor, ...] = ()  # captured tensors whose shapes decide what the program is
    has_floor: bool = False  # the band is exact only where every query's lse is above `validation.FLOOR`


class _Trace(NamedTuple):
    """Same as `tracer.Trace` with the graph as text, which is equal for equal graphs: a mod without a key is derived once too."""

    text: str
    captures: tuple[Capture, ...]
    used: tuple[tuple[bool, int], ...]
    looked_at: tuple[int, ...]


_tracing = fork_safe(threading.RLock())  # held while a mod runs; nothing that is held meanwhile waits for another thread
_lock = fork_safe(threading.Lock())
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
    masks: Masks = Masks.NONE,
) -> Traced:
    """Returns the program of a call's mods and the values of what they capture.

    score_mod(score, b, h, q_idx, kv_idx, *score_mod_tensors) returns the modified score, mask_mod(b, h, q_idx, kv_idx) whether the
    query sees the key; score_mod_tensors may be a mapping, then they are keyword arguments. needs_grad: derive the backward, as is
    done anyhow where a captured tensor requires a gradient. masks: what the mods hide by kv_idx - q_idx is given as a band, and
    left out of the program where the band says all of it.

    Raises ValueError for what cannot be traced, with the line of the mod that it is about and what to use instead.
    """
    from flexattn.mods.joined import join  # here, as importing flexattn should not import what derives

    parts: list[tuple[_Trace, Captures]] = []
    gradient = getattr(score_mod, "score_mod_gradient", None)  # a backward that is given, not derived
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "score_mod_gradient": gradient}
    for role, mod in mods.items():
        if mod is not None:
            explicit = score_mod_tensors if role == "score_mod" else ()
            parts.append(_traced(role, mod, explicit))
    graphs = tuple((kept.text, kept.captures) for kept, _ in parts)
    roles = tuple(role for role, mod in mods.items() if mod is not None)
    values: list[tuple[bool, Any]] = []
    looked_at: list[Tensor] = []
    for kept, found in parts:
        looked_at += [found.tensors[i][1] for i in kept.looked_at]
        values += [(is_float, (found.floats if is_float else found.tensors)[position][1]) for is_float, position in kept.used]
    num_of_score = len(parts[0][0].used) if score_mod is not None else 0
    with _tracing:
        joined = join(graphs, roles, needs_grad, masks, _facts(values, num_of_score))
    taken = [values[i] for i in joined.kept]
    tensors = tuple(value for is_float, value in taken if not is_float)
    numbers = tuple(value for is_float, value in taken if is_float)
    return Traced(joined.program, tensors, numbers, joined.left, joined.right, tuple(looked_at), joined.has_floor)


def _facts(values: Sequence[tuple[bool, Any]], num_of_score: int) -> tuple[Fact, ...]:
    """Returns what decides of captured values how their program is simplified; the first `num_of_score` are score_mod's.

    Finite numbers other than 0 are the same where they are equal, tensors where they are one.
    """
    facts = []
    for i, (is_float, value) in enumerate(values):
        fill = fill_of(value) if is_float else Fill.NONE
        same_as = -1
        if i >= num_of_score and not (is_float and (value == 0 or not math.isfinite(value))):
            of_score = values[:num_of_score]
            same_as = next(
                (n for n, (kind, x) in enumerate(of_score) if kind is is_float and (x == value if is_float else x is value)), -1
            )
        facts.append(Fact(fill, same_as))
    return tuple(facts)


runs_as_it_is(trace_mods)


def find_all_captures(role: str, mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor] = ()) -> Captures:
    """Returns `find_captures` of a mod. If its objects have special methods, a trace shows before whether they are called."""
    if find_captures(mod).has_special:
        _traced(role, mod, explicit)
    return find_captures(mod)


def mod_source(
    score_mod: Mod | None = None, mask_mod: Mod | None = None, score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = ()
) -> str:
    """Returns the Triton functions that kernels inline for these mods: forward, gradient of the score, gradients of captures, mask.

    Raises what `trace_mods` raises, and ImportError without Triton.
    """
    traced = trace_mods(score_mod, mask_mod, score_mod_tensors, needs_grad=True)
    return triton_backend.mod_source(traced.program, traced.tensors)


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


def _refuse_callback(role: str, mod: Mod) -> None:
    """Raises TypeError for a callback of TransformerEngine's form, which takes three arguments where a score_mod takes five."""
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    accepted = []
    for count in (len(ARGUMENTS), 3):
        with contextlib.suppress(TypeError):
            signature.bind(*range(count))
            accepted.append(count)
    if role == "score_mod" and accepted == [3]:
        raise TypeError(
            f"score_mod {_name(mod)} takes three arguments {signature}, as TransformerEngine's callbacks score_mod(graph, score, "
            f"tensors) do; accepted: score_mod({', '.join(ARGUMENTS)}), or flexattn.integrations.te.TEScoreMod(score_mod, "
            "score_mod_bprop, score_mod_tensors), which takes such callbacks"
        )


def refuse_misplaced(argument: str, role: str, mod: Any) -> None:
    """Raises TypeError for a function of flexattn.mods that was not called, and for a mod of the other role that one made.

    role: "mask_mod" or "score_mod", that which `argument` is to be.
    """
    made = mod.func if isinstance(mod, functools.partial) else mod
    if torch.compiler.is_compiling() or getattr(made, "__module__", None) != "flexattn.mods.library":
        return
    names = list(inspect.signature(made).parameters)
    if not made.__name__.startswith("_"):
        call = f"mods.{made.__name__}"
        raise TypeError(f"{argument} is {call} itself; accepted: what it returns, {call}({', '.join(names)})")
    other = "score_mod" if names[0] == "score" else "mask_mod"
    if other != role:
        raise TypeError(f"{argument} is a {other} of flexattn.mods; accepted: a {role}; pass this as {other}")


def _new_trace(role: str, mod: Mod, whole: Mod) -> tuple[_Trace, Captures]:
    refuse_misplaced(role, role, mod)
    _refuse_callback(role, mod)
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
    with _lock:
        _counts["traces"] += 1
        if not traced.unsettled:
            _keep(_looked_at, key, new.looked_at)
            _keep(_traces, (key, _sizes(found, new.looked_at)), new)
    if traced.unsettled and not torch.compiler.is_compiling():
        name = _name(mod)
        warn_once(
            f"{role} {name} {traced.unsettled}",
            f"{role} {name} is traced again in each call, which takes milliseconds, as what it depends on cannot be known: "
            f"{traced.unsettled}. Use tensors, numbers, functions, and attributes by their names, of objects of plain classes.",
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
    return tuple(tuple(int(size) for size in sizes_of(found.tensors[i][1])) for i in positions)


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
