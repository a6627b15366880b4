"""Quantisation for the FP8 kernels of sm_90: one pass over a tensor writes it in FP8, in its own layout, transposed, or both.

The transposed form has tiles of `fp8.BLOCK` tokens, [d, BLOCK]. Four tokens that belong together are neighbours in a row. They are
combined first, so that 32-bit elements are transposed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.common.tile_schedule import side_of
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.gluon.descales import Descale, Scale
from flexattn.kernels_triton.gluon.fp8_operands import BLOCK
from flexattn.kernels_triton.hopper.fp8 import quads_assembly
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.interpreter import INTERPRETED
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(64, 64, 4, 1)
_QUADS = tl.constexpr(BLOCK.value // 4)
_E4M3 = tl.constexpr(quads_assembly("e4m3"))
_E5M2 = tl.constexpr(quads_assembly("e5m2"))


class QuantizeMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    IS_RAGGED: bool
    HAS_LENGTHS: bool
    HAS_GAPS: bool
    HEAD_DIM: int
    WIDTH0: int  # widths of the one or two parts of the head dim
    WIDTH1: int
    ALIGN: int  # the strides of x are multiples of it
    ROWS_ALIGN: int
    IS_FP8: bool  # x is FP8
    IS_E4M3: bool  # the result is E4M3
    IS_INTERPRETED: bool
    BLOCK_ROWS: int  # rows that share a scale; 0: all
    HAS_ROWS: bool
    HAS_QUADS: bool


class QuantizeArguments(NamedTuple):
    x: Rows
    lengths: Lengths
    descale: Descale
    out: Rows  # FP8 output in x's layout; arbitrary if not requested, like the transposed output
    quads_ptr: WidePointer  # in units of 32 bits
    quad_blocks: int
    num_heads: int
    blocks: int


class HeadRows(NamedTuple):
    """One sequence and head of the tensors that the kernel reads and writes."""

    x_ptr: Any
    x_stride: Any
    descale_ptr: Any
    descale_stride: Any
    out_ptr: Any
    out_stride: Any
    quads_ptr: Any


@triton.jit
def _load_rows(head_rows: HeadRows, token, length, columns, META: tl.constexpr):
    # Returns scaled fp32 numbers, with NaN for infinities; for FP8, its bits.
    inside = (token < length)[:, None] & (columns < META.HEAD_DIM)[None, :]
    x = tl.load(head_rows.x_ptr + token.to(tl.int64)[:, None] * head_rows.x_stride + columns[None, :], mask=inside, other=0.0)
    if META.IS_FP8:
        return x.to(tl.uint8, bitcast=True).to(tl.uint32)
    else:
        if META.BLOCK_ROWS == 0:
            multiplier = tl.div_rn(1.0, tl.load(head_rows.descale_ptr))
        else:
            descale = tl.load(
                head_rows.descale_ptr + token // META.BLOCK_ROWS * head_rows.descale_stride, mask=token < length, other=1.0
            )
            multiplier = tl.div_rn(1.0, descale)[:, None]
        wide = x.to(tl.float32)
        return tl.where(tl.abs(wide) == float("inf"), float("nan"), wide * multiplier)


@triton.jit
def _pack_quads(x0, x1, x2, x3, META: tl.constexpr):
    # Returns uint32, the first number lowest, saturated. With single casts and shifts, ptxas crashes (12.8 and 12.9).
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
def _store_rows(quads, K: tl.constexpr, head_rows: HeadRows, token, length, columns, META: tl.constexpr):
    DTYPE: tl.constexpr = tl.float8e4nv if META.IS_E4M3 else tl.float8e5
    inside = (token < length)[:, None] & (columns < META.HEAD_DIM)[None, :]
    bits = (quads >> (8 * K)).to(tl.uint8)
    tl.store(
        head_rows.out_ptr + token.to(tl.int64)[:, None] * head_rows.out_stride + columns[None, :],
        bits.to(DTYPE, bitcast=True),
        mask=inside,
    )


@triton.jit
def _quantize_part(head_rows: HeadRows, row, length, FIRST: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    # Processes columns FIRST .. FIRST + WIDTH of the head dim
    i = tl.arange(0, _QUADS)
    columns = FIRST + tl.arange(0, WIDTH)
    token = row + i // 4 * 16 + i % 4 * 2
    quads = _pack_quads(
        _load_rows(head_rows, token, length, columns, META),
        _load_rows(head_rows, token + 1, length, columns, META),
        _load_rows(head_rows, token + 8, length, columns, META),
        _load_rows(head_rows, token + 9, length, columns, META),
        META,
    )
    if META.HAS_ROWS:
        _store_rows(quads, 0, head_rows, token, length, columns, META)
        _store_rows(quads, 1, head_rows, token + 1, length, columns, META)
        _store_rows(quads, 2, head_rows, token + 8, length, columns, META)
        _store_rows(quads, 3, head_rows, token + 9, length, columns, META)
    if META.HAS_QUADS:
        place = columns[:, None] * _QUADS + i[None, :]
        bits = tl.trans(quads).to(tl.int32, bitcast=True)
        tl.store(head_rows.quads_ptr + place, bits, mask=(columns < META.HEAD_DIM)[:, None])


@kernel
def _quantize_kernel(args: QuantizeArguments, META: tl.constexpr):
    TOKENS: tl.constexpr = _QUADS * 4
    x, out, descale = args.x, args.out, args.descale
    h = tl.program_id(0) % args.num_heads
    n = tl.program_id(0) // args.num_heads % args.blocks
    b = tl.program_id(0) // args.num_heads // args.blocks
    start, length = load_sequence(args.lengths, b, META.IS_RAGGED)
    row = n * TOKENS
    if row < length:
        stride_x = x.stride_s.to(tl.int64) * META.ALIGN  # type: ignore[attr-defined]
        x_ptr = x.ptr + (b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h) * META.ALIGN + start * stride_x
        descale_ptr = descale.ptr + b * descale.stride_b + h * descale.stride_h
        stride_out = out.stride_s.to(tl.int64) * META.ROWS_ALIGN  # type: ignore[attr-defined]
        out_ptr = out.ptr + (b.to(tl.int64) * out.stride_b + h.to(tl.int64) * out.stride_h) * META.ROWS_ALIGN + start * stride_out
        place = packed_start(args.lengths, b, start)
        first = place // TOKENS + b if META.IS_RAGGED else b * tl.cdiv(args.lengths.num_tokens, TOKENS)
        head_rows = HeadRows(
            x_ptr=x_ptr,
            x_stride=stride_x,
            descale_ptr=descale_ptr,
            descale_stride=descale.stride_block,
            out_ptr=out_ptr,
            out_stride=stride_out,
            quads_ptr=args.quads_ptr + (h * args.quad_blocks + first + n).to(tl.int64) * (META.HEAD_DIM * _QUADS),
        )
        _quantize_part(head_rows, row, length, 0, META.WIDTH0, META)
        if META.WIDTH1 > 0:
            _quantize_part(head_rows, row, length, META.WIDTH0, META.WIDTH1, META)


def quantize(
    problem: Problem,
    side: Literal["q", "kv"],
    x: Tensor,
    scale: Scale,
    rows: Tensor | None = None,
    transposed: Tensor | None = None,
) -> None:
    """Writes rows = x / descale in FP8, and the same in transposed tiles.

    x: [b, s, h, d] or [total, h, d] with the problem's lengths of queries or of keys, in bf16, fp16 or fp32. If it is already in
        FP8, only the transposed tiles are written.
    scale: of x.
    rows: any layout. Padding is neither read nor written.
    transposed: from `fp8.empty_transposed`; tokens past a sequence's end in its last tile become 0.

    Finite numbers saturate, infinities and NaN become NaN.
    """
    side_lengths = side_of(problem, side)
    heads, head_dim = x.shape[-2:]
    blocks = triton.cdiv(side_lengths.lengths.max_seqlen, BLOCK.value)
    out = rows if rows is not None else transposed
    assert out is not None
    meta = problem.meta(_TILE, (x,))
    rows_meta = meta if rows is None else problem.meta(_TILE, (rows,))
    width0, width1 = split_head_dim(head_dim)
    quads = out if transposed is None else transposed
    arguments = QuantizeArguments(
        x=rows_of(x, meta),
        lengths=side_lengths.lengths,
        descale=scale.argument,
        out=Rows(ptr=out, stride_b=0, stride_s=0, stride_h=0) if rows is None else rows_of(rows, rows_meta),
        quads_ptr=quads.view(torch.int32),
        quad_blocks=0 if transposed is None else transposed.shape[1],
        num_heads=heads,
        blocks=blocks,
    )
    quantize_meta = QuantizeMeta(
        IS_RAGGED=side_lengths.is_ragged,
        HAS_LENGTHS=problem.has_lengths,
        HAS_GAPS=side_lengths.lengths.cu_seqlens_padded_ptr is not None,
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
    )
    launch(_quantize_kernel, side_lengths.lengths.batch * blocks * heads, x.device, _TILE, (arguments, quantize_meta))


class DequantizeArguments(NamedTuple):
    x: Rows
    lengths: Lengths
    descale: Descale  # its blocks are multiples of a program's rows
    out: Rows
    num_heads: int
    blocks: int


@kernel
def _dequantize_kernel(
    args: DequantizeArguments,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,  # widths of the one or two parts of the head dim
    D1: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.BLOCK_M
    scale = args.descale
    h = tl.program_id(0) % args.num_heads
    row = tl.program_id(0) // args.num_heads % args.blocks * ROWS
    b = tl.program_id(0) // args.num_heads // args.blocks
    start, length = load_sequence(args.lengths, b, IS_RAGGED)
    if row < length:
        descale = tl.load(scale.ptr + b * scale.stride_b + h * scale.stride_h + row // scale.block_rows * scale.stride_block)
        x_rows = row_pointer(args.x, b, h, start + row, META)
        out_rows = row_pointer(args.out, b, h, start + row, META)
        x_offsets, out_offsets = row_steps(args.x.stride_s, ROWS, META)[1], row_steps(args.out.stride_s, ROWS, META)[1]
        x0 = load_tile(x_rows, x_offsets, row, length, 0, D0, HEAD_DIM, True)
        store_tile(out_rows, x0.to(tl.float32) * descale, out_offsets, row, length, 0, D0, HEAD_DIM)
        if D1 > 0:
            x1 = load_tile(x_rows, x_offsets, row, length, D0, D1, HEAD_DIM, True)
            store_tile(out_rows, x1.to(tl.float32) * descale, out_offsets, row, length, D0, D1, HEAD_DIM)


def dequantize(problem: Problem, side: Literal["q", "kv"], x: Tensor, scale: Scale, out: Tensor) -> Tensor:
    """Writes out = x * descale, in 16 bits and any layout; padding is neither read nor written."""
    side_lengths = side_of(problem, side)
    heads, head_dim = x.shape[-2:]
    meta = problem.meta(_TILE, (x, out))
    meta = meta._replace(ALIGN=min(meta.ALIGN, 8))  # a thread then stores 16 bytes in a row, rather than every other 16
    blocks = triton.cdiv(side_lengths.lengths.max_seqlen, _TILE.block_m)
    arguments = DequantizeArguments(
        x=rows_of(x, meta),
        lengths=side_lengths.lengths,
        descale=scale.argument,
        out=rows_of(out, meta),
        num_heads=heads,
        blocks=blocks,
    )
    constants = (head_dim, *split_head_dim(head_dim), side_lengths.is_ragged, meta)
    launch(_dequantize_kernel, side_lengths.lengths.batch * blocks * heads, x.device, _TILE, (arguments, *constants))
    return out
