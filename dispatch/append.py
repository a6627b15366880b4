"""Appending rows to a cache: with one kernel, or with torch ops of the same result on devices without kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import LARGEST, SMALLEST_SCALE
from flexattn.dispatch.spec import as_bshd, capability_of


class Appended(NamedTuple):
    """New keys and values, and their destinations. formats: those of the new rows and of the caches.

    FP8 caches have float32 descales. `descale_*` are inputs, [], [h_kv] or [b, h_kv]. `token_descales_*` are written, and have the
    dims of a cache without the last.
    """

    k_new: Tensor
    v_new: Tensor
    page_table: Tensor | None
    seqused_kv: Tensor
    cu_seqlens_q: Tensor | None
    seqused_q: Tensor | None
    formats: tuple[str, str]
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    token_descales_k: Tensor | None = None
    token_descales_v: Tensor | None = None


def append(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    """Writes the new rows of each sequence after its first seqused_kv rows. Rows that do not fit are dropped."""
    if kernel_error(k_cache.device.type, capability_of(k_cache.device), k_cache.dtype) is None:
        append_by_kernel(k_cache, v_cache, x)
        return
    caches, new, descales = _views(k_cache, v_cache, x)
    if new[0].numel() == 0 or 0 in caches[0].shape or x.seqused_kv.numel() == 0:
        return
    sequence, places, row, fits = _places(caches[0], new[0], x)
    for cache, rows, descale in zip(caches, new, descales, strict=True):
        values = rows.flatten(0, 1) if rows.dim() == 4 else rows
        if cache.dtype in LARGEST and values.dtype is not cache.dtype:
            values = values.float()
            if descale is None:
                scale = values.new_ones(())
            elif descale.dim() == 2:
                scale = descale[sequence, :, None]
            else:
                scale = _token_descale(values, cache.dtype)
                _put(descale, (places, row), scale[..., 0], fits)
            largest = LARGEST[cache.dtype]
            values = (values / scale).clamp(-largest, largest)
        values = values.to(cache.dtype)
        if cache.dtype in LARGEST:  # torch cannot index FP8.
            cache, values = cache.view(torch.uint8), values.view(torch.uint8)
        _put(cache, (places, row), values, fits)


def append_by_kernel(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    """Does the same with the kernel. Tensors on the meta device are for the pretended GPU."""
    from flexattn.kernels_triton.portable.append import NewTokens
    from flexattn.kernels_triton.portable.append import append as append_rows

    caches, new, descales = _views(k_cache, v_cache, x)
    append_rows(*caches, NewTokens(*new, x.cu_seqlens_q, x.seqused_q, *descales), x.seqused_kv, x.page_table)


def kernel_error(device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Returns why no kernel writes rows of a dtype on a device, or None. FP8 needs compute capability 8.9, which rounds exactly."""
    if reason := triton_backend.device_error(device_type, capability):
        return reason
    if capability is None or dtype not in LARGEST or capability >= (8, 9):
        return None
    return f"compute capability {capability[0]}.{capability[1]} has no conversions to FP8; they need 8.9 or later"


def _views(
    k_cache: Tensor, v_cache: Tensor, x: Appended
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], list[Tensor | None]]:
    """Returns caches and new rows in bshd, and the descales of k and v."""
    new_format, cache_format = x.formats
    caches = as_bshd(k_cache, cache_format), as_bshd(v_cache, cache_format)
    new = as_bshd(x.k_new, new_format), as_bshd(x.v_new, new_format)
    descales = [
        _descale(fixed, per_token, cache, (x.seqused_kv.shape[0], cache_format))
        for fixed, per_token, cache in zip(
            (x.descale_k, x.descale_v), (x.token_descales_k, x.token_descales_v), (k_cache, v_cache), strict=True
        )
    ]
    return caches, new, descales


def _descale(fixed: Tensor | None, per_token: Tensor | None, cache: Tensor, batch_and_format: tuple[int, str]) -> Tensor | None:
    """Returns a descale as a view: [b, h] of an input, or [b | pages, s, h] of the descales to write."""
    batch, fmt = batch_and_format
    if per_token is not None:
        return as_bshd(per_token[..., None], fmt)[..., 0]
    return None if fixed is None else fixed.expand(batch, cache.shape[fmt.index("h")])


def _token_descale(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the divisors [tokens, h, 1] of rows [tokens, h, d] that map the largest element to the dtype's largest number."""
    amax = torch.where(values.isfinite(), values.abs(), 0.0).amax(-1, keepdim=True)
    descale = amax / LARGEST[dtype]
    return torch.where(descale >= SMALLEST_SCALE, descale, 1.0)


def _places(cache: Tensor, new: Tensor, x: Appended) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for each new token its sequence, its page, its row in the page, and whether it fits.

    In a dense cache, the page is the sequence.
    """
    sequence, i, fits = _tokens(new, x)
    used = x.seqused_kv.long()[sequence]
    row = used + i
    fits &= used >= 0
    if x.page_table is None:
        return sequence, sequence, row, fits & (row < cache.shape[1])
    columns, page_size = x.page_table.shape[1], cache.shape[1]
    fits &= row < columns * page_size
    page = x.page_table[sequence, (row // page_size).clamp(0, columns - 1)].long()
    return sequence, page, row % page_size, fits & (page >= 0) & (page < cache.shape[0])


def _tokens(new: Tensor, x: Appended) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's sequence, its number in the sequence, and whether it is one of the tokens to append."""
    batch, device = x.seqused_kv.shape[0], new.device
    if new.dim() == 3:
        assert x.cu_seqlens_q is not None
        token = torch.arange(new.shape[0], device=device)
        position = torch.searchsorted(x.cu_seqlens_q.long(), token, right=True) - 1
        sequence = position.clamp(0, batch - 1)
        i = token - x.cu_seqlens_q.long()[sequence]
        is_token = position == sequence
    else:
        sequence = torch.arange(batch, device=device).repeat_interleave(new.shape[1], output_size=batch * new.shape[1])
        i = torch.arange(new.shape[1], device=device).repeat(batch)
        is_token = torch.ones_like(i, dtype=torch.bool)
        if x.cu_seqlens_q is not None:
            is_token = i < x.cu_seqlens_q.diff()[sequence]
    if x.seqused_q is not None:
        is_token &= i < x.seqused_q[sequence]
    return sequence, i, is_token


def _put(cache: Tensor, indices: tuple[Tensor, Tensor], values: Tensor, fits: Tensor) -> None:
    """Writes the values [tokens, h, ...] that fit. The others repeat the first one that fits, so that no shape is dynamic."""
    first = fits.int().argmax()
    source = torch.where(fits, torch.arange(len(fits), device=fits.device), first)
    page, row = (torch.where(fits, index, 0)[source] for index in indices)
    cache.index_put_((page, row), torch.where(fits.any(), values[source], cache[page, row]))
