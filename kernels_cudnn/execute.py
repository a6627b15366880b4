"""Running a plan: this thread's handle, the stream of the moment, workspace from torch's allocator."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flexattn.kernels_cudnn.handles import handle_on
from flexattn.kernels_cudnn.plans import Plan

Watcher = Callable[[Plan, dict[int, Tensor]], None]
_watchers = threading.local()


@contextlib.contextmanager
def watched_executions(watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher` is called for each plan that this thread runs, with its buffers."""
    before = getattr(_watchers, "one", None)
    _watchers.one = watcher
    try:
        yield
    finally:
        _watchers.one = before


def execute(plan: Plan, buffers: dict[int, Tensor], device: torch.device) -> None:
    """Run `plan` on the current stream of `device`; `buffers` maps each `graphs.Uid` of the plan to its tensor."""
    if torch._C._cuda_getDevice() == device.index:
        _execute(plan, buffers, device)
    else:
        with torch.cuda.device(device):
            _execute(plan, buffers, device)
    watcher = getattr(_watchers, "one", None)
    if watcher is not None:
        watcher(plan, buffers)


def _execute(plan: Plan, buffers: dict[int, Tensor], device: torch.device) -> None:
    handle = handle_on(device, torch._C._cuda_getCurrentRawStream(device.index))
    if torch.cuda.is_current_stream_capturing():
        plan.is_pinned = True  # a CUDA graph keeps pointers into it
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=device)
    with plan.lock:
        plan.graph.execute(buffers, workspace, handle=handle)


@functools.lru_cache(maxsize=256)
def host_scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number as cuDNN takes what is passed by value."""
    with torch.inference_mode(False):
        return torch.full((1, 1, 1, 1), value, dtype=dtype, device="cpu")
