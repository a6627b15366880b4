"""The one place where kernels are launched, compiled or interpreted."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from flexattn.kernels_triton import interpreter
from flexattn.kernels_triton.configs import INTERPRETER, Tile


@functools.lru_cache(maxsize=64)
def capability_of(device: torch.device) -> int:
    """The device's compute capability as 10 * major + minor; INTERPRETER for a CPU device."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; a few for the interpreter, so that what is split for them is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def launch(kernel: Any, programs: int, device: torch.device, tile: Tile, arguments: tuple[Any, ...]) -> None:
    """Run `programs` programs of `kernel` on `device`; none for 0."""
    if programs == 0:
        return
    if interpreter.INTERPRETED:
        with interpreter.right_arithmetic():
            kernel[(programs,)](*arguments)
        return
    with torch.cuda.device(device) if device.index != torch.cuda.current_device() else contextlib.nullcontext():
        kernel[(programs,)](*arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)
