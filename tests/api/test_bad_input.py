"""Every wrong argument raises before anything is selected or launched. The error names it, its value and accepted ones."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import flexattn
from flexattn import Window, ops

B, SQ, SKV, H, H_KV, D, D_V = 2, 5, 7, 4, 2, 16, 8
LENGTHS_Q, LENGTHS_KV = (3, 5), (7, 2)
TOTAL_Q, TOTAL_KV = sum(LENGTHS_Q), sum(LENGTHS_KV)


def cu(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense(**changes: Any) -> dict[str, Any]:
    """A right call in bshd, with these arguments changed."""
    return {"q": torch.randn(B, SQ, H, D), "k": torch.randn(B, SKV, H_KV, D), "v": torch.randn(B, SKV, H_KV, D_V), **changes}


def padded(**changes: Any) -> dict[str, Any]:
    """A right call in bshd with lengths."""
    lengths = {"attn_mask_type": "padding", "cu_seqlens_q": cu(0, 3, 8), "cu_seqlens_kv": cu(0, 7, 9)}
    return dense(**(lengths | changes))


def thd(**changes: Any) -> dict[str, Any]:
    """A right call in thd."""
    packed = {"q": torch.randn(TOTAL_Q, H, D), "k": torch.randn(TOTAL_KV, H_KV, D), "v": torch.randn(TOTAL_KV, H_KV, D_V)}
    return padded(**(packed | {"qkv_format": "thd", "max_seqlen_q": 5, "max_seqlen_kv": 7} | changes))


class Bad(NamedTuple):
    call: dict[str, Any]
    error: type[Exception]
    argument: str
    came: str  # a literal part of the message
    accepted: str = "accepted"


def shaped(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


_Q = torch.randn(B, SQ, H, D_V)
IN_PLACE = dense(q=_Q, k=torch.randn(B, SKV, H_KV, D_V), out=_Q)
META = {"device": "meta"}  # stands for any other device, so that the test needs no GPU

BAD = {
    "q no tensor": Bad(dense(q=[1.0]), TypeError, "q", "[1.0] (list)", "a tensor"),
    "k no tensor": Bad(dense(k=None), TypeError, "k", "None (NoneType)", "a tensor"),
    "q 3-d in bshd": Bad(
        dense(q=shaped(5, 4, 16)), ValueError, "q", "3 dims, shape (5, 4, 16)", "the 4 dims of bshd (batch, sequence"
    ),
    "v 5-d": Bad(dense(v=shaped(1, 2, 7, 2, 8)), ValueError, "v", "(1, 2, 7, 2, 8)", "the 4 dims of bshd"),
    "q 4-d in thd": Bad(
        thd(q=shaped(2, 5, 4, 16)), ValueError, "q", "(2, 5, 4, 16)", "the 3 dims of thd (total tokens, heads, head dim)"
    ),
    "q int": Bad(dense(q=shaped(B, SQ, H, D, dtype=torch.int32)), TypeError, "q", "torch.int32", "torch.bfloat16"),
    "q complex": Bad(dense(q=shaped(B, SQ, H, D, dtype=torch.complex64)), TypeError, "q", "torch.complex64", "torch.float16"),
    "k other dtype": Bad(
        dense(k=shaped(B, SKV, H_KV, D).half()), TypeError, "k", "torch.float16 and q has torch.float32", "the same"
    ),
    "v other dtype": Bad(
        dense(v=shaped(B, SKV, H_KV, D_V).bfloat16()), TypeError, "v", "torch.bfloat16", "the same for q, k and v"
    ),
    "q sparse": Bad(dense(q=shaped(B, SQ, H, D).to_sparse()), TypeError, "q", "torch.sparse_coo", "torch.strided"),
    "q jagged": Bad(
        dense(q=torch.nested.nested_tensor([shaped(3, H, D), shaped(5, H, D)], layout=torch.jagged)),
        TypeError,
        "q",
        "torch.jagged",
        "thd",
    ),
    "k other device": Bad(dense(k=shaped(B, SKV, H_KV, D, **META)), ValueError, "k", "on meta and q is on cpu", "the same device"),
    "v other device": Bad(dense(v=shaped(B, SKV, H_KV, D_V, **META)), ValueError, "v", "on meta", "the same device"),
    "no heads": Bad(dense(k=shaped(B, SKV, 0, D)), ValueError, "k", "(2, 7, 0, 16)", "at least one head"),
    "no head dim": Bad(dense(q=shaped(B, SQ, H, 0)), ValueError, "q", "(2, 5, 4, 0)", "head dim of at least 1"),
    "heads no multiple": Bad(dense(q=shaped(B, SQ, 3, D)), ValueError, "q", "3 heads and k and v have 2", "a multiple"),
    "fewer q heads": Bad(dense(q=shaped(B, SQ, 1, D)), ValueError, "q", "1 heads and k and v have 2", "a multiple"),
    "v other heads": Bad(dense(v=shaped(B, SKV, 4, D_V)), ValueError, "v", "heads 4 and k has 2", "the same"),
    "k other head dim": Bad(dense(k=shaped(B, SKV, H_KV, 8)), ValueError, "k", "head dim 8 and q has 16", "the same"),
    "k other batch": Bad(
        dense(k=shaped(3, SKV, H_KV, D), v=shaped(3, SKV, H_KV, D_V)), ValueError, "k", "is 3 and", "one batch size"
    ),
    "v other batch": Bad(dense(v=shaped(3, SKV, H_KV, D_V)), ValueError, "v", "batch 3 and k has 2", "the same"),
    "v other length": Bad(dense(v=shaped(B, 6, H_KV, D_V)), ValueError, "v", "sequence 6 and k has 7", "the same"),
    "v other total": Bad(thd(v=shaped(8, H_KV, D_V)), ValueError, "v", "total tokens 8 and k has 9", "the same"),
    "format unknown": Bad(dense(qkv_format="bhds"), ValueError, "qkv_format", "'bhds'", "bshd, sbhd, bhsd, thd"),
    "format half": Bad(dense(qkv_format="thd_2"), ValueError, "qkv_format", "'thd_2'", "'thd_2bshd'"),
    "format no str": Bad(dense(qkv_format=None), ValueError, "qkv_format", "None", "bshd"),
    "mask unknown": Bad(
        dense(attn_mask_type="causal_top_left"), ValueError, "attn_mask_type", "'causal_top_left'", "causal_bottom_right"
    ),
    "mask no str": Bad(dense(attn_mask_type=True), ValueError, "attn_mask_type", "True", "no_mask"),
    "window without a diagonal": Bad(dense(window_size=3), ValueError, "window_size", "3 without a causal mask", "(3, 3)"),
    "window of no key": Bad(dense(attn_mask_type="causal", window_size=0), ValueError, "window_size", "0", "at least 1"),
    "window no pair": Bad(dense(window_size="3"), ValueError, "window_size", "'3'", "a pair of ints"),
    "window three": Bad(dense(window_size=(1, 2, 3)), ValueError, "window_size", "(1, 2, 3)", "a pair of ints"),
    "window float": Bad(dense(window_size=(1.0, 2)), ValueError, "window_size", "(1.0, 2)", "a pair of ints"),
    "window bool": Bad(dense(window_size=(True, 2)), ValueError, "window_size", "(True, 2)", "a pair of ints"),
    "window below -1": Bad(dense(window_size=(-2, 0)), ValueError, "window_size", "(-2, 0)", "flexattn.Window"),
    "window below -1, numpy": Bad(
        dense(window_size=(np.int64(3), np.int64(-2))), ValueError, "window_size", "(3, -2)", "-1 (open)"
    ),
    "window far below -1": Bad(dense(window_size=(-(2**70), 0)), ValueError, "window_size", "-1180591620717411303424", "-1 (open)"),
    "window side of None": Bad(dense(window_size=(None, 0)), ValueError, "window_size", "(None, 0)", "flexattn.Window"),
    "signed window float": Bad(dense(window_size=Window(1.5, None)), ValueError, "window_size", "1.5", "a pair of ints"),
    "signed window past causal": Bad(
        dense(attn_mask_type="causal", window_size=Window(-3, 2)), ValueError, "window_size", "right=2", "0 or -1"
    ),
    "window numpy bool": Bad(dense(window_size=(np.bool_(True), 2)), ValueError, "window_size", "True", "a pair of ints"),
    "window numpy float": Bad(dense(window_size=(np.float32(1), 2)), ValueError, "window_size", "1.0", "a pair of ints"),
    "window tensor of bools": Bad(
        dense(window_size=(torch.tensor(True), 2)), ValueError, "window_size", "torch.bool tensor of shape ()", "a pair of ints"
    ),
    "window tensor of floats": Bad(
        dense(window_size=torch.tensor([1.0, 2.0])), ValueError, "window_size", "torch.float32 tensor of shape ()", "a pair of ints"
    ),
    "window tensor of three": Bad(
        dense(window_size=torch.tensor([1, 2, 3])), ValueError, "window_size", "torch.int64 tensor", "a pair of ints"
    ),
    "window tensor elsewhere": Bad(
        dense(window_size=torch.tensor([1, 2], **META)),
        ValueError,
        "window_size",
        "int64 tensor of shape (2,) on meta",
        "its value",
    ),
    "window side elsewhere": Bad(
        dense(window_size=(3, torch.tensor(2, **META))), ValueError, "window_size", "int64 tensor of shape () on meta", "its value"
    ),
    "window past causal": Bad(dense(attn_mask_type="causal", window_size=(4, 1)), ValueError, "window_size", "(4, 1)", "0 or -1"),
    "diagonal against name": Bad(
        dense(attn_mask_type="causal", bottom_right_diagonal=True),
        ValueError,
        "bottom_right_diagonal",
        "True",
        "causal_bottom_right",
    ),
    "diagonal against other name": Bad(
        padded(attn_mask_type="padding_causal_bottom_right", bottom_right_diagonal=False),
        ValueError,
        "bottom_right_diagonal",
        "False",
        "'padding_causal'",
    ),
    "diagonal no bool": Bad(dense(bottom_right_diagonal=1), TypeError, "bottom_right_diagonal", "1 (int)", "True, False, None"),
    "padding without lengths": Bad(padded(cu_seqlens_q=None), ValueError, "cu_seqlens_q", "None", "int32 tensor [batch + 1]"),
    "padding without kv lengths": Bad(padded(cu_seqlens_kv=None), ValueError, "cu_seqlens_kv", "None", "int32 tensor [batch + 1]"),
    "thd without lengths": Bad(thd(cu_seqlens_kv=None), ValueError, "cu_seqlens_kv", "None", "int32 tensor [batch + 1]"),
    "lengths without padding": Bad(padded(attn_mask_type="causal"), ValueError, "cu_seqlens_q", "'causal'", "with padding"),
    "cu int64": Bad(thd(cu_seqlens_q=cu(0, 3, 8, dtype=torch.int64)), TypeError, "cu_seqlens_q", "torch.int64", "torch.int32"),
    "seqused list": Bad(
        dense(attn_mask_type="padding", seqused_kv=[3, 4]),
        TypeError,
        "seqused_kv",
        "[3, 4] (list)",
        "torch.tensor(lengths, dtype=torch.int32, device=q.device) makes it",
    ),
    "cu list": Bad(thd(cu_seqlens_q=[0, 3, 8]), TypeError, "cu_seqlens_q", "[0, 3, 8] (list)", "a tensor"),
    "cu too short": Bad(thd(cu_seqlens_q=cu(0, 8)), ValueError, "cu_seqlens_q", "is 1", "one batch size"),
    "cu too long for dense": Bad(padded(cu_seqlens_kv=cu(0, 3, 8, 9)), ValueError, "cu_seqlens_kv", "is 3", "one batch size"),
    "cu empty": Bad(thd(cu_seqlens_kv=cu()), ValueError, "cu_seqlens_kv", "shape (0,)", "[batch + 1]"),
    "cu other device": Bad(thd(cu_seqlens_kv=cu(0, 7, 9).to("meta")), ValueError, "cu_seqlens_kv", "on meta", "the same device"),
    "cu 2-d": Bad(thd(cu_seqlens_q=cu(0, 3, 8)[None]), ValueError, "cu_seqlens_q", "shape (1, 3)", "[batch + 1]"),
    "cu strided": Bad(thd(cu_seqlens_q=cu(0, 9, 3, 9, 8)[::2]), ValueError, "cu_seqlens_q", "strides (2,)", "contiguous"),
    "cu padded dense": Bad(
        padded(cu_seqlens_q_padded=cu(0, 3, 8)), ValueError, "cu_seqlens_q_padded", "format bshd", "only thd has gaps"
    ),
    "cu padded of dense kv": Bad(
        thd(
            qkv_format="thd_2bshd",
            k=shaped(B, 7, H_KV, D),
            v=shaped(B, 7, H_KV, D_V),
            max_seqlen_kv=None,
            cu_seqlens_kv_padded=cu(0, 7, 9),
        ),
        ValueError,
        "cu_seqlens_kv_padded",
        "format bshd",
        "only thd has gaps",
    ),
    "cu padded dtype": Bad(thd(cu_seqlens_kv_padded=shaped(3)), TypeError, "cu_seqlens_kv_padded", "torch.float32", "torch.int32"),
    "cu padded length": Bad(thd(cu_seqlens_q_padded=cu(0, 8)), ValueError, "cu_seqlens_q_padded", "is 1", "one batch size"),
    "cu padded device": Bad(
        thd(cu_seqlens_q_padded=cu(0, 3, 8).to("meta")), ValueError, "cu_seqlens_q_padded", "on meta", "the same device"
    ),
    "max_seqlen float": Bad(thd(max_seqlen_q=5.0), TypeError, "max_seqlen_q", "5.0 (float)", "an int or None"),
    "max_seqlen bool": Bad(thd(max_seqlen_q=True), TypeError, "max_seqlen_q", "True (bool)", "an int or None"),
    "max_seqlen tensor": Bad(
        thd(max_seqlen_kv=torch.tensor(7, **META)), TypeError, "max_seqlen_kv", "int64 tensor of shape () on meta", "on a CPU"
    ),
    "max_seqlen tensor of floats": Bad(thd(max_seqlen_q=torch.tensor(5.0)), TypeError, "max_seqlen_q", "float32 tensor", "an int"),
    "max_seqlen tensor of bools": Bad(thd(max_seqlen_q=torch.tensor(True)), TypeError, "max_seqlen_q", "bool tensor", "an int"),
    "max_seqlen tensor of one": Bad(thd(max_seqlen_q=torch.tensor([5])), TypeError, "max_seqlen_q", "shape (1,)", "a 0-d tensor"),
    "max_seqlen numpy float": Bad(thd(max_seqlen_q=np.float64(5)), TypeError, "max_seqlen_q", "float64", "an int or None"),
    "max_seqlen numpy bool": Bad(thd(max_seqlen_q=np.bool_(True)), TypeError, "max_seqlen_q", "bool", "an int or None"),
    "max_seqlen negative": Bad(thd(max_seqlen_q=-1), ValueError, "max_seqlen_q", "-1", "longest sequence"),
    "max_seqlen dense": Bad(
        dense(max_seqlen_q=6), ValueError, "max_seqlen_q", "6 and the sequence dim is 5", "accepted with format"
    ),
    "max_seqlen missing": Bad(
        thd(max_seqlen_kv=None, bias_type="post_scale_bias", bias=shaped(1, 1, 5, 7)),
        ValueError,
        "max_seqlen_kv",
        "None",
        "the int",
    ),
    "bias type unknown": Bad(dense(bias_type="alibi_bias"), ValueError, "bias_type", "'alibi_bias'", "post_scale_bias"),
    "bias type no str": Bad(dense(bias_type=0), ValueError, "bias_type", "0", "no_bias"),
    "bias without type": Bad(
        dense(bias=shaped(1, 1, SQ, SKV), bias_type="no_bias"), ValueError, "bias", "'no_bias'", "pre_scale_bias or post_scale_bias"
    ),
    "bias with alibi": Bad(dense(bias_type="alibi", bias=shaped(1, 1, SQ, SKV)), ValueError, "bias", "'alibi'", "post_scale_bias"),
    "bias missing": Bad(dense(bias_type="pre_scale_bias"), ValueError, "bias", "None", "[2, 4, 5, 7]"),
    "bias no tensor": Bad(dense(bias_type="pre_scale_bias", bias=1.0), TypeError, "bias", "1.0 (float)", "a tensor"),
    "bias 2-d": Bad(dense(bias_type="post_scale_bias", bias=shaped(SQ, SKV)), ValueError, "bias", "(5, 7)", "[2, 4, 5, 7]"),
    "bias kv heads": Bad(
        dense(bias_type="post_scale_bias", bias=shaped(1, 2, SQ, SKV)), ValueError, "bias", "(1, 2, 5, 7)", "[2, 4, 5, 7]"
    ),
    "bias transposed": Bad(
        dense(bias_type="post_scale_bias", bias=shaped(1, 1, SKV, SQ)), ValueError, "bias", "(1, 1, 7, 5)", "may be 1"
    ),
    "bias of totals": Bad(
        thd(bias_type="post_scale_bias", bias=shaped(1, 1, 8, 9)), ValueError, "bias", "(1, 1, 8, 9)", "[2, 4, 5, 7]"
    ),
    "bias dtype": Bad(
        dense(bias_type="post_scale_bias", bias=shaped(1, 1, SQ, SKV).half()), TypeError, "bias", "float16", "torch.float32"
    ),
    "bias bool": Bad(
        dense(bias_type="post_scale_bias", bias=shaped(1, 1, SQ, SKV).bool()), TypeError, "bias", "bool", "torch.float32"
    ),
    "bias device": Bad(
        dense(bias_type="post_scale_bias", bias=shaped(1, 1, SQ, SKV, **META)), ValueError, "bias", "meta", "the same device"
    ),
    "slopes without alibi": Bad(
        dense(alibi_slopes=shaped(H), bias_type="no_bias"), ValueError, "alibi_slopes", "'no_bias'", "bias_type alibi"
    ),
    "slopes shape": Bad(
        dense(bias_type="alibi", alibi_slopes=shaped(H_KV)), ValueError, "alibi_slopes", "(2,)", "[4] or [b, h] = [2, 4]"
    ),
    "slopes dtype": Bad(
        dense(bias_type="alibi", alibi_slopes=shaped(H).half()), TypeError, "alibi_slopes", "float16", "torch.float32"
    ),
    "slopes device": Bad(
        dense(bias_type="alibi", alibi_slopes=shaped(H, **META)), ValueError, "alibi_slopes", "meta", "the same device"
    ),
    "slopes list": Bad(dense(bias_type="alibi", alibi_slopes=[1.0] * 4), TypeError, "alibi_slopes", "(list)", "a tensor"),
    "slopes with gradient": Bad(
        dense(bias_type="alibi", alibi_slopes=shaped(H, requires_grad=True)),
        ValueError,
        "alibi_slopes",
        "requires a gradient",
        "detach",
    ),
    "softmax unknown": Bad(
        dense(softmax_type="off_by_one"), ValueError, "softmax_type", "'off_by_one'", "vanilla, off-by-one, learnable"
    ),
    "offset with vanilla": Bad(
        dense(softmax_offset=shaped(H), softmax_type="vanilla"), ValueError, "softmax_offset", "'vanilla'", "softmax_type learnable"
    ),
    "offset with off-by-one": Bad(
        dense(softmax_type="off-by-one", softmax_offset=shaped(H)), ValueError, "softmax_offset", "'off-by-one'", "learnable"
    ),
    "offset missing": Bad(dense(softmax_type="learnable"), ValueError, "softmax_offset", "None", "[h] = [4]"),
    "offset shape": Bad(
        dense(softmax_type="learnable", softmax_offset=shaped(1, H, 1, 1)), ValueError, "softmax_offset", "(1, 4, 1, 1)", "[4]"
    ),
    "offset dtype": Bad(
        dense(softmax_type="learnable", softmax_offset=shaped(H).double()), TypeError, "softmax_offset", "float64", "float32"
    ),
    "offset device": Bad(
        dense(softmax_type="learnable", softmax_offset=shaped(H, **META)), ValueError, "softmax_offset", "meta", "same device"
    ),
    "scale negative": Bad(dense(softmax_scale=-0.1), ValueError, "softmax_scale", "-0.1", "at least 0"),
    "scale nan": Bad(dense(softmax_scale=math.nan), ValueError, "softmax_scale", "nan", "finite"),
    "scale inf": Bad(dense(softmax_scale=math.inf), ValueError, "softmax_scale", "inf", "finite"),
    "scale past float32": Bad(dense(softmax_scale=1e39), ValueError, "softmax_scale", "1e+39", "finite"),
    "scale str": Bad(dense(softmax_scale="0.1"), TypeError, "softmax_scale", "'0.1' (str)", "number"),
    "scale tensor": Bad(
        dense(softmax_scale=torch.tensor(0.1, **META)), TypeError, "softmax_scale", "tensor of shape () on meta", "on a CPU"
    ),
    "scale learnable": Bad(
        dense(softmax_scale=torch.tensor(0.1, requires_grad=True)), TypeError, "softmax_scale", "tensor of shape ()", "a gradient"
    ),
    "scale tensor of one": Bad(dense(softmax_scale=torch.tensor([0.1])), TypeError, "softmax_scale", "shape (1,)", "a 0-d tensor"),
    "scale tensor negative": Bad(dense(softmax_scale=torch.tensor(-0.5)), ValueError, "softmax_scale", "-0.5", "at least 0"),
    "scale bool": Bad(dense(softmax_scale=True), TypeError, "softmax_scale", "True (bool)", "number"),
    "scale numpy nan": Bad(dense(softmax_scale=np.float32("nan")), ValueError, "softmax_scale", "nan", "finite"),
    "softcap complex": Bad(dense(softcap=torch.tensor(1j)), TypeError, "softcap", "complex64", "a 0-d tensor"),
    "dropout numpy": Bad(dense(dropout_p=np.float32(1)), ValueError, "dropout_p", "1.0", "[0, 1)"),
    "softcap negative": Bad(dense(softcap=-30.0), ValueError, "softcap", "-30.0", "at least 0"),
    "softcap nan": Bad(dense(softcap=math.nan), ValueError, "softcap", "nan", "finite"),
    "softcap inf": Bad(dense(softcap=math.inf), ValueError, "softcap", "inf", "finite"),
    "softcap without an inverse": Bad(dense(softcap=1e-40), ValueError, "softcap", "1e-40", "at least 1.18e-38"),
    "softcap None": Bad(dense(softcap=None), TypeError, "softcap", "None (NoneType)", "0 for none"),
    "dropout one": Bad(dense(dropout_p=1.0), ValueError, "dropout_p", "1.0", "[0, 1)"),
    "dropout almost one": Bad(dense(dropout_p=1 - 2**-40), ValueError, "dropout_p", "0.9999999", "at most 1 - 2**-16"),
    "dropout negative": Bad(dense(dropout_p=-0.1), ValueError, "dropout_p", "-0.1", "[0, 1)"),
    "dropout nan": Bad(dense(dropout_p=math.nan), ValueError, "dropout_p", "nan", "[0, 1)"),
    "dropout bool": Bad(dense(dropout_p=True), TypeError, "dropout_p", "True (bool)", "[0, 1)"),
    "rng no tensor": Bad(dense(dropout_p=0.1, rng_state=(1, 2)), TypeError, "rng_state", "(1, 2) (tuple)", "a tensor"),
    "rng dtype": Bad(dense(dropout_p=0.1, rng_state=cu(1, 2)), TypeError, "rng_state", "torch.int32", "torch.int64"),
    "rng shape": Bad(dense(dropout_p=0.1, rng_state=cu(1, dtype=torch.int64)), ValueError, "rng_state", "(1,)", "shape [2]"),
    "rng device": Bad(dense(rng_state=cu(1, 2, dtype=torch.int64).to("meta")), ValueError, "rng_state", "meta", "the same device"),
    "deterministic int": Bad(dense(deterministic=1), TypeError, "deterministic", "1 (int)", "True, False, None"),
    "return_lse str": Bad(dense(return_lse="yes"), TypeError, "return_lse", "'yes' (str)", "True, False"),
    "return_max_logit None": Bad(dense(return_max_logit=None), TypeError, "return_max_logit", "None", "True, False"),
    "causal no bool": Bad(dense(causal=1), TypeError, "causal", "1 (int)", "True, False"),
    "causal of two lengths": Bad(dense(causal=True), ValueError, "causal", "5 queries and 7 keys", "'causal_bottom_right'"),
    "causal of packed lengths": Bad(
        thd(attn_mask_type="no_mask", causal=True), ValueError, "causal", "lengths of their own", "cu_s"
    ),
    "cu_seqlens twice": Bad(thd(cu_seqlens=cu(0, 3, 8)), ValueError, "cu_seqlens", "cu_seqlens_q are given", "for both sides"),
    "max_seqlen twice": Bad(thd(max_seqlen=7), ValueError, "max_seqlen", "max_seqlen_q are given", "for both sides"),
    "bias and slopes": Bad(
        dense(bias=shaped(1, 1, SQ, SKV), alibi_slopes=shaped(H)), ValueError, "alibi_slopes", "bias and", "Leave one out"
    ),
    "mask no tensor": Bad(dense(mask=True), TypeError, "mask", "True (bool)", "torch.float32"),
    "mask of ints": Bad(dense(mask=shaped(SQ, SKV).int()), TypeError, "mask", "torch.int32", "bool"),
    "mask of another length": Bad(dense(mask=shaped(SQ, SQ).bool()), ValueError, "mask", "(5, 5)", "[2, 4, 5, 7]"),
    "mask beside a bias": Bad(
        dense(mask=shaped(SQ, SKV), bias=shaped(1, 1, SQ, SKV)), ValueError, "mask", "bias and a float mask", "their sum"
    ),
    "mask beside slopes": Bad(dense(mask=shaped(SQ, SKV), alibi_slopes=shaped(H)), ValueError, "mask", "alibi_slopes is", "bool"),
    "mask beside a type": Bad(dense(mask=shaped(SQ, SKV), bias_type="no_bias"), ValueError, "mask", "'no_bias'", "bool"),
    "mask of packed sequences": Bad(
        thd(mask=shaped(SQ, SKV).bool(), max_seqlen_q=None), ValueError, "mask", "without max_seqlen_q", "Pass max_seqlen_q"
    ),
    "mask of all tokens": Bad(thd(mask=shaped(TOTAL_Q, TOTAL_KV).bool()), ValueError, "mask", "(8, 9)", "[2, 4, 5, 7]"),
    "mask_mod no function beside a mask": Bad(
        dense(mask=shaped(SQ, SKV).bool(), mask_mod=3), TypeError, "mask_mod", "3 (int)", "a function"
    ),
    "mask_mod tensor": Bad(dense(mask_mod=shaped(SQ, SKV).bool()), TypeError, "mask_mod", "torch.bool", "as mask="),
    "out no tensor": Bad(dense(out=1), TypeError, "out", "1 (int)", "a tensor"),
    "out dtype": Bad(dense(out=shaped(B, SQ, H, D_V).half()), TypeError, "out", "torch.float16", "torch.float32"),
    "out shape": Bad(dense(out=shaped(B, SQ, H, D)), ValueError, "out", "(2, 5, 4, 16)", "(2, 5, 4, 8)"),
    "out strides": Bad(
        dense(out=shaped(B, H, SQ, D_V).transpose(1, 2)), ValueError, "out", "strides (160, 8, 40, 1)", "contiguous"
    ),
    "out device": Bad(dense(out=shaped(B, SQ, H, D_V, **META)), ValueError, "out", "on meta", "the same device"),
    "out with a gradient": Bad(
        dense(q=shaped(B, SQ, H, D, requires_grad=True), out=shaped(B, SQ, H, D_V)), ValueError, "out", "a gradient", "no_grad"
    ),
    "out with a gradient of its own": Bad(
        dense(out=shaped(B, SQ, H, D_V, requires_grad=True)), ValueError, "out", "a gradient", "no_grad"
    ),
    "out off 16 bytes": Bad(
        dense(out=shaped(B * SQ * H * D_V + 1)[1:].view(B, SQ, H, D_V)), ValueError, "out", "address", "a multiple of 16 bytes"
    ),
    "out in q": Bad(IN_PLACE, ValueError, "out", "share memory with q", "separate memory"),
    "backend unknown": Bad(dense(backend="flash"), ValueError, "backend", "'flash'", "auto, triton, cudnn, eager"),
}


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call is wrong, nothing is selected or launched."""
    monkeypatch.setattr(ops, "select", lambda *what: pytest.fail(f"a wrong call got as far as select{what}"))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("function", [flexattn.attention, flexattn.explain])
def test_wrong_arguments_are_named(function, bad):
    with pytest.raises(bad.error, match=rf"\b{bad.argument}\b") as e:
        function(**bad.call)
    assert type(e.value) is bad.error
    for part in (bad.came, bad.accepted):
        assert part in str(e.value)


@pytest.mark.parametrize("make", [dense, padded, thd])
def test_the_calls_that_the_table_changes_are_right(monkeypatch, make):
    monkeypatch.undo()
    out = flexattn.attention(**make())
    assert out.shape == (*make()["q"].shape[:-1], D_V)
    assert not out.isnan().any()


def test_an_argument_that_does_not_exist():
    for function in (flexattn.attention, flexattn.explain):
        with pytest.raises(TypeError, match="is_causal"):
            function(**dense(is_causal=True))


OUT, LSE = shaped(B, SQ, H, D), shaped(B, H, SQ)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((OUT, LSE, OUT, LSE, "bsdh"), ValueError, "qkv_format is 'bsdh'"),
        ((OUT[0], LSE, OUT, LSE, "bshd"), ValueError, "out_a has shape (5, 4, 16)"),
        ((OUT, LSE, OUT[:1], LSE, "bshd"), ValueError, "out_b has shape (1, 5, 4, 16)"),
        ((OUT, LSE, OUT.half(), LSE, "bshd"), TypeError, "out_b has dtype torch.float16"),
        ((OUT, LSE.half(), OUT, LSE, "bshd"), TypeError, "lse_a has dtype torch.float16"),
        ((OUT, LSE, OUT, LSE[..., :1], "bshd"), ValueError, "lse_b has shape (2, 4, 1)"),
        ((OUT, LSE, OUT, LSE, "bhsd"), ValueError, "lse_a has shape (2, 4, 5)"),
        ((OUT, LSE, OUT.to("meta"), LSE, "bshd"), ValueError, "out_b is on meta"),
        ((OUT, None, OUT, LSE, "bshd"), TypeError, "lse_a is None"),
    ],
)
def test_merge_attention_names_wrong_arguments(arguments, error, message):
    *tensors, qkv_format = arguments
    with pytest.raises(error, match=re.escape(message)):
        flexattn.merge_attention(*tensors, qkv_format=qkv_format)


WRONG_VALUES = {
    "start": (thd(cu_seqlens_q=cu(1, 3, 8)), "cu_seqlens_q[0] is 1; accepted: 0"),
    "decreasing": (thd(cu_seqlens_kv=cu(0, 7, 5)), "cu_seqlens_kv[2] is 5 after cu_seqlens_kv[1] = 7"),
    "past the total": (
        thd(cu_seqlens_q=cu(0, 3, 9), max_seqlen_q=6),
        "cu_seqlens_q[2] is 9; accepted: at most the total number of tokens, 8",
    ),
    "longer than max_seqlen": (thd(max_seqlen_q=4), "cu_seqlens_q[2] - cu_seqlens_q[1] is 5; accepted: at most max_seqlen_q, 4"),
    "longer than the row": (
        padded(cu_seqlens_q=cu(0, 6, 8)),
        "cu_seqlens_q[1] - cu_seqlens_q[0] is 6; accepted: at most the sequence dim",
    ),
    "padded past the total": (
        thd(cu_seqlens_kv_padded=cu(0, 8, 9)),
        "cu_seqlens_kv_padded[1] is 8, the start of a sequence of 2 tokens; accepted: 0 to 7",
    ),
    "padded before the first": (thd(cu_seqlens_q_padded=cu(-1, 3, 8)), "cu_seqlens_q_padded[0] is -1"),
    "longer than its slot": (
        thd(cu_seqlens_q_padded=cu(0, 2, 8)),
        "cu_seqlens_q_padded[1] is 2, and sequence 0, of 3 tokens, begins at 0; accepted: slots that do not overlap",
    ),
    "longer than its slot, out of order": (
        thd(cu_seqlens_q_padded=cu(4, 0, 8)),
        "cu_seqlens_q_padded[0] is 4, and sequence 1, of 5 tokens, begins at 0; accepted: slots that do not overlap",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_values_are_checked_on_request(monkeypatch, call, message):
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    with pytest.raises(ValueError, match=re.escape(message)):
        flexattn.attention(**call)


DO_NOT_FIT = ("past the total", "longer than max_seqlen", "longer than the row")


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", DO_NOT_FIT)
def test_lengths_that_do_not_fit_raise_on_a_cpu_in_each_call(monkeypatch, name, backend):
    """The check also runs for a cached kind of call, because its lengths are other numbers."""
    monkeypatch.undo()
    monkeypatch.delenv("FLEXATTN_CHECK", raising=False)
    call, message = WRONG_VALUES[name]
    right = (padded() if "qkv_format" not in call else thd()) | {"q": call["q"], "k": call["k"], "v": call["v"]}
    for _ in range(3):
        flexattn.attention(**right, backend=backend)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(message)):
            flexattn.attention(**call, backend=backend)
    out, lse = torch.zeros(*call["q"].shape[:-1], D_V), torch.zeros(H, TOTAL_Q)
    if "qkv_format" in call:
        with pytest.raises(ValueError, match=re.escape(message)):
            flexattn.attention_backward(out, call["q"], call["k"], call["v"], out, lse, **_without_qkv(call), backend=backend)


def _without_qkv(call):
    return {name: value for name, value in call.items() if name not in ("q", "k", "v")}


@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_kv", "seqused_kv"])
def test_a_longest_length_that_is_too_small_raises_on_a_cpu(argument, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("FLEXATTN_CHECK", raising=False)
    call = thd()
    if argument == "seqused_kv":
        call |= {"seqused_kv": cu(7, 3)}
    else:
        call |= {argument: call[argument] - 1}
    with pytest.raises(ValueError, match=f"{argument.removeprefix('max_')}|at most {argument}"):
        flexattn.attention(**call)


@pytest.mark.parametrize(("call", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_unchecked_wrong_values_harm_nothing(monkeypatch, call, message):
    """Without the check a wrong value gives a result of the right shape, and touches nothing beyond the tensors."""
    monkeypatch.undo()
    monkeypatch.setenv("FLEXATTN_CHECK", "0")
    q = call["q"].detach().requires_grad_()
    out = flexattn.attention(**(call | {"q": q}))
    out.sum().backward()
    assert out.shape == (*q.shape[:-1], D_V)
    assert out.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        padded(),
        thd(),
        thd(q=shaped(12, H, D), cu_seqlens_q_padded=cu(0, 4, 11)),
        thd(q=shaped(12, H, D)),
        thd(cu_seqlens_kv=cu(0, 0, 0)),
        thd(qkv_format="thd_2bshd", k=shaped(B, SKV, H_KV, D), v=shaped(B, SKV, H_KV, D_V), max_seqlen_kv=None),
    ],
)
def test_right_values_pass_the_check(monkeypatch, call):
    monkeypatch.undo()
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    assert flexattn.attention(**call).isfinite().all()


def test_lengths_that_are_missing_warn_once_each(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("flexattn.warn._warned", set())
    call = thd(max_seqlen_q=None)
    with pytest.warns(RuntimeWarning, match="max_seqlen_q is None with thd.*batch x total tokens"):
        out = flexattn.attention(**call)
    flexattn.attention(**call)  # a second warning would be an error
    with pytest.warns(RuntimeWarning, match="max_seqlen_kv is None with thd"):
        flexattn.attention(**(call | {"max_seqlen_kv": None}))
    torch.testing.assert_close(out, flexattn.attention(**(call | {"max_seqlen_q": 5})), rtol=0, atol=0)
