"""How flexattn warns: once, as what it warns of is in a call that repeats."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """A RuntimeWarning the first time in the process that `key` comes."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
