"""FlashAttention's attention over a dense cache of keys and values.

The signature is that of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.flash_attn.flash_attn_interface import _named, _Options, refuse


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns attention over a cache, after k and v were written to it in place. Has no gradient.

    Args:
        q, k_cache, v_cache: [b, sq, h, d], [b, s, h_k, d] and [b, s, h_k, d_v].
        k, v: new tokens [b, n, h_k, d] and [b, n, h_k, d_v], written from cache_seqlens on; both or neither.
        cache_seqlens: int, or int32 [b]: the tokens in the cache before the call; None is s, and not with k.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table: None.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved, num_splits: without effect on the result here.
        return_softmax_lse: whether to return (out, softmax_lse); softmax_lse is float32 [b, h, sq].

    Raises:
        NotImplementedError: an argument that must be None is given.
        ValueError: k without v or without cache_seqlens, or the reverse.
    """
    refuse("rotary_cos", rotary_cos, "rotate q and k before the call")
    refuse("rotary_sin", rotary_sin, "rotate q and k before the call")
    refuse("cache_batch_idx", cache_batch_idx, "give the caches' rows in q's order")
    refuse("cache_leftpad", cache_leftpad, "start each sequence at the cache's first token")
    refuse("block_table", block_table, "gather the pages")
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("k, v or cache_seqlens is missing; accepted: neither k nor v, or k, v and cache_seqlens together")
    (b, sq), s = q.shape[:2], k_cache.shape[1]
    start = s if cache_seqlens is None else cache_seqlens
    lengths = torch.as_tensor(start, device=q.device).expand(b)
    if k is not None and v is not None:
        places = lengths[:, None] + torch.arange(k.shape[1], device=q.device)
        rows = torch.arange(b, device=q.device)[:, None]
        k_cache[rows, places], v_cache[rows, places] = k, v
        lengths = lengths + k.shape[1]
    starts = torch.arange(b + 1, dtype=torch.int32, device=q.device)
    options = _Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
    out, lse = attention(
        *(t.flatten(0, 1) for t in (q, k_cache, v_cache)),
        qkv_format="thd",
        cu_seqlens_q=starts * sq,
        cu_seqlens_kv=torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int(),
        cu_seqlens_kv_padded=starts * s,
        max_seqlen_q=sq,
        max_seqlen_kv=s,
        return_lse=True,
        **_named(options, "padding_"),
    )
    out = out.view(b, sq, *out.shape[1:])
    return (out, lse.view(-1, b, sq).transpose(0, 1)) if return_softmax_lse else out
