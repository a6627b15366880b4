"""The statistics of a backward's queries: lse in units of log2, delta, and a factor that normalises fp32."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.fp8_tiles import load_descale
from flexattn.kernels_triton.common.lse_rows import lse_row
from flexattn.kernels_triton.common.tile_memory import load_tile


class Queries(NamedTuple):
    """The queries of one sequence and head, inside a kernel."""

    b: tl.tensor
    h: tl.tensor
    num_heads: tl.tensor
    start: tl.tensor
    length: tl.tensor
    num_tokens: tl.tensor  # tokens of all sequences if they are packed, otherwise of each


@triton.jit
def make_row_statistics(dout0, dout1, saved, scale, queries, first_row, META: tl.constexpr):
    # Returns (lse in units of log2, sum(out * dout) - dlse) of rows with their dout. The lse is +inf for a row that sees nothing or
    # does not exist. scale: of dout in FP8.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    out_pointer = row_pointer(saved.out, queries.b, queries.h, queries.start + first_row, META)
    _, out_offsets = row_steps(saved.out.stride_s, BLOCK_M, META)
    out0 = load_tile(out_pointer, out_offsets, first_row, queries.length, 0, META.V0, META.HEAD_DIM_V, True)
    delta = tl.sum(out0.to(tl.float32) * dout0.to(tl.float32), 1)
    if META.V1 > 0:
        out1 = load_tile(out_pointer, out_offsets, first_row, queries.length, META.V0, META.V1, META.HEAD_DIM_V, True)
        delta += tl.sum(out1.to(tl.float32) * dout1.to(tl.float32), 1)
    if META.IS_FP8:
        delta *= load_descale(scale, queries.b, queries.h, first_row, queries.length, META)
    row = lse_row(queries.b, queries.h, queries.num_heads, queries.num_tokens, queries.start, META)
    if saved.dlse_ptr is not None:
        delta -= tl.load(saved.dlse_ptr + row + rows, mask=rows < queries.length, other=0.0)
    lse = tl.load(saved.lse_ptr + row + rows, mask=rows < queries.length, other=float("inf"))
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    return lse_log2, delta


@triton.jit
def statistics_row(b, h, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    # Returns the first index of a sequence and head in the backward's own statistics, whichever kernel wrote them. For dense
    # tensors it is a multiple of 16 bytes, so that several elements are loaded at a time.
    if META.IS_RAGGED_Q:
        return tl.cast(h, tl.int64) * num_tokens_q + start_q
    else:
        return tl.cast(b * num_heads + h, tl.int64) * (tl.cdiv(num_tokens_q, 4) * 4)


class RowStatistics(NamedTuple):
    """The statistics of a tile's queries, inside a kernel."""

    lse_log2: tl.tensor  # in units of log2; +inf makes every probability of a row exactly 0
    delta: tl.tensor
    p_scale: float | tl.tensor


@triton.jit
def load_row_statistics(statistics, row, num_rows, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr, META: tl.constexpr):
    # Loads the statistics of ROWS rows from `row` on, of which num_rows exist.
    rows = tl.arange(0, ROWS)
    lse_log2_ptr = statistics.lse_log2_ptr + row
    delta_ptr = statistics.delta_ptr + row
    if not META.IS_RAGGED_Q:
        lse_log2_ptr = tl.multiple_of(lse_log2_ptr, 16)
        delta_ptr = tl.multiple_of(delta_ptr, 16)
    p_scale = tl.full([1], 1.0, tl.float32)
    if CHECK_ROWS:
        lse_log2 = tl.load(lse_log2_ptr + rows, mask=rows < num_rows, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < num_rows, other=0.0)
        if META.NORMALIZES:
            p_scale = tl.load(statistics.p_scale_ptr + row + rows, mask=rows < num_rows, other=1.0)
    else:
        lse_log2 = tl.load(lse_log2_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        if META.NORMALIZES:
            p_scale = tl.load(statistics.p_scale_ptr + row + rows)
    return RowStatistics(lse_log2=lse_log2, delta=delta, p_scale=p_scale)


@triton.jit
def by_rows(statistics):
    # For a tile [queries, keys].
    p_scale = statistics.p_scale[:, None]
    return RowStatistics(lse_log2=statistics.lse_log2[:, None], delta=statistics.delta[:, None], p_scale=p_scale)


@triton.jit
def by_columns(statistics):
    # For a tile [keys, queries].
    p_scale = statistics.p_scale[None, :]
    return RowStatistics(lse_log2=statistics.lse_log2[None, :], delta=statistics.delta[None, :], p_scale=p_scale)
