"""Statistics of the softmax weights, which three kernels recompute from lse in linear memory.

Row statistics loop over the keys of a block of queries. Column sums loop over the queries of a block of keys, so that one program
sums each in a fixed order. The weights of chosen queries are independent tiles. The weights are those before dropout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import BlockKinds, BlockMaskLists, Inputs, Parts, Pointer
from flexattn.kernels_triton.common.band import visible_keys
from flexattn.kernels_triton.common.block_lists import listed_tile
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import lse_row, minus_lse_exactly
from flexattn.kernels_triton.common.problem import Meta, Problem
from flexattn.kernels_triton.common.row_tiles import Place, keys_of_block, load_qk, product, queries_of_block
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sequences import program_of_queries, sequence_of
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import load_parts
from flexattn.kernels_triton.common.tiles import FORWARD, cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch


class RowStatistics(NamedTuple):
    """Numbers of each query, fp32 in lse's layout."""

    max_ptr: Pointer  # the largest logit
    entropy_ptr: Pointer
    scale_ptr: Pointer  # the factor that normalises the weights computed from lse


class RowArguments(NamedTuple):
    inputs: Inputs
    lse_ptr: Pointer
    lists: BlockMaskLists | None  # lists of key blocks
    rows: RowStatistics


class ColumnArguments(NamedTuple):
    inputs: Inputs
    lse_ptr: Pointer
    scale_ptr: Pointer  # the factors of `RowStatistics`; None: 1
    lists: BlockMaskLists | None  # lists of query blocks
    sums_ptr: Pointer  # fp32 [b, h, skv] or [h, total_kv]


class ChosenArguments(NamedTuple):
    inputs: Inputs
    lse_ptr: Pointer
    scale_ptr: Pointer  # the factors of `RowStatistics`; None: 1
    kinds: BlockKinds | None
    chosen_ptr: Pointer  # int32 [b, count]: positions of queries in their sequence; others than 0 .. length - 1 are none
    count: int
    weights_ptr: Pointer  # fp32 [b, h, count, width], contiguous
    width: int  # max_seqlen_kv as it was given, which packed keys may be fewer than


class WeightedQueries(NamedTuple):
    """Queries of a tile of weights, inside a kernel."""

    q: Parts
    i: tl.tensor  # positions, [queries, 1]
    lse: tl.tensor  # +inf for a query that sees nothing or does not exist


@triton.jit
def _weights(queries, k, n, is_full, head, inputs, MODS: tl.constexpr, META: tl.constexpr):
    # Returns (logits, logarithms of the weights in units of log2) of the keys from n on, -inf for hidden keys. The difference of a
    # logit and lse is exact if both are large.
    i = queries.i
    j = n + tl.arange(0, META.BLOCK_N)[None, :]
    qk = product(queries.q, k, None, META.QK1 > 0, False, META)
    s, factor, _, _ = logits(qk, i, j, inputs.scores.scale, head, MODS, META)
    if META.IS_UNBOUNDED:
        exponent = tl.minimum(minus_lse_exactly(s, queries.lse[:, None]), 0.0) * LOG2E
    else:
        exponent = tl.fma(s, factor, -queries.lse[:, None] * LOG2E)
        s *= factor * LN2
    visible = visible_keys(i, j, head.len_kv, head.shift, inputs.band, META) & (i < head.len_q)
    if META.HAS_MASK_MOD:
        visible = visible & (MODS.mask(head.b, head.h, i, j, head.captures) | is_full)
    return tl.where(visible, s, float("-inf")), tl.where(visible, exponent, float("-inf"))


@triton.jit
def _head(inputs, b, h, sequence, MODS: tl.constexpr, META: tl.constexpr):
    shift = (sequence.len_kv - sequence.len_q) * inputs.band.bottom_right
    return head_of(inputs.scores, b, h, sequence.len_q, sequence.len_kv, shift, MODS, META)


@triton.jit
def _lse_of(lse_ptr, rows, is_real):
    lse = tl.load(lse_ptr + rows, mask=is_real, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@kernel
def _attn_row_statistics_kernel(args: RowArguments, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    program = program_of_queries(tl.program_id(0), inputs, META)
    b, h, sequence = program.b, program.h, program.sequence
    len_q = sequence.len_q
    first_row = program.block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    is_real = rows < len_q
    head = _head(inputs, b, h, sequence, MODS, META)
    q = load_qk(inputs.q, Place(b=b, h=h, start=sequence.start_q, first=first_row, length=len_q), BLOCK_M, META)
    own = lse_row(b, h, inputs.num_heads, inputs.lengths_q.num_tokens, sequence.start_q, META) + rows
    lse = _lse_of(args.lse_ptr, own, is_real)
    queries = WeightedQueries(q=q, i=rows[:, None], lse=lse)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)
    tiles = keys_of_block(args.lists, head, first_row, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
        place = Place(b=b, h=h // inputs.group_size, start=sequence.start_kv, first=n, length=sequence.len_kv)
        s, exponent = _weights(queries, load_qk(inputs.k, place, BLOCK_N, META), n, is_full, head, inputs, MODS, META)
        p = tl.exp2(exponent)
        largest = tl.maximum(largest, tl.max(s, 1))
        total += tl.sum(p, 1)
        weighted += tl.sum(p * tl.where(p == 0.0, 0.0, exponent), 1)  # 0 * -inf would be NaN
    whole = total
    if META.HAS_SINK:
        whole += tl.exp2((load_sink(inputs.softmax_offset_ptr, h, 1.0, META) - lse) * LOG2E)
    scale = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    entropy = -scale * (weighted * LN2 + total * tl.log(scale))
    tl.store(args.rows.max_ptr + own, largest, mask=is_real)
    tl.store(args.rows.entropy_ptr + own, tl.where(entropy < 0.0, 0.0, entropy), mask=is_real)  # rounding
    tl.store(args.rows.scale_ptr + own, scale, mask=is_real)


@kernel
def _attn_column_sums_kernel(args: ColumnArguments, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    pid = tl.program_id(0)
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, BLOCK_N)
    n = pid % blocks * BLOCK_N  # the first block is first, because it has the most work under a causal band
    h = pid // blocks % inputs.num_heads
    b = pid // blocks // inputs.num_heads
    sequence = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    if n >= len_kv:
        return
    head = _head(inputs, b, h, sequence, MODS, META)
    place = Place(b=b, h=h // inputs.group_size, start=sequence.start_kv, first=n, length=len_kv)
    k = load_qk(inputs.k, place, BLOCK_N, META)
    row = lse_row(b, h, inputs.num_heads, inputs.lengths_q.num_tokens, sequence.start_q, META)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    tiles = queries_of_block(args.lists, head, n, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_M):
        first_row, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_Q, BLOCK_M)
        rows = first_row + tl.arange(0, BLOCK_M)
        is_real = rows < len_q
        q = load_qk(inputs.q, Place(b=b, h=h, start=sequence.start_q, first=first_row, length=len_q), BLOCK_M, META)
        queries = WeightedQueries(q=q, i=rows[:, None], lse=_lse_of(args.lse_ptr + row, rows, is_real))
        _, exponent = _weights(queries, k, n, is_full, head, inputs, MODS, META)
        p = tl.exp2(exponent)
        if args.scale_ptr is not None:
            p *= tl.load(args.scale_ptr + row + rows, mask=is_real, other=0.0)[:, None]
        sums += p
    columns = n + tl.arange(0, BLOCK_N)
    first = tl.cast(h if META.IS_RAGGED_KV else b * inputs.num_heads + h, tl.int64) * inputs.lengths_kv.num_tokens
    tl.store(args.sums_ptr + first + sequence.start_kv + columns, tl.sum(sums, 0), mask=columns < len_kv)


@kernel
def _attn_chosen_weights_kernel(args: ChosenArguments, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    pid = tl.program_id(0)
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, BLOCK_N)
    n = pid % blocks * BLOCK_N
    parts = tl.cdiv(args.count, BLOCK_M)
    part = pid // blocks % parts
    h = pid // blocks // parts % inputs.num_heads
    b = pid // blocks // parts // inputs.num_heads
    sequence = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    len_q = sequence.len_q
    head = _head(inputs, b, h, sequence, MODS, META)
    place = part * BLOCK_M + tl.arange(0, BLOCK_M)
    chosen = tl.load(args.chosen_ptr + b * args.count + place, mask=place < args.count, other=-1)
    is_real = (chosen >= 0) & (chosen < len_q)
    rows = tl.where(is_real, chosen, 0)
    offsets = rows * inputs.q.stride_s * META.ALIGN
    if META.WIDE_STRIDES:
        offsets = rows.to(tl.int64) * inputs.q.stride_s * META.ALIGN
    pointer = row_pointer(inputs.q, b, h, sequence.start_q, META)
    q = load_parts(pointer, offsets, 0, tl.where(len_q > 0, BLOCK_M, 0), META.QK0, META.QK1, META.HEAD_DIM_QK)
    own = lse_row(b, h, inputs.num_heads, inputs.lengths_q.num_tokens, sequence.start_q, META) + rows
    queries = WeightedQueries(q=q, i=rows[:, None], lse=_lse_of(args.lse_ptr, own, is_real))
    keys = Place(b=b, h=h // inputs.group_size, start=sequence.start_kv, first=n, length=sequence.len_kv)
    k = load_qk(inputs.k, keys, BLOCK_N, META)
    is_full = False
    if META.BLOCK_SIZE_Q > 0:
        list_row = b * args.kinds.stride_b + h * args.kinds.stride_h + rows // META.BLOCK_SIZE_Q
        kind_place = list_row.to(tl.int64) * args.kinds.length + n // META.BLOCK_SIZE_KV
        kind = tl.load(args.kinds.ptr + kind_place, mask=is_real & (n < sequence.len_kv), other=0)
        is_real = is_real & (kind > 0)
        is_full = (kind == 2)[:, None]
    _, exponent = _weights(queries, k, n, is_full, head, inputs, MODS, META)
    p = tl.where(is_real[:, None], tl.exp2(exponent), 0.0)
    if args.scale_ptr is not None:
        p *= tl.load(args.scale_ptr + own, mask=is_real, other=0.0)[:, None]
    columns = n + tl.arange(0, BLOCK_N)
    target = (tl.cast(b * inputs.num_heads + h, tl.int64) * args.count + place) * args.width
    inside = (place < args.count)[:, None] & (columns < args.width)[None, :]
    tl.store(args.weights_ptr + target[:, None] + columns[None, :], p, mask=inside)


class Outputs(NamedTuple):
    """Memory for the statistics, fp32 and contiguous, or None for those that are not asked for.

    max_scores and entropy have lse's layout, column_sums is [b, h, skv] or [h, total_kv], and row_weights [b, h, n, width].
    The first is -inf and the others are zeros before the launch.
    """

    max_scores: Tensor | None = None
    entropy: Tensor | None = None
    column_sums: Tensor | None = None
    row_weights: Tensor | None = None


def weight_statistics(problem: Problem, lse: Tensor, outputs: Outputs, chosen: Tensor | None = None) -> None:
    """Writes the statistics of a call's weights. lse: the forward's, contiguous. chosen: int32 [b, n], for row_weights."""
    x = problem
    tile = x.tile(FORWARD)
    meta = x.meta(tile)
    scale = None
    # fp32 rounds a large lse, which changes all weights of a row by one factor
    if outputs.max_scores is not None or outputs.entropy is not None or meta.NORMALIZES or x.is_unbounded:
        scale = _row_statistics(x, lse, outputs, meta, tile)
    if outputs.column_sums is not None:
        columns = ColumnArguments(
            inputs=x.inputs(meta), lse_ptr=lse, scale_ptr=scale, lists=x.lists("q"), sums_ptr=outputs.column_sums
        )
        programs = cdiv(x.longest_kv, tile.block_n) * x.num_heads * x.batch
        _launch(_attn_column_sums_kernel, programs, columns, x, meta, tile)
    if outputs.row_weights is not None and chosen is not None and chosen.numel():
        count = chosen.shape[1]
        tile = tile._replace(block_m=min(tile.block_m, max(16, triton.next_power_of_2(count))))
        rows = ChosenArguments(
            inputs=x.inputs(meta),
            lse_ptr=lse,
            scale_ptr=scale,
            kinds=x.kinds(),
            chosen_ptr=chosen,
            count=count,
            weights_ptr=outputs.row_weights,
            width=outputs.row_weights.shape[-1],
        )
        programs = cdiv(x.longest_kv, tile.block_n) * cdiv(count, tile.block_m) * x.num_heads * x.batch
        _launch(_attn_chosen_weights_kernel, programs, rows, x, x.meta(tile), tile)


def _row_statistics(x: Problem, lse: Tensor, outputs: Outputs, meta: Meta, tile: Tile) -> Tensor:
    """Returns the factors that normalise the weights computed from lse, and writes the statistics of rows that are asked for."""
    maxima, entropy = (lse.new_empty(lse.shape) if t is None else t for t in outputs[:2])
    scale = lse.new_zeros(lse.shape)
    results = RowStatistics(max_ptr=maxima, entropy_ptr=entropy, scale_ptr=scale)
    args = RowArguments(inputs=x.inputs(meta), lse_ptr=lse, lists=x.lists("kv"), rows=results)
    programs = cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    _launch(_attn_row_statistics_kernel, programs, args, x, meta, tile)
    return scale


def _launch(function: Any, programs: int, args: Any, x: Problem, meta: Meta, tile: Tile) -> None:
    if programs:
        launch(function, programs, x.device, tile, (args, x.mods, meta))
