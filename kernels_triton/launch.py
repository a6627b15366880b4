"""The one place where kernels are launched, compiled or interpreted."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon

from flexattn.kernels_triton import interpreter
from flexattn.kernels_triton.configs import INTERPRETER, Tile

MAX_PROGRAMS = 2**31 - 1  # CUDA C++ Programming Guide, "Compute Capabilities": maximum x-dimension of a grid

# read, written 16 bytes at a time
WIDE = {f"{name}_ptr" for name in ("q", "k", "v", "out", "dout", "dq", "dq_sums", "dk", "dv", "x", "rows", "quads")}


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` for what is launched: compiled for no integer's value and for no small tensor's address.

    So a new length, batch size, stride or window never compiles it again. Strides come in units of `Meta.ALIGN` instead, and the
    wide tensors are still told apart by whether they begin at a multiple of 16 bytes.
    """
    run_time = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty and p.name not in WIDE]
    return triton.jit(function, do_not_specialize=run_time, do_not_specialize_on_alignment=run_time)


def hopper_kernel(function: Callable[..., None]) -> Any:
    """The same in Gluon; what it reads and writes in tiles are descriptors, which are compiled for no address."""
    run_time = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    return gluon.jit(function, do_not_specialize=run_time, do_not_specialize_on_alignment=run_time)


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


class Launch(NamedTuple):
    """One launch as it was asked for: what `launch` needs to make it, and `compile_report.request_for` to compile its kernel."""

    kernel: Any
    tile: Tile
    arguments: tuple[Any, ...]
    programs: int


_recording: list[Launch] | None = None


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside, nothing is launched: the list that this gives fills up with what would have been. Outputs stay as they were."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def launch(kernel: Any, programs: int, device: torch.device, tile: Tile, arguments: tuple[Any, ...]) -> None:
    """Run `programs` programs of `kernel` on `device`; none for 0.

    Raises ValueError for more programs than CUDA has room for.
    """
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"the call needs {programs} programs of {kernel.__name__}, and a launch has at most {MAX_PROGRAMS}; pass max_seqlen_q "
            "and max_seqlen_kv, without which every sequence counts as long as all together, or split the batch"
        )
    if programs == 0:
        return
    if _recording is not None:
        _recording.append(Launch(kernel, tile, arguments, programs))
        return
    if interpreter.INTERPRETED:
        with interpreter.right_arithmetic():
            kernel[(programs,)](*arguments)
        return
    with torch.cuda.device(device):
        kernel[(programs,)](*arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)
