"""Turns a user's score_mod and mask_mod into a `Program`: traces each once, derives the backward, and caches by contents.

The mods are called with scalars: 0-d tensors for the score and the four indices, and stand-ins for captured tensors. Reads of
captured tensors are normalised to one index per dim, even if the mod reads through views.
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

from flexattn.compat import runs_as_it_is
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.mod_program import ARGUMENTS, Capture, Program, encode_graph
from flexattn.dispatch.neutral import sizes_of
from flexattn.forks import fork_safe
from flexattn.mods.bands import Fact, Fill, Masks, fill_of
from flexattn.mods.captures import Captures, find_captures
from flexattn.mods.tracer import NeedsValueError, trace
from flexattn.warn import warn_once

Mod = Callable[..., Any]
_CACHE_SIZE = 256  # entries of each cache of traces


class Traced(NamedTuple):
    """Mods in the form that operators accept: the program, the values of its captures, and the band that the mask implies."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    left: int | None = None  # query i sees no key before i - left, and none after i + right; None: open
    right: int | None = None
    looked_at: tuple[Tensor, ...] = ()  # captured tensors whose shapes the program depends on
    has_floor: bool = False  # the band is exact only if every query's lse is above `validation.FLOOR`


class _Trace(NamedTuple):
    """Same as `tracer.Trace`, with the graph as text, equal if two graphs are equal: a mod without a key is derived once too."""

    text: str
    captures: tuple[Capture, ...]
    used: tuple[tuple[bool, int], ...]
    looked_at: tuple[int, ...]


_tracing = fork_safe(threading.RLock())  # held while a mod runs; no lock that is held meanwhile waits for another thread
_lock = fork_safe(threading.Lock())
_traces: OrderedDict[Hashable, _Trace] = OrderedDict()
_looked_at: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()  # the tensors whose shapes a trace depends on
_unlifted: OrderedDict[Hashable, bool] = OrderedDict()  # mods that could only be traced with the values of their floats
_counts = {"hits": 0, "traces": 0}


def cache_info() -> dict[str, int]:
    """Hits and traces since the start or `clear_cache`, and the number of cached traces (at most 256; eviction is by last use)."""
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
    """Returns the program of a call's mods and the values of their captures.

    score_mod(score, b, h, q_idx, kv_idx, *score_mod_tensors) returns the modified score. mask_mod(b, h, q_idx, kv_idx) returns
    whether the query sees the key. If score_mod_tensors is a mapping, its tensors are keyword arguments. needs_grad: derive the
    backward; it is derived anyway if a captured tensor requires a gradient. masks: the kinds of masks on kv_idx - q_idx that become
    a band, and leave the program if the band is all of the mask.

    Raises ValueError if a mod cannot be traced, with the line of the mod and a replacement.
    """
    from flexattn.mods.joined import join  # a late import: importing flexattn should not import the derivation

    parts: list[tuple[_Trace, Captures]] = []
    gradient = getattr(score_mod, "score_mod_gradient", None)  # an explicit backward, which replaces the derived one
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "score_mod_gradient": gradient}
    for role, mod in mods.items():
        if mod is not None:
            explicit = score_mod_tensors if role == "score_mod" else ()
            parts.append(_traced(role, mod, explicit))
    graphs = tuple((kept.text, kept.captures) for kept, _ in parts)
    roles = tuple(role for role, mod in mods.items() if mod is not None)
    values: list[tuple[bool, Any]] = []
    looked_at: list[Tensor] = []
    for kept, captures in parts:
        looked_at += [captures.tensors[i][1] for i in kept.looked_at]
        values += [(is_float, (captures.floats if is_float else captures.tensors)[position][1]) for is_float, position in kept.used]
    num_score_values = len(parts[0][0].used) if score_mod is not None else 0
    with _tracing:
        joined = join(graphs, roles, needs_grad, masks, _facts(values, num_score_values))
    taken = [values[i] for i in joined.kept]
    tensors = tuple(value for is_float, value in taken if not is_float)
    numbers = tuple(value for is_float, value in taken if is_float)
    return Traced(joined.program, tensors, numbers, joined.left, joined.right, tuple(looked_at), joined.has_floor)


def _facts(values: Sequence[tuple[bool, Any]], num_score_values: int) -> tuple[Fact, ...]:
    """Returns the facts of captured values that simplify their program. The first `num_score_values` values are score_mod's.

    Two finite numbers other than 0 are the same if they are equal; two tensors are the same if they are one object.
    """
    facts = []
    for i, (is_float, value) in enumerate(values):
        fill = fill_of(value) if is_float else Fill.NONE
        same_as = -1
        if i >= num_score_values and not (is_float and (value == 0 or not math.isfinite(value))):
            score_values = values[:num_score_values]
            same_as = next(
                (n for n, (kind, x) in enumerate(score_values) if kind is is_float and (x == value if is_float else x is value)), -1
            )
        facts.append(Fact(fill, same_as))
    return tuple(facts)


runs_as_it_is(trace_mods)


def find_all_captures(role: str, mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor] = ()) -> Captures:
    """Returns `find_captures` of a mod. If its objects have special methods, a trace first shows whether the mod calls them."""
    if find_captures(mod).has_special:
        _traced(role, mod, explicit)
    return find_captures(mod)


def mod_source(
    score_mod: Mod | None = None, mask_mod: Mod | None = None, score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = ()
) -> str:
    """Returns the Triton functions that kernels inline for these mods: forward, gradient of the score, gradients of captures, mask.

    Raises the errors of `trace_mods`, and ImportError if Triton is not installed.
    """
    traced = trace_mods(score_mod, mask_mod, score_mod_tensors, needs_grad=True)
    return triton_backend.mod_source(traced.program, traced.tensors)


def _traced(role: str, mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor]) -> tuple[_Trace, Captures]:
    if not callable(mod):
        raise TypeError(f"{role} is {mod!r} ({type(mod).__name__}); accepted: a function, or None")
    bound = _with_tensors(mod, explicit) if explicit else mod
    kept = _look_up(role, bound)
    if kept is None:
        with _tracing:
            return _look_up(role, bound) or _new_trace(role, mod, bound)
    if not torch.compiler.is_compiling() and options.check_values():
        _check_trace(role, mod, bound, *kept)
    return kept


def _captures_and_key(role: str, bound: Mod) -> tuple[Captures, Hashable | None]:
    """Returns the captures of a mod and the key of its traces, which has the default dtype: an index times a number has it too."""
    captures = find_captures(bound)
    if captures.key is None:
        return captures, None
    key = (role, captures.key, torch.get_default_dtype())
    if key in _unlifted:
        captures = find_captures(bound, lift=False)
        key = (role, captures.key, torch.get_default_dtype())
    return captures, key


def _look_up(role: str, bound: Mod) -> tuple[_Trace, Captures] | None:
    captures, key = _captures_and_key(role, bound)
    if key is None:
        return None
    with _lock:
        shapes = _looked_at.get(key)
        if shapes is None:
            return None
        known = _traces.get((key, _sizes(captures, shapes)))
        if known is not None:
            _traces.move_to_end((key, _sizes(captures, shapes)))
            _counts["hits"] += 1
            return known, captures
    return None


def _refuse_callback(role: str, mod: Mod) -> None:
    """Raises TypeError for a callback of TransformerEngine's form: it has three arguments, and a score_mod has five."""
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
            f"score_mod {_name(mod)} has three arguments {signature}, like TransformerEngine's callbacks score_mod(graph, score, "
            f"tensors); accepted: score_mod({', '.join(ARGUMENTS)}), or flexattn.integrations.te.TEScoreMod(score_mod, "
            "score_mod_bprop, score_mod_tensors) for such callbacks"
        )


def refuse_misplaced(argument: str, role: str, mod: Any) -> None:
    """Raises TypeError if `mod` is a function of flexattn.mods that was not called, or a mod of the other role made by one.

    role: the role of `argument`, "mask_mod" or "score_mod".
    """
    maker = mod.func if isinstance(mod, functools.partial) else mod
    if torch.compiler.is_compiling() or getattr(maker, "__module__", None) != "flexattn.mods.library":
        return
    names = list(inspect.signature(maker).parameters)
    if not maker.__name__.startswith("_"):
        call = f"mods.{maker.__name__}"
        raise TypeError(f"{argument} is the function {call} itself; accepted: its result, {call}({', '.join(names)})")
    other = "score_mod" if names[0] == "score" else "mask_mod"
    if other != role:
        raise TypeError(f"{argument} is a {other} of flexattn.mods; accepted: a {role}; pass this as {other}")


def _new_trace(role: str, mod: Mod, bound: Mod) -> tuple[_Trace, Captures]:
    refuse_misplaced(role, role, mod)
    _refuse_callback(role, mod)
    captures, key = _captures_and_key(role, bound)
    try:
        traced, met = trace(role, bound, captures)
    except NeedsValueError:
        if not captures.floats:
            raise
        # Python asked for a float's value (an if, math.sqrt): the value is known if it is part of the key.
        with _lock:
            _keep(_unlifted, key, True)
        captures, key = _captures_and_key(role, bound)
        traced, met = trace(role, bound, captures)
    text = json.dumps(encode_graph(traced.graph), separators=(",", ":"))
    new = _Trace(text, traced.captures, traced.used, traced.looked_at)
    with _lock:
        _counts["traces"] += 1
        if not traced.unsettled:
            _keep(_looked_at, key, new.looked_at)
            _keep(_traces, (key, _sizes(captures, new.looked_at)), new)
    if traced.unsettled and not torch.compiler.is_compiling():
        name = _name(mod)
        warn_once(
            f"{role} {name} {traced.unsettled}",
            f"{role} {name} is traced again in each call, which takes milliseconds, because its dependencies are not known: "
            f"{traced.unsettled}. Use tensors, numbers, functions, and attributes by their names, of objects of plain classes.",
        )
    return new, met


def _check_trace(role: str, mod: Mod, bound: Mod, kept: _Trace, captures: Captures) -> None:
    """Raises RuntimeError if a cached trace differs from a new trace of the same mod. Only FLEXATTN_CHECK=1 makes this check."""
    with _tracing:
        traced, _ = trace(role, bound, captures)
    text = json.dumps(encode_graph(traced.graph), separators=(",", ":"))
    if (text, traced.captures, traced.used) != kept[:3]:
        raise RuntimeError(
            f"{role} {_name(mod)} is another graph now than when it was traced, and the state that changed it is not in its key: "
            "calls without FLEXATTN_CHECK=1 use the old graph, until flexattn.mods.trace.clear_cache(). Please report this"
        )


def _name(mod: Mod) -> str:
    return str(getattr(mod, "__qualname__", type(mod).__qualname__))


def _sizes(captures: Captures, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in sizes_of(captures.tensors[i][1])) for i in positions)


def _keep(cache: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)


def _with_tensors(mod: Mod, explicit: Sequence[Tensor] | Mapping[str, Tensor]) -> Mod:
    if isinstance(explicit, Mapping):
        return functools.partial(mod, **explicit)
    tensors = tuple(explicit)

    def with_tensors(*arguments: object) -> object:
        return mod(*arguments, *tensors)

    return with_tensors
