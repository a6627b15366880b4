"""Quantisation for the FP8 kernels of sm_90: a tensor is read once and written in FP8, as it lies, transposed, or both.

Transposed, it is tiles of `hopper_fp8.BLOCK` tokens, [d, BLOCK], in whose rows four tokens that belong together are neighbours:
they are brought together first, so that what is transposed has 32 bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.primitives import load_sequence, load_tile, packed_start, row_pointer, row_steps, store_tile
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.common.work_table import side_of
from flexattn.kernels_triton.hopper.fp8 import BLOCK, Scale, quads_assembly
from flexattn.kernels_triton.runtime.interpreter import INTERPRETED
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_TILE = Tile(64, 64, 4, 1)
_QUADS = tl.constexpr(BLOCK.value // 4)
_E4M3 = tl.constexpr(quads_assembly("e4m3"))
_E5M2 = tl.constexpr(quads_assembly("e5m2"))


class QuantizeMeta(NamedTuple):
    """What the kernel is compiled for."""

    IS_RAGGED: bool
    HAS_LENGTHS: bool
    HAS_GAPS: bool
    HEAD_DIM: int
    WIDTH0: int  # it is taken in one or two parts
    WIDTH1: int
    ALIGN: int  # the strides of x are multiples of it
    ROWS_ALIGN: int
    IS_FP8: bool  # x is
    IS_E4M3: bool  # what becomes of it is
    IS_INTERPRETED: bool
    BLOCK_ROWS: int  # that have a scale; 0: all
    HAS_ROWS: bool
    HAS_QUADS: bool


@triton.jit
def _load_rows(own, token, length, columns, META: tl.constexpr):
    # Scaled, in fp32; infinities are NaN. Of FP8, its bits.
    x_base, stride_s, scale_base, stride_scale, _, _, _ = own
    inside = (token < length)[:, None] & (columns < META.HEAD_DIM)[None, :]
    x = tl.load(x_base + token.to(tl.int64)[:, None] * stride_s + columns[None, :], mask=inside, other=0.0)
    if META.IS_FP8:
        return x.to(tl.uint8, bitcast=True).to(tl.uint32)
    else:
        if META.BLOCK_ROWS == 0:
            multiplier = tl.div_rn(1.0, tl.load(scale_base))
        else:
            descale = tl.load(scale_base + token // META.BLOCK_ROWS * stride_scale, mask=token < length, other=1.0)
            multiplier = tl.div_rn(1.0, descale)[:, None]
        wide = x.to(tl.float32)
        return tl.where(tl.abs(wide) == float("inf"), float("nan"), wide * multiplier)


@triton.jit
def _pack_quads(x0, x1, x2, x3, META: tl.constexpr):
    # uint32, the first lowest. Saturated. Casts one by one, and shifts, let ptxas crash (12.8 and 12.9).
    if META.IS_FP8:
        return x0 | (x1 << 8) | (x2 << 16) | (x3 << 24)
    elif META.IS_INTERPRETED:
        DTYPE: tl.constexpr = tl.float8e4nv if META.IS_E4M3 else tl.float8e5
        low = x0.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) | (x1.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
        high = x2.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) | (x3.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32) << 8)
        return low | (high << 16)
    else:
        CVT: tl.constexpr = _E4M3 if META.IS_E4M3 else _E5M2
        return tl.inline_asm_elementwise(CVT, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _store_rows(quads, K: tl.constexpr, own, token, length, columns, META: tl.constexpr):
    _, _, _, _, rows_base, stride_rows, _ = own
    DTYPE: tl.constexpr = tl.float8e4nv if META.IS_E4M3 else tl.float8e5
    inside = (token < length)[:, None] & (columns < META.HEAD_DIM)[None, :]
    bits = (quads >> (8 * K)).to(tl.uint8)
    tl.store(rows_base + token.to(tl.int64)[:, None] * stride_rows + columns[None, :], bits.to(DTYPE, bitcast=True), mask=inside)


@triton.jit
def _quantize_part(own, row, length, FIRST: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    # Columns FIRST .. FIRST + WIDTH of the head dim
    i = tl.arange(0, _QUADS)
    columns = FIRST + tl.arange(0, WIDTH)
    token = row + i // 4 * 16 + i % 4 * 2
    quads = _pack_quads(
        _load_rows(own, token, length, columns, META),
        _load_rows(own, token + 1, length, columns, META),
        _load_rows(own, token + 8, length, columns, META),
        _load_rows(own, token + 9, length, columns, META),
        META,
    )
    if META.HAS_ROWS:
        _store_rows(quads, 0, own, token, length, columns, META)
        _store_rows(quads, 1, own, token + 1, length, columns, META)
        _store_rows(quads, 2, own, token + 8, length, columns, META)
        _store_rows(quads, 3, own, token + 9, length, columns, META)
    if META.HAS_QUADS:
        place = columns[:, None] * _QUADS + i[None, :]
        bits = tl.trans(quads).to(tl.int32, bitcast=True)
        tl.store(own[6] + place, bits, mask=(columns < META.HEAD_DIM)[:, None])


@kernel
def _quantize_kernel(
    x_ptr,
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_tokens,
    max_seqlen,
    stride_xb,
    stride_xs,
    stride_xh,
    descale_ptr,
    stride_descale_b,
    stride_descale_h,
    stride_descale_n,
    rows_ptr,  # without rows, anything; so too the transposed tensor
    stride_rb,
    stride_rs,
    stride_rh,
    quads_ptr,  # by 32 bits
    quad_blocks,
    num_heads,
    blocks,
    META: tl.constexpr,
):
    TOKENS: tl.constexpr = _QUADS * 4
    h = tl.program_id(0) % num_heads
    n = tl.program_id(0) // num_heads % blocks
    b = tl.program_id(0) // num_heads // blocks
    start, length = load_sequence(Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen), b, META.IS_RAGGED)
    row = n * TOKENS
    if row < length:
        stride_s = stride_xs.to(tl.int64) * META.ALIGN
        x_base = x_ptr + (b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh) * META.ALIGN + start * stride_s
        scale_base = descale_ptr + b * stride_descale_b + h * stride_descale_h
        stride_rows = stride_rs.to(tl.int64) * META.ROWS_ALIGN
        rows_base = rows_ptr + (b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh) * META.ROWS_ALIGN + start * stride_rows
        place = packed_start(Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen), b, start)
        first = place // TOKENS + b if META.IS_RAGGED else b * tl.cdiv(num_tokens, TOKENS)
        quads_base = quads_ptr + (h * quad_blocks + first + n).to(tl.int64) * (META.HEAD_DIM * _QUADS)
        own = (x_base, stride_s, scale_base, stride_descale_n, rows_base, stride_rows, quads_base)
        _quantize_part(own, row, length, 0, META.WIDTH0, META)
        if META.WIDTH1 > 0:
            _quantize_part(own, row, length, META.WIDTH0, META.WIDTH1, META)


def quantize(
    problem: Problem,
    side: Literal["q", "kv"],
    x: Tensor,
    scale: Scale,
    rows: Tensor | None = None,
    transposed: Tensor | None = None,
) -> None:
    """rows = x / descale in FP8, and the same in transposed tiles.

    x: [b, s, h, d] or [total, h, d] with the problem's lengths of queries or of keys, in bf16, fp16 or fp32; or in FP8 already, of
        which only the transposed tiles are made.
    scale: of x.
    rows: laid out as x or otherwise. Padding is neither read nor written.
    transposed: as `hopper_fp8.empty_transposed` gives it; what is past a sequence's end in its last tile becomes 0.

    Finite numbers saturate, infinities and NaN become NaN.
    """
    lengths = side_of(problem, side)
    heads, head_dim = x.shape[-2:]
    blocks = triton.cdiv(lengths.longest, BLOCK.value)
    out = rows if rows is not None else transposed
    assert out is not None
    meta = problem.meta(_TILE, (x,))
    rows_meta = meta if rows is None else problem.meta(_TILE, (rows,))
    width0, width1 = split_head_dim(head_dim)
    launch(
        _quantize_kernel,
        lengths.batch * blocks * heads,
        x.device,
        _TILE,
        (
            x,
            *lengths.arguments,
            *row_strides(x, meta),
            *scale.arguments[:4],
            out if rows is None else rows,
            *((0, 0, 0) if rows is None else row_strides(rows, rows_meta)),
            (out if transposed is None else transposed).view(torch.int32),
            0 if transposed is None else transposed.shape[1],
            heads,
            blocks,
            QuantizeMeta(
                IS_RAGGED=lengths.is_ragged,
                HAS_LENGTHS=meta.HAS_LENGTHS,
                HAS_GAPS=lengths.cu_seqlens_padded is not None,
                HEAD_DIM=head_dim,
                WIDTH0=width0,
                WIDTH1=width1,
                ALIGN=meta.ALIGN,
                ROWS_ALIGN=rows_meta.ALIGN,
                IS_FP8=x.element_size() == 1,
                IS_E4M3=out.dtype is torch.float8_e4m3fn,
                IS_INTERPRETED=INTERPRETED,
                BLOCK_ROWS=scale.block_rows if scale.is_blockwise else 0,
                HAS_ROWS=rows is not None,
                HAS_QUADS=transposed is not None,
            ),
        ),
    )


@kernel
def _dequantize_kernel(
    x_ptr,
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_tokens,
    max_seqlen,
    stride_xb,
    stride_xs,
    stride_xh,
    descale_ptr,
    stride_descale_b,
    stride_descale_h,
    stride_descale_n,
    block_rows,  # that have a scale, a multiple of a program's
    out_ptr,
    stride_ob,
    stride_os,
    stride_oh,
    num_heads,
    blocks,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,  # it is taken in one or two parts
    D1: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.BLOCK_M
    h = tl.program_id(0) % num_heads
    row = tl.program_id(0) // num_heads % blocks * ROWS
    b = tl.program_id(0) // num_heads // blocks
    start, length = load_sequence(Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen), b, IS_RAGGED)
    if row < length:
        descale = tl.load(descale_ptr + b * stride_descale_b + h * stride_descale_h + row // block_rows * stride_descale_n)
        x_rows = row_pointer(Rows(x_ptr, stride_xb, stride_xs, stride_xh), b, h, start + row, META)
        out_rows = row_pointer(Rows(out_ptr, stride_ob, stride_os, stride_oh), b, h, start + row, META)
        x_offsets, out_offsets = row_steps(stride_xs, ROWS, META)[1], row_steps(stride_os, ROWS, META)[1]
        x0 = load_tile(x_rows, x_offsets, row, length, 0, D0, HEAD_DIM, True)
        store_tile(out_rows, x0.to(tl.float32) * descale, out_offsets, row, length, 0, D0, HEAD_DIM)
        if D1 > 0:
            x1 = load_tile(x_rows, x_offsets, row, length, D0, D1, HEAD_DIM, True)
            store_tile(out_rows, x1.to(tl.float32) * descale, out_offsets, row, length, D0, D1, HEAD_DIM)


def dequantize(problem: Problem, side: Literal["q", "kv"], x: Tensor, scale: Scale, out: Tensor) -> Tensor:
    """out = x * descale, in a half type, laid out as x or otherwise; padding is neither read nor written."""
    lengths = side_of(problem, side)
    heads, head_dim = x.shape[-2:]
    meta = problem.meta(_TILE, (x, out))
    meta = meta._replace(ALIGN=min(meta.ALIGN, 8))  # a thread then stores 16 bytes in a row, rather than every other 16
    blocks = triton.cdiv(lengths.longest, _TILE.block_m)
    launch(
        _dequantize_kernel,
        lengths.batch * blocks * heads,
        x.device,
        _TILE,
        (
            *(x, *lengths.arguments, *row_strides(x, meta), *scale.arguments, out, *row_strides(out, meta), heads, blocks),
            *(head_dim, *split_head_dim(head_dim), lengths.is_ragged, lengths.cu_seqlens_padded is not None, meta),
        ),
    )
    return out
