"""Forward attention on Hopper (sm_90) in Gluon: a warp that loads by TMA, warpgroups that compute, work handed out as it is done.

Each consumer warpgroup has 64 queries. It issues the scores of one block of keys and, before it looks at them, the product of the
block before with v, so that the softmax of one runs under the matrix product of the other; two or three consumers also take turns
at the matrix unit (FlashAttention-3, arXiv 2407.08608, section 3). Behaviour is that of `forward.attention_forward`, which runs
what `conditions.forward_unsupported` names.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Alibi, Bias
from flexattn.kernels_triton.common.primitives import (
    LN2,
    LOG2E,
    captures_of_head,
    exponent_factor,
    exponent_origin,
    load_head,
    log_of_sum,
)
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.split_kv import Parts, combine_splits, number_of_splits, part_row
from flexattn.kernels_triton.common.tiles import (
    HopperTile,
    split_head_dim,
)
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.barriers import BOTH, PINGPONG, named_barrier_arrive, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import (
    blocks_by_lists,
    blocks_of_keys,
    blocks_of_split,
    key_block,
    listed_keys,
    own_blocks,
)
from flexattn.kernels_triton.hopper.conditions import forward_tile, heads_of_a_tile
from flexattn.kernels_triton.hopper.descriptors import batch_steps_of, load_rows, ragged_descriptor, store_rows
from flexattn.kernels_triton.hopper.dropout import drawn_weights, dropout_state, scaled
from flexattn.kernels_triton.hopper.masking import mask_by_mod, mask_keys
from flexattn.kernels_triton.hopper.operands import ROWS, keep_pairs, unpack_pairs
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers, pass_over
from flexattn.kernels_triton.hopper.scores import modified
from flexattn.kernels_triton.hopper.softmax import for_threads, rescaled, softmax, sums_of_threads
from flexattn.kernels_triton.hopper.tile_scheduler import (
    amount_of_work,
    hear,
    piece_of_work,
    query_heads_per_section,
    sequences,
    tell,
)
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch, num_processors

_FEWEST = gl.constexpr(4)  # blocks of keys that are worth a loop of their own: before it and after it a product runs alone


class ForwardMeta(NamedTuple):
    """What the kernel is compiled for."""

    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_GAPS_Q: bool
    HAS_GAPS_KV: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_DROPOUT: bool
    HAS_MAX_LOGIT: bool
    HAS_PRE_SCALE_BIAS: bool
    HAS_POST_SCALE_BIAS: bool
    IS_BIAS_CONTIGUOUS: bool
    HAS_ALIBI: bool
    HAS_SOFTCAP: bool
    IS_UNBOUNDED: bool
    HAS_EXACT_TANH: bool
    HAS_SCORE_MOD: bool
    HAS_MASK_MOD: bool
    BLOCK_SIZE_Q: int
    BLOCK_SIZE_KV: int
    GROUP: int  # query heads of a tile, whose rows are the first query of each, then the second, ..
    IS_SPLIT: bool  # the keys, between programs: each leaves a part, as `splits.Parts` has them
    LISTS_ARE_CUT: bool
    BLOCK_M: int
    BLOCK_N: int
    QK0: int  # head dims as the tiles hold them, in one or two parts
    QK1: int
    V0: int
    STAGES: int
    CONSUMERS: int
    TAKES_TURNS: bool
    LAZY: bool  # rows are rescaled when their maximum has risen by much
    OUT_PARTS: int
    REGISTERS: int
    HAS_IDLE: bool  # a tile may leave consumers without queries
    SKIPS: bool  # consumers pass over the blocks of keys that none of their queries sees
    Q_STAGES: int
    HAS_RUNS: bool  # of whole blocks of keys, among others that a band or a block mask may cut: a loop without masks
    HAS_CUT_LOOP: bool  # a loop with masks, for blocks that may be cut, as are most in a narrow window
    NUMBERS: int  # that make a tile: (first query, first head, batch, split), with lengths (first token, queries, keys) too, and
    # of a block mask what `listed_keys` and `_whole_blocks` find


@gluon.jit
def _amount_of_work(table_ptr, work, META: gl.constexpr):
    batch, num_heads, _, blocks, _, num_splits = work
    amount = amount_of_work(table_ptr, batch, num_heads // META.GROUP, blocks, META)
    if META.IS_SPLIT:
        amount = amount * num_splits
    return amount


@gluon.jit
def _tile_of(t, amount, table_ptr, work, META: gl.constexpr):
    # (first query, first head, batch, split) of piece t, of so many
    batch, num_heads, _, blocks, heads_per_section, num_splits = work
    split = 0
    if META.IS_SPLIT:
        split = t % num_splits
        t = t // num_splits
        amount = amount // num_splits
    first_row, h, b = piece_of_work(t, amount, table_ptr, batch, num_heads // META.GROUP, blocks, heads_per_section, META)
    return first_row // META.GROUP, h * META.GROUP, b, split


@gluon.jit
def _blocks_of_tile(
    listed, first_row, b, h, split, num_splits, len_kv, shift, window_left, window_right, lists, META: gl.constexpr
):
    # The blocks of keys of a tile, or of its split, as `blocks_of_keys` gives them; of a block mask by what `listed_keys` found
    if META.BLOCK_SIZE_Q > 0:
        num_blocks, found = blocks_by_lists(listed, first_row, b, h, lists, META)
    else:
        QUERIES: gl.constexpr = META.BLOCK_M // META.GROUP
        num_blocks, found = blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META, QUERIES)
    if META.IS_SPLIT:
        num_blocks, found = blocks_of_split(split, num_splits, num_blocks, found, META)
    return num_blocks, found


@gluon.jit
def _load_partition(common, META: gl.constexpr):
    descriptors, tiles, barriers, work, scalars, cu_seqlens, table_ptr, lists = common
    q_descriptor, k_descriptor, v_descriptor, _, q1_descriptor, k1_descriptor = descriptors
    q_tiles, k_tiles, v_tiles, _, q1_tiles, k1_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    batch, _, group_size, _, _, num_splits = work
    num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps = scalars
    step_qs, step_qh, step_ks, step_kh, step_vs, step_vh, _, _ = steps
    CONSUMERS: gl.constexpr = META.CONSUMERS
    QK0: gl.constexpr = META.QK0
    GROUP: gl.constexpr = META.GROUP
    amount = _amount_of_work(table_ptr, work, META)
    loaded = 0
    turn = 0
    piece = gl.program_id(0)
    while piece < amount:
        drawn = gl.atomic_add(table_ptr, 1, sem="relaxed")  # the next piece's number travels while this one loads
        first_row, h, b, split = _tile_of(piece, amount, table_ptr, work, META)
        start_q, len_q, start_kv, len_kv = sequences(
            b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
        )
        shift = (len_kv - len_q) * bottom_right
        tile = (first_row, h, b, split)
        if META.HAS_LENGTHS:
            tile = tile + (start_q, len_q, len_kv)
        mask = (len_kv, shift, window_left, window_right)
        listed = ()
        if META.BLOCK_SIZE_Q > 0:
            listed = listed_keys(first_row, b, h, *mask, lists, META)
        num_blocks, found = _blocks_of_tile(listed, first_row, b, h, split, num_splits, *mask, lists, META)
        if META.BLOCK_SIZE_Q > 0:
            tile = tile + listed + _whole_blocks(first_row, META.BLOCK_M, num_blocks, found, mask, META)
        tell(tile, turn, barriers, META)
        h_kv = h // group_size
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * (ROWS // GROUP)
            token, head = start_q + b * step_qs, h + b * step_qh
            slot = consumer + turn % META.Q_STAGES * CONSUMERS
            full = q_full.index(slot)
            mbarrier.wait(q_empty.index(slot), ((turn // META.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(full, q_descriptor.block_type.nbytes + (q1_descriptor.block_type.nbytes if META.QK1 > 0 else 0))
            load_rows(q_descriptor, token, len_q, row, head, 0, full, q_tiles.index(slot))
            if META.QK1 > 0:
                load_rows(q1_descriptor, token, len_q, row, head, QK0, full, q1_tiles.index(slot))
        for t in range(num_blocks):
            row = key_block(num_blocks - 1 - t, found, META)[0]
            slot = loaded % META.STAGES
            phase = (loaded // META.STAGES) & 1
            token, head = start_kv + b * step_ks, h_kv + b * step_kh
            full = k_full.index(slot)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(full, k_descriptor.block_type.nbytes + (k1_descriptor.block_type.nbytes if META.QK1 > 0 else 0))
            load_rows(k_descriptor, token, len_kv, row, head, 0, full, k_tiles.index(slot))
            if META.QK1 > 0:
                load_rows(k1_descriptor, token, len_kv, row, head, QK0, full, k1_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_descriptor.block_type.nbytes)
            token, head = start_kv + b * step_vs, h_kv + b * step_vh
            load_rows(v_descriptor, token, len_kv, row, head, 0, v_full.index(slot), v_tiles.index(slot))
            loaded += 1
        piece = drawn + gl.num_programs(0)
        turn += 1
    tell((-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), turn, barriers, META)


@gluon.jit
def _scores(q_tiles, k_tiles, q1_tiles, k1_tiles, q_slot, slot, zeros, META: gl.constexpr):
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    q0 = q_tiles.index(q_slot).reshape([ROWS, QK0])
    k0 = k_tiles.index(slot).reshape([BLOCK_N, QK0])
    qk = warpgroup_mma(q0, k0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if QK1 > 0:
        q1 = q1_tiles.index(q_slot).reshape([ROWS, QK1])
        k1 = k1_tiles.index(slot).reshape([BLOCK_N, QK1])
        qk = warpgroup_mma(q1, k1.permute([1, 0]), qk, is_async=True)
    return qk


@gluon.jit
def _whole_blocks(own_row, QUERIES: gl.constexpr, own_num, own_found, mask, META: gl.constexpr):
    # Of the blocks of keys of QUERIES from own_row on, of which the last come first: (from which on, the first apart, up to which)
    # nothing is hidden by an edge or a block mask; up to 0 if they are few, others follow, and there is a loop for these.
    len_kv, shift, window_left, window_right = mask
    begin = 1
    end = own_num
    right_end = len_kv  # what all queries see ends here, and begins at left_end
    left_end = 0
    if META.HAS_RIGHT:
        right_end = gl.minimum(len_kv, own_row + shift + 1 + window_right)
    if META.HAS_LEFT:
        left_end = gl.maximum(own_row + shift + QUERIES - 1 - window_left, 0)
    if META.BLOCK_SIZE_Q > 0:  # the full ones come first
        end = gl.maximum(own_num - gl.maximum(own_found[1], 0) * (META.BLOCK_SIZE_KV // META.BLOCK_N), 1)
        while (begin < end) & (key_block(gl.maximum(own_num - 1 - begin, 0), own_found, META)[0] + META.BLOCK_N > right_end):
            begin += 1
        if META.HAS_LEFT:
            while (begin < end) & (key_block(gl.minimum(own_num - end, own_num - 1), own_found, META)[0] < left_end):
                end -= 1
    else:
        if META.HAS_RIGHT:
            begin = own_found + own_num - gl.maximum(right_end, 0) // META.BLOCK_N
            begin = gl.minimum(gl.maximum(begin, 1), own_num)
        if META.HAS_LEFT:
            end = gl.maximum(gl.minimum(own_found + own_num - gl.cdiv(left_end, META.BLOCK_N), own_num), begin)
    if META.HAS_CUT_LOOP:
        end = gl.where((end - begin >= _FEWEST) | (end == own_num), end, 0)
    return begin, end


@gluon.jit
def _mask(s, rows, columns, column, own_row, mask, META: gl.constexpr):
    # What the band hides, and what is past the end; a scalar branch, so that blocks which neither cuts do not pay for it.
    len_kv, shift, window_left, window_right = mask
    is_cut = column + META.BLOCK_N > len_kv
    if META.HAS_RIGHT:
        is_cut = is_cut | (column + META.BLOCK_N > own_row + shift + 1 + window_right)
    if META.HAS_LEFT:
        is_cut = is_cut | (column < own_row + shift + ROWS // META.GROUP - 1 - window_left)
    if is_cut:
        s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
    return s


@gluon.jit
def _store_out(part, COLUMN: gl.constexpr, rows, out_descriptor, out_tile):
    # On its way when this returns
    start, length, row, head = rows
    tma.store_wait(0)  # what was in the buffer has left it
    out_tile.reshape(part.shape).store(part.to(out_tile.dtype))
    fence_async_shared()
    store_rows(out_descriptor, start, length, row, head, COLUMN, out_tile)


@gluon.jit
def _weights(
    qk,
    column,
    is_full,
    drawn,
    row_max,
    row_sum,
    fixed,
    DTYPE: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # `softmax` of the products with the block of keys at `column`
    own_row, rows, block_columns, mask, place, scores, head, own_captures, _, _, _, _ = fixed
    columns = column + block_columns
    s, factor, _cap_tanh, _score = modified(qk, rows[:, None], columns[None, :], place, scores, head, MODS, META)
    if IS_CUT:
        s = _mask(s, rows, columns, column, own_row, mask, META)
    if IS_CUT or META.BLOCK_SIZE_Q == 0:
        s = mask_by_mod(s, rows[:, None], columns[None, :], is_full, place, own_captures, MODS, META)
    return softmax(s, row_max, row_sum, factor, drawn, DTYPE, META)


@gluon.jit
def _turn(
    t,
    so_far,
    own_num,
    own_found,
    fixed,
    tiles,
    barriers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # The next block of keys: its scores, and under their softmax the product of the block before with v.
    pairs, row_max, row_sum, acc, loaded = so_far
    own_row, _, _, _, _, _, _, _, draws, b_h, q_slot, zeros = fixed
    q_tiles, k_tiles, v_tiles, _, q1_tiles, k1_tiles = tiles
    _, _, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    column, is_full = key_block(own_num - 1 - t, own_found, META)  # read from a list while the products run
    slot = loaded % META.STAGES
    last_slot = (loaded - 1) % META.STAGES
    # Unpacked before the scores are issued: between the two products ptxas would serialise them (C7513).
    p = unpack_pairs(pairs, ROWS, BLOCK_N, P, DTYPE)
    mbarrier.wait(k_full.index(slot), (loaded // META.STAGES) & 1)
    if META.TAKES_TURNS:
        named_barrier_sync(PINGPONG + CONSUMER, BOTH)
    product = _scores(q_tiles, k_tiles, q1_tiles, k1_tiles, q_slot, slot, zeros, META)
    mbarrier.wait(v_full.index(last_slot), ((loaded - 1) // META.STAGES) & 1)
    sum_of_v = warpgroup_mma(p, v_tiles.index(last_slot).reshape([BLOCK_N, V0]), acc, is_async=True)
    if META.TAKES_TURNS:
        named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
    drawn = drawn_weights(draws, b_h, own_row, column, BLOCK_N, False, META, META.GROUP)
    qk = warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(k_empty.index(slot), count=1)
    new_pairs, row_max, row_sum, decay = _weights(qk, column, is_full, drawn, row_max, row_sum, fixed, DTYPE, IS_CUT, MODS, META)
    acc = warpgroup_mma_wait(0, deps=[sum_of_v])
    keep_pairs(pairs)
    mbarrier.arrive(v_empty.index(last_slot), count=1)
    return new_pairs, row_max, row_sum, rescaled(acc, decay, META), loaded + 1


@gluon.jit
def _run(
    so_far,
    begin,
    end,
    own_num,
    own_found,
    fixed,
    tiles,
    barriers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # A block of keys, with nothing under its softmax; if the next is `begin`, those up to `end` too, which are whole or, with
    # IS_CUT, may be cut. With a branch for that in every turn ptxas would move the wait for the product with v up to it.
    t, row_max, row_sum, acc, loaded = so_far
    own_row, _, _, _, _, _, _, _, draws, b_h, q_slot, zeros = fixed
    q_tiles, k_tiles, v_tiles, _, q1_tiles, k1_tiles = tiles
    _, q_empty, k_full, k_empty, v_full, v_empty, _, _, _ = barriers
    DTYPE: gl.constexpr = k_tiles.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    slot = loaded % META.STAGES
    mbarrier.wait(k_full.index(slot), (loaded // META.STAGES) & 1)
    if META.TAKES_TURNS:
        named_barrier_sync(PINGPONG + CONSUMER, BOTH)
    product = _scores(q_tiles, k_tiles, q1_tiles, k1_tiles, q_slot, slot, zeros, META)
    if META.TAKES_TURNS:
        named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
    column, is_full = key_block(own_num - 1 - t, own_found, META)
    drawn = drawn_weights(draws, b_h, own_row, column, BLOCK_N, False, META, META.GROUP)
    qk = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(k_empty.index(slot), count=1)
    pairs, row_max, row_sum, decay = _weights(qk, column, is_full, drawn, row_max, row_sum, fixed, DTYPE, True, MODS, META)
    if META.HAS_RUNS:
        acc = rescaled(acc, decay, META)
    so_far = (pairs, row_max, row_sum, acc, loaded + 1)
    t += 1
    end = gl.where(t == begin, end, t)
    for following in range(t, end):
        so_far = _turn(following, so_far, own_num, own_found, fixed, tiles, barriers, CONSUMER, IS_CUT, MODS, META)
    pairs, row_max, row_sum, acc, loaded = so_far
    mbarrier.arrive(q_empty.index(q_slot), count=1, pred=end == own_num)
    slot = (loaded - 1) % META.STAGES
    mbarrier.wait(v_full.index(slot), ((loaded - 1) // META.STAGES) & 1)
    p = unpack_pairs(pairs, ROWS, BLOCK_N, P, DTYPE)
    sum_of_v = warpgroup_mma(p, v_tiles.index(slot).reshape([BLOCK_N, META.V0]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sum_of_v])
    keep_pairs(pairs)
    mbarrier.arrive(v_empty.index(slot), count=1)
    return end, row_max, row_sum, acc, loaded


@gluon.jit
def _compute_partition(common, given, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    softmax_offset_ptr, softmax_scale, mods, dropout, outputs = given
    descriptors, tiles, barriers, work, scalars, cu_seqlens, _, lists = common
    bias, alibi_slopes_ptr, stride_alibi_b, softcap, captures = mods
    bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n = bias
    lse_ptr, max_logit_ptr, parts_ptr = outputs
    _, _, _, out_descriptor, _, _ = descriptors
    out_tiles = tiles[3]
    q_full, q_empty, _, _, _, _, _, _, _ = barriers
    batch, num_heads, _, _, _, num_splits = work
    num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps = scalars
    _, _, _, _, _, _, step_os, step_oh = steps
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    GROUP: gl.constexpr = META.GROUP
    draws = dropout_state(dropout, META)
    if META.TAKES_TURNS and CONSUMER == META.CONSUMERS - 1:
        named_barrier_arrive(PINGPONG, BOTH)  # consumer 0 begins
    loaded = 0
    turn = 0
    tile = hear(turn, barriers, META)
    while tile[0] >= 0:
        first_row, h, b, split = tile[:4]
        if META.HAS_LENGTHS:
            start_q, len_q, len_kv = tile[4:7]
        else:
            start_q, len_q, _, len_kv = sequences(
                b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META
            )
        shift = (len_kv - len_q) * bottom_right
        mask = (len_kv, shift, window_left, window_right)
        listed = ()
        if META.BLOCK_SIZE_Q > 0:
            listed = tile[META.NUMBERS - 6 : META.NUMBERS - 2]
        num_blocks, found = _blocks_of_tile(listed, first_row, b, h, split, num_splits, *mask, lists, META)
        own_row = first_row + CONSUMER * (ROWS // GROUP)
        skipped, own_num, own_found = own_blocks(own_row, num_blocks, found, len_q, shift, window_left, window_right, META)
        rows = own_row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        h_of_rows, h_of_scores = h, h
        if GROUP > 1:
            in_tile = gl.arange(0, ROWS, layout=ROW_LAYOUT)
            rows = own_row + in_tile // GROUP
            h_of_rows = h + in_tile % GROUP
            h_of_scores = h_of_rows[:, None]
        head = load_head(
            Bias(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
            Alibi(alibi_slopes_ptr, stride_alibi_b),
            b,
            h_of_scores,
            META,
        )
        place = (len_q, len_kv, shift, b, h_of_scores)
        own_captures = captures_of_head(b, h_of_scores, captures, MODS, META)
        scores = (softmax_scale, softcap, stride_bias_m, stride_bias_n, own_captures)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW_LAYOUT)  # in units of log2
        row_sum = sums_of_threads(zeros, BLOCK_N)
        if META.HAS_SINK:
            sink = 0.0
            if META.HAS_OFFSET:
                sink = gl.load(softmax_offset_ptr + h_of_rows).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
            if META.IS_SPLIT:
                sink = gl.where(split == 0, sink, float("-inf"))
            if not META.HAS_MAX_LOGIT:  # the sink is none
                row_max = gl.maximum(row_max, sink)
                row_sum = row_sum + for_threads(gl.where(row_max == float("-inf"), 0.0, 0.25), row_sum)  # a quarter in each thread
        acc = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        q_slot = CONSUMER + turn % META.Q_STAGES * META.CONSUMERS
        mbarrier.wait(q_full.index(q_slot), (turn // META.Q_STAGES) & 1)
        if META.SKIPS:
            loaded = pass_over(skipped, loaded, barriers, CONSUMER, META)
        fixed = (own_row, rows, block_columns, mask, place, scores, head, own_captures, draws, b * num_heads + h, q_slot, zeros)
        so_far = (0, row_max, row_sum, acc, loaded)
        if META.HAS_RUNS:
            if META.BLOCK_SIZE_Q > 0:
                whole_from, whole_to = tile[META.NUMBERS - 2 :]
            else:
                whole_from, whole_to = _whole_blocks(own_row, ROWS // GROUP, own_num, own_found, mask, META)
            last = own_num  # few others follow, and through the same instructions
            if META.HAS_CUT_LOOP:
                last = whole_to
            while so_far[0] < last:
                so_far = _run(so_far, whole_from, whole_to, own_num, own_found, fixed, tiles, barriers, CONSUMER, False, MODS, META)
        if META.HAS_CUT_LOOP or not META.HAS_RUNS:
            following = so_far[0] + 1
            if following <= own_num:
                so_far = _run(
                    so_far, following, own_num, own_num, own_found, fixed, tiles, barriers, CONSUMER, META.HAS_CUT_LOOP, MODS, META
                )
        _, row_max, row_sum, acc, loaded = so_far
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)
        if own_num == 0:
            mbarrier.arrive(q_empty.index(q_slot), count=1)
        if META.SKIPS:
            loaded = pass_over(num_blocks - skipped - own_num, loaded, barriers, CONSUMER, META)
        if META.HAS_MAX_LOGIT:
            of_head = max_logit_ptr + (gl.zeros_like(rows) + h_of_rows)
            gl.atomic_max(of_head, row_max * (1.0 if META.IS_UNBOUNDED else LN2), mask=rows < len_q, sem="relaxed")
            if META.HAS_SINK:
                seen = row_max
                row_max = gl.maximum(row_max, sink)
                if META.IS_UNBOUNDED:
                    factor = exponent_factor(row_max)
                    origin = exponent_origin(row_max, factor, 0.0)
                    decay = gl.exp2(exponent_origin(seen, factor, 0.0) - origin)
                    row_sum = row_sum * decay + gl.exp2(gl.fma(sink + gl.zeros_like(factor), factor, -origin))
                else:
                    origin = gl.where(row_max == float("-inf"), 0.0, row_max)
                    decay = gl.exp2(seen - origin)
                    row_sum = row_sum * decay + gl.exp2(sink - origin)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
        lse_row = (h_of_rows if META.IS_RAGGED_Q else b * num_heads + h_of_rows).to(gl.int64) * num_tokens_q + start_q
        if META.IS_SPLIT:
            lse_row = lse_row + part_row(split, batch, num_heads, num_tokens_q, META)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # of a row that sees nothing: its out is 0 / 1, its lse -inf + 0
        if META.IS_UNBOUNDED:
            factor = exponent_factor(row_max)
            lse, lost = log_of_sum(row_max, factor, exponent_origin(row_max, factor, 0.0), row_sum_or_1)
            if META.IS_SPLIT:
                lost_row = lse_row + part_row(num_splits, batch, num_heads, num_tokens_q, META)
                gl.store(lse_ptr + lost_row + rows, lost, mask=rows < len_q)
            gl.store(lse_ptr + lse_row + rows, lse, mask=rows < len_q)
        else:
            gl.store(lse_ptr + lse_row + rows, (row_max + gl.log2(row_sum_or_1)) * LN2, mask=rows < len_q)
        rescale = scaled(1.0 / row_sum_or_1, draws, META)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
        if META.IS_SPLIT:  # in fp32, for which there is no room in shared memory; few of the rows are queries
            part_rows = gl.convert_layout((lse_row + rows) * V0, gl.SliceLayout(1, OUT))[:, None]
            is_query = gl.convert_layout(rows < len_q, gl.SliceLayout(1, OUT))[:, None]
            part_columns = gl.arange(0, V0, layout=gl.SliceLayout(0, OUT))[None, :]
            gl.store(parts_ptr + part_rows + part_columns, acc, mask=is_query)
        else:
            own_rows = (start_q + b * step_os, len_q, own_row, h + b * step_oh)
            if META.OUT_PARTS == 1:
                _store_out(acc, 0, own_rows, out_descriptor, out_tiles.index(CONSUMER))
            else:
                low, high = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, V0 // 2]), [0, 2, 1]))
                _store_out(low, 0, own_rows, out_descriptor, out_tiles.index(CONSUMER))
                _store_out(high, V0 // 2, own_rows, out_descriptor, out_tiles.index(CONSUMER))
        turn += 1
        tile = hear(turn, barriers, META)
    tma.store_wait(0)
    if META.TAKES_TURNS and CONSUMER == 0:
        named_barrier_sync(PINGPONG, BOTH)


@hopper_kernel
def _attn_fwd_hopper_kernel(
    q_descriptor,
    k_descriptor,
    v_descriptor,
    out_descriptor,
    q1_descriptor,  # of the second part of the head dim; without one, anything
    k1_descriptor,
    lse_ptr,
    softmax_offset_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    cu_seqlens_q_padded_ptr,
    cu_seqlens_kv_padded_ptr,
    table_ptr,  # `ragged.work_table`'s; without lengths its counter alone
    softmax_scale,
    batch,
    num_heads,
    group_size,
    blocks,
    heads_per_section,
    num_tokens_q,
    num_tokens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    window_left,
    window_right,
    bottom_right,
    step_qs,
    step_qh,
    step_ks,
    step_kh,
    step_vs,
    step_vh,
    step_os,
    step_oh,
    bias_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    alibi_slopes_ptr,
    stride_alibi_b,
    softcap,
    captures,
    rng_state_ptr,
    dropout_threshold,
    keep_scale,
    max_logit_ptr,  # or None; [h], -inf before
    parts_ptr,  # with IS_SPLIT, where out goes; lse is then of the parts too
    num_splits,
    block_counts_ptr,  # of the block mask, the lists of key blocks
    block_indices_ptr,
    full_counts_ptr,
    full_indices_ptr,
    stride_list_b,
    stride_list_h,
    list_length,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    DTYPE: gl.constexpr = q_descriptor.dtype
    CONSUMERS: gl.constexpr = META.CONSUMERS
    STAGES: gl.constexpr = META.STAGES
    REGISTERS: gl.constexpr = META.REGISTERS
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    q_tiles = gl.allocate_shared_memory(DTYPE, [Q_TILES] + q_descriptor.block_type.shape, q_descriptor.layout)
    out_tiles = q_tiles
    if not META.IS_SPLIT:
        out_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS] + out_descriptor.block_type.shape, out_descriptor.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + k_descriptor.block_type.shape, k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + v_descriptor.block_type.shape, v_descriptor.layout)
    q1_tiles = q_tiles
    k1_tiles = k_tiles
    if META.QK1 > 0:
        q1_tiles = gl.allocate_shared_memory(DTYPE, [Q_TILES] + q1_descriptor.block_type.shape, q1_descriptor.layout)
        k1_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + k1_descriptor.block_type.shape, k1_descriptor.layout)
    told = gl.allocate_shared_memory(gl.int32, [2 * META.NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = (
        allocate_barriers(Q_TILES, 1),
        allocate_barriers(Q_TILES, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, CONSUMERS),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, CONSUMERS),
        allocate_barriers(2, 1),
        allocate_barriers(2, CONSUMERS),
        told,
    )
    descriptors = (q_descriptor, k_descriptor, v_descriptor, out_descriptor, q1_descriptor, k1_descriptor)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles, q1_tiles, k1_tiles)
    work = (batch, num_heads, group_size, blocks, heads_per_section, num_splits)
    steps = (step_qs, step_qh, step_ks, step_kh, step_vs, step_vh, step_os, step_oh)
    scalars = (num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, window_left, window_right, bottom_right, steps)
    cu_seqlens = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr)
    lists = (block_counts_ptr, block_indices_ptr, full_counts_ptr, full_indices_ptr, stride_list_b, stride_list_h, list_length)
    common = (descriptors, tiles, barriers, work, scalars, cu_seqlens, table_ptr, lists)
    bias = (bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n)
    mods = (bias, alibi_slopes_ptr, stride_alibi_b, softcap, captures)
    dropout = (rng_state_ptr, dropout_threshold, keep_scale, 0)
    given = (softmax_offset_ptr, softmax_scale, mods, dropout, (lse_ptr, max_logit_ptr, parts_ptr))
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the registers that are left, 240
        gl.warp_specialize(
            [
                (_compute_partition, (common, given, 0, MODS, META)),
                (_compute_partition, (common, given, 1, MODS, META)),
                (_load_partition, (common, META)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    elif CONSUMERS == 4:
        gl.warp_specialize(
            [
                (_load_partition, (common, META)),
                (_compute_partition, (common, given, 0, MODS, META)),
                (_compute_partition, (common, given, 1, MODS, META)),
                (_compute_partition, (common, given, 2, MODS, META)),
                (_compute_partition, (common, given, 3, MODS, META)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_load_partition, (common, META)),
                (_compute_partition, (common, given, 0, MODS, META)),
                (_compute_partition, (common, given, 1, MODS, META)),
                (_compute_partition, (common, given, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def _whole_blocks_of_window(problem: Problem, tile: HopperTile, group: int) -> float:
    """How many blocks of keys, at most, all queries of a warpgroup see whole."""
    x = problem
    if x.window_left is None or x.window_right is None:
        return math.inf
    return (x.window_left + x.window_right + 2 - ROWS.value // group) // tile.block_n


def tiles_and_room(problem: Problem, tile: HopperTile, group: int) -> tuple[int, int]:
    """(tiles of so many heads, programs that the device has room for), for `number_of_splits`."""
    tiles = -(-problem.longest_q // (tile.block_m // group)) * problem.batch * problem.num_heads // group
    return tiles, num_processors(problem.device)


def hopper_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: HopperTile | None = None,
    group: int | None = None,
    splits: int | None = None,
) -> None:
    """`forward.attention_forward` for a problem that `forward_unsupported` has nothing against.

    group: query heads of a tile; None: `heads_of_a_tile`.
    splits: parts of the keys; None: `number_of_splits`.
    """
    x = problem
    tile = tile or forward_tile(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    has_lengths = x.cu_seqlens_q is not None
    is_banded = x.window_left is not None or x.window_right is not None
    group = heads_of_a_tile(x, tile) if group is None else group
    is_narrow = x.block_mask is None and _whole_blocks_of_window(x, tile, group) < 2
    has_idle = has_lengths or x.longest_q * group <= tile.block_m - ROWS.value
    queries = tile.block_m // group
    blocks = -(-x.longest_q // queries)
    tiles, processors = tiles_and_room(x, tile, group)
    splits = number_of_splits(x, tiles, processors) if splits is None else splits
    parts = Parts.empty(splits, lse, tile.head_dim_v, x.is_unbounded) if splits > 1 else None
    meta = ForwardMeta(
        IS_RAGGED_Q=x.q.dim() == 3,
        IS_RAGGED_KV=x.k.dim() == 3,
        HAS_LENGTHS=has_lengths,
        HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
        HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
        HAS_LEFT=x.window_left is not None,
        HAS_RIGHT=x.window_right is not None,
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_DROPOUT=x.dropout_p > 0,
        HAS_MAX_LOGIT=max_logit is not None,
        **x.score_meta(),
        GROUP=group,
        IS_SPLIT=parts is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        QK0=qk0,
        QK1=qk1,
        V0=tile.head_dim_v,
        STAGES=tile.num_stages,
        CONSUMERS=tile.block_m // ROWS.value,
        TAKES_TURNS=tile.takes_turns,
        LAZY=tile.is_lazy and max_logit is None,
        OUT_PARTS=tile.out_parts,
        REGISTERS=tile.registers,
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or is_banded),
        Q_STAGES=tile.q_stages,
        HAS_RUNS=(is_banded and not is_narrow) or x.block_mask is not None,
        HAS_CUT_LOOP=is_narrow or x.block_mask is not None,
        NUMBERS=4 + 3 * has_lengths + 6 * (x.block_mask is not None),
    )
    tensors = (x.q, x.k, x.v, out)
    widths = (qk0, qk0, tile.head_dim_v, tile.head_dim_v // tile.out_parts)
    own, keys = (ROWS.value // group, group), (tile.block_n, 1)
    boxes = (own, keys, keys, own)
    descriptors = [ragged_descriptor(t, r, width, h) for t, (r, h), width in zip(tensors, boxes, widths, strict=True)]
    if qk1:
        descriptors += [ragged_descriptor(t, r, qk1, h) for t, (r, h) in ((x.q, own), (x.k, keys))]
    else:
        descriptors += descriptors[:2]
    if has_lengths:
        table = work_table(x, queries, "q", by_sequence=False)
    else:
        table = torch.zeros(1, dtype=torch.int32, device=out.device)
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    launch(
        _attn_fwd_hopper_kernel,
        min(processors, tiles * splits),
        out.device,
        Tile(tile.block_m, tile.block_n, 4, tile.num_stages),
        (
            *descriptors,
            lse if parts is None else parts.lse,
            x.softmax_offset,
            x.cu_seqlens_q,
            x.cu_seqlens_kv,
            x.cu_seqlens_q_padded,
            x.cu_seqlens_kv_padded,
            table,
            float(x.softmax_scale),
            x.batch,
            x.num_heads,
            x.group_size,
            blocks,
            query_heads_per_section(x) // group,
            x.q.shape[-3],
            x.k.shape[-3],
            x.longest_q,
            x.longest_kv,
            *x.window,
            int(x.bottom_right),
            *batch_steps_of(*tensors),
            *x.score_arguments(),
            *x.dropout_arguments(),
            max_logit,
            None if parts is None else parts.out,
            None if parts is None else splits,
            *x.list_arguments("kv"),
            x.mods,
            meta,
        ),
    )
    if parts is not None:
        combine_splits(x, parts, out, lse)
    if has_lengths:
        zero_padding(x, out, "q", lse)
