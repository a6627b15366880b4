"""Launches of kernels: one launch under one seed, and a sweep over many seeds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from types import TracebackType
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from flexattn.emulator import context
from flexattn.emulator.cta import Cta
from flexattn.emulator.memory import Descriptor, GlobalBuffer
from flexattn.emulator.report import EmulationError, Finding, GluonError, Report, Site, is_own_frame, show
from flexattn.emulator.scheduler import SCHEDULES
from flexattn.emulator.translate import function_for, translate
from flexattn.emulator.values import Pointer, scalar


@dataclass(frozen=True)
class Options:
    """Settings of a run, apart from the seed.

    schedule: the order of events. "eager": asynchronous operations act at once. "lazy": they act as late as possible.
        "round-robin": partitions run in turn. "random": partitions have random weights, which change sometimes. None: seeds 0, 1
        and 2 have the first three schedules, and all other seeds are random.
    in_order: whether programs run in order in a random schedule too. Kernels that wait for earlier programs need it.
    race_detector: if False, only errors that show in the simulated memory are found.
    max_steps, timeout_s: the limits of a program in scheduling steps and in seconds.
    trace: whether each step is kept in Report.trace.
    """

    schedule: str | None = None
    in_order: bool = False
    race_detector: bool = True
    max_steps: int = 2_000_000
    timeout_s: float = 300.0
    trace: bool = False

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; accepted: {', '.join(SCHEDULES)} or None")


_DEFAULTS = Options()


def launch(
    kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, seed: int = 0, options: Options = _DEFAULTS, **kwargs: Any
) -> Report:
    """Runs a Gluon kernel on CPU tensors, and reports its errors.

    kernel: a @gluon.jit function.
    grid: programs along up to three axes. They run one after the other, in random order if the schedule is random.
    args, kwargs: the kernel's arguments as in a launch on a GPU: CPU tensors, host tensor descriptors, numbers, constexprs. Tensors
        are written in place when the launch ends.
    num_warps: warps of the default partition.
    seed: decides every choice of the schedule. The same seed gives the same run. A test should use twenty or more seeds.
    options: see `Options`.

    Errors of the kernel itself are in the report and are not raised.

    Raises:
        TypeError: another kind of kernel, arguments that do not match the parameters, or tensors that are not on the CPU.
        ValueError: a grid that is not valid.
        GluonError: a host descriptor that the driver would refuse.
        RuntimeError: a launch inside another launch.
    """
    context.require_idle()
    if not 1 <= len(grid) <= 3 or any(int(n) < 1 for n in grid):
        raise ValueError(f"grid is {grid!r}; accepted: one to three positive numbers")
    if not isinstance(kernel, GluonJITFunction):
        raise TypeError(f"kernel is a {type(kernel).__name__}; accepted: a @gluon.jit function")
    function = function_for(kernel.fn)
    arguments = dict(zip(function.names, args, strict=False)) | kwargs
    missing, unknown = set(function.names) - set(arguments) - function.defaults, set(arguments) - set(function.names)
    twice = set(function.names[: len(args)]) & set(kwargs)
    if missing or unknown or twice or len(args) > len(function.names):
        raise TypeError(
            f"arguments of {function.__name__}: {len(args)} by position, missing: {sorted(missing)}, unknown: {sorted(unknown)}, "
            f"twice: {sorted(twice)}"
        )
    axes = (*(int(n) for n in grid), 1, 1)[:3]
    report = Report((axes[0], axes[1], axes[2]), seed, options.schedule or SCHEDULES[min(seed, len(SCHEDULES) - 1)])
    buffers: dict[tuple[int, torch.dtype], GlobalBuffer] = {}
    call = {
        name: translate(value, name) if name in function.constexprs.values() else _argument(name, value, buffers)
        for name, value in arguments.items()
    }
    rng = random.Random(seed)
    programs = list(itertools.product(*(range(n) for n in report.grid)))
    if report.schedule == "random" and not options.in_order:
        rng.shuffle(programs)
    start = time.perf_counter()
    try:
        for number, program_id in enumerate(programs):
            cta = Cta(report, rng, program_id, number, options.race_detector, options.max_steps, options.trace)
            with context.run(cta):
                try:
                    cta.run(function.__name__, lambda: function(**call), num_warps, options.timeout_s)
                finally:
                    report.steps += cta.steps
    except EmulationError as error:
        report.error = error
    except Exception as error:  # the kernel's Python may raise any error, which belongs in the report.
        report.error = error
        report.add(_finding_for(error))
    report.seconds = time.perf_counter() - start
    for buffer in buffers.values():
        buffer.flush()
    return report


def sweep(run: Callable[[int], Report], seeds: Iterable[int] = range(24)) -> dict[str, tuple[list[int], Finding]]:
    """Calls run(seed) for each seed. Returns the kinds of findings, each with its seeds and its first finding."""
    kinds: dict[str, tuple[list[int], Finding]] = {}
    for seed in seeds:
        for finding in run(seed).findings:
            known, _ = kinds.setdefault(finding.kind, ([], finding))
            if seed not in known:
                known.append(seed)
    return kinds


def _argument(name: str, value: Any, buffers: dict[tuple[int, torch.dtype], GlobalBuffer]) -> object:
    """Returns a run-time argument in the form for a kernel."""
    if isinstance(value, torch.Tensor):
        return Pointer(_buffer(name, value, buffers), np.asarray(value.storage_offset(), np.int64))
    if hasattr(value, "block_shape") and isinstance(getattr(value, "base", None), torch.Tensor):  # a host TensorDescriptor.
        buffer, offset = _buffer(name, value.base, buffers), value.base.storage_offset()
        padding = getattr(value, "padding", "zero")
        return Descriptor(buffer, offset, value.shape, value.strides, value.block_shape, value.layout, padding)
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return scalar(value)
    if isinstance(value, tuple):
        return tuple(_argument(name, part, buffers) for part in value)
    raise TypeError(
        f"{name} is a {type(value).__name__}; accepted: tensors, host tensor descriptors, numbers, None, tuples of them"
    )


def _buffer(name: str, tensor: torch.Tensor, buffers: dict[tuple[int, torch.dtype], GlobalBuffer]) -> GlobalBuffer:
    """Returns the buffer of a storage and dtype, so that tensors with shared memory share it here too.

    Tensors of different dtypes must not share elements.
    """
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on {tensor.device}; the emulator takes CPU tensors")
    place = (tensor.untyped_storage().data_ptr(), tensor.dtype)
    if place not in buffers:
        buffers[place] = GlobalBuffer(tensor)
    return buffers[place]


def _finding_for(error: Exception) -> Finding:
    """Returns a finding for an error that the kernel raised, at the kernel's line."""
    site, inside = _raised_at(error.__traceback__)
    kind = "not-modelled" if isinstance(error, NotImplementedError) else "illegal-program"
    name = "" if isinstance(error, GluonError | NotImplementedError) else f"{type(error).__name__}: "
    note = " (raised inside the emulator)" if inside and name else ""
    return Finding(kind, f"{name}{error}{note}  @ {show(site[:2])}", site[:1])


def _raised_at(traceback: TracebackType | None) -> tuple[Site, bool]:
    """Returns the kernel's frames of a traceback, innermost first, and whether the innermost frame is in the emulator."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(extract_tb(traceback))]
    return tuple(frame for frame in frames if not is_own_frame(frame[0])), bool(frames) and is_own_frame(frames[0][0])
