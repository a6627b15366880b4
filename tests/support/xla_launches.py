"""The launches that XLA would make on a CUDA device, made in its memory on a CPU by Triton's interpreter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.interpreters import mlir

from flexattn.jax import append, cuda, ffi, fp8, host, primitives
from flexattn.jax.custom_call import CustomCall

_steps: list[Any] = []
_one_at_a_time = threading.Lock()  # the devices of a mesh have threads of their own, and Python 3.11 parses in one alone


def _real(x: Any, memory: Iterator[torch.Tensor]) -> Any:
    """Returns a launch's argument with XLA's memory in the place of each tensor without any."""
    if isinstance(x, torch.Tensor):
        flat = next(memory).reshape(-1).view(torch.uint8).view(x.dtype)
        return torch.as_strided(flat, x.shape, x.stride(), 0)
    if isinstance(x, tuple):
        parts = [_real(part, memory) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _interpret(text: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a launch on the operands of its custom call, in the order in which jaxlib passes them to a kernel."""
    from flexattn.kernels_triton.runtime.launch import make

    number, operands, results, zeros = json.loads(text)
    step, memory = _steps[number], dict(zip(operands, tensors, strict=True))
    for place in zeros:
        memory[place].zero_()
    arguments = _real(step.launch.arguments, iter([memory[i] for i in step.buffers]))
    with _one_at_a_time:
        make(step.launch._replace(arguments=arguments), torch.device("cpu"))
    return [memory[i] for i in results]


_HANDLER = ffi.handler(_interpret, "cpu")


def interpreted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Makes this machine's CPU a CUDA device of compute capability 8.0 to flexattn.jax; gives the launches."""
    from flexattn.kernels_triton.runtime.interpreter import INTERPRETED

    if not INTERPRETED:
        pytest.skip("the kernels of this process are not interpreted")
    _steps.clear()

    def interpreted_call(step: Any, written: frozenset[int], architecture: int, zeros: Any) -> CustomCall:
        _steps.append(step)
        operands = tuple(dict.fromkeys(step.buffers))
        zeroed = sorted(zeros.keys() & set(operands))
        text = json.dumps([len(_steps) - 1, operands, sorted(written & set(operands)), zeroed])
        return CustomCall(text.encode(), operands, (), frozenset(zeroed))

    def poisoned(buffer: Any) -> Any:
        size, dtype = buffer.size, cuda.jax_dtype(buffer.dtype)
        return jnp.full(size, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)

    monkeypatch.setattr(cuda, "_uninitialised", poisoned)
    monkeypatch.setattr(cuda, "custom_call", interpreted_call)
    monkeypatch.setattr(cuda, "TARGET", "interpreted_kernel")
    jax.ffi.register_ffi_target("interpreted_kernel", ffi.capsule(_HANDLER), platform="cpu")
    jax.clear_caches()
    cuda_rules = (
        (primitives.local_forward_p, primitives._on_cuda(host.FORWARD, primitives.forward_shapes, cuda.forward)),
        (primitives.local_backward_p, primitives._on_cuda(host.BACKWARD, primitives.backward_shapes, cuda.backward)),
        (append.OPERATOR.local, append.OPERATOR.on_cuda),
        (fp8.OPERATOR.local, fp8.OPERATOR.on_cuda),
    )
    cpu_rules = (
        (primitives.local_forward_p, primitives._on_host(host.FORWARD, primitives.forward_shapes)),
        (primitives.local_backward_p, primitives._on_host(host.BACKWARD, primitives.backward_shapes)),
        (append.OPERATOR.local, append.OPERATOR.on_host),
        (fp8.OPERATOR.local, fp8.OPERATOR.on_host),
    )
    for primitive, rule in cuda_rules:
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    with cuda.compiled_for((8, 0), processors=4):
        yield _steps
    for primitive, rule in cpu_rules:
        mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=True), platform="cpu")
    jax.clear_caches()
