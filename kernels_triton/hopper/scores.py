"""Scores as a call's bias, ALiBi, softcap and score_mod make them of products of q and k."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Alibi, Bias, Head, Scores
from flexattn.kernels_triton.common.primitives import behind, load_head, logits


@gluon.jit
def head_from(scores: Scores, b, h, sequence, shift, bias_ptr, alibi_slope, captures):
    # As `primitives.head_of`, of what is read already
    return Head(
        b=b,
        h=h,
        len_q=sequence.len_q,
        len_kv=sequence.len_kv,
        shift=shift,
        softcap=scores.softcap,
        bias_ptr=bias_ptr,
        bias_stride_m=scores.bias.stride_m,
        bias_stride_n=scores.bias.stride_n,
        alibi_slope=alibi_slope,
        captures=captures,
    )


@gluon.jit
def head_group(place, scores, head):
    # As `primitives.logits` takes them
    len_q, len_kv, shift, b, h = place
    _, softcap, stride_bias_m, stride_bias_n, captures = scores
    bias_ptr, alibi_slope = head
    return Head(b, h, len_q, len_kv, shift, softcap, bias_ptr, stride_bias_m, stride_bias_n, alibi_slope, captures)


@gluon.jit
def modified(qk, i, j, place, scores, head, MODS: gl.constexpr, META: gl.constexpr):
    # `primitives.logits` of one head's tile, in either order
    return logits(qk, i, j, scores[0], head_group(place, scores, head), MODS, META)


@gluon.jit
def scores_of_head(scores, values, META: gl.constexpr):
    # `scores` with what the mods read of a head, `head_values`
    softmax_scale, softcap, stride_bias_m, stride_bias_n, captures = scores
    return softmax_scale, softcap, stride_bias_m, stride_bias_n, behind(captures, values, META)


@gluon.jit
def head_of(bias, b, h, META: gl.constexpr):
    # What `modified` reads of a head
    bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b = bias
    return load_head(Bias(bias_ptr, stride_bias_b, stride_bias_h, None, None), Alibi(alibi_slopes_ptr, stride_alibi_b), b, h, META)
