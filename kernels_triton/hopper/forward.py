"""Forward attention on Hopper (sm_90) in Gluon: a warp that loads by TMA, warpgroups that compute, work handed out as it is done.

Each consumer warpgroup has 64 queries. It issues the scores of one block of keys and, before it looks at them, the product of the
block before with v, so that the softmax of one runs under the matrix product of the other; two or three consumers also take turns
at the matrix unit (FlashAttention-3, arXiv 2407.08608, section 3). Results are those of `portable/forward.py`, which runs
the calls that `conditions.forward_unsupported` names.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Head, Lengths, Pages, Rows, Scores
from flexattn.kernels_triton.common.primitives import (
    LN2,
    LOG2E,
    exponent_factor,
    head_of,
    log_of_sum,
    logits,
    row_pointer,
    scaled_row_max,
)
from flexattn.kernels_triton.common.problem import Problem, with_features
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS, Parts, combine_splits, number_of_splits, part_row
from flexattn.kernels_triton.common.split_plan import (
    Plan,
    PlannedTile,
    combine_pieces,
    entry_at,
    first_row_of_part,
    make_plan,
    piece_at,
    share_of_program,
)
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import (
    HopperTile,
    slots_of_heads,
    split_head_dim,
)
from flexattn.kernels_triton.hopper.barriers import BOTH, PINGPONG, named_barrier_arrive, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import (
    ListCut,
    blocks_by_lists,
    blocks_of_consumer,
    blocks_of_keys,
    blocks_of_split,
    cut_key_lists,
    key_block,
)
from flexattn.kernels_triton.hopper.conditions import forward_tile, heads_of_a_tile
from flexattn.kernels_triton.hopper.descriptors import Step, load_rows, ragged_descriptor, step_of, store_rows
from flexattn.kernels_triton.hopper.dropout import DropoutState, drawn_weights, dropout_state, scaled
from flexattn.kernels_triton.hopper.forward_loader import LoadedRows, load_keys, load_queries
from flexattn.kernels_triton.hopper.masking import SequenceBand, apply_mask_mod, band_of_sequence, mask_keys
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_blocks, allocate_tiles, keep_pairs, unpack_pairs
from flexattn.kernels_triton.hopper.pages import KeyBlock, load_key_pages, load_value_pages, rows_of_a_copy
from flexattn.kernels_triton.hopper.pairs import (
    Pair,
    allocate_key_pair,
    allocate_pair,
    origin_of,
    pair_descriptor,
    score_product,
)
from flexattn.kernels_triton.hopper.pipeline import (
    ForwardBarriers,
    allocate_forward_barriers,
    release,
    skip_blocks,
    wait_empty,
    wait_full,
)
from flexattn.kernels_triton.hopper.softmax import for_threads, rescaled, softmax, sums_of_threads
from flexattn.kernels_triton.hopper.tile_scheduler import (
    Work,
    broadcast_end,
    broadcast_tile,
    forward_work,
    num_work_tiles,
    receive_tile,
    sequence_of,
    work_tile,
)
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch, num_processors

_FEWEST = gl.constexpr(4)  # blocks of keys that are worth a loop of their own: before it and after it a product runs alone


@with_features
class ForwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_MAX_LOGIT: bool
    HEADS: int  # query heads of a tile, whose rows are the first query of each, then the second, ..
    GROUP: int  # rows that a query's heads take: the power of two from HEADS on, so that the last may be rows of no head
    IS_SPLIT: bool  # the keys, between programs: each leaves a part, as `splits.Parts` has them, or with
    IS_PLANNED: bool  # as `split_plan` has them
    BLOCK_M: int
    BLOCK_N: int
    PAGE_ROWS: int  # keys that one copy brings of a page; 0: they lie in no pages
    QK0: int  # head dims as the tiles hold them, in one or two parts
    QK1: int
    V0: int
    STAGES: int
    CONSUMERS: int
    PINGPONG: bool  # between consumers, at the tensor cores
    LAZY: bool  # rows are rescaled when their maximum has risen by much
    OUT_PARTS: int
    REGISTERS: int
    HAS_IDLE: bool  # a tile may leave consumers without queries
    SKIPS: bool  # consumers skip the blocks of keys that none of their queries sees
    Q_STAGES: int
    UNMASKED_LOOP: bool  # a loop without masks, for blocks of keys that all queries see, among others that may be cut
    HAS_CUT_LOOP: bool  # a loop with masks, for blocks that may be cut, as are most in a narrow window
    # Numbers that make a tile: (first query, first head, batch, split), with lengths (first token, queries, keys) too, with a plan
    # (end of the split, part), and with a block mask what `cut_key_lists` and `_unmasked_blocks` find
    NUMBERS: int
    ALIGN: int  # strides of `Results.out` are multiples of it


class Descriptors(NamedTuple):
    q: Pair
    k: Pair
    v: Any
    out: Any


class Steps(NamedTuple):
    q: Step
    k: Step
    v: Step
    out: Step


class Results(NamedTuple):
    """Results that no descriptor stores."""

    lse_ptr: Any
    max_logit_ptr: Any  # or None; [h], -inf before
    parts_ptr: Any  # with IS_SPLIT, where out goes; lse is then of the parts too
    out: Rows | None  # where HEADS is no power of two, as a copy would write other heads too


class Arguments(NamedTuple):
    descriptors: Descriptors
    results: Results
    work: Work
    num_splits: int | None
    plan: Plan | None  # instead of `work` and `num_splits`
    lengths_q: Lengths
    lengths_kv: Lengths
    pages: Pages | None
    band: Band
    steps: Steps
    scores: Scores
    softmax_offset_ptr: Any
    dropout: Dropout
    lists: BlockMaskLists | None  # lists of key blocks


class Tiles(NamedTuple):
    """In shared memory: q by consumer and stage, k and v by stage, out by consumer."""

    q: Pair
    k: Pair
    v: Any
    out: Any


class Buffers(NamedTuple):
    tiles: Tiles
    barriers: ForwardBarriers


class WorkTile(NamedTuple):
    first_row: Any
    h: Any  # the first of HEADS heads
    b: Any
    split: Any  # its number; with a plan its first block of keys
    split_end: Any  # with a plan, the end of its blocks, and the number of its part
    part: Any


class Span(NamedTuple):
    """A consumer's iterations from `begin` up to `end`."""

    begin: Any
    end: Any


class Invariants(NamedTuple):
    """Values that are the same for all blocks of keys that a consumer's queries see."""

    num_blocks: Any
    block_range: Any  # what `key_block` finds them by
    m_start: Any  # the first of the consumer's queries
    rows: Any
    block_columns: Any
    band: SequenceBand
    scale: Any
    head: Head
    draws: DropoutState
    b_h: Any
    q_slot: Any
    zeros: Any


class Sums(NamedTuple):
    """Sums of a consumer over its first `iterations` blocks of keys."""

    iterations: Any
    row_max: Any
    row_sum: Any
    acc: Any
    n_block: Any  # counts the blocks that went through the rings of k and v


class Carry(NamedTuple):
    """The same between two products with v, of which the second's weights are there already."""

    weights: Any  # in pairs
    row_max: Any
    row_sum: Any
    acc: Any
    n_block: Any


@gluon.jit
def _num_work_tiles(args: Arguments, META: gl.constexpr):
    amount = num_work_tiles(args.work, args.work.num_heads // META.HEADS, args.lengths_q.batch, META)
    if META.IS_SPLIT:
        amount = amount * args.num_splits
    return amount


@gluon.jit
def _work_tile(t, amount, args: Arguments, META: gl.constexpr):
    split = 0
    if META.IS_SPLIT:
        split = t % args.num_splits
        t = t // args.num_splits
        amount = amount // args.num_splits
    first_row, h, b = work_tile(t, amount, args.work, args.work.num_heads // META.HEADS, args.lengths_q.batch, META)
    return WorkTile(first_row=first_row // META.GROUP, h=h * META.HEADS, b=b, split=split, split_end=0, part=0)


@gluon.jit
def _planned_tile(t, end, entry, args: Arguments, META: gl.constexpr):
    # (work tile at block t of all blocks of keys, its entry in the plan)
    plan = args.plan
    piece = piece_at(plan, gl.program_id(0), t, end, entry)
    tile = WorkTile(
        first_row=piece.entry % plan.blocks * (META.BLOCK_M // META.GROUP),
        h=piece.head * META.HEADS,
        b=piece.entry // plan.blocks,
        split=piece.first,
        split_end=piece.end,
        part=piece.entry * plan.groups + piece.head + piece.program,
    )
    return tile, piece.entry


@gluon.jit
def _blocks_of_tile(tile: WorkTile, cut, band: SequenceBand, args: Arguments, META: gl.constexpr):
    # (number of blocks, block range) of the keys of a tile, or of its split. cut: of a block mask, `cut_key_lists`
    if META.BLOCK_SIZE_Q > 0:
        num_blocks, block_range = blocks_by_lists(cut, tile.first_row, tile.b, tile.h, args.lists, META)
    else:
        QUERIES: gl.constexpr = META.BLOCK_M // META.GROUP
        num_blocks, block_range = blocks_of_keys(tile.first_row, tile.b, tile.h, band, args.lists, META, QUERIES)
    if META.IS_PLANNED:
        end = gl.minimum(tile.split_end, num_blocks)  # the plan has one where there is none
        first = gl.minimum(tile.split, end)
        num_blocks, block_range = end - first, block_range + first
    elif META.IS_SPLIT:
        num_blocks, block_range = blocks_of_split(tile.split, args.num_splits, num_blocks, block_range, META)
    return num_blocks, block_range


@gluon.jit
def _load_partition(args: Arguments, buffers: Buffers, META: gl.constexpr):
    of, steps = args.descriptors, args.steps
    tiles, barriers = buffers.tiles, buffers.barriers
    STAGES: gl.constexpr = META.STAGES
    if not META.IS_PLANNED:
        amount = _num_work_tiles(args, META)
    n_block = 0  # counts the blocks of all work tiles
    n_tile = 0
    t = gl.program_id(0)
    entry = 0
    if META.IS_PLANNED:  # t counts the blocks of keys of all work tiles
        share, total = share_of_program(args.plan)
        t = t * share
        amount = gl.minimum(t + share, total)
        entry = entry_at(args.plan, t)
    while t < amount:
        if META.IS_PLANNED:
            tile, entry = _planned_tile(t, amount, entry, args, META)
            following = t + tile.split_end - tile.split
        else:
            drawn = gl.atomic_add(args.work.table_ptr, 1, sem="relaxed")  # the next tile's number travels while this one loads
            tile = _work_tile(t, amount, args, META)
        sequence = sequence_of(args.lengths_q, args.lengths_kv, tile.b, META)
        len_q, len_kv = sequence.len_q, sequence.len_kv
        band = band_of_sequence(args.band, len_q, len_kv)
        numbers = (tile.first_row, tile.h, tile.b, tile.split)
        if META.HAS_LENGTHS:
            numbers = numbers + (sequence.start_q, len_q, len_kv)
        if META.IS_PLANNED:
            numbers = numbers + (tile.split_end, tile.part)
        cut = ()
        if META.BLOCK_SIZE_Q > 0:
            cut = cut_key_lists(tile.first_row, tile.b, tile.h, band, args.lists, META)
        num_blocks, block_range = _blocks_of_tile(tile, cut, band, args, META)
        if META.BLOCK_SIZE_Q > 0:
            unmasked = _unmasked_blocks(tile.first_row, META.BLOCK_M, num_blocks, block_range, band, META)
            numbers = numbers + (cut.num_masked, cut.num_full, cut.masked_before, cut.full_before)
            numbers = numbers + (unmasked.begin, unmasked.end)
        broadcast_tile(numbers, n_tile, barriers, META)
        h_kv = tile.h // args.work.group_size
        origin = origin_of(steps.q, sequence.start_q, tile.h, tile.b)
        queries = LoadedRows(origin=origin, first=tile.first_row, length=len_q)
        load_queries(of.q, tiles.q, queries, n_tile, barriers, META)
        for n in range(num_blocks):
            row = key_block(num_blocks - 1 - n, block_range, META)[0]
            if META.PAGE_ROWS > 0:
                block = KeyBlock(b=tile.b, h_kv=h_kv, first=row, length=len_kv)
                load_key_pages(of.k, tiles.k, steps.k, block, args.pages, n_block, barriers, META)
                load_value_pages(of.v, tiles.v, steps.v, block, args.pages, n_block, barriers, META)
            else:
                stage = n_block % STAGES
                origin = origin_of(steps.k, sequence.start_kv, h_kv, tile.b)
                load_keys(of.k, tiles.k, LoadedRows(origin=origin, first=row, length=len_kv), n_block, barriers, META)
                wait_empty(barriers.v_empty, n_block, STAGES)
                mbarrier.expect(barriers.v_full.index(stage), of.v.block_type.nbytes)
                origin = origin_of(steps.v, sequence.start_kv, h_kv, tile.b)
                load_rows(of.v, origin.token, len_kv, row, origin.head, 0, barriers.v_full.index(stage), tiles.v.index(stage))
            n_block += 1
        if META.IS_PLANNED:
            t = following
        else:
            t = drawn + gl.num_programs(0)
        n_tile += 1
    broadcast_end(n_tile, barriers, META)


@gluon.jit
def _unmasked_blocks(m_start, QUERIES: gl.constexpr, num_blocks, block_range, band: SequenceBand, META: gl.constexpr):
    # The blocks of keys, of those of QUERIES from m_start on, of which the last come first, from which no edge or block mask hides
    # anything, but the first of all; up to 0 if they are few, others follow, and there is a loop for these.
    begin = 1
    end = num_blocks
    right_end = band.len_kv  # what all queries see ends here, and begins at left_end
    left_end = 0
    if META.HAS_RIGHT:
        right_end = gl.minimum(band.len_kv, m_start + band.shift + 1 + band.right)
    if META.HAS_LEFT:
        left_end = gl.maximum(m_start + band.shift + QUERIES - 1 - band.left, 0)
    if META.BLOCK_SIZE_Q > 0:  # the full ones come first
        end = gl.maximum(num_blocks - gl.maximum(block_range.num_masked, 0) * (META.BLOCK_SIZE_KV // META.BLOCK_N), 1)
        while (begin < end) & (key_block(gl.maximum(num_blocks - 1 - begin, 0), block_range, META)[0] + META.BLOCK_N > right_end):
            begin += 1
        if META.HAS_LEFT:
            while (begin < end) & (key_block(gl.minimum(num_blocks - end, num_blocks - 1), block_range, META)[0] < left_end):
                end -= 1
    else:
        if META.HAS_RIGHT:
            begin = block_range + num_blocks - gl.maximum(right_end, 0) // META.BLOCK_N
            begin = gl.minimum(gl.maximum(begin, 1), num_blocks)
        if META.HAS_LEFT:
            end = gl.maximum(gl.minimum(block_range + num_blocks - gl.cdiv(left_end, META.BLOCK_N), num_blocks), begin)
    if META.HAS_CUT_LOOP:
        end = gl.where((end - begin >= _FEWEST) | (end == num_blocks), end, 0)
    return Span(begin=begin, end=end)


@gluon.jit
def _mask(s, rows, columns, column, m_start, band: SequenceBand, META: gl.constexpr):
    # Hides by the band and the sequence's end; a scalar branch, so that blocks which neither cuts do not pay for it.
    is_cut = column + META.BLOCK_N > band.len_kv
    if META.HAS_RIGHT:
        is_cut = is_cut | (column + META.BLOCK_N > m_start + band.shift + 1 + band.right)
    if META.HAS_LEFT:
        is_cut = is_cut | (column < m_start + band.shift + ROWS // META.GROUP - 1 - band.left)
    if is_cut:
        s = mask_keys(s, rows, columns, band, META)
    return s


@gluon.jit
def _visible_scores(qk, column, is_full, same: Invariants, IS_CUT: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    # (scores of the products with the block of keys at `column`, -inf where hidden; their factor in the exponent)
    columns = column + same.block_columns
    i, j = same.rows[:, None], columns[None, :]
    s, factor, _cap_tanh, _score = logits(qk, i, j, same.scale, same.head, MODS, META)
    if IS_CUT:
        s = _mask(s, same.rows, columns, column, same.m_start, same.band, META)
    if IS_CUT or META.BLOCK_SIZE_Q == 0:
        s = apply_mask_mod(s, i, j, is_full, same.head, MODS, META)
    return s, factor


@gluon.jit
def _iterate(
    iteration,
    carry: Carry,
    same: Invariants,
    buffers: Buffers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # The next block of keys: its scores, and under their softmax the product of the block before with v.
    tiles, barriers = buffers.tiles, buffers.barriers
    DTYPE: gl.constexpr = tiles.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    STAGES: gl.constexpr = META.STAGES
    V0: gl.constexpr = META.V0
    P: gl.constexpr = gl.DotOperandLayout(0, carry.acc.type.layout, 2)
    n_block = carry.n_block
    column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)  # from a list while the products run
    # Unpacked before the scores are issued: between the two products ptxas would serialise them (C7513).
    p = unpack_pairs(carry.weights, ROWS, BLOCK_N, P, DTYPE)
    wait_full(barriers.k_full, n_block, STAGES)
    if META.PINGPONG:
        named_barrier_sync(PINGPONG + CONSUMER, BOTH)
    product = score_product(tiles.q, same.q_slot, tiles.k, n_block % STAGES, same.zeros, BLOCK_N, META)
    wait_full(barriers.v_full, n_block - 1, STAGES)
    v = tiles.v.index((n_block - 1) % STAGES).reshape([BLOCK_N, V0])
    sum_of_v = warpgroup_mma(p, v, carry.acc, is_async=True)
    if META.PINGPONG:
        named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
    drawn = drawn_weights(same.draws, same.b_h, same.m_start, column, BLOCK_N, False, META, META.GROUP)
    qk = warpgroup_mma_wait(1, deps=[product])
    release(barriers.k_empty, n_block, STAGES)
    s, factor = _visible_scores(qk, column, is_full, same, IS_CUT, MODS, META)
    weights, row_max, row_sum, correction = softmax(s, carry.row_max, carry.row_sum, factor, drawn, DTYPE, META)
    acc = warpgroup_mma_wait(0, deps=[sum_of_v])
    keep_pairs(carry.weights)
    release(barriers.v_empty, n_block - 1, STAGES)
    acc = rescaled(acc, correction, META)
    return Carry(weights=weights, row_max=row_max, row_sum=row_sum, acc=acc, n_block=n_block + 1)


@gluon.jit
def _run(
    sums: Sums,
    span: Span,
    same: Invariants,
    buffers: Buffers,
    CONSUMER: gl.constexpr,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # A block of keys, with nothing under its softmax; if the next is the span's first, the span too, whose blocks are unmasked or,
    # with IS_CUT, may be cut. With a branch for that in every iteration ptxas would move the wait for the product with v up to it.
    tiles, barriers = buffers.tiles, buffers.barriers
    DTYPE: gl.constexpr = tiles.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    STAGES: gl.constexpr = META.STAGES
    P: gl.constexpr = gl.DotOperandLayout(0, sums.acc.type.layout, 2)
    iteration = sums.iterations
    n_block = sums.n_block
    wait_full(barriers.k_full, n_block, STAGES)
    if META.PINGPONG:
        named_barrier_sync(PINGPONG + CONSUMER, BOTH)
    product = score_product(tiles.q, same.q_slot, tiles.k, n_block % STAGES, same.zeros, BLOCK_N, META)
    if META.PINGPONG:
        named_barrier_arrive(PINGPONG + (CONSUMER + 1) % META.CONSUMERS, BOTH)
    column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
    drawn = drawn_weights(same.draws, same.b_h, same.m_start, column, BLOCK_N, False, META, META.GROUP)
    qk = warpgroup_mma_wait(0, deps=[product])
    release(barriers.k_empty, n_block, STAGES)
    s, factor = _visible_scores(qk, column, is_full, same, True, MODS, META)
    weights, row_max, row_sum, correction = softmax(s, sums.row_max, sums.row_sum, factor, drawn, DTYPE, META)
    acc = sums.acc
    if META.UNMASKED_LOOP:
        acc = rescaled(acc, correction, META)
    carry = Carry(weights=weights, row_max=row_max, row_sum=row_sum, acc=acc, n_block=n_block + 1)
    iteration += 1
    end = gl.where(iteration == span.begin, span.end, iteration)
    for following in range(iteration, end):
        carry = _iterate(following, carry, same, buffers, CONSUMER, IS_CUT, MODS, META)
    mbarrier.arrive(barriers.q_empty.index(same.q_slot), count=1, pred=end == same.num_blocks)
    n_block = carry.n_block
    wait_full(barriers.v_full, n_block - 1, STAGES)
    p = unpack_pairs(carry.weights, ROWS, BLOCK_N, P, DTYPE)
    v = tiles.v.index((n_block - 1) % STAGES).reshape([BLOCK_N, META.V0])
    sum_of_v = warpgroup_mma(p, v, carry.acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sum_of_v])
    keep_pairs(carry.weights)
    release(barriers.v_empty, n_block - 1, STAGES)
    return Sums(iterations=end, row_max=carry.row_max, row_sum=carry.row_sum, acc=acc, n_block=n_block)


@gluon.jit
def _store_out(part, COLUMN: gl.constexpr, token, length, row, head, descriptor, tile):
    # Asynchronous: the store may still be in flight on return.
    tma.store_wait(0)  # what was in the buffer has left it
    tile.reshape(part.shape).store(part.to(tile.dtype))
    fence_async_shared()
    store_rows(descriptor, token, length, row, head, COLUMN, tile)


@gluon.jit
def _store_rows_of_heads(acc, is_query, tokens, b, heads, out: Rows, META: gl.constexpr):
    # out from registers, each row with a token and a head of its own
    LAYOUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    pointers = row_pointer(out, b, heads, tokens, META)
    pointers = gl.convert_layout(pointers, ROW)[:, None] + gl.arange(0, META.V0, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(pointers, acc.to(out.ptr.dtype.element_ty), mask=gl.convert_layout(is_query, ROW)[:, None])


@gluon.jit
def _compute_partition(args: Arguments, buffers: Buffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    barriers = buffers.barriers
    batch = args.lengths_q.batch
    num_heads = args.work.num_heads
    num_tokens_q = args.lengths_q.num_tokens
    lse_ptr = args.results.lse_ptr
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    GROUP: gl.constexpr = META.GROUP
    draws = dropout_state(args.dropout, 0, META)
    if META.PINGPONG and CONSUMER == META.CONSUMERS - 1:
        named_barrier_arrive(PINGPONG, BOTH)  # consumer 0 begins
    n_block = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while numbers[0] >= 0:
        split_end, part = 0, 0
        if META.IS_PLANNED:
            split_end, part = numbers[7:9]
        tile = WorkTile(first_row=numbers[0], h=numbers[1], b=numbers[2], split=numbers[3], split_end=split_end, part=part)
        h, b = tile.h, tile.b
        if META.HAS_LENGTHS:
            start_q, len_q, len_kv = numbers[4:7]
        else:
            sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
            start_q, len_q, len_kv = sequence.start_q, sequence.len_q, sequence.len_kv
        band = band_of_sequence(args.band, len_q, len_kv)
        LISTED: gl.constexpr = META.NUMBERS - 6
        cut = ()
        if META.BLOCK_SIZE_Q > 0:
            cut = ListCut(
                num_masked=numbers[LISTED],
                num_full=numbers[LISTED + 1],
                masked_before=numbers[LISTED + 2],
                full_before=numbers[LISTED + 3],
            )
        num_blocks, block_range = _blocks_of_tile(tile, cut, band, args, META)
        m_start = tile.first_row + CONSUMER * (ROWS // GROUP)
        skipped, own_num_blocks, own_range = blocks_of_consumer(m_start, num_blocks, block_range, band, META)
        rows = m_start + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        h_of_rows, h_of_scores = h, h
        if GROUP > 1:
            in_tile = gl.arange(0, ROWS, layout=ROW_LAYOUT)
            rows = m_start + in_tile // GROUP
            own_head = in_tile % GROUP
            if META.HEADS < GROUP:  # rows of no head are as those past the sequence's end
                rows = gl.where(own_head < META.HEADS, rows, len_q)
                own_head = gl.minimum(own_head, META.HEADS - 1)
            h_of_rows = h + own_head
            h_of_scores = h_of_rows[:, None]
        head = head_of(args.scores, b, h_of_scores, len_q, len_kv, band.shift, MODS, META)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW_LAYOUT)  # in units of log2
        row_sum = sums_of_threads(zeros, BLOCK_N)
        if META.HAS_SINK:
            sink = 0.0
            if META.HAS_OFFSET:
                sink = gl.load(args.softmax_offset_ptr + h_of_rows).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
            if META.IS_SPLIT:
                sink = gl.where(tile.split == 0, sink, float("-inf"))
            if not META.HAS_MAX_LOGIT:  # the sink is none
                row_max = gl.maximum(row_max, sink)
                row_sum = row_sum + for_threads(gl.where(row_max == float("-inf"), 0.0, 0.25), row_sum)  # a quarter in each thread
        acc = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        q_slot = CONSUMER + n_tile % META.Q_STAGES * META.CONSUMERS
        mbarrier.wait(barriers.q_full.index(q_slot), (n_tile // META.Q_STAGES) & 1)
        if META.SKIPS:
            n_block = skip_blocks(skipped, n_block, barriers, CONSUMER, META)
        same = Invariants(
            num_blocks=own_num_blocks,
            block_range=own_range,
            m_start=m_start,
            rows=rows,
            block_columns=block_columns,
            band=band,
            scale=args.scores.scale,
            head=head,
            draws=draws,
            b_h=b * num_heads + h,
            q_slot=q_slot,
            zeros=zeros,
        )
        sums = Sums(iterations=0, row_max=row_max, row_sum=row_sum, acc=acc, n_block=n_block)
        if META.UNMASKED_LOOP:
            if META.BLOCK_SIZE_Q > 0:
                unmasked = Span(begin=numbers[META.NUMBERS - 2], end=numbers[META.NUMBERS - 1])
            else:
                unmasked = _unmasked_blocks(m_start, ROWS // GROUP, own_num_blocks, own_range, band, META)
            last = own_num_blocks  # few others follow, and through the same instructions
            if META.HAS_CUT_LOOP:
                last = unmasked.end
            while sums.iterations < last:
                sums = _run(sums, unmasked, same, buffers, CONSUMER, False, MODS, META)
        if META.HAS_CUT_LOOP or not META.UNMASKED_LOOP:
            following = sums.iterations + 1
            if following <= own_num_blocks:
                rest = Span(begin=following, end=own_num_blocks)
                sums = _run(sums, rest, same, buffers, CONSUMER, META.HAS_CUT_LOOP, MODS, META)
        row_max = sums.row_max
        row_sum = gl.convert_layout(gl.sum(sums.row_sum, 1), ROW_LAYOUT)
        acc = sums.acc
        n_block = sums.n_block
        if own_num_blocks == 0:
            mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)
        if META.SKIPS:
            n_block = skip_blocks(num_blocks - skipped - own_num_blocks, n_block, barriers, CONSUMER, META)
        if META.HAS_MAX_LOGIT:
            of_head = args.results.max_logit_ptr + (gl.zeros_like(rows) + h_of_rows)
            gl.atomic_max(of_head, row_max * (1.0 if META.IS_UNBOUNDED else LN2), mask=rows < len_q, sem="relaxed")
            if META.HAS_SINK:
                seen = row_max
                row_max = gl.maximum(row_max, sink)
                if META.IS_UNBOUNDED:
                    factor = exponent_factor(row_max)
                    scaled_max = scaled_row_max(row_max, factor, 0.0)
                    correction = gl.exp2(scaled_row_max(seen, factor, 0.0) - scaled_max)
                    row_sum = row_sum * correction + gl.exp2(gl.fma(sink + gl.zeros_like(factor), factor, -scaled_max))
                else:
                    scaled_max = gl.where(row_max == float("-inf"), 0.0, row_max)
                    correction = gl.exp2(seen - scaled_max)
                    row_sum = row_sum * correction + gl.exp2(sink - scaled_max)
                acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, OUT))[:, None]
        lse_row = (h_of_rows if META.IS_RAGGED_Q else b * num_heads + h_of_rows).to(gl.int64) * num_tokens_q + start_q
        if META.IS_PLANNED:  # to which `rows` are added
            own_row = CONSUMER * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            lse_row = first_row_of_part(args.plan, tile.part) + own_row - rows
        elif META.IS_SPLIT:
            lse_row = lse_row + part_row(tile.split, batch, num_heads, num_tokens_q, META)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # where a row sees nothing, out is 0 / 1 and lse -inf + 0
        if META.IS_UNBOUNDED:
            factor = exponent_factor(row_max)
            lse, lost = log_of_sum(row_max, factor, scaled_row_max(row_max, factor, 0.0), row_sum_or_1)
            if META.IS_PLANNED:
                lost_row = lse_row + first_row_of_part(args.plan, args.plan.num_parts)
                gl.store(lse_ptr + lost_row + rows, lost, mask=rows < len_q)
            elif META.IS_SPLIT:
                lost_row = lse_row + part_row(args.num_splits, batch, num_heads, num_tokens_q, META)
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
            gl.store(args.results.parts_ptr + part_rows + part_columns, acc, mask=is_query)
        elif META.HEADS < GROUP:
            _store_rows_of_heads(acc, rows < len_q, start_q + rows, b, h_of_rows, args.results.out, META)
        else:
            token, out_head = start_q + b * args.steps.out.tokens, h + b * args.steps.out.heads
            out_tile = buffers.tiles.out.index(CONSUMER)
            if META.OUT_PARTS == 1:
                _store_out(acc, 0, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
            else:
                low, high = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, V0 // 2]), [0, 2, 1]))
                _store_out(low, 0, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
                _store_out(high, V0 // 2, token, len_q, m_start, out_head, args.descriptors.out, out_tile)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)
    if META.PINGPONG and CONSUMER == 0:
        named_barrier_sync(PINGPONG, BOTH)


@hopper_kernel
def _attn_fwd_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    LOADER_REGISTERS: gl.constexpr = 32 if META.PAGE_ROWS > 0 else 24  # a page's place takes more than a row's
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    q_tiles = allocate_pair(Q_TILES, of.q, META)
    out_tiles = q_tiles.first  # never used
    if not META.IS_SPLIT:
        out_tiles = allocate_tiles(CONSUMERS, of.out)
    k_tiles = allocate_key_pair(of.k, META)
    v_tiles = allocate_blocks(META.STAGES, of.v, META.BLOCK_N)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    barriers = allocate_forward_barriers(META)
    buffers = Buffers(tiles=tiles, barriers=barriers)
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the registers that are left, 240
        gl.warp_specialize(
            [
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_load_partition, (args, buffers, META)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 4:
        gl.warp_specialize(
            [
                (_load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_compute_partition, (args, buffers, 2, MODS, META)),
                (_compute_partition, (args, buffers, 3, MODS, META)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_compute_partition, (args, buffers, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def _whole_blocks_of_window(problem: Problem, tile: HopperTile, slots: int) -> float:
    """Number of blocks of keys, at most, that all queries of a warpgroup see whole."""
    x = problem
    if x.window_left is None or x.window_right is None:
        return math.inf
    return (x.window_left + x.window_right + 2 - ROWS.value // slots) // tile.block_n


def tiles_and_room(problem: Problem, tile: HopperTile, group: int) -> tuple[int, int]:
    """(tiles of so many heads, programs that the device has room for), for `number_of_splits`."""
    queries = tile.block_m // slots_of_heads(group)
    tiles = -(-problem.longest_q // queries) * problem.batch * problem.num_heads // group
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
    """Launches the forward, of calls that `forward_unsupported` does not name.

    group: query heads of a tile, which divide those of a key head; None: `heads_of_a_tile`.
    splits: parts of the keys, or BY_LENGTHS; None: `number_of_splits`.
    """
    x = problem
    tile = tile or forward_tile(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    has_lengths = x.has_lengths
    is_banded = x.window_left is not None or x.window_right is not None
    group = heads_of_a_tile(x, tile) if group is None else group
    slots = slots_of_heads(group)
    is_narrow = x.block_mask is None and _whole_blocks_of_window(x, tile, slots) < 2
    has_idle = has_lengths or x.longest_q * slots <= tile.block_m - ROWS.value
    queries = tile.block_m // slots
    tiles, processors = tiles_and_room(x, tile, group)
    splits = number_of_splits(x, tiles, processors) if splits is None else splits
    planned = PlannedTile(heads=group, queries=queries, seen=queries, keys=tile.block_n)
    plan, parts = None, None
    if splits == BY_LENGTHS:
        plan = make_plan(x, planned, processors)
        parts = plan.empty_parts(lse, tile.head_dim_v, x.is_unbounded)
    elif splits > 1:
        parts = Parts.empty(splits, lse, tile.head_dim_v, x.is_unbounded)
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    out_meta = x.meta(launch_tile, (out,)) if group < slots and parts is None else None
    meta = ForwardMeta(
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_MAX_LOGIT=max_logit is not None,
        **x.features._asdict(),
        HEADS=group,
        GROUP=slots,
        IS_SPLIT=parts is not None,
        IS_PLANNED=plan is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE_ROWS=rows_of_a_copy(x, tile.block_n),
        QK0=qk0,
        QK1=qk1,
        V0=tile.head_dim_v,
        STAGES=tile.num_stages,
        CONSUMERS=tile.block_m // ROWS.value,
        PINGPONG=tile.pingpong,
        LAZY=tile.is_lazy and max_logit is None and not x.is_batch_invariant,  # one row decides for others of its warpgroup
        OUT_PARTS=tile.out_parts,
        REGISTERS=tile.registers,
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or is_banded),
        Q_STAGES=tile.q_stages,
        UNMASKED_LOOP=(is_banded and not is_narrow) or x.block_mask is not None,
        HAS_CUT_LOOP=is_narrow or x.block_mask is not None,
        NUMBERS=4 + 3 * has_lengths + 2 * (plan is not None) + 6 * (x.block_mask is not None),
        ALIGN=1 if out_meta is None else out_meta.ALIGN,
    )
    own_rows, keys = ROWS.value // slots, meta.PAGE_ROWS or tile.block_n
    work = forward_work(x, queries, group, is_planned=plan is not None)
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    arguments = Arguments(
        descriptors=Descriptors(
            q=pair_descriptor(x.q, own_rows, (qk0, qk1), slots),
            k=pair_descriptor(x.k, keys, (qk0, qk1)),
            v=ragged_descriptor(x.v, keys, tile.head_dim_v),
            out=ragged_descriptor(out, own_rows, tile.head_dim_v // tile.out_parts, slots),
        ),
        steps=Steps(q=step_of(x.q), k=step_of(x.k), v=step_of(x.v), out=step_of(out)),
        results=Results(
            lse_ptr=lse if parts is None else parts.lse,
            max_logit_ptr=max_logit,
            parts_ptr=None if parts is None else parts.out,
            out=None if out_meta is None else rows_of(out, out_meta),
        ),
        work=work,
        num_splits=splits if splits > 1 else None,
        plan=plan,
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        pages=x.pages,
        band=x.band,
        scores=x.scores,
        softmax_offset_ptr=x.softmax_offset,
        dropout=x.dropout,
        lists=x.lists("kv"),
    )
    launch(
        _attn_fwd_hopper_kernel,
        processors if plan is not None else min(processors, tiles * splits),
        out.device,
        launch_tile,
        (arguments, x.mods, meta),
    )
    if plan is not None and parts is not None:
        combine_pieces(x, plan, planned, parts, (out, lse))
    elif parts is not None:
        combine_splits(x, parts, out, lse)
    if has_lengths and plan is None:
        zero_padding(x, out, "q", lse)
