"""The sink of softmax: a logit of a head that has no key."""

from __future__ import annotations

import triton
import triton.language as tl

from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.lse_rows import load_shift


# UNIT: LOG2E for units of log2, or 1
@triton.jit
def load_sink(softmax_offset_ptr, h, UNIT: tl.constexpr, META: tl.constexpr):
    sink = tl.zeros([], tl.float32)
    if META.HAS_OFFSET:
        sink = tl.load(softmax_offset_ptr + h).to(tl.float32) * UNIT
    return sink


@triton.jit
def sink_probability(softmax_offset_ptr, lse_log2, large, b, h, rows, len_q, META: tl.constexpr):
    sink = load_sink(softmax_offset_ptr, h, 1.0 if META.IS_UNBOUNDED else LOG2E, META)
    if META.IS_UNBOUNDED:
        shift = tl.zeros_like(lse_log2)
        if large.is_any != 0:
            shift = load_shift(large, b, h, rows, len_q, META)
        sink = (sink - shift) * LOG2E
    return tl.exp2(sink - lse_log2)
