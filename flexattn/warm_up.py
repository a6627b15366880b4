"""Compiles and builds ahead, so that the first call of a training step or a request does not wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexattn import ops
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.explain import Explanation, directions_of, explain
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.sample import sample_operands, with_rng_state
from flexattn.dispatch.select import failures_of, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.functional import bind_call
from flexattn.progress import progress_bar

LENGTH = 128  # length of a spec's sequences if its length class is not known


def warmup(
    *calls: AttentionSpec | Mapping[str, object], backend: str | None = None, progress: bool = True, workers: int | None = None
) -> list[Explanation]:
    """Compiles the Triton kernels and builds the cuDNN plans that calls will run, in each direction that they need.

    Triton kernels do not depend on batch size or lengths. A cuDNN plan depends on both: packed sequences (thd) share plans for
    rounded-up sizes; a dense format gets one for each of the first 8 shapes of a configuration, then shares them too. See
    docs/cudnn.md. Building a plan takes 0.3 to 0.5 s. If FLEXATTN_PLANS is set to a directory, plans are saved there, and the next
    process loads them in milliseconds. A kernel takes about a second. Kernels that are not on disk (in FLEXATTN_KERNELS) are
    compiled in parallel processes; plans are built one after another. The kernels of `return_aux`, tangents and second derivatives
    are left to their first call.

    Args:
        calls: each call is a dict of `attention`'s arguments or an `AttentionSpec`. The tensors of a dict have the shapes, dtypes
            and strides of later calls; their values do not matter and do not change. A spec stands for one sequence of its length
            class on the current device.
        backend: the argument of `attention`, for specs. A dict has its own.
        progress: whether to show a bar on stderr if there are several kernels or calls and tqdm is installed.
        workers: number of kernels to compile at a time; None: one for each core.

    Returns:
        The `explain` of each call, which includes the refusals of cuDNN that only building shows.

    Raises:
        ValueError, TypeError, BackendError: errors of `attention` for the same arguments.
    """
    todo = [_resolved(call, backend) for call in calls]
    _compile(todo, progress, workers)
    explained = []
    with progress_bar(len(todo), "flexattn.warmup", "call", progress) as advance, torch.no_grad():
        for spec, request, x in todo:
            for direction in directions_of(spec):
                _prepare(spec, direction, request, x)
            explained.append(explain(spec, request, x))
            advance()
    return explained


class _Call(NamedTuple):
    spec: AttentionSpec
    request: str
    x: Operands


def _resolved(call: AttentionSpec | Mapping[str, object], backend: str | None) -> _Call:
    if isinstance(call, AttentionSpec):
        if call.mods is not None or call.block_size is not None:
            raise ValueError(
                "warmup() got an AttentionSpec with a mod or a block mask, which lacks their tensors; accepted: a dict of "
                "attention's arguments"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if call.device_type == "cuda" else torch.device("cpu")
        batch = 4 if call.bias_is_shared else 1
        x = sample_operands(call, device, [call.length_q or LENGTH] * batch, [call.length_kv or LENGTH] * batch)
        return _Call(call, requested_backend(backend), x)
    if not isinstance(call, Mapping):
        raise TypeError(f"warmup() got a {type(call).__name__}; accepted: a dict of attention's arguments, or an AttentionSpec")
    x, settings = bind_call(**call)
    return _Call(ops.spec_to_run(x, settings), settings.backend, with_rng_state(x))


def _compile(todo: Sequence[_Call], progress: bool, workers: int | None) -> None:
    """Compiles the Triton kernels that are not on disk, several at a time. `_prepare` compiles a single one."""
    if not triton_backend.can_be_recorded():
        return
    from flexattn.build_ahead import build_missing, recorded  # a late import: importing flexattn should be quick

    launches: dict[tuple[int, int], list[Any]] = {}
    with torch.no_grad():
        for spec, request, x in todo:
            directions = [d for d in directions_of(spec) if select(spec, d, request, failures_of(x)).backend == "triton"]
            if spec.capability is not None and directions:
                launches.setdefault(spec.capability, []).extend(recorded(spec, x, directions))
    for capability, kernels in launches.items():
        if len(kernels) > 1:
            build_missing(kernels, capability, options.kernel_directory(), workers, "flexattn.warmup", progress)


def _prepare(spec: AttentionSpec, direction: Direction, request: str, x: Operands) -> None:
    ops.run(spec, direction, request, x, lambda backend: backend.prepare(spec, x, direction))
