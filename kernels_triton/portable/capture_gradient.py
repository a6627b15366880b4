"""The gradients of what a score_mod captures: scores once more, and what each one adds where the mod read, by one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Alibi, Band, Bias, BlockMaskLists, Head, Lengths, Rows
from flexattn.kernels_triton.common.block_lists import TileList, listed_tile, load_block_lists
from flexattn.kernels_triton.common.preprocess import Statistics
from flexattn.kernels_triton.common.primitives import (
    captures_of_head,
    descaled_products,
    dropout_keep,
    load_head,
    load_large,
    load_row_statistics,
    load_sequence,
    load_tile,
    row_pointer,
    row_steps,
    score_gradient,
    statistics_row,
    visible_range_of_keys,
)
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

FEW = 2**16  # elements of a capture that millions of scores may read each: n roundings in fp32 are off by some sqrt(n) / 2**25


@kernel
def _attn_bwd_captures_kernel(
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
    dout_ptr,
    stride_dob,
    stride_dos,
    stride_doh,
    lse_log2_ptr,
    delta_ptr,
    p_scale_ptr,
    large_ptr,
    large_lse_ptr,
    sums,  # of each capture that needs a gradient, as MODE says
    scales,
    MODE: tl.constexpr,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
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
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    shift = (len_kv - len_q) * bottom_right
    q_pointer = row_pointer(Rows(q_ptr, stride_qb, stride_qs, stride_qh), b, h, start_q + first_row, META)
    dout_pointer = row_pointer(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), b, h, start_q + first_row, META)
    k_base = row_pointer(Rows(k_ptr, stride_kb, stride_ks, stride_kh), b, h // group_size, start_kv, META)
    v_base = row_pointer(Rows(v_ptr, stride_vb, stride_vs, stride_vh), b, h // group_size, start_kv, META)
    _, q_offsets = row_steps(stride_qs, BLOCK_M, META)
    _, dout_offsets = row_steps(stride_dos, BLOCK_M, META)
    k_step, k_offsets = row_steps(stride_ks, BLOCK_N, META)
    v_step, v_offsets = row_steps(stride_vs, BLOCK_N, META)
    bias_base, alibi_slope = load_head(
        Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        Alibi(alibi_slopes_ptr, stride_alibi_b),
        b,
        h,
        META,
    )
    captures = captures_of_head(b, h, captures, MODS, META)
    first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    large = load_large(large_ptr, large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    lse_log2, delta, p_scale = load_row_statistics(
        lse_log2_ptr, delta_ptr, p_scale_ptr, first_statistic + first_row, len_q - first_row, BLOCK_M, True, META
    )
    q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
    dout0 = load_tile(dout_pointer, dout_offsets, first_row, len_q, 0, META.V0, META.HEAD_DIM_V, True)
    q1 = q0
    dout1 = dout0
    if META.QK1 > 0:
        q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
    if META.V1 > 0:
        dout1 = load_tile(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V, True)
    visible = visible_range_of_keys(first_row, len_kv, shift, Band(window_left, window_right, 0), META)
    begin, _full_begin, _full_end, end = visible
    masked_ptr, num_masked, full_ptr = block_indices_ptr, 0, full_indices_ptr
    if META.BLOCK_SIZE_Q > 0:
        row = b * stride_list_b + h * stride_list_h + first_row // META.BLOCK_SIZE_Q
        own_lists = load_block_lists(
            BlockMaskLists(
                block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length
            ),
            row,
            visible,
            META.BLOCK_SIZE_KV,
            BLOCK_N,
            META.HAS_LEFT,
            META,
        )
        masked_ptr, num_masked, full_ptr, _first, _last, num_cut, num_uncut = own_lists
        begin = 0
        end = num_cut + num_uncut
    for t in tl.range(begin, end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n = t
        is_full = False
        if META.BLOCK_SIZE_Q > 0:
            n, is_full = listed_tile(t, TileList(masked_ptr, num_masked, full_ptr, 0, 0), META.BLOCK_SIZE_KV, BLOCK_N)
        columns = n + tl.arange(0, BLOCK_N)
        k_pointer = k_base + tl.cast(n, tl.int64) * k_step
        v_pointer = v_base + tl.cast(n, tl.int64) * v_step
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
        v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
        if META.V1 > 0:
            v1 = load_tile(v_pointer, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, True)
            dp = tl.dot(dout1, tl.trans(v1), dp, input_precision=META.PRECISION)
        qk, dp, score_scale = descaled_products(qk, dp, descales, b, h, h // group_size, first_row, n, softmax_scale, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = dropout_keep(rng_state_ptr, dropout_threshold, b_h, first_row, n, META)
        _p, _p_dropped, dlogit, _ds, score = score_gradient(
            qk,
            dp,
            lse_log2[:, None],
            delta[:, None],
            p_scale[:, None],
            large,
            rows[:, None],
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
            "keys",
            META,
        )
        MODS.accumulate(dlogit, score, b, h, rows[:, None], columns[None, :], captures, sums, scales, MODE)


def capture_gradients(
    problem: Problem,
    statistics: Statistics,
    dout: Tensor,
    gradients: Sequence[Tensor],
    deterministic: bool,
    tile: Tile | None = None,
) -> None:
    """Write `gradients`, contiguous, of the captures that need one. `statistics` is what the dq kernel wrote.

    Memory is linear in the captures. Sums are made by atomics, whose order varies from run to run: in fp32, of captures with few
    elements in fp64. With `deterministic` they are made in two stages: the largest addend, which no order changes, then int64
    fixed-point sums with that as their unit, which no order changes either. An addend is rounded to
    2**-(62 - log2(batch * heads * sq * skv)) of the largest one.
    """
    x = problem
    tile = tile or x.tile(BIAS_GRADIENT)
    meta = x.meta(tile, (dout,))
    programs = triton.cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch

    def run(mode: str, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        arguments = (
            *x.arguments(meta),
            dout,
            *row_strides(dout, meta),
            *statistics,
            tuple(sums),
            tuple(scales),
            mode,
            x.mods,
            meta,
        )
        launch(_attn_bwd_captures_kernel, programs, x.device, tile, arguments)

    if not deterministic:
        sums = [g.new_zeros(g.shape, dtype=torch.float64 if g.numel() <= FEW else torch.float32) for g in gradients]
        run("add", sums, sums)
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total)
        return
    largest = [torch.zeros(1, dtype=torch.int32, device=x.device) for _ in gradients]  # the bits of a float that is not negative
    run("max", largest, largest)
    room = 62 - max(0, math.ceil(math.log2(x.batch * x.num_heads * x.longest_q * x.longest_kv)))
    _, exponents = torch.frexp(torch.cat(largest).view(torch.float32))
    powers = torch.clamp(room - exponents, max=126)
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    fixed = [torch.zeros(g.shape, dtype=torch.int64, device=x.device) for g in gradients]
    run("fixed", fixed, scales.split(1))
    for i, gradient in enumerate(gradients):
        total = fixed[i].to(torch.float64) / scales[i].to(torch.float64)
        is_finite = largest[i][0].view(torch.float32).isfinite()
        gradient.copy_(torch.where(is_finite, total, math.nan))
