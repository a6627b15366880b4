"""Backward attention: dq with delta and the sink's gradient, dk with dv, and dbias; their launcher.

Each output element is summed by one program in a fixed order, so the gradients are bitwise repeatable without atomics and
without a workspace that grows with sq * skv. The price is that the scores are recomputed in each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Alibi, Band, Bias, BlockMaskLists, Channels, Head, Lengths, Rows
from flexattn.kernels_triton.common.block_lists import TileList, listed_tile, load_block_lists
from flexattn.kernels_triton.common.preprocess import new_statistics
from flexattn.kernels_triton.common.primitives import (
    HeadChannels,
    captures_of_head,
    descaled_products,
    dropout_keep,
    fp8_product,
    load_descale,
    load_head,
    load_large,
    load_row_statistics,
    load_sequence,
    load_tile,
    make_row_statistics,
    packed_start,
    padding_rows,
    row_pointer,
    row_steps,
    score_gradient,
    sink_probability,
    statistics_row,
    store_tile,
    store_zeros,
    to_fp8_rows,
    transposed_head,
    visible_range_of_keys,
    visible_range_of_queries,
)
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.common.quantize import transposed
from flexattn.kernels_triton.common.tiles import DKDV, DQ
from flexattn.kernels_triton.portable.score_gradients import score_gradients
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch


@triton.jit
def _attn_bwd_dq_loop(
    dq0,
    dq1,
    row_sum,
    q0,
    q1,
    dout0,
    dout1,
    lse_log2,
    delta,
    large,
    k_base,
    k_step,
    k_offsets,
    v_base,
    v_step,
    v_offsets,
    bias_base,
    rng_state_ptr,
    begin,
    end,
    first_row,
    len_q,
    len_kv,
    shift,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    keep_scale,
    alibi_slope,
    dropout_threshold,
    b_h,
    stride_bias_m,
    stride_bias_n,
    b,
    h,
    captures,
    listed,
    descales,
    h_kv,
    k_t,  # in FP8: k with its tokens innermost, and the stride of its channels
    MODS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    k_pointer = k_base + tl.cast(begin, tl.int64) * k_step
    v_pointer = v_base + tl.cast(begin, tl.int64) * v_step
    for t in tl.range(begin, end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n = t
        is_full = False
        if META.BLOCK_SIZE_Q > 0:
            n, is_full = listed_tile(t, listed, META.BLOCK_SIZE_KV, BLOCK_N)
            k_pointer = k_base + tl.cast(n, tl.int64) * k_step
            v_pointer = v_base + tl.cast(n, tl.int64) * v_step
        columns = n + tl.arange(0, BLOCK_N)
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
        if META.V1 > 0:
            v1 = load_tile(v_pointer, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
            dp = tl.dot(dout1, tl.trans(v1), dp, input_precision=META.PRECISION)
        qk, dp, score_scale = descaled_products(qk, dp, descales, b, h, h_kv, first_row, n, softmax_scale, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = dropout_keep(rng_state_ptr, dropout_threshold, b_h, first_row, n, META)
        p, _, _, ds, _ = score_gradient(
            qk,
            dp,
            lse_log2[:, None],
            delta[:, None],
            1.0,
            large,
            i,
            columns[None, :],
            keep,
            len_q,
            len_kv,
            shift,
            Band(window_left, window_right, 0),
            score_scale,
            keep_scale,
            Head(b, h, len_q, len_kv, shift, softcap, bias_base, stride_bias_m, stride_bias_n, alibi_slope, captures),
            MODS,
            is_full,
            "keys" if IS_MASKED else "none",
            META,
        )
        if META.NORMALIZES:
            row_sum += tl.sum(p, 1)
        if META.IS_FP8:
            descale_k = load_descale(descales, 1, b, h_kv, n, META)
            ds, descale_ds = to_fp8_rows(ds, dout0.dtype)
            descale = (descale_ds * descale_k)[:, None]
            dq0 += fp8_product(ds, k_t, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED) * descale
            if META.QK1 > 0:
                dq1 += fp8_product(ds, k_t, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED) * descale
        else:
            ds = ds.to(k0.dtype)
            dq0 = tl.dot(ds, k0, dq0, input_precision=META.PRECISION)
            if META.QK1 > 0:
                dq1 = tl.dot(ds, k1, dq1, input_precision=META.PRECISION)
        if META.BLOCK_SIZE_Q == 0:
            k_pointer += BLOCK_N * k_step
            v_pointer += BLOCK_N * v_step
    return dq0, dq1, row_sum


@kernel
def _attn_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    softmax_offset_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    softmax_scale,
    softcap,
    keep_scale,
    dropout_threshold,
    batch,
    num_heads,
    group_size,
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_alibi_b,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    captures,
    descales,  # in FP8, as `Problem.scale_arguments` gives them; else None
    block_counts_ptr,  # of the block mask, the lists of key blocks
    block_indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    stride_list_b,
    stride_list_h,
    list_length,
    out_ptr,
    stride_ob,
    stride_os,
    stride_oh,
    dout_ptr,
    stride_dob,
    stride_dos,
    stride_doh,
    dq_ptr,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    lse_ptr,
    dlse_ptr,  # None: 0
    lse_log2_ptr,  # written here for the other kernels, where `statistics_row` says: lse in units of log2, +inf if nothing is seen
    delta_ptr,  # sum(out * dout) - dlse
    p_scale_ptr,  # and, for fp32, what probabilities computed from lse_log2 are to be multiplied with
    large_ptr,  # of unbounded logits, as `large_rows` has them: whether any lse is large, and lse; lse_ptr is then the rest
    large_lse_ptr,
    dsink_ptr,  # [h, b * blocks]: what each block of queries adds to the gradient of softmax_offset
    k_t_ptr,  # in FP8: k as `transpose_tokens` copies it
    stride_ktb,
    stride_kth,
    stride_ktd,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    b_h = b * num_heads + h
    start_q, len_q = load_sequence(
        Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, META.IS_RAGGED_Q
    )
    start_kv, len_kv = load_sequence(
        Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, batch, num_tokens_kv, max_seqlen_kv), b, META.IS_RAGGED_KV
    )
    first_row = block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dq_base = row_pointer(Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh), b, h, start_q, META)
    dq_step, dq_offsets = row_steps(stride_dqs, BLOCK_M, META)
    slot_q = len_q
    if META.HAS_LENGTHS:
        begin, end, front_begin, front, slot_q = padding_rows(
            Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q),
            b,
            start_q,
            len_q,
            first_row,
            block == blocks - 1,
            BLOCK_M,
            META.IS_RAGGED_Q,
        )
        store_zeros(dq_base, dq_step, dq_offsets, begin, end, META.HEAD_DIM_QK, QK0, QK1)
        if META.IS_RAGGED_Q:
            store_zeros(dq_base, dq_step, dq_offsets, front_begin, front, META.HEAD_DIM_QK, QK0, QK1)
        if first_row >= len_q:
            if META.HAS_OFFSET:
                tl.store(dsink_ptr + (h * batch + b) * blocks + block, 0.0)
            return

    q_pointer = row_pointer(Rows(q_ptr, stride_qb, stride_qs, stride_qh), b, h, start_q + first_row, META)
    dout_pointer = row_pointer(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), b, h, start_q + first_row, META)
    _, q_offsets = row_steps(stride_qs, BLOCK_M, META)
    _, dout_offsets = row_steps(stride_dos, BLOCK_M, META)
    k_step, k_offsets = row_steps(stride_ks, META.BLOCK_N, META)
    v_step, v_offsets = row_steps(stride_vs, META.BLOCK_N, META)
    h_kv = h // group_size if META.IS_GROUPED else h
    k_base = row_pointer(Rows(k_ptr, stride_kb, stride_ks, stride_kh), b, h_kv, start_kv, META)
    v_base = row_pointer(Rows(v_ptr, stride_vb, stride_vs, stride_vh), b, h_kv, start_kv, META)
    bias_base, alibi_slope = load_head(
        Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        Alibi(alibi_slopes_ptr, stride_alibi_b),
        b,
        h,
        META,
    )
    captures = captures_of_head(b, h, captures, MODS, META)
    shift = (len_kv - len_q) * bottom_right

    # q too is on its way before anything is waited for.
    q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, QK0, META.HEAD_DIM_QK, True)
    q1 = q0
    if QK1 > 0:
        q1 = load_tile(q_pointer, q_offsets, first_row, len_q, QK0, QK1, META.HEAD_DIM_QK, True)
    dout0 = load_tile(dout_pointer, dout_offsets, first_row, len_q, 0, META.V0, META.HEAD_DIM_V, True)
    dout1 = dout0
    if META.V1 > 0:
        dout1 = load_tile(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V, True)
    out = Rows(out_ptr, stride_ob, stride_os, stride_oh)
    lse_log2, delta = make_row_statistics(
        dout0, dout1, out, lse_ptr, dlse_ptr, b, h, num_heads, start_q, len_q, num_tokens_q, first_row, descales, META
    )
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    row = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    tl.store(lse_log2_ptr + row + rows, lse_log2, mask=rows < len_q)
    tl.store(delta_ptr + row + rows, delta, mask=rows < len_q)

    k_t = HeadChannels(k_t_ptr, stride_ktd)
    if META.IS_FP8:
        place_kv = packed_start(Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, 0, num_tokens_kv, 0), b, start_kv)
        k_t = transposed_head(Channels(k_t_ptr, stride_ktb, stride_kth, stride_ktd), b, h_kv, place_kv, META.IS_RAGGED_KV)

    dq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    dq1 = dq0
    if QK1 > 0:
        dq1 = tl.zeros([BLOCK_M, QK1], tl.float32)
    visible = visible_range_of_keys(first_row, len_kv, shift, Band(window_left, window_right, 0), META)
    begin, full_begin, full_end, end = visible
    masked_ptr, num_masked, full_ptr, first_inside, last_inside = block_indices_ptr, 0, full_indices_ptr, 0, 0
    if META.BLOCK_SIZE_Q > 0:
        list_row = b * stride_list_b + h * stride_list_h + first_row // META.BLOCK_SIZE_Q
        own_lists = load_block_lists(
            BlockMaskLists(
                block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length
            ),
            list_row,
            visible,
            META.BLOCK_SIZE_KV,
            META.BLOCK_N,
            META.HAS_LEFT,
            META,
        )
        masked_ptr, num_masked, full_ptr, first_inside, last_inside, end, full_end = own_lists
    for phase in tl.static_range(0 if META.HAS_LEFT and META.BLOCK_SIZE_Q == 0 else 1, 3):  # as in the forward
        first = 0 if META.BLOCK_SIZE_Q > 0 else (begin if phase == 0 else (full_begin if phase == 1 else full_end))
        last = full_begin if phase == 0 else (full_end if phase == 1 else end)
        if phase == 1 or first < last:  # a loop of no turns costs what its pipeline does before the first
            dq0, dq1, row_sum = _attn_bwd_dq_loop(
                dq0,
                dq1,
                row_sum,
                q0,
                q1,
                dout0,
                dout1,
                lse_log2,
                delta,
                large,
                k_base,
                k_step,
                k_offsets,
                v_base,
                v_step,
                v_offsets,
                bias_base,
                rng_state_ptr,
                first,
                last,
                first_row,
                len_q,
                len_kv,
                shift,
                window_left,
                window_right,
                softmax_scale,
                softcap,
                keep_scale,
                alibi_slope,
                dropout_threshold,
                b_h,
                stride_bias_m,
                stride_bias_n,
                b,
                h,
                captures,
                TileList(masked_ptr, 0, full_ptr, 0, first_inside)
                if phase == 1
                else TileList(masked_ptr, num_masked, full_ptr, first_inside, last_inside - first_inside),
                descales,
                h_kv,
                k_t,
                MODS,
                phase != 1,
                META,
            )
    dq_scale = tl.zeros([BLOCK_M], tl.float32) + softmax_scale
    p_sink = sink_probability(softmax_offset_ptr, lse_log2, large, b, h, rows, len_q, META)
    if META.NORMALIZES:
        # An lse of 200 is exact only to 1e-5, and so is a probability computed from it: not what fp32 promises.
        if META.HAS_SINK:
            row_sum += p_sink
        p_scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        tl.store(p_scale_ptr + row + rows, p_scale, mask=rows < len_q)
        dq_scale *= p_scale
        p_sink *= p_scale
    if META.HAS_OFFSET:
        tl.store(dsink_ptr + (h * batch + b) * blocks + block, -tl.sum(p_sink * delta, 0))
    is_real = (rows < len_q)[:, None]  # without lengths what is past the end is not stored
    dq_pointer = row_pointer(Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh), b, h, start_q + first_row, META)
    dq0 *= dq_scale[:, None]
    if META.HAS_LENGTHS:
        dq0 = tl.where(is_real, dq0, 0.0)
    store_tile(dq_pointer, dq0, dq_offsets, first_row, slot_q, 0, QK0, META.HEAD_DIM_QK)
    if QK1 > 0:
        dq1 *= dq_scale[:, None]
        if META.HAS_LENGTHS:
            dq1 = tl.where(is_real, dq1, 0.0)
        store_tile(dq_pointer, dq1, dq_offsets, first_row, slot_q, QK0, QK1, META.HEAD_DIM_QK)


@triton.jit
def _attn_bwd_dkdv_loop(
    dk0,
    dk1,
    dv0,
    dv1,
    k0,
    k1,
    v0,
    v1,
    q_base,
    q_step,
    q_offsets,
    dout_base,
    dout_step,
    dout_offsets,
    lse_log2_ptr,
    delta_ptr,
    p_scale_ptr,
    first_statistic,
    large,
    bias_base,
    rng_state_ptr,
    begin,
    end,
    first_column,
    len_q,
    len_kv,
    shift,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    keep_scale,
    alibi_slope,
    dropout_threshold,
    b_h,
    stride_bias_m,
    stride_bias_n,
    b,
    h,
    captures,
    listed,
    descales,
    h_kv,
    q_t,  # in FP8: q and dout with their tokens innermost
    dout_t,
    MODS: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    IS_MASKED: tl.constexpr,
    META: tl.constexpr,
):
    # All score tiles are transposed here, [BLOCK_N, BLOCK_M], so that p and ds are the left operands of the two products.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    j = first_column + tl.arange(0, BLOCK_N)[:, None]
    q_pointer = q_base + tl.cast(begin, tl.int64) * q_step
    dout_pointer = dout_base + tl.cast(begin, tl.int64) * dout_step
    for t in tl.range(begin, end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_M):
        m = t
        is_full = False
        if META.BLOCK_SIZE_Q > 0:
            m, is_full = listed_tile(t, listed, META.BLOCK_SIZE_Q, BLOCK_M)
            q_pointer = q_base + tl.cast(m, tl.int64) * q_step
            dout_pointer = dout_base + tl.cast(m, tl.int64) * dout_step
        rows = m + tl.arange(0, BLOCK_M)
        q0 = load_tile(q_pointer, q_offsets, m, len_q, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        dout0 = load_tile(dout_pointer, dout_offsets, m, len_q, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
        statistics = (lse_log2_ptr, delta_ptr, p_scale_ptr)
        lse_log2, delta, p_scale = load_row_statistics(*statistics, first_statistic + m, len_q - m, BLOCK_M, IS_MASKED, META)
        kq = tl.dot(k0, tl.trans(q0), input_precision=META.PRECISION)
        dp = tl.dot(v0, tl.trans(dout0), input_precision=META.PRECISION)
        if META.QK1 > 0:
            q1 = load_tile(q_pointer, q_offsets, m, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            kq = tl.dot(k1, tl.trans(q1), kq, input_precision=META.PRECISION)
        if META.V1 > 0:
            dout1 = load_tile(dout_pointer, dout_offsets, m, len_q, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
            dp = tl.dot(v1, tl.trans(dout1), dp, input_precision=META.PRECISION)
        kq, dp, score_scale = descaled_products(kq, dp, descales, b, h, h_kv, m, first_column, softmax_scale, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = tl.trans(dropout_keep(rng_state_ptr, dropout_threshold, b_h, m, first_column, META))
        _, p, _, ds, _ = score_gradient(
            kq,
            dp,
            lse_log2[None, :],
            delta[None, :],
            p_scale[None, :],
            large,
            rows[None, :],
            j,
            keep,
            len_q,
            len_kv,
            shift,
            Band(window_left, window_right, 0),
            score_scale,
            keep_scale,
            Head(b, h, len_q, len_kv, shift, softcap, bias_base, stride_bias_m, stride_bias_n, alibi_slope, captures),
            MODS,
            is_full,
            "queries" if IS_MASKED else "none",
            META,
        )
        if META.IS_FP8:
            if HAS_DV:
                descale_dout = load_descale(descales, 3, b, h, m, META)
                p, descale_p = to_fp8_rows(p, tl.float8e4nv)
                descale = (descale_p * descale_dout)[:, None]
                dv0 += fp8_product(p, dout_t, m, len_q, 0, META.V0, META.HEAD_DIM_V, IS_MASKED) * descale
                if META.V1 > 0:
                    dv1 += fp8_product(p, dout_t, m, len_q, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED) * descale
            if HAS_DK:
                descale_q = load_descale(descales, 0, b, h, m, META)
                ds, descale_ds = to_fp8_rows(ds, dout0.dtype)
                descale = (descale_ds * descale_q)[:, None]
                dk0 += fp8_product(ds, q_t, m, len_q, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED) * descale
                if META.QK1 > 0:
                    dk1 += fp8_product(ds, q_t, m, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED) * descale
        else:
            if HAS_DV:
                p = p.to(dout0.dtype)
                dv0 = tl.dot(p, dout0, dv0, input_precision=META.PRECISION)
                if META.V1 > 0:
                    dv1 = tl.dot(p, dout1, dv1, input_precision=META.PRECISION)
            if HAS_DK:
                ds = ds.to(q0.dtype)
                dk0 = tl.dot(ds, q0, dk0, input_precision=META.PRECISION)
                if META.QK1 > 0:
                    dk1 = tl.dot(ds, q1, dk1, input_precision=META.PRECISION)
        if META.BLOCK_SIZE_Q == 0:
            q_pointer += BLOCK_M * q_step
            dout_pointer += BLOCK_M * dout_step
    return dk0, dk1, dv0, dv1


@kernel
def _attn_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    softmax_offset_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    softmax_scale,
    softcap,
    keep_scale,
    dropout_threshold,
    batch,
    num_heads,
    group_size,
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_alibi_b,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    captures,
    descales,  # in FP8, as `Problem.scale_arguments` gives them; else None
    block_counts_ptr,  # of the block mask, the lists of query blocks
    block_indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    stride_list_b,
    stride_list_h,
    list_length,
    dout_ptr,
    stride_dob,
    stride_dos,
    stride_doh,
    dk_ptr,  # or None; with num_splits > 1, one dk and one dv per split of the group's query heads
    stride_dkb,
    stride_dks,
    stride_dkh,
    dv_ptr,  # or None
    stride_dvb,
    stride_dvs,
    stride_dvh,
    stride_dk_split,
    stride_dv_split,
    num_splits,
    lse_log2_ptr,
    delta_ptr,
    p_scale_ptr,
    large_ptr,
    large_lse_ptr,
    q_t_ptr,  # in FP8: q and dout as `transpose_tokens` copies them
    stride_qtb,
    stride_qth,
    stride_qtd,
    dout_t_ptr,
    stride_dotb,
    stride_doth,
    stride_dotd,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_N: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    FIRST_PHASE: tl.constexpr = 1 if META.HAS_RIGHT or META.BLOCK_SIZE_Q > 0 else 0
    blocks = tl.cdiv(max_seqlen_kv, BLOCK_N)
    pid = tl.program_id(0)
    block = pid % blocks
    split, h_kv, b = 0, pid // blocks % num_heads, pid // blocks // num_heads
    if META.IS_GROUPED:
        num_heads_kv = num_heads // group_size
        split = pid // blocks % num_splits
        h_kv = pid // blocks // num_splits % num_heads_kv
        b = pid // blocks // num_splits // num_heads_kv
    start_q, len_q = load_sequence(
        Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, META.IS_RAGGED_Q
    )
    start_kv, len_kv = load_sequence(
        Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, batch, num_tokens_kv, max_seqlen_kv), b, META.IS_RAGGED_KV
    )
    first_column = block * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    slot_kv = len_kv
    if META.HAS_LENGTHS:
        begin, end, front_begin, front, slot_kv = padding_rows(
            Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, batch, num_tokens_kv, max_seqlen_kv),
            b,
            start_kv,
            len_kv,
            first_column,
            block == blocks - 1,
            BLOCK_N,
            META.IS_RAGGED_KV,
        )
    if dk_ptr is not None:
        dk_base = row_pointer(Rows(dk_ptr, stride_dkb, stride_dks, stride_dkh), b, h_kv, start_kv, META)
        dk_base += tl.cast(split, tl.int64) * stride_dk_split * META.ALIGN
        dk_step, dk_offsets = row_steps(stride_dks, BLOCK_N, META)
        if META.HAS_LENGTHS:
            store_zeros(dk_base, dk_step, dk_offsets, begin, end, META.HEAD_DIM_QK, QK0, QK1)
            if META.IS_RAGGED_KV:
                store_zeros(dk_base, dk_step, dk_offsets, front_begin, front, META.HEAD_DIM_QK, QK0, QK1)
    if dv_ptr is not None:
        dv_base = row_pointer(Rows(dv_ptr, stride_dvb, stride_dvs, stride_dvh), b, h_kv, start_kv, META)
        dv_base += tl.cast(split, tl.int64) * stride_dv_split * META.ALIGN
        dv_step, dv_offsets = row_steps(stride_dvs, BLOCK_N, META)
        if META.HAS_LENGTHS:
            store_zeros(dv_base, dv_step, dv_offsets, begin, end, META.HEAD_DIM_V, V0, V1)
            if META.IS_RAGGED_KV:
                store_zeros(dv_base, dv_step, dv_offsets, front_begin, front, META.HEAD_DIM_V, V0, V1)
    if first_column >= len_kv:
        return

    k_pointer = row_pointer(Rows(k_ptr, stride_kb, stride_ks, stride_kh), b, h_kv, start_kv + first_column, META)
    v_pointer = row_pointer(Rows(v_ptr, stride_vb, stride_vs, stride_vh), b, h_kv, start_kv + first_column, META)
    _, k_offsets = row_steps(stride_ks, BLOCK_N, META)
    _, v_offsets = row_steps(stride_vs, BLOCK_N, META)
    q_step, q_offsets = row_steps(stride_qs, META.BLOCK_M, META)
    dout_step, dout_offsets = row_steps(stride_dos, META.BLOCK_M, META)
    k0 = load_tile(k_pointer, k_offsets, first_column, len_kv, 0, QK0, META.HEAD_DIM_QK, True)
    v0 = load_tile(v_pointer, v_offsets, first_column, len_kv, 0, V0, META.HEAD_DIM_V, True)
    dk0 = tl.zeros([BLOCK_N, QK0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    k1 = k0
    dk1 = dk0
    if QK1 > 0:
        k1 = load_tile(k_pointer, k_offsets, first_column, len_kv, QK0, QK1, META.HEAD_DIM_QK, True)
        dk1 = tl.zeros([BLOCK_N, QK1], tl.float32)
    v1 = v0
    dv1 = dv0
    if V1 > 0:
        v1 = load_tile(v_pointer, v_offsets, first_column, len_kv, V0, V1, META.HEAD_DIM_V, True)
        dv1 = tl.zeros([BLOCK_N, V1], tl.float32)

    shift = (len_kv - len_q) * bottom_right
    visible = visible_range_of_queries(first_column, len_q, shift, Band(window_left, window_right, 0), META)
    begin, full_begin, full_end, end = visible
    first_head, num_heads_here = h_kv, 1
    if META.IS_GROUPED:
        heads_per_split = tl.cdiv(group_size, num_splits)
        first_head = h_kv * group_size + split * heads_per_split
        num_heads_here = tl.minimum(heads_per_split, group_size - split * heads_per_split)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    for head in range(num_heads_here):
        h = first_head + head
        b_h = b * num_heads + h
        first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
        q_base = row_pointer(Rows(q_ptr, stride_qb, stride_qs, stride_qh), b, h, start_q, META)
        dout_base = row_pointer(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), b, h, start_q, META)
        q_t, dout_t = HeadChannels(q_t_ptr, stride_qtd), HeadChannels(dout_t_ptr, stride_dotd)
        if META.IS_FP8:
            place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, 0, num_tokens_q, 0), b, start_q)
            q_t = transposed_head(Channels(q_t_ptr, stride_qtb, stride_qth, stride_qtd), b, h, place_q, META.IS_RAGGED_Q)
            dout_t = transposed_head(Channels(dout_t_ptr, stride_dotb, stride_doth, stride_dotd), b, h, place_q, META.IS_RAGGED_Q)
        bias_base, alibi_slope = load_head(
            Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
            Alibi(alibi_slopes_ptr, stride_alibi_b),
            b,
            h,
            META,
        )
        own_captures = captures_of_head(b, h, captures, MODS, META)
        # The queries that the right side of the band cuts (causal: the diagonal) and those that its left side or the end cuts, both
        # by one loop, as each loop more costs the others registers, of which there are too few; and those that see all. With no
        # right side the latter come first: after a loop that may have been skipped, ptxas serializes wgmma.
        masked_ptr, num_masked, full_ptr, first_inside, last_inside = block_indices_ptr, 0, full_indices_ptr, 0, 0
        num_tiles, num_full_tiles = 0, 0
        if META.BLOCK_SIZE_Q > 0:
            row = b * stride_list_b + h * stride_list_h + first_column // META.BLOCK_SIZE_KV
            own_lists = load_block_lists(
                BlockMaskLists(
                    block_counts_ptr,
                    block_indices_ptr,
                    full_counts_ptr,
                    full_indices_ptr,
                    stride_list_b,
                    stride_list_h,
                    list_length,
                ),
                row,
                visible,
                META.BLOCK_SIZE_Q,
                META.BLOCK_M,
                META.HAS_RIGHT,
                META,
            )
            masked_ptr, num_masked, full_ptr, first_inside, last_inside, num_tiles, num_full_tiles = own_lists
        for phase in tl.static_range(FIRST_PHASE, FIRST_PHASE + 2):  # 1 is the one that is cut
            first_part = 0 if phase == 1 and META.HAS_RIGHT and META.BLOCK_SIZE_Q == 0 else 1
            last_part = 1 + tl.cast(full_end < end, tl.int32) if phase == 1 and META.BLOCK_SIZE_Q == 0 else 2
            for part in range(first_part, last_part):
                if META.BLOCK_SIZE_Q > 0:
                    part_begin = 0
                    part_end = num_tiles if phase == 1 else num_full_tiles
                elif phase == 1:
                    part_begin = begin if part == 0 else full_end
                    part_end = full_begin if part == 0 else end
                else:
                    part_begin = full_begin
                    part_end = full_end
                dk0, dk1, dv0, dv1 = _attn_bwd_dkdv_loop(
                    dk0,
                    dk1,
                    dv0,
                    dv1,
                    k0,
                    k1,
                    v0,
                    v1,
                    q_base,
                    q_step,
                    q_offsets,
                    dout_base,
                    dout_step,
                    dout_offsets,
                    lse_log2_ptr,
                    delta_ptr,
                    p_scale_ptr,
                    first_statistic,
                    large,
                    bias_base,
                    rng_state_ptr,
                    part_begin,
                    part_end,
                    first_column,
                    len_q,
                    len_kv,
                    shift,
                    window_left,
                    window_right,
                    softmax_scale,
                    softcap,
                    keep_scale,
                    alibi_slope,
                    dropout_threshold,
                    b_h,
                    stride_bias_m,
                    stride_bias_n,
                    b,
                    h,
                    own_captures,
                    TileList(masked_ptr, num_masked, full_ptr, first_inside, last_inside - first_inside)
                    if phase == 1
                    else TileList(masked_ptr, 0, full_ptr, 0, first_inside),
                    descales,
                    h_kv,
                    q_t,
                    dout_t,
                    MODS,
                    dk_ptr is not None,
                    dv_ptr is not None,
                    phase == 1,
                    META,
                )
    is_real = (columns < len_kv)[:, None]
    if dk_ptr is not None:
        dk_pointer = dk_base + tl.cast(first_column, tl.int64) * dk_step
        dk0 *= softmax_scale
        if META.HAS_LENGTHS:
            dk0 = tl.where(is_real, dk0, 0.0)
        store_tile(dk_pointer, dk0, dk_offsets, first_column, slot_kv, 0, QK0, META.HEAD_DIM_QK)
        if QK1 > 0:
            dk1 *= softmax_scale
            if META.HAS_LENGTHS:
                dk1 = tl.where(is_real, dk1, 0.0)
            store_tile(dk_pointer, dk1, dk_offsets, first_column, slot_kv, QK0, QK1, META.HEAD_DIM_QK)
    if dv_ptr is not None:
        dv_pointer = dv_base + tl.cast(first_column, tl.int64) * dv_step
        if META.HAS_LENGTHS:
            dv0 = tl.where(is_real, dv0, 0.0)
        store_tile(dv_pointer, dv0, dv_offsets, first_column, slot_kv, 0, V0, META.HEAD_DIM_V)
        if V1 > 0:
            if META.HAS_LENGTHS:
                dv1 = tl.where(is_real, dv1, 0.0)
            store_tile(dv_pointer, dv1, dv_offsets, first_column, slot_kv, V0, V1, META.HEAD_DIM_V)


def attention_backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None = None,
    dsoftmax_offset: Tensor | None = None,
    tile_dq: Tile | None = None,
    tile_dkdv: Tile | None = None,
    dcaptures: Sequence[Tensor] = (),
    deterministic: bool = False,
) -> None:
    """Write the gradients of q, k, v and, unless they are None, of the bias and of softmax_offset (fp32 [h]), and of the captures
    that need one, the only ones whose bits may vary from run to run unless `deterministic`.

    `out` and `lse` are the forward's; `dout` is laid out as `out` in any view with a contiguous last dim; `dlse`, contiguous, as
    `lse`; each gradient as its input.
    """
    x = problem
    if x.batch == 0:  # no program to write the padding
        for gradient in (dq, dk, dv, dbias, dsoftmax_offset, *dcaptures):
            if gradient is not None:
                gradient.zero_()
        return
    statistics, lse = new_statistics(x, lse)

    tile = tile_dq or x.tile(DQ)
    meta = x.meta(tile, (out, dout, dq))
    blocks = triton.cdiv(x.longest_q, tile.block_m)
    dsink = dsoftmax_offset.new_empty((x.num_heads, x.batch * blocks)) if dsoftmax_offset is not None else None
    arguments = (
        *x.arguments(meta),
        *(out, *row_strides(out, meta)),
        *(dout, *row_strides(dout, meta)),
        *(dq, *row_strides(dq, meta)),
        *(lse, dlse, *statistics, dsink, *transposed(x, "k"), x.mods, meta),
    )
    launch(_attn_bwd_dq_kernel, blocks * x.num_heads * x.batch, x.device, tile, arguments)
    if dsoftmax_offset is not None and dsink is not None:
        torch.sum(dsink, 1, out=dsoftmax_offset)

    q_t, dout_t = transposed(x, "q"), transposed(x, "q", dout)
    tile = tile_dkdv or x.tile(DKDV)
    # A program does all the query heads that share its keys, up to 8 of them, past which there would be too few programs. In fp32
    # it does one: the shorter sums round less, and there they are what rounds most.
    num_splits = x.group_size if x.q.dtype is torch.float32 else triton.cdiv(x.group_size, 8)
    # zeros, as no program may own a row if cu_seqlens is wrong
    dk_parts = dk if num_splits == 1 else torch.zeros((num_splits, *dk.shape), dtype=torch.float32, device=x.device)
    dv_parts = dv if num_splits == 1 else torch.zeros((num_splits, *dv.shape), dtype=torch.float32, device=x.device)
    dk_one, dv_one = (dk, dv) if num_splits == 1 else (dk_parts[0], dv_parts[0])
    meta = x.meta(tile, (dout, dk_one, dv_one))
    blocks = triton.cdiv(x.longest_kv, tile.block_n)
    for dk_part, dv_part in ((dk_parts, None), (None, dv_parts)) if tile.apart else ((dk_parts, dv_parts),):
        arguments = (
            *x.arguments(meta, "q"),
            *(dout, *row_strides(dout, meta)),
            *(dk_part, *row_strides(dk_one, meta)),
            *(dv_part, *row_strides(dv_one, meta)),
            *(dk_one.numel() // meta.ALIGN, dv_one.numel() // meta.ALIGN, num_splits),
            *(*statistics, *q_t, *dout_t, x.mods, meta),
        )
        launch(_attn_bwd_dkdv_kernel, blocks * num_splits * x.num_heads_kv * x.batch, x.device, tile, arguments)
    if num_splits > 1:
        dk.copy_(dk_parts.sum(0))
        dv.copy_(dv_parts.sum(0))
    score_gradients(x, statistics, dout, dlse, dbias, dcaptures, deterministic)
