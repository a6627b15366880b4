"""Scores as a call's bias, ALiBi, softcap and score_mod make them of products of q and k."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.primitives import behind, load_head, logits


@gluon.jit
def modified(qk, i, j, place, scores, head, MODS: gl.constexpr, META: gl.constexpr):
    # `primitives.logits` of one head's tile, in either order
    len_q, len_kv, shift, b, h = place
    softmax_scale, softcap, stride_bias_m, stride_bias_n, captures = scores
    bias_base, alibi_slope = head
    return logits(
        qk,
        i,
        j,
        len_q,
        len_kv,
        shift,
        softmax_scale,
        softcap,
        bias_base,
        stride_bias_m,
        stride_bias_n,
        alibi_slope,
        b,
        h,
        captures,
        MODS,
        META,
    )


@gluon.jit
def scores_of_head(scores, values, META: gl.constexpr):
    # `scores` with what the mods read of a head, `head_values`
    softmax_scale, softcap, stride_bias_m, stride_bias_n, captures = scores
    return softmax_scale, softcap, stride_bias_m, stride_bias_n, behind(captures, values, META)


@gluon.jit
def head_of(bias, b, h, META: gl.constexpr):
    # What `modified` reads of a head
    bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b = bias
    return load_head(bias_ptr, alibi_slopes_ptr, b, h, stride_bias_b, stride_bias_h, stride_alibi_b, META)
