"""Rows whose lse is so large that fp32 does not hold it well enough to make probabilities from it: what is left of it, exactly.

A probability is exp(logit - lse). An lse of 1e4 is a multiple of 2**-10 and one of -1e9, of a row that a bias hides whole, of 64,
so that the row's probabilities would sum to anything. Of such rows the backward takes lse off the logits first, which is exact
where it matters, and then the rest of it: the logarithm of what exp(logit - lse) sums to, for which the keys are gone through here
once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Alibi, Band, Bias, BlockMaskLists, Head, Lengths, Rows
from flexattn.kernels_triton.common.block_lists import TileList, listed_tile, load_block_lists
from flexattn.kernels_triton.common.primitives import (
    LN2,
    LOG2E,
    captures_of_head,
    descaled,
    large_part,
    load_descale,
    load_head,
    load_sequence,
    load_sink,
    load_tile,
    logits,
    lse_row,
    row_pointer,
    row_steps,
    visible_keys,
    visible_range_of_keys,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT
from flexattn.kernels_triton.runtime.launch import kernel, launch


class LargeRows(NamedTuple):
    """What a backward reads of its lse; of logits that are not unbounded lse itself is all there is."""

    rest: Tensor  # as lse: lse, but in a row where it is large what is left of it once it was taken off the logits
    is_any: Tensor | None  # int32 [1]: 1 if there are such rows
    lse: Tensor | None


@kernel
def _attn_bwd_large_rows_kernel(
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
    lse_ptr,
    rest_ptr,
    is_any_ptr,  # 0 before
    IS_PART: tl.constexpr,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    start_q, len_q = load_sequence(
        Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, META.IS_RAGGED_Q
    )
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    row = lse_row(b, h, num_heads, num_tokens_q, start_q, META)
    lse = tl.load(lse_ptr + row + rows, mask=rows < len_q, other=0.0)
    shift = large_part(lse)
    if tl.max(tl.abs(shift), 0) == 0.0:
        tl.store(rest_ptr + row + rows, lse, mask=rows < len_q)
        return
    tl.store(is_any_ptr, 1)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if not IS_PART:
        start_kv, len_kv = load_sequence(
            Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, batch, num_tokens_kv, max_seqlen_kv), b, META.IS_RAGGED_KV
        )
        h_kv = h // group_size
        q_pointer = row_pointer(Rows(q_ptr, stride_qb, stride_qs, stride_qh), b, h, start_q + first_row, META)
        k_base = row_pointer(Rows(k_ptr, stride_kb, stride_ks, stride_kh), b, h_kv, start_kv, META)
        _, q_offsets = row_steps(stride_qs, BLOCK_M, META)
        k_step, k_offsets = row_steps(stride_ks, BLOCK_N, META)
        bias_base, alibi_slope = load_head(
            Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
            Alibi(alibi_slopes_ptr, stride_alibi_b),
            b,
            h,
            META,
        )
        captures = captures_of_head(b, h, captures, MODS, META)
        shift_of_band = (len_kv - len_q) * bottom_right
        q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
        q1 = q0
        if META.QK1 > 0:
            q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
        visible = visible_range_of_keys(first_row, len_kv, shift_of_band, Band(window_left, window_right, 0), META)
        begin, _full_begin, _full_end, end = visible
        masked_ptr, num_masked, full_ptr = block_indices_ptr, 0, full_indices_ptr
        if META.BLOCK_SIZE_Q > 0:
            list_row = b * stride_list_b + h * stride_list_h + first_row // META.BLOCK_SIZE_Q
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
                list_row,
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
            i = rows[:, None]
            j = (n + tl.arange(0, BLOCK_N))[None, :]
            k_pointer = k_base + tl.cast(n, tl.int64) * k_step
            k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
            qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)
            if META.QK1 > 0:
                k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
                qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
            score_scale = softmax_scale
            if META.IS_FP8:
                descale = load_descale(descales, 0, b, h, first_row, META) * load_descale(descales, 1, b, h_kv, n, META)
                qk, score_scale = descaled(qk, descale, softmax_scale, META)
            s, _factor, _cap_tanh, _score = logits(
                qk,
                i,
                j,
                score_scale,
                Head(b, h, len_q, len_kv, shift_of_band, softcap, bias_base, stride_bias_m, stride_bias_n, alibi_slope, captures),
                MODS,
                META,
            )
            s = tl.where(visible_keys(i, j, len_kv, shift_of_band, Band(window_left, window_right, 0), META), s, float("-inf"))
            if META.HAS_MASK_MOD:
                s = tl.where(MODS.mask(b, h, i, j, captures) | is_full, s, float("-inf"))
            row_sum += tl.sum(tl.exp2((s - shift[:, None]) * LOG2E), 1)
        if META.HAS_SINK:
            row_sum += tl.exp2((load_sink(softmax_offset_ptr, h, 1.0, META) - shift) * LOG2E)
    left = tl.where(row_sum == 0.0, 0.0, tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)) * LN2)
    tl.store(rest_ptr + row + rows, tl.where(shift == 0.0, lse, left), mask=rows < len_q)


def large_rows(problem: Problem, lse: Tensor) -> LargeRows:
    """What the backward of `problem` reads of lse. Of a part of the keys (`Problem.is_part`) nothing is left of a large lse."""
    x = problem
    if not x.is_unbounded:
        return LargeRows(lse, None, None)
    if x.block_mask is not None and x.block_mask.kv_num_blocks is None:  # made of the mask_mod, which says it all
        x = x.without_block_mask()
    tile = x.tile(BIAS_GRADIENT)
    meta = x.meta(tile)
    rest, is_any = torch.empty_like(lse), torch.zeros(1, dtype=torch.int32, device=x.device)
    programs = triton.cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    arguments = (*x.arguments(meta), lse, rest, is_any, x.is_part, x.mods, meta)
    launch(_attn_bwd_large_rows_kernel, programs, x.device, tile, arguments)
    return LargeRows(rest, is_any, lse)
