"""A cuDNN handle for each thread and device: two threads must not use one handle at a time, and autograd has its own threads."""

from __future__ import annotations

import threading
import weakref

import cudnn
import torch


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
