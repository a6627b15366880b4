"""CUDA streams for independent calls. If the last tiles of one call leave multiprocessors idle, another call uses them."""

from __future__ import annotations

import contextlib
import functools
from collections import deque

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.lru_cache(maxsize=64)
def _streams(device: torch.device, of: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Returns three streams besides the one with raw handle `of`. Kernels of the last two have priority."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    early, back = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
    return side, early, back


class Lanes:
    """Lanes of a rank's work. Each is a stream on a GPU. All are the same stream on a CPU, or if calls write to the same tensors.

    The main lane is the current stream. It runs the longest calls, or the calls on own keys. The side lane runs the other calls.
    The back lane runs the sums and copies that follow both.

    is_last: whether nothing follows the next calls. Their side calls must then begin before the longest call, not after it. They
    run on the early lane, which has priority and is empty, because the side and back lanes still have work of earlier calls.
    """

    def __init__(self, device: torch.device, *, are_apart: bool) -> None:
        self._main: torch.cuda.Stream | None = None
        if are_apart and has_streams(device):
            self._main = torch.cuda.current_stream(device)
            self._side, self._early, self._back = _streams(device, self._main.cuda_stream)
            # a captured CUDA graph contains a stream only if it waited for another one of the graph
            for lane in (self._side, self._early, self._back):
                lane.wait_stream(self._main)
        self.is_last = False
        self._kept: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def side(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the stream of the side lane is current."""
        if self._main is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._early if self.is_last else self._side)

    def back(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the stream of the back lane is current."""
        return contextlib.nullcontext() if self._main is None else torch.cuda.stream(self._back)

    def fork(self) -> None:
        """Makes the side lane wait for the work that the main lane has so far."""
        if self._main is not None:
            (self._early if self.is_last else self._side).wait_stream(self._main)

    def meet(self) -> None:
        """Makes the back lane wait for the work that the lanes of calls have so far."""
        if self._main is not None:
            self._back.wait_stream(self._main)
            self._back.wait_stream(self._side)
            self._back.wait_stream(self._early)

    def keep(self, *tensors: Tensor) -> None:
        """Keeps tensors of other lanes until the back lane has done its present work, so that their memory is not reused before."""
        if self._main is not None:
            self._kept.append((self._back.record_event(), tensors))

    def let_go(self) -> None:
        """Makes the main lane wait for the back lane up to the last `keep` but one, and frees the tensors that were kept before."""
        while self._main is not None and len(self._kept) > 1:
            event, _ = self._kept.popleft()
            self._main.wait_event(event)

    def join(self) -> None:
        """Makes the main lane wait for the others."""
        if self._main is not None:
            self._main.wait_stream(self._side)
            self._main.wait_stream(self._early)
            self._main.wait_stream(self._back)
            self._kept.clear()
