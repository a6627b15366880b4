"""Attention of transformers' continuous batching: keys of many requests in pages, gathered by its cache and attended to packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention


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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in `generate_batch`, after transformers.integrations.flash_paged.paged_attention_forward,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/integrations/flash_paged.py.

    Args:
        module: the layer's attention, with its layer_idx.
        query: [1, h, t, d]: the new tokens of all requests, one after another.
        key: [1, h_kv, t, d].
        value: [1, h_kv, t, d_v].
        attention_mask: None; cu_seq_lens say it.
        scaling, softcap, s_aux, sliding_window: as `attention_forward` takes them.
        options: cache, read_index and write_index, by which new keys are stored and all are gathered; cu_seq_lens_q and
            cu_seq_lens_k [requests + 1], max_seqlen_q and max_seqlen_k; those of keys by layer type where there are two.

    Returns:
        (out, None), out [1, t, h, d_v].

    Raises:
        ValueError: there is no paged cache, or a block_table (transformers gives one to FlashAttention alone).
    """
    cache, block_table = options.get("cache"), options.get("block_table")
    if cache is None or attention_mask is not None or block_table is not None:
        raise ValueError(
            f"paged attention came with cache {type(cache).__name__}, attention_mask {type(attention_mask).__name__} and "
            f"block_table {type(block_table).__name__}; accepted: the cache of model.generate_batch() and None for the others; for "
            "any other call give attn_implementation without 'paged|'"
        )
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    cu_seq_lens_k, max_seqlen_k = options["cu_seq_lens_k"], options["max_seqlen_k"]
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    k, v = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=options["read_index"],
        write_index=options["write_index"],
    )
    sinks: dict[str, Any] = {} if s_aux is None else {"softmax_type": "learnable", "softmax_offset": s_aux}
    out: Tensor = attention(
        query[0].transpose(0, 1),
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=(window - 1 if window else -1, 0),
        cu_seqlens_q=options["cu_seq_lens_q"].to(torch.int32),
        cu_seqlens_kv=cu_seq_lens_k.to(torch.int32),
        max_seqlen_q=int(options["max_seqlen_q"]),
        max_seqlen_kv=int(max_seqlen_k),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        **sinks,
    )
    return out[None], None
