"""Replays of recorded calls on a CPU: Triton's interpreter repeats the launches at the addresses of the replay."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.dispatch import triton_backend
from flexattn.dispatch.recorder import tensors_of
from flexattn.kernels_triton.runtime import call_numbers, direct, interpreter, launch
from flexattn.kernels_triton.runtime.device import thread

_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"), (Tensor, "new_empty_strided"))
_ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name in _MAKERS]


def allocate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes recordings as outside tests, where nothing fills new memory."""
    for owner, name, make in _ORIGINALS:
        monkeypatch.setattr(owner, name, make)


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

    @property
    def numbers(self) -> dict[call_numbers.Path, int]:
        """The paths of arguments that are numbers of the call, and the index of each number."""
        paths = call_numbers.places(self.made.kernel.arg_names, float_paths(self.made.arguments))
        return {path: place for place, path in paths}

    def has_numbers(self, numbers: Sequence[float]) -> bool:
        """Returns whether the arguments that are named as numbers of the call have these values."""
        return all(numbers[place] == direct.value_at(self.made.arguments, path) for path, place in self.numbers.items())

    def with_numbers(self, numbers: Sequence[float]) -> Interpreted:
        """Returns a launch of its own with other numbers in the arguments that are named as such."""
        places = self.numbers

        def replaced(x: Any, path: call_numbers.Path) -> Any:
            if type(x) is tuple:
                return tuple(replaced(part, (*path, i)) for i, part in enumerate(x))
            return numbers[places[path]] if path in places else x

        return Interpreted(self.made._replace(arguments=replaced(self.made.arguments, ())))

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        found = tuple(tensors_of(self.made.arguments))
        tensors = (tensor_at(address, like) for address, like in zip(addresses, found, strict=True))
        kernel, _, arguments, programs = self.made
        with interpreter.right_arithmetic():
            kernel[(programs,)](*_replaced(arguments, tensors))


def float_paths(arguments: Any, path: call_numbers.Path = ()) -> Iterator[call_numbers.Path]:
    """Yields the path of each float in a launch's arguments."""
    if type(arguments) is float:
        yield path
    elif isinstance(arguments, tuple):
        for i, part in enumerate(arguments):
            yield from float_paths(part, (*path, i))


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
        with _disable_current_modes():  # the interpreter's own operators are no part of the call
            make(made, device)
        if thread.recording is None and thread.watcher is not None:
            thread.watcher(Interpreted(made), made.programs, made.arguments)

    monkeypatch.setattr(launch, "make", watched_make)
    monkeypatch.setattr(launch, "stream_of", lambda device: int)
    monkeypatch.setattr(direct, "set_to_zero", lambda stream, address, size: ctypes.memset(address, 0, size))
    monkeypatch.setattr(triton_backend, "can_be_recorded", lambda: True)
