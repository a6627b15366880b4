"""The attention function of transformers' AttentionInterface: names converted, masks of `masks` put into arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.dispatch.neutral import is_traced
from flexattn.functional import attention
from flexattn.integrations.transformers.keywords import check_keywords
from flexattn.integrations.transformers.masks import Band, Packed, Visible
from flexattn.integrations.transformers.patterns import MaskFunction
from flexattn.warn import warn_once


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a transformers model, for its AttentionInterface.

    After transformers.integrations.flash_attention.flash_attention_forward,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/integrations/flash_attention.py.

    Args:
        module: the layer's attention; its is_causal stands in where `is_causal` is None.
        query: [b, h, sq, d], of any strides. float16, bfloat16 or float32 (float64 on a CPU). Under autocast in its dtype.
        key: [b, h_kv, skv, d]; heads are not to be repeated.
        value: [b, h_kv, skv, d_v].
        attention_mask: what `masks.attention_mask` made; or bool (True: seen) or float (added to the scores, differentiable)
            [b, h, sq, skv], where the first two may be 1 instead, and keys beyond skv are not read; or a BlockMask. All but the
            first kind are the whole mask: is_causal and sliding_window add nothing.
        dropout: the probability that a softmax weight is dropped.
        scaling: factor of the scores; None is 1/sqrt(d).
        sliding_window: tokens that a query sees, itself included, read where attention_mask is None; both sides each where it is
            not causal.
        softcap: c turns each score s into c * tanh(s / c); None and 0 leave it.
        is_causal: query i sees the keys j <= i + skv - sq, read where attention_mask is None.
        s_aux: [h], logits of attention sinks. Differentiable.
        position_bias: [b, h, sq, skv] or 1 in place of any, added to the scores. Differentiable.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], integers: where packed sequences start among the tokens of all rows. They
            are kept apart on top of attention_mask.
        max_length_q, max_length_k: the longest of them, ints or 0-d tensors.
        deterministic: whether gradients are to be bitwise identical from run to run; None and False leave it to torch's setting.
        output_attentions: True warns, once, as the weights are never made.
        keywords: names of `keywords.HARMLESS`, with any value, and any name with None.

    Returns:
        (out, None), out [b, sq, h, d_v], contiguous, in the dtype of query.

    Raises:
        TypeError: attention_mask is of another kind, or a keyword may change the result, such as the `indices` of sparse attention.
        ValueError: attention_mask is for fewer keys, or has no four dims; one of cu_seq_lens_q and cu_seq_lens_k is missing, or
            both come with a BlockMask; or what `flexattn.attention` refuses.
    """
    check_keywords(module, keywords)
    if output_attentions:
        warn_once(
            "transformers output_attentions",
            "output_attentions=True: flexattn never makes the softmax weights, and returns None for them; "
            'use attn_implementation="eager" where they are needed',
        )
    arguments: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout}
    if deterministic:
        arguments["deterministic"] = True
    if s_aux is not None:
        arguments |= {"softmax_type": "learnable", "softmax_offset": s_aux}
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        masked = Masked(_band(causal, sliding_window))
    else:
        masked = _read(attention_mask, query, key)
    if masked.keys is not None:
        key, value = key[:, :, : masked.keys], value[:, :, : masked.keys]
    bias = _sum(masked.bias, position_bias, key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if masked.block_mask is not None:
            raise ValueError(
                "attention_mask is a BlockMask beside cu_seq_lens_q and cu_seq_lens_k; accepted: one of the two; a mask_mod of the "
                "BlockMask can keep sequences apart"
            )
        masked = masked._replace(packed=_packed(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k))
    if masked.packed is not None:
        if masked.mask_mod is None and bias is None:
            return _attend_packed(query, key, value, masked.band, masked.packed, arguments), None
        masked = masked._replace(mask_mod=_apart(masked.packed, masked.mask_mod, query, key))
    if bias is not None:
        arguments |= {"bias_type": "post_scale_bias", "bias": bias}
    out: Tensor = attention(
        query,
        key,
        value,
        qkv_format="bhsd",
        attn_mask_type=masked.band.attn_mask_type,
        window_size=masked.band.window_size,
        mask_mod=masked.mask_mod,
        block_mask=masked.block_mask,
        **arguments,
    )
    return out.transpose(1, 2).contiguous(), None  # some models view it


class Masked(NamedTuple):
    """A mask in the arguments of `attention`; all of them hold together."""

    band: Band = Band()
    mask_mod: MaskFunction | None = None
    packed: tuple[Packed, Packed] | None = None  # for the queries and for the keys
    keys: int | None = None  # how many to keep; None: all
    bias: Tensor | None = None
    block_mask: BlockMask | None = None


def _band(causal: bool, sliding_window: int | None) -> Band:
    left = -1 if sliding_window is None else sliding_window - 1
    return Band("causal_bottom_right", (left, 0)) if causal else Band("no_mask", (left, left))


def _read(mask: Tensor | Visible | BlockMask, query: Tensor, key: Tensor) -> Masked:
    if isinstance(mask, Visible):
        if mask.shape[2:] != (query.shape[2], key.shape[2]):
            raise ValueError(
                f"attention_mask was made for {mask.shape[2]} queries and {mask.shape[3]} keys and comes with {query.shape[2]} and "
                f"{key.shape[2]}; accepted: as many; this model adds to its mask or its keys by itself, and can be run with "
                'attn_implementation="eager"'
            )
        packed = None if mask.packed is None else (mask.packed, mask.packed)
        return Masked(mask.band, mask.mask_mod, packed, keys=mask.keys)
    if isinstance(mask, BlockMask):
        return Masked(block_mask=mask)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}; accepted: what flexattn's attention_mask made, a tensor of four dims, a "
            "BlockMask, or None"
        )
    (b, h, sq), skv = query.shape[:3], key.shape[2]
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, b) or shape[1] not in (1, h) or shape[2] not in (1, sq) or shape[3] < skv:
        raise ValueError(
            f"attention_mask is a tensor {list(shape)} beside queries {[b, h, sq]} and {skv} keys; accepted: [b, h, sq, skv] "
            "with 1 in place of b, h and sq, or more keys; transformers makes such masks of a two-dimensional one where the mask "
            "function is registered too, as flexattn.integrations.transformers.register() does"
        )
    if mask.dtype != torch.bool:
        return Masked(bias=mask[..., :skv])
    of_batch, of_heads, of_queries = (int(size > 1) for size in shape[:3])
    return Masked(
        mask_mod=lambda b, h, q_idx, kv_idx: mask[b * of_batch, h * of_heads, q_idx * of_queries, kv_idx],
    )


def _sum(mask: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    if position_bias is None:
        return mask
    position_bias = position_bias[..., :keys]
    return position_bias if mask is None else position_bias + mask


def _packed(
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
) -> tuple[Packed, Packed]:
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing; accepted: cu_seq_lens_q and cu_seq_lens_k together, or neither")
    return _of(cu_seq_lens_q, max_length_q), _of(cu_seq_lens_k, max_length_k)


def _of(cu_seq_lens: Tensor, max_length: int | Tensor | None) -> Packed:
    if isinstance(max_length, Tensor):  # cannot be read while a graph is made; the number of tokens stands in
        max_length = None if is_traced() else int(max_length)
    return Packed(cu_seq_lens.to(torch.int32), max_length)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, band: Band, packed: tuple[Packed, Packed], arguments: dict[str, Any]
) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    of_q, of_k = packed
    out: Tensor = attention(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type=band.attn_mask_type,
        window_size=band.window_size,
        cu_seqlens_q=of_q.cu_seqlens,
        cu_seqlens_kv=of_k.cu_seqlens,
        max_seqlen_q=of_q.max_seqlen,
        max_seqlen_kv=of_k.max_seqlen,
        **arguments,
    )
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])


def _apart(packed: tuple[Packed, Packed], mask_mod: MaskFunction | None, query: Tensor, key: Tensor) -> MaskFunction:
    """Returns a mask that keeps packed sequences apart, on top of mask_mod."""
    of_q, of_k = (
        torch.bucketize(torch.arange(x.shape[0] * x.shape[2], device=x.device), p.cu_seqlens[1:], right=True).view(x.shape[0], -1)
        for x, p in zip((query, key), packed, strict=True)
    )

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = of_q[b, q_idx] == of_k[b, kv_idx]
        return same if mask_mod is None else same & mask_mod(b, h, q_idx, kv_idx)

    return visible
