"""Forward attention: one kernel for every format, band, bias and softmax type, and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Alibi, Band, Bias, BlockMaskLists, Channels, Head, Lengths, Rows
from flexattn.kernels_triton.common.block_lists import TileList, listed_tile, load_block_lists
from flexattn.kernels_triton.common.primitives import (
    FP8_OFFSET,
    LN2,
    LOG2E,
    HeadChannels,
    captures_of_head,
    descaled,
    dropout_keep,
    exponent_factor,
    exponent_origin,
    load_columns,
    load_descale,
    load_head,
    load_sequence,
    load_sink,
    load_tile,
    log_of_sum,
    logits,
    packed_start,
    padding_rows,
    positive_factor,
    row_pointer,
    row_steps,
    store_tile,
    store_zeros,
    transposed_head,
    visible_keys,
    visible_range_of_keys,
)
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.common.quantize import transposed
from flexattn.kernels_triton.common.split_kv import (
    Parts,
    combine_splits,
    number_of_splits,
    part_row,
    range_of_split,
    share_of_split,
)
from flexattn.kernels_triton.common.tiles import FORWARD, SPLIT_PROGRAMS
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch, num_processors


@triton.jit
def _attn_fwd_loop(
    acc0,
    acc1,
    row_sum,
    row_max,
    q0,
    q1,
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
    alibi_slope,
    dropout_threshold,
    b_h,
    stride_bias_m,
    stride_bias_n,
    b,
    h,
    captures,
    listed,  # of a block mask: what `listed_tile` finds a tile by
    descales,
    h_kv,
    descale_q,  # in FP8, of this block of queries
    v_t_base,  # v with its tokens innermost, which the matrix instructions want
    stride_vtd,
    MODS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    OFFSET: tl.constexpr = FP8_OFFSET if META.IS_FP8 else 0.0
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
        j = columns[None, :]
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # [BLOCK_M, BLOCK_N]
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
        score_scale = softmax_scale
        if META.IS_FP8:
            descale_k = load_descale(descales, 1, b, h_kv, n, META)
            qk, score_scale = descaled(qk, descale_q * descale_k, softmax_scale, META)
        s, factor, _, _ = logits(
            qk,
            i,
            j,
            score_scale,
            Head(b, h, len_q, len_kv, shift, softcap, bias_base, stride_bias_m, stride_bias_n, alibi_slope, captures),
            MODS,
            META,
        )
        if IS_MASKED:
            s = tl.where(visible_keys(i, j, len_kv, shift, Band(window_left, window_right, 0), META), s, float("-inf"))
        if META.HAS_MASK_MOD and (IS_MASKED or META.BLOCK_SIZE_Q == 0):
            s = tl.where(MODS.mask(b, h, i, j, captures) | is_full, s, float("-inf"))
        if META.IS_FP8 and not (META.IS_UNBOUNDED or META.HAS_SOFTCAP):
            factor = positive_factor(score_scale * LOG2E)
        if META.IS_UNBOUNDED:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            factor = exponent_factor(new_max)
            origin = exponent_origin(new_max, factor, OFFSET)
            decay = tl.exp2(exponent_origin(row_max, factor, OFFSET) - origin)
            p = tl.exp2(tl.fma(s, factor[:, None], -origin[:, None]))
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
            origin = tl.where(new_max == float("-inf"), 0.0, new_max)  # of a row that has seen nothing yet: exp2(-inf - 0) is 0
            decay = tl.exp2(row_max - origin)
            origin -= OFFSET  # p, and so row_sum and acc, are scaled to fill the range of e4m3
            p = tl.exp2(tl.fma(s, factor, -origin[:, None]))
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        if META.HAS_DROPOUT:
            p = tl.where(dropout_keep(rng_state_ptr, dropout_threshold, b_h, first_row, n, META), p, 0.0)
        if META.IS_FP8:
            # Each product in an accumulator of its own: the matrix instruction's keeps 14 bits or so.
            p = p.to(tl.float8e4nv)
            descale_v = load_descale(descales, 2, b, h_kv, n, META) if META.HAS_BLOCK_SCALES else 1.0
            v0 = load_columns(HeadChannels(v_t_base, stride_vtd), n, len_kv, BLOCK_N, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
            acc0 = acc0 * decay[:, None] + tl.dot(p, tl.trans(v0)) * descale_v
            if META.V1 > 0:
                v1 = load_columns(
                    HeadChannels(v_t_base, stride_vtd), n, len_kv, BLOCK_N, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED
                )
                acc1 = acc1 * decay[:, None] + tl.dot(p, tl.trans(v1)) * descale_v
        else:
            v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
            p = p.to(v0.dtype)
            acc0 = tl.dot(p, v0, acc0 * decay[:, None], input_precision=META.PRECISION)
            if META.V1 > 0:
                v1 = load_tile(v_pointer, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
                acc1 = tl.dot(p, v1, acc1 * decay[:, None], input_precision=META.PRECISION)
        if META.BLOCK_SIZE_Q == 0:
            k_pointer += BLOCK_N * k_step
            v_pointer += BLOCK_N * v_step
    return acc0, acc1, row_sum, row_max


@kernel
def _attn_fwd_kernel(
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
    lse_ptr,
    max_logit_ptr,  # [h, b * blocks * splits] or None: the largest logit that each block of queries saw
    num_splits,  # of the keys, of which out and lse are then parts, as `splits.Parts` has them; None: one program takes all keys
    v_t_ptr,  # v as `transpose_tokens` copies it
    stride_vtb,
    stride_vth,
    stride_vtd,
    MODS: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    split = 0
    if num_splits is not None:
        split = pid % num_splits
        pid = pid // num_splits
        rows_before = part_row(split, batch, num_heads, num_tokens_q, META)
        out_ptr += rows_before * META.HEAD_DIM_V
        lse_ptr += rows_before
    block = blocks - 1 - pid % blocks  # under a causal band the last block has the most to do: start with it
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    b_h = b * num_heads + h
    place = (h * batch + b) * blocks + block  # of what is left for each block of queries
    if num_splits is not None:
        place = place * num_splits + split
    start_q, len_q = load_sequence(
        Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, META.IS_RAGGED_Q
    )
    start_kv, len_kv = load_sequence(
        Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, batch, num_tokens_kv, max_seqlen_kv), b, META.IS_RAGGED_KV
    )
    first_row = block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    out_base = row_pointer(Rows(out_ptr, stride_ob, stride_os, stride_oh), b, h, start_q, META)
    out_step, out_offsets = row_steps(stride_os, BLOCK_M, META)
    lse_base = lse_ptr + tl.cast(h if META.IS_RAGGED_Q else b_h, tl.int64) * num_tokens_q + start_q

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
        for rows_of in tl.static_range(2 if META.IS_RAGGED_Q else 1):
            first_padding, end_padding = (begin, end) if rows_of == 0 else (front_begin, front)
            store_zeros(out_base, out_step, out_offsets, first_padding, end_padding, META.HEAD_DIM_V, V0, V1)
            for row in range(first_padding, end_padding, BLOCK_M):
                padding = row + tl.arange(0, BLOCK_M)
                tl.store(lse_base + padding, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=padding < end_padding)
        if first_row >= len_q:
            if max_logit_ptr is not None:
                tl.store(max_logit_ptr + place, float("-inf"))
            return

    q_pointer = row_pointer(Rows(q_ptr, stride_qb, stride_qs, stride_qh), b, h, start_q + first_row, META)
    _, q_offsets = row_steps(stride_qs, BLOCK_M, META)
    k_step, k_offsets = row_steps(stride_ks, META.BLOCK_N, META)
    v_step, v_offsets = row_steps(stride_vs, META.BLOCK_N, META)
    k_base = row_pointer(Rows(k_ptr, stride_kb, stride_ks, stride_kh), b, h // group_size, start_kv, META)
    v_base = row_pointer(Rows(v_ptr, stride_vb, stride_vs, stride_vh), b, h // group_size, start_kv, META)
    bias_base, alibi_slope = load_head(
        Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        Alibi(alibi_slopes_ptr, stride_alibi_b),
        b,
        h,
        META,
    )
    captures = captures_of_head(b, h, captures, MODS, META)
    shift = (len_kv - len_q) * bottom_right
    q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
    q1 = q0
    if META.QK1 > 0:
        q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = acc0
    if V1 > 0:
        acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # in units of log2, but for unbounded logits, whose largest is exact

    descale_q, v_t_base = 1.0, v_t_ptr
    if META.IS_FP8:
        descale_q = load_descale(descales, 0, b, h, first_row, META)
        place_kv = packed_start(Lengths(cu_seqlens_kv_ptr, cu_seqlens_kv_padded_ptr, 0, num_tokens_kv, 0), b, start_kv)
        v_t_base = transposed_head(
            Channels(v_t_ptr, stride_vtb, stride_vth, stride_vtd), b, h // group_size, place_kv, META.IS_RAGGED_KV
        ).ptr

    visible = visible_range_of_keys(first_row, len_kv, shift, Band(window_left, window_right, 0), META)
    begin, full_begin, full_end, end = visible
    masked_ptr, num_masked, full_ptr, first_inside, last_inside = block_indices_ptr, 0, full_indices_ptr, 0, 0
    if num_splits is not None and META.BLOCK_SIZE_Q == 0:
        begin, full_begin, full_end, end = range_of_split(begin, full_begin, full_end, end, split, num_splits, META.BLOCK_N)
    rest_begin = full_end
    if META.BLOCK_SIZE_Q > 0:
        row = b * stride_list_b + h * stride_list_h + first_row // META.BLOCK_SIZE_Q
        own_lists = load_block_lists(
            BlockMaskLists(
                block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length
            ),
            row,
            visible,
            META.BLOCK_SIZE_KV,
            META.BLOCK_N,
            META.HAS_LEFT,
            META,
        )
        masked_ptr, num_masked, full_ptr, first_inside, last_inside, end, full_end = own_lists
        full_begin, rest_begin = 0, 0
        if num_splits is not None:
            full_begin, full_end = share_of_split(full_end, split, num_splits)
            rest_begin, end = share_of_split(end, split, num_splits)
    # Phase 0: keys that the left side of the band cuts; 1: keys that every row sees; 2: keys cut by its right side or the end.
    # With a block mask 1: blocks that are seen whole; 2: all others.
    for phase in tl.static_range(0 if META.HAS_LEFT and META.BLOCK_SIZE_Q == 0 else 1, 3):
        acc0, acc1, row_sum, row_max = _attn_fwd_loop(
            acc0,
            acc1,
            row_sum,
            row_max,
            q0,
            q1,
            k_base,
            k_step,
            k_offsets,
            v_base,
            v_step,
            v_offsets,
            bias_base,
            rng_state_ptr,
            begin if phase == 0 else (full_begin if phase == 1 else rest_begin),
            full_begin if phase == 0 else (full_end if phase == 1 else end),
            first_row,
            len_q,
            len_kv,
            shift,
            window_left,
            window_right,
            softmax_scale,
            softcap,
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
            h // group_size,
            descale_q,
            v_t_base,
            stride_vtd,
            MODS,
            phase != 1,
            META,
        )

    is_real = rows < len_q
    if max_logit_ptr is not None:
        largest = tl.max(tl.where(is_real, row_max, float("-inf")), 0) * (1.0 if META.IS_UNBOUNDED else LN2)
        tl.store(max_logit_ptr + place, largest)
    rescale = tl.zeros([BLOCK_M], tl.float32) + (keep_scale if META.HAS_DROPOUT else 1.0)
    OFFSET: tl.constexpr = FP8_OFFSET if META.IS_FP8 else 0.0
    if META.HAS_SINK:
        sink = load_sink(softmax_offset_ptr, h, 1.0 if META.IS_UNBOUNDED else LOG2E, META)
        if num_splits is not None:
            sink = tl.where(split == 0, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        if META.IS_UNBOUNDED:
            factor = exponent_factor(new_max)
            origin = exponent_origin(new_max, factor, OFFSET)
            decay = tl.exp2(exponent_origin(row_max, factor, OFFSET) - origin)
            row_sum = row_sum * decay + tl.exp2(tl.fma(sink, factor, -origin))
        else:
            origin = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(row_max - origin)
            row_sum = row_sum * decay + tl.exp2(sink - origin + OFFSET)
        rescale *= decay
        row_max = new_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # of a row that sees nothing: its out is 0 / 1, its lse -inf + 0
    rescale = rescale / row_sum
    if META.IS_FP8 and not META.HAS_BLOCK_SCALES:
        rescale *= load_descale(descales, 2, b, h // group_size, 0, META)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        lse, lost = log_of_sum(row_max, factor, exponent_origin(row_max, factor, OFFSET), row_sum)
        if num_splits is not None:
            lost_base = lse_base + part_row(num_splits, batch, num_heads, num_tokens_q, META)
            tl.store(lost_base + rows, lost, mask=rows < len_q)
    else:
        lse = (row_max - OFFSET + tl.log2(row_sum)) * LN2
    tl.store(lse_base + rows, tl.where(is_real, lse, float("-inf")), mask=rows < slot_q)
    out_pointer = row_pointer(Rows(out_ptr, stride_ob, stride_os, stride_oh), b, h, start_q + first_row, META)
    out0 = tl.where(is_real[:, None], acc0 * rescale[:, None], 0.0)
    store_tile(out_pointer, out0, out_offsets, first_row, slot_q, 0, V0, META.HEAD_DIM_V)
    if V1 > 0:
        out1 = tl.where(is_real[:, None], acc1 * rescale[:, None], 0.0)
        store_tile(out_pointer, out1, out_offsets, first_row, slot_q, V0, V1, META.HEAD_DIM_V)


def tiles_and_room(problem: Problem, tile: Tile) -> tuple[int, int]:
    """(tiles, programs that the device has room for), for `number_of_splits`."""
    tiles = -(-problem.longest_q // tile.block_m) * problem.num_heads * problem.batch
    return tiles, SPLIT_PROGRAMS * num_processors(problem.device)


def attention_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """Write out, laid out as q with v's head dim, lse, fp32 [b, h, sq] or [h, total_q], and max_logit, None or fp32 [h].

    splits: parts of the keys; None: `number_of_splits`.
    """
    x = problem
    if x.batch == 0:  # no program to write the padding
        out.zero_()
        lse.fill_(float("-inf"))
        if max_logit is not None:
            max_logit.fill_(float("-inf"))
        return
    tile = tile or x.tile(FORWARD)
    tiles, room = tiles_and_room(x, tile)
    splits = number_of_splits(x, tiles, room) if splits is None else splits
    parts = Parts.empty(splits, lse, out.shape[-1], x.is_unbounded) if splits > 1 else None
    rows = out if parts is None else parts.rows(lse)
    meta = x.meta(tile, (rows,))
    largest = max_logit.new_empty((x.num_heads, tiles // x.num_heads * splits)) if max_logit is not None else None
    v_t = transposed(x, "v")
    written = (rows, *row_strides(rows, meta), lse if parts is None else parts.lse, largest, None if parts is None else splits)
    arguments = (*x.arguments(meta), *written, *v_t, x.mods, meta)
    launch(_attn_fwd_kernel, tiles * splits, out.device, tile, arguments)
    if parts is not None:
        combine_splits(x, parts, out, lse)
    if max_logit is not None and largest is not None:
        torch.amax(largest, 1, out=max_logit)
