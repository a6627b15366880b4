"""The device of a call, or the one that this thread pretends to have, and a kernel's tile on it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

INTERPRETER = 0  # the "compute capability" of Triton's interpreter: small tiles, so that small inputs have several


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    apart: bool = False  # dk and dv in separate launches: scores are computed twice, with half the accumulators at a time
    registers: int | None = None  # most registers of a thread, so that more programs run at once; None: the compiler's choice


class _Pretended(NamedTuple):
    """The arguments of `pretended_device`."""

    capability: int
    processors: int
    has_large_l2: bool


class Thread(threading.local):
    """State of one thread's launches: its pretended device, its recording, its watcher."""

    def __init__(self) -> None:
        self.pretended: _Pretended | None = None
        self.recording: Callable[[Any], None] | None = None  # takes each `Launch`
        self.watcher: Callable[..., None] | None = None  # see `launch.Watcher`


thread = Thread()


@contextlib.contextmanager
def set_here(name: str, value: object) -> Iterator[None]:
    """Sets an attribute of `thread` to `value` inside. A backward that is called inside runs in this thread, not in autograd's."""
    before = getattr(thread, name)
    setattr(thread, name, value)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        setattr(thread, name, before)


@contextlib.contextmanager
def pretended_device(capability: int, processors: int, *, has_large_l2: bool = True) -> Iterator[None]:
    """Inside, this thread treats every tensor as on a GPU with this capability (90 for 9.0) and number of multiprocessors.

    For launches that are recorded, or run by a driver that does nothing. has_large_l2: see the function of this name.
    """
    with set_here("pretended", _Pretended(capability, processors, has_large_l2)):
        yield


def capability_of(device: torch.device) -> int:
    """Returns the device's compute capability as 10 * major + minor; INTERPRETER for a CPU device."""
    pretended = thread.pretended
    return _capability_of(device) if pretended is None else pretended.capability


def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors; a few for the interpreter, so that it also splits work."""
    pretended = thread.pretended
    return _num_processors(device) if pretended is None else pretended.processors


def has_large_l2(device: torch.device) -> bool:
    """Returns whether the L2 cache is as large as an NVIDIA H200's (60 MB, with 4.8 TB/s of memory), not an H100's (50 MB, 3.35
    TB/s).

    True for devices other than GPUs.
    """
    pretended = thread.pretended
    return _has_large_l2(device) if pretended is None else pretended.has_large_l2


@functools.lru_cache(maxsize=64)
def _has_large_l2(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_properties(device).L2_cache_size >= 56 * 2**20


@functools.lru_cache(maxsize=64)
def _capability_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.lru_cache(maxsize=64)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
