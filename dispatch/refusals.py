"""What only running told, remembered: a backend that turned out unable to run a spec, and why. Bounded, safe in threads."""

from __future__ import annotations

import threading
from collections import OrderedDict

from flexattn.dispatch.spec import AttentionSpec, Direction

_CAPACITY = 1024
_reasons: OrderedDict[tuple[str, AttentionSpec, Direction], str] = OrderedDict()
_lock = threading.Lock()


class Refused(Exception):
    """Raised by a backend, before it writes anything, that cannot run a call which its `support_error` had nothing against."""


def remember(backend: str, spec: AttentionSpec, direction: Direction, reason: str) -> None:
    with _lock:
        _reasons[backend, spec, direction] = reason
        while len(_reasons) > _CAPACITY:
            _reasons.popitem(last=False)


def remembered(backend: str, spec: AttentionSpec, direction: Direction) -> str | None:
    return _reasons.get((backend, spec, direction))


def clear() -> None:
    with _lock:
        _reasons.clear()
