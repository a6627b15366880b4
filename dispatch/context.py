"""The backend that a call asks for: its own argument, then `attention_backend()`, then FLEXATTN_BACKEND, then "auto"."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexattn.dispatch import options


class _Thread(threading.local):
    """One thread's request. A threading.local, as torch.compile guards it, whereas a ContextVar breaks the graph."""

    def __init__(self) -> None:
        self.requested: str | None = None


_thread = _Thread()
_is_used = False  # whether any thread has ever entered a block: looking into a threading.local takes each call as long again


def check_request(backend: str) -> None:
    if backend not in options.REQUESTS:
        raise ValueError(f"backend is {backend!r}; accepted: {', '.join(options.REQUESTS)}")


@contextmanager
def attention_backend(backend: str) -> Iterator[None]:
    """Within the block, calls of this thread that name no backend use this one: "auto", "triton", "cudnn" or "eager".

    It holds until the block ends and, as `torch.no_grad()` does, for the thread that entered it alone; it can be nested, and works
    inside and around `torch.compile`. A backward uses what was asked for when its forward ran, whichever thread it runs in. What
    `torch.utils.checkpoint` computes again on a GPU runs in a thread of autograd's, and after the block where the backward does:
    give `backend` in the call there. Any name but "auto" never falls back: what it cannot run raises a BackendError with the
    reason. FLEXATTN_BACKEND asks for the whole process.

    Raises:
        ValueError: an unknown name.
    """
    global _is_used
    check_request(backend)
    _is_used = True
    previous, _thread.requested = _thread.requested, backend
    try:
        yield
    finally:
        _thread.requested = previous


def current() -> str | None:
    """Returns the backend that the innermost `attention_backend()` of this thread names."""
    return _thread.requested if _is_used else None


def requested_backend(backend: str | None) -> str:
    """The request that holds for a call whose `backend` argument this is."""
    if backend is not None:
        check_request(backend)
        return backend
    return _thread.requested or options.backend() or "auto"
