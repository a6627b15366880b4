"""Warnings of flexattn: each appears once, because calls repeat."""

from __future__ import annotations

import sys
import threading
import warnings

from flexattn.forks import fork_safe

_warned: set[str] = set()
_lock = fork_safe(threading.Lock())


def warn_once(key: str, message: str, *, at_caller: bool = False) -> None:
    """Issues a RuntimeWarning if `key` is new in this process, in any thread.

    at_caller: the warning names the line that called flexattn. If False, it names the line in flexattn that warns.
    """
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=_levels_to_caller() if at_caller else 2)


def _levels_to_caller() -> int:
    """Returns the `stacklevel` in `warn_once` of the first frame outside of flexattn and torch, whose modules call ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("flexattn", "torch"):
        level, frame = level + 1, frame.f_back
    return level
