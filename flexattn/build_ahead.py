"""Builds the kernels and plans of a call without a launch, for a GPU that may be on another machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexattn import ops
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.explain import Explanation, directions_of, explain
from flexattn.dispatch.quantization import dout_like
from flexattn.dispatch.sample import with_rng_state
from flexattn.dispatch.select import Backend, backend_module
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands, empty_outputs
from flexattn.progress import progress_bar


def explain_built(spec: AttentionSpec, request: str, x: Operands) -> Explanation:
    """Builds the kernels or plans of a call, as far as this machine can, and returns its `explain`.

    Triton kernels are compiled into the directory in which launches search. cuDNN plans are built, or read from disk. If cuDNN
    refuses a plan, the next backend is selected and built.

    Raises:
        BackendError: no backend can run the call.
        CompileError: a Triton kernel does not compile.
        MemoryError, torch.OutOfMemoryError, and other errors of building that say nothing about the call.
    """
    x = with_rng_state(x)
    while True:
        before = explain(spec, request, x)
        for direction in reversed(directions_of(spec)):  # the backward first, like a call
            if direction == "forward" or spec.for_backward() is spec:
                ops.run(spec, direction, request, x, functools.partial(_build, spec, x, direction), warns=False)
        after = explain(spec, request, x)
        if (after.forward, after.backward) == (before.forward, before.backward):  # else a refusal changed a backend
            return after._replace(is_built=True)


def _build(spec: AttentionSpec, x: Operands, direction: Direction, backend: Backend) -> None:
    if not backend.SUPPORT_IS_FINAL:
        if backend.cannot_build(spec, x) is None:
            backend.prepare(spec, x, direction)
    elif backend is backend_module("triton") and spec.capability is not None and triton_backend.can_be_recorded():
        launches = recorded(spec, triton_backend.on_meta(x), [direction])
        build_missing(launches, spec.capability, options.kernel_directory(), wanted=False)


def recorded(spec: AttentionSpec, x: Operands, directions: Sequence[Direction]) -> list[Any]:
    """Returns a call's launches, one of each kernel, without running any. Raises ValueError if the Triton backend cannot run it."""
    from flexattn.kernels_triton.runtime.launch import description_of

    x = with_rng_state(x)
    assert spec.capability is not None
    major, minor = spec.capability
    with triton_backend.recorded_on(spec) as launches:
        for direction in directions:
            if reason := triton_backend.unsupported(spec, direction):
                raise ValueError(f"there is no kernel to build: {reason}")
            if direction == "forward":
                triton_backend.forward(spec, x)
            elif spec.for_backward() is spec:  # else the backward has other operands, and is compiled when it first runs
                out, lse, _ = empty_outputs(spec, x)
                triton_backend.backward(spec, x, out, lse, dout_like(spec, x, out), None)
    return list({description_of(one, 10 * major + minor): one for one in launches}.values())


def build_missing(
    launches: Sequence[Any],
    capability: tuple[int, int],
    directory: str | os.PathLike[str] | None,
    workers: int | None = None,
    title: str = "",
    wanted: bool = True,
) -> int:
    """Builds the kernels that are missing in the directory and returns their number. A bar on stderr shows the progress."""
    from flexattn.kernels_triton.ahead_of_time.build import build, missing

    architecture, folder = 10 * capability[0] + capability[1], Path(directory) if directory is not None else None
    left = missing(launches, architecture, folder)
    with progress_bar(len(left), title, "kernel", wanted) as advance:
        build(left, architecture, folder, workers, advance)
    return len(left)
