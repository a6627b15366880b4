"""Operands of the FP8 backward kernels for sm_90: scales, copies of q, k and dout in 16 bits, and the reasons to reject a call."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon.conditions import KEYS, unsupported_statistics, unsupported_values
from flexattn.kernels_triton.gluon.descales import Scale, scale_error, scales_of
from flexattn.kernels_triton.gluon.descriptors import DTYPES, FP8_DTYPES, descriptor_error, readable
from flexattn.kernels_triton.hopper.fp8_passes import dequantize


def copies_in_16_bits(problem: Problem, dout: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and dout in 16 bits: the caller's tensors, copied if the copy engine cannot read them, or dequantised ones.

    So the numbers do not depend on strides. A hook for saved tensors may change the strides between the forward and the backward.
    """
    x = problem
    copies = dict(zip(("dout", "q", "k"), x.copies16, strict=False))
    scales = scales_of(x)

    def copy(name: str, side: Literal["q", "kv"], t: Tensor, scale: Scale) -> Tensor:
        passed = copies.get(name)
        if passed is not None and passed.dtype is dtype:
            return readable(passed)
        return dequantize(x, side, t, scale, torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format))

    return copy("q", "q", x.q, scales[0]), copy("k", "kv", x.k, scales[1]), copy("dout", "q", dout, scales[3])


def in_16_bits(
    problem: Problem, dout: Tensor, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[Problem, Tensor]:
    """Returns (the problem, dout) of the same backward for the 16-bit kernels.

    q, k, v and dout are empty until `fill_16_bits` writes them; a dout that the caller passed in 16 bits is used directly.

    device: "meta" to choose a kernel without memory; None: the device of the inputs.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "memory_format": torch.contiguous_format}
    q, k, v, dout16 = (torch.empty_like(t, **options) for t in (problem.q, problem.k, problem.v, dout))
    if problem.dout_is_to_come:
        dout16 = problem.copies16[0]
    return dataclasses.replace(problem, q=q, k=k, v=v, descales=(), scale_rows=0, dout_is_to_come=False), dout16


def fill_16_bits(problem: Problem, dout: Tensor, problem16: Problem, dout16: Tensor) -> None:
    """Dequantises into the empty tensors from `in_16_bits`."""
    targets = [problem16.q, problem16.k, problem16.v]
    if not problem.dout_is_to_come:
        targets.append(dout16)
    inputs = (problem.q, problem.k, problem.v, dout)
    for side, t, scale, out in zip(("q", "kv", "kv", "q"), inputs, scales_of(problem), targets, strict=False):
        dequantize(problem, side, t, scale, out)  # type: ignore[arg-type]


def unsupported_operands(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if neither FP8 backward can run this problem, for any head dims and tiles; None: they can."""
    x = problem
    if out.dtype not in DTYPES:
        return f"its gradients are bf16 or fp16, and out is {str(out.dtype).removeprefix('torch.')}"
    if x.dropout_p > 0:
        return "it does not support dropout"
    if error := unsupported_values(x) or unsupported_statistics(x):
        return error
    names, heads = ("q", "k", "v", "dout"), (x.num_heads, x.num_heads_kv, x.num_heads_kv, x.num_heads)
    for name, t, scale, h in zip(names, (x.q, x.k, x.v, dout), scales_of(x), heads, strict=True):
        if t.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(t.dtype).removeprefix('torch.')}"
        if error := descriptor_error(name, t) or scale_error(name, scale, x, h, KEYS):
            return error
    return descriptor_error("out", out)
