"""Streams of a GPU for calls that do not need each other: where the last tiles of one leave multiprocessors idle, others run."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.lru_cache(maxsize=64)
def _streams(device: torch.device, of: int) -> tuple[Any, Any, Any]:
    """Returns three streams beside the one whose raw handle is `of`; kernels of all but the first come before those of others."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    early, back = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
    return side, early, back


class Lanes:
    """The main lane is the current stream, on which the longest calls, or those of own keys, run; the side has the calls beside
    them, and the back what follows both: sums and copies. All are one stream on a CPU, and where calls write to the same tensors.

    is_last: whether nothing comes behind the next calls, so that those of the side are to begin before the longest one, not behind
    it: then they run on a lane of their own, the early one, which comes first, as the side and the back have what is left of the
    calls before.
    """

    def __init__(self, device: torch.device, *, are_apart: bool) -> None:
        self._main: Any = None
        if are_apart and has_streams(device):
            self._main = torch.cuda.current_stream(device)
            self._side, self._early, self._back = _streams(device, self._main.cuda_stream)
            for lane in (self._side, self._early, self._back):  # a CUDA graph has no stream that waits for one outside of it
                lane.wait_stream(self._main)
        self.is_last = False
        self._kept: deque[tuple[Any, tuple[Tensor, ...]]] = deque()

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the side's stream is the current one."""
        if self._main is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._early if self.is_last else self._side)

    def back(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the back's stream is the current one."""
        return contextlib.nullcontext() if self._main is None else torch.cuda.stream(self._back)

    def fork(self) -> None:
        """Makes the side wait for what the main lane has so far."""
        if self._main is not None:
            (self._early if self.is_last else self._side).wait_stream(self._main)

    def meet(self) -> None:
        """Makes the back wait for what the lanes of calls have so far."""
        if self._main is not None:
            self._back.wait_stream(self._main)
            self._back.wait_stream(self._side)
            self._back.wait_stream(self._early)

    def keep(self, *tensors: Tensor) -> None:
        """Keeps tensors of other lanes until the back has done what it has so far: their memory must not be used again before."""
        if self._main is not None:
            self._kept.append((self._back.record_event(), tensors))

    def let_go(self) -> None:
        """Makes the main lane wait for the back, but for what followed the last `keep`, and lets go of what was kept before."""
        while len(self._kept) > 1:
            event, _ = self._kept.popleft()
            self._main.wait_event(event)

    def join(self) -> None:
        """Makes the main lane wait for the others."""
        if self._main is not None:
            self._main.wait_stream(self._side)
            self._main.wait_stream(self._early)
            self._main.wait_stream(self._back)
            self._kept.clear()
