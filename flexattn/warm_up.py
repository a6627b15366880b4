"""Compiling and building ahead, so that no first call of a training step or a request pays for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexattn import ops
from flexattn.dispatch import explain as explanations
from flexattn.dispatch import options, runtime_failures, triton_backend
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.quantization import dout_like
from flexattn.dispatch.sample import sample_operands
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands, empty_outputs
from flexattn.functional import bind_call
from flexattn.progress import progress_bar

LENGTH = 128  # of a spec's sequences where its length class is not known


def warmup(
    *calls: AttentionSpec | Mapping[str, Any], backend: str | None = None, progress: bool = True, workers: int | None = None
) -> list[explanations.Explanation]:
    """Compiles the Triton kernels and builds the cuDNN plans that calls will run, in each direction that they need.

    Triton kernels do not depend on batch size or lengths. A cuDNN plan depends on both: packed sequences (thd) share plans for
    rounded-up sizes, dense formats have one for each shape (the first 8 of a kind) and then share likewise; docs/backends.md
    says how. A plan takes 0.3 to 0.5 s; with FLEXATTN_PLANS set to a directory it is kept there, and the next process loads it in
    milliseconds. A kernel takes about a second. Several that are not on disk (FLEXATTN_KERNELS says where) are compiled at a time,
    in processes of their own; plans are built one after another.

    Args:
        calls: each either the arguments of `attention`, as a dict, with tensors of the shapes, dtypes and strides that will come
            (their values do not matter; they are not changed), or an `AttentionSpec`, which stands for one sequence of its length
            class, on the current device.
        backend: for specs: what `attention` takes. Arguments say it themselves.
        progress: whether to show a bar on stderr for several kernels or calls, if tqdm is installed.
        workers: how many kernels are compiled at a time; None: one for each core.

    Returns:
        What `explain` says of each call, now that what cuDNN itself refuses is known.

    Raises:
        ValueError, TypeError: what `attention` raises for the same arguments.
        BackendError: likewise.
    """
    todo = [_resolved(call, backend) for call in calls]
    _compile(todo, progress, workers)
    explained = []
    with progress_bar(len(todo), "flexattn.warmup", "call", progress) as advance, torch.no_grad():
        for spec, request, x in todo:
            for direction in _directions(spec):
                _prepare(spec, direction, request, x)
            explained.append(explanations.explain(spec, request, x))
            advance()
    return explained


class _Call(NamedTuple):
    spec: AttentionSpec
    request: str
    x: Operands


def _resolved(call: AttentionSpec | Mapping[str, Any], backend: str | None) -> _Call:
    if isinstance(call, AttentionSpec):
        if call.mods is not None or call.block_size is not None:
            raise ValueError(
                "warmup() was given an AttentionSpec with a mod or a block mask, whose tensors it does not hold; accepted: a dict "
                "of attention's arguments"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if call.device_type == "cuda" else torch.device("cpu")
        x = sample_operands(call, device, [call.length_q or LENGTH], [call.length_kv or LENGTH])
        return _Call(call, requested_backend(backend), x)
    if not isinstance(call, Mapping):
        raise TypeError(
            f"warmup() was given a {type(call).__name__}; accepted: a dict of attention's arguments, or an AttentionSpec"
        )
    x, settings = bind_call(**call)
    return _Call(ops.spec_to_run(x, settings), settings.backend, _with_rng_state(x))


def _with_rng_state(x: Operands) -> Operands:
    """Returns the operands with an rng_state where dropout needs one and the call leaves it out."""
    if x.dropout_p == 0.0 or x.rng_state is not None:
        return x
    return x._replace(rng_state=torch.zeros(2, dtype=torch.int64, device=x.q.device))


def _directions(spec: AttentionSpec) -> tuple[Direction, ...]:
    return ("forward", "backward") if spec.needs_grad else ("forward",)


def _compile(todo: Sequence[_Call], progress: bool, workers: int | None) -> None:
    """Compiles the Triton kernels that are not on disk, several at a time; a single one is left to its preparation."""
    if not triton_backend.can_be_recorded():
        return
    launches: dict[tuple[int, int], list[Any]] = {}
    with torch.no_grad():
        for spec, request, x in todo:
            of_triton = [d for d in _directions(spec) if select(spec, d, request, runtime_failures.of_call(x)).backend == "triton"]
            if spec.capability is not None and of_triton:
                launches.setdefault(spec.capability, []).extend(recorded(spec, x, of_triton))
    for capability, found in launches.items():
        if len(found) > 1:
            build_missing(found, capability, options.kernel_directory(), workers, "flexattn.warmup", progress)


def _prepare(spec: AttentionSpec, direction: Direction, request: str, x: Operands) -> None:
    ops.run(spec, direction, request, x, lambda backend: backend.prepare(spec, x, direction))


def recorded(spec: AttentionSpec, x: Operands, directions: Sequence[Direction]) -> list[Any]:
    """Returns a call's launches, one of each kernel, with nothing launched; raises ValueError where the Triton backend has none."""
    from flexattn.kernels_triton.runtime.launch import description_of

    x = _with_rng_state(x)
    assert spec.capability is not None
    major, minor = spec.capability
    with triton_backend.recorded_on(spec) as launches:
        for direction in directions:
            if reason := triton_backend.unsupported(spec, direction):
                raise ValueError(f"there is no kernel to build: {reason}")
            if direction == "forward":
                triton_backend.forward(spec, x)
            elif spec.of_backward() is spec:  # else it takes other operands than these, and is compiled when it is first run
                out, lse, _ = empty_outputs(spec, x)
                triton_backend.backward(spec, x, out, lse, dout_like(spec, x, out), None)
    return list({description_of(one, 10 * major + minor): one for one in launches}.values())


def build_missing(
    launches: Sequence[Any],
    capability: tuple[int, int],
    directory: str | os.PathLike[str] | None,
    workers: int | None = None,
    what: str = "",
    wanted: bool = True,
) -> int:
    """Returns how many were not in the directory and are now; a bar on stderr shows the progress."""
    from flexattn.kernels_triton.ahead_of_time.build import build, missing

    architecture, where = 10 * capability[0] + capability[1], Path(directory) if directory is not None else None
    left = missing(launches, architecture, where)
    with progress_bar(len(left), what, "kernel", wanted) as advance:
        build(left, architecture, where, workers, advance)
    return len(left)
