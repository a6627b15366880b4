"""Second derivatives that pass through the scores: for a bias, and for the captured tensors of a score_mod."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import BlockKinds, BlockMaskLists, Pointer
from flexattn.kernels_triton.common.block_lists import listed_tile
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.row_tiles import Place, keys_of_block
from flexattn.kernels_triton.common.sequences import load_sequence, program_of_queries
from flexattn.kernels_triton.runtime.launch import kernel
from flexattn.kernels_triton.second_order.double_backward import Known, derivatives, load_keys, load_queries
from flexattn.kernels_triton.second_order.tiles import pairs_of


class BiasArguments(NamedTuple):
    known: Known
    kinds: BlockKinds | None
    parts_ptr: Pointer  # fp32 [num_splits, b, h, q, kv], contiguous: partial sums of the bias's gradient
    b: int  # sizes of the bias
    h: int
    q: int
    kv: int
    num_splits: int


@triton.jit
def _kind_of_block(kinds, b, h, first_row, first_column, META: tl.constexpr):
    # Returns 0 for a block that the block mask hides, 1 for one whose pairs the mask_mod decides, 2 for one that is visible.
    row = b * kinds.stride_b + h * kinds.stride_h + first_row // META.BLOCK_SIZE_Q
    return tl.load(kinds.ptr + tl.cast(row, tl.int64) * kinds.length + first_column // META.BLOCK_SIZE_KV)


@kernel
def _attn_double_bias_kernel(
    args: BiasArguments, SPANS_Q: tl.constexpr, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr
):
    # Each program sums one tile of the bias over the scores that the tile was added to.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.known.inputs
    blocks_m = tl.cdiv(args.q, BLOCK_M)
    blocks_n = tl.cdiv(args.kv, BLOCK_N)
    pid = tl.program_id(0)
    tile_n = pid % blocks_n
    tile_m = pid // blocks_n % blocks_m
    split = pid // blocks_n // blocks_m % args.num_splits
    tile_h = pid // blocks_n // blocks_m // args.num_splits % args.h
    tile_b = pid // blocks_n // blocks_m // args.num_splits // args.h
    over_b = inputs.lengths_q.batch // args.b
    over_h = inputs.num_heads // args.h
    over_m = 1 if SPANS_Q else tl.cdiv(inputs.lengths_q.max_seqlen, BLOCK_M)
    first_b = tile_b
    if inputs.scores.bias.group is not None:
        first_b = tile_b * inputs.scores.bias.group
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for t in range(split, over_b * over_h * over_m, args.num_splits):
        first_row = (tile_m + t % over_m) * BLOCK_M
        h = tile_h + t // over_m % over_h
        b = first_b + t // over_m // over_h
        start_q, len_q = load_sequence(inputs.lengths_q, b, META.IS_RAGGED_Q)
        start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
        shift = (len_kv - len_q) * inputs.band.bottom_right
        n = tile_n * BLOCK_N
        is_visible = (first_row < len_q) & (n < len_kv)
        if META.HAS_LEFT:
            is_visible = is_visible & (n + BLOCK_N - 1 - first_row - shift >= -inputs.band.left)
        if META.HAS_RIGHT:
            is_visible = is_visible & (n - (first_row + BLOCK_M - 1) - shift <= inputs.band.right)
        if is_visible:
            is_full = False
            kind = 1
            if META.BLOCK_SIZE_Q > 0:
                kind = _kind_of_block(args.kinds, b, h, first_row, n, META).to(tl.int32)
                is_full = kind == 2
            if kind > 0:
                head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
                place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
                key_place = Place(b=b, h=h // inputs.group_size, start=start_kv, first=n, length=len_kv)
                queries, keys = load_queries(args.known, (), place, False, META), load_keys(args.known, key_place, META)
                pairs = pairs_of(queries, keys, is_full, False, META)
                found = derivatives(args.known, pairs, head, MODS, BENDS, False, META)
                total += found.t_dscore * inputs.scores.scale if META.HAS_PRE_SCALE_BIAS else found.t_dlogit
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    base = args.parts_ptr + ((tl.cast(split, tl.int64) * args.b + tile_b) * args.h + tile_h) * args.q * args.kv
    if SPANS_Q:
        inside = (row < args.q)[:, None] & (column < args.kv)[None, :]
        tl.store(base + row.to(tl.int64)[:, None] * args.kv + column[None, :], total, mask=inside)
    else:
        tl.store(base + column, tl.sum(total, 0), mask=column < args.kv)


class CaptureArguments(NamedTuple):
    known: Known
    lists: BlockMaskLists | None  # lists of key blocks
    sums: Any  # tuples of tensors that `Mods.accumulate` adds to, and of their units in mode "fixed"
    scales: Any
    bent_sums: Any  # the same for `Bends.accumulate`
    bent_scales: Any


@kernel
def _attn_double_captures_kernel(
    args: CaptureArguments, MODE: tl.constexpr, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr
):
    inputs = args.known.inputs
    own = program_of_queries(tl.program_id(0), inputs, META)
    b, h = own.b, own.h
    start_q, len_q, start_kv, len_kv = own.sequence
    first_row = own.block * META.BLOCK_M
    if first_row >= len_q:
        return
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    queries = load_queries(args.known, (), Place(b=b, h=h, start=start_q, first=first_row, length=len_q), False, META)
    tiles = keys_of_block(args.lists, head, first_row, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, META.BLOCK_N)
        place = Place(b=b, h=h // inputs.group_size, start=start_kv, first=n, length=len_kv)
        keys = load_keys(args.known, place, META)
        pairs = pairs_of(queries, keys, is_full, False, META)
        found = derivatives(args.known, pairs, head, MODS, BENDS, False, META)
        i, j = pairs.i, pairs.j
        score = found.scored.score
        if MODS.accumulate is not None:
            MODS.accumulate(found.t_dlogit, score, b, h, i, j, head.captures, args.sums, args.scales, MODE)
        if BENDS.accumulate is not None:
            t_score = found.scored.t_score
            BENDS.accumulate(found.dlogit, t_score, score, b, h, i, j, head.captures, args.bent_sums, args.bent_scales, MODE)
