"""Cache of calls: one look-up leads from the arguments of attention() to a `KeptCall` that runs them, here or over ranks.

The checks, the spec and the choice of a backend read only parts of a call, and the key has all of them. These are each tensor's
type, shape, strides, dtype, device, alignment and whether it requires a gradient. They are each other argument with its type, the
graphs of the mods, and the state around the call: grad mode, the backend asked for, the environment variables, torch's switches,
failures of backends. If a key is known, the checks passed before, and the choice is the same. Calls with tensor subclasses, modes,
transforms, tracing, or FLEXATTN_CANARY have no key, and run by the operators (`autograd`). Under FLEXATTN_CHECK, calls are kept,
and prepared each time.

There are two caches. `_recent` has the calls that were found last. A look-up first compares a call with those that may differ from
it only in their tensors, all tensors at once (`likeness`). Only if none is like it, the look-up makes the whole key and searches
`_calls`, which has all calls. At most 1024 calls are kept, and those in use stay.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat, ops
from flexattn.cached_call import CachedCall, KeptCall, counts, lock
from flexattn.call_options import ALIASES, DEFAULTS, NO_TENSORS, TENSOR_OPTIONS, Fp8Options, ModOptions, ReturnOptions
from flexattn.dispatch import options
from flexattn.dispatch.neutral import is_capturing, is_ordinary
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import OPEN_WINDOW, TENSOR_FIELDS, Operands
from flexattn.forks import fork_safe
from flexattn.likeness import PLAIN, Likeness, likeness_of, low_bits, same_tensors

if TYPE_CHECKING:
    from flexattn.fp8_steps import Fp8Steps

fork_safe(lock)

MOST_CALLS = 1024
_MOST_RECENT = 4  # calls in _recent that differ in their tensors alone

# For each key without its numbers: the calls by their numbers (see `_split`).
_Numbers = tuple[float | None, float | None, object]  # softmax_scale, softcap and the bits of the floats that mods capture
_calls: OrderedDict[Hashable, dict[_Numbers, KeptCall]] = OrderedDict()
_size = 0  # calls in _calls
# Calls that were found last, by the part of the key for all but tensors. A `Likeness` compares the tensors.
_Recent = tuple[tuple[Likeness, Hashable, KeptCall], ...]
_recent: dict[Hashable, _Recent] = {}
# The entry of `_recent` that was used last, because a comparison takes less time than a hash.
_latest: tuple[Hashable, _Recent] = None, ()


class CallKey(NamedTuple):
    """Key of a call, with the call's tensors and numbers."""

    parts: tuple[Hashable, _Numbers]  # the key without its numbers, and the numbers
    tensors: tuple[Tensor | None, ...]  # fields of `Operands`: all, or q, k and v; tensors of FP8 or a backward; captures of mods
    num_arguments: int  # number of tensors before the captured ones
    addresses: Sequence[int]
    block_mask: object


Values = list[Any]
Mods = tuple[Any, Any, Any, Any]  # score_mod, mask_mod, score_mod_tensors and block_mask


class Split:
    """Picks the parts of a key from a call's values. `split_of` returns the one for the names of a call's options.

    The values are [*CONSTANTS, split, q, k, v, *options.values()]. So the key only has the options that the call passes, and the
    split represents their names.
    """

    __slots__ = ("all_tensors", "fp8", "is_known", "is_odd", "mods", "others", "returns_more", "tensors", "window")

    def __init__(self, names: tuple[str, ...]) -> None:
        given = {*names}
        places = dict(zip(("", "q", "k", "v", *names), itertools.count(len(CONSTANTS)), strict=False))

        def pick(*wanted: str) -> Any:
            return operator.itemgetter(*(places.get(name, _ABSENT.get(name, 0)) for name in wanted))

        mods, fp8 = tuple(ModOptions.__annotations__), tuple(Fp8Options.__annotations__)
        numbers = ("softmax_scale", "softcap")  # first, because `call_cache` takes a call with other numbers for one of a family
        apart = {*TENSOR_OPTIONS, *mods, *fp8, *numbers, "window_size"}
        self.is_known = given <= DEFAULTS.keys()  # whether `attention` has all of the names
        # whether a name is unknown, or `shorthands.without_aliases` has to come first
        self.is_odd = not self.is_known or not given.isdisjoint((*ALIASES, "kv_block_size", "return_aux"))
        self.returns_more = not given.isdisjoint(ReturnOptions.__annotations__)  # whether the call may return lse or max_logit
        self.all_tensors = pick("q", "k", "v", *TENSOR_OPTIONS)
        # q, k and v; all tensors if the options have any other
        self.tensors = pick("q", "k", "v") if given.isdisjoint(TENSOR_OPTIONS) else self.all_tensors
        self.others = pick(*numbers, "", *(name for name in names if name not in apart))
        self.window = pick("window_size")
        self.mods = None if given.isdisjoint(mods) else pick(*mods)
        self.fp8 = None if given.isdisjoint(fp8) else pick(*fp8)

    def parts(self, values: Values) -> tuple[Any, Any, Any, Mods | None] | None:
        """Returns the arguments of `call_cache.look_up`; None if the state of an FP8 call has no key."""
        tensors, others = self.tensors(values), self.others(values)
        if self.fp8 is not None:
            recipe, state, *descales = self.fp8(values)
            if not (recipe is state is None and all(descale is None for descale in descales)):
                from flexattn.fp8 import state_tensors  # here, because calls without FP8 should not wait for its import

                fp8_tensors = state_tensors(state)
                if fp8_tensors is None:
                    return None
                tensors = (*self.all_tensors(values), *descales, *fp8_tensors)
                others += (recipe, state is None or state.recipe is recipe or state.recipe)
        return tensors, others, self.window(values), self.mods_of(values)

    def mods_of(self, values: Values) -> Mods | None:
        """Returns score_mod, mask_mod, score_mod_tensors and block_mask; None if all have their defaults."""
        mods: Mods | None = None if self.mods is None else self.mods(values)
        is_plain = mods is None or (mods[0] is mods[1] is mods[3] is None and mods[2] is NO_TENSORS)
        return None if is_plain else mods


CONSTANTS = (None, DEFAULTS["softcap"], NO_TENSORS, OPEN_WINDOW)
_ABSENT = {"softcap": 1, "score_mod_tensors": 2, "window_size": 3}  # places of the constants for options that are absent; else 0
split_of = functools.lru_cache(maxsize=1024)(Split)


make_key = functools.partial(tuple.__new__, CallKey)  # a NamedTuple's own constructor takes twice the time


def state_around() -> Hashable | None:
    """Returns the state, except arguments, that a call depends on; None if a mode, transform, trace or check needs operators."""
    if not is_ordinary():
        return None
    environment = options.snapshot()
    if environment is None:
        return None
    autocast = None
    if _has_autocast():
        autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
    return (_has_grad(), _is_deterministic(), options.current(), environment, select.generation, autocast)


# Looked up once: each look into torch's modules costs a call some 20 ns.
_has_grad, _has_autocast = torch.is_grad_enabled, compat.is_any_autocast_enabled
_is_deterministic = compat.is_deterministic


class Captured(NamedTuple):
    """Tensors, parts of a key and floats that mods depend on."""

    tensors: list[Tensor]
    parts: tuple[object, ...]  # all other values, except for the floats
    values: tuple[object, ...]  # bits of the floats


def captured_by(score_mod: Any, mask_mod: Any, block_mask: Any) -> Captured | None:
    """Returns the values that mods depend on; None if the mods have no key."""
    from flexattn.mods.captures import find_captures  # here, because calls without mods should not wait for its import

    tensors: list[Tensor] = []
    parts: list[object] = [torch.get_default_dtype()]  # the dtype of an index times a number
    values = []
    gradient = getattr(score_mod, "score_mod_gradient", None)
    for mod in (score_mod, mask_mod) if gradient is None else (score_mod, mask_mod, gradient):
        if mod is None:
            parts.append(None)
            continue
        captures = find_captures(mod, tensors_too=False)
        if captures.key is None:
            return None
        parts.append(captures.key)
        values.append(captures.values)
        for _, t in captures.tensors:
            tensors.append(t)
    if block_mask is not None:
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.q_num_blocks, block_mask.q_indices)
        parts += (type(block_mask), tuple(block_mask.BLOCK_SIZE), *(t.shape for t in lists))
    return Captured(tensors, tuple(parts), tuple(values))


def cache_info() -> dict[str, int]:
    """Hits and misses since the start or `clear_cache` (no lock: near enough with threads), recordings made, the size."""
    with lock:
        return {**counts, "size": _size}


def kept_calls() -> list[CachedCall]:
    """Returns all calls in the cache, except those over ranks."""
    with lock:
        return [call for siblings in _calls.values() for call in siblings.values() if isinstance(call, CachedCall)]


def clear_cache() -> None:
    """Drops all calls and the counts."""
    global _size
    with lock:
        _calls.clear()
        _size = 0
        _forget_recent()
        counts.update(hits=0, misses=0, recordings=0)


def _forget_recent() -> None:
    global _latest
    _recent.clear()
    _latest = None, ()


def look_up(
    tensors: tuple[Tensor | None, ...], others: tuple[object, ...], window_size: Any, mods: Mods | None
) -> tuple[CallKey | None, KeptCall | None]:
    """Returns the key of a call, or None if it has none, and the call that was kept with it, if any.

    tensors: q, k and v, and then nothing or the other fields of `Operands` that are tensors, and those of FP8 or of a backward.
    others: all other arguments, except for mods and window_size. softmax_scale and softcap come first if the call has them: a call
    with other ones may be made of a kept one. mods: score_mod, mask_mod, score_mod_tensors and block_mask, or None.
    """
    global _latest
    try:
        state = state_around()
        if state is None:
            return None, None
        window: tuple[object, ...] | None = None
        if window_size is not OPEN_WINDOW:
            sides = (window_size,) if type(window_size) is int else window_size
            window = (*sides, type(window_size), *map(type, sides))
        num_arguments = len(tensors)
        block_mask, mod_parts, values = None, None, None
        if mods is not None:
            score_mod, mask_mod, explicit, block_mask = mods
            if explicit:
                return None, None
            if block_mask is not None:
                if mask_mod is not None:
                    return None, None
                mask_mod = block_mask.mask_mod
            captured = captured_by(score_mod, mask_mod, block_mask)
            if captured is None:
                return None, None
            tensors, mod_parts, values = (*tensors, *captured.tensors), captured.parts, captured.values
        # The types come first, so that others are compared with values of their own types alone.
        rest = (tuple(map(type, others)), (num_arguments, len(tensors)), others, state, window, mod_parts, values)
        latest, recent = _latest
        if latest != rest:
            recent = _recent.get(rest, ())
            if recent:
                _latest = rest, recent
        for likeness, whole, known in recent:
            addresses = likeness.addresses(tensors)
            if addresses is not None:
                known.is_used = True
                counts["hits"] += 1
                return make_key((whole, tensors, num_arguments, addresses, block_mask)), known
        return _look_up_all(rest, tensors, num_arguments, block_mask)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # there is no such key, and the checks of the call name the error
        return None, None


def _look_up_all(
    rest: tuple[object, ...], tensors: tuple[Tensor | None, ...], num_arguments: int, block_mask: object
) -> tuple[CallKey | None, KeptCall | None]:
    """`look_up` among all calls, by the whole key. rest: its part for all but tensors."""
    global _latest
    rest_without, numbers = _split(rest)
    parts: list[object] = [rest_without]
    addresses, together, ids = [], 0, []
    for t in tensors:
        if t is None:
            addresses.append(0)
            parts.append(None)
            continue
        if type(t) not in PLAIN or t.is_neg():
            return None, None
        address = t.data_ptr()
        if not address and (t.is_meta or t.numel()):  # a tensor of a trace, or one that stands for zeros
            return None, None
        together |= address
        addresses.append(address)
        ids.append(id(t))
        parts += (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
    if together & 15:
        parts.append(low_bits(addresses))
    if addresses[1] == addresses[2]:
        parts.append("v lies in k")  # kernels load it once
    if len(set(ids)) < len(ids):
        parts.append(same_tensors(ids))
    whole = kind, numbers = tuple(parts), numbers
    siblings = _calls.get(kind)
    known = None if siblings is None else siblings.get(numbers)
    if known is None and siblings is not None:
        known = _with_other_numbers(kind, numbers, siblings)
    key = make_key((whole, tensors, num_arguments, addresses, block_mask))
    if known is None or known.is_checked:  # a checked call is prepared again for its checks, and then found by `new_call`
        return key, None
    known.is_used = True
    counts["hits"] += 1
    if known.likeness is None:
        known.likeness = likeness_of(tensors)
    if known.likeness is not None:
        with lock:
            others = [entry for entry in _recent.get(rest, ()) if entry[2] is not known]
            recent = _recent[rest] = ((known.likeness, whole, known), *others[: _MOST_RECENT - 1])
            _latest = rest, recent
            if len(_recent) > MOST_CALLS:
                _forget_recent()
    return key, known


_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def _split(rest: tuple[Any, ...]) -> tuple[Hashable, _Numbers]:
    """Returns the part of a key for all but tensors without its numbers, and the numbers.

    The part still has whether softmax_scale and softcap are 0, because the spec and the choice of kernels depend on it. If a number
    is not a float in the range that `validation.check_scalars` accepts, both stay in the part, and are None among the numbers.
    """
    kinds, counts, others, state, window, mod_parts, values = rest
    scale, softcap = others[:2]
    if (
        type(scale) is float
        and type(softcap) is float
        and 0.0 <= scale <= _LARGEST
        and (softcap == 0.0 or _SMALLEST <= softcap <= _LARGEST)
    ):
        others = scale == 0.0, softcap == 0.0, others[2:]
    else:
        scale = softcap = None
    return (kinds, counts, others, state, window, mod_parts), (scale, softcap, values)


def _with_other_numbers(kind: Hashable, numbers: _Numbers, siblings: dict[_Numbers, KeptCall]) -> KeptCall | None:
    """Returns a call, kept from now on, made of one that differs only in softmax_scale and softcap; None without one."""
    scale, softcap, values = numbers
    if scale is None or softcap is None:
        return None
    with lock:
        other = next((call for (*_, x), call in reversed(siblings.items()) if x == values), None)
    made = None if other is None else other.with_numbers(scale, softcap)
    if made is not None:
        _keep(kind, numbers, made)
    return made


def new_call(
    key: CallKey, x: Operands, settings: ops.Settings, alibi_slopes: Tensor | None, fp8: Fp8Steps | None = None
) -> CachedCall | None:
    """Returns a call to be kept, or under FLEXATTN_CHECK one that was kept; None if its operands are not the unchanged arguments.

    alibi_slopes: the argument. The slopes that replace None are the same each time. fp8: FP8's part of the call, which has the
    descales.
    """
    is_checked = options.check_values()
    kind, numbers = key.parts
    siblings = _calls.get(kind, {})
    kept = siblings.get(numbers) if is_checked else None
    if isinstance(kept, CachedCall):
        kept.is_used = True
        counts["hits"] += 1
        return kept
    known = {*TENSOR_FIELDS, "mod_tensors", "block_mask"} | ({"descales"} if fp8 is not None else set())
    others = (value for name, value in x._asdict().items() if name not in known)
    if any(isinstance(leaf, Tensor) for value in others for leaf in (value if isinstance(value, (tuple, list)) else (value,))):
        return None  # `CachedCall.operands` would not put such a tensor in its place
    if x.alibi_slopes is not None and (x.alibi_slopes.is_inference() or is_capturing(x.q.device)):
        return None  # later calls may not use slopes of a captured graph
    position: dict[int, int] = {}
    for i, tensor in enumerate(key.tensors):
        if tensor is not None:
            position.setdefault(id(tensor), i)
    has_own = x.alibi_slopes is not None or x.dropout_p > 0.0  # slopes and seeds may be no arguments
    names = TENSOR_FIELDS if has_own else TENSOR_FIELDS[: key.num_arguments]
    sources: list[int | Tensor | None] = []
    for name, t in zip((*names, *("mod" for _ in x.mod_tensors)), (*x[: len(names)], *x.mod_tensors), strict=True):
        if t is None or name == "rng_state":
            sources.append(None)
        elif id(t) in position:
            sources.append(position[id(t)])
        elif name == "alibi_slopes" and alibi_slopes is None:
            sources.append(x.alibi_slopes)
        else:
            return None  # it was copied or moved on the way
    cls = CachedCall
    if is_checked:
        from flexattn.checked_call import CheckedCall as cls  # here, as few processes check
    made = cls(x, settings, names, sources, fp8)
    with lock:
        latest = next(reversed(siblings.values()), None)
    if isinstance(latest, CachedCall) and latest.differs_in_numbers_alone(made):
        made.take_recordings(latest)
    return made


def remember(key: CallKey, call: KeptCall) -> None:
    """Adds a call that ran without an error to the cache."""
    kind, numbers = key.parts
    if call.is_checked and _calls.get(kind, {}).get(numbers) is call:
        return
    if not has_tensor_numbers(key):
        _keep(kind, numbers, call)


def has_tensor_numbers(key: CallKey) -> bool:
    """Returns whether an argument is a tensor in place of a number, which may change: the key has only the object."""
    whole: Any = key.parts[0]
    kinds, _, _, _, window, _ = whole[0]
    return any(isinstance(part, type) and issubclass(part, Tensor) for part in (*kinds, *(window or ())))


def _keep(kind: Hashable, numbers: _Numbers, call: KeptCall) -> None:
    global _size
    with lock:
        counts["misses"] += 1
        siblings = _calls.setdefault(kind, {})
        _size += numbers not in siblings
        siblings[numbers] = call
        _calls.move_to_end(kind)
        if _size > MOST_CALLS:
            _forget_recent()
        while _size > MOST_CALLS:  # drops the oldest call that was not used since it was last looked at
            first, siblings = next(iter(_calls.items()))
            numbers, oldest = next(iter(siblings.items()))
            del siblings[numbers]
            if oldest.is_used:
                oldest.is_used = False
                siblings[numbers] = oldest
                _calls.move_to_end(first)
            else:
                _size -= 1
                if not siblings:
                    del _calls[first]
