"""Attention for transformers' continuous batching: its cache gathers the keys of many requests from pages, packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.transformers.keywords import check_keywords


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
