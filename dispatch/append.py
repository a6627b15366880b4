"""Rows written behind those of a cache: by one kernel, or by torch ops with the same result on devices without kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import LARGEST, SMALLEST_SCALE
from flexattn.dispatch.spec import as_bshd


class Appended(NamedTuple):
    """New keys and values, and where they go; formats are those of the new rows and of the caches.

    Descales, of caches in FP8, are float32: those that are given [], [h_kv] or [b, h_kv], those of tokens, which are written, a
    cache's dims without the last.
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
    """Writes the new rows of each sequence behind its first seqused_kv rows; those that do not fit are left out."""
    if kernel_error(k_cache.device.type, _capability(k_cache), k_cache.dtype) is None:
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
                scale = _own_descale(values, cache.dtype)
                _put(descale, (places, row), scale[..., 0], fits)
            largest = LARGEST[cache.dtype]
            values = (values / scale).clamp(-largest, largest)
        values = values.to(cache.dtype)
        if cache.dtype in LARGEST:  # which torch does not index
            cache, values = cache.view(torch.uint8), values.view(torch.uint8)
        _put(cache, (places, row), values, fits)


def append_by_kernel(k_cache: Tensor, v_cache: Tensor, x: Appended) -> None:
    """Does the same by the kernel; tensors without memory are for the GPU that is pretended."""
    from flexattn.kernels_triton.portable.append import NewTokens
    from flexattn.kernels_triton.portable.append import append as append_rows

    caches, new, descales = _views(k_cache, v_cache, x)
    append_rows(*caches, NewTokens(*new, x.cu_seqlens_q, x.seqused_q, *descales), x.seqused_kv, x.page_table)


def kernel_error(device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Returns why no kernel writes rows of a dtype on a device; of FP8 from compute capability 8.9 on, where it is exact."""
    if reason := triton_backend.device_error(device_type, capability):
        return reason
    if capability is None or dtype not in LARGEST or capability >= (8, 9):
        return None
    return f"compute capability {capability[0]}.{capability[1]} has no conversions to FP8, which 8.9 has"


def _capability(t: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(t.device) if t.device.type == "cuda" else None


def _views(
    k_cache: Tensor, v_cache: Tensor, x: Appended
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], list[Tensor | None]]:
    """Returns caches and new rows in bshd, and the descales of k and v."""
    new_format, cache_format = x.formats
    caches = as_bshd(k_cache, cache_format), as_bshd(v_cache, cache_format)
    new = as_bshd(x.k_new, new_format), as_bshd(x.v_new, new_format)
    descales = [
        _descale(given, written, cache, (x.seqused_kv.shape[0], cache_format))
        for given, written, cache in zip(
            (x.descale_k, x.descale_v), (x.token_descales_k, x.token_descales_v), (k_cache, v_cache), strict=True
        )
    ]
    return caches, new, descales


def _descale(given: Tensor | None, written: Tensor | None, cache: Tensor, of: tuple[int, str]) -> Tensor | None:
    """Returns a descale as a view: [b, h] of one that is given, [b | pages, s, h] of what is to be written."""
    batch, fmt = of
    if written is not None:
        return as_bshd(written[..., None], fmt)[..., 0]
    return None if given is None else given.expand(batch, cache.shape[fmt.index("h")])


def _own_descale(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns for rows [tokens, h, d] what they are divided by, [tokens, h, 1], so that the largest becomes the dtype's."""
    amax = torch.where(values.isfinite(), values.abs(), 0.0).amax(-1, keepdim=True)
    descale = amax / LARGEST[dtype]
    return torch.where(descale >= SMALLEST_SCALE, descale, 1.0)


def _places(cache: Tensor, new: Tensor, x: Appended) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for each new token its sequence, its page, or in a dense cache that sequence, its row there, and whether it fits."""
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
    """Writes values [tokens, h, ...] where they fit. The others repeat the first that does: no shape follows the lengths."""
    first = fits.int().argmax()
    source = torch.where(fits, torch.arange(len(fits), device=fits.device), first)
    page, row = (torch.where(fits, place, 0)[source] for place in at)
    cache.index_put_((page, row), torch.where(fits.any(), values[source], cache[page, row]))
