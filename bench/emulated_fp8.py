"""The FP8 kernels for sm_90 in the emulator: operands with a scale for each head, checked by the oracle on dequantised values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.implementations import problem_of
from flexattn.bench.inputs import Tensors, arguments_of
from flexattn.bench.shapes import Workload
from flexattn.dispatch import eager_backend, quantization
from flexattn.dispatch.canary import ROUNDED_WEIGHTS
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.spec import AttentionSpec, Fp8, Operands
from flexattn.functional import bind_call
from flexattn.testing import GRADIENT_FACTOR, check_close

_DTYPE = torch.float8_e4m3fn


def _quantized(spec: AttentionSpec, x: Operands, t: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """(data, descale)."""
    q_side = (spec.q_format, *x.packing("q"))
    kv_side = (spec.kv_format, *x.packing("kv"))
    whole = quantization.Unquantized(t, *(q_side if side == "q" else kv_side), scale=None)
    (data,), (descale,), _ = quantization.quantize([whole], _DTYPE, "head", 0, 0)
    return data, descale


def prepare(kernel: str, workload: Workload, tensors: Tensors) -> tuple[Callable[[], dict[str, Tensor]], Callable[..., None]]:
    """Returns (launch, check). launch() runs the kernel and its predecessors; check(results) raises AssertionError if one is wrong.

    Raises ValueError if the kernel does not support the workload.
    """
    from flexattn.kernels_triton.common.problem import Backward
    from flexattn.kernels_triton.gluon.descales import Scale
    from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
    from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
    from flexattn.kernels_triton.hopper import fp8_forward as hopper_fp8_forward
    from flexattn.kernels_triton.hopper.fp8 import empty_transposed
    from flexattn.kernels_triton.hopper.quantize import quantize
    from flexattn.kernels_triton.runtime.device import pretended_device

    x, settings = bind_call(*tensors[:3], **arguments_of(workload, tensors))
    spec = ops.spec_to_run(x, settings)
    sides = ((x.q, "q"), (x.k, "kv"), (x.v, "kv"), (tensors.dout, "q"))
    (q, k, v, dout8), descales = zip(*(_quantized(spec, x, t, side) for t, side in sides), strict=True)
    spec = spec._replace(dtype=_DTYPE, fp8=Fp8((False, True, False), 0, tensors.q.dtype, _DTYPE, False))
    x = x._replace(q=q, k=k, v=v, descales=descales[:3])
    problem = dataclasses.replace(problem_of(workload, tensors), q=q, k=k, v=v, descales=descales[:3])
    scales = (Scale(descales[0], 0), Scale(descales[1], 0), Scale(descales[2], 0))

    def refuse(reason: str | None) -> None:
        if reason is not None:
            raise ValueError(f"{kernel} does not run {workload.name}: {reason}")

    with_backward = x._replace(descales=descales)
    exact_dout = quantization.dequantize_side(spec, with_backward, "q", dout8, descales[3], torch.float64)
    dout = exact_dout.to(tensors.dout.dtype)
    like_out = torch.full_like(dout, float("nan"))
    shape = (workload.num_heads, q.shape[0]) if workload.is_ragged else (workload.batch, workload.num_heads, q.shape[1])
    v_transposed = empty_transposed(v, problem.batch, _DTYPE)
    quantize(problem, "kv", v, scales[2], transposed=v_transposed)
    with pretended_device(90, 1):
        refuse(hopper_fp8_forward.unsupported(problem, like_out))
    wanted, budget = reference_attention(spec, x), eager_backend.forward(spec, x)
    if kernel == "fp8-forward":

        def forward() -> dict[str, Tensor]:
            out, lse = like_out.clone(), torch.full(shape, float("nan"))
            hopper_fp8_forward.hopper_fp8_forward(problem, v_transposed, scales, out, lse)
            return {"out": out, "lse": lse}

        def check(results: dict[str, Tensor]) -> None:
            check_close("out", results["out"], wanted[0], budget[0])
            check_close("lse", results["lse"], wanted[1], budget[1], atol=ROUNDED_WEIGHTS)

        return forward, check
    problem = dataclasses.replace(problem, descales=descales)
    out, lse = wanted[0].to(dout.dtype), wanted[1].float()
    is_fused = kernel == "fp8-fused"
    run = hopper_fp8_fused.fp8_fused_backward if is_fused else hopper_fp8_backward.fp8_backward
    with pretended_device(90, 1):
        refuse((hopper_fp8_fused if is_fused else hopper_fp8_backward).unsupported(problem, out, dout8))

    def backward() -> dict[str, Tensor]:
        dq, dk, dv = (torch.full(t.shape, float("nan"), dtype=out.dtype) for t in (q, k, v))
        doffset = torch.empty(workload.num_heads) if tensors.softmax_offset is not None else None
        run(Backward(problem, out, lse, dout8, None, dq, dk, dv, doffset))
        return {"dq": dq, "dk": dk, "dv": dv}

    exact = reference_gradients(spec, with_backward, exact_dout)
    eager = eager_backend.backward(spec, with_backward, out, lse, dout8, None)
    pairs = {"dq": (exact.dq, eager.dq), "dk": (exact.dk, eager.dk), "dv": (exact.dv, eager.dv)}
    return backward, lambda results: _check(results, pairs, factor=GRADIENT_FACTOR)


def _check(results: dict[str, Tensor], expected: dict[str, tuple[Tensor, Tensor]], **options: float) -> None:
    for name, got in results.items():
        want, budget = expected[name]
        check_close(name, got, want, budget, **options)
