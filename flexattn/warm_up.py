"""Compiling and building ahead, so that no first call of a training step or a request pays for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from flexattn import ops
from flexattn.dispatch import explain as explanations
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.sample import sample_operands
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.functional import bind_call

T = TypeVar("T")

LENGTH = 128  # of a spec's sequences where its length class is not known


def warmup(
    *calls: AttentionSpec | Mapping[str, Any], backend: str | None = None, progress: bool = True
) -> list[explanations.Explanation]:
    """Compiles the Triton kernels and builds the cuDNN plans that calls will run, in each direction that they need.

    Triton kernels do not depend on batch size or lengths. A cuDNN plan depends on both: packed sequences (thd) share plans for
    rounded-up sizes, dense formats have one for each shape (the first 8 of a kind) and then share likewise; docs/backends.md
    says how. A plan takes 0.3 to 0.5 s; with FLEXATTN_PLANS set to a directory it is kept there, and the next process loads it in
    milliseconds. Triton keeps its kernels in a cache of its own.

    Args:
        calls: each either the arguments of `attention`, as a dict, with tensors of the shapes, dtypes and strides that will come
            (their values do not matter; they are not changed), or an `AttentionSpec`, which stands for one sequence of its length
            class, on the current device.
        backend: for specs: what `attention` takes. Arguments say it themselves.
        progress: whether to show a bar on stderr for several calls, if tqdm is installed.

    Returns:
        What `explain` says of each call, now that what cuDNN itself refuses is known.

    Raises:
        ValueError, TypeError: what `attention` raises for the same arguments.
        BackendError: likewise.
    """
    return [_warm(call, backend) for call in _shown(calls, progress and len(calls) > 1)]


def _warm(call: AttentionSpec | Mapping[str, Any], backend: str | None) -> explanations.Explanation:
    if isinstance(call, AttentionSpec):
        if call.mods is not None or call.block_size is not None:
            raise ValueError(
                "warmup() was given an AttentionSpec with a mod or a block mask, whose tensors it does not hold; accepted: a dict "
                "of attention's arguments"
            )
        spec, request = call, requested_backend(backend)
        device = torch.device("cuda", torch.cuda.current_device()) if spec.device_type == "cuda" else torch.device("cpu")
        x = sample_operands(spec, device, [spec.length_q or LENGTH], [spec.length_kv or LENGTH])
    elif isinstance(call, Mapping):
        x, settings = bind_call(**call)
        if x.dropout_p > 0.0 and x.rng_state is None:
            x = x._replace(rng_state=torch.zeros(2, dtype=torch.int64, device=x.q.device))
        spec, request = ops.spec_to_run(x, settings), settings.backend
    else:
        raise TypeError(
            f"warmup() was given a {type(call).__name__}; accepted: a dict of attention's arguments, or an AttentionSpec"
        )
    with torch.no_grad():
        _prepare(spec, "forward", request, x)
        if spec.needs_grad:
            _prepare(spec, "backward", request, x)
    return explanations.explain(spec, request)


def _prepare(spec: AttentionSpec, direction: Direction, request: str, x: Operands) -> None:
    ops.run(spec, direction, request, x.q.device, lambda backend: backend.prepare(spec, x, direction))


def _shown(calls: Iterable[T], wanted: bool) -> Iterable[T]:
    if not wanted or importlib.util.find_spec("tqdm") is None:
        return calls
    from tqdm import tqdm

    return tqdm(calls, desc="flexattn.warmup", unit="call")  # type: ignore[no-any-return]
