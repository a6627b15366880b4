"""Attention of sequences that share a prefix, whose keys are read once for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch import options
from flexattn.dispatch.spec import parse_format, with_padding
from flexattn.functional import attention, chosen, merge_attention
from flexattn.validation import check_count, describe

_SHARED = ("backend", "batch_invariant", "softcap", "softmax_scale")  # arguments of both calls
_SEQUENCE_ARGUMENTS = (
    "max_seqlen_kv",
    "max_seqlen_q",
    "softmax_offset",
    "softmax_type",
)  # for the second call alone: a sink counts once
_MASKS = ("padding", "padding_causal_bottom_right")


def attention_with_prefix(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_length: int,
    prefix_row: int = 0,
    return_lse: bool = False,
    **arguments: Any,
) -> Any:
    """Same as `attention(q, k_cache, v_cache, **arguments)` if all sequences begin with the same pages, which are read once.

    The function calls `attention` twice and `merge_attention` once. The first call attends with all queries, as one sequence, to
    the prefix. The second attends with each sequence's queries to its remaining keys. A single call would read the prefix once for
    each sequence. The method is that of Hydragen (Juravsky et al., 2024, https://arxiv.org/abs/2402.05099) and of FlashInfer's
    cascade attention (https://flashinfer.ai/2024/02/02/cascade-inference.html). Both results are rounded to q's dtype before the
    merge.

    The call reads no value from the device, so the caller ensures two conditions for each sequence with queries: its first columns
    hold the prefix's pages, and all of its queries come after the prefix. With FLEXATTN_CHECK=1 other sequences raise.

    Args:
        q: [total, h, d], queries of all sequences.
        k_cache, v_cache: pools of pages, as for `attention`.
        prefix_length: tokens of the prefix: a multiple of the page size, less than the capacity of a row of the page table.
        prefix_row: row of the page table whose first columns hold the prefix's pages. Rows without queries may hold others.
        return_lse: whether to return lse, fp32 [h, total], too.
        arguments: arguments of `attention`, as from `PagedKVCache.arguments()`: qkv_format ("thd_2bshd" or "thd_2bhsd"),
            attn_mask_type ("padding_causal_bottom_right" or "padding"), cu_seqlens_q, page_table, seqused_kv (including the
            prefix), max_seqlen_q, max_seqlen_kv, softmax_scale, softcap, softmax_type, softmax_offset, backend, batch_invariant.

    Raises:
        ValueError, TypeError: other arguments, whose meaning depends on a key's position, such as a window or a mod; errors of
            `attention`.
    """
    table, seqused_kv = arguments.pop("page_table", None), arguments.pop("seqused_kv", None)
    cu_seqlens_q, mask = arguments.pop("cu_seqlens_q", None), arguments.pop("attn_mask_type", None)
    qkv_format = arguments.pop("qkv_format", None)
    for name, t in (("page_table", table), ("seqused_kv", seqused_kv), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is {describe(t)}; accepted: an int32 tensor, as `attention` takes it")
    if qkv_format not in ("thd_2bshd", "thd_2bhsd"):
        raise ValueError(f"qkv_format is {qkv_format!r}; accepted: 'thd_2bshd', 'thd_2bhsd', packed queries and keys in pages")
    if isinstance(mask, str) and mask in ("no_mask", "causal_bottom_right"):
        mask = with_padding(mask)
    if mask not in _MASKS:
        raise ValueError(f"attn_mask_type is {mask!r}; accepted: {', '.join(_MASKS)}, because all queries see the whole prefix")
    unknown = sorted(arguments.keys() - {*_SHARED, *_SEQUENCE_ARGUMENTS})
    if unknown:
        accepted = ", ".join(sorted((*_SHARED, *_SEQUENCE_ARGUMENTS)))
        raise ValueError(f"{', '.join(unknown)} given; accepted with lengths and pages: {accepted}; use attention() for the others")
    page_size = k_cache.shape[parse_format(qkv_format)[1].index("s")]
    columns, most = prefix_length // page_size, (table.shape[1] - 1) * page_size
    accepted = f"a multiple of the page size, {page_size}, up to {most}"
    check_count("prefix_length", prefix_length, 1, accepted, most)
    if prefix_length % page_size:
        raise ValueError(f"prefix_length is {prefix_length}; accepted: {accepted}")
    check_count("prefix_row", prefix_row, 0, f"0 to {table.shape[0] - 1}, a row of page_table", table.shape[0] - 1)
    if options.check_values() and not torch.compiler.is_compiling():
        queries = cu_seqlens_q.diff()
        behind = seqused_kv - prefix_length - (queries if mask != "padding" else 0)
        _check_values(table[:, :columns], prefix_row, queries.tolist(), behind.tolist())
    shared = {name: arguments[name] for name in _SHARED if name in arguments} | {"qkv_format": qkv_format, "return_lse": True}
    prefix_results = attention(
        q,
        k_cache,
        v_cache,
        attn_mask_type="padding",
        cu_seqlens_q=torch.stack((cu_seqlens_q[0], cu_seqlens_q[-1])),
        max_seqlen_q=q.shape[0],
        page_table=table[prefix_row : prefix_row + 1, :columns],
        seqused_kv=torch.full_like(seqused_kv[:1], prefix_length),
        **shared,
    )
    separate = {name: arguments[name] for name in _SEQUENCE_ARGUMENTS if name in arguments}
    if separate.get("max_seqlen_kv") is not None:
        separate["max_seqlen_kv"] = max(separate["max_seqlen_kv"] - prefix_length, 0)
    sequence_results = attention(
        q,
        k_cache,
        v_cache,
        attn_mask_type=mask,
        cu_seqlens_q=cu_seqlens_q,
        page_table=table[:, columns:],
        seqused_kv=(seqused_kv - prefix_length).clamp(min=0),
        **separate,
        **shared,
    )
    out, lse = merge_attention(*prefix_results, *sequence_results, qkv_format="thd")
    return chosen(out, lse, None, return_lse, False)


def _check_values(shared: Tensor, prefix_row: int, queries: list[int], behind: list[int]) -> None:
    """Raises ValueError if a sequence with queries begins with other pages than the prefix's, or has queries within the prefix.

    behind: for each sequence the number of keys between the prefix and its queries; negative if a query is in the prefix.
    """
    differs = (shared != shared[prefix_row]).any(1).tolist()
    for i, (count, keys) in enumerate(zip(queries, behind, strict=True)):
        if count > 0 and differs[i]:
            raise ValueError(
                f"page_table[{i}] does not begin like page_table[{prefix_row}], the prefix's row; accepted: the same pages"
            )
        if count > 0 and keys < 0:
            raise ValueError(
                f"seqused_kv[{i}] is {-keys} tokens too small for {count} queries after the prefix; accepted: sequences with all "
                "queries after it"
            )
