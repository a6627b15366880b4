"""Locks that are free in a forked child, even if another thread of the parent holds them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

_L = TypeVar("_L", threading.Lock, threading.RLock)
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: _L) -> _L:
    """Returns the lock, which is made free in each child of `os.fork()`: the child lacks the thread that could release it.

    The data that such a lock guards must be consistent after each statement, as caches are.
    """
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
