"""New keys and values written behind those of a cache, dense or in pages: one kernel, whose programs copy a few tokens each."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pages, Pointer, Rows
from flexattn.kernels_triton.common.primitives import row_pointer
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_TILE = Tile(8, 16, 4, 1)  # 8 tokens, so that 64 sequences which decode are several programs for each head
_MOST = 2**31 - 1  # rows of a sequence: positions are 32 bits wide


class Tokens(NamedTuple):
    """The new tokens of all sequences, counted one sequence after the other."""

    cu_seqlens_ptr: Pointer  # int32 [batch + 1]; None: each sequence has as many as a row
    seqused_ptr: Pointer  # int32 [batch], how many of its tokens a sequence appends; None: all
    batch: int
    total: int
    of_a_row: int  # tokens of a row of a dense tensor; 1 for [total, h, d]
    halvings: int  # steps in which a token's sequence is found by its place


class Arguments(NamedTuple):
    k_cache: Rows
    v_cache: Rows
    k_new: Rows
    v_new: Rows
    tokens: Tokens
    pages: Pages | None
    seqused_kv_ptr: Pointer  # int32 [batch]: rows that each sequence has already
    capacity: int  # rows that a sequence can have
    num_heads: int


class AppendMeta(NamedTuple):
    """Constants that the kernel is compiled for; `ALIGN` is that of `Meta`, which `row_pointer` reads."""

    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    ROWS: int
    ALIGN: int
    IS_RAGGED: bool


@triton.jit
def _sequence_of(tokens, places, ROWS: tl.constexpr, IS_RAGGED: tl.constexpr):
    # (the sequence of each token, its number in that sequence, whether there is such a token to append)
    if IS_RAGGED:
        b = tl.zeros([ROWS], tl.int32)  # the last sequence that begins at the token or before it, by halving
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
        b = places // tokens.of_a_row
        i = places % tokens.of_a_row
        is_token = places < tokens.total
        if tokens.cu_seqlens_ptr is not None:
            begin = tl.load(tokens.cu_seqlens_ptr + b, mask=is_token, other=0)
            is_token &= i < tl.load(tokens.cu_seqlens_ptr + b + 1, mask=is_token, other=0) - begin
    if tokens.seqused_ptr is not None:
        is_token &= i < tl.load(tokens.seqused_ptr + b, mask=is_token, other=0)
    return b, i, is_token & (i >= 0)


_NEVER = tl.constexpr(_MOST)


@triton.jit
def _copy(cache, new, to, of, h, is_row, HEAD_DIM: tl.constexpr, META: tl.constexpr):
    COLUMNS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_row[:, None] & (columns < HEAD_DIM)
    x = tl.load(row_pointer(new, 0, h, 0, META) + of[:, None] * META.ALIGN + columns, mask=inside, other=0.0)
    pointers = row_pointer(cache, 0, h, 0, META) + to[:, None] * META.ALIGN + columns
    tl.store(pointers, x.to(cache.ptr.dtype.element_ty), mask=inside)


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
    # Written so that no sum wraps, whatever the lengths hold.
    is_row &= (used >= 0) & (used <= args.capacity)
    is_row &= i < args.capacity - tl.where(is_row, used, args.capacity)
    row = tl.where(is_row, used + i, 0)
    place = b
    if pages.table_ptr is not None:
        column = row // pages.page_size
        place = tl.load(pages.table_ptr + tl.cast(b, tl.int64) * pages.stride + column, mask=is_row, other=-1)
        is_row &= (place >= 0) & (place < pages.num_pages)
        row = row % pages.page_size
    of_b, of_row = b, i
    if META.IS_RAGGED:
        of_b, of_row = tl.zeros([ROWS], tl.int32), places
    k_to, v_to = _offsets(args.k_cache, place, row), _offsets(args.v_cache, place, row)
    k_of, v_of = _offsets(args.k_new, of_b, of_row), _offsets(args.v_new, of_b, of_row)
    _copy(args.k_cache, args.k_new, k_to, k_of, h, is_row, META.HEAD_DIM_QK, META)
    _copy(args.v_cache, args.v_new, v_to, v_of, h, is_row, META.HEAD_DIM_V, META)


class NewTokens(NamedTuple):
    """Keys and values of tokens to append, [b, s, h, d] or [total, h, d] in any strides with a contiguous last dim."""

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None  # int32 [batch + 1]; of [b, s, h, d] only how long each sequence is
    seqused: Tensor | None  # int32 [batch]


def append(k_cache: Tensor, v_cache: Tensor, new: NewTokens, seqused_kv: Tensor, page_table: Tensor | None) -> None:
    """Writes the new tokens of each sequence behind its first seqused_kv rows; those that do not fit are left out.

    k_cache, v_cache: [b, s, h, d], or [pages, page_size, h, d] where there is a page_table, in any strides with a contiguous last
    dim.
    """
    if new.k.numel() + new.v.numel() == 0:
        return
    tensors = (k_cache, v_cache, new.k, new.v)
    batch, is_ragged = seqused_kv.shape[0], new.k.dim() == 3
    num_heads = k_cache.shape[2]
    row_length = k_cache.shape[1]
    total, of_a_row = (new.k.shape[0], 1) if is_ragged else (batch * new.k.shape[1], new.k.shape[1])
    head_dims = (k_cache.shape[3], v_cache.shape[3])
    align = 8 if all(stride % 8 == 0 for x in tensors for stride in _strides(x)) else 1
    meta = AppendMeta(*head_dims, ROWS=_TILE.block_m, ALIGN=align, IS_RAGGED=is_ragged)
    pages, capacity = None, row_length
    if page_table is not None:
        pages = Pages(page_table, page_table.stride(0), row_length, k_cache.shape[0])
        capacity = row_length * page_table.shape[1]
    args = Arguments(
        *(_rows(x, align) for x in tensors),
        tokens=Tokens(new.cu_seqlens, new.seqused, batch, total, of_a_row, batch.bit_length()),
        pages=pages,
        seqused_kv_ptr=seqused_kv,
        capacity=min(capacity, _MOST),
        num_heads=num_heads,
    )
    launch(_append_kernel, num_heads * cdiv(total, _TILE.block_m), k_cache.device, _TILE, (args, meta))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, sequence, head) strides; 0 for the batch of [total, h, d]."""
    stride_b, stride_s, stride_h = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
    return stride_b, stride_s, stride_h


def _rows(x: Tensor, align: int) -> Rows:
    stride_b, stride_s, stride_h = (stride // align for stride in _strides(x))
    return Rows(ptr=x, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)
