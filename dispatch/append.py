"""Rows written behind those of a cache: by one kernel, or by torch ops with the same result on devices without kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd


class Appended(NamedTuple):
    """New keys and values, and where they go; formats are those of the new rows and of the caches."""

    k_new: Tensor
    v_new: Tensor
    page_table: Tensor | None
    seqused_kv: Tensor
    cu_seqlens_q: Tensor | None
    seqused_q: Tensor | None
    formats: tuple[str, str]


def append(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    """Writes the new rows of each sequence behind its first seqused_kv rows; those that do not fit are left out."""
    new_format, cache_format = x.formats
    caches = as_bshd(k_cache, cache_format), as_bshd(v_cache, cache_format)
    new = as_bshd(x.k_new, new_format), as_bshd(x.v_new, new_format)
    device = k_cache.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if triton_backend.device_error(device.type, capability) is None:
        from flexattn.kernels_triton.portable.append import NewTokens
        from flexattn.kernels_triton.portable.append import append as append_rows

        append_rows(*caches, NewTokens(*new, x.cu_seqlens_q, x.seqused_q), x.seqused_kv, x.page_table)
        return
    if new[0].numel() == 0 or 0 in caches[0].shape or x.seqused_kv.numel() == 0:
        return
    places, row, fits = _places(caches[0], new[0], x)
    for cache, rows in zip(caches, new, strict=True):
        values = rows.flatten(0, 1) if rows.dim() == 4 else rows
        _put(cache, (places, row), values.to(cache.dtype), fits)


def _places(cache: Tensor, new: Tensor, x: Appended) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each new token its page, or its sequence in a dense cache, its row there, and whether it fits."""
    sequence, i, fits = _tokens(new, x)
    used = x.seqused_kv.long()[sequence]
    row = used + i
    fits &= used >= 0
    if x.page_table is None:
        return sequence, row, fits & (row < cache.shape[1])
    columns, page_size = x.page_table.shape[1], cache.shape[1]
    fits &= row < columns * page_size
    page = x.page_table[sequence, (row // page_size).clamp(0, columns - 1)].long()
    return page, row % page_size, fits & (page >= 0) & (page < cache.shape[0])


def _tokens(new: Tensor, x: Appended) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's sequence, its number in it, and whether the sequence has so many tokens to append."""
    batch, device = x.seqused_kv.shape[0], new.device
    if new.dim() == 3:
        assert x.cu_seqlens_q is not None
        token = torch.arange(new.shape[0], device=device)
        found = torch.searchsorted(x.cu_seqlens_q.long(), token, right=True) - 1
        sequence = found.clamp(0, batch - 1)
        i = token - x.cu_seqlens_q.long()[sequence]
        is_token = found == sequence
    else:
        sequence = torch.arange(batch, device=device).repeat_interleave(new.shape[1], output_size=batch * new.shape[1])
        i = torch.arange(new.shape[1], device=device).repeat(batch)
        is_token = torch.ones_like(i, dtype=torch.bool)
        if x.cu_seqlens_q is not None:
            is_token = i < x.cu_seqlens_q.diff()[sequence]
    if x.seqused_q is not None:
        is_token &= i < x.seqused_q[sequence]
    return sequence, i, is_token


def _put(cache: Tensor, at: tuple[Tensor, Tensor], values: Tensor, fits: Tensor) -> None:
    """Writes values [tokens, h, d] where they fit. The others repeat the first that does, so that no shape follows the lengths."""
    first = fits.int().argmax()
    source = torch.where(fits, torch.arange(len(fits), device=fits.device), first)
    page, row = (torch.where(fits, place, 0)[source] for place in at)
    cache.index_put_((page, row), torch.where(fits.any(), values[source], cache[page, row]))
