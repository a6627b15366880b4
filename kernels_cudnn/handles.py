"""A cuDNN handle for each thread and device: cuDNN forbids one in two threads at a time, and autograd has threads of its own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import cudnn
import torch


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}
        self.streams: dict[int, int] = {}  # what each handle was last set to


_handles = _Handles()


def handle_of(device: torch.device) -> Any:
    """This thread's handle for a CUDA device, which must be the current one; destroyed with its thread."""
    handle = _handles.by_device.get(device.index)
    if handle is None:
        handle = _handles.by_device[device.index] = cudnn.create_handle()
        # At exit CUDA may be gone first, and the end of the process frees it all.
        weakref.finalize(handle, cudnn.destroy_handle, cudnn.Handle(handle.backend_handle)).atexit = False
    return handle


def handle_on(device: torch.device, stream: int) -> Any:
    """The same handle, whose work is enqueued on this stream: nobody else sets it, so it is set where it is another one."""
    handle = handle_of(device)
    if _handles.streams.get(device.index) != stream:
        cudnn.set_stream(handle=handle, stream=stream)
        _handles.streams[device.index] = stream
    return handle
