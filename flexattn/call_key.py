"""Key of a call, by which `flexattn.call_cache` finds a kept call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat
from flexattn.call_options import ALIASES, DEFAULTS, NO_TENSORS, TENSOR_OPTIONS, Fp8Options, ModOptions, ReturnOptions
from flexattn.dispatch import context, options
from flexattn.dispatch.neutral import is_ordinary as is_ordinary
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import OPEN_WINDOW

PLAIN = frozenset((Tensor, torch.nn.Parameter))
counts = {"hits": 0, "misses": 0, "recordings": 0}  # since the last `clear_cache`


class CallKey(NamedTuple):
    """Key of a call, with the call's tensors and numbers."""

    parts: tuple[Hashable, Any]  # the key without its numbers, and the numbers
    tensors: tuple[Tensor | None, ...]  # fields of `Operands`: all, or q, k and v; tensors of FP8 or a backward; captures of mods
    num_arguments: int  # number of tensors before the captured ones
    addresses: Sequence[int]
    block_mask: Any


Values = list[Any]


class Split:
    """Picks the parts of a key from a call's values. `split_of` returns the one for the names of a call's options.

    The values are [*CONSTANTS, split, q, k, v, *options.values()]. So the key only has the options that the call passes, and the
    split represents their names.
    """

    __slots__ = ("all_tensors", "fp8", "is_known", "is_odd", "mods", "others", "returns_more", "tensors", "window")

    def __init__(self, names: tuple[str, ...]) -> None:
        given = {*names}
        places = {name: place for place, name in enumerate(("", "q", "k", "v", *names), len(CONSTANTS))}

        def pick(*wanted: str) -> Any:
            return operator.itemgetter(*(places.get(name, _ABSENT.get(name, 0)) for name in wanted))

        mods, fp8 = tuple(ModOptions.__annotations__), tuple(Fp8Options.__annotations__)
        numbers = ("softmax_scale", "softcap")  # first, because `call_cache` takes a call with other numbers for one of a family
        apart = {*TENSOR_OPTIONS, *mods, *fp8, *numbers, "window_size"}
        self.is_known = given <= DEFAULTS.keys()  # whether `attention` has all of the names
        # whether a name is unknown, or `shorthands.without_aliases` has to come first
        self.is_odd = not self.is_known or not given.isdisjoint(ALIASES)
        self.returns_more = not given.isdisjoint(ReturnOptions.__annotations__)  # whether the call may return lse or max_logit
        self.all_tensors = pick("q", "k", "v", *TENSOR_OPTIONS)
        # q, k and v; all tensors if the options have any other
        self.tensors = pick("q", "k", "v") if given.isdisjoint(TENSOR_OPTIONS) else self.all_tensors
        self.others = pick(*numbers, "", *(name for name in names if name not in apart))
        self.window = pick("window_size")
        self.mods = None if given.isdisjoint(mods) else pick(*mods)
        self.fp8 = None if given.isdisjoint(fp8) else pick(*fp8)

    def parts(self, values: Values) -> tuple[Any, Any, Any, Any] | None:
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
        return tensors, others, self.window(values), None if self.mods is None else self.mods_of(values)

    def mods_of(self, values: Values) -> tuple[Any, Any, Any, Any] | None:
        """Returns score_mod, mask_mod, score_mod_tensors and block_mask; None if all have their defaults."""
        mods: Any = None if self.mods is None else self.mods(values)
        is_plain = mods is None or (mods[0] is mods[1] is mods[3] is None and mods[2] is NO_TENSORS)
        return None if is_plain else mods


CONSTANTS = (None, DEFAULTS["softcap"], NO_TENSORS, OPEN_WINDOW)
_ABSENT = {"softcap": 1, "score_mod_tensors": 2, "window_size": 3}  # places of the constants for options that are absent; else 0
split_of = functools.lru_cache(maxsize=1024)(Split)


make_key = functools.partial(tuple.__new__, CallKey)  # a NamedTuple's own constructor takes twice the time


def low_bits(addresses: Sequence[int]) -> bytes:
    """Distance of each address from the multiple of 16 bytes below it."""
    return bytes([address & 15 for address in addresses])


def same_tensors(ids: Sequence[int]) -> tuple[int, ...]:
    """Returns for each tensor the position of its first occurrence: a tensor given twice is copied or checked once."""
    return tuple([ids.index(i) for i in ids])


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
    return (_has_grad(), compat.is_deterministic(), context.current(), environment, select.generation, autocast)


# Looked up once: each look into torch's modules costs a call some 20 ns.
_has_grad, _has_autocast, is_profiled = (
    torch.is_grad_enabled,
    compat.is_any_autocast_enabled,
    compat.is_profiler_enabled,
)


def are_values_read(t: Tensor) -> bool:
    """Returns whether a check may read a tensor's values: on a CPU, which waits for nothing; elsewhere under FLEXATTN_CHECK=1.

    A trace, a mode or a transform has no values to read, or would record the check.
    """
    if torch.compiler.is_compiling() or type(t) not in PLAIN or t.device.type == "meta" or not is_ordinary():
        return False
    return t.device.type == "cpu" or options.check_values()


class Captured(NamedTuple):
    """Tensors, parts of a key and floats that mods depend on."""

    tensors: list[Tensor]
    parts: tuple[Any, ...]  # all other values, except for the floats
    values: tuple[Any, ...]  # bits of the floats


def captured_by(score_mod: Any, mask_mod: Any, block_mask: Any) -> Captured | None:
    """Returns the values that mods depend on; None if the mods have no key."""
    from flexattn.mods.captures import find_captures  # here, because calls without mods should not wait for its import

    tensors: list[Tensor] = []
    parts: list[Any] = [torch.get_default_dtype()]  # the dtype of an index times a number
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
