"""Attention functions for transformers' AttentionInterface: convert names, and masks of `masks`, to `attention`'s arguments.

For continuous batching, transformers' cache gathers the keys of many requests from pages, packed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.dispatch.neutral import is_traced
from flexattn.functional import attention
from flexattn.integrations.transformers.keywords import check_keywords
from flexattn.integrations.transformers.masks import Band, MaskFunction, Packed, Visible
from flexattn.integrations.transformers.selection import selection_of, with_sinks
from flexattn.masks import reading
from flexattn.validation import describe
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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    **keywords: object,
) -> tuple[Tensor, None]:
    """Attention of one layer of a transformers model, for its AttentionInterface.

    After transformers.integrations.flash_attention.flash_attention_forward,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/integrations/flash_attention.py.

    Args:
        module: the layer's attention; its is_causal is used if `is_causal` is None.
        query: [b, h, sq, d], with any strides. float16, bfloat16 or float32 (float64 on a CPU). If autocast is on, in its dtype.
        key: [b, h_kv, skv, d], without repeated heads.
        value: [b, h_kv, skv, d_v].
        attention_mask: a result of `masks.attention_mask`; or bool (True: visible) or float (added to the scores, differentiable)
            [b, h, sq, skv]; or a BlockMask. b and h may be 1, and keys beyond skv are not read. A tensor or BlockMask is the whole
            mask: is_causal and sliding_window are then ignored.
        dropout: dropout probability of a softmax weight.
        scaling: scale of the scores. None: 1/sqrt(d).
        sliding_window: number of tokens that a query sees, including itself, on each side if the mask is not causal. Only used if
            attention_mask is None.
        softcap: c changes each score s to c * tanh(s / c). None and 0: no softcap.
        is_causal: query i sees the keys j <= i + skv - sq. Only used if attention_mask is None.
        s_aux: [h], logits of attention sinks. Differentiable.
        position_bias: [b, h, sq, skv], added to the scores; any dim may be 1. Differentiable.
        indices: integers [b, sq, n], the keys that each query selects. dropout must be 0.
        block_indices: integers [b, heads of the indexer, sq, n], the blocks of keys that each query selects, and -1 for none.
        sinks: [b, h, sq, 1], a logit of a sink for each query and head. Differentiable.
        cu_seq_lens_q, cu_seq_lens_k: integers [sequences + 1], offsets of packed sequences among the tokens of all rows. Sequences
            are separated in addition to attention_mask.
        max_length_q, max_length_k: the longest of them, ints or 0-d tensors.
        deterministic: if True, gradients are bitwise identical from run to run. None and False: torch's setting.
        output_attentions: if True, warns once, because the softmax weights are never computed.
        keywords: names of `keywords.HARMLESS`, with any value, and any name with None.

    Returns:
        (out, None), out [b, sq, h, d_v], contiguous, in query's dtype.

    Raises:
        TypeError: if attention_mask is of another kind, or a keyword may change the result.
        ValueError: if attention_mask is for fewer keys, or does not have four dims; also as `flexattn.attention`.
        ValueError: if only one of cu_seq_lens_q and cu_seq_lens_k is passed, or both come with a BlockMask.
    """
    check_keywords(module, keywords)
    if output_attentions:
        warn_once(
            "transformers output_attentions",
            "output_attentions=True: flexattn never computes the softmax weights, and returns None for them; "
            'to get them, use attn_implementation="eager"',
        )
    arguments: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "softmax_offset": s_aux}
    if deterministic:
        arguments["deterministic"] = True
    if attention_mask is None:
        is_causal_mask = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask_arguments = _MaskArguments(_band(is_causal_mask, sliding_window))
    else:
        mask_arguments = _read(attention_mask, query, key)
    if mask_arguments.keys is not None:
        key, value = key[:, :, : mask_arguments.keys], value[:, :, : mask_arguments.keys]
    bias = _add_biases(mask_arguments.bias, position_bias, key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if mask_arguments.block_mask is not None:
            raise ValueError(
                "attention_mask is a BlockMask and comes with cu_seq_lens_q and cu_seq_lens_k; accepted: one of the two; to "
                "separate sequences, use the mask_mod of the BlockMask"
            )
        packed = _packed(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if mask_arguments.packed is not None and not (isinstance(attention_mask, Visible) and attention_mask.has_offsets(packed)):
            mask_arguments = mask_arguments._replace(mask_mod=_separate(mask_arguments.packed, mask_arguments.mask_mod, query, key))
        mask_arguments = mask_arguments._replace(packed=packed)
    selection = selection_of(module, indices, block_indices, key, value)
    if selection is not None:
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
            selection, mask_arguments = selection.hidden_by(attention_mask), mask_arguments._replace(mask_mod=None)
        arguments |= selection.arguments
        key, value = selection.key, selection.value
    if mask_arguments.packed is not None:
        if mask_arguments.mask_mod is None and bias is None and selection is None and sinks is None:
            return _attend_packed(query, key, value, mask_arguments.band, mask_arguments.packed, arguments), None
        mask_arguments = mask_arguments._replace(mask_mod=_separate(mask_arguments.packed, mask_arguments.mask_mod, query, key))
    result = attention(
        query,
        key,
        value,
        qkv_format="bhsd",
        attn_mask_type=mask_arguments.band.attn_mask_type,
        window_size=mask_arguments.band.window_size,
        bias=bias,
        mask_mod=mask_arguments.mask_mod,
        block_mask=mask_arguments.block_mask,
        return_lse=sinks is not None,
        **arguments,
    )
    out: Tensor = result if sinks is None else with_sinks(result[0], result[1], sinks)
    return out.transpose(1, 2).contiguous(), None  # some models call view() on it


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cache: Any = None,
    read_index: object = None,
    write_index: object = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    block_table: Tensor | None = None,
    **keywords: object,
) -> tuple[Tensor, None]:
    """Attention of one layer in `generate_batch`, after transformers.integrations.flash_paged.paged_attention_forward,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/integrations/flash_paged.py.

    Args:
        module: the layer's attention, with its layer_idx.
        query: [1, h, t, d]: the new tokens of all requests, packed.
        key: [1, h_kv, t, d].
        value: [1, h_kv, t, d_v].
        attention_mask: must be None, because cu_seq_lens determine the mask.
        scaling, softcap, s_aux, sliding_window: as in `attention_forward`.
        dropout: must be 0, because generation has no dropout.
        is_causal: True or None.
        cache, read_index, write_index: the cache, which stores the new keys and gathers all keys of the requests, and the lists
            of index tensors for it.
        cu_seq_lens_q, cu_seq_lens_k: integers [requests + 1]; for keys a dict by layer type if the model has two.
        max_seqlen_q, max_seqlen_k: the longest of them, ints or 0-d tensors; for keys possibly a dict by layer type.
        block_table: must be None; transformers only passes one to FlashAttention.
        keywords: names of `keywords.HARMLESS`, with any value, and any name with None.

    Returns:
        (out, None), out [1, t, h, d_v].

    Raises:
        ValueError: if there is no paged cache, or if a mask, a block_table, dropout or is_causal=False is passed.
        TypeError: if a keyword may change the result.
    """
    check_keywords(module, keywords)
    if dropout or is_causal is False:
        raise ValueError(f"paged attention came with dropout {dropout} and is_causal {is_causal}; accepted: 0.0, and True or None")
    needed = (cache, read_index, write_index, cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k)
    if any(x is None for x in needed) or attention_mask is not None or block_table is not None:
        raise ValueError(
            f"paged attention came with cache {type(cache).__name__}, attention_mask {type(attention_mask).__name__} and "
            f"block_table {type(block_table).__name__}; accepted: the cache of model.generate_batch() with its lengths "
            "and indices, and None for the other two; for "
            "any other call pass attn_implementation without 'paged|'"
        )
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    offsets_k, longest_k = (x[kind] if isinstance(x, dict) else x for x in (cu_seq_lens_k, max_seqlen_k))
    k, v = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    out: Tensor = attention(
        query[0].transpose(0, 1),
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=(window - 1 if window else -1, 0),
        cu_seqlens_q=cu_seq_lens_q.to(torch.int32),
        cu_seqlens_kv=offsets_k.to(torch.int32),
        max_seqlen_q=int(max_seqlen_q),
        max_seqlen_kv=int(longest_k),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        softmax_offset=s_aux,
    )
    return out[None], None


class _MaskArguments(NamedTuple):
    """A mask as arguments of `attention`; a key is visible if all of them show it."""

    band: Band = Band()
    mask_mod: MaskFunction | None = None
    packed: tuple[Packed, Packed] | None = None  # for the queries and for the keys
    keys: int | None = None  # number of keys to use; None: all
    bias: Tensor | None = None
    block_mask: BlockMask | None = None


def _band(causal: bool, sliding_window: int | None) -> Band:
    left = -1 if sliding_window is None else sliding_window - 1
    return Band("causal_bottom_right", (left, 0)) if causal else Band("no_mask", (left, left))


def _read(mask: Tensor | Visible | BlockMask, query: Tensor, key: Tensor) -> _MaskArguments:
    if isinstance(mask, Visible):
        if mask.shape[2:] != (query.shape[2], key.shape[2]):
            raise ValueError(
                f"attention_mask was made for {mask.shape[2]} queries and {mask.shape[3]} keys but comes with {query.shape[2]} and "
                f"{key.shape[2]}; accepted: equal numbers; if this model extends its mask or its keys by itself, use "
                'attn_implementation="eager"'
            )
        packed = None if mask.packed is None else (mask.packed, mask.packed)
        return _MaskArguments(mask.band, mask.mask_mod, packed, keys=mask.keys)
    if isinstance(mask, BlockMask):
        return _MaskArguments(block_mask=mask)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}; accepted: the result of flexattn's attention_mask, a tensor of four dims, "
            "a BlockMask, or None"
        )
    (b, h, sq), skv = query.shape[:3], key.shape[2]
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, b) or shape[1] not in (1, h) or shape[2] not in (1, sq) or shape[3] < skv:
        raise ValueError(
            f"attention_mask is a tensor {list(shape)} with queries {[b, h, sq]} and {skv} keys; accepted: [b, h, sq, skv], with 1 "
            "for b, h or sq, or more keys; if the mask is two-dimensional, register the mask function too, as "
            "flexattn.integrations.transformers.register() does"
        )
    if mask.dtype != torch.bool:
        _check_added("attention_mask", mask, "bool, True for a visible key, or floating point, added to the scores")
        return _MaskArguments(bias=mask[..., :skv])
    return _MaskArguments(mask_mod=reading(mask))


def _add_biases(mask: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    if position_bias is None:
        return mask
    _check_added("position_bias", position_bias, "floating point")
    position_bias = position_bias[..., :keys]
    return position_bias if mask is None else position_bias + mask


def _check_added(name: str, t: Tensor, accepted: str) -> None:
    if not t.is_floating_point():
        raise TypeError(f"{name} is {describe(t)}; accepted: {accepted}")


def _packed(
    cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, max_length_q: int | Tensor | None, max_length_k: int | Tensor | None
) -> tuple[Packed, Packed]:
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing; accepted: cu_seq_lens_q and cu_seq_lens_k together, or neither")
    return _packed_side(cu_seq_lens_q, max_length_q), _packed_side(cu_seq_lens_k, max_length_k)


def _packed_side(cu_seq_lens: Tensor, max_length: int | Tensor | None) -> Packed:
    if isinstance(max_length, Tensor):  # not readable while a graph is made; None means the number of tokens
        max_length = None if is_traced() else int(max_length)
    if cu_seq_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seq_lens_q or cu_seq_lens_k is {describe(cu_seq_lens)}; accepted: integers, int32 or int64")
    return Packed(cu_seq_lens.to(torch.int32), max_length)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, band: Band, packed: tuple[Packed, Packed], arguments: dict[str, Any]
) -> Tensor:
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"query has batch {query.shape[0]} and key {key.shape[0]}; accepted: one batch size")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    packed_q, packed_k = packed
    out: Tensor = attention(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type=band.attn_mask_type,
        window_size=band.window_size,
        cu_seqlens_q=packed_q.cu_seqlens,
        cu_seqlens_kv=packed_k.cu_seqlens,
        max_seqlen_q=packed_q.max_seqlen,
        max_seqlen_kv=packed_k.max_seqlen,
        **arguments,
    )
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])


def _separate(packed: tuple[Packed, Packed], mask_mod: MaskFunction | None, query: Tensor, key: Tensor) -> MaskFunction:
    """Returns a mask that separates packed sequences, in addition to mask_mod."""
    sequence_q, sequence_k = (
        torch.bucketize(torch.arange(x.shape[0] * x.shape[2], device=x.device), p.cu_seqlens[1:], right=True).view(x.shape[0], -1)
        for x, p in zip((query, key), packed, strict=True)
    )

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_same_sequence = sequence_q[b, q_idx] == sequence_k[b, kv_idx]
        return is_same_sequence if mask_mod is None else is_same_sequence & mask_mod(b, h, q_idx, kv_idx)

    return visible
