"""The backend that a call requests: its argument, else `attention_backend()`, else FLEXATTN_BACKEND, else "auto"."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexattn.dispatch import options


class _Thread(threading.local):
    """One thread's request. It is a threading.local because torch.compile guards that, and breaks the graph at a ContextVar."""

    def __init__(self) -> None:
        self.requested: str | None = None


_thread = _Thread()
_is_used = False  # whether any thread has ever entered a block. If not, calls skip the look-up in the threading.local.


def check_request(backend: str) -> None:
    if backend not in options.REQUESTS:
        raise ValueError(f"backend is {backend!r}; accepted: {', '.join(options.REQUESTS)}")


@contextmanager
def attention_backend(backend: str) -> Iterator[None]:
    """Sets the backend for calls of this thread that name none: "auto", "triton", "cudnn" or "eager".

    It holds until the block ends. Like `torch.no_grad()`, it holds only for the thread that entered the block. It can be nested,
    and works inside and around `torch.compile`. A backward uses the backend that was requested in its forward, in any thread.

    `torch.utils.checkpoint` recomputes a forward on a GPU in a thread of autograd, so this block does not apply to it. Pass
    `backend` in such calls. A named backend never falls back: if it cannot run a call, the call raises a BackendError with the
    reason. FLEXATTN_BACKEND sets the backend for the whole process.

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
    """Returns the backend of this thread's innermost `attention_backend()`, or None outside of such blocks."""
    return _thread.requested if _is_used else None


def requested_backend(backend: str | None) -> str:
    """Returns the request of a call with this `backend` argument."""
    if backend is not None:
        check_request(backend)
        return backend
    return _thread.requested or options.backend() or "auto"
