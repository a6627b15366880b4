"""Appending of new keys and values to a cache, dense or in pages: one kernel, whose programs copy a few tokens each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Pages, Pointer, Rows, Scale
from flexattn.kernels_triton.common.quantize import LARGEST, SMALLEST_SCALE
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(8, 16, 4, 1)  # 8 tokens, so that a decoding step of 64 sequences is several programs for each head
_MOST = 2**31 - 1  # maximum rows of a sequence: positions have 32 bits


class Tokens(NamedTuple):
    """The new tokens of all sequences, numbered one sequence after the other."""

    cu_seqlens_ptr: Pointer  # int32 [batch + 1]; None: each sequence has all tokens of a row
    seqused_ptr: Pointer  # int32 [batch], number of tokens that a sequence appends; None: all
    batch: int
    total: int
    tokens_per_row: int  # tokens of a row of a dense tensor; 1 for [total, h, d]
    halvings: int  # steps of the binary search for a token's sequence


class Arguments(NamedTuple):
    k_cache: Rows
    v_cache: Rows
    k_new: Rows
    v_new: Rows
    k_scale: Scale | None  # factors of a cache in FP8; `stride_block` is the stride of a token
    v_scale: Scale | None
    tokens: Tokens
    pages: Pages | None
    seqused_kv_ptr: Pointer  # int32 [batch]: rows that each sequence already has
    capacity: int  # maximum rows of a sequence
    num_heads: int


class AppendMeta(NamedTuple):
    """Constants that the kernel is compiled for; `row_pointer` reads `ALIGN` like that of `Meta`."""

    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    ROWS: int
    ALIGN: int
    IS_RAGGED: bool
    BY_TOKEN_K: bool  # the scales of new rows are computed from them and written
    BY_TOKEN_V: bool


class _Places(NamedTuple):
    """Addresses of a program's tokens, in the cache, in the new rows and in a tensor of scales, and their sequences; inside a
    kernel.
    """

    cache_offset: Any  # elements from a head's first row in the cache
    new_offset: Any  # elements from a head's first row in the new rows
    place: Any  # page, or the sequence in a dense cache
    row: Any
    b: Any
    is_row: Any


@triton.jit
def _sequence_of(tokens, places, ROWS: tl.constexpr, IS_RAGGED: tl.constexpr):
    # Returns (the sequence of each token, its number in that sequence, whether the token exists and is appended)
    if IS_RAGGED:
        b = tl.zeros([ROWS], tl.int32)  # the last sequence that begins at the token or before it, by binary search
        step = 1 << tokens.halvings
        for _ in range(tokens.halvings):
            step = step // 2
            further = b + step
            inside = further <= tokens.batch
            begin = tl.load(tokens.cu_seqlens_ptr + further, mask=inside, other=_NEVER)
            b = tl.where(inside & (begin <= places), further, b)
        is_token = (places < tokens.total) & (b < tokens.batch)
        i = places - tl.load(tokens.cu_seqlens_ptr + b)
    else:
        b = places // tokens.tokens_per_row
        i = places % tokens.tokens_per_row
        is_token = places < tokens.total
        if tokens.cu_seqlens_ptr is not None:
            begin = tl.load(tokens.cu_seqlens_ptr + b, mask=is_token, other=0)
            is_token &= i < tl.load(tokens.cu_seqlens_ptr + b + 1, mask=is_token, other=0) - begin
    if tokens.seqused_ptr is not None:
        is_token &= i < tl.load(tokens.seqused_ptr + b, mask=is_token, other=0)
    return b, i, is_token & (i >= 0)


_NEVER = tl.constexpr(_MOST)


@triton.jit
def _copy(cache, new, scale, places, h, HEAD_DIM: tl.constexpr, BY_TOKEN: tl.constexpr, META: tl.constexpr):
    COLUMNS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DTYPE: tl.constexpr = cache.ptr.dtype.element_ty
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = places.is_row[:, None] & (columns < HEAD_DIM)
    x = tl.load(row_pointer(new, 0, h, 0, META) + places.new_offset[:, None] * META.ALIGN + columns, mask=inside, other=0.0)
    if DTYPE.is_fp8() and x.dtype != DTYPE:
        x = x.to(tl.float32)
        if scale.ptr is not None:
            x = tl.div_rn(x, _descale(x, scale, places, h, DTYPE, BY_TOKEN)[:, None])
    pointers = row_pointer(cache, 0, h, 0, META) + places.cache_offset[:, None] * META.ALIGN + columns
    tl.store(pointers, x.to(DTYPE), mask=inside)  # the conversion to FP8 saturates


@triton.jit
def _descale(x, scale, places, h, DTYPE: tl.constexpr, BY_TOKEN: tl.constexpr):
    # Returns the descale of each row: the sequence's, or one that is computed from the row and written.
    pointer = scale.ptr + tl.cast(h, tl.int64) * scale.stride_h
    if not BY_TOKEN:
        return tl.load(pointer + tl.cast(places.b, tl.int64) * scale.stride_b, mask=places.is_row, other=1.0)
    TOP: tl.constexpr = _E4M3 if tl.float8e4nv == DTYPE else _E5M2
    magnitude = tl.abs(x)
    largest = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)  # only finite numbers count
    descale = tl.div_rn(largest, tl.zeros_like(largest) + TOP)
    descale = tl.where(descale >= SMALLEST_SCALE, descale, 1.0)
    offset = tl.cast(places.place, tl.int64) * scale.stride_b + tl.cast(places.row, tl.int64) * scale.stride_block
    tl.store(pointer + offset, descale, mask=places.is_row)
    return descale


_E4M3, _E5M2 = (tl.constexpr(LARGEST[dtype]) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


@triton.jit
def _offsets(x, b, row):
    return tl.cast(b, tl.int64) * x.stride_b + tl.cast(row, tl.int64) * x.stride_s


@kernel
def _append_kernel(args: Arguments, META: tl.constexpr):
    ROWS: tl.constexpr = META.ROWS
    tokens, pages = args.tokens, args.pages
    blocks = tl.cdiv(tokens.total, ROWS)
    h = tl.program_id(0) // blocks
    places = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b, i, is_row = _sequence_of(tokens, places, ROWS, META.IS_RAGGED)
    used = tl.load(args.seqused_kv_ptr + b, mask=is_row, other=0)
    # The conditions avoid sums that wrap, whatever the lengths contain.
    is_row &= (used >= 0) & (used <= args.capacity)
    is_row &= i < args.capacity - tl.where(is_row, used, args.capacity)
    row = tl.where(is_row, used + i, 0)
    place = b
    if pages.table_ptr is not None:
        column = row // pages.page_size
        place = tl.load(pages.table_ptr + tl.cast(b, tl.int64) * pages.stride + column, mask=is_row, other=-1)
        is_row &= (place >= 0) & (place < pages.num_pages)
        row = row % pages.page_size
    new_b, new_row = b, i
    if META.IS_RAGGED:
        new_b, new_row = tl.zeros([ROWS], tl.int32), places
    k_cache_offset, k_new_offset = _offsets(args.k_cache, place, row), _offsets(args.k_new, new_b, new_row)
    v_cache_offset, v_new_offset = _offsets(args.v_cache, place, row), _offsets(args.v_new, new_b, new_row)
    k_places = _Places(cache_offset=k_cache_offset, new_offset=k_new_offset, place=place, row=row, b=b, is_row=is_row)
    v_places = _Places(cache_offset=v_cache_offset, new_offset=v_new_offset, place=place, row=row, b=b, is_row=is_row)
    _copy(args.k_cache, args.k_new, args.k_scale, k_places, h, META.HEAD_DIM_QK, META.BY_TOKEN_K, META)
    _copy(args.v_cache, args.v_new, args.v_scale, v_places, h, META.HEAD_DIM_V, META.BY_TOKEN_V, META)


class NewTokens(NamedTuple):
    """Keys and values of tokens to append, [b, s, h, d] or [total, h, d] with any strides but a contiguous last dim.

    Descales belong to a cache in FP8, and are fp32 with any strides: [b, h] are read, and [b | pages, s, h] are written.
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None  # int32 [batch + 1]; for [b, s, h, d] only the lengths count
    seqused: Tensor | None  # int32 [batch]
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None


def append(k_cache: Tensor, v_cache: Tensor, new: NewTokens, seqused_kv: Tensor, page_table: Tensor | None) -> None:
    """Writes the new tokens of each sequence after its first seqused_kv rows; tokens that do not fit are dropped.

    k_cache, v_cache: [b, s, h, d], or [pages, page_size, h, d] if there is a page_table; any strides but a contiguous last dim.
    """
    if new.k.numel() + new.v.numel() == 0:
        return
    tensors = (k_cache, v_cache, new.k, new.v)
    batch, is_ragged = seqused_kv.shape[0], new.k.dim() == 3
    num_heads = k_cache.shape[2]
    row_length = k_cache.shape[1]
    total, tokens_per_row = (new.k.shape[0], 1) if is_ragged else (batch * new.k.shape[1], new.k.shape[1])
    head_dims = (k_cache.shape[3], v_cache.shape[3])
    align = 8 if all(stride % 8 == 0 for x in tensors for stride in _strides(x)) else 1
    by_token = (descale is not None and descale.dim() == 3 for descale in (new.descale_k, new.descale_v))
    meta = AppendMeta(*head_dims, _TILE.block_m, align, is_ragged, *by_token)
    pages, capacity = None, row_length
    if page_table is not None:
        pages = Pages(page_table, page_table.stride(0), row_length, k_cache.shape[0])
        capacity = row_length * page_table.shape[1]
    args = Arguments(
        k_cache=_rows(k_cache, align),
        v_cache=_rows(v_cache, align),
        k_new=_rows(new.k, align),
        v_new=_rows(new.v, align),
        k_scale=_scale(new.descale_k),
        v_scale=_scale(new.descale_v),
        tokens=Tokens(new.cu_seqlens, new.seqused, batch, total, tokens_per_row, batch.bit_length()),
        pages=pages,
        seqused_kv_ptr=seqused_kv,
        capacity=min(capacity, _MOST),
        num_heads=num_heads,
    )
    launch(_append_kernel, num_heads * cdiv(total, _TILE.block_m), k_cache.device, _TILE, (args, meta))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Returns the (batch, sequence, head) strides; 0 for the batch of [total, h, d]."""
    stride_b, stride_s, stride_h = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
    return stride_b, stride_s, stride_h


def _rows(x: Tensor, align: int) -> Rows:
    stride_b, stride_s, stride_h = (stride // align for stride in _strides(x))
    return Rows(ptr=x, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


def _scale(descale: Tensor | None) -> Scale | None:
    if descale is None:
        return None
    stride_b, stride_h = descale.stride(0), descale.stride(-1)
    return Scale(ptr=descale, stride_block=descale.stride(1) if descale.dim() == 3 else 0, stride_b=stride_b, stride_h=stride_h)
