"""From products to logits, and their derivatives.

Tiles are [queries, keys] or [keys, queries]. Functions with arguments `i` and `j` serve both. These are positions within their
sequence, in a shape that broadcasts against the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import HeadRows
from flexattn.kernels_triton.common.band import visible_keys, visible_queries
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import aligned_stride
from flexattn.kernels_triton.common.lse_rows import relative_to_lse
from flexattn.kernels_triton.common.tanh import tanh, tanh_in_half


# Returns the tile of the bias in fp32; 0 without a bias, and outside of the sequences.
@triton.jit
def load_bias(head, i, j, META: tl.constexpr):
    ALIGN: tl.constexpr = META.BIAS_ALIGN
    bias = 0.0
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS:
        end = head.len_kv
        if ALIGN > 1:
            end = tl.cdiv(end, ALIGN) * ALIGN
        inside = (i < head.len_q) & (j < end)
        if ALIGN > 1 and j.shape[1] > 1:
            inside = tl.max_constancy(inside, [1, ALIGN])
        bias = tl.load(head.bias_ptr + _bias_offsets(head, i, j, META), mask=inside, other=0.0).to(tl.float32)
        if ALIGN > 1 and (META.IS_RAGGED_KV or META.HAS_LENGTHS):
            bias = tl.where(j < head.len_kv, bias, 0.0)
    return bias


# Returns the bias of a block of queries as rows of keys. A query past the end has the last query's, and its result is not
# stored.
@triton.jit
def rows_of_bias(head, rows, first_row, META: tl.constexpr):
    ALIGN: tl.constexpr = META.BIAS_ALIGN
    stride_m = aligned_stride(head.bias_stride_m, META)
    step = tl.cast(1 if ALIGN > 0 else head.bias_stride_n, tl.int64)
    rows = tl.minimum(rows, head.len_q - 1) - first_row
    columns = tl.arange(0, META.BLOCK_N)
    if META.WIDE_STRIDES:
        rows = rows.to(tl.int64)
    if ALIGN == 0:
        columns = columns * (tl.cast(step, tl.int32) if META.IS_NEAR else step)
    offsets = rows[:, None] * stride_m + columns[None, :]
    if ALIGN > 1:
        offsets = tl.multiple_of(offsets, [1, ALIGN])
    return HeadRows(base=head.bias_ptr + tl.cast(first_row, tl.int64) * stride_m, step=step, offsets=offsets)


# Returns the tile of the bias at keys j. Without CHECK_KEYS all of them are before the end, and the load needs no mask.
@triton.jit
def load_bias_tile(pointer, offsets, j, len_kv, CHECK_KEYS: tl.constexpr, META: tl.constexpr):
    ALIGN: tl.constexpr = META.BIAS_ALIGN
    if CHECK_KEYS:
        inside = j < (tl.cdiv(len_kv, ALIGN) * ALIGN if ALIGN > 1 else len_kv)
        if ALIGN > 1:
            inside = tl.max_constancy(inside, [1, ALIGN])
        bias = tl.load(pointer + offsets, mask=inside, other=0.0)
    else:
        bias = tl.load(pointer + offsets)
    return bias


# Returns bf16 in fp32. The conversion of the compiler takes two instructions for every other number, and this takes one.
@triton.jit
def _in_fp32(bias):
    if bias.dtype == tl.bfloat16:
        bias = (bias.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bias.to(tl.float32)


# Multiples of ALIGN let the compiler copy up to 16 bytes at once. Copies of less than 4 bytes cannot be asynchronous.
@triton.jit
def _bias_offsets(head, i, j, META: tl.constexpr):
    ALIGN: tl.constexpr = META.BIAS_ALIGN
    columns = j if ALIGN > 0 else j.to(tl.int64) * head.bias_stride_n
    offsets = i.to(tl.int64) * aligned_stride(head.bias_stride_m, META) + columns
    if ALIGN > 1 and j.shape[1] > 1:
        offsets = tl.multiple_of(offsets, [1, ALIGN])
    return offsets


@triton.jit
def logits(qk, i, j, softmax_scale, head, MODS: tl.constexpr, META: tl.constexpr):
    return biased_logits(qk, load_bias(head, i, j, META), i, j, softmax_scale, head, MODS, META)


# bias: from `load_bias` or `load_bias_tile`. Returns (s, factor, cap_tanh, score). s * factor is the logit in units of log2, before
# the mask. cap_tanh is the softcap's tanh, and score is score_mod's input. If nothing is added, s is the raw product, and the scale
# is folded into the exponent's multiply-add.
@triton.jit
def biased_logits(qk, bias, i, j, softmax_scale, head, MODS: tl.constexpr, META: tl.constexpr):
    s = qk
    factor = tl.maximum(softmax_scale * LOG2E, 1e-37)  # a masked score is -inf, and -inf * 0 would be NaN
    cap_tanh = 0.0
    score = qk
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS or META.HAS_ALIBI or META.HAS_SOFTCAP or META.HAS_SCORE_MOD:
        factor = LOG2E
        if META.HAS_PRE_SCALE_BIAS:
            s += _in_fp32(bias)
        s *= softmax_scale
        if META.HAS_SOFTCAP:
            cap_tanh = tanh(s / head.softcap) if META.HAS_EXACT_TANH else tanh_in_half(s * (1.0 / head.softcap))
            s = head.softcap * cap_tanh
        score = s
        if META.HAS_SCORE_MOD:
            s = MODS.score(score, head.b, head.h, i, j, head.captures)
        if META.HAS_POST_SCALE_BIAS:
            s += _in_fp32(bias)
        if META.HAS_ALIBI:
            # One rounding in each kernel. If some fused this and others did not, they would differ where a large product ties.
            s = tl.fma(tl.abs(j - i - head.shift).to(tl.float32), -head.alibi_slope, s)
    return s, factor, cap_tanh, score


class ScoreTile(NamedTuple):
    """A tile of scores, [queries, keys] or [keys, queries], inside a kernel."""

    i: tl.tensor  # query positions that broadcast against the tile
    j: tl.tensor  # key positions
    keep: tl.tensor  # True for weights that dropout keeps
    is_full: tl.tensor  # whether the block is full, so that the mask_mod is not needed
    large: Any  # result of `load_large`


class ScoreGradient(NamedTuple):
    """The derivatives of a tile of scores, and the factors of the products that follow, inside a kernel."""

    p: tl.tensor  # probabilities
    p_dropped: tl.tensor  # the same after dropout, as they multiply v
    dlogit: tl.tensor
    dscore: tl.tensor  # the gradient of the scaled score
    score: tl.tensor  # score_mod's input


@triton.jit
def score_gradient(
    products,
    statistics,
    tile,
    head,
    inputs,
    MODS: tl.constexpr,
    MASK: tl.constexpr,  # "none", "keys" for a tile [queries, keys], "queries" for a tile [keys, queries]
    META: tl.constexpr,
):
    i = tile.i
    j = tile.j
    keep_scale = inputs.dropout.keep_scale
    dp = products.dp
    s, factor, cap_tanh, score = logits(products.qk, i, j, products.scale, head, MODS, META)
    s = relative_to_lse(s, -statistics.lse_log2, tile.large, head.b, head.h, i, head.len_q, META)
    p = tl.exp2(tl.fma(s, factor, -statistics.lse_log2))
    if META.NORMALIZES:
        p *= statistics.p_scale
    if MASK == "keys":
        p = tl.where(visible_keys(i, j, head.len_kv, head.shift, inputs.band, META), p, 0.0)
    elif MASK == "queries" and (META.HAS_LEFT or META.HAS_RIGHT):
        p = tl.where(visible_queries(i, j, head.shift, inputs.band, META), p, 0.0)
    if MASK != "none" and META.HAS_SCORE_MOD and not MODS.score_is_finite:  # for a query past the end
        p = tl.where(i < head.len_q, p, 0.0)
    if META.HAS_MASK_MOD and (MASK != "none" or META.BLOCK_SIZE_Q == 0):
        p = tl.where(MODS.mask(head.b, head.h, i, j, head.captures) | tile.is_full, p, 0.0)
    p_dropped = p
    if META.HAS_DROPOUT:
        p_dropped = tl.where(tile.keep, p * keep_scale, 0.0)
        dp = tl.where(tile.keep, dp * keep_scale, 0.0)
    dlogit = p * (dp - statistics.delta)
    dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
    return ScoreGradient(p=p, p_dropped=p_dropped, dlogit=dlogit, dscore=dscore, score=score)


# Returns d loss / d scaled score from d loss / d logit and the results of `logits`.
@triton.jit
def through_mods(dlogit, cap_tanh, score, i, j, head, MODS: tl.constexpr, META: tl.constexpr):
    dscore = dlogit
    if META.HAS_SCORE_MOD:
        dscore = MODS.gradient(dlogit, score, head.b, head.h, i, j, head.captures)
    if META.HAS_SOFTCAP:
        dscore *= 1 - cap_tanh * cap_tanh
    return dscore
