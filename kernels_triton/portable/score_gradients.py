"""The gradients that pass through the scores besides those of q and k: of a bias, and of the mods' captures.

A program for a bias of any broadcast shape sums one tile of its gradient over all scores that the tile was added to. The kernel for
captures recomputes the scores, and adds to the elements that the mod read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockKinds, BlockMaskLists, Inputs, Pointer, Rows, Statistics
from flexattn.kernels_triton.common.band import visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import every_tile, listed_tile
from flexattn.kernels_triton.common.capture_sums import sum_addends
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.fp8_tiles import descaled_products
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import load_large, lse_row
from flexattn.kernels_triton.common.preprocess import row_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem, rows
from flexattn.kernels_triton.common.row_statistics import by_rows, load_row_statistics, statistics_row
from flexattn.kernels_triton.common.scores import ScoreTile, score_gradient
from flexattn.kernels_triton.common.sequences import program_of_queries, sequence_of
from flexattn.kernels_triton.common.sinks import sink_probability
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT
from flexattn.kernels_triton.portable import shared_bias_gradient
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.launch import kernel, launch


class BiasParts(NamedTuple):
    """The gradient of a bias as partial sums: fp32 [num_splits, b, h, q, kv], contiguous."""

    ptr: Pointer
    b: int
    h: int
    q: int
    kv: int
    num_splits: int


class BiasArguments(NamedTuple):
    inputs: Inputs
    kinds: BlockKinds | None
    dout: Rows
    dlse_ptr: Pointer  # None: 0
    dbias: BiasParts
    statistics: Statistics


@triton.jit
def _row_gradient(b, h, first_row, sequence, large, args, META: tl.constexpr):
    # Returns the gradient of a number that is added to all scores of a row
    BLOCK_M: tl.constexpr = META.BLOCK_M
    inputs = args.inputs
    start_q, len_q, len_kv = sequence.start_q, sequence.len_q, sequence.len_kv
    num_heads, num_tokens_q = inputs.num_heads, inputs.lengths_q.num_tokens
    rows = first_row + tl.arange(0, BLOCK_M)
    first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    statistics = load_row_statistics(args.statistics, first_statistic + first_row, len_q - first_row, BLOCK_M, True, META)
    row_gradient = tl.zeros([BLOCK_M], tl.float32)
    if META.HAS_SINK:
        p_sink = sink_probability(inputs.softmax_offset_ptr, statistics.lse_log2, large, b, h, rows, len_q, META)
        row_gradient = p_sink * statistics.delta
    if args.dlse_ptr is not None:
        row = lse_row(b, h, num_heads, num_tokens_q, start_q, META)
        row_gradient += tl.load(args.dlse_ptr + row + rows, mask=rows < len_q, other=0.0)
    # 0 for a row that sees nothing or does not exist. With a sink and no key, the two terms cancel except for rounding.
    return tl.where((statistics.lse_log2 == float("inf")) | (len_kv == 0), 0.0, row_gradient)


@kernel
def _attn_bwd_dbias_kernel(
    args: BiasArguments,
    SPANS_Q: tl.constexpr,
    SPANS_KV: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    lengths_q, lengths_kv = inputs.lengths_q, inputs.lengths_kv
    batch, num_heads, num_tokens_q = lengths_q.batch, inputs.num_heads, lengths_q.num_tokens
    _, bias_b, bias_h, bias_q, bias_kv, num_splits = args.dbias
    blocks_m = tl.cdiv(bias_q, BLOCK_M)
    blocks_n = tl.cdiv(bias_kv, BLOCK_N)
    pid = tl.program_id(0)
    tile_n = pid % blocks_n
    tile_m = pid // blocks_n % blocks_m
    split = pid // blocks_n // blocks_m % num_splits
    tile_h = pid // blocks_n // blocks_m // num_splits % bias_h
    tile_b = pid // blocks_n // blocks_m // num_splits // bias_h
    # the dims that this tile was broadcast over: (batch, head, query block, key block), each 1 if the bias spans that dim
    over_b = batch // bias_b
    first_b = tile_b
    if inputs.scores.bias.group is not None:
        first_b = tile_b * inputs.scores.bias.group
    over_h = num_heads // bias_h
    over_m = 1 if SPANS_Q else tl.cdiv(lengths_q.max_seqlen, BLOCK_M)
    over_n = 1 if SPANS_KV or BY_ROWS else tl.cdiv(lengths_kv.max_seqlen, BLOCK_N)
    over = tl.cast(over_b * over_h, tl.int64) * over_m * over_n

    _q_step, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
    _dout_step, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    _k_step, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
    _v_step, v_offsets = row_steps(inputs.v.stride_s, BLOCK_N, META)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_by_row = tl.zeros([BLOCK_M], tl.float32)
    for t in range(split, over, num_splits):
        n = tile_n + tl.cast(t % over_n, tl.int32)
        m = tile_m + tl.cast(t // over_n % over_m, tl.int32)
        h = tile_h + tl.cast(t // over_n // over_m % over_h, tl.int32)
        b = first_b + tl.cast(t // over_n // over_m // over_h, tl.int32)
        sequence = sequence_of(lengths_q, lengths_kv, b, META)
        start_q, len_q, start_kv, len_kv = sequence.start_q, sequence.len_q, sequence.start_kv, sequence.len_kv
        shift = (len_kv - len_q) * inputs.band.bottom_right
        large = load_large(args.statistics.large_ptr, args.statistics.large_lse_ptr, num_heads, num_tokens_q, start_q, META)
        first_row = m * BLOCK_M
        first_column = n * BLOCK_N
        is_visible = (first_row < len_q) & (first_column < len_kv)
        if META.HAS_LEFT:
            is_visible = is_visible & (first_column + BLOCK_N - 1 - first_row - shift >= -inputs.band.left)
        if META.HAS_RIGHT:
            is_visible = is_visible & (first_column - (first_row + BLOCK_M - 1) - shift <= inputs.band.right)
        is_full = False
        if META.BLOCK_SIZE_Q > 0:
            row = b * args.kinds.stride_b + h * args.kinds.stride_h + first_row // META.BLOCK_SIZE_Q
            place = tl.cast(row, tl.int64) * args.kinds.length + first_column // META.BLOCK_SIZE_KV
            kind = tl.load(args.kinds.ptr + place, mask=is_visible)
            is_visible = is_visible & (kind > 0)
            is_full = kind == 2
        if BY_ROWS:
            row_gradient = _row_gradient(b, h, first_row, sequence, large, args, META)
            total_by_row += row_gradient * inputs.scores.scale if META.HAS_PRE_SCALE_BIAS else row_gradient
        elif is_visible:
            rows = first_row + tl.arange(0, BLOCK_M)
            columns = first_column + tl.arange(0, BLOCK_N)
            q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
            k_pointer = row_pointer(inputs.k, b, h // inputs.group_size, start_kv + first_column, META)
            v_pointer = row_pointer(inputs.v, b, h // inputs.group_size, start_kv + first_column, META)
            dout_pointer = row_pointer(args.dout, b, h, start_q + first_row, META)
            head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
            q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
            k0 = load_tile(k_pointer, k_offsets, first_column, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
            qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T
            if META.QK1 > 0:
                q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
                k1 = load_tile(k_pointer, k_offsets, first_column, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
                qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
            dout0 = load_tile(dout_pointer, dout_offsets, first_row, len_q, 0, META.V0, META.HEAD_DIM_V, True)
            v0 = load_tile(v_pointer, v_offsets, first_column, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
            dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)  # dP = dO V^T
            if META.V1 > 0:
                dout1 = load_tile(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V, True)
                v1 = load_tile(v_pointer, v_offsets, first_column, len_kv, META.V0, META.V1, META.HEAD_DIM_V, True)
                dp = tl.dot(dout1, tl.trans(v1), dp, input_precision=META.PRECISION)
            first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
            statistics = load_row_statistics(args.statistics, first_statistic + first_row, len_q - first_row, BLOCK_M, True, META)
            products = descaled_products(qk, dp, inputs, head, h // inputs.group_size, first_row, first_column, META)
            keep = True
            if META.HAS_DROPOUT:
                keep = dropout_keep(inputs, b, h, first_row, first_column, META)
            tile = ScoreTile(i=rows[:, None], j=columns[None, :], keep=keep, is_full=is_full, large=large)
            gradient = score_gradient(products, by_rows(statistics), tile, head, inputs, MODS, "keys", META)
            total += gradient.dscore * inputs.scores.scale if META.HAS_PRE_SCALE_BIAS else gradient.dlogit

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    base = args.dbias.ptr + ((tl.cast(split, tl.int64) * bias_b + tile_b) * bias_h + tile_h) * bias_q * bias_kv
    if SPANS_Q and SPANS_KV:
        inside = (row < bias_q)[:, None] & (column < bias_kv)[None, :]
        tl.store(base + row.to(tl.int64)[:, None] * bias_kv + column[None, :], total, mask=inside)
    elif SPANS_Q:
        tl.store(base + row, tl.sum(total, 1) + total_by_row, mask=row < bias_q)
    elif SPANS_KV:
        tl.store(base + column, tl.sum(total, 0), mask=column < bias_kv)
    else:
        tl.store(base, tl.sum(tl.sum(total, 1) + total_by_row, 0))


def bias_gradient(
    problem: Problem, statistics: Statistics, dout: Tensor, dlse: Tensor | None, dbias: Tensor, tile: Tile | None = None
) -> None:
    """Writes `dbias`, in the bias's shape, from the `statistics` that the dq kernel wrote; deterministic for any shape."""
    x = problem
    if x.bias is None:
        raise ValueError("bias_gradient needs a problem with a bias")
    tile = tile or x.tile(BIAS_GRADIENT)
    meta = x.meta(tile, (dout,))
    bias_b, bias_h, bias_q, bias_kv = x.bias.shape
    tiles = bias_b * bias_h * triton.cdiv(bias_q, tile.block_m) * triton.cdiv(bias_kv, tile.block_n)
    over = (x.batch // max(1, bias_b)) * (x.num_heads // bias_h)
    over *= 1 if bias_q > 1 else triton.cdiv(x.longest_q, tile.block_m)
    over *= 1 if bias_kv > 1 else triton.cdiv(x.longest_kv, tile.block_n)
    # enough programs to fill the device, if the bias alone is too small for that
    num_splits = max(1, min(over, 2 * num_processors(x.device) // max(1, tiles)))
    parts = torch.empty((num_splits, *x.bias.shape), dtype=torch.float32, device=x.device)
    args = BiasArguments(
        inputs=x.inputs(meta),
        kinds=x.kinds(),
        dout=rows(dout, meta),
        dlse_ptr=dlse,
        dbias=BiasParts(ptr=parts, b=bias_b, h=bias_h, q=bias_q, kv=bias_kv, num_splits=num_splits),
        statistics=statistics,
    )
    # A number that is added to all scores of a row is also added to its lse. Without a sink it does not change out. So its gradient
    # is computed from dlse and the sink, because a sum over the keys would be almost 0, with a large rounding error. For a part of
    # the keys it is that sum.
    features = x.features
    is_added = features.HAS_POST_SCALE_BIAS or not (features.HAS_SOFTCAP or features.HAS_SCORE_MOD)
    by_rows = is_added and bias_kv == 1 and not x.is_part
    launch(_attn_bwd_dbias_kernel, tiles * num_splits, x.device, tile, (args, bias_q > 1, bias_kv > 1, by_rows, x.mods, meta))
    dbias.copy_(parts.sum(0) if num_splits > 1 else parts[0])


class CaptureArguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    dout: Rows
    statistics: Statistics
    sums: Any  # a tuple: for each capture that needs a gradient a tensor, by MODE
    scales: Any  # a tuple: for each of `sums` its unit in mode "fixed", otherwise empty


@kernel
def _attn_bwd_captures_kernel(args: CaptureArguments, MODE: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    num_heads = inputs.num_heads
    num_tokens_q = inputs.lengths_q.num_tokens
    own = program_of_queries(tl.program_id(0), inputs, META)
    b, h = own.b, own.h
    start_q, len_q, start_kv, len_kv = own.sequence
    first_row = own.block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
    dout_pointer = row_pointer(args.dout, b, h, start_q + first_row, META)
    k_base = row_pointer(inputs.k, b, h // inputs.group_size, start_kv, META)
    v_base = row_pointer(inputs.v, b, h // inputs.group_size, start_kv, META)
    _, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
    _, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    k_step, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
    v_step, v_offsets = row_steps(inputs.v.stride_s, BLOCK_N, META)
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    large = load_large(args.statistics.large_ptr, args.statistics.large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    statistics = load_row_statistics(args.statistics, first_statistic + first_row, len_q - first_row, BLOCK_M, True, META)
    q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
    dout0 = load_tile(dout_pointer, dout_offsets, first_row, len_q, 0, META.V0, META.HEAD_DIM_V, True)
    q1 = q0
    dout1 = dout0
    if META.QK1 > 0:
        q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
    if META.V1 > 0:
        dout1 = load_tile(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V, True)
    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    tiles = every_tile(visible, args.lists, b, h, first_row, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
        columns = n + tl.arange(0, BLOCK_N)
        k_pointer = k_base + tl.cast(n, tl.int64) * k_step
        v_pointer = v_base + tl.cast(n, tl.int64) * v_step
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
        v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T, [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)  # dP = dO V^T
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
        if META.V1 > 0:
            v1 = load_tile(v_pointer, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, True)
            dp = tl.dot(dout1, tl.trans(v1), dp, input_precision=META.PRECISION)
        products = descaled_products(qk, dp, inputs, head, h // inputs.group_size, first_row, n, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = dropout_keep(inputs, b, h, first_row, n, META)
        tile = ScoreTile(i=rows[:, None], j=columns[None, :], keep=keep, is_full=is_full, large=large)
        gradient = score_gradient(products, by_rows(statistics), tile, head, inputs, MODS, "keys", META)
        dlogit, score, captures = gradient.dlogit, gradient.score, head.captures
        MODS.accumulate(dlogit, score, b, h, tile.i, tile.j, captures, args.sums, args.scales, MODE)


def capture_gradients(
    problem: Problem,
    statistics: Statistics,
    dout: Tensor,
    gradients: Sequence[Tensor],
    deterministic: bool,
    tile: Tile | None = None,
) -> None:
    """Writes `gradients`, contiguous, of the captures that need one, from the `statistics` that the dq kernel wrote."""
    x = problem
    tile = tile or x.tile(BIAS_GRADIENT)
    meta = x.meta(tile, (dout,))
    programs = triton.cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch

    def run(mode: str, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        args = CaptureArguments(
            inputs=x.inputs(meta),
            lists=x.lists("kv"),
            dout=rows(dout, meta),
            statistics=statistics,
            sums=tuple(sums),
            scales=tuple(scales),
        )
        launch(_attn_bwd_captures_kernel, programs, x.device, tile, (args, mode, x.mods, meta))

    sum_addends(run, gradients, deterministic, x.batch * x.num_heads * x.longest_q * x.longest_kv)


def bias_and_capture_gradients(call: Backward) -> None:
    """Writes the rest of a backward if other kernels computed dq, dk, dv and dsoftmax_offset; not for fp32."""
    if call.dbias is not None or call.dcaptures:
        score_gradients(call, row_statistics(call._replace(dsoftmax_offset=None)))


def score_gradients(call: Backward, statistics: Statistics) -> None:
    """Writes dbias, unless it is None, and dcaptures, from the statistics that the dq kernel wrote."""
    if call.dbias is not None and shared_bias_gradient.unsupported(call.problem) is None:
        shared_bias_gradient.shared_bias_gradient(call.problem, statistics, call.dout, call.dbias)
    elif call.dbias is not None:
        bias_gradient(call.problem, statistics, call.dout, call.dlse, call.dbias)
    if call.dcaptures:
        capture_gradients(call.problem, statistics, call.dout, call.dcaptures, call.deterministic)
