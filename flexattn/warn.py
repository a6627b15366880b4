"""How flexattn warns: once, as what it warns of is in a call that repeats."""

from __future__ import annotations

import threading
import warnings

_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(key: str, message: str) -> None:
    """A RuntimeWarning the first time in the process that `key` comes, in whichever thread."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=2)
