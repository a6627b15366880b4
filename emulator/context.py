"""The running program. The emulated language acts on it, because a kernel's text does not name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexattn.emulator.cta import Cta


_running: Cta | None = None


def program() -> Cta:
    """Returns the running program. Raises RuntimeError outside a launch."""
    if _running is None:
        raise RuntimeError("an emulated operation was called outside emulator.launch()")
    return _running


def require_idle() -> None:
    """Raises RuntimeError if a launch is running, because the emulator runs one program at a time in a process."""
    if _running is not None:
        raise RuntimeError("a launch inside or beside another; run them one after the other, or in separate processes")


@contextmanager
def run(program: Cta) -> Iterator[None]:
    global _running
    require_idle()
    _running = program
    try:
        yield
    finally:
        _running = None
