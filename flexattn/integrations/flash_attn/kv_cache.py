"""Attention over a cache of keys and values, after new ones are written: shared by FlashAttention 2's and 3's functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.functional import attention
from flexattn.integrations.arguments import check_fit, check_index_tensor, int_of
from flexattn.integrations.flash_attn.options import Options, named
from flexattn.integrations.flash_attn.sequences import Mask
from flexattn.validation import are_values_read, describe


class Rotary(NamedTuple):
    """Tables of cosines and sines [positions, r / 2], and the first position of each sequence's new tokens, [b]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    starts: Tensor


def rotate(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Returns x [t, h, d] with its first r dims rotated, computed in at least float32.

    Args:
        x: the tokens.
        rotary: the tables; dims 0 and 1, 2 and 3, ... are rotated together if interleaved, else 0 and r / 2, 1 and r / 2 + 1, ...
        positions: int64 [t], the tables' row of each token; positions beyond the tables use the last row.
    """
    rows, r = rotary.cos.shape[0], 2 * rotary.cos.shape[-1]
    if are_values_read(positions) and bool((positions >= rows).any()):
        raise ValueError(
            f"rotary_cos and rotary_sin have {rows} rows but a token is at position {int(positions.max())}; accepted: tables with "
            "a row for each position"
        )
    positions = positions.clamp(0, max(rows - 1, 0))  # an index out of range would end the process on a GPU
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[positions][:, None].to(wide) for table in (rotary.cos, rotary.sin))
    pairs = x[..., :r].to(wide).reshape(*x.shape[:-1], *((r // 2, 2) if rotary.is_interleaved else (2, r // 2)))
    a, b = pairs.unbind(-1 if rotary.is_interleaved else -2)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if rotary.is_interleaved else -2)
    return torch.cat((rotated.flatten(-2).to(x.dtype), x[..., r:]), -1)


class Tokens(NamedTuple):
    """Packed tokens of several sequences: values [t, h, d], and each token's sequence and position in it, int64 [t]."""

    values: Tensor
    cu_seqlens: Tensor  # int32 [b + 1]
    sequence: Tensor
    position: Tensor


class Cache(NamedTuple):
    """Keys and values [rows, s, h_k, d], and each sequence's row, start and end in the row, int64 [b] each.

    With a table, int32 [b, columns], the rows are pages: token i of a sequence is in page table[sequence, i // s], at i % s.
    """

    k: Tensor
    v: Tensor
    row: Tensor
    start: Tensor
    end: Tensor
    has_rows: bool  # if False, row is 0, 1, ...
    has_starts: bool  # if False, start is 0
    table: Tensor | None


def make_tokens(x: Tensor, cu_seqlens: Tensor | None) -> Tokens:
    """Returns the tokens of x: [b, s, h, d], or [t, h, d] with cu_seqlens. Does not wait for the device."""
    if cu_seqlens is None:
        b, s = x.shape[:2]
        index = torch.arange(b * s, device=x.device)
        starts = torch.arange(b + 1, dtype=torch.int32, device=x.device) * s
        return Tokens(x.flatten(0, 1), starts, index // max(s, 1), index % max(s, 1))
    index = torch.arange(x.shape[0], device=x.device)
    # Tokens after the last sequence are assigned to it; they are neither written nor attended to.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True).clamp_max(max(len(cu_seqlens) - 2, 0))
    return Tokens(x, cu_seqlens, sequence, index - cu_seqlens[sequence])


def make_cache(
    caches: tuple[Tensor, Tensor],
    b: int,
    seqlens: int | Tensor | None,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
) -> Cache:
    """Returns the cache that the arguments of `flash_attn_with_kvcache` describe, for b sequences.

    caches: k_cache and v_cache. seqlens, batch_idx, leftpad: the arguments that begin with cache_. table: block_table.
    """
    k_cache, v_cache = caches
    if table is not None:
        check_fit(k_cache=(k_cache, "pages page_size h_k d"), block_table=(table, "b columns"))
    if batch_idx is not None:
        check_index_tensor("cache_batch_idx", batch_idx, ((b,),))
        batch_idx = _rows(batch_idx, (k_cache if table is None else table).shape[0])
    if table is not None:
        table = table[:b] if batch_idx is None else table[batch_idx]
    if isinstance(seqlens, Tensor):
        check_index_tensor("cache_seqlens", seqlens, ((), (b,)))
    elif seqlens is not None:
        seqlens = int_of("cache_seqlens", seqlens)
    if leftpad is not None:
        check_index_tensor("cache_leftpad", leftpad, ((b,),))
    device, longest = k_cache.device, k_cache.shape[1] * (1 if table is None else table.shape[1])
    end = torch.as_tensor(longest if seqlens is None else seqlens, device=device).long().expand(b)
    row = torch.arange(b, device=device) if batch_idx is None else batch_idx
    start = torch.zeros_like(end) if leftpad is None else leftpad.long()
    for name, values in (("cache_seqlens", end), ("cache_leftpad", start)):
        if are_values_read(values) and bool((values < 0).any()):
            raise ValueError(f"{name} is {values.tolist()}; accepted: numbers of tokens, at least 0")
    return Cache(k_cache, v_cache, row, start, end, batch_idx is not None, leftpad is not None, table)


def _rows(batch_idx: Tensor, rows: int) -> Tensor:
    """Returns cache_batch_idx as int64, clamped to the rows. Raises ValueError for an index out of range if it can be read."""
    index = batch_idx.long()
    if are_values_read(index) and bool(((index < 0) | (index >= rows)).any()):
        raise ValueError(f"cache_batch_idx is {index.tolist()}; accepted: 0 to {rows - 1}, as there are {rows} rows")
    return index.clamp(0, max(rows - 1, 0))  # an index out of range would end the process on a GPU


def append(cache: Cache, k: Tokens, v: Tokens, rotary: Rotary | None) -> Cache:
    """Appends new tokens to each sequence, in place, and returns the cache with its new ends.

    If tokens do not fit, `check_room` raises, or else they are skipped.
    """
    for name, new, cached in (("k", k.values, cache.k), ("v", v.values, cache.v)):
        if new.dtype != cached.dtype:
            raise TypeError(f"{name} has dtype {new.dtype} and {name}_cache has {cached.dtype}; accepted: the same for both")
    lengths = k.cu_seqlens.diff()
    check_room(cache, lengths)
    new_v = v.values if v.values.stride(-1) == 1 else v.values.contiguous()
    new_k = k.values if rotary is None else rotate(k.values, rotary, rotary.starts[k.sequence] + k.position)
    append_kv(
        cache.k,
        cache.v,
        new_k if new_k.stride(-1) == 1 else new_k.contiguous(),
        new_v,
        seqused_kv=cache.end.int(),
        page_table=cache.row.int()[:, None] if cache.table is None else cache.table,  # a row is a page
        qkv_format="thd_2bshd",
        cu_seqlens_q=k.cu_seqlens,
    )
    return cache._replace(end=cache.end + lengths)


def check_room(cache: Cache, new: int | Tensor) -> None:
    """Raises ValueError if a row has no room for a sequence and its new tokens: on a CPU, or under FLEXATTN_CHECK=1.

    Elsewhere the check would wait for the device; tokens beyond a row are then neither written nor read.
    """
    if not are_values_read(cache.end):
        return
    columns = 1 if cache.table is None else cache.table.shape[1]
    room, longest = columns * cache.k.shape[1], int((cache.end + new).amax()) if len(cache.end) else 0
    if longest > room:
        holder = "a row of the cache" if cache.table is None else "a row of the page table (block_table, page_table)"
        raise ValueError(
            f"cache_seqlens and the new tokens make a sequence of {longest} tokens; accepted: at most {room}, the size of {holder}"
        )


def rotate_queries(q: Tokens, rotary: Rotary, options: Options) -> Tensor:
    """Returns rotated queries: each at its own position if there is a causal mask or window, else all at their sequence's start."""
    is_in_order = options.causal or any(side >= 0 for side in options.window_size)
    return rotate(q.values, rotary, rotary.starts[q.sequence] + (q.position if is_in_order else 0))


def attend(
    q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int | None, cache: Cache, options: Options, **extra_arguments: Any
) -> tuple[Tensor, Tensor]:
    """Returns out [t, h, d_v] and lse [h, t] of packed queries [t, h, d] over a cache. extra_arguments: those of `attention`."""
    k, v, b, s = cache.k, cache.v, len(cache.end), cache.k.shape[1]
    check_room(cache, 0)
    # A sequence ends with its row, because another sequence may follow.
    lengths = cache.end if cache.table is not None else cache.end.clamp_max(s)
    if cache.has_starts:  # a sequence that begins behind its end has no keys
        lengths = (lengths - cache.start).clamp_min(0)
    layout: dict[str, Any] = {"qkv_format": "thd_2bshd", "page_table": cache.table}
    if cache.table is None:
        # Repeated rows cannot be slots of one packed tensor, because slots must not overlap.
        k, v = (k[cache.row], v[cache.row]) if cache.has_rows else (k[:b], v[:b])
    elif cache.has_starts:
        lengths = cache.end
        extra_arguments["mask_mod"] = _after_starts(cache.start, extra_arguments.get("mask_mod"))
    if cache.has_starts and cache.table is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        starts = torch.arange(0, b + 1, device=k.device) * s
        starts[:b] += cache.start
        layout = {"qkv_format": "thd", "cu_seqlens_kv_padded": starts.int(), "max_seqlen_kv": s}
    out, lse = attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int(),
        max_seqlen_q=max_seqlen_q,
        return_lse=True,
        **layout,
        **named(options, is_padded=True),
        **extra_arguments,
    )
    return out, lse


def _after_starts(starts: Tensor, mask: Mask | None) -> Mask:
    """Returns a mask that hides the keys before each sequence's start and applies another mask to positions after it."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = kv_idx - starts[b]
        return position >= 0 if mask is None else (position >= 0) & mask(b, h, q_idx, position)

    return mask_mod


def make_rotary(cos: Tensor | None, sin: Tensor | None, is_interleaved: bool, starts: Tensor, k: Tensor | None) -> Rotary | None:
    """Returns the rotary tables, or None if neither is passed.

    Raises:
        ValueError: if one table comes without the other, or the tables come without k.
    """
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or k is None:
        raise ValueError(
            "rotary_cos, rotary_sin or k is missing; accepted: neither rotary_cos nor rotary_sin, or both with k and v, because "
            "only new tokens are rotated; without new tokens, rotate q before the call"
        )
    check_fit(rotary_cos=(cos, "positions r/2"), rotary_sin=(sin, "positions r/2"), k=(k, " ".join("abcd"[: k.dim()])))
    r = 2 * cos.shape[-1]
    if r > k.shape[-1] or not (cos.is_floating_point() and sin.is_floating_point()):
        raise ValueError(
            f"rotary_cos is {describe(cos)} and rotary_sin {describe(sin)}; accepted: two floating tensors [positions, r / 2], "
            f"with r of at most the head dim, {k.shape[-1]}"
        )
    return Rotary(cos, sin, is_interleaved, starts)


def check_shapes(tensors: tuple[Tensor | None, ...], batch: int | None = None, has_packed_keys: bool = False) -> None:
    """Raises unless q, k_cache, v_cache, k and v fit each other. k and v may be None. batch: the sequences of packed queries."""
    q, k_cache, v_cache, k, v = tensors
    queries, new = ("b s", "b n") if batch is None else ("t", f"{batch} n")
    new = "t_new" if has_packed_keys else new
    given = {
        "q": (q, f"{queries} h d"),
        "k_cache": (k_cache, "rows size h_k d"),
        "v_cache": (v_cache, "rows size h_k d_v"),
    }
    added = {} if k is None else {"k": (k, f"{new} h_k d"), "v": (v, f"{new} h_k d_v")}
    check_fit(**given, **added)


def check_new(k: Tensor | None, v: Tensor | None, cache_seqlens: int | Tensor | None) -> None:
    """Raises ValueError if k, v and cache_seqlens do not come together."""
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("k, v or cache_seqlens is missing; accepted: neither k nor v, or k, v and cache_seqlens together")
