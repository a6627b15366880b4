"""Tensor classes: classes that torch reads as tensors are accepted; if elements have another meaning, the class raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flexattn import append_kv, attention, attention_backward, merge_attention
from flexattn.integrations.flash_attn import flash_attn_func
from flexattn.integrations.te import DotProductAttention
from flexattn.integrations.xformers import memory_efficient_attention
from tests.support.marked import marked

B, S, H, D = 2, 5, 2, 8
X = torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(0))
PACKED = {"qkv_format": "thd", "attn_mask_type": "padding", "max_seqlen_q": S, "max_seqlen_kv": S}
CU = torch.tensor([0, S, 2 * S], dtype=torch.int32)
LENGTHS = torch.tensor([S, 3], dtype=torch.int32)
BIAS = torch.zeros(1, 1, S, S)


class Plain(Tensor):
    """Overrides nothing."""


def packed(**given: Any) -> Any:
    q = X.flatten(0, 1)
    return attention(q, q, q, **(PACKED | {"cu_seqlens_q": CU, "cu_seqlens_kv": CU} | given))


CALLS: dict[str, Callable[[], Any]] = {
    "q": lambda: attention(marked(X), X, X),
    "k": lambda: attention(X, marked(X), X),
    "v": lambda: attention(X, X, marked(X)),
    "bias": lambda: attention(X, X, X, bias_type="post_scale_bias", bias=marked(BIAS)),
    "alibi_slopes": lambda: attention(X, X, X, bias_type="alibi", alibi_slopes=marked(torch.ones(H))),
    "softmax_offset": lambda: attention(X, X, X, softmax_type="learnable", softmax_offset=marked(torch.ones(H))),
    "rng_state": lambda: attention(X, X, X, dropout_p=0.5, rng_state=marked(torch.tensor([1, 2]))),
    "cu_seqlens_q": lambda: packed(cu_seqlens_q=marked(CU)),
    "cu_seqlens_kv": lambda: packed(cu_seqlens_kv=marked(CU)),
    "cu_seqlens_q_padded": lambda: packed(cu_seqlens_q_padded=marked(CU)),
    "cu_seqlens_kv_padded": lambda: packed(cu_seqlens_kv_padded=marked(CU)),
    "seqused_kv": lambda: attention(X, X, X, attn_mask_type="padding", seqused_q=LENGTHS, seqused_kv=marked(LENGTHS)),
    "score_mod_tensors": lambda: attention(
        X, X, X, score_mod=lambda score, b, h, i, j, t: score + t[i, j], score_mod_tensors=[marked(BIAS[0, 0])]
    ),
    "hidden": lambda: attention(X, X, X, mask_mod=_reads(marked(BIAS[0, 0] > 0))),
    "dout": lambda: attention_backward(marked(X), X, X, X, X, torch.zeros(B, H, S)),
    "out_a": lambda: merge_attention(marked(X), torch.zeros(B, H, S), X, torch.zeros(B, H, S)),
    "k_new": lambda: append_kv(X.clone(), X.clone(), marked(X[:, :1]), X[:, :1], seqused_kv=LENGTHS - 1),
    "bias, by xformers' name": lambda: memory_efficient_attention(X, X, X, marked(BIAS.expand(B, H, S, S))),
    "alibi_slopes, by FlashAttention's name": lambda: flash_attn_func(X, X, X, alibi_slopes=marked(torch.ones(H))),
    "bias, by TransformerEngine's name": lambda: DotProductAttention(H, D, qkv_format="bshd", attn_mask_type="no_mask")(
        X, X, X, core_attention_bias_type="post_scale_bias", core_attention_bias=marked(BIAS)
    ),
    "attention_mask, TransformerEngine's": lambda: DotProductAttention(H, D, qkv_format="bshd", attn_mask_type="arbitrary")(
        X, X, X, marked(BIAS > 0)
    ),
}


def _reads(hidden: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: ~hidden[i, j]


@pytest.mark.parametrize("name", CALLS)
def test_a_class_that_gives_its_elements_a_meaning_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name.partition(',')[0]}.* is a Marked, whose elements may not be its value; accepted"):
        CALLS[name]()


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_torchs_causal_bias_is_no_bias(make: Callable[[int, int], Tensor]) -> None:
    bias = make(S, S)[None]
    with pytest.raises(TypeError, match=r"bias is a CausalBias.*pass attn_mask_type 'causal' or 'causal_bottom_right'"):
        attention(X, X, X, bias_type="post_scale_bias", bias=bias)


@pytest.mark.parametrize(
    "kind", [torch.nn.Parameter, torch.nn.Buffer, lambda x: x.as_subclass(Plain)], ids=("parameter", "buffer", "plain")
)
def test_classes_that_torch_reads_as_tensors_are_taken(kind: Callable[[Tensor], Tensor]) -> None:
    want = attention(X, X, X, bias_type="post_scale_bias", bias=BIAS)
    for _ in range(2):
        found = attention(kind(X), kind(X), kind(X), bias_type="post_scale_bias", bias=kind(BIAS))
        torch.testing.assert_close(found.as_subclass(Tensor), want)
