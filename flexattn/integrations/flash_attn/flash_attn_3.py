"""FlashAttention 3's functions under their own names and signatures, run by `flexattn.attention`.

The signatures are those of https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_attn_interface.py. q, k and v are
[b, s, h, d], packed sequences [total, h, d]; masks, windows and chunks are aligned to the bottom-right corner.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.arguments import check_fit, check_index_tensor, check_offsets, int_of
from flexattn.integrations.flash_attn import kv_cache, sequences
from flexattn.integrations.flash_attn.forward_only import FP8, forward_only, needs_gradient
from flexattn.integrations.flash_attn.options import Options, named, with_qv
from flexattn.integrations.flash_attn.sequences import Lengths
from flexattn.packed_tensors import unpack
from flexattn.validation import check_flags, describe

Result = Tensor | tuple[Tensor, Tensor]


class _Extras(NamedTuple):
    """Arguments that FlashAttention 2 lacks."""

    qv: Tensor | None = None
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    attention_chunk: int = 0

    def named(self, groups: int, diagonal: int | Tensor) -> dict[str, Any]:
        """Returns descales and chunks under `attention`'s names; groups is the number of query heads per key head."""
        descale_q, descale_k, descale_v = self.descales
        chunk = int_of("attention_chunk", self.attention_chunk)
        if chunk < 0:
            raise ValueError(f"attention_chunk is {chunk}; accepted: the size of the chunks, or 0 for none")
        return {
            "descale_q": None if descale_q is None else descale_q.repeat_interleave(groups, -1),
            "descale_k": descale_k,
            "descale_v": descale_v,
            "mask_mod": sequences.chunked(chunk, diagonal) if chunk else None,
        }


def _attend(q: Lengths, k: Lengths, v: Tensor, options: Options, extras: _Extras) -> tuple[Tensor, Tensor]:
    if q.x.dtype == torch.float8_e4m3fn and needs_gradient(q.x, k.x, v):

        def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
            return _attend(q._replace(x=x[0]), k._replace(x=x[1]), x[2], options, extras)

        return forward_only(attend, (q.x, k.x, v), FP8)
    is_padded = any(x is not None for x in (q.cu_seqlens, k.cu_seqlens, q.used, k.used))
    queries, keys = q.x, k.x
    if extras.qv is not None:  # q k^T + qv v^T is one product of concatenated rows
        queries, keys = with_qv(queries, extras.qv, keys, v)
    out, lse = attention(
        queries,
        keys,
        v,
        return_lse=True,
        **named(options, is_padded),
        **extras.named(queries.shape[-2] // keys.shape[-2], sequences.diagonals(q, k)),
        **(sequences.named(q, k) if is_padded else {}),
    )
    return out, lse


def _results(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    check_flags(return_attn_probs=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch.

    Args:
        q, k, v: [b, sq, h, d], [b, sk, h_k, d] and [b, sk, h_k, d_v]. FP8 tensors may require a gradient, but a backward raises.
        qv: [b, sq, h, d_v]: adds qv v^T to q k^T, as one product of head dim d + d_v. q, qv, k and v are copied for it.
        q_descale, k_descale, v_descale: float32 [b, h_k], for q, k and v in FP8.
        window_size: (left, right); a side below 0 is open.
        attention_chunk: size of the chunks, counted from key 0; a query sees only the keys of its own chunk. 0: no chunks.
        softmax_scale, causal, softcap, deterministic: as in FlashAttention.
        num_splits, pack_gqa, sm_margin: ignored; flexattn chooses them.
        return_attn_probs: if True, returns (out, softmax_lse). softmax_lse is float32 [b, h, sq], -inf for a query that sees no
            key.

    Raises the errors of `flexattn.attention`.
    """
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    extras = _Extras(qv, (q_descale, k_descale, v_descale), attention_chunk)
    out, lse = _attend(Lengths(q, None, None), Lengths(k, None, None), v, options, extras)
    return _results(out, lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch with q, k and v in one tensor.

    Args:
        qkv: [b, s, 3, h, d], or [b, s, h + 2 * h_k, d] with num_heads_q h.
        num_heads_q: h, for qkv with 4 dims.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, deterministic, sm_margin,
            return_attn_probs: as in `flash_attn_func`.

    Raises:
        ValueError: if qkv has 4 dims and num_heads_q does not leave equally many heads for k and v.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    if qkv.dim() == 5:
        q, k, v = unpack(qkv, 2)
    else:
        heads = qkv.shape[2]
        if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q is {num_heads_q} and qkv has {heads} heads; accepted: a number that leaves equally many heads for k "
                "and v, or qkv [b, s, 3, h, d]"
            )
        h_k = (heads - num_heads_q) // 2
        q, k, v = torch.split(qkv, [num_heads_q, h_k, h_k], 2)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    extras = _Extras(None, (q_descale, k_descale, v_descale), attention_chunk)
    out, lse = _attend(Lengths(q, None, None), Lengths(k, None, None), v, options, extras)
    return _results(out, lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of packed sequences.

    Args:
        q, k, v: [total_q, h, d], [total_k, h_k, d] and [total_k, h_k, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], the sequences' offsets, and the total.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        seqused_q, seqused_k: int32 [b], number of valid tokens per sequence; out is 0 for the others. None: all are valid.
        qv: [total_q, h, d_v], as in `flash_attn_func`.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits, pack_gqa,
            deterministic, sm_margin: as in `flash_attn_func`.
        return_attn_probs: if True, returns (out, softmax_lse). softmax_lse is float32 [h, total_q], -inf for a query that sees no
            key.

    Raises the errors of `flexattn.attention`.
    """
    check_offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    extras = _Extras(qv, (q_descale, k_descale, v_descale), attention_chunk)
    lengths_q, lengths_k = Lengths(q, cu_seqlens_q, seqused_q, max_seqlen_q), Lengths(k, cu_seqlens_k, seqused_k, max_seqlen_k)
    out, lse = _attend(lengths_q, lengths_k, v, options, extras)
    return _results(out, lse, return_attn_probs)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns attention over a cache, after writing k and v to it in place. Has no gradient.

    Args:
        q: [b, sq, h, d], or [total_q, h, d] with cu_seqlens_q.
        k_cache, v_cache: [rows, s, h_k, d] and [rows, s, h_k, d_v].
        k, v: new tokens [b, n, h_k, d] and [b, n, h_k, d_v], or [total, h_k, d] and [total, h_k, d_v] with cu_seqlens_k_new.
            They are written from cache_seqlens on. Pass both or neither.
        qv: q's shape, with d_v: adds qv v^T to q k^T. The whole cache is copied for it.
        rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_batch_idx, cache_leftpad: as in
            `flash_attn_interface.flash_attn_with_kvcache`.
        page_table: its block_table, for caches in 16 or 32 bits.
        cu_seqlens_q, cu_seqlens_k_new: int32 [b + 1], the offsets of each sequence's queries and new tokens.
        max_seqlen_q: the longest number of queries, or None.
        rotary_seqlens: int32 [b], the position of each sequence's first new token and query. None: cache_seqlens.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap: as in `flash_attn_func`.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: ignored; flexattn chooses them.
        return_softmax_lse: if True, returns (out, softmax_lse, and two empty tensors in place of partial results). softmax_lse is
            float32 [b, h, sq], or [h, total_q] with cu_seqlens_q.

    Raises:
        ValueError: if k, v and cache_seqlens do not come together, or rotary_cos, rotary_sin and k.
        ValueError: if a sequence outgrows its row (checked on a CPU or under FLEXATTN_CHECK=1).
    """
    check_flags(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    kv_cache.check_new(k, v, cache_seqlens)
    check_offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    batch = None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    kv_cache.check_shapes((q, k_cache, v_cache, k, v), batch, cu_seqlens_k_new is not None)
    b = q.shape[0] if batch is None else batch
    if cu_seqlens_k_new is not None:
        check_index_tensor("cu_seqlens_k_new", cu_seqlens_k_new, ((b + 1,),))
    options = Options(0.0, softmax_scale, causal, window_size, softcap)
    cache = kv_cache.make_cache((k_cache, v_cache), b, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    if rotary_seqlens is not None:
        check_index_tensor("rotary_seqlens", rotary_seqlens, ((b,),))
    starts = cache.end if rotary_seqlens is None else rotary_seqlens.long()
    rotary = kv_cache.make_rotary(rotary_cos, rotary_sin, rotary_interleaved, starts, k)
    queries = kv_cache.make_tokens(q, cu_seqlens_q)
    if rotary is not None:
        queries = queries._replace(values=kv_cache.rotate_queries(queries, rotary, options))
    if k is not None and v is not None:
        new_k, new_v = (kv_cache.make_tokens(x, cu_seqlens_k_new) for x in (k, v))
        cache = kv_cache.append(cache, new_k, new_v, rotary)
    if qv is not None:
        if qv.shape[:-1] != q.shape[:-1]:
            raise ValueError(f"qv is {describe(qv)} and q {describe(q)}; accepted: the same dims but the last")
        rows, keys = with_qv(queries.values, qv.flatten(0, -3), k_cache, v_cache)
        queries, cache = queries._replace(values=rows), cache._replace(k=keys)
    lengths_q = Lengths(q, cu_seqlens_q, None, max_seqlen_q)
    starts_q = lengths_q.cumulative()
    extras = _Extras(None, (q_descale, k_descale, v_descale), attention_chunk)
    extra_arguments = extras.named(q.shape[-2] // k_cache.shape[-2], cache.end - cache.start - starts_q.diff())
    longest = max_seqlen_q if cu_seqlens_q is not None else q.shape[1]
    out, lse = kv_cache.attend(queries.values, starts_q, longest, cache, options, **extra_arguments)
    if cu_seqlens_q is None:
        out, lse = out.view(*q.shape[:2], *out.shape[1:]), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    return (out, lse, out.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) over all keys from results over parts of the keys. Differentiable if out is None.

    Args:
        out_partial: [parts, b, sq, h, d_v], the partial results.
        lse_partial: float32 [parts, b, sq, h], the logarithms of their softmax denominators. Where one is -inf, out_partial is not
            read.
        out: [b, sq, h, d_v], the result's destination. None: a new tensor.
        out_dtype: the dtype of a new tensor; None is out_partial's.
    """
    tokens = "b s" if isinstance(out_partial, Tensor) and out_partial.dim() == 5 else "t"
    check_fit(
        out_partial=(out_partial, f"parts {tokens} h d_v"),
        lse_partial=(lse_partial, f"parts {tokens} h"),
        **({} if out is None else {"out": (out, f"{tokens} h d_v")}),
    )
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial), ("out", out)):
        if t is not None and (not t.is_floating_point() or (name == "lse_partial" and t.dtype.itemsize == 1)):
            raise TypeError(f"{name} is {describe(t)}; accepted: a floating dtype")
    wide = torch.float64 if torch.float64 in (out_partial.dtype, lse_partial.dtype) else torch.float32
    lse_partial = lse_partial.to(wide)
    largest = lse_partial.amax(0).clamp_min(torch.finfo(wide).min)  # avoids nan if a part has no keys
    weights = (lse_partial - largest).exp()
    total = weights.sum(0)
    parts = out_partial.to(wide).masked_fill(weights[..., None] == 0.0, 0.0)  # a part without keys may be nan, as in FlashAttention
    combined = (parts * weights[..., None]).sum(0) / total.masked_fill(total == 0.0, 1.0)[..., None]
    lse = (total.log() + largest).masked_fill(total == 0.0, -math.inf)
    combined = combined.to((out_dtype or out_partial.dtype) if out is None else out.dtype)
    return (combined if out is None else out.copy_(combined)), lse


def get_scheduler_metadata(*_: object, **__: object) -> None:
    """Returns None, which `flash_attn_with_kvcache` accepts as scheduler_metadata, because calls need no plan in advance."""
