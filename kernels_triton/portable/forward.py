"""Portable forward attention: one kernel for every format, band, bias and softmax type, and its launcher."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import HeadRows, paged_rows, row_at, row_pointer, row_steps, rows_from
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Channels, Head, Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import visible_keys, visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import Loops, TileRange, first_loop, key_loops, listed_tile, loops_in_order
from flexattn.kernels_triton.common.copies import packed_start, transposed_head
from flexattn.kernels_triton.common.crossovers import SPLIT_PROGRAMS
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.exponents import (
    FP8_OFFSET,
    LN2,
    LOG2E,
    exponent_factor,
    log_of_sum,
    positive_factor,
    scaled_row_max,
)
from flexattn.kernels_triton.common.fp8_tiles import descaled, fp8_product, load_descale, load_token_descales
from flexattn.kernels_triton.common.heads import head_of, shows_block
from flexattn.kernels_triton.common.launch_order import let_next_begin, overlaps, wait_for_previous
from flexattn.kernels_triton.common.padding import padding_rows, store_zeros
from flexattn.kernels_triton.common.plan_pieces import Plan, first_row_of_part, piece_of_part
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.scores import biased_logits, load_bias_tile, rows_of_bias
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.split_kv import PlannedTile, combine_parts, number_of_splits, split_results, tiles_and_room
from flexattn.kernels_triton.common.split_ranges import part_row, range_of_blocks, range_of_split, share_of_split
from flexattn.kernels_triton.common.tile_memory import StoredRows, load_parts, load_tile, store_parts, zero_parts
from flexattn.kernels_triton.common.tiles import FORWARD, slots_of_heads
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch


# Returns the query of each row of a forward's tile.
@triton.jit
def queries_of_tile(first_row, META: tl.constexpr):
    rows = tl.arange(0, META.BLOCK_M)
    if META.GROUP > 1:
        rows = rows // META.GROUP
    return first_row + rows


# Returns the head of each row of a forward's tile, or one head for all rows.
@triton.jit
def heads_of_tile(h, META: tl.constexpr):
    if META.GROUP > 1:
        return h + _head_in_tile(META)
    else:
        return h


# Rows that belong to no head repeat the last head: the same numbers, written to the same addresses.
@triton.jit
def _head_in_tile(META: tl.constexpr):
    head = tl.arange(0, META.BLOCK_M) % META.GROUP
    if META.HEADS < META.GROUP:
        head = tl.minimum(head, META.HEADS - 1)
    return head


# Returns the offsets of the rows of a forward's tile from its first query and head.
@triton.jit
def offsets_of_tile(x, META: tl.constexpr):
    if META.GROUP > 1:
        rows = tl.arange(0, META.BLOCK_M).to(tl.int64)
        return (rows // META.GROUP * x.stride_s + _head_in_tile(META).to(tl.int64) * x.stride_h) * META.ALIGN
    else:
        return row_steps(x.stride_s, META.BLOCK_M, META)[1]


class Arguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    out: Rows
    lse_ptr: Pointer
    max_logit_ptr: Pointer  # [h, b * blocks * splits], the largest logit that each query block saw; or None
    num_splits: int | None  # number of KV splits, with out and lse in `split_ranges.Parts`; None: not split, or split by a plan
    plan: Plan | None  # device-side split plan, see `split_kv`; None: no plan
    v_t: Channels | None  # in FP8


class _Accumulators(NamedTuple):
    """The softmax of a block of queries so far."""

    acc0: tl.tensor
    acc1: tl.tensor
    row_sum: tl.tensor
    row_max: tl.tensor  # in units of log2; for unbounded logits in natural units, which keeps the maximum exact


class _Block(NamedTuple):
    """A block of queries, and the keys and values of its head."""

    head: Head
    h_kv: tl.tensor
    first_row: tl.tensor
    q: Parts
    descale_q: float | tl.tensor
    k: HeadRows
    v: HeadRows
    bias: HeadRows | None
    v_t: Any  # in FP8: v with its tokens innermost, as the matrix instructions need it


# Returns whether keys from n on are shown to all queries, each key four times: a load of fewer numbers than threads would be
# repeated by each thread for its own keys.
@triton.jit
def _keys_shown(head, n, MODS: tl.constexpr, META: tl.constexpr):
    j = n + tl.broadcast_to(tl.arange(0, META.BLOCK_N)[:, None], [META.BLOCK_N, 4])
    return MODS.mask(head.b, head.h, 0, j, head.captures)


# Returns the largest score that each key may have: inf, or -inf for a hidden key.
@triton.jit
def _limit_of_keys(shown):
    return tl.max(tl.where(shown, float("inf"), float("-inf")), 1)


# Returns scores with -inf for keys that the mask_mod hides.
@triton.jit
def _shown_scores(s, block, n, i, j, is_full, MODS: tl.constexpr, META: tl.constexpr):
    head = block.head
    if META.ASKS_OF_BLOCKS:
        if not shows_block(head, block.first_row, META.BLOCK_M // META.GROUP, n, META.BLOCK_N, MODS):
            s = tl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
    else:
        s = tl.where(MODS.mask(head.b, head.h, i, j, head.captures) | is_full, s, float("-inf"))
    return s


# - bias_pointer is incremented like the others: if it depended on n, LLVM would compute n with 64 bits.
# - The bias is loaded before the products, so that the compiler chooses their layout, and not its own, for the statistics of rows.
# - IS_END: at most one tile has keys past the end. A pipeline would begin copies even without it, but only loops with a bias are
#   faster without one. With IS_NEAR both loops have one: then ptxas serialises the products (C7515) with fewer registers, and
#   tiles fit their limit without spills.
@triton.jit
def _attn_fwd_loop(sums, block, tiles, inputs, MODS: tl.constexpr, IS_MASKED: tl.constexpr, META: tl.constexpr):
    BLOCK_N: tl.constexpr = META.BLOCK_N
    OFFSET: tl.constexpr = FP8_OFFSET if META.IS_FP8 else 0.0
    head = block.head
    scales = inputs.scales
    len_kv = head.len_kv
    acc0 = sums.acc0
    acc1 = sums.acc1
    row_sum = sums.row_sum
    row_max = sums.row_max
    i = queries_of_tile(block.first_row, META)[:, None]
    k_pointer = row_at(block.k, tiles.begin)
    v_pointer = row_at(block.v, tiles.begin)
    bias_pointer = row_at(block.bias, tiles.begin) if block.bias is not None else 0
    limit = _limit_of_keys(_keys_shown(head, tiles.begin, MODS, META)) if META.MASKS_KEYS else 0.0
    IS_BANDED: tl.constexpr = META.HAS_LEFT or META.HAS_RIGHT
    IS_ONE_PART: tl.constexpr = META.QK1 == 0 and META.V1 == 0
    HAS_BIAS: tl.constexpr = block.bias is not None
    IS_END: tl.constexpr = IS_MASKED and HAS_BIAS and IS_ONE_PART and not (META.IS_NEAR or IS_BANDED or META.BLOCK_SIZE_Q > 0)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N, num_stages=1 if IS_END else None):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N, META.PIECE > 0)
        if META.BLOCK_SIZE_Q > 0:
            k_pointer = row_at(block.k, n)
            v_pointer = row_at(block.v, n)
            bias_pointer = row_at(block.bias, n) if block.bias is not None else 0
        k_tile, k_offsets = rows_from(block.k, k_pointer, n, META)
        v_tile, v_offsets = rows_from(block.v, v_pointer, n, META)
        if inputs.pages.table_ptr is not None:
            k_tile, k_offsets = paged_rows(inputs.pages, inputs.k, block.k.base, head.b, n, len_kv, META)
            if not META.IS_LATENT:
                v_tile, v_offsets = paged_rows(inputs.pages, inputs.v, block.v.base, head.b, n, len_kv, META)
        columns = n + tl.arange(0, BLOCK_N)
        j = columns[None, :]
        next_shown = _keys_shown(head, n + BLOCK_N, MODS, META) if META.MASKS_KEYS else False  # loaded during this iteration
        bias = 0.0
        if block.bias is not None:
            bias_tile, bias_offsets = rows_from(block.bias, bias_pointer, n, META)
            bias = load_bias_tile(bias_tile, bias_offsets, j, len_kv, IS_MASKED, META)
        k0 = load_tile(k_tile, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, IS_MASKED)
        if META.IS_KV_FP8:
            k0 = k0.to(block.q.first.dtype)
        qk = tl.dot(block.q.first, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T, [BLOCK_M, BLOCK_N]
        if META.QK1 > 0:
            k1 = load_tile(k_tile, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, IS_MASKED)
            if META.IS_KV_FP8:
                k1 = k1.to(block.q.first.dtype)
            qk = tl.dot(block.q.second, tl.trans(k1), qk, input_precision=META.PRECISION)
        score_scale = inputs.scores.scale
        if META.IS_FP8:
            descale_k = load_descale(scales.k, head.b, block.h_kv, n, len_kv, META)
            qk, score_scale = descaled(qk, block.descale_q * descale_k, score_scale, META)
        if META.HAS_TOKEN_SCALES_K:
            qk *= load_token_descales(scales.k, inputs.pages, head.b, block.h_kv, n, len_kv, BLOCK_N)[None, :]
        elif META.IS_KV_FP8:
            qk, score_scale = descaled(qk, load_descale(scales.k, head.b, block.h_kv, n, len_kv, META), score_scale, META)
        s, factor, _, _ = biased_logits(qk, bias, i, j, score_scale, head, MODS, META)
        if IS_MASKED:
            s = tl.where(visible_keys(i, j, len_kv, head.shift, inputs.band, META), s, float("-inf"))
        if META.MASKS_KEYS:
            s = tl.minimum(s, tl.expand_dims(limit, 0))
        elif META.HAS_MASK_MOD and (IS_MASKED or META.BLOCK_SIZE_Q == 0):
            s = _shown_scores(s, block, n, i, j, is_full, MODS, META)
        if META.IS_FP8 and not (META.IS_UNBOUNDED or META.HAS_SOFTCAP):
            factor = positive_factor(score_scale * LOG2E)
        if META.IS_UNBOUNDED:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            factor = exponent_factor(new_max)
            scaled_max = scaled_row_max(new_max, factor, OFFSET)
            correction = tl.exp2(scaled_row_max(row_max, factor, OFFSET) - scaled_max)
            p = tl.exp2(tl.fma(s, factor[:, None], -scaled_max[:, None]))
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
            scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # if a row has seen nothing yet, exp2(-inf - 0) is 0
            correction = tl.exp2(row_max - scaled_max)
            scaled_max -= OFFSET  # p, and so row_sum and acc, are scaled to fill the range of E4M3
            p = tl.exp2(tl.fma(s, factor, -scaled_max[:, None]))
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        if META.HAS_DROPOUT:
            p = tl.where(dropout_keep(inputs, head.b, head.h, block.first_row, n, META), p, 0.0)
        if META.IS_FP8:
            p = p.to(tl.float8e4nv)
            descale_v = load_descale(scales.v, head.b, block.h_kv, n, len_kv, META) if META.HAS_BLOCK_SCALES else 1.0
            product = fp8_product(p, block.v_t, n, len_kv, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
            acc0 = acc0 * correction[:, None] + product * descale_v
            if META.V1 > 0:
                product = fp8_product(p, block.v_t, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
                acc1 = acc1 * correction[:, None] + product * descale_v
        else:
            descale_v = 1.0
            if META.HAS_TOKEN_SCALES_V:
                descale_v = load_token_descales(scales.v, inputs.pages, head.b, block.h_kv, n, len_kv, BLOCK_N)[:, None]
            v0 = k0
            if not META.IS_LATENT:
                v0 = load_tile(v_tile, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, IS_MASKED)
                if META.IS_KV_FP8:
                    v0 = v0.to(block.q.first.dtype)
            if META.HAS_TOKEN_SCALES_V:
                v0 = (v0.to(tl.float32) * descale_v).to(block.q.first.dtype)
            p = p.to(v0.dtype)
            acc0 = tl.dot(p, v0, acc0 * correction[:, None], input_precision=META.PRECISION)  # O += P V
            if META.V1 > 0:
                v1 = load_tile(v_tile, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, IS_MASKED)
                if META.IS_KV_FP8:
                    v1 = v1.to(block.q.first.dtype)
                if META.HAS_TOKEN_SCALES_V:
                    v1 = (v1.to(tl.float32) * descale_v).to(block.q.first.dtype)
                acc1 = tl.dot(p, v1, acc1 * correction[:, None], input_precision=META.PRECISION)
        if META.MASKS_KEYS:
            limit = _limit_of_keys(next_shown)
        if META.BLOCK_SIZE_Q == 0:
            k_pointer += BLOCK_N * block.k.step
            v_pointer += BLOCK_N * block.v.step
            if block.bias is not None:
                bias_pointer += BLOCK_N * block.bias.step
    return _Accumulators(acc0=acc0, acc1=acc1, row_sum=row_sum, row_max=row_max)


# Writes out and lse of the rows beside a sequence that this program is responsible for, see `padding_rows`
@triton.jit
def _clear_padding(args: Arguments, padding, b, h, start_q, lse_ptr, out: Rows, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    lengths_q = args.inputs.lengths_q
    num_heads = args.inputs.num_heads
    out_step, row_offsets = row_steps(out.stride_s, BLOCK_M, META)
    for own_block in range(META.HEADS):
        head_index = h + own_block
        head_out = row_pointer(out, b, head_index, start_q, META)
        head_lse = (
            lse_ptr
            + tl.cast(head_index if META.IS_RAGGED_Q else b * num_heads + head_index, tl.int64) * lengths_q.num_tokens
            + start_q
        )
        for side in tl.static_range(2 if META.IS_RAGGED_Q else 1):
            first_padding, end_padding = (padding.begin, padding.end) if side == 0 else (padding.front_begin, padding.front)
            store_zeros(head_out, out_step, row_offsets, first_padding, end_padding, META.HEAD_DIM_V, META.V0, META.V1)
            for row in range(first_padding, end_padding, BLOCK_M):
                hidden = row + tl.arange(0, BLOCK_M)
                tl.store(head_lse + hidden, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=hidden < end_padding)


# Returns the statistics of rows with a sink, and the factor of sums that were relative to the old maximum
@triton.jit
def _with_sink(row_max, row_sum, sink, OFFSET: tl.constexpr, META: tl.constexpr):
    new_max = tl.maximum(row_max, sink)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, OFFSET)
        correction = tl.exp2(scaled_row_max(row_max, factor, OFFSET) - scaled_max)
        row_sum = row_sum * correction + tl.exp2(tl.fma(sink, factor, -scaled_max))
    else:
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - scaled_max)
        row_sum = row_sum * correction + tl.exp2(sink - scaled_max + OFFSET)
    return new_max, row_sum, correction


class _Tile(NamedTuple):
    """A program's tile: a block of queries, of one head or of several that share it, and a share of their keys."""

    pid: tl.tensor  # with a plan, the number of the part
    split: Any  # None: all keys
    piece: Any  # with a plan, a `Piece`
    block: tl.tensor  # the block's number, of `blocks` of the longest sequence
    blocks: tl.tensor
    h: tl.tensor  # the first head
    b: tl.tensor
    heads: tl.tensor  # the head of each row


# Returns the number of a tile's block, its first head and its sequence.
@triton.jit
def _place_of_tile(pid, piece, blocks, groups, META: tl.constexpr):
    if piece is None:
        block = blocks - 1 - pid % blocks  # under a causal band the last block has the most work, so it is first
        h = pid // blocks % groups
        b = pid // blocks // groups
    else:
        block = piece.entry % blocks
        h = piece.head
        b = piece.entry // blocks
    if META.GROUP > 1:
        h = h * META.HEADS
    return block, h, b


# Returns the index of a tile's largest logit in `max_logit_ptr`
@triton.jit
def _place_of_largest(tile, args):
    if tile.piece is None:
        place = (tile.h * args.inputs.lengths_q.batch + tile.b) * tile.blocks + tile.block
        if args.num_splits is not None:
            place = place * args.num_splits + tile.split
    else:
        place = tile.h * (args.plan.entries + args.plan.programs) + tile.piece.entry + tile.piece.program
    return place


# Returns the keys of a tile's split or piece
@triton.jit
def _visible_share(visible, tile, num_splits, META: tl.constexpr):
    if tile.piece is not None:
        visible = range_of_blocks(visible, tile.piece.first, tile.piece.end, META.BLOCK_N)
    if num_splits is not None and (META.BLOCK_SIZE_Q == 0 or META.PIECE > 0):
        visible = range_of_split(visible, tile.split, num_splits, META.BLOCK_N, META.PIECE)
    return visible


# With a block mask, a split is a share of the full blocks and a share of the others.
@triton.jit
def _loops_of_split(loops, split, num_splits):
    begin, end = share_of_split(loops.full.end, split, num_splits)
    rest_begin, rest_end = share_of_split(loops.rest.end, split, num_splits)
    full = TileRange(begin=begin, end=end, listed=loops.full.listed)
    return Loops(first=full, full=full, rest=TileRange(begin=rest_begin, end=rest_end, listed=loops.rest.listed))


# Returns the statistics of rows with their sink, and the factor that turns sums into out
@triton.jit
def _normalised(row_max, row_sum, tile, h_kv, inputs, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    OFFSET: tl.constexpr = FP8_OFFSET if META.IS_FP8 else 0.0
    rescale = tl.zeros([BLOCK_M], tl.float32) + (inputs.dropout.keep_scale if META.HAS_DROPOUT else 1.0)
    if META.HAS_SINK:
        sink = load_sink(inputs.softmax_offset_ptr, tile.heads, 1.0 if META.IS_UNBOUNDED else LOG2E, META)
        if tile.split is not None:
            sink = tl.where(tile.split == 0, sink, float("-inf"))
        row_max, row_sum, correction = _with_sink(row_max, row_sum, sink, OFFSET, META)
        rescale *= correction
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    rescale = rescale / row_sum
    if (META.IS_KV_FP8 and not META.HAS_TOKEN_SCALES_V) or (META.IS_FP8 and not META.HAS_BLOCK_SCALES):
        rescale *= load_descale(inputs.scales.v, tile.b, h_kv, 0, 1, META)
    return row_max, row_sum, rescale


class _LseRows(NamedTuple):
    """The rows of a tile in lse."""

    base: tl.tensor  # pointer to the first row of the sequence and head
    rows: tl.tensor  # positions of the queries
    len_q: tl.tensor
    slot: tl.tensor  # rows from here on are not stored


@triton.jit
def _store_lse(row_max, row_sum, to, tile, args, META: tl.constexpr):
    OFFSET: tl.constexpr = FP8_OFFSET if META.IS_FP8 else 0.0
    plan, lengths_q = args.plan, args.inputs.lengths_q
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        lse, lost = log_of_sum(row_max, factor, scaled_row_max(row_max, factor, OFFSET), row_sum)
        if tile.split is not None:
            if tile.piece is not None:
                lost_base = to.base + first_row_of_part(plan, plan.num_parts)
            else:
                lost_base = to.base + part_row(args.num_splits, lengths_q.batch, args.inputs.num_heads, lengths_q.num_tokens, META)
            tl.store(lost_base + to.rows, lost, mask=to.rows < to.len_q)
    else:
        lse = (row_max - OFFSET + tl.log2(row_sum)) * LN2
    tl.store(to.base + to.rows, tl.where(to.rows < to.len_q, lse, float("-inf")), mask=to.rows < to.slot)


@kernel
def _attn_fwd_kernel(args: Arguments, MODS: tl.constexpr, META: tl.constexpr):
    wait_for_previous(META.OVERLAPS)
    let_next_begin(META.OVERLAPS)
    BLOCK_M: tl.constexpr = META.BLOCK_M
    GROUP: tl.constexpr = META.GROUP
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    inputs = args.inputs
    lengths_q = inputs.lengths_q
    num_heads = inputs.num_heads
    num_splits = args.num_splits
    plan = args.plan
    out = args.out
    lse_ptr = args.lse_ptr
    blocks = tl.cdiv(lengths_q.max_seqlen, QUERIES)
    groups = num_heads
    if GROUP > 1:
        groups = num_heads // META.HEADS
    pid = tl.program_id(0)
    split, piece = None, None
    if num_splits is not None:
        split = pid % num_splits
        pid = pid // num_splits
        rows_before = part_row(split, lengths_q.batch, num_heads, lengths_q.num_tokens, META)
        part_ptr = out.ptr + rows_before * META.HEAD_DIM_V
        out = Rows(ptr=part_ptr, stride_b=out.stride_b, stride_s=out.stride_s, stride_h=out.stride_h)
        lse_ptr += rows_before
    if plan.before_ptr is not None:
        piece = piece_of_part(plan, pid)
        if piece.first >= piece.end:
            return
        split = piece.first
    block, h, b = _place_of_tile(pid, piece, blocks, groups, META)
    heads = heads_of_tile(h, META)
    # made here, because a function returns no None in a tuple with Triton 3.6
    tile = _Tile(pid=pid, split=split, piece=piece, block=block, blocks=blocks, h=h, b=b, heads=heads)
    place = _place_of_largest(tile, args)
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    first_row = tile.block * QUERIES
    rows = queries_of_tile(first_row, META)
    lse_base = lse_ptr + tl.cast(heads if META.IS_RAGGED_Q else b * num_heads + heads, tl.int64) * lengths_q.num_tokens + start_q

    slot_q = len_q
    if META.HAS_LENGTHS and plan.before_ptr is None:
        padding = padding_rows(lengths_q, b, start_q, len_q, first_row, tile.block == blocks - 1, QUERIES, META.IS_RAGGED_Q)
        slot_q = padding.slot
        _clear_padding(args, padding, b, h, start_q, lse_ptr, out, META)
        if first_row >= len_q:
            if args.max_logit_ptr is not None:
                tl.store(args.max_logit_ptr + place, float("-inf"))
            return

    h_kv = h // inputs.group_size
    q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
    q_offsets = offsets_of_tile(inputs.q, META)
    k_step, k_offsets = row_steps(inputs.k.stride_s, META.BLOCK_N, META)
    v_step, v_offsets = row_steps(inputs.v.stride_s, META.BLOCK_N, META)
    b_kv = b if inputs.pages.table_ptr is None else 0
    k_base = row_pointer(inputs.k, b_kv, h_kv, start_kv, META)
    v_base = row_pointer(inputs.v, b_kv, h_kv, start_kv, META)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, heads[:, None] if GROUP > 1 else h, len_q, len_kv, shift, MODS, META)
    q = load_parts(q_pointer, q_offsets, first_row * GROUP, len_q * GROUP, META.QK0, META.QK1, META.HEAD_DIM_QK)

    descale_q, v_t = 1.0, None
    if META.IS_FP8:
        descale_q = load_descale(inputs.scales.q, b, h, first_row, len_q, META)
        v_t = transposed_head(args.v_t, b, h_kv, packed_start(inputs.lengths_kv, b, start_kv), META.IS_RAGGED_KV)

    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    visible = _visible_share(visible, tile, num_splits, META)
    if META.BLOCK_SIZE_Q > 0 and META.PIECE > 0:
        loops = loops_in_order(visible, args.lists, b, h, first_row, META)
    else:
        loops = key_loops(visible, args.lists, b, h, first_row, META)
        if META.BLOCK_SIZE_Q > 0 and num_splits is not None:
            loops = _loops_of_split(loops, split, num_splits)
    bias = None
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS:
        bias = rows_of_bias(head, rows, first_row, META)
    own_block = _Block(
        head=head,
        h_kv=h_kv,
        first_row=first_row,
        q=q,
        descale_q=descale_q,
        k=HeadRows(base=k_base, step=k_step, offsets=k_offsets),
        v=HeadRows(base=v_base, step=v_step, offsets=v_offsets),
        bias=bias,
        v_t=v_t,
    )
    acc = zero_parts(BLOCK_M, META.V0, META.V1)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = _Accumulators(acc0=acc.first, acc1=acc.second, row_sum=row_sum, row_max=row_max)
    for LOOP in tl.static_range(first_loop(META.HAS_LEFT, META.BLOCK_SIZE_Q), 2 if META.IS_WHOLE else 3):
        sums = _attn_fwd_loop(sums, own_block, loops[LOOP], inputs, MODS, LOOP != 1, META)

    is_real = rows < len_q
    if args.max_logit_ptr is not None:
        largest = tl.max(tl.where(is_real, sums.row_max, float("-inf")), 0) * (1.0 if META.IS_UNBOUNDED else LN2)
        tl.store(args.max_logit_ptr + place, largest)
    row_max, row_sum, rescale = _normalised(sums.row_max, sums.row_sum, tile, h_kv, inputs, META)
    if plan.before_ptr is not None:  # `rows` are added to it
        lse_base = lse_ptr + first_row_of_part(plan, pid) + (rows - first_row) * GROUP + (heads - h) - rows
    _store_lse(row_max, row_sum, _LseRows(base=lse_base, rows=rows, len_q=len_q, slot=slot_q), tile, args, META)
    out_pointer = row_pointer(out, b, h, start_q + first_row, META)
    if plan.before_ptr is not None:
        out_pointer = row_pointer(out, pid, 0, 0, META)
    offsets, first, end = offsets_of_tile(out, META), first_row * GROUP, slot_q * GROUP
    to = StoredRows(pointer=out_pointer, offsets=offsets, first=first, end=end, is_real=is_real[:, None])
    store_parts(to, Parts(first=sums.acc0, second=sums.acc1), rescale[:, None], META.V0, META.V1, META.HEAD_DIM_V)


def heads_of_a_tile(problem: Problem, tile: Tile, has_max_logit: bool = False) -> int:
    """Returns how many query heads of one key head share a tile: more than 1 if queries leave half of the tile empty.

    The result is all of them if the tile has rows for them, otherwise a power of two that divides them. Then the keys are loaded
    once for all these heads, and with few queries loading dominates. Features with one number for a tile exclude sharing.
    """
    x = problem
    if 2 * x.longest_q > tile.block_m or x.is_fp8 or x.dropout_p > 0 or x.block_mask is not None or has_max_logit:
        return 1
    room = tile.block_m // x.longest_q
    if slots_of_heads(x.group_size) <= room:
        return x.group_size
    return min(x.group_size & -x.group_size, 1 << (room.bit_length() - 1))


def _v_transposed(problem: Problem) -> Channels | None:
    from flexattn.kernels_triton.common.quantize import transposed  # imported here, so that calls in 16 bits do not wait for it

    return transposed(problem, "v")


def attention_forward(
    problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None = None, tile: Tile | None = None, splits: int | None = None
) -> None:
    """Writes out, in q's layout with v's head dim, lse, fp32 [b, h, sq] or [h, total_q], and max_logit, None or fp32 [h].

    splits: number of KV splits, or BY_LENGTHS; None: `number_of_splits`.
    """
    x = problem
    if x.batch == 0 or x.q.numel() == 0:  # no program writes the padding, and a bias has no row to load
        out.zero_()
        lse.fill_(float("-inf"))
        if max_logit is not None:
            max_logit.fill_(float("-inf"))
        return
    tile = tile or x.tile(FORWARD)
    group = heads_of_a_tile(x, tile, max_logit is not None)
    tiles, room = tiles_and_room(x, tile, group, SPLIT_PROGRAMS)
    splits = number_of_splits(x, tiles, room) if splits is None else splits
    slots = slots_of_heads(group)
    planned = PlannedTile(heads=group, queries=tile.block_m // slots, seen=tile.block_m, keys=tile.block_n, writes_whole=False)
    plan, parts = split_results(x, planned, splits, room, lse, out.shape[-1])
    programs = tiles * splits if plan is None else plan.num_parts
    parts_out = out
    if parts is not None:
        parts_out = parts.rows(lse) if plan is None else parts.out.view(programs, -1, slots, out.shape[-1])
    early = parts is not None and overlaps(x.device)
    meta = x.meta(tile, (parts_out,))._replace(HEADS=group, GROUP=slots, IS_LATENT=x.is_latent, OVERLAPS=early)
    meta = meta._replace(ASKS_OF_BLOCKS=x.asks_of_blocks(group), MASKS_KEYS=x.masks_keys(group))
    meta = meta._replace(IS_NEAR=x.is_near, IS_WHOLE=splits == 1 and plan is None and x.fills_tiles(tile))
    largest = None
    if max_logit is not None:
        places = tiles // x.num_heads * splits if plan is None else plan.entries + plan.programs
        largest = max_logit.new_empty((x.num_heads, places))
        if plan is not None:  # some entries belong to no piece
            largest.fill_(float("-inf"))
    args = Arguments(
        inputs=x.inputs(meta),
        lists=x.block_mask.in_order() if x.block_mask is not None and x.piece > 0 else x.lists("kv"),
        out=rows(parts_out, meta),
        lse_ptr=lse if parts is None else parts.lse,
        max_logit_ptr=largest,
        num_splits=splits if splits > 1 else None,
        plan=plan,
        v_t=_v_transposed(x) if x.is_fp8 else None,
    )
    launch(_attn_fwd_kernel, programs, out.device, tile, (args, x.mods, meta))
    if parts is not None:
        combine_parts(x, parts, (out, lse), plan, planned)
    if max_logit is not None and largest is not None:
        torch.amax(largest, 1, out=max_logit)
