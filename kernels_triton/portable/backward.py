"""Portable backward attention: kernels for dq with delta and the sink's gradient, and for dk with dv; their launcher.

One program sums each output element in a fixed order. So the gradients are bitwise repeatable, without atomics and without a
workspace that grows with sq * skv. The cost is that each kernel recomputes the scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common import block_lists, row_statistics
from flexattn.kernels_triton.common.addressing import HeadRows, row_at, row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Channels, Head, Inputs, Parts, Pointer, Rows, Saved, Statistics
from flexattn.kernels_triton.common.band import visible_range_of_keys, visible_range_of_queries
from flexattn.kernels_triton.common.copies import packed_start, transposed_head
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.fp8_tiles import descaled_products, fp8_product, load_descale, to_fp8_rows
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import load_large
from flexattn.kernels_triton.common.padding import clear_padding, padding_rows
from flexattn.kernels_triton.common.preprocess import new_statistics
from flexattn.kernels_triton.common.problem import Backward, Meta, rows
from flexattn.kernels_triton.common.quantize import transposed
from flexattn.kernels_triton.common.scores import ScoreTile, score_gradient
from flexattn.kernels_triton.common.sequences import Program, program_of_queries, sequence_of
from flexattn.kernels_triton.common.sinks import sink_probability
from flexattn.kernels_triton.common.tile_memory import StoredRows, load_parts, load_tile, store_parts, zero_parts
from flexattn.kernels_triton.common.tiles import DKDV, DQ, cdiv
from flexattn.kernels_triton.portable.own_bias_gradient import owned_gradient, store_bias_gradient
from flexattn.kernels_triton.portable.score_gradients import score_gradients
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch


class _QuerySums(NamedTuple):
    dq0: tl.tensor
    dq1: tl.tensor
    row_sum: tl.tensor  # sum of the probabilities


class _QueryBlock(NamedTuple):
    """A block of queries, and the keys and values of its head."""

    head: Head
    h_kv: tl.tensor
    first_row: tl.tensor
    q: Parts
    dout: Parts
    statistics: row_statistics.RowStatistics
    large: Any
    k: HeadRows
    v: HeadRows
    k_t: Any  # in FP8: k with its tokens innermost
    dbias_ptr: Pointer


@triton.jit
def _attn_bwd_dq_loop(sums, block, tiles, inputs, MODS: tl.constexpr, IS_MASKED: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    head = block.head
    first_row = block.first_row
    len_kv = head.len_kv
    dq0 = sums.dq0
    dq1 = sums.dq1
    row_sum = sums.row_sum
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    k_pointer = row_at(block.k, tiles.begin)
    v_pointer = row_at(block.v, tiles.begin)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n, is_full = block_lists.listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
        if META.BLOCK_SIZE_Q > 0:
            k_pointer = row_at(block.k, n)
            v_pointer = row_at(block.v, n)
        columns = n + tl.arange(0, BLOCK_N)
        k0 = load_tile(k_pointer, block.k.offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        v0 = load_tile(v_pointer, block.v.offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
        qk = tl.dot(block.q.first, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T, [BLOCK_M, BLOCK_N]
        dp = tl.dot(block.dout.first, tl.trans(v0), input_precision=META.PRECISION)  # dP = dO V^T
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, block.k.offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            qk = tl.dot(block.q.second, tl.trans(k1), qk, input_precision=META.PRECISION)
        if META.V1 > 0:
            v1 = load_tile(v_pointer, block.v.offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
            dp = tl.dot(block.dout.second, tl.trans(v1), dp, input_precision=META.PRECISION)
        products = descaled_products(qk, dp, inputs, head, block.h_kv, first_row, n, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = dropout_keep(inputs, head.b, head.h, first_row, n, META)
        tile = ScoreTile(i=i, j=columns[None, :], keep=keep, is_full=is_full, large=block.large)
        MASK: tl.constexpr = "keys" if IS_MASKED else "none"
        gradient = score_gradient(products, block.statistics, tile, head, inputs, MODS, MASK, META)
        ds = gradient.dscore
        if block.dbias_ptr is not None:
            store_bias_gradient(block.dbias_ptr, gradient, tile, head, inputs, META)
        if META.NORMALIZES:
            row_sum += tl.sum(gradient.p, 1)
        if META.IS_FP8:
            descale_k = load_descale(inputs.scales.k, head.b, block.h_kv, n, head.len_kv, META)
            ds, descale_ds = to_fp8_rows(ds, block.dout.first.dtype)
            descale = (descale_ds * descale_k)[:, None]
            dq0 += fp8_product(ds, block.k_t, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED) * descale
            if META.QK1 > 0:
                dq1 += fp8_product(ds, block.k_t, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED) * descale
        else:
            ds = ds.to(k0.dtype)
            dq0 = tl.dot(ds, k0, dq0, input_precision=META.PRECISION)  # dQ += dS K
            if META.QK1 > 0:
                dq1 = tl.dot(ds, k1, dq1, input_precision=META.PRECISION)
        if META.BLOCK_SIZE_Q == 0:
            k_pointer += BLOCK_N * block.k.step
            v_pointer += BLOCK_N * block.v.step
    return _QuerySums(dq0=dq0, dq1=dq1, row_sum=row_sum)


class DqArguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    saved: Saved
    dout: Rows
    dq: Rows
    statistics: Statistics  # written here for the other kernels, except for the fields of large rows
    dsink_ptr: Pointer  # [h, b * blocks]: contribution of each query block to the gradient of softmax_offset
    k_t: Channels | None  # in FP8
    dbias_ptr: Pointer  # [b, h, len_q, len_kv] of `own_bias_gradient`, or None


@triton.jit
def _clear_dq(args, own, first_row, META: tl.constexpr):
    # Writes zeros into rows of dq without a token. Returns the row up to which the block itself stores zeros.
    start_q, slot, _start_kv, _len_kv = own.sequence
    base = row_pointer(args.dq, own.b, own.h, start_q, META)
    step, offsets = row_steps(args.dq.stride_s, META.BLOCK_M, META)
    if META.HAS_LENGTHS:
        is_last = own.block == own.blocks - 1
        padding = padding_rows(args.inputs.lengths_q, own.b, start_q, slot, first_row, is_last, META.BLOCK_M, META.IS_RAGGED_Q)
        slot = padding.slot
        clear_padding(base, step, offsets, padding, META.HEAD_DIM_QK, META.QK0, META.QK1, META.IS_RAGGED_Q)
    return slot, offsets


@triton.jit
def _make_dq(pid, args, MODS: tl.constexpr, META: tl.constexpr):
    # Runs program `pid` of the programs of dq
    BLOCK_M: tl.constexpr = META.BLOCK_M
    inputs = args.inputs
    statistics = args.statistics
    num_heads = inputs.num_heads
    num_tokens_q = inputs.lengths_q.num_tokens
    own = program_of_queries(pid, inputs, META)
    b, h = own.b, own.h
    start_q, len_q, start_kv, len_kv = own.sequence
    first_row = own.block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    slot_q, dq_offsets = _clear_dq(args, own, first_row, META)
    if META.HAS_LENGTHS:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if first_row >= len_q:
            if META.HAS_OFFSET:
                tl.store(args.dsink_ptr + (h * inputs.lengths_q.batch + b) * own.blocks + own.block, 0.0)
            return

    q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
    dout_pointer = row_pointer(args.dout, b, h, start_q + first_row, META)
    _, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
    _, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    k_step, k_offsets = row_steps(inputs.k.stride_s, META.BLOCK_N, META)
    v_step, v_offsets = row_steps(inputs.v.stride_s, META.BLOCK_N, META)
    h_kv = h // inputs.group_size if META.IS_GROUPED else h
    k_base = row_pointer(inputs.k, b, h_kv, start_kv, META)
    v_base = row_pointer(inputs.v, b, h_kv, start_kv, META)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)

    # The loads of q also start before the first wait.
    q = load_parts(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK)
    dout = load_parts(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V)
    queries = row_statistics.Queries(b=b, h=h, num_heads=num_heads, start=start_q, length=len_q, num_tokens=num_tokens_q)
    scale_dout = inputs.scales.dout if META.IS_FP8 else None
    lse_log2, delta = row_statistics.make_row_statistics(dout.first, dout.second, args.saved, scale_dout, queries, first_row, META)
    large = load_large(statistics.large_ptr, statistics.large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    row = row_statistics.statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    tl.store(statistics.lse_log2_ptr + row + rows, lse_log2, mask=rows < len_q)
    tl.store(statistics.delta_ptr + row + rows, delta, mask=rows < len_q)

    k_t = None
    if META.IS_FP8:
        k_t = transposed_head(args.k_t, b, h_kv, packed_start(inputs.lengths_kv, b, start_kv), META.IS_RAGGED_KV)

    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    loops = block_lists.key_loops(visible, args.lists, b, h, first_row, META)
    own_block = _QueryBlock(
        head=head,
        h_kv=h_kv,
        first_row=first_row,
        q=q,
        dout=dout,
        statistics=row_statistics.RowStatistics(lse_log2=lse_log2[:, None], delta=delta[:, None], p_scale=1.0),
        large=large,
        k=HeadRows(base=k_base, step=k_step, offsets=k_offsets),
        v=HeadRows(base=v_base, step=v_step, offsets=v_offsets),
        k_t=k_t,
        dbias_ptr=args.dbias_ptr,
    )
    dq = zero_parts(BLOCK_M, META.QK0, META.QK1)
    sums = _QuerySums(dq0=dq.first, dq1=dq.second, row_sum=tl.zeros([BLOCK_M], tl.float32))
    for LOOP in tl.static_range(block_lists.first_loop(META.HAS_LEFT, META.BLOCK_SIZE_Q), 3):
        tiles = loops[LOOP]
        if LOOP == 1 or tiles.begin < tiles.end:  # a loop without iterations still costs its pipeline's prologue
            sums = _attn_bwd_dq_loop(sums, own_block, tiles, inputs, MODS, LOOP != 1, META)
    dq_scale = tl.zeros([BLOCK_M], tl.float32) + inputs.scores.scale
    p_sink = sink_probability(inputs.softmax_offset_ptr, lse_log2, large, b, h, rows, len_q, META)
    if META.NORMALIZES:
        # fp32 represents an lse of 200 only to 1e-5, and so the probabilities computed from it, which is too coarse for fp32
        # results.
        row_sum = sums.row_sum
        if META.HAS_SINK:
            row_sum += p_sink
        p_scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        tl.store(statistics.p_scale_ptr + row + rows, p_scale, mask=rows < len_q)
        dq_scale *= p_scale
        p_sink = tl.where(rows < len_q, p_sink * p_scale, 0.0)  # past the end a score_mod may give NaN
    if META.HAS_OFFSET:
        dsink_ptr = args.dsink_ptr + (h * inputs.lengths_q.batch + b) * own.blocks + own.block
        tl.store(dsink_ptr, -tl.sum(p_sink * delta, 0))
    is_real = (rows < len_q)[:, None] if META.HAS_LENGTHS else None
    dq_pointer = row_pointer(args.dq, b, h, start_q + first_row, META)
    to = StoredRows(pointer=dq_pointer, offsets=dq_offsets, first=first_row, end=slot_q, is_real=is_real)
    store_parts(to, Parts(first=sums.dq0, second=sums.dq1), dq_scale[:, None], META.QK0, META.QK1, META.HEAD_DIM_QK)


@kernel
def _attn_bwd_dq_kernel(args: DqArguments, MODS: tl.constexpr, META: tl.constexpr):
    _make_dq(tl.program_id(0), args, MODS, META)


class _KeySums(NamedTuple):
    dk0: tl.tensor
    dv0: tl.tensor
    dk1: tl.tensor
    dv1: tl.tensor


class _KeyBlock(NamedTuple):
    """A block of keys and values."""

    h_kv: tl.tensor
    first_column: tl.tensor
    k: Parts
    v: Parts


class _HeadRows(NamedTuple):
    """The queries of one head."""

    head: Head
    queries: row_statistics.Queries
    q: HeadRows
    dout: HeadRows
    first_statistic: tl.tensor
    large: Any
    q_t: Any  # in FP8: q and dout with their tokens innermost
    dout_t: Any


class DkdvArguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of query blocks
    dout: Rows
    dk: Rows | None  # if num_splits > 1, one dk and one dv for each split of a group's query heads
    dv: Rows | None
    dk_stride_split: int  # in units of `Meta.ALIGN`
    dv_stride_split: int
    num_splits: int
    statistics: Statistics
    q_t: Channels | None  # in FP8
    dout_t: Channels | None
    saved: Saved | None  # inputs from which each program computes the statistics itself; None: they exist


@triton.jit
def _attn_bwd_dkdv_loop(sums, block, own_block, tiles, args, MODS: tl.constexpr, IS_MASKED: tl.constexpr, META: tl.constexpr):
    # All score tiles are transposed here, [BLOCK_N, BLOCK_M], so p and ds are the left operands of the two products.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    head = own_block.head
    first_column = block.first_column
    len_q = head.len_q
    dk0 = sums.dk0
    dk1 = sums.dk1
    dv0 = sums.dv0
    dv1 = sums.dv1
    j = first_column + tl.arange(0, BLOCK_N)[:, None]
    q_pointer = row_at(own_block.q, tiles.begin)
    dout_pointer = row_at(own_block.dout, tiles.begin)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_M):
        m, is_full = block_lists.listed_tile(t, tiles.listed, META.BLOCK_SIZE_Q, BLOCK_M)
        if META.BLOCK_SIZE_Q > 0:
            q_pointer = row_at(own_block.q, m)
            dout_pointer = row_at(own_block.dout, m)
        rows = m + tl.arange(0, BLOCK_M)
        q0 = load_tile(q_pointer, own_block.q.offsets, m, len_q, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        dout0 = load_tile(dout_pointer, own_block.dout.offsets, m, len_q, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
        if args.saved.lse_ptr is None:
            first_statistic = own_block.first_statistic + m
            statistics = row_statistics.load_row_statistics(args.statistics, first_statistic, len_q - m, BLOCK_M, IS_MASKED, META)
        else:
            dout_of_v1 = dout0
            if META.V1 > 0:
                dout_of_v1 = load_tile(dout_pointer, own_block.dout.offsets, m, len_q, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
            lse_log2, delta = row_statistics.make_row_statistics(dout0, dout_of_v1, args.saved, None, own_block.queries, m, META)
            statistics = row_statistics.RowStatistics(lse_log2=lse_log2, delta=delta, p_scale=tl.full([1], 1.0, tl.float32))
        kq = tl.dot(block.k.first, tl.trans(q0), input_precision=META.PRECISION)  # S = K Q^T
        dp = tl.dot(block.v.first, tl.trans(dout0), input_precision=META.PRECISION)  # dP = V dO^T
        if META.QK1 > 0:
            q1 = load_tile(q_pointer, own_block.q.offsets, m, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            kq = tl.dot(block.k.second, tl.trans(q1), kq, input_precision=META.PRECISION)
        if META.V1 > 0:
            dout1 = load_tile(dout_pointer, own_block.dout.offsets, m, len_q, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
            dp = tl.dot(block.v.second, tl.trans(dout1), dp, input_precision=META.PRECISION)
        products = descaled_products(kq, dp, inputs, head, block.h_kv, m, first_column, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = tl.trans(dropout_keep(inputs, head.b, head.h, m, first_column, META))
        tile = ScoreTile(i=rows[None, :], j=j, keep=keep, is_full=is_full, large=own_block.large)
        MASK: tl.constexpr = "queries" if IS_MASKED else "none"
        gradient = score_gradient(products, row_statistics.by_columns(statistics), tile, head, inputs, MODS, MASK, META)
        p = gradient.p_dropped
        ds = gradient.dscore
        if META.IS_FP8:
            if args.dv.ptr is not None:
                descale_dout = load_descale(inputs.scales.dout, head.b, head.h, m, len_q, META)
                p, descale_p = to_fp8_rows(p, tl.float8e4nv)
                descale = (descale_p * descale_dout)[:, None]
                dv0 += fp8_product(p, own_block.dout_t, m, len_q, 0, META.V0, META.HEAD_DIM_V, IS_MASKED) * descale
                if META.V1 > 0:
                    dv1 += fp8_product(p, own_block.dout_t, m, len_q, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED) * descale
            if args.dk.ptr is not None:
                descale_q = load_descale(inputs.scales.q, head.b, head.h, m, len_q, META)
                ds, descale_ds = to_fp8_rows(ds, dout0.dtype)
                descale = (descale_ds * descale_q)[:, None]
                dk0 += fp8_product(ds, own_block.q_t, m, len_q, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED) * descale
                if META.QK1 > 0:
                    dk1 += fp8_product(ds, own_block.q_t, m, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED) * descale
        else:
            if args.dv.ptr is not None:
                p = p.to(dout0.dtype)
                dv0 = tl.dot(p, dout0, dv0, input_precision=META.PRECISION)  # dV += P dO
                if META.V1 > 0:
                    dv1 = tl.dot(p, dout1, dv1, input_precision=META.PRECISION)
            if args.dk.ptr is not None:
                ds = ds.to(q0.dtype)
                dk0 = tl.dot(ds, q0, dk0, input_precision=META.PRECISION)  # dK += dS Q
                if META.QK1 > 0:
                    dk1 = tl.dot(ds, q1, dk1, input_precision=META.PRECISION)
        if META.BLOCK_SIZE_Q == 0:
            q_pointer += BLOCK_M * own_block.q.step
            dout_pointer += BLOCK_M * own_block.dout.step
    return _KeySums(dk0=dk0, dk1=dk1, dv0=dv0, dv1=dv1)


@triton.jit
def _program_of_keys(pid, args, META: tl.constexpr):
    # Returns the program, whose h is a key head.
    inputs = args.inputs
    num_heads = inputs.num_heads
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, META.BLOCK_N)
    block = pid % blocks
    split, h_kv, b = 0, pid // blocks % num_heads, pid // blocks // num_heads
    if META.IS_GROUPED:
        num_heads_kv = num_heads // inputs.group_size
        split = pid // blocks % args.num_splits
        h_kv = pid // blocks // args.num_splits % num_heads_kv
        b = pid // blocks // args.num_splits // num_heads_kv
    sequence = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    return Program(b=b, h=h_kv, block=block, blocks=blocks, sequence=sequence, split=split)


@triton.jit
def _clear_gradient(
    x, stride_split, own, padding, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HEAD_DIM: tl.constexpr, META: tl.constexpr
):
    # Writes zeros into rows of dk or dv without a token. Returns the first row of its sequence and head, and `row_steps`.
    base = row_pointer(x, own.b, own.h, own.sequence.start_kv, META)
    base += tl.cast(own.split, tl.int64) * stride_split * META.ALIGN
    step, offsets = row_steps(x.stride_s, META.BLOCK_N, META)
    if META.HAS_LENGTHS:
        clear_padding(base, step, offsets, padding, HEAD_DIM, WIDTH0, WIDTH1, META.IS_RAGGED_KV)
    return HeadRows(base=base, step=step, offsets=offsets)


@triton.jit
def _cut_tiles(loops, part, META: tl.constexpr):
    # Returns the tiles of `loops.first` if `part` is 0, otherwise of `loops.rest`, for one loop over both.
    if META.BLOCK_SIZE_Q > 0:
        return loops.rest
    else:
        begin = loops.first.begin if part == 0 else loops.rest.begin
        return block_lists.TileRange(begin=begin, end=loops.first.end if part == 0 else loops.rest.end, listed=begin)


@triton.jit
def _make_dkdv(pid, args, MODS: tl.constexpr, META: tl.constexpr):
    # Runs program `pid` of the programs of dk and dv
    BLOCK_N: tl.constexpr = META.BLOCK_N
    FIRST_PHASE: tl.constexpr = 1 if META.HAS_RIGHT or META.BLOCK_SIZE_Q > 0 else 0
    inputs = args.inputs
    lengths_q = inputs.lengths_q
    statistics = args.statistics
    num_heads = inputs.num_heads
    group_size = inputs.group_size
    own = _program_of_keys(pid, args, META)
    b, h_kv, split = own.b, own.h, own.split
    start_q, len_q, start_kv, len_kv = own.sequence
    first_column = own.block * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    slot_kv = len_kv
    padding = None
    if META.HAS_LENGTHS:
        is_last = own.block == own.blocks - 1
        padding = padding_rows(inputs.lengths_kv, b, start_kv, len_kv, first_column, is_last, BLOCK_N, META.IS_RAGGED_KV)
        slot_kv = padding.slot
    if args.dk.ptr is not None:
        dk_rows = _clear_gradient(args.dk, args.dk_stride_split, own, padding, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    if args.dv.ptr is not None:
        dv_rows = _clear_gradient(args.dv, args.dv_stride_split, own, padding, META.V0, META.V1, META.HEAD_DIM_V, META)
    if first_column >= len_kv:
        return

    k_pointer = row_pointer(inputs.k, b, h_kv, start_kv + first_column, META)
    v_pointer = row_pointer(inputs.v, b, h_kv, start_kv + first_column, META)
    _, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
    _, v_offsets = row_steps(inputs.v.stride_s, BLOCK_N, META)
    q_step, q_offsets = row_steps(inputs.q.stride_s, META.BLOCK_M, META)
    dout_step, dout_offsets = row_steps(args.dout.stride_s, META.BLOCK_M, META)
    k0 = load_tile(k_pointer, k_offsets, first_column, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
    v0 = load_tile(v_pointer, v_offsets, first_column, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
    k1 = k0
    if META.QK1 > 0:
        k1 = load_tile(k_pointer, k_offsets, first_column, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
    v1 = v0
    if META.V1 > 0:
        v1 = load_tile(v_pointer, v_offsets, first_column, len_kv, META.V0, META.V1, META.HEAD_DIM_V, True)
    k, v = Parts(first=k0, second=k1), Parts(first=v0, second=v1)
    key_block = _KeyBlock(h_kv=h_kv, first_column=first_column, k=k, v=v)
    dk = zero_parts(BLOCK_N, META.QK0, META.QK1)
    dv = zero_parts(BLOCK_N, META.V0, META.V1)
    sums = _KeySums(dk0=dk.first, dk1=dk.second, dv0=dv.first, dv1=dv.second)

    shift = (len_kv - len_q) * inputs.band.bottom_right
    visible = visible_range_of_queries(first_column, len_q, shift, inputs.band, META)
    first_head, num_heads_of_split = h_kv, 1
    if META.IS_GROUPED:
        heads_per_split = tl.cdiv(group_size, args.num_splits)
        first_head = h_kv * group_size + split * heads_per_split
        num_heads_of_split = tl.minimum(heads_per_split, group_size - split * heads_per_split)
    large = load_large(statistics.large_ptr, statistics.large_lse_ptr, num_heads, lengths_q.num_tokens, start_q, META)
    for head_in_split in range(num_heads_of_split):
        h = first_head + head_in_split
        first_statistic = row_statistics.statistics_row(b, h, num_heads, lengths_q.num_tokens, start_q, META)
        q_base = row_pointer(inputs.q, b, h, start_q, META)
        dout_base = row_pointer(args.dout, b, h, start_q, META)
        q_t, dout_t = None, None
        if META.IS_FP8:
            place_q = packed_start(lengths_q, b, start_q)
            q_t = transposed_head(args.q_t, b, h, place_q, META.IS_RAGGED_Q)
            dout_t = transposed_head(args.dout_t, b, h, place_q, META.IS_RAGGED_Q)
        own_block = _HeadRows(
            head=head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META),
            queries=row_statistics.Queries(
                b=b, h=h, num_heads=num_heads, start=start_q, length=len_q, num_tokens=lengths_q.num_tokens
            ),
            q=HeadRows(base=q_base, step=q_step, offsets=q_offsets),
            dout=HeadRows(base=dout_base, step=dout_step, offsets=dout_offsets),
            first_statistic=first_statistic,
            large=large,
            q_t=q_t,
            dout_t=dout_t,
        )
        # One loop has the queries that the right side of the band cuts (causal: the diagonal), and the queries that its left side
        # or the end cuts, because another loop would cost registers, which are scarce. A second loop has the queries that see all
        # keys. If there is no right side, the second loop is first: after a loop that may be skipped, ptxas serialises wgmma.
        loops = block_lists.query_loops(visible, args.lists, b, h, first_column, META)
        for phase in tl.static_range(FIRST_PHASE, FIRST_PHASE + 2):  # 1 is the loop with cut blocks
            first_part = 0 if phase == 1 and META.HAS_RIGHT and META.BLOCK_SIZE_Q == 0 else 1
            last_part = 1 + tl.cast(loops.rest.begin < loops.rest.end, tl.int32) if phase == 1 and META.BLOCK_SIZE_Q == 0 else 2
            for part in range(first_part, last_part):
                tiles = _cut_tiles(loops, part, META) if phase == 1 else loops.full
                sums = _attn_bwd_dkdv_loop(sums, key_block, own_block, tiles, args, MODS, phase == 1, META)
    is_real = (columns < len_kv)[:, None] if META.HAS_LENGTHS else None
    if args.dk.ptr is not None:
        pointer = row_at(dk_rows, first_column)
        to = StoredRows(pointer=pointer, offsets=dk_rows.offsets, first=first_column, end=slot_kv, is_real=is_real)
        store_parts(to, Parts(first=sums.dk0, second=sums.dk1), inputs.scores.scale, META.QK0, META.QK1, META.HEAD_DIM_QK)
    if args.dv.ptr is not None:
        pointer = row_at(dv_rows, first_column)
        to = StoredRows(pointer=pointer, offsets=dv_rows.offsets, first=first_column, end=slot_kv, is_real=is_real)
        store_parts(to, Parts(first=sums.dv0, second=sums.dv1), None, META.V0, META.V1, META.HEAD_DIM_V)


@kernel
def _attn_bwd_dkdv_kernel(args: DkdvArguments, MODS: tl.constexpr, META: tl.constexpr):
    _make_dkdv(tl.program_id(0), args, MODS, META)


class OneGridArguments(NamedTuple):
    dq: DqArguments
    dkdv: DkdvArguments
    programs_of_dq: int


@kernel
def _attn_bwd_one_grid_kernel(args: OneGridArguments, MODS: tl.constexpr, META_DQ: tl.constexpr, META_DKDV: tl.constexpr):
    # Programs of dq and of dk with dv in one grid; the latter compute their own statistics
    if tl.program_id(0) < args.programs_of_dq:
        _make_dq(tl.program_id(0), args.dq, MODS, META_DQ)
        return
    _make_dkdv(tl.program_id(0) - args.programs_of_dq, args.dkdv, MODS, META_DKDV)


def attention_backward(
    call: Backward, tile_dq: Tile | None = None, tile_dkdv: Tile | None = None, *, one_grid: bool = False
) -> None:
    """Writes every gradient of a backward. Only gradients of captures may differ bitwise from run to run.

    one_grid: whether one launch computes dq, dk and dv. Both tiles need equal warps and stages. It supports 16-bit types, not FP8,
    and at most 8 query heads a key head.
    """
    x = call.problem
    if x.batch == 0:  # no program writes the padding
        for gradient in (call.dq, call.dk, call.dv, call.dbias, call.dsoftmax_offset, *call.dcaptures):
            if gradient is not None:
                gradient.zero_()
        return
    statistics, lse = new_statistics(x, call.lse)
    tile_dq, tile_dkdv = tile_dq or x.tile(DQ), tile_dkdv or x.tile(DKDV)
    # A program processes all query heads that share its keys, up to 8, because more would leave too few programs. In fp32 it
    # processes one: shorter sums round less, and these sums have the largest rounding error there.
    num_splits = x.group_size if x.q.dtype is torch.float32 else cdiv(x.group_size, 8)
    blocks = cdiv(x.longest_q, tile_dq.block_m)
    offset = call.dsoftmax_offset
    dsink = offset.new_empty((x.num_heads, x.batch * blocks)) if offset is not None else None
    dq_args, meta_dq = _dq_arguments(call, statistics, lse, dsink, tile_dq)
    programs_of_dq = blocks * x.num_heads * x.batch
    programs_of_dkdv = cdiv(x.longest_kv, tile_dkdv.block_n) * num_splits * x.num_heads_kv * x.batch
    if one_grid:
        dkdv_args, meta = _dkdv_arguments(call, statistics, call.dk, call.dv, tile_dkdv, lse)
        both = OneGridArguments(dq=dq_args, dkdv=dkdv_args, programs_of_dq=programs_of_dq)
        launch(_attn_bwd_one_grid_kernel, programs_of_dq + programs_of_dkdv, x.device, tile_dq, (both, x.mods, meta_dq, meta))
    else:
        launch(_attn_bwd_dq_kernel, programs_of_dq, x.device, tile_dq, (dq_args, x.mods, meta_dq))
    if offset is not None and dsink is not None:
        torch.sum(dsink, 1, out=offset)
    if not one_grid:
        _launch_dkdv(call, statistics, num_splits, programs_of_dkdv, tile_dkdv)
    score_gradients(call if dq_args.dbias_ptr is None else call._replace(dbias=None), statistics)


def _dq_arguments(
    call: Backward, statistics: Statistics, lse: Tensor, dsink: Tensor | None, tile: Tile
) -> tuple[DqArguments, Meta]:
    """Returns the arguments and constants of programs of dq."""
    x, out, dout, dq = call.problem, call.out, call.dout, call.dq
    meta = x.meta(tile, (out, dout, dq))
    args = DqArguments(
        inputs=x.inputs(meta),
        lists=x.lists("kv"),
        saved=Saved(out=rows(out, meta), lse_ptr=lse, dlse_ptr=call.dlse),
        dout=rows(dout, meta),
        dq=rows(dq, meta),
        statistics=statistics,
        dsink_ptr=dsink,
        k_t=transposed(x, "k"),
        dbias_ptr=owned_gradient(call),
    )
    return args, meta


def _dkdv_arguments(
    call: Backward, statistics: Statistics, dk: Tensor, dv: Tensor, tile: Tile, lse: Tensor | None = None
) -> tuple[DkdvArguments, Meta]:
    """Returns the arguments and constants of programs of dk and dv.

    dk, dv: the outputs, or those of the first split; splits are contiguous.
    lse: with `call.out`, each program computes the statistics from it.
    """
    x, out, dout = call.problem, call.out, call.dout
    meta = x.meta(tile, (dout, dk, dv) if lse is None else (dout, dk, dv, out))
    args = DkdvArguments(
        inputs=x.inputs(meta),
        lists=x.lists("q"),
        dout=rows(dout, meta),
        dk=rows(dk, meta),
        dv=rows(dv, meta),
        dk_stride_split=dk.numel() // meta.ALIGN,
        dv_stride_split=dv.numel() // meta.ALIGN,
        num_splits=1,
        statistics=statistics,
        q_t=transposed(x, "q"),
        dout_t=transposed(x, "q", dout),
        saved=None if lse is None else Saved(out=rows(out, meta), lse_ptr=lse, dlse_ptr=call.dlse),
    )
    return args, meta


def _launch_dkdv(call: Backward, statistics: Statistics, num_splits: int, programs: int, tile: Tile) -> None:
    x, dk, dv = call.problem, call.dk, call.dv
    # zeros, because no program may own a row if cu_seqlens is wrong
    dk_parts = dk if num_splits == 1 else torch.zeros((num_splits, *dk.shape), dtype=torch.float32, device=x.device)
    dv_parts = dv if num_splits == 1 else torch.zeros((num_splits, *dv.shape), dtype=torch.float32, device=x.device)
    dk_one, dv_one = (dk, dv) if num_splits == 1 else (dk_parts[0], dv_parts[0])
    args, meta = _dkdv_arguments(call, statistics, dk_one, dv_one, tile)
    args = args._replace(num_splits=num_splits)
    for dk_part, dv_part in ((dk_parts, None), (None, dv_parts)) if tile.apart else ((dk_parts, dv_parts),):
        part = args._replace(
            dk=None if dk_part is None else args.dk._replace(ptr=dk_part),
            dv=None if dv_part is None else args.dv._replace(ptr=dv_part),
        )
        launch(_attn_bwd_dkdv_kernel, programs, x.device, tile, (part, x.mods, meta))
    if num_splits > 1:
        dk.copy_(dk_parts.sum(0))
        dv.copy_(dv_parts.sum(0))
