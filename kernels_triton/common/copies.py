"""A kernel's own copies of a call's tensors: packed without gaps, or transposed for products in FP8."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def packed_start(lengths, b, start):
    # Returns the first row of a sequence in a kernel's own buffer. There sequences are consecutive, whatever the order of their
    # slots.
    if lengths.cu_seqlens_padded_ptr is not None:
        start = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + b), 0), lengths.num_tokens)
    return start


class HeadChannels(NamedTuple):
    """One sequence and head of `arguments.Channels`, inside a kernel."""

    ptr: tl.tensor
    stride_d: tl.tensor


@triton.jit
def transposed_column(start, b, IS_RAGGED: tl.constexpr):
    # Returns the first column of a sequence with this `packed_start` in a row of a transposed copy. It is a multiple of 16, and
    # sequences do not overlap.
    return (start + 16 * b) // 16 * 16 if IS_RAGGED else 0


@triton.jit
def transposed_head(copy, b, h, start, IS_RAGGED: tl.constexpr):
    # Returns one sequence and head of a transposed copy; ptr points to its first channel and token.
    row = (tl.cast(b, tl.int64) * copy.stride_b + tl.cast(h, tl.int64) * copy.stride_h) * 16
    return HeadChannels(ptr=copy.ptr + row + transposed_column(start, b, IS_RAGGED), stride_d=copy.stride_d)


@triton.jit
def load_columns(
    copy,
    first,
    num_rows,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    # Like `load_tile`, for ROWS rows of a transposed copy: [WIDTH, ROWS]. The row mask covers 16 rows at a time, so that 16 bytes
    # are loaded at a time; the copy has zeros up to there.
    channels = COLUMN + tl.arange(0, WIDTH)
    rows = first + tl.arange(0, ROWS)
    pointers = copy.ptr + (channels.to(tl.int64) * copy.stride_d * 16)[:, None] + rows[None, :]
    inside = (first + tl.arange(0, ROWS) // 16 * 16 < num_rows)[None, :]
    if CHECK_ROWS and COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=inside & (channels < HEAD_DIM)[:, None], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(channels < HEAD_DIM)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile
