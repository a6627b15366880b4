"""Calls in FP8 for tests of one backend: as `flexattn.fp8_ops` makes them, but by the reference's own quantisation."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch import eager_backend, quantization, triton_backend
from flexattn.dispatch.spec import AttentionSpec, Fp8, Gradients, Operands
from flexattn.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    reference_attention,
    reference_gradients,
)
from tests.support.fp8_sums import scores_summed_short

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK_ROWS = 64
SHORT_ACCUMULATOR = 2.0**-11  # share of the largest score: the most that lse and max_logit are granted for the sums of `fp8_sums`


def quantized(
    spec: AttentionSpec, x: Operands, t: Tensor, side: str, dtype: torch.dtype, granularity: str
) -> tuple[Tensor, Tensor]:
    """(data, descale) of one tensor of a call."""
    fmt = spec.q_format if side == "q" else spec.kv_format
    q_lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
    lengths = q_lengths if side == "q" else (x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.max_seqlen_kv)
    rows = BLOCK_ROWS if granularity == "block" else 0
    (data,), (descale,), _ = quantization.quantize([quantization.Unquantized(t, fmt, *lengths, None)], dtype, granularity, rows, 0)
    return data, descale


def make_fp8_call(
    inputs: Inputs, granularity: str = "head", dtype: torch.dtype = E4M3, grad_dtype: torch.dtype = E4M3, **call: Any
) -> tuple[AttentionSpec, Operands]:
    """Returns the spec and operands of `make_call` with q, k and v in FP8."""
    spec, x = make_call(inputs, **call)
    found = [quantized(spec, x, t, side, dtype, granularity) for t, side in ((x.q, "q"), (x.k, "kv"), (x.v, "kv"))]
    (q, k, v), descales = zip(*found, strict=True)
    dims = tuple(any(descale.shape[dim] > 1 for descale in descales) for dim in range(3))
    rows = BLOCK_ROWS if granularity == "block" else 0
    fp8 = Fp8(dims, rows, inputs.q.dtype, grad_dtype, False)  # type: ignore[arg-type]  # three dims
    return spec._replace(dtype=dtype, fp8=fp8), x._replace(q=q, k=k, v=v, descales=descales)


def check(inputs: Inputs, granularity: str = "head", grad_dtype: torch.dtype = E4M3, **call: Any) -> tuple[Tensor, ...]:
    """Compares the Triton kernels, both directions, with fp64 attention on dequantised operands. The budget is emulated FP8."""
    spec, x = make_fp8_call(inputs, granularity, grad_dtype=grad_dtype, **call)
    for direction in ("forward", "backward"):
        assert triton_backend.unsupported(spec, direction) is None  # type: ignore[arg-type]
    got = triton_backend.forward(spec, x)
    wanted = reference_attention(spec, x)
    is_short = x.q.is_cuda and spec.capability is not None and spec.capability < (10, 0)
    with scores_summed_short() if is_short else contextlib.nullcontext():
        budgets = eager_backend.forward(spec, x)
    most = SHORT_ACCUMULATOR * max(1.0, float(wanted[2].abs().max())) / FORWARD_FACTOR
    for name, one, exact, budget in zip(("out", "lse", "max_logit"), got, wanted, budgets, strict=True):
        off = (budget - exact).nan_to_num()  # infinities are the same
        check_close(name, one, exact, budget if name == "out" else exact + off.clamp(-most, most))
    out, lse, _ = got
    dout, descale = quantized(spec, x, make_dout(inputs), "q", grad_dtype, granularity)
    dlse = make_dlse(inputs)
    x = x._replace(descales=(*x.descales, descale))
    gradients = triton_backend.backward(spec, x, out, lse, dout, dlse)
    exact = quantization.dequantize_side(spec, x, "q", dout, descale, torch.float64)
    results = (gradients, reference_gradients(spec, x, exact, dlse), eager_backend.backward(spec, x, out, lse, dout, dlse))
    for name in Gradients._fields[:-1]:
        g, want, budget = (getattr(result, name) for result in results)
        assert (g is None) == (want is None)
        if g is not None:
            check_close(name, g, want, budget, factor=GRADIENT_FACTOR)
    return *got, *(g for g in gradients[:-1] if g is not None)
