"""Stand-in for torch's scaled_dot_product_attention, with the same arguments, run by `flexattn.attention`.

The signature is that of https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.functional import pad

from flexattn.dispatch.spec import MaskType
from flexattn.functional import attention
from flexattn.integrations.arguments import without_sign
from flexattn.masks import mask_arguments, mask_dtypes, one_batch
from flexattn.shorthands import is_jagged
from flexattn.validation import check_flags, describe


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns attention as torch.nn.functional.scaled_dot_product_attention does; all dims before the last two broadcast.

    Args:
        query: [..., h, sq, d], or [sq, d]; float16, bfloat16, float32 or (on a CPU) float64. If query, key and value are jagged
            nested tensors, they are [b, h, jagged, d].
        key, value: [..., h_kv, skv, d] and [..., h_kv, skv, d_v], of query's dtype.
        attn_mask: broadcastable to [..., h, sq, skv]. A bool mask is True for keys that the query sees. A float mask is added to
            the scaled scores. Its dtype is query's or float32 (under autocast any of 16 or 32 bits), and it may require a gradient.
            A torch.nn.attention.bias.CausalBias for the lengths of query and key is accepted without is_causal.
        dropout_p: dropout probability in [0, 1); always applied, as in torch.
        is_causal: if True, query i sees keys j <= i, whatever the lengths, on top of attn_mask.
        scale: scale of the scores. None: 1/sqrt(d).
        enable_gqa: whether query heads share heads of key and value: h is a multiple of h_kv.

    Returns:
        [..., h, sq, d_v] of query's dtype, 0 for a query that sees no key. If tokens precede heads in query's memory, they do in
        the result's.

    Raises:
        ValueError, TypeError: if shapes or dtypes do not match, or nested tensors come with attn_mask; also as
            `flexattn.attention`.
        BackendError: if no backend supports the call.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if is_jagged(query) and is_jagged(key) and is_jagged(value) and attn_mask is None:
        mask: MaskType = "causal" if is_causal else "no_mask"
        return attention(query, key, value, qkv_format="bhsd", attn_mask_type=mask, softmax_scale=scale, dropout_p=dropout_p)
    _check(query, key, value)
    heads, lead = _heads(query, key, value, enable_gqa)
    has_no_batch = query.dim() == key.dim() == value.dim() == 2
    q, k, v = (_as_4d(x, lead, h) for x, h in zip((query, key, value), heads, strict=True))
    q, scale = without_sign(q, scale)
    arguments: dict[str, Any] = {
        "attn_mask_type": "causal" if is_causal else "no_mask",
        "softmax_scale": scale,
        "dropout_p": dropout_p,
    }
    if isinstance(attn_mask, CausalBias):
        arguments["attn_mask_type"] = _mask_type(attn_mask, is_causal, (q.shape[2], k.shape[2]))
    elif attn_mask is not None:
        scores = (*q.shape[1:3], k.shape[2])
        arguments |= mask_arguments("attn_mask", attn_mask, lead, scores, mask_dtypes(query), query.device)
    out: Tensor
    if 0 in (*heads, q.shape[-1], v.shape[-1]):
        out = _attend_empty(q, k, v, arguments)
        return out.reshape(*lead, *(heads[:1] * (not has_no_batch)), q.shape[2], v.shape[-1])
    if q.stride(1) < q.stride(2):  # out and the gradients have q's memory layout
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments).transpose(1, 2)
    else:
        out = attention(q, k, v, qkv_format="bhsd", **arguments)
    if len(lead) == 1:
        return out
    return out.flatten(0, 2) if has_no_batch else out.reshape(*lead, *out.shape[1:]) if lead else out[0]


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
            raise ValueError(
                f"{name} is {describe(x)}; accepted: a dense tensor [..., tokens, head dim], or three jagged nested tensors "
                "without attn_mask"
            )


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Returns the head counts of query, key and value after broadcasting, and the dims before the heads, the same for all."""
    tensors = (query, key, value)
    num_q, num_k, num_v = (x.shape[-3] if x.dim() > 2 else 1 for x in tensors)
    lead, heads = tuple(query.shape[:-3]), num_q
    if key.shape[:-3] == value.shape[:-3] == lead and num_q == num_k == num_v and query.dim() > 2:  # nothing to broadcast
        return (heads, heads, heads), lead
    broadcast: Any = torch.broadcast_shapes  # untyped
    try:
        lead = tuple(broadcast(*(x.shape[:-3] for x in tensors)))
        heads = num_q if enable_gqa else broadcast((num_q,), (num_k,), (num_v,))[0]
    except RuntimeError as e:
        hint = "" if enable_gqa else "; to share heads of key and value, pass enable_gqa=True"
        raise ValueError(f"{_shapes(tensors)}; accepted: dims before the last two that broadcast{hint}") from e
    if enable_gqa and (min(x.dim() for x in tensors) < 3 or (num_q > 0 and any(n == 0 or num_q % n for n in (num_k, num_v)))):
        raise ValueError(
            f"{_shapes(tensors)} with enable_gqa; accepted: [..., heads, tokens, head dim], query's heads a multiple of both"
        )
    num_kv = num_k if num_k == num_v else heads
    return (heads, num_kv, num_kv), lead


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    return f"query, key and value have shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"


def _as_4d(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """Returns x as [batch, heads, tokens, head dim], without a copy if lead is one dim and no head must be repeated."""
    if x.shape[:-2] == (*lead, heads) and len(lead) == 1:
        return x
    if x.dim() == 2:
        x = x.unsqueeze(0)
    if x.shape[-3] != heads:
        x = x.repeat_interleave(heads // x.shape[-3], -3) if x.shape[-3] > 1 else x.expand(*x.shape[:-3], heads, *x.shape[-2:])
    return one_batch(x.expand(*lead, *x.shape[-3:]))


def _mask_type(mask: CausalBias, is_causal: bool, lengths: tuple[int, int]) -> str:
    """Returns `attention`'s name for torch's causal bias. lengths: of query and key."""
    if is_causal:
        raise ValueError("attn_mask is a CausalBias and is_causal is True; accepted: one of the two")
    mask_lengths = (mask.seq_len_q, mask.seq_len_kv)
    if mask_lengths != lengths:
        raise ValueError(f"attn_mask is a CausalBias for lengths {mask_lengths}; accepted: the lengths of query and key, {lengths}")
    return "causal" if mask.variant == CausalVariant.UPPER_LEFT else "causal_bottom_right"


def _attend_empty(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Returns the result [b, h, sq, d_v] of a call without heads or with head dim 0; all its scores are 0."""
    if q.shape[1] == 0:
        masks = [arguments["bias"]] if "bias" in arguments else []
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for x in (q, k, v, *masks):
            out = out + x.sum()  # a gradient of 0 for each tensor
        return out
    padded_q, padded_k, padded_v = (pad(x, (0, 1)) if x.shape[3] == 0 else x for x in (q, k, v))
    padded_out: Tensor = attention(padded_q, padded_k, padded_v, qkv_format="bhsd", **arguments)
    return padded_out[..., : v.shape[3]]
