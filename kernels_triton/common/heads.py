"""One head of one sequence: its bias, its slope, and the values that mods read."""

from __future__ import annotations

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Head


# Returns a stride of the bias, so that the compiler knows that BIAS_ALIGN divides it.
@triton.jit
def aligned_stride(stride, META: tl.constexpr):
    if META.BIAS_ALIGN > 1:
        stride = stride // META.BIAS_ALIGN * META.BIAS_ALIGN
    return stride


# Returns (pointer to the head's bias, its ALiBi slope).
@triton.jit
def load_head(bias, alibi, b, h, META: tl.constexpr):
    bias_ptr = 0.0  # never used
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS:
        entry = b
        if bias.group is not None:
            entry = b // bias.group
        bias_ptr = bias.ptr + tl.cast(entry, tl.int64) * aligned_stride(bias.stride_b, META)
        bias_ptr += tl.cast(h, tl.int64) * aligned_stride(bias.stride_h, META)
    alibi_slope = 0.0
    if META.HAS_ALIBI:
        alibi_slope = tl.load(alibi.ptr + b * alibi.stride_b + h)
    return bias_ptr, alibi_slope


# Returns the values of a head that the mods' functions read after the captures.
@triton.jit
def head_values(b, h, captures, MODS: tl.constexpr, META: tl.constexpr):
    values = ()
    if META.HAS_SCORE_MOD or META.HAS_MASK_MOD:  # noqa: SIM102  # otherwise MODS is None
        if MODS.per_head is not None:
            values = MODS.per_head(b, h, captures)
    return values


@triton.jit
def with_head_values(captures, values, META: tl.constexpr):
    if META.HAS_SCORE_MOD or META.HAS_MASK_MOD:
        return captures + values
    else:
        return ()


@triton.jit
def captures_of_head(b, h, captures, MODS: tl.constexpr, META: tl.constexpr):
    return with_head_values(captures, head_values(b, h, captures, MODS, META), META)


@triton.jit
def head_of(scores, b, h, len_q, len_kv, shift, MODS: tl.constexpr, META: tl.constexpr):
    bias_ptr, alibi_slope = load_head(scores.bias, scores.alibi, b, h, META)
    return Head(
        b=b,
        h=h,
        len_q=len_q,
        len_kv=len_kv,
        shift=shift,
        softcap=scores.softcap,
        bias_ptr=bias_ptr,
        bias_stride_m=scores.bias.stride_m,
        bias_stride_n=scores.bias.stride_n,
        alibi_slope=alibi_slope,
        captures=captures_of_head(b, h, scores.captures, MODS, META),
    )


# Returns whether intervals prove that the mask_mod shows all these keys to all these queries, so that no pair needs the
# mask_mod.
@triton.jit
def shows_block(head, first_q, NUM_Q: tl.constexpr, first_kv, NUM_KV: tl.constexpr, MODS: tl.constexpr):
    q_low, kv_low = tl.cast(first_q, tl.int64), tl.cast(first_kv, tl.int64)
    q_high = tl.maximum(tl.minimum(q_low + NUM_Q, head.len_q) - 1, q_low)
    kv_high = tl.maximum(tl.minimum(kv_low + NUM_KV, head.len_kv) - 1, kv_low)
    b, h = tl.cast(head.b, tl.int64), tl.cast(head.h, tl.int64)
    surely, _possibly = MODS.mask_of_block(b, h, q_low, q_high, kv_low, kv_high, None, None, head.captures)
    return surely
