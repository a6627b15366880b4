"""The call in torch: handlers that XLA calls, on a CPU or a CUDA device, and that run a backend on XLA's buffers.

A call's custom call has all settings in its text, so a program that JAX caches on disk also runs in other processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn import autograd, ops
from flexattn.dispatch.spec import Operands
from flexattn.jax import ffi
from flexattn.jax.call import Call, parse

FORWARD, BACKWARD = "flexattn_forward", "flexattn_backward"


def run_forward(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the results of a call on tensors with memory; `Call.results` has their shapes."""

    def attend(x: Operands) -> tuple[Tensor, Tensor, Tensor]:
        return ops.run_forward(ops.spec_to_run(x, call.settings), call.settings.backend, x)

    with torch.no_grad():
        return call.forward(_operands(call, operands), call.delayed(operands), attend)


def run_backward(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients, with `Call.gradients`' shapes; tensors: operands, out, lse, dout, and dlse if it is not zero."""
    count = call.num_operands
    x, delayed = _operands(call, tensors[:count]), call.delayed(tensors)
    out, lse, dout = tensors[count : count + 3]
    incoming = ops.Incoming(out, lse, dout, tensors[count + 3] if len(tensors) > count + 3 else None)
    with torch.no_grad():
        gradients = autograd.gradients(call.quantized_for_backward(x, delayed), call.settings, call.config, delayed, incoming)
    amax = None if delayed.history_dout is None else delayed.history_dout.view(-1)
    results = (*gradients[:-1], *(gradients.dmod_tensors or ()), amax)
    return [t for t in results if t is not None]


def _operands(call: Call, tensors: Sequence[Tensor]) -> Operands:
    x = call.operands(tensors)
    # JAX has no int64 by default, so each number comes as two words.
    return x if x.rng_state is None else x._replace(rng_state=x.rng_state.view(torch.int64))


ffi.register(FORWARD, lambda text, tensors: run_forward(parse(text.decode()), tensors))
ffi.register(BACKWARD, lambda text, tensors: run_backward(parse(text.decode()), tensors))
