"""Scores as a call's bias, ALiBi, softcap and score_mod make them of products of q and k."""

from __future__ import annotations

from triton.experimental import gluon

from flexattn.kernels_triton.common.arguments import Head, Scores


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
