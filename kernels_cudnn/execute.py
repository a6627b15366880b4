"""Execution of a plan, with this thread's handle, the current stream, and workspace from torch's allocator."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flexattn import compat
from flexattn.kernels_cudnn.handles import handle_on
from flexattn.kernels_cudnn.plans import Plan

Watcher = Callable[[Plan, dict[int, Tensor]], None]
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
