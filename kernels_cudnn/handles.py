"""A cuDNN handle for each thread and device: cuDNN forbids one in two threads at a time, and autograd has threads of its own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import cudnn
import torch


class _Owner:
    """Keeps a handle for as long as its thread lives: an object in frontends from 1.28 on, an integer in older ones."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        # At exit CUDA may be gone first, and the end of the process frees it all.
        weakref.finalize(self, cudnn.destroy_handle, handle).atexit = False


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, _Owner] = {}
        self.streams: dict[int, int] = {}  # what each handle was last set to


_handles = _Handles()


def handle_of(device: torch.device) -> Any:
    """This thread's handle for a CUDA device, which must be the current one; destroyed with its thread."""
    owner = _handles.by_device.get(device.index)
    if owner is None:
        owner = _handles.by_device[device.index] = _Owner(cudnn.create_handle())
    return owner.handle


def handle_on(device: torch.device, stream: int) -> Any:
    """The same handle, whose work is enqueued on this stream: nobody else sets it, so it is set where it is another one."""
    handle = handle_of(device)
    if _handles.streams.get(device.index) != stream:
        cudnn.set_stream(handle=handle, stream=stream)
        _handles.streams[device.index] = stream
    return handle
