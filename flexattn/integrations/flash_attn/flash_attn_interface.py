"""FlashAttention 2's functions under their own names and signatures, run by `flexattn.attention`.

The signatures are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py. q, k and v
are [b, s, h, d], packed sequences [total, h, d]; masks, windows and ALiBi are aligned to the bottom-right corner.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.arguments import check_fit, int_of
from flexattn.integrations.flash_attn import kv_cache
from flexattn.integrations.flash_attn.forward_only import PAGES, forward_only, needs_gradient
from flexattn.integrations.flash_attn.options import Options, named, with_options_of
from flexattn.packed_tensors import unpack
from flexattn.validation import check_flags

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def _attend(tensors: tuple[Tensor, ...], options: Options, return_attn_probs: bool, packed: dict[str, Any] | None = None) -> Result:
    check_flags(return_attn_probs=return_attn_probs)
    if return_attn_probs and options.dropout_p > 0.0:
        raise NotImplementedError(
            f"return_attn_probs is True and dropout_p is {options.dropout_p}, but the matrix with dropout is never computed; "
            "accepted: dropout_p=0, which returns (out, softmax_lse, an empty S_dmask), or return_attn_probs=False"
        )
    if packed is not None and packed.get("page_table") is not None and needs_gradient(*tensors):
        return forward_only(lambda *x: _attend(x, options, return_attn_probs, packed), tensors, PAGES)
    q, k, v = tensors
    arguments = named(options, packed is not None) | (packed or {})
    if not return_attn_probs:
        result: Tensor = attention(q, k, v, **arguments)
        return result
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    return out, _lse(lse), q.new_empty(0)


def _lse(lse: Tensor) -> Tensor:
    """Returns lse with FlashAttention 2's +inf for a query that sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch.

    Args:
        q, k, v: [b, sq, h, d], [b, sk, h_k, d] and [b, sk, h_k, d_v].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in FlashAttention. A side of
            window_size below 0 is open, and alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: if True, returns (out, softmax_lse, S_dmask). softmax_lse is float32 [b, h, sq], +inf for a query
            that sees no key. S_dmask is an empty tensor, as in FlashAttention without dropout.

    Raises:
        NotImplementedError: if return_attn_probs is True and dropout_p is above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, return_attn_probs)


@with_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named_options: Any) -> Result:
    """Returns attention of a dense batch with k and v in one tensor.

    Args:
        q, kv: [b, sq, h, d] and [b, sk, 2, h_k, d].
        options: the arguments of `flash_attn_func` after v. Its errors are raised too.
    """
    check_fit(kv=(kv, "b s 2 h_k d"))
    k, v = unpack(kv, 2)
    return flash_attn_func(q, k, v, *options, **named_options)


@with_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named_options: Any) -> Result:
    """Returns attention of a dense batch with q, k and v in one tensor.

    Args:
        qkv: [b, s, 3, h, d].
        options: the arguments of `flash_attn_func` after v. Its errors are raised too.
    """
    check_fit(qkv=(qkv, "b s 3 h d"))
    q, k, v = unpack(qkv, 2)
    return flash_attn_func(q, k, v, *options, **named_options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Returns attention of packed sequences.

    Args:
        q, k, v: [total_q, h, d], [total_k, h_k, d] and [total_k, h_k, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], the sequences' offsets, and the total.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        block_table: int32 [b, columns], the pages of each sequence. k and v are then [pages, page_size, h_k, d] and [pages,
            page_size, h_k, d_v], and a backward raises. None: k and v are packed.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`, with softmax_lse [h, total_q].

    Raises the errors of `flash_attn_func`.
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    packed: dict[str, object] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_k,
        "max_seqlen_q": int_of("max_seqlen_q", max_seqlen_q),
        "max_seqlen_kv": int_of("max_seqlen_k", max_seqlen_k),
    }
    if block_table is not None:
        packed |= {"qkv_format": "thd_2bshd", "page_table": block_table}
    return _attend((q, k, v), options, return_attn_probs, packed)


@with_options_of(flash_attn_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named_options: Any,
) -> Result:
    """Returns attention of packed sequences with k and v in one tensor.

    Args:
        q, kv: [total_q, h, d] and [total_k, 2, h_k, d].
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
        options: the arguments of `flash_attn_func` after v, with softmax_lse [h, total_q]. Its errors are raised too.
    """
    check_fit(kv=(kv, "t 2 h_k d"))
    k, v = unpack(kv, 1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, **named_options)


@with_options_of(flash_attn_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named_options: Any
) -> Result:
    """Returns attention of packed sequences with q, k and v in one tensor.

    Args:
        qkv: [total, 3, h, d].
        cu_seqlens, max_seqlen: int32 [b + 1], the sequences' offsets, and the total; the longest length.
        options: the arguments of `flash_attn_func` after v, with softmax_lse [h, total]. Its errors are raised too.
    """
    check_fit(qkv=(qkv, "t 3 h d"))
    q, k, v = unpack(qkv, 1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named_options)


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
    """Returns attention over a cache, after writing k and v to it in place. Has no gradient.

    Args:
        q, k_cache, v_cache: [b, sq, h, d], [rows, s, h_k, d] and [rows, s, h_k, d_v].
        k, v: new tokens [b, n, h_k, d] and [b, n, h_k, d_v], written from cache_seqlens on. Pass both or neither.
        rotary_cos, rotary_sin: [positions, r / 2], to rotate the first r dims of k and q, from position cache_seqlens on. Without
            a causal mask or a window, all queries of a sequence are rotated to that position. Only with k.
        cache_seqlens: int, or int32 [b], each sequence's end in its row before the call. None: s; not with k.
        cache_batch_idx: int32 [b], the row of each sequence. The rows are copied for the read. None: 0, 1, ...
        cache_leftpad: int32 [b], each sequence's start in its row. None: 0.
        block_table: int32 [b, columns], the pages of each sequence. k_cache and v_cache are then [pages, page_size, h_k, d] and
            [pages, page_size, h_k, d_v]. cache_batch_idx picks rows of the table. cache_leftpad is applied as a mask, so that keys
            and values before it must be finite. None: rows.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: if True, dims 0 and 1, 2 and 3, ... are rotated together, else 0 and r / 2, 1 and r / 2 + 1, ...
        num_splits: ignored; flexattn chooses it.
        return_softmax_lse: if True, returns (out, softmax_lse). softmax_lse is float32 [b, h, sq], +inf for a query that sees no
            key.

    Raises:
        ValueError: if k, v and cache_seqlens do not come together, or rotary_cos, rotary_sin and k.
        ValueError: if a sequence outgrows its row (checked on a CPU or under FLEXATTN_CHECK=1).
    """
    check_flags(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    kv_cache.check_new(k, v, cache_seqlens)
    kv_cache.check_shapes((q, k_cache, v_cache, k, v))
    b, sq = q.shape[:2]
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    cache = kv_cache.make_cache((k_cache, v_cache), b, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    rotary = kv_cache.make_rotary(rotary_cos, rotary_sin, rotary_interleaved, cache.end, k)
    queries = q.flatten(0, 1)
    if rotary is not None:
        queries = kv_cache.rotate_queries(kv_cache.make_tokens(q, None), rotary, options)
    if k is not None and v is not None:
        cache = kv_cache.append(cache, kv_cache.make_tokens(k, None), kv_cache.make_tokens(v, None), rotary)
    cu_seqlens_q = torch.arange(b + 1, dtype=torch.int32, device=q.device) * sq
    out, lse = kv_cache.attend(queries, cu_seqlens_q, sq, cache, options)
    out = out.view(b, sq, *out.shape[1:])
    return (out, _lse(lse).view(q.shape[2], b, sq).transpose(0, 1)) if return_softmax_lse else out
