"""The kernel before a backward, which computes lse in units of log2 and delta of each query.

It reads dout, so it also quantises dout to FP8 if dout comes in 16 bits. For a fused backward it writes the zeros to which dq is
added, because a separate fill would cost a launch.

A probability is exp(logit - lse), and some lse are so large that fp32 is too coarse for it. An lse of 1e4 is a multiple of 2**-10.
In a row that a bias hides completely, an lse of -1e9 is a multiple of 64. Then the row's probabilities would have an arbitrary sum.
For such rows the backward first subtracts lse from the logits, which is exact for the large weights, and then subtracts the
remainder: the logarithm of the sum of exp(logit - lse). `large_rows` launches a kernel that computes it in a second pass over the
keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Lengths, Pointer, Rows, Saved, Scale, Statistics
from flexattn.kernels_triton.common.band import visible_keys, visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import every_tile, listed_tile
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.fp8_tiles import descaled, load_descale
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import large_part, load_large, lse_row
from flexattn.kernels_triton.common.padding import store_zeros
from flexattn.kernels_triton.common.problem import Backward, Problem, rows
from flexattn.kernels_triton.common.quantize import LARGEST, largest_of_rows, scale_of, to_fp8
from flexattn.kernels_triton.common.row_statistics import Queries, make_row_statistics, statistics_row
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink, sink_probability
from flexattn.kernels_triton.common.statistics_tiles import place_of_program, statistics_tile
from flexattn.kernels_triton.common.tile_memory import load_parts, load_tile, store_tile
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT, PREPROCESS, PREPROCESS_OF_FP8, PREPROCESS_OF_WIDE_FP8, cdiv
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch


class LargeRows(NamedTuple):
    """lse as a backward reads it; if logits are bounded, only `rest` is set, and it is lse itself."""

    remainder: Tensor  # lse, but in a row with a large lse the remainder after lse is subtracted from the logits
    is_any: Tensor | None  # int32 [1]: 1 if such rows exist
    lse: Tensor | None


class LargeRowsArguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    lse_ptr: Pointer
    rest_ptr: Pointer
    is_any_ptr: Pointer  # 0 before the launch


@kernel
def _attn_bwd_large_rows_kernel(args: LargeRowsArguments, IS_PART: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    lengths_q = inputs.lengths_q
    lengths_kv = inputs.lengths_kv
    num_heads = inputs.num_heads
    num_tokens_q = lengths_q.num_tokens
    blocks = tl.cdiv(lengths_q.max_seqlen, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    row = lse_row(b, h, num_heads, num_tokens_q, start_q, META)
    lse = tl.load(args.lse_ptr + row + rows, mask=rows < len_q, other=0.0)
    shift = large_part(lse)
    if tl.max(tl.abs(shift), 0) == 0.0:
        tl.store(args.rest_ptr + row + rows, lse, mask=rows < len_q)
        return
    tl.store(args.is_any_ptr, 1)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if not IS_PART:
        start_kv, len_kv = load_sequence(lengths_kv, b, META.IS_RAGGED_KV)
        h_kv = h // inputs.group_size
        q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
        k_base = row_pointer(inputs.k, b, h_kv, start_kv, META)
        _, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
        k_step, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
        shift_of_band = (len_kv - len_q) * inputs.band.bottom_right
        head = head_of(inputs.scores, b, h, len_q, len_kv, shift_of_band, MODS, META)
        q = load_parts(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK)
        visible = visible_range_of_keys(first_row, len_kv, shift_of_band, inputs.band, META)
        tiles = every_tile(visible, args.lists, b, h, first_row, META)
        for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
            n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
            i = rows[:, None]
            j = (n + tl.arange(0, BLOCK_N))[None, :]
            k_pointer = k_base + tl.cast(n, tl.int64) * k_step
            k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
            qk = tl.dot(q.first, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T
            if META.QK1 > 0:
                k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
                qk = tl.dot(q.second, tl.trans(k1), qk, input_precision=META.PRECISION)
            score_scale = inputs.scores.scale
            if META.IS_FP8:
                scales = inputs.scales
                descale = load_descale(scales.q, b, h, first_row, len_q, META) * load_descale(scales.k, b, h_kv, n, len_kv, META)
                qk, score_scale = descaled(qk, descale, score_scale, META)
            s, _factor, _cap_tanh, _score = logits(qk, i, j, score_scale, head, MODS, META)
            s = tl.where(visible_keys(i, j, len_kv, shift_of_band, inputs.band, META), s, float("-inf"))
            if META.HAS_MASK_MOD:
                s = tl.where(MODS.mask(b, h, i, j, head.captures) | is_full, s, float("-inf"))
            row_sum += tl.sum(tl.exp2((s - shift[:, None]) * LOG2E), 1)
        if META.HAS_SINK:
            row_sum += tl.exp2((load_sink(inputs.softmax_offset_ptr, h, 1.0, META) - shift) * LOG2E)
    remainder = tl.where(row_sum == 0.0, 0.0, tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)) * LN2)
    tl.store(args.rest_ptr + row + rows, tl.where(shift == 0.0, lse, remainder), mask=rows < len_q)


def large_rows(problem: Problem, lse: Tensor) -> LargeRows:
    """Returns lse as a backward reads it. For a part of the keys (`Problem.is_part`) the remainder of a large lse is 0."""
    x = problem
    if not x.is_unbounded:
        return LargeRows(lse, None, None)
    if x.block_mask is not None and x.block_mask.kv_num_blocks is None:  # made from the mask_mod, which defines the mask completely
        x = x.without_block_mask()
    tile = x.tile(BIAS_GRADIENT)._replace(num_warps=4)  # most programs find no large row: more of them run at once
    meta = x.meta(tile)
    remainder, is_any = torch.empty_like(lse), torch.zeros(1, dtype=torch.int32, device=x.device)
    programs = cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    args = LargeRowsArguments(inputs=x.inputs(meta), lists=x.lists("kv"), lse_ptr=lse, rest_ptr=remainder, is_any_ptr=is_any)
    launch(_attn_bwd_large_rows_kernel, programs, x.device, tile, (args, x.is_part, x.mods, meta))
    return LargeRows(remainder, is_any, lse)


class TiledStatistics(NamedTuple):
    """Memory for the statistics in tiles of SIZE queries: [tiles, 2, SIZE], -lse in units of log2 and -delta.

    -lse is -inf for a row that does not exist or sees nothing.
    """

    ptr: Pointer
    tiles: int  # tiles of one head: of all sequences if they are packed, otherwise of one sequence
    # fp32 sums of dq [tiles * SIZE, HEAD_DIM_QK], or None. The kernel writes zeros into tile 0 and into each tile that has a query.
    dq_sums_ptr: WidePointer
    # int32 [b, h], or None. The kernel writes zeros, from which a backward counts the key blocks that it has added to the sums.
    dq_arrivals_ptr: Pointer


class Quantized(NamedTuple):
    """Outputs for dout in FP8."""

    rows: Rows
    descale_ptr: Pointer  # [b, h, blocks], contiguous
    # At least the blocks that the kernel has for a sequence: max_seqlen_q may be more than the tokens of a packed call.
    blocks: int
    range_scale: float  # the largest value of its dtype


class PreprocessArguments(NamedTuple):
    saved: Saved
    dout: Rows
    quantized: Quantized | None
    large_ptr: Pointer  # for unbounded logits: whether any lse is large, from `large_rows`
    large_lse_ptr: Pointer
    softmax_offset_ptr: Pointer
    scale_dout: Scale | None
    lengths: Lengths
    num_heads: int
    lse_log2_ptr: Pointer  # indexed by `statistics_row`: lse in units of log2, +inf for a row that sees nothing
    delta_ptr: Pointer  # sum(out * dout) - dlse
    tiled: TiledStatistics | None  # used instead if SIZE > 0
    dsink_ptr: Pointer  # [h, b * blocks], or None: the contribution of each query block to the gradient of softmax_offset


@triton.jit
def _rows_with_tiles(length, SIZE: tl.constexpr):
    # The queries of a sequence, rounded up to whole tiles of statistics
    return tl.cdiv(length, SIZE) * SIZE if SIZE > 0 else length


@kernel
def _attn_bwd_preprocess_kernel(
    args: PreprocessArguments,
    ROWS: tl.constexpr,  # rows of a program, processed META.BLOCK_M at a time
    SIZE: tl.constexpr,
    META: tl.constexpr,
):
    lengths = args.lengths
    batch = lengths.batch
    num_heads = args.num_heads
    num_tokens_q = lengths.num_tokens
    tiles_ptr = args.tiled.ptr
    dsink_ptr = args.dsink_ptr
    quantized = args.quantized
    blocks = tl.cdiv(_rows_with_tiles(lengths.max_seqlen, SIZE), ROWS)
    block, h, b = place_of_program(blocks, num_heads)
    start_q, len_q = load_sequence(lengths, b, META.IS_RAGGED_Q)
    first_row = block * ROWS
    end = _rows_with_tiles(len_q, SIZE)
    if SIZE > 0:  # the first condition is known at compile time, the second at run time
        if tl.program_id(0) == 0:
            tile_offsets = tl.arange(0, SIZE)
            tl.store(tiles_ptr + tile_offsets, tl.full([SIZE], float("-inf"), tl.float32))
            tl.store(tiles_ptr + SIZE + tile_offsets, tl.zeros([SIZE], tl.float32))
            if args.tiled.dq_sums_ptr is not None:  # a persistent backward uses it as counters
                tl.store(args.tiled.dq_sums_ptr + tile_offsets, tl.zeros([SIZE], tl.float32))
        if args.tiled.dq_arrivals_ptr is not None:  # noqa: SIM102
            if block == 0:
                tl.store(args.tiled.dq_arrivals_ptr + b * num_heads + h, 0)
    if first_row >= end:
        if quantized.rows.ptr is not None:
            tl.store(quantized.descale_ptr + (b * num_heads + h) * quantized.blocks + block, 1.0)
        if dsink_ptr is not None:
            tl.store(dsink_ptr + (h * batch + b) * blocks + block, 0.0)
        return
    BLOCK_M: tl.constexpr = META.BLOCK_M
    if args.tiled.dq_sums_ptr is not None:
        WIDTH: tl.constexpr = META.HEAD_DIM_QK
        first_tile = statistics_tile(b, h, num_heads, packed_start(lengths, b, start_q), args.tiled.tiles, META, SIZE)
        sums = args.tiled.dq_sums_ptr + tl.cast(first_tile, tl.int64) * (SIZE * WIDTH)
        zeros_end = tl.minimum(first_row + ROWS, end)
        store_zeros(sums, WIDTH, tl.arange(0, BLOCK_M) * WIDTH, first_row, zeros_end, WIDTH, META.QK0, META.QK1)
    dout_base = row_pointer(args.dout, b, h, start_q + first_row, META)
    dout_step, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    scale, descale = 1.0, 1.0
    if quantized.rows.ptr is not None:
        largest = tl.zeros([BLOCK_M], tl.float32)
        for row in range(0, ROWS, BLOCK_M):
            dout0, dout1 = load_parts(
                dout_base + row * dout_step, dout_offsets, first_row + row, len_q, META.V0, META.V1, META.HEAD_DIM_V
            )
            largest = tl.maximum(largest, largest_of_rows(dout0.to(tl.float32)))
            if META.V1 > 0:
                largest = tl.maximum(largest, largest_of_rows(dout1.to(tl.float32)))
        scale = scale_of(tl.max(largest, 0), quantized.range_scale)
        descale = tl.div_rn(1.0, scale)
        tl.store(quantized.descale_ptr + (b * num_heads + h) * quantized.blocks + block, descale)
    dsink = 0.0
    queries = Queries(b=b, h=h, num_heads=num_heads, start=start_q, length=len_q, num_tokens=num_tokens_q)
    for row in range(0, ROWS, BLOCK_M):
        first = first_row + row
        rows = first + tl.arange(0, BLOCK_M)
        dout0, dout1 = load_parts(dout_base + row * dout_step, dout_offsets, first, len_q, META.V0, META.V1, META.HEAD_DIM_V)
        if quantized.rows.ptr is not None:  # delta must match the dout that the products read
            DTYPE: tl.constexpr = quantized.rows.ptr.dtype.element_ty
            pointer = row_pointer(quantized.rows, b, h, start_q + first, META)
            offsets = row_steps(quantized.rows.stride_s, BLOCK_M, META)[1]
            small0 = to_fp8(dout0.to(tl.float32), scale, DTYPE)
            store_tile(pointer, small0, offsets, first, len_q, 0, META.V0, META.HEAD_DIM_V)
            dout0 = small0.to(tl.float32) * descale
            if META.V1 > 0:
                small1 = to_fp8(dout1.to(tl.float32), scale, DTYPE)
                store_tile(pointer, small1, offsets, first, len_q, META.V0, META.V1, META.HEAD_DIM_V)
                dout1 = small1.to(tl.float32) * descale
        lse_log2, delta = make_row_statistics(dout0, dout1, args.saved, args.scale_dout, queries, first, META)
        if SIZE > 0:
            place_q = packed_start(lengths, b, start_q)
            tile = statistics_tile(b, h, num_heads, place_q, args.tiled.tiles, META, SIZE) + rows // SIZE
            pointers = tiles_ptr + tl.cast(tile, tl.int64) * (2 * SIZE) + rows % SIZE
            tl.store(pointers, -lse_log2, mask=rows < end)
            tl.store(pointers + SIZE, -delta, mask=rows < end)
        else:
            row_base = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
            tl.store(args.lse_log2_ptr + row_base + rows, lse_log2, mask=rows < len_q)
            tl.store(args.delta_ptr + row_base + rows, delta, mask=rows < len_q)
        if dsink_ptr is not None:
            large = load_large(args.large_ptr, args.large_lse_ptr, num_heads, num_tokens_q, start_q, META)
            p_sink = sink_probability(args.softmax_offset_ptr, lse_log2, large, b, h, rows, len_q, META)
            dsink -= tl.sum(p_sink * delta, 0)
    if dsink_ptr is not None:
        tl.store(dsink_ptr + (h * batch + b) * blocks + block, dsink)


def new_statistics(problem: Problem, lse: Tensor) -> tuple[Statistics, Tensor]:
    """Returns (memory that `row_statistics` or the dq kernel fills, the remainder of lse from `large_rows`)."""
    x = problem
    num_tokens_q = x.q.shape[-3]
    rows = x.num_heads * (num_tokens_q if x.q.dim() == 3 else x.batch * cdiv(num_tokens_q, 4) * 4)
    lse_log2, delta, p_scale = torch.empty((3, rows), dtype=torch.float32, device=x.device)
    remainder, is_any, whole_lse = large_rows(x, lse)
    statistics = Statistics(lse_log2_ptr=lse_log2, delta_ptr=delta, p_scale_ptr=p_scale, large_ptr=is_any, large_lse_ptr=whole_lse)
    return statistics, remainder


def row_statistics(call: Backward) -> Statistics:
    """Returns `new_statistics` with lse_log2 and delta written; writes the gradient of softmax_offset, unless that is None.

    The kernels for the gradients of a bias and of captures read it if no dq kernel of `backward` runs; 16-bit types only.
    """
    statistics, remainder = new_statistics(call.problem, call.lse)
    large = LargeRows(remainder=remainder, is_any=statistics.large_ptr, lse=statistics.large_lse_ptr)
    _launch(call, large, statistics)
    return statistics


class Tiled(NamedTuple):
    """Results of `tiled_statistics`."""

    statistics: Tensor  # negated, in tiles: fp32 [all tiles * 2 * size]
    tiles: int  # tiles of one head
    large: LargeRows
    dq_sums: Tensor | None  # zeros, fp32 [all tiles * size, head dim], written only in rows of sequences
    dq_arrivals: Tensor | None  # zeros, int32 [b * h]


def tiled_statistics(call: Backward, size: int, *, with_dq_sums: bool = False, with_dq_arrivals: bool = False) -> Tiled:
    """Returns the statistics in tiles of `size` queries and, `with_dq_sums`, memory for the sums of dq in such tiles.

    with_dq_arrivals: whether the backward counts the key blocks that it has added.
    """
    x = call.problem
    num_tokens_q, head_dim = x.q.shape[-3], x.q.shape[-1]
    # tiles of one head: of all sequences if they are packed, otherwise of one sequence
    tiles = num_tokens_q // size + x.batch + 1 if x.q.dim() == 3 else cdiv(num_tokens_q, size)
    num_tiles = 1 + tiles * x.num_heads * (1 if x.q.dim() == 3 else x.batch)
    statistics = torch.empty(num_tiles * 2 * size, dtype=torch.float32, device=x.device)
    dq_sums = torch.empty((num_tiles * size, head_dim), dtype=torch.float32, device=x.device) if with_dq_sums else None
    arrivals = torch.empty(x.batch * x.num_heads, dtype=torch.int32, device=x.device) if with_dq_arrivals else None
    large = large_rows(x, call.lse)
    tiled = TiledStatistics(ptr=statistics, tiles=tiles, dq_sums_ptr=dq_sums, dq_arrivals_ptr=arrivals)
    _launch(call, large, tiled, size)
    return Tiled(statistics, tiles, large, dq_sums, arrivals)


def _launch(call: Backward, large: LargeRows, target: Statistics | TiledStatistics, size: int = 0) -> None:
    x, out, dout, dsoftmax_offset = call.problem, call.out, call.dout, call.dsoftmax_offset
    quantises, dout8, tile, program_rows = x.dout_is_to_come, dout, PREPROCESS, PREPROCESS.block_m
    if quantises:
        program_rows = x.scale_rows  # a program computes one scale
        dout, tile = x.copies16[0], PREPROCESS_OF_FP8 if x.v.shape[-1] <= 64 else PREPROCESS_OF_WIDE_FP8
    meta = x.meta(tile, (out, dout, dout8))._replace(IS_FP8=dout.element_size() == 1)
    if quantises:  # 8 elements a thread for FP8 too, so that a thread keeps the elements that it loaded
        meta = meta._replace(ALIGN=min(meta.ALIGN, 8))
    blocks = cdiv(cdiv(x.longest_q, size) * size if size else x.longest_q, program_rows)
    dsink = dsoftmax_offset.new_empty((x.num_heads, x.batch * blocks)) if dsoftmax_offset is not None else None
    quantized = None
    if quantises:
        descale = x.descales[3]
        quantized = Quantized(
            rows=rows(dout8, meta), descale_ptr=descale, blocks=descale.shape[2], range_scale=LARGEST[dout8.dtype]
        )
    args = PreprocessArguments(
        saved=Saved(out=rows(out, meta), lse_ptr=large.remainder, dlse_ptr=call.dlse),
        dout=rows(dout, meta),
        quantized=quantized,
        large_ptr=large.is_any,
        large_lse_ptr=large.lse,
        softmax_offset_ptr=x.softmax_offset,
        scale_dout=x.scales.dout if x.scales is not None else None,
        lengths=x.lengths_q,
        num_heads=x.num_heads,
        lse_log2_ptr=target.lse_log2_ptr if isinstance(target, Statistics) else None,
        delta_ptr=target.delta_ptr if isinstance(target, Statistics) else None,
        tiled=target if isinstance(target, TiledStatistics) else None,
        dsink_ptr=dsink,
    )
    launch(_attn_bwd_preprocess_kernel, blocks * x.num_heads * x.batch, x.device, tile, (args, program_rows, size, meta))
    if dsoftmax_offset is not None and dsink is not None:
        torch.sum(dsink, 1, out=dsoftmax_offset)
