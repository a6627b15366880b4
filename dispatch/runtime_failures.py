"""Cache of backends that failed at run time, per spec or per call, with the reason. Bounded, safe in threads.

What a backend refuses is remembered for calls of the very shapes that it refused: another may differ. What the canary finds wrong
holds for its spec, whatever the shapes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.forks import fork_safe

Asked = tuple[str, AttentionSpec, Direction]  # a backend, and of what it was asked
Failures = tuple[tuple[Asked, str], ...]  # each with its reason

_CAPACITY = 1024
_of_specs: OrderedDict[Asked, str] = OrderedDict()
_of_shapes: OrderedDict[Hashable, Failures] = OrderedDict()
_lock = fork_safe(threading.Lock())


class RuntimeFailure(Exception):
    """Raised by a backend, before it writes anything, that cannot run a call which its `unsupported` had nothing against."""


def remember(backend: str, spec: AttentionSpec, direction: Direction, reason: str) -> None:
    """For every call of the spec."""
    with _lock:
        _keep(_of_specs, (backend, spec, direction), reason)


def remembered(backend: str, spec: AttentionSpec, direction: Direction) -> str | None:
    return _of_specs.get((backend, spec, direction))


def remember_call(x: Operands, asked: Asked, reason: str) -> None:
    """For calls whose operands look like these."""
    shape = shape_of(x)
    with _lock:
        before = dict(_of_shapes.get(shape, ()))
        _keep(_of_shapes, shape, (*{**before, asked: reason}.items(),))


def of_call(x: Operands) -> Failures:
    """Returns the failures of calls whose operands look like these, in both directions."""
    return _of_shapes.get(shape_of(x), ()) if _of_shapes else ()


def clear() -> None:
    with _lock:
        _of_specs.clear()
        _of_shapes.clear()


def _keep(kept: OrderedDict[Any, Any], key: Hashable, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _CAPACITY:
        kept.popitem(last=False)


# Inputs of a plan or a kernel, which depends on none of their values. A call may leave its rng_state to us, which is no other call.
_RUN_TIME = ("softmax_scale", "softcap", "mod_numbers", "rng_state")


def shape_of(x: Operands) -> Hashable:
    """All that a plan may depend on but the spec."""
    return tuple(_look(value) for name, value in x._asdict().items() if name not in _RUN_TIME)


def _look(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.element_size() % 16
        return value.shape, value.stride(), value.dtype, value.device, offset
    return tuple(map(_look, value)) if isinstance(value, (tuple, list)) else value
