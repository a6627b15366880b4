"""Calls of the Gluon kernels in the emulator: cases that several test files share, memory for results, and checks of results."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands, as_bshd
from flexattn.testing import GRADIENT_FACTOR, check_close, reference_attention, reference_gradients

# A tile may lie past its sequence's end; `keep_pairs` keeps the packed registers of p, which the emulator does not follow; half of
# the columns of 64 are half of a swizzled row, which tests/hopper/test_attention.py compares with the oracle on a GPU.
HARMLESS = {"tma-out-of-bounds", "wgmma-register-operand", "slice-in-swizzle"}
SEEDS = range(20)
# An empty sequence on each side, queries that see no key, more queries than keys and fewer, blocks that are not full.
UNEVEN = {"lengths_q": [100, 0, 140, 1], "lengths_kv": [150, 40, 70, 0], "num_heads": 4, "num_heads_kv": 2}
EVERYTHING = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (90, 0), "softmax_type": "learnable"}
SINKS = torch.tensor([0.5, -2.0, 1.0, 0.0])
BANDS: list[dict[str, Any]] = [
    {"attn_mask_type": "padding"},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding_causal_bottom_right"},
    {"attn_mask_type": "padding", "window_size": (60, 20)},
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the kernels beside the Gluon kernels run there")


class GradientMemory(NamedTuple):
    """Gradients that begin as NaN, as views in bshd or thd for a launcher, and the gradient of a sink."""

    gradients: list[Tensor]
    views: list[Tensor]
    doffset: Tensor | None


def gradient_memory(spec: AttentionSpec, x: Operands, dtype: torch.dtype | None = None) -> GradientMemory:
    """Returns memory for dq, dk and dv in the dtype of q, or another one."""
    gradients = [torch.full(t.shape, float("nan"), dtype=dtype or t.dtype, device=t.device) for t in (x.q, x.k, x.v)]
    views = [as_bshd(t, fmt) for t, fmt in zip(gradients, (spec.q_format, spec.kv_format, spec.kv_format), strict=True)]
    doffset = torch.full((spec.num_heads,), float("nan"), device=x.q.device) if x.softmax_offset is not None else None
    return GradientMemory(gradients, views, doffset)


def check_results(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, max_logit: Tensor | None = None) -> None:
    """Compares the results of a forward with the reference."""
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])
    if max_logit is not None:
        check_close("max_logit", max_logit, exact[2], budget[2])


def wanted_gradients(spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None) -> tuple[Gradients, Gradients]:
    """Returns the reference's gradients, in float64 and in the call's dtype."""
    return reference_gradients(spec, x, dout, dlse), reference_gradients(spec, x, dout, dlse, dtype=spec.dtype)


def check_gradients(memory: GradientMemory, wanted: tuple[Gradients, Gradients]) -> None:
    """Compares the gradients of a backward with `wanted_gradients`."""
    exact, budget = wanted
    for name, got, want, same_dtype in zip(("dq", "dk", "dv"), memory.gradients, exact, budget, strict=False):
        check_close(name, got, want, same_dtype, factor=GRADIENT_FACTOR)
    if memory.doffset is not None:
        check_close("dsoftmax_offset", memory.doffset, exact[4], budget[4], factor=GRADIENT_FACTOR)


def check_bits_repeat(spec: AttentionSpec, x: Operands, dout: Tensor) -> None:
    """Compares the bits of dk and dv in many runs on a GPU, and of dq if the call is deterministic."""
    out, lse, _ = triton_backend.forward(spec, x)
    first = triton_backend.backward(spec, x, out, lse, dout, None)
    for _ in range(100):
        again = triton_backend.backward(spec, x, out, lse, dout, None)
        assert torch.equal(again.dk, first.dk)
        assert torch.equal(again.dv, first.dv)
        assert not spec.deterministic or torch.equal(again.dq, first.dq)


def is_wide(t: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether most numbers of t that are not 0 have more bits than dtype."""
    return bool((t != t.to(dtype))[t != 0].float().mean() > 0.9)
