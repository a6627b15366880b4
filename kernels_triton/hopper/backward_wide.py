"""Two-kernel backward on sm_90 for head dims above 256, in Gluon, each kernel bitwise repeatable: one for dq, one for dk and dv.

A program computes dq of 64 queries, or dk or dv of 64 keys: its fp32 sums fill half of the registers. It visits blocks of the other
side. A head dim has two parts. Warpgroup 0 computes scores. Warpgroup 1 computes dp, and from both ds, or p for dv. Each sums one
part of the gradient's columns. A warp loads blocks by part.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Pointer, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.lse_rows import is_any_large, relative_to_lse
from flexattn.kernels_triton.common.preprocess import Tiled, tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import HOPPER_BACKWARD_WIDE, HopperBackwardTile
from flexattn.kernels_triton.gluon import backward_blocks
from flexattn.kernels_triton.gluon.backward_blocks import key_block as block_of_keys
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.barriers import BOTH, DS_WRITTEN, S_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.gluon.block_ranges import key_block, query_block
from flexattn.kernels_triton.gluon.descriptors import Step, load_rows, ragged_descriptor, step_of
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept, kept_gradient, scaled
from flexattn.kernels_triton.gluon.fp32_gradients import GradientRows, gradient_rows, store_gradient
from flexattn.kernels_triton.gluon.masking import apply_mask_mod, hide_queries_past_the_end, mask_keys, mask_queries
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles, opaque_zero
from flexattn.kernels_triton.gluon.pairs import origin_of, origin_of_head
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work
from flexattn.kernels_triton.hopper.products import zero_rows
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

PART = gl.constexpr(256)  # columns of a part of a head dim
SCORES = gl.constexpr(0)  # the operands of the products for scores, by the part's number; those for dp follow
DP = gl.constexpr(2)


class Descriptors(NamedTuple):
    """Operands of the products for scores and for dp, in tiles of one part: a program's rows, and blocks of the other side."""

    scores_rows: TensorDescriptor  # q for dq, otherwise k
    dp_rows: TensorDescriptor  # dout for dq, otherwise v
    scores_blocks: TensorDescriptor  # k for dq, otherwise q
    dp_blocks: TensorDescriptor  # v for dq, otherwise dout


class Steps(NamedTuple):
    scores_rows: Step
    dp_rows: Step
    scores_blocks: Step
    dp_blocks: Step


class WideBackwardArguments(NamedTuple):
    descriptors: Descriptors
    steps: Steps
    first: GradientRows  # dq or dk
    second: GradientRows | None  # dv; None for dq
    statistics_ptr: Pointer
    tiles_of_statistics: int  # tiles of one head
    large: backward_blocks.LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    scores: Scores
    dropout: Dropout | None  # None: no dropout
    lists: BlockMaskLists | None  # lists of key blocks for dq, otherwise of query blocks


@with_features
class WideBackwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    IS_DQ: bool  # a program's rows are queries
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics


class WideTiles(NamedTuple):
    """In shared memory: a program's rows by operand and part, blocks by slot, and tiles from one warpgroup to the other or both."""

    rows: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    s: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # p for dv


class Slot(NamedTuple):
    """Place of a part of the n-th block, and the parity of its full barrier."""

    index: int | gl.tensor
    phase: int | gl.tensor


@gluon.jit
def _slot(n, part: gl.constexpr):
    # part: SCORES or DP, and the part's number. The first part has two slots, so that its next product begins early.
    if part == 0:
        return Slot(index=n & 1, phase=(n >> 1) & 1)
    else:
        return Slot(index=part + 1, phase=n & 1)


@gluon.jit
def _side(block: backward_blocks.Block, IS_Q: gl.constexpr):
    # Returns the sequence's first token, its length and the (first) head, of queries or of keys
    sequence = block.sequence
    if IS_Q:
        return sequence.start_q, sequence.len_q, block.h
    else:
        return sequence.start_kv, sequence.len_kv, block.h_kv


@gluon.jit
def _is_dv():
    # Programs of dk come first, because they take longer.
    return gl.program_id(0) >= gl.num_programs(0) // 2


@gluon.jit
def _num_blocks(args, block: backward_blocks.Block, META: gl.constexpr):
    if META.IS_DQ:
        return block.num_blocks
    else:
        return block.num_blocks * block.heads  # blocks of all query heads


@gluon.jit
def _visited_block(n, block: backward_blocks.Block, META: gl.constexpr):
    if META.IS_DQ:
        return key_block(n, block.block_range, META)
    else:
        return query_block(n, block.block_range, META)


@gluon.jit
def _load_part(descriptor, origin, length, row, tiles: WideTiles, n, part: gl.constexpr):
    slot = _slot(n, part)
    full = tiles.full.index(slot.index)
    mbarrier.wait(tiles.empty.index(slot.index), slot.phase ^ 1)
    mbarrier.expect(full, descriptor.block_type.nbytes)
    load_rows(descriptor, origin.token, length, row, origin.head, part % 2 * PART, full, tiles.blocks.index(slot.index))


@gluon.jit
def _load(args: WideBackwardArguments, tiles: WideTiles, block: backward_blocks.Block, META: gl.constexpr):
    descriptors, steps, b = args.descriptors, args.steps, block.b
    start, length, h = _side(block, META.IS_DQ)
    scores_rows = origin_of(steps.scores_rows, start, h, b)
    dp_rows = origin_of(steps.dp_rows, start, h, b)
    full = tiles.rows_full.index(0)
    mbarrier.expect(full, 4 * descriptors.scores_rows.block_type.nbytes)
    for part in gl.static_range(2):
        tile = tiles.rows.index(SCORES + part)
        load_rows(descriptors.scores_rows, scores_rows.token, length, block.first_row, scores_rows.head, part * PART, full, tile)
        tile = tiles.rows.index(DP + part)
        load_rows(descriptors.dp_rows, dp_rows.token, length, block.first_row, dp_rows.head, part * PART, full, tile)
    start, length, h = _side(block, not META.IS_DQ)
    position = first_queries(block, args.work)
    for n in range(_num_blocks(args, block, META)):
        row = _visited_block(position.n, block, META)[0]
        scores_blocks = origin_of_head(origin_of(steps.scores_blocks, start, h, b), position.head)
        dp_blocks = origin_of_head(origin_of(steps.dp_blocks, start, h, b), position.head)
        # In the order in which slots are released
        _load_part(descriptors.scores_blocks, scores_blocks, length, row, tiles, n, SCORES)
        _load_part(descriptors.dp_blocks, dp_blocks, length, row, tiles, n, DP)
        _load_part(descriptors.dp_blocks, dp_blocks, length, row, tiles, n, DP + 1)
        _load_part(descriptors.scores_blocks, scores_blocks, length, row, tiles, n, SCORES + 1)
        position = next_queries(position, block, args.work)


@gluon.jit
def _add_part(s, tiles: WideTiles, n, part: gl.constexpr, is_last):
    # Adds the product of one part of a program's rows and the n-th block. is_last: whether no later product reads it
    slot = _slot(n, part)
    mbarrier.wait(tiles.full.index(slot.index), slot.phase)
    rows = tiles.rows.index(part + opaque_zero(n)).reshape([ROWS, PART])
    columns = tiles.blocks.index(slot.index).reshape([s.shape[1], PART])
    s = warpgroup_mma(rows, columns.permute([1, 0]), s, use_acc=part % 2 == 1, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if is_last:
        mbarrier.arrive(tiles.empty.index(slot.index), count=1)
    return s


@gluon.jit
def _add_block(sums, tiles: WideTiles, n, is_dv, CONSUMER: gl.constexpr):
    # Adds the n-th block's part of a gradient: dQ += dS K, dK += dS Q or dV += P dO
    slot = _slot(n, SCORES + CONSUMER)
    dout = _slot(n, DP + CONSUMER)
    index = gl.where(is_dv, dout.index, slot.index)
    named_barrier_sync(DS_WRITTEN, BOTH)
    if is_dv | (CONSUMER == 1):  # warpgroup 0 has multiplied its part of q or k before
        mbarrier.wait(tiles.full.index(index), gl.where(is_dv, dout.phase, slot.phase))
    right = tiles.blocks.index(index).reshape([tiles.ds.shape[1], PART])
    sums = warpgroup_mma(tiles.ds, right, sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(tiles.empty.index(index), count=1)
    return sums


@gluon.jit
def _store(sums, args: WideBackwardArguments, block: backward_blocks.Block, is_dv, CONSUMER: gl.constexpr, META: gl.constexpr):
    start, length, h = _side(block, META.IS_DQ)
    if is_dv:
        sums = scaled(sums, dropout_state(args.dropout, block.first_head, META), META)
        store_gradient(args.second, sums, block.b, h, start, length, block.first_row, CONSUMER * PART)
    else:
        store_gradient(args.first, sums * args.scores.scale, block.b, h, start, length, block.first_row, CONSUMER * PART)


@gluon.jit
def _multiply(args: WideBackwardArguments, tiles: WideTiles, block: backward_blocks.Block, META: gl.constexpr):
    # Warpgroup 0. While warpgroup 1 computes ds, it multiplies the first part of the next block.
    zeros = zero_rows(tiles.s.shape[1])
    s = zeros
    sums = zero_rows(PART)
    num_blocks = _num_blocks(args, block, META)
    if META.IS_DQ:
        is_dv: gl.constexpr = False
    else:
        is_dv = _is_dv()
    mbarrier.wait(tiles.rows_full.index(0), 0)
    if num_blocks > 0:
        s = _add_part(zeros, tiles, 0, SCORES, is_dv)  # S = Q K^T, or K Q^T
    for n in range(num_blocks):
        s = _add_part(s, tiles, n, SCORES + 1, is_dv)
        tiles.s.store(s)
        named_barrier_sync(S_WRITTEN, BOTH)
        if n + 1 < num_blocks:
            s = _add_part(zeros, tiles, n + 1, SCORES, is_dv)
        sums = _add_block(sums, tiles, n, is_dv, 0)
    _store(sums, args, block, is_dv, 0, META)


@gluon.jit
def _differentiate(
    args: WideBackwardArguments, tiles: WideTiles, block: backward_blocks.Block, MODS: gl.constexpr, META: gl.constexpr
):
    # Warpgroup 1. The barriers of a block also order the reads of s and ds before the next block's writes.
    IS_DQ: gl.constexpr = META.IS_DQ
    BLOCK: gl.constexpr = tiles.s.shape[1]
    DTYPE: gl.constexpr = tiles.ds.dtype
    zeros = zero_rows(BLOCK)
    sums = zero_rows(PART)
    LAYOUT: gl.constexpr = zeros.type.layout
    first_row, len_q = block.first_row, block.sequence.len_q
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    block_columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    if META.IS_DQ:
        is_dv: gl.constexpr = False
    else:
        is_dv = _is_dv()
    draws = dropout_state(args.dropout, block.first_head, META)
    statistics_ptr = backward_blocks.statistics_of_block(args, block, META)
    last = backward_blocks.last_key_seen_by_all(first_row, block.band, META)
    position, values = backward_blocks.first_query_head(block, args.work, args.scores, MODS, META)
    mbarrier.wait(tiles.rows_full.index(0), 0)
    for n in range(_num_blocks(args, block, META)):
        start, is_full = _visited_block(n if IS_DQ else position.n, block, META)
        columns = start + block_columns
        if IS_DQ:
            i, j = rows[:, None], columns[None, :]
            statistics = backward_blocks.load_query_statistics(statistics_ptr, rows, len_q, META)
            minus_lse, minus_delta = statistics.minus_lse[:, None], statistics.minus_delta[:, None]
            drawn = drawn_weights(draws, block.h, first_row, start, BLOCK, False, META)
        else:
            i, j = columns[None, :], rows[:, None]
            tile = ((position.h - block.h) * args.tiles_of_statistics).to(gl.int64)
            statistics = backward_blocks.load_query_statistics(statistics_ptr + tile * (2 * META.STATISTICS), columns, len_q, META)
            minus_lse, minus_delta = statistics.minus_lse[None, :], statistics.minus_delta[None, :]
            drawn = drawn_weights(draws, position.h, start, first_row, BLOCK, True, META)
        dp = zeros
        if not is_dv:
            for part in gl.static_range(2):
                dp = _add_part(dp, tiles, n, DP + part, True)  # dP = dO V^T, or V dO^T
        named_barrier_sync(S_WRITTEN, BOTH)
        head = backward_blocks.head_at(position, values, block, args.scores, META)
        s, factor, cap_tanh, score = logits(tiles.s.load(LAYOUT), i, j, args.scores.scale, head, MODS, META)
        if IS_DQ:
            if backward_blocks.hides_some_key(start, last, first_row, block, META) | is_any_large(block.large, META):
                s = mask_keys(s, rows, columns, block.band, META)
                s = relative_to_lse(s, minus_lse, block.large, block.b, head.h, i, len_q, META)
        elif backward_blocks.hides_some_query(start, first_row, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse, block.large, block.b, head.h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        if not IS_DQ:
            s = hide_queries_past_the_end(s, start, columns, len_q, MODS, META)
        p = gl.exp2(s * factor + minus_lse)
        if is_dv:
            tiles.ds.store(kept(p, drawn, True, META).to(DTYPE))
        else:
            dlogit = p * (kept_gradient(dp, drawn, draws, not IS_DQ, META) + minus_delta)
            tiles.ds.store(through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META).to(DTYPE))
        fence_async_shared()
        sums = _add_block(sums, tiles, n, is_dv, 1)
        if not IS_DQ:
            position, values = backward_blocks.next_query_block(position, values, block, args.work, args.scores, MODS, META)
    _store(sums, args, block, is_dv, 1, META)


@hopper_kernel
def _attn_bwd_wide_hopper_kernel(args: WideBackwardArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.scores_rows.dtype
    BLOCK: gl.constexpr = META.BLOCK_N if META.IS_DQ else META.BLOCK_M
    SLOTS: gl.constexpr = 5
    tiles = WideTiles(
        rows=allocate_tiles(4, descriptors.scores_rows),
        rows_full=allocate_barriers(1, 1),
        blocks=allocate_tiles(SLOTS, descriptors.scores_blocks),
        full=allocate_barriers(SLOTS, 1),
        empty=allocate_barriers(SLOTS, 1),
        s=gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], gl.float32)),
        ds=gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], DTYPE)),
    )
    if META.IS_DQ:
        block = backward_blocks.query_block_of_program(args, META)
    else:
        programs = gl.num_programs(0) // 2
        block = block_of_keys(backward_blocks.find_key_block(gl.program_id(0) % programs, programs, args, META), args, META)
    gl.warp_specialize(
        [
            (_multiply, (args, tiles, block, META)),
            (_differentiate, (args, tiles, block, MODS, META)),
            (_load, (args, tiles, block, META)),
        ],
        [4, 1],
        [240, 40],  # 224 for warpgroup 0: the loading warp addresses four tiles
    )


def wide_backward(call: Backward, tile: HopperBackwardTile = HOPPER_BACKWARD_WIDE) -> None:
    """Launches the backward of a call that `conditions.wide_backward_unsupported` does not reject.

    `score_gradients.bias_and_capture_gradients` computes the gradients of a bias and of captures.
    """
    tiled = tiled_statistics(call, tile.block_m)
    for is_dq in (True, False):
        _launch(call, tiled, tile, is_dq=is_dq)
    zero_padding_of_gradients(call)


def _launch(call: Backward, tiled: Tiled, tile: HopperBackwardTile, *, is_dq: bool) -> None:
    x = call.problem
    queries, keys = (x.q, call.dout), (x.k, x.v)
    rows, blocks = (queries, keys) if is_dq else (keys, queries)
    gradients = (call.dq,) if is_dq else (call.dk, call.dv)
    block_m, block_n = (ROWS.value, tile.block_n) if is_dq else (tile.block_m, tile.keys)
    repeated = 2 * x.longest_kv if is_dq else 4 * x.longest_q  # as in the two-kernel backward up to 256
    work, programs = backward_work(x, ROWS.value, "q" if is_dq else "kv", repeated * (x.q.shape[-1] + x.v.shape[-1]))
    arguments = WideBackwardArguments(
        descriptors=Descriptors(
            *(ragged_descriptor(t, ROWS.value, PART.value) for t in rows),
            *(ragged_descriptor(t, block_n if is_dq else block_m, PART.value) for t in blocks),
        ),
        steps=Steps(*map(step_of, rows + blocks)),
        first=gradient_rows(gradients[0]),
        second=None if is_dq else gradient_rows(gradients[-1]),
        statistics_ptr=tiled.statistics,
        work=work,
        dropout=x.dropout,
        lists=x.lists("kv" if is_dq else "q"),
        **shared_arguments(x, tiled),
    )
    meta = WideBackwardMeta(**x.features._asdict(), IS_DQ=is_dq, BLOCK_M=block_m, BLOCK_N=block_n, STATISTICS=tile.block_m)
    launch(
        _attn_bwd_wide_hopper_kernel, programs * len(gradients), x.device, Tile(block_m, block_n, 4, 2), (arguments, x.mods, meta)
    )
