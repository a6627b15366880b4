"""Which backend a call asks for: its own argument, then `attention_backend()`, then FLEXATTN_BACKEND, then "auto"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flexattn.dispatch import options

# A plain global, as torch's own backend switches are: torch.compile guards it, whereas a ContextVar breaks the graph.
_requested: str | None = None


def check_request(backend: str) -> None:
    if backend not in options.REQUESTS:
        raise ValueError(f"backend is {backend!r}; accepted: {', '.join(options.REQUESTS)}")


@contextmanager
def attention_backend(backend: str) -> Iterator[None]:
    """Within the block, calls that name no backend use this one: "auto", "triton", "cudnn" or "eager".

    It holds for the whole process (threads included) until the block ends, can be nested, and works inside and around
    `torch.compile`. A backward uses what was asked for when its forward ran. Any name but "auto" never falls back: what
    it cannot run raises a BackendError with the reason.

    Raises:
        ValueError: an unknown name.
    """
    global _requested
    check_request(backend)
    previous, _requested = _requested, backend
    try:
        yield
    finally:
        _requested = previous


def current() -> str | None:
    """What the innermost `attention_backend()` names."""
    return _requested


def requested_backend(backend: str | None) -> str:
    """The request that holds for a call whose `backend` argument this is."""
    if backend is not None:
        check_request(backend)
        return backend
    return _requested or options.backend() or "auto"
