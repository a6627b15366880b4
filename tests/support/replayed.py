"""Replays of recorded calls on a CPU: Triton's interpreter repeats the launches at the addresses of the replay."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.recorder import tensors_of
from flexattn.kernels_triton.runtime import direct, interpreter, launch


def tensor_at(address: int, like: Tensor) -> Tensor:
    """Returns a tensor of the shape, strides and dtype of another in the memory that begins at an address."""
    if not like.numel():
        return torch.empty_like(like)
    size = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (size * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


class Interpreted:
    """Replaces a compiled kernel in a recording, and a prepared launch."""

    def __init__(self, made: launch.Launch) -> None:
        self.made = made

    def tensors_of(self, arguments: tuple[Any, ...]) -> Sequence[Tensor]:
        return tuple(tensors_of(arguments))

    def prepare(self, programs: int, arguments: tuple[Any, ...]) -> Interpreted:
        """Returns itself, without the tensors of the recorded call: a launch that reads them would be right by chance."""
        self.made = self.made._replace(arguments=_replaced(arguments, iter([t.to("meta") for t in self.tensors_of(arguments)])))
        return self

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        found = tuple(tensors_of(self.made.arguments))
        tensors = (tensor_at(address, like) for address, like in zip(addresses, found, strict=True))
        kernel, _, arguments, programs = self.made
        with interpreter.right_arithmetic():
            kernel[(programs,)](*_replaced(arguments, tensors))


def _replaced(arguments: Any, tensors: Any) -> Any:
    """Returns arguments with the next of other tensors in the place of each."""
    if isinstance(arguments, Tensor):
        return next(tensors)
    if isinstance(arguments, tuple):
        parts = [_replaced(part, tensors) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    return arguments


def replay_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes calls of the Triton backend in its interpreter be recorded and replayed as on a GPU."""
    make = launch.make

    def watched_make(made: launch.Launch, device: torch.device) -> None:
        make(made, device)
        if launch._thread.recording is None and launch._thread.watcher is not None:
            launch._thread.watcher(Interpreted(made), made.programs, made.arguments)

    monkeypatch.setattr(launch, "make", watched_make)
    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    monkeypatch.setattr(direct, "set_to_zero", lambda stream, address, size: ctypes.memset(address, 0, size))
    monkeypatch.setattr(triton_backend, "can_be_recorded", lambda: True)
