"""Locks that are free in a forked child, even if another thread of the parent holds them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

_L = TypeVar("_L", threading.Lock, threading.RLock)
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: _L) -> _L:
    """Returns the lock, and frees it in each child of `os.fork()`, which lacks the thread that could release it.

    The guarded data must be consistent after each statement, like a cache.
    """
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # the standard library calls this for its locks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
