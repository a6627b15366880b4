"""Warnings of flexattn: each comes once, as calls repeat."""

from __future__ import annotations

import threading
import warnings

_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(key: str, message: str) -> None:
    """Gives a RuntimeWarning the first time that `key` comes in the process, in whichever thread."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=2)
