"""Cache of backends that failed at run time, per spec or per call, with the reason. It is bounded and thread-safe.

If a backend refuses a call, that is cached for calls of the same shapes, because other shapes may run. If the canary finds a wrong
result, that is cached for the spec, in all shapes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.forks import fork_safe

Request = tuple[str, AttentionSpec, Direction]  # a backend, and the spec and direction to run on it.
Failures = tuple[tuple[Request, str], ...]  # failed requests, with the reasons.

_CAPACITY = 1024
_by_request: OrderedDict[Request, str] = OrderedDict()
_by_shape: OrderedDict[Hashable, Failures] = OrderedDict()
_lock = fork_safe(threading.Lock())


class RuntimeFailure(Exception):
    """Raised by a backend if it cannot run a call for which its `unsupported` returned None. Nothing is written before."""


def remember(backend: str, spec: AttentionSpec, direction: Direction, reason: str) -> None:
    """Caches a failure for every call of the spec."""
    with _lock:
        _keep(_by_request, (backend, spec, direction), reason)


def remembered(backend: str, spec: AttentionSpec, direction: Direction) -> str | None:
    return _by_request.get((backend, spec, direction))


def remember_call(x: Operands, request: Request, reason: str) -> None:
    """Caches a failure for calls whose operands have the same shapes."""
    shape = shape_of(x)
    with _lock:
        before = dict(_by_shape.get(shape, ()))
        _keep(_by_shape, shape, (*{**before, request: reason}.items(),))


def failures_of(x: Operands) -> Failures:
    """Returns the failures, in both directions, of calls whose operands have the same shapes."""
    return _by_shape.get(shape_of(x), ()) if _by_shape else ()


def clear() -> None:
    with _lock:
        _by_request.clear()
        _by_shape.clear()


def _keep(kept: OrderedDict[Any, Any], key: Hashable, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _CAPACITY:
        kept.popitem(last=False)


# Plans and kernels do not depend on the values of these inputs. If a call leaves out rng_state, its plan is the same.
_RUN_TIME = ("softmax_scale", "softcap", "mod_numbers", "rng_state")


def shape_of(x: Operands) -> Hashable:
    """Returns everything that a plan may depend on, apart from the spec."""
    return tuple(_look(value) for name, value in x._asdict().items() if name not in _RUN_TIME)


def _look(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.element_size() % 16
        return value.shape, value.stride(), value.dtype, value.device, offset
    return tuple(map(_look, value)) if isinstance(value, (tuple, list)) else value
