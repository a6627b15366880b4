"""Passes over FP8 tensors for the kernels of sm_90: transposed tiles, and dequantisation.

The transposed form has tiles of `fp8.BLOCK` tokens, [d, BLOCK]. Four tokens that belong together are neighbours in a row. They are
combined first, so that 32-bit elements are transposed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(64, 64, 4, 1)
_QUADS = tl.constexpr(BLOCK.value // 4)


class TransposeMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    IS_RAGGED: bool
    HEAD_DIM: int
    WIDTH0: int  # widths of the one or two parts of the head dim
    WIDTH1: int
    ALIGN: int  # the strides of x are multiples of it


class TransposeArguments(NamedTuple):
    x: Rows
    lengths: Lengths
    quads_ptr: WidePointer  # in units of 32 bits
    quad_blocks: int
    num_heads: int
    blocks: int


@triton.jit
def _load_bits(x_ptr, x_stride, token, length, columns, META: tl.constexpr):
    inside = (token < length)[:, None] & (columns < META.HEAD_DIM)[None, :]
    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
    return x.to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def _transpose_part(x_ptr, x_stride, quads_ptr, row, length, FIRST: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    # Processes columns FIRST .. FIRST + WIDTH of the head dim. A quad has four tokens, the first lowest.
    i = tl.arange(0, _QUADS)
    columns = FIRST + tl.arange(0, WIDTH)
    token = row + i // 4 * 16 + i % 4 * 2
    quads = _load_bits(x_ptr, x_stride, token, length, columns, META)
    quads |= _load_bits(x_ptr, x_stride, token + 1, length, columns, META) << 8
    quads |= _load_bits(x_ptr, x_stride, token + 8, length, columns, META) << 16
    quads |= _load_bits(x_ptr, x_stride, token + 9, length, columns, META) << 24
    place = columns[:, None] * _QUADS + i[None, :]
    bits = tl.trans(quads).to(tl.int32, bitcast=True)
    tl.store(quads_ptr + place, bits, mask=(columns < META.HEAD_DIM)[:, None])


@kernel
def _transpose_fp8_kernel(args: TransposeArguments, META: tl.constexpr):
    TOKENS: tl.constexpr = _QUADS * 4
    x = args.x
    h = tl.program_id(0) % args.num_heads
    n = tl.program_id(0) // args.num_heads % args.blocks
    b = tl.program_id(0) // args.num_heads // args.blocks
    start, length = load_sequence(args.lengths, b, META.IS_RAGGED)
    row = n * TOKENS
    if row < length:
        x_stride = x.stride_s.to(tl.int64) * META.ALIGN  # type: ignore[attr-defined]
        x_ptr = x.ptr + (b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h) * META.ALIGN + start * x_stride
        place = packed_start(args.lengths, b, start)
        first = place // TOKENS + b if META.IS_RAGGED else b * tl.cdiv(args.lengths.num_tokens, TOKENS)
        quads_ptr = args.quads_ptr + (h * args.quad_blocks + first + n).to(tl.int64) * (META.HEAD_DIM * _QUADS)
        _transpose_part(x_ptr, x_stride, quads_ptr, row, length, 0, META.WIDTH0, META)
        if META.WIDTH1 > 0:
            _transpose_part(x_ptr, x_stride, quads_ptr, row, length, META.WIDTH0, META.WIDTH1, META)


def transpose(problem: Problem, side: Literal["q", "kv"], x: Tensor, out: Tensor) -> None:
    """Writes FP8 x in transposed tiles; tokens past a sequence's end in its last tile become 0.

    x: [b, s, h, d] or [total, h, d] with the problem's lengths of queries or of keys.
    out: from `fp8.empty_transposed`.
    """
    side_lengths = side_of(problem, side)
    heads, head_dim = x.shape[-2:]
    blocks = triton.cdiv(side_lengths.lengths.max_seqlen, BLOCK.value)
    width0, width1 = split_head_dim(head_dim)
    align = problem.meta(_TILE, (x,)).ALIGN
    meta = TransposeMeta(IS_RAGGED=side_lengths.is_ragged, HEAD_DIM=head_dim, WIDTH0=width0, WIDTH1=width1, ALIGN=align)
    arguments = TransposeArguments(
        x=rows_of(x, meta),
        lengths=side_lengths.lengths,
        quads_ptr=out.view(torch.int32),
        quad_blocks=out.shape[1],
        num_heads=heads,
        blocks=blocks,
    )
    launch(_transpose_fp8_kernel, side_lengths.lengths.batch * blocks * heads, x.device, _TILE, (arguments, meta))


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
