"""Execution of a plan, with this thread's handle, the current stream, and workspace from torch's allocator.

Each thread has a handle for each device: two threads must not use one handle at a time, and autograd has its own threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import cudnn
import torch
from torch import Tensor

from flexattn import compat

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.plans import Plan


class _Owner:
    """Keeps a handle while its thread lives. A handle is an object in frontends from 1.28 on, and an integer in older ones."""

    def __init__(self, handle: object) -> None:
        self.handle = handle
        # It does not run at exit: CUDA may be gone by then, and the end of the process frees everything.
        weakref.finalize(self, cudnn.destroy_handle, handle).atexit = False


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, _Owner] = {}
        self.streams: dict[int, int] = {}  # the stream that each handle was last set to


_handles = _Handles()


def handle_of(device: torch.device) -> object:
    """Returns this thread's handle for a CUDA device, which must be the current device. The handle is destroyed with its thread."""
    owner = _handles.by_device.get(device.index)
    if owner is None:
        owner = _handles.by_device[device.index] = _Owner(cudnn.create_handle())
    return owner.handle


def handle_on(device: torch.device, stream: int) -> object:
    """Returns the same handle, set to a stream. Only this function sets streams, so it sets one only if the stream changes."""
    handle = handle_of(device)
    if _handles.streams.get(device.index) != stream:
        cudnn.set_stream(handle=handle, stream=stream)
        _handles.streams[device.index] = stream
    return handle


Watcher = Callable[["Plan", dict[int, Tensor]], None]
_watchers = threading.local()


@contextlib.contextmanager
def watched_executions(watcher: Watcher) -> Iterator[None]:
    """Calls `watcher` inside the block for each plan that this thread runs, with the plan's buffers."""
    previous = getattr(_watchers, "current", None)
    _watchers.current = watcher
    try:
        yield
    finally:
        _watchers.current = previous


def execute(plan: Plan, buffers: dict[int, Tensor], device: torch.device) -> None:
    """Runs `plan` on the current stream of `device`. `buffers` maps each `graphs.Uid` of the plan to its tensor."""
    if compat.current_device() == device.index:
        _execute(plan, buffers, device)
    else:
        with torch.cuda.device(device):
            _execute(plan, buffers, device)
    watcher = getattr(_watchers, "current", None)
    if watcher is not None:
        watcher(plan, buffers)


def _execute(plan: Plan, buffers: dict[int, Tensor], device: torch.device) -> None:
    handle = handle_on(device, compat.current_raw_stream(device.index))
    if torch.cuda.is_current_stream_capturing():
        plan.is_pinned = True  # the CUDA graph keeps pointers into it
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=device)
    with plan.lock:
        plan.graph.execute(buffers, workspace, handle=handle)


@functools.lru_cache(maxsize=256)
def host_scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a number as the tensor that cuDNN accepts for a value that is passed by value."""
    with torch.inference_mode(False):
        return torch.full((1, 1, 1, 1), value, dtype=dtype, device="cpu")
