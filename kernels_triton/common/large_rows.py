"""Exact remainders of lse, for rows whose lse is so large that fp32 is too coarse to compute probabilities from it.

A probability is exp(logit - lse). An lse of 1e4 is a multiple of 2**-10. In a row that a bias hides completely, an lse of -1e9 is a
multiple of 64. Then the row's probabilities would have an arbitrary sum. For such rows the backward first subtracts lse from the
logits, which is exact for the large weights, and then subtracts the remainder: the logarithm of the sum of exp(logit - lse). The
kernel in this file computes it in a second pass over the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Pointer
from flexattn.kernels_triton.common.band import visible_keys, visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import every_tile, listed_tile
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.fp8_tiles import descaled, load_descale
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import large_part, lse_row
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import load_parts, load_tile
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT, cdiv
from flexattn.kernels_triton.runtime.launch import kernel, launch


class LargeRows(NamedTuple):
    """lse as a backward reads it; if logits are bounded, only `rest` is set, and it is lse itself."""

    remainder: Tensor  # lse, but in a row with a large lse the remainder after lse is subtracted from the logits
    is_any: Tensor | None  # int32 [1]: 1 if such rows exist
    lse: Tensor | None


class Arguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    lse_ptr: Pointer
    rest_ptr: Pointer
    is_any_ptr: Pointer  # 0 before the launch


@kernel
def _attn_bwd_large_rows_kernel(args: Arguments, IS_PART: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
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
    args = Arguments(inputs=x.inputs(meta), lists=x.lists("kv"), lse_ptr=lse, rest_ptr=remainder, is_any_ptr=is_any)
    launch(_attn_bwd_large_rows_kernel, programs, x.device, tile, (args, x.is_part, x.mods, meta))
    return LargeRows(remainder, is_any, lse)
