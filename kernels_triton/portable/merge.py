"""The merge of attention over two sets of keys, in one kernel, which reads each row of both outs once and needs no other memory."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Pointer, Rows
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_TILE = Tile(16, 64, 4, 1)


class Arguments(NamedTuple):
    out: Rows
    out_a: Rows
    out_b: Rows
    lse_ptr: Pointer  # fp32 [b, h, num_tokens], like the two others
    lse_a_ptr: Pointer
    lse_b_ptr: Pointer
    num_heads: int
    num_tokens: int


class MergeMeta(NamedTuple):
    """Constants that the kernel is compiled for; shared functions read some by their names in `Meta`."""

    HEAD_DIM: int
    COLUMNS: int  # the head dim, rounded up to a power of two
    ROWS: int
    ALIGN: int
    WIDE_STRIDES: bool


@kernel
def _merge_kernel(args: Arguments, META: tl.constexpr):
    ROWS: tl.constexpr = META.ROWS
    num_tokens = args.num_tokens
    blocks = tl.cdiv(num_tokens, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    b_h = tl.program_id(0) // blocks
    b = b_h // args.num_heads
    h = b_h % args.num_heads
    rows = first + tl.arange(0, ROWS)
    is_row = rows < num_tokens
    place = tl.cast(b_h, tl.int64) * num_tokens + rows
    lse_a = tl.load(args.lse_a_ptr + place, mask=is_row, other=0.0)
    lse_b = tl.load(args.lse_b_ptr + place, mask=is_row, other=0.0)
    largest = tl.maximum(lse_a, lse_b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # avoids exp(-inf - -inf)
    weight_a = tl.exp(lse_a - largest)
    weight_b = tl.exp(lse_b - largest)
    total = weight_a + weight_b
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    tl.store(args.lse_ptr + place, tl.where(is_empty, float("-inf"), largest + tl.log(divisor)), mask=is_row)
    columns = tl.arange(0, META.COLUMNS)[None, :]
    inside = is_row[:, None] & (columns < META.HEAD_DIM)
    _, offsets_a = row_steps(args.out_a.stride_s, ROWS, META)
    _, offsets_b = row_steps(args.out_b.stride_s, ROWS, META)
    _, offsets = row_steps(args.out.stride_s, ROWS, META)
    a = tl.load(row_pointer(args.out_a, b, h, first, META) + offsets_a[:, None] + columns, mask=inside, other=0.0)
    c = tl.load(row_pointer(args.out_b, b, h, first, META) + offsets_b[:, None] + columns, mask=inside, other=0.0)
    share_a, share_b = weight_a / divisor, weight_b / divisor
    merged = share_a[:, None] * a.to(tl.float32) + share_b[:, None] * c.to(tl.float32)
    pointers = row_pointer(args.out, b, h, first, META) + offsets[:, None] + columns
    tl.store(pointers, merged.to(args.out.ptr.dtype.element_ty), mask=inside)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> None:
    """Writes out and lse of both sets of keys. Each pair: out [b, s, h, d] with any strides, and lse, contiguous fp32 [b, h, s]."""
    (out_a, lse_a), (out_b, lse_b), (out, lse) = a, b, results
    batch, tokens, heads, head_dim = out.shape
    if out.numel() == 0:
        return
    wide = any(abs(t.stride(1)) * _TILE.block_m >= 2**31 for t in (out, out_a, out_b))
    meta = MergeMeta(HEAD_DIM=head_dim, COLUMNS=triton.next_power_of_2(head_dim), ROWS=_TILE.block_m, ALIGN=1, WIDE_STRIDES=wide)
    args = Arguments(
        out=_rows(out),
        out_a=_rows(out_a),
        out_b=_rows(out_b),
        lse_ptr=lse,
        lse_a_ptr=lse_a,
        lse_b_ptr=lse_b,
        num_heads=heads,
        num_tokens=tokens,
    )
    launch(_merge_kernel, batch * heads * cdiv(tokens, _TILE.block_m), out.device, _TILE, (args, meta))


def _rows(x: Tensor) -> Rows:
    stride_b, stride_s, stride_h, _ = x.stride()
    return Rows(ptr=x, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)
