"""Recording of a cached call, in its second run. A separate module, because a first call should not wait for its imports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexattn import ops
from flexattn.dispatch import cpu_attention, replay, triton_backend
from flexattn.dispatch.select import Backend, RuntimeFailure, backend_module
from flexattn.dispatch.spec import AttentionSpec, Direction, Flat, Gradients

if TYPE_CHECKING:
    from flexattn.cached_call import CachedCall, Replay


def record_forward(call: CachedCall, tensors: Flat) -> tuple[Flat, Replay | None]:
    """Returns the results of a forward, and its recording or None if there is none. tensors: of `CachedCall.forward`."""
    if _is_torchs(call, tensors, call.spec, "forward"):
        kept = cpu_attention.KeptForward(call.spec, call.operands(tensors), call.compute_forward)
        return kept.replay(tensors, ()), kept
    backend = call.forward_backend(tensors)
    also = _beside(call, backend)
    if call.launches_check and backend is not backend_module("triton"):
        also = triton_backend  # type: ignore[assignment]
    found = _record(call, backend, lambda: call.results(tensors, lambda x: backend.forward(call.spec, x)), (tensors, tuple, also))
    return found or (call.compute_forward(tensors), None)


def record_backward(call: CachedCall, inputs: Flat) -> tuple[Flat, Replay | None]:
    """Returns the flat gradients of a backward, and its recording or None if there is none. inputs: of `CachedCall.backward`."""
    spec = call.backward_spec(inputs)
    out, lse, _, dlse = inputs[-4:]
    if dlse is None and _is_torchs(call, inputs, spec, "backward"):
        kept = cpu_attention.KeptBackward(spec, call.operands(inputs), call.compute_backward)
        return kept.replay(inputs, ()), kept
    backend = call.backward_backend(inputs, spec)

    def run() -> Gradients:
        return call.gradients(inputs, lambda x, dout: backend.backward(spec, x, out, lse, dout, dlse))

    found = _record(call, backend, run, (inputs, Gradients.flat, _beside(call, backend)))
    return (call.compute_backward(inputs), None) if found is None else (found[0].flat(), found[1])


def _record(
    call: CachedCall, backend: Backend, run: Callable[[], Any], how: tuple[Flat, Any, Backend | None]
) -> tuple[Any, replay.Recording | None] | None:
    """Returns a result and its recording like `replay.record`, or None if the backend cannot be recorded, or fails.

    how: the inputs, a function from a result to its tensors, and a backend that runs beside this one.
    """
    if not (call.is_recordable and backend.can_be_recorded()):
        return None
    # Launches of the Triton backend have the numbers by name, except in FP8, where launchers compute with them.
    numbers = call.numbers if call.fp8 is None and backend is backend_module("triton") else None
    inputs, results_of, also = how
    with contextlib.suppress(RuntimeFailure):
        return replay.record(backend, run, inputs, results_of, call.layout.device, also, numbers)
    return None


def _beside(call: CachedCall, backend: Backend) -> Backend | None:
    return None if call.fp8 is None else call.fp8.quantizer_beside(backend)


def _is_torchs(call: CachedCall, tensors: Flat, spec: AttentionSpec, direction: Direction) -> bool:
    """Returns whether torch's own operator for CPUs computes the call in a direction."""
    if call.layout.device.type != "cpu" or call.fp8 is not None:
        return False
    x = call.operands(tensors)
    return cpu_attention.can_be_kept(spec, x) and ops.backend_name(spec, direction, call.settings.backend, x) == "eager"
