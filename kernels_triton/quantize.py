"""To FP8: amax, scale, cast and rotation in one pass over a tensor; and copies of FP8 tensors with the tokens innermost."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.configs import Tile, split_head_dim
from flexattn.kernels_triton.launch import kernel, launch
from flexattn.kernels_triton.primitives import (
    load_sequence,
    load_tile,
    padding_rows,
    row_pointer,
    row_steps,
    store_tile,
    store_zeros,
    transposed_column,
)
from flexattn.kernels_triton.problem import Problem, row_strides

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LARGEST_SCALE = tl.constexpr(2.0**120)
GOLDEN = tl.constexpr(0x9E3779B1)

_ROWS = 64
_PASS_ROWS = 128  # of a program, where the scales do not say
_TILE = Tile(_ROWS, 32, 4, 1)
_COLUMNS = Tile(64, 32, 4, 1)  # tokens that a program of the transposition takes


class _Meta(NamedTuple):
    """What the pass is compiled for; the names that `primitives` read are `Meta`'s."""

    HAS_LENGTHS: bool
    IS_RAGGED: bool
    HAS_GAPS: bool
    ALIGN: int
    WIDE_STRIDES: bool
    HEAD_DIM: int
    D0: int
    D1: int
    ROWS: int
    BLOCK_ROWS: int  # of a program
    BY_BLOCK: bool  # each block of rows has a scale
    ROTATION: int  # how many channels are mixed; 0: none


@triton.jit
def rotation_tile(FIRST: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, IS_INVERSE: tl.constexpr):
    # Channels FIRST .. FIRST + ROWS of the rotation, times sqrt(SIZE): signs of a hash, then Hadamard matrices down the diagonal.
    i = FIRST + tl.arange(0, ROWS)[:, None]
    j = FIRST + tl.arange(0, ROWS)[None, :]
    both = i & j & (SIZE - 1)
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    signed = j if IS_INVERSE else i
    both ^= ((signed.to(tl.int64) * GOLDEN) >> 15).to(tl.int32)
    return tl.where(i // SIZE == j // SIZE, 1.0 - 2.0 * (both & 1).to(tl.float32), 0.0)


@triton.jit
def rotate_tile(x, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, IS_INVERSE: tl.constexpr):
    # Signs are exact in every dtype, so the products are too.
    matrix = rotation_tile(FIRST, WIDTH, SIZE, IS_INVERSE).to(x.dtype)
    return tl.dot(x, matrix, input_precision="ieee") / tl.sqrt(tl.full([], SIZE, tl.float32))


@triton.jit
def _load_rows(base, step, offsets, row, length, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    pointer = base + tl.cast(row, tl.int64) * step
    x = load_tile(pointer, offsets, row, length, META.ROWS, COLUMN, WIDTH, META.HEAD_DIM, True)
    if META.ROTATION > 0:
        return rotate_tile(x, COLUMN, WIDTH, META.ROTATION, False)
    else:
        return x.to(tl.float32)


@triton.jit
def _finite_amax(x):
    x = tl.abs(x)
    return tl.max(tl.max(tl.where(x < float("inf"), x, 0.0), 1), 0)


@triton.jit
def _to_fp8(x, scale, DTYPE: tl.constexpr):
    return tl.where(tl.abs(x) < float("inf"), x * scale, float("nan")).to(DTYPE)


@kernel
def _quantize_kernel(
    x_ptr,
    stride_xb,
    stride_xs,
    stride_xh,
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_heads,
    num_tokens,
    max_seqlen,
    scale_ptr,  # or None: from the amax
    stride_ab,  # of scale, amax and descale by batch and head, unless there is one for each block
    stride_ah,
    range_scale,  # the dtype's largest value * 2**-margin
    found_ptr,  # the amax, of each block or, 0 before, of all; found with FINDS_AMAX, else read where there is no scale
    descale_ptr,  # written with data where there is no scale
    data_ptr,  # or None
    stride_db,
    stride_ds,
    stride_dh,
    FINDS_AMAX: tl.constexpr,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.ROWS
    blocks = tl.cdiv(max_seqlen, META.BLOCK_ROWS)
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % num_heads
    b = tl.program_id(0) // blocks // num_heads
    start, length, slot = load_sequence(
        cu_seqlens_ptr, cu_seqlens_padded_ptr, b, batch, num_tokens, max_seqlen, META.IS_RAGGED, META.HAS_GAPS, META
    )
    first = block * META.BLOCK_ROWS
    last = tl.minimum(first + META.BLOCK_ROWS, length)
    x_base = row_pointer(x_ptr, b, h, start, stride_xb, stride_xs, stride_xh, META)
    x_step, x_offsets = row_steps(stride_xs, ROWS, META)
    program = (b * num_heads + h) * blocks + block
    amax = tl.zeros([], tl.float32)
    if FINDS_AMAX:
        for row in range(first, last, ROWS):
            amax = tl.maximum(amax, _finite_amax(_load_rows(x_base, x_step, x_offsets, row, length, 0, META.D0, META)))
            if META.D1 > 0:
                amax = tl.maximum(amax, _finite_amax(_load_rows(x_base, x_step, x_offsets, row, length, META.D0, META.D1, META)))
        if META.BY_BLOCK:
            tl.store(found_ptr + program, amax)
        else:  # the bits of numbers that are not negative order as they do, and no order of the maxima changes the largest
            tl.atomic_max(
                (found_ptr + b * stride_ab + h * stride_ah).to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True)
            )
    if data_ptr is not None:
        group = b * stride_ab + h * stride_ah
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + group)
        else:
            if not FINDS_AMAX:
                amax = tl.load(found_ptr + group)
            scale = tl.div_rn(range_scale, tl.where(amax > 0.0, amax, 1.0))
            scale = tl.where((amax > 0.0) & (scale <= LARGEST_SCALE), scale, 1.0)
            tl.store(descale_ptr + (program if FINDS_AMAX else group), tl.div_rn(1.0, scale))
        data_base = row_pointer(data_ptr, b, h, start, stride_db, stride_ds, stride_dh, META)
        data_step, data_offsets = row_steps(stride_ds, ROWS, META)
        if META.HAS_LENGTHS:
            begin, end = padding_rows(first, last, slot, block == blocks - 1, META.BLOCK_ROWS)
            begin = tl.where(first < length, tl.minimum(last, end), first)
            store_zeros(data_base, data_step, data_offsets, begin, end, ROWS, META.HEAD_DIM, META.D0, META.D1)
        DTYPE: tl.constexpr = data_ptr.dtype.element_ty
        for row in range(first, last, ROWS):
            pointer = data_base + tl.cast(row, tl.int64) * data_step
            x0 = _load_rows(x_base, x_step, x_offsets, row, length, 0, META.D0, META)
            store_tile(pointer, _to_fp8(x0, scale, DTYPE), data_offsets, row, last, ROWS, 0, META.D0, META.HEAD_DIM)
            if META.D1 > 0:
                x1 = _load_rows(x_base, x_step, x_offsets, row, length, META.D0, META.D1, META)
                store_tile(pointer, _to_fp8(x1, scale, DTYPE), data_offsets, row, last, ROWS, META.D0, META.D1, META.HEAD_DIM)


def quantize(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: int,
    scale: Tensor | None,
    data: Tensor,
    sizes: tuple[int, int, int],
    block_rows: int,
    margin: int,
    rotation: bool,
) -> tuple[Tensor, Tensor]:
    """Write x * scale into `data`, and return (descale, amax), fp32 of `sizes`.

    x and data are [b, s, h, d] or [total, h, d] in any strides with a contiguous last dim. sizes: [b | 1, h | 1, blocks | 1], what
    has a scale of its own; with block_rows above 0 each block of that many rows has. scale: fp32 [h | 1], or None: from the amax.
    NaN and infinity become NaN and count for no amax; rows beyond a sequence's end are 0.
    """
    ragged = x.dim() == 3
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else x.shape[0]
    heads, head_dim = x.shape[-2:]
    longest = max(1, max_seqlen if ragged else x.shape[1])
    rows = block_rows or _PASS_ROWS
    blocks = triton.cdiv(longest, rows)
    if batch == 0:
        data.zero_()
        return x.new_ones(sizes, dtype=torch.float32), x.new_zeros(sizes, dtype=torch.float32)
    strides = [(0 if size == 1 else stride) for t in (x, data) for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    align = 16 if all(stride % 16 == 0 for stride in strides) else 8 if all(stride % 8 == 0 for stride in strides) else 1
    d0, d1 = split_head_dim(head_dim)
    meta = _Meta(
        HAS_LENGTHS=cu_seqlens is not None,
        IS_RAGGED=ragged,
        HAS_GAPS=cu_seqlens_padded is not None,
        ALIGN=align,
        WIDE_STRIDES=any(abs(t.stride(-3)) * rows >= 2**31 for t in (x, data)),
        HEAD_DIM=head_dim,
        D0=d0,
        D1=d1,
        ROWS=_ROWS,
        BLOCK_ROWS=rows,
        BY_BLOCK=block_rows > 0,
        ROTATION=head_dim & -head_dim if rotation else 0,
    )
    amax = x.new_empty(sizes, dtype=torch.float32) if block_rows else x.new_zeros(sizes, dtype=torch.float32)
    descale = (
        x.new_empty(sizes, dtype=torch.float32) if scale is None else scale.reciprocal().view(1, -1, 1).expand(sizes).contiguous()
    )
    lengths = (cu_seqlens, cu_seqlens_padded, batch, heads, x.shape[-3], longest)
    # The amax of all must be known before the first cast, that of a block or of an earlier step is.
    for target, finds_amax in ((data, True),) if block_rows or scale is not None else ((None, True), (data, False)):
        of_scale = (scale, *_strides(sizes), LARGEST[data.dtype] * 2.0**-margin, amax, descale)
        arguments = (x, *row_strides(x, meta), *lengths, *of_scale, target, *row_strides(data, meta), finds_amax, meta)
        launch(_quantize_kernel, batch * heads * blocks, x.device, _TILE, arguments)
    return descale, amax


def _strides(sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Of batch and head in a contiguous tensor of these sizes, 0 where it has one."""
    return (sizes[1] if sizes[0] > 1 else 0, 1 if sizes[1] > 1 else 0)


@kernel
def _unrotate_kernel(x_ptr, out_ptr, num_rows, META: tl.constexpr):
    ROWS: tl.constexpr = META.ROWS
    first = tl.program_id(0) * ROWS
    base = tl.cast(first, tl.int64) * META.HEAD_DIM
    offsets = tl.arange(0, ROWS) * META.HEAD_DIM
    x0 = load_tile(x_ptr + base, offsets, first, num_rows, ROWS, 0, META.D0, META.HEAD_DIM, True)
    y0 = rotate_tile(x0, 0, META.D0, META.ROTATION, True)
    store_tile(out_ptr + base, y0, offsets, first, num_rows, ROWS, 0, META.D0, META.HEAD_DIM)
    if META.D1 > 0:
        x1 = load_tile(x_ptr + base, offsets, first, num_rows, ROWS, META.D0, META.D1, META.HEAD_DIM, True)
        y1 = rotate_tile(x1, META.D0, META.D1, META.ROTATION, True)
        store_tile(out_ptr + base, y1, offsets, first, num_rows, ROWS, META.D0, META.D1, META.HEAD_DIM)


def unrotate(x: Tensor) -> Tensor:
    """The gradient of what `quantize` rotates, from that of the rotated: x times the rotation's transpose; x is contiguous."""
    head_dim = x.shape[-1]
    d0, d1 = split_head_dim(head_dim)
    meta = _Meta(False, False, False, 8, False, head_dim, d0, d1, _ROWS, _ROWS, False, head_dim & -head_dim)
    out = torch.empty_like(x)
    num_rows = x.numel() // head_dim
    launch(_unrotate_kernel, triton.cdiv(num_rows, _ROWS), x.device, _TILE, (x, out, num_rows, meta))
    return out


@triton.jit
def _transpose_part(
    out_base, stride_od, column, pointer, offsets, first, length, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr
):
    d = COLUMN + tl.arange(0, WIDTH)
    x = load_tile(pointer, offsets, first, length, META.ROWS, COLUMN, WIDTH, META.HEAD_DIM, True)
    inside = (d < META.HEAD_DIM)[:, None] & (first + tl.arange(0, META.ROWS) // 16 * 16 < length)[None, :]
    tl.store(out_base + d.to(tl.int64)[:, None] * stride_od * 16 + column[None, :], tl.trans(x), mask=inside)


@kernel
def _transpose_kernel(
    x_ptr,
    stride_xb,
    stride_xs,
    stride_xh,
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_heads,
    num_tokens,
    max_seqlen,
    out_ptr,  # [b, h, d, columns] or [h, d, columns]
    stride_ob,  # in units of 16
    stride_oh,
    stride_od,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.ROWS
    blocks = tl.cdiv(max_seqlen, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    h = tl.program_id(0) // blocks % num_heads
    b = tl.program_id(0) // blocks // num_heads
    start, length, _ = load_sequence(
        cu_seqlens_ptr, cu_seqlens_padded_ptr, b, batch, num_tokens, max_seqlen, META.IS_RAGGED, META.HAS_GAPS, META
    )
    if first >= length:
        return
    pointer = row_pointer(x_ptr, b, h, start + first, stride_xb, stride_xs, stride_xh, META)
    _, offsets = row_steps(stride_xs, ROWS, META)
    column = transposed_column(start, b, META.IS_RAGGED) + first + tl.arange(0, ROWS)
    out_base = out_ptr + (tl.cast(b, tl.int64) * stride_ob + tl.cast(h, tl.int64) * stride_oh) * 16
    _transpose_part(out_base, stride_od, column, pointer, offsets, first, length, 0, META.D0, META)
    if META.D1 > 0:
        _transpose_part(out_base, stride_od, column, pointer, offsets, first, length, META.D0, META.D1, META)


def transpose_tokens(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, max_seqlen: int) -> Tensor:
    """A copy of FP8 x, [b, s, h, d] or [total, h, d], with the tokens innermost: [b, h, d, columns] or [h, d, columns].

    Every row begins at a multiple of 16 bytes, and so does every sequence within its row, where `transposed_column` says; zeros
    fill its last 16 bytes, and what lies between sequences beyond that is not written.
    """
    ragged = x.dim() == 3
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else x.shape[0]
    tokens, heads, head_dim = x.shape[-3:]
    columns = triton.cdiv(tokens + (16 * batch if ragged else 0), 16) * 16
    out = x.new_empty((*(() if ragged else (batch,)), heads, head_dim, columns))
    d0, d1 = split_head_dim(head_dim)
    strides = [(0 if size == 1 else stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    align = 16 if all(stride % 16 == 0 for stride in strides) else 8 if all(stride % 8 == 0 for stride in strides) else 1
    meta = _Meta(
        cu_seqlens is not None, ragged, cu_seqlens_padded is not None, align, abs(x.stride(-3)) * _ROWS >= 2**31, head_dim, d0, d1,
        _COLUMNS.block_m, _COLUMNS.block_m, False, 0,
    )  # fmt: skip
    longest = max(1, max_seqlen if ragged else tokens)
    lengths = (cu_seqlens, cu_seqlens_padded, batch, heads, tokens, longest)
    strides_out = (0 if ragged else out.stride(0) // 16, out.stride(-3) // 16, out.stride(-2) // 16)
    programs = triton.cdiv(longest, _COLUMNS.block_m) * heads * batch
    launch(_transpose_kernel, programs, x.device, _COLUMNS, (x, *row_strides(x, meta), *lengths, out, *strides_out, meta))
    return out


def transposed(problem: Problem, name: Literal["q", "k", "v"], x: Tensor | None = None) -> tuple[Any, int, int, int]:
    """What a kernel takes of a transposed copy: the tensor and its strides by batch, head and channel, in units of 16.

    x: what lies as the problem's tensor of that name does, and is copied in its place. Nothing where the problem is not FP8.
    """
    if not problem.is_fp8:
        return None, 0, 0, 0
    p = problem
    x = getattr(p, name) if x is None else x
    of_q = (p.cu_seqlens_q, p.cu_seqlens_q_padded, p.longest_q)
    lengths = of_q if name == "q" else (p.cu_seqlens_kv, p.cu_seqlens_kv_padded, p.longest_kv)
    copy = transpose_tokens(x, *lengths)
    return copy, 0 if copy.dim() == 3 else copy.stride(0) // 16, copy.stride(-3) // 16, copy.stride(-2) // 16
