"""The call in torch: handlers that XLA calls, on a CPU or a CUDA device, and that run a backend on XLA's buffers.

A call's custom call has all settings in its text, so a program that JAX caches on disk also runs in other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import autograd, call_cache, ops
from flexattn.cached_call import CachedCall
from flexattn.dispatch.spec import OPEN_WINDOW, TENSOR_FIELDS, Operands
from flexattn.jax import ffi
from flexattn.jax.call import Call, parse

FORWARD, BACKWARD = "flexattn_forward", "flexattn_backward"


def run_forward(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the results of a call on tensors with memory; `Call.results` has their shapes."""

    def attend(x: Operands) -> tuple[Tensor, Tensor, Tensor]:
        return ops.run_forward(ops.spec_to_run(x, call.settings), call.settings.backend, x)

    with torch.no_grad():
        has_more = call.config is not None or any(call.counts) or "rng_state" in call.present
        if operands[0].device.type == "cpu" and not has_more:
            return _run_kept(call, operands)
        return call.forward(operands_of(call, operands), call.delayed(operands), attend)


def _run_kept(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the results of a call without mods, FP8 and dropout. They are replayed if the call is kept."""
    tensors: tuple[Any, ...] = tuple(operands)
    if len(tensors) > len("qkv"):
        tensors = (*map(dict(zip(call.present, operands, strict=True)).get, TENSOR_FIELDS),)
    key, found = call_cache.look_up(tensors, (None, None, call), OPEN_WINDOW, None)
    kept = found if isinstance(found, CachedCall) else None
    is_new = kept is None
    if kept is None:
        x = call.operands(operands)
        kept = None if key is None else call_cache.new_call(key, x, call.settings, x.alibi_slopes, None)
        if kept is None or key is None:
            return ops.run_forward(ops.spec_to_run(x, call.settings), call.settings.backend, x)
    assert key is not None
    out, lse, max_logit = kept.forward(tensors, key.addresses)
    if is_new:
        call_cache.remember(key, kept)
    return out, lse, lse.new_empty(0) if max_logit is None else max_logit


def run_backward(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients, with `Call.gradients`' shapes; tensors: operands, out, lse, dout, and dlse if it is not zero."""
    count = call.num_operands
    x, delayed = operands_of(call, tensors[:count]), call.delayed(tensors)
    out, lse, dout = tensors[count : count + 3]
    incoming = ops.Incoming(out, lse, dout, tensors[count + 3] if len(tensors) > count + 3 else None)
    with torch.no_grad():
        gradients = autograd.gradients(call.quantized_for_backward(x, delayed), call.settings, call.config, delayed, incoming)
    amax = None if delayed.history_dout is None else delayed.history_dout.view(-1)
    return [t for t in (*gradients.flat(), amax) if t is not None]


def operands_of(call: Call, tensors: Sequence[Tensor]) -> Operands:
    """Returns the operands of a call with these tensors."""
    x = call.operands(tensors)
    # JAX has no int64 by default, so each number comes as two words.
    return x if x.rng_state is None else x._replace(rng_state=x.rng_state.view(torch.int64))


ffi.register(FORWARD, lambda text, tensors: run_forward(parse(text.decode()), tensors))
ffi.register(BACKWARD, lambda text, tensors: run_backward(parse(text.decode()), tensors))
