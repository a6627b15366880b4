"""FP8 forward attention on Hopper (sm_90) in Gluon: `forward` with fp8 operands, and all products by QGMMA.

q, k and v are FP8 with scales per tensor, head, batch or block of rows. v is transposed (`fp8`), and p is converted to fp8 in the
order of v's tokens, so nothing is transposed or shuffled here. The tensor cores accumulate fp8 products in about 14 bits. So the
product of each key block with v has its own accumulator, and the multiply-add that rescales the sums adds it in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Head, Lengths, Scores
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.exponents import (
    LN2,
    LOG2E,
    LOWEST,
    exponent_factor,
    log_of_sum,
    positive_factor,
    scaled_row_max,
)
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, blocks_of_keys, key_block
from flexattn.kernels_triton.gluon.conditions import unsupported_block_mask
from flexattn.kernels_triton.gluon.descriptors import FP8_DTYPES, Step, descriptor_error, ragged_descriptor, step_of, store_rows
from flexattn.kernels_triton.gluon.forward_loader import LoadedRows, load_keys, load_queries
from flexattn.kernels_triton.gluon.masking import SequenceBand, apply_mask_mod, band_of_sequence, mask_keys
from flexattn.kernels_triton.gluon.operands import ROWS, keep_pairs
from flexattn.kernels_triton.gluon.pairs import Pair, allocate_pair, allocate_tiles, origin_of, pair_descriptor
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, Stage, allocate_forward_barriers, skip_blocks
from flexattn.kernels_triton.gluon.tile_scheduler import (
    Work,
    broadcast_end,
    broadcast_tile,
    is_tile,
    num_work_tiles,
    receive_tile,
    sequence_of,
    take,
    work_tile,
)
from flexattn.kernels_triton.gluon.work_order import forward_work
from flexattn.kernels_triton.hopper.fp8 import (
    BLOCK,
    P_SCALE,
    P_SHIFT,
    Descales,
    Scale,
    compute_here,
    first_transposed_block,
    load_descale,
    pack_quads,
    scale_error,
    scales_of,
    transposed_descriptor,
    unpack_quads,
)
from flexattn.kernels_triton.hopper.products import score_product
from flexattn.kernels_triton.runtime.compiler import FROM_3_9
from flexattn.kernels_triton.runtime.device import Tile, capability_of, num_processors
from flexattn.kernels_triton.runtime.gluon_names import load_tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

_COLUMNS = gl.constexpr(8)  # columns of the product that sums p: wgmma's minimum N, all equal
_ONE = gl.constexpr(0x38)  # 1 in E4M3
_COPIES = gl.constexpr(FROM_3_9)  # whether each product gets a copy of its operand in registers (Triton pull request 9514)


@dataclass(frozen=True, kw_only=True)
class Fp8Tile:
    """A tile of the FP8 forward on sm_90, like `HopperTile`."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 64 for each consumer warpgroup
    block_n: int
    num_stages: int  # stages of k and of v in shared memory
    q_stages: int
    registers: int  # registers of a consumer's thread
    parts: int  # parts in which v is summed, because registers are scarce


FP8_FORWARD = (
    Fp8Tile(head_dim_qk=64, head_dim_v=64, block_m=192, block_n=128, num_stages=3, q_stages=2, registers=160, parts=1),
    Fp8Tile(head_dim_qk=128, head_dim_v=128, block_m=192, block_n=128, num_stages=3, q_stages=2, registers=160, parts=1),
    Fp8Tile(head_dim_qk=192, head_dim_v=128, block_m=192, block_n=128, num_stages=2, q_stages=2, registers=160, parts=2),
    Fp8Tile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=128, num_stages=2, q_stages=1, registers=240, parts=2),
)


def select_fp8_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> Fp8Tile:
    """Returns the narrowest row for the head dims, at most 256; modified scores need registers."""
    tile = next(tile for tile in FP8_FORWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return replace(tile, block_m=128, registers=240) if is_modified else tile


@with_features
class Fp8ForwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_IDLE: bool  # for this and the next three see the 16-bit kernel; shared functions read them
    SKIPS: bool
    GROUP: int
    PINGPONG: bool
    HAS_SINK: bool
    HAS_OFFSET: bool
    IS_MODIFIED: bool  # a logit is more than a scaled score
    Q_BLOCKWISE: bool  # the scales of q, of k, of v vary along the sequence
    K_BLOCKWISE: bool
    V_BLOCKWISE: bool
    BLOCK_M: int
    BLOCK_N: int
    QK0: int  # head dims of the tiles, in one or two parts
    QK1: int
    V0: int  # columns of a part of v
    PARTS: int
    STAGES: int
    Q_STAGES: int
    CONSUMERS: int
    REGISTERS: int
    # integers of a tile message: (first query, head, batch), with lengths (first token, queries, keys), then three scales
    NUMBERS: int


class Descriptors(NamedTuple):
    q: Pair
    k: Pair
    v: Any  # transposed
    out: Any


class Steps(NamedTuple):
    q: Step
    k: Step
    out: Step


class Arguments(NamedTuple):
    descriptors: Descriptors
    lse_ptr: Any
    descales: Descales
    softmax_offset_ptr: Any
    lengths_q: Lengths
    lengths_kv: Lengths
    work: Work
    v_blocks: int  # transposed tiles of a head of v
    band: Band
    steps: Steps
    scores: Scores
    lists: BlockMaskLists | None  # lists of key blocks


class Tiles(NamedTuple):
    """In shared memory: q by consumer and stage, k and v by stage, out by consumer."""

    q: Pair
    k: Pair
    v: Any
    out: Any
    ones: Any  # operand of the product that sums p


class Buffers(NamedTuple):
    tiles: Tiles
    barriers: ForwardBarriers


class QuerySequence(NamedTuple):
    start_q: Any
    len_q: Any
    len_kv: Any


class Invariants(NamedTuple):
    """Values that are constant for all key blocks that a consumer's queries see."""

    num_blocks: Any
    block_range: Any  # argument of `key_block`
    rows: Any
    band: SequenceBand
    head: Head
    scale: Any
    h_kv: Any
    descales: Descales
    descale_q: Any
    descale: Any  # descale of a score, if k has one scale
    q_slot: Any
    zeros: Any
    no_sum: Any  # zeros in the layout of a part of out
    no_row_sum: Any


class Carry(NamedTuple):
    """Sums that the loop over key blocks carries."""

    row_max: Any
    row_sum: Any
    acc: Any
    acc1: Any
    descale_v: Any
    n_block: Any  # counts the blocks that this consumer has processed


class TileMessage(NamedTuple):
    """A work tile as the loader broadcasts it."""

    first_row: Any
    h: Any
    b: Any
    sequence: Any  # a `QuerySequence`, sent if there are lengths
    descale_q: Any  # this and the next two: factors of the tensor's first block
    descale_k: Any
    descale_v: Any


@gluon.jit
def _pack_tile(message: TileMessage, META: gl.constexpr):
    # Returns the META.NUMBERS integers that `_unpack_tile` reads
    numbers = (message.first_row, message.h, message.b)
    if META.HAS_LENGTHS:
        numbers = numbers + (message.sequence.start_q, message.sequence.len_q, message.sequence.len_kv)
    return numbers + (message.descale_q, message.descale_k, message.descale_v)


@gluon.jit
def _unpack_tile(numbers, args: Arguments, META: gl.constexpr):
    place, rest = take(numbers, 3)
    if META.HAS_LENGTHS:
        fields, rest = take(rest, 3)
        sequence = QuerySequence(*fields)
    else:
        _, _, b = place
        both = sequence_of(args.lengths_q, args.lengths_kv, b, META)
        sequence = QuerySequence(start_q=both.start_q, len_q=both.len_q, len_kv=both.len_kv)
    return TileMessage(*place, sequence, *rest)


@gluon.jit
def _load_partition(buffers: Buffers, args: Arguments, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    descriptors, steps, work = args.descriptors, args.steps, args.work
    STAGES: gl.constexpr = META.STAGES
    batch = args.lengths_q.batch
    num_tokens_kv = args.lengths_kv.num_tokens
    amount = num_work_tiles(work, work.num_heads, batch, META)
    n_block = 0  # counts the blocks of all work tiles
    n_tile = 0
    t = gl.program_id(0)
    while t < amount:
        first_row, h, b = work_tile(t, amount, work, work.num_heads, batch, META)
        sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
        h_kv = h // work.group_size
        descale_q = load_descale(args.descales.q, b, h, 0).to(gl.int32, bitcast=True)
        descale_k = load_descale(args.descales.k, b, h_kv, 0).to(gl.int32, bitcast=True)
        descale_v = load_descale(args.descales.v, b, h_kv, 0).to(gl.int32, bitcast=True)
        message = TileMessage(
            first_row=first_row, h=h, b=b, sequence=sequence, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v
        )
        broadcast_tile(_pack_tile(message, META), n_tile, barriers, META)
        len_kv = sequence.len_kv
        band = band_of_sequence(args.band, sequence.len_q, len_kv)
        num_blocks, block_range = blocks_of_keys(first_row, b, h, band, args.lists, META)
        place_kv = packed_start(args.lengths_kv, b, sequence.start_kv)
        v_block = h_kv * args.v_blocks + first_transposed_block(b, place_kv, num_tokens_kv, META.IS_RAGGED_KV)
        origin = origin_of(steps.q, sequence.start_q, h, b)
        queries = LoadedRows(origin=origin, first=first_row, length=sequence.len_q)
        load_queries(descriptors.q, tiles.q, queries, n_tile, barriers, META)
        for n in range(num_blocks):
            row = key_block(num_blocks - 1 - n, block_range, META)[0]
            stage = Stage(n_block, STAGES)
            index = pipeline.index(stage)
            origin = origin_of(steps.k, sequence.start_kv, h_kv, b)
            load_keys(descriptors.k, tiles.k, LoadedRows(origin=origin, first=row, length=len_kv), n_block, barriers, META)
            pipeline.wait_empty(barriers.v_empty, stage)
            mbarrier.expect(barriers.v_full.index(index), descriptors.v.block_type.nbytes)
            place = [v_block + row // BLOCK, 0, row % BLOCK]
            load_tile(descriptors.v, place, barriers.v_full.index(index), tiles.v.index(index))
            n_block += 1
        # After the loads of this tile: no other program takes a tile that a program has drawn, however long that is busy.
        t = gl.atomic_add(work.table_ptr, 1, sem="relaxed") + gl.num_programs(0)
        n_tile += 1
    broadcast_end(n_tile, barriers, META)


class Logits(NamedTuple):
    s: Any  # s * factor[:, None] is the logit in units of log2, before the mask
    factor: Any


@gluon.jit
def _logits(qk, columns, descale, same: Invariants, MODS: gl.constexpr, META: gl.constexpr):
    if META.IS_MODIFIED:
        s, factor, _slope, _score = logits(
            qk * descale[:, None], same.rows[:, None], columns[None, :], same.scale, same.head, MODS, META
        )
        return Logits(s=s, factor=gl.zeros_like(descale) + factor)
    else:
        return Logits(s=qk, factor=positive_factor(descale * (same.scale * LOG2E)))


class Unmasked(NamedTuple):
    """KV blocks that need no mask, counted from the last one: from `begin` up to `end`."""

    begin: Any
    end: Any


@gluon.jit
def _unmasked_blocks(m_start, num_blocks, first_block, band: SequenceBand, META: gl.constexpr):
    # For the queries of one warpgroup. Empty for a block mask, because a list skips blocks.
    if META.BLOCK_SIZE_Q > 0:
        return Unmasked(begin=num_blocks, end=num_blocks)
    else:
        right_end = band.len_kv  # keys from left_end to right_end are visible to all queries
        if META.HAS_RIGHT:
            right_end = gl.maximum(gl.minimum(band.len_kv, m_start + band.shift + 1 + band.right), 0)
        begin = gl.minimum(gl.maximum(first_block + num_blocks - right_end // META.BLOCK_N, 0), num_blocks)
        end = num_blocks
        if META.HAS_LEFT:
            left_end = gl.maximum(m_start + ROWS - 1 + band.shift - band.left, 0)
            end = gl.maximum(gl.minimum(first_block + num_blocks - gl.cdiv(left_end, META.BLOCK_N), num_blocks), begin)
        return Unmasked(begin=begin, end=end)


class Weights(NamedTuple):
    """The weights of a key block, and their effect on the rows."""

    quads: Any
    row_max: Any  # in units of log2, or exact in natural units for unbounded logits
    correction: Any  # factor of the earlier sums


@gluon.jit
def _softmax(s, row_max, factor, DTYPE: gl.constexpr, META: gl.constexpr):
    if META.IS_UNBOUNDED:
        new_max = gl.maximum(row_max, gl.max(s, 1))
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, P_SHIFT)
        p = gl.exp2(gl.fma(s, factor[:, None], -scaled_max[:, None]))
        before = scaled_row_max(row_max, factor, P_SHIFT)
        quads = pack_quads(p, ROWS, META.BLOCK_N, DTYPE)
        return Weights(quads=quads, row_max=new_max, correction=gl.exp2(before - scaled_max))
    else:
        new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        scaled_max = gl.maximum(new_max, LOWEST)  # for -inf too, exp2(-inf - scaled_max) is 0
        p = gl.exp2(s * factor[:, None] - (scaled_max - P_SHIFT)[:, None])
        quads = pack_quads(p, ROWS, META.BLOCK_N, DTYPE)
        return Weights(quads=quads, row_max=new_max, correction=gl.exp2(row_max - scaled_max))


@gluon.jit
def _once(sums):
    # Returns one column in each thread, of `_COLUMNS` equal ones
    one, _ = gl.split(gl.reshape(sums, [ROWS, _COLUMNS // 2, 2]))
    return one


@gluon.jit
def _multiply_ones(p, tiles: Tiles, same: Invariants):
    # The tensor cores also sum p, by a product with ones, which saves 64 additions a thread. It sums the same rounded p as the
    # product with v.
    p_again = gl.convert_layout(p, gl.DotOperandLayout(0, same.no_row_sum.type.layout, 4))
    return warpgroup_mma(p_again, tiles.ones.permute([1, 0]), same.no_row_sum, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    begin,
    end,
    carry: Carry,
    same: Invariants,
    buffers: Buffers,
    IS_CUT: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    # Processes the key blocks from `begin` up to `end`; IS_CUT: an edge or a block mask may hide some of the keys.
    tiles, barriers = buffers.tiles, buffers.barriers
    descale = same.descale
    row_max, row_sum, acc, acc1 = carry.row_max, carry.row_sum, carry.acc, carry.acc1
    descale_v, n_block = carry.descale_v, carry.n_block
    DTYPE: gl.constexpr = gl.float8e4nv  # dtype of p
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    OUT: gl.constexpr = same.no_sum.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    # Whether the products with p run one after the other: with all sums of v, there are no registers for two copies of p.
    ONE_BY_ONE: gl.constexpr = _COPIES and META.PARTS == 1 and V0 > 64
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, same.zeros.type.layout))
    for iteration in range(begin, end):
        stage = Stage(n_block, META.STAGES)
        index = pipeline.index(stage)
        column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
        ratio = 1.0
        if META.K_BLOCKWISE:
            descale = same.descale_q * load_descale(same.descales.k, same.head.b, same.h_kv, column)
        if META.V_BLOCKWISE:  # acc is in units of the scale of the block that was added last
            next_descale_v = load_descale(same.descales.v, same.head.b, same.h_kv, column)
            ratio = descale_v / next_descale_v
            descale_v = next_descale_v
        pipeline.wait_full(barriers.k_full, stage)
        s = score_product(tiles.q, same.q_slot, tiles.k, index, same.zeros, BLOCK_N, META)  # S = Q K^T
        s = warpgroup_mma_wait(0, deps=[s])
        pipeline.release(barriers.k_empty, stage)
        columns = column + block_columns
        scored = _logits(s, columns, descale, same, MODS, META)
        s = scored.s
        if IS_CUT:
            s = mask_keys(s, same.rows, columns, same.band, META)
        s = apply_mask_mod(s, same.rows[:, None], columns[None, :], is_full, same.head, MODS, META)
        weights = _softmax(s, row_max, scored.factor, DTYPE, META)
        row_max = weights.row_max
        correction_of_sums = gl.convert_layout(weights.correction, gl.SliceLayout(1, row_sum.type.layout))
        correction = gl.convert_layout(weights.correction * ratio, gl.SliceLayout(1, OUT))
        p = unpack_quads(weights.quads, ROWS, BLOCK_N, P, DTYPE)
        pipeline.wait_full(barriers.v_full, stage)
        v = tiles.v.index(index).reshape([META.PARTS * V0, BLOCK_N])
        if ONE_BY_ONE:
            p_sums = warpgroup_mma_wait(0, deps=[_multiply_ones(p, tiles, same)])
        pv = warpgroup_mma(p, v.slice(0, V0, 0).permute([1, 0]), same.no_sum, use_acc=False, is_async=True)  # P V of this block
        if ONE_BY_ONE:
            pv = warpgroup_mma_wait(0, deps=[pv])
        else:
            p_sums = _multiply_ones(p, tiles, same)
            pv, p_sums = warpgroup_mma_wait(0, deps=[pv, p_sums])
        row_sum = row_sum * correction_of_sums[:, None] + _once(p_sums)
        if META.PARTS == 2:
            acc = acc * correction[:, None] + pv
            compute_here(acc)
            # Uses the same registers: with others there are not enough.
            pv = warpgroup_mma(p, v.slice(V0, V0, 0).permute([1, 0]), pv, use_acc=False, is_async=True)  # P V of this block
            pv = warpgroup_mma_wait(0, deps=[pv])
        keep_pairs(weights.quads)
        pipeline.release(barriers.v_empty, stage)
        if META.PARTS == 2:
            acc1 = acc1 * correction[:, None] + pv
            compute_here(acc1)
        else:
            acc = acc * correction[:, None] + pv
            compute_here(acc)
        n_block += 1
    return Carry(row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, descale_v=descale_v, n_block=n_block)


@gluon.jit
def _store_lse(lse_ptr, rows, len_q, row_max, row_sum_or_1, META: gl.constexpr):
    # row_sum_or_1: 1 for a row that sees nothing
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        lse, _lost = log_of_sum(row_max, factor, scaled_row_max(row_max, factor, P_SHIFT), row_sum_or_1)
        gl.store(lse_ptr + rows, lse, mask=rows < len_q)
    else:
        gl.store(lse_ptr + rows, (row_max + gl.log2(row_sum_or_1) - P_SHIFT) * LN2, mask=rows < len_q)


@gluon.jit
def _compute_partition(buffers: Buffers, args: Arguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    scores = args.scores
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 32])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    no_sum = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
    no_row_sum = gl.zeros([ROWS, _COLUMNS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32]))
    n_block = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        message = _unpack_tile(numbers, args, META)
        first_row, h, b = message.first_row, message.h, message.b
        sequence = message.sequence
        start_q, len_q, len_kv = sequence.start_q, sequence.len_q, sequence.len_kv
        band = band_of_sequence(args.band, len_q, len_kv)
        num_blocks, block_range = blocks_of_keys(first_row, b, h, band, args.lists, META)
        h_kv = h // args.work.group_size
        head = head_of(scores, b, h, len_q, len_kv, band.shift, MODS, META)
        m_start = first_row + CONSUMER * ROWS
        skipped, num_consumer_blocks, consumer_range = blocks_of_consumer(m_start, num_blocks, block_range, band, META)
        rows = m_start + gl.arange(0, ROWS, layout=BY_ROW)
        # in units of log2, or exact in natural units for unbounded logits
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=BY_ROW)
        row_sum = _once(no_row_sum)
        if META.Q_BLOCKWISE:
            descale_q = load_descale(args.descales.q, b, h, gl.maximum(gl.minimum(rows, len_q - 1), 0))
        else:
            descale_q = gl.zeros([ROWS], gl.float32, layout=BY_ROW) + message.descale_q.to(gl.float32, bitcast=True)
        descale_v = message.descale_v.to(gl.float32, bitcast=True)
        descale = descale_q * message.descale_k.to(gl.float32, bitcast=True)
        if META.HAS_SINK:
            sink = 0.0
            if META.HAS_OFFSET:
                sink = gl.load(args.softmax_offset_ptr + h).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
            row_max = gl.maximum(row_max, sink)
            sink_weight = gl.where(row_max == float("-inf"), 0.0, P_SCALE)
            if META.IS_UNBOUNDED:
                factor = exponent_factor(row_max)
                sink_weight = gl.exp2(gl.fma(row_max, factor, -scaled_row_max(row_max, factor, P_SHIFT)))
            row_sum = row_sum + gl.convert_layout(sink_weight, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        q_stage = Stage(n_tile, META.Q_STAGES)
        q_slot = CONSUMER + pipeline.index(q_stage) * META.CONSUMERS
        mbarrier.wait(barriers.q_full.index(q_slot), pipeline.phase(q_stage))
        acc = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        acc1 = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        if META.SKIPS:
            n_block = skip_blocks(skipped, n_block, barriers, CONSUMER, META)
        unmasked = _unmasked_blocks(m_start, num_consumer_blocks, consumer_range, band, META)
        unmasked_from, unmasked_to = unmasked.begin, unmasked.end
        same = Invariants(
            num_blocks=num_consumer_blocks,
            block_range=consumer_range,
            rows=rows,
            band=band,
            head=head,
            scale=scores.scale,
            h_kv=h_kv,
            descales=args.descales,
            descale_q=descale_q,
            descale=descale,
            q_slot=q_slot,
            zeros=zeros,
            no_sum=no_sum,
            no_row_sum=no_row_sum,
        )
        carry = Carry(row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, descale_v=descale_v, n_block=n_block)
        if META.HAS_LEFT:
            done = 0
            while (
                done < num_consumer_blocks
            ):  # at most twice: blocks after the unmasked ones use the loop of the blocks before them
                carry = _attend(done, unmasked_from, carry, same, buffers, True, MODS, META)
                carry = _attend(unmasked_from, unmasked_to, carry, same, buffers, False, MODS, META)
                done = unmasked_to
                unmasked_from = num_consumer_blocks
                unmasked_to = num_consumer_blocks
        else:
            carry = _attend(0, unmasked_from, carry, same, buffers, True, MODS, META)
            carry = _attend(unmasked_from, num_consumer_blocks, carry, same, buffers, False, MODS, META)
        n_block = carry.n_block
        if META.SKIPS:
            n_block = skip_blocks(num_blocks - skipped - num_consumer_blocks, n_block, barriers, CONSUMER, META)
        mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)
        lse_row = (h if META.IS_RAGGED_Q else b * args.work.num_heads + h).to(gl.int64) * args.lengths_q.num_tokens + start_q
        row_sum = gl.convert_layout(gl.max(carry.row_sum, 1), BY_ROW)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
        _store_lse(args.lse_ptr + lse_row, rows, len_q, carry.row_max, row_sum_or_1, META)
        normaliser = gl.convert_layout(carry.descale_v / row_sum_or_1, gl.SliceLayout(1, OUT))[:, None]
        out_tile = tiles.out.index(CONSUMER)
        tma.store_wait(0)
        DTYPE: gl.constexpr = args.descriptors.out.dtype
        if META.PARTS == 2:
            out_tile.reshape([ROWS, 2 * V0]).slice(0, V0, 1).store((carry.acc * normaliser).to(DTYPE))
            out_tile.reshape([ROWS, 2 * V0]).slice(V0, V0, 1).store((carry.acc1 * normaliser).to(DTYPE))
        else:
            out_tile.reshape([ROWS, V0]).store((carry.acc * normaliser).to(DTYPE))
        fence_async_shared()
        store_rows(
            args.descriptors.out, start_q + b * args.steps.out.tokens, len_q, m_start, h + b * args.steps.out.heads, 0, out_tile
        )
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_fwd_fp8_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    descriptors = args.descriptors
    q_tiles = allocate_pair(CONSUMERS * META.Q_STAGES, descriptors.q, META)
    out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    k_tiles = allocate_pair(META.STAGES, descriptors.k, META)
    v_tiles = allocate_tiles(META.STAGES, descriptors.v)
    # As bits: if fp32 ones are cast, ptxas (CUDA 12.8) leaves two of four bytes undefined.
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_COLUMNS, META.BLOCK_N], gl.float8e4nv)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    bits = gl.full([_COLUMNS, META.BLOCK_N], _ONE, gl.int8, layout=LINES)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [_COLUMNS, META.BLOCK_N], ONES)
    ones.store(bits.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    barriers = allocate_forward_barriers(CONSUMERS, CONSUMERS, META)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles, ones=ones)
    buffers = Buffers(tiles=tiles, barriers=barriers)
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the remaining registers, 240
        gl.warp_specialize(
            [
                (_compute_partition, (buffers, args, 0, MODS, META)),
                (_compute_partition, (buffers, args, 1, MODS, META)),
                (_load_partition, (buffers, args, META)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_load_partition, (buffers, args, META)),
                (_compute_partition, (buffers, args, 0, MODS, META)),
                (_compute_partition, (buffers, args, 1, MODS, META)),
                (_compute_partition, (buffers, args, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def unsupported(problem: Problem, out: Tensor, return_max_logit: bool = False) -> str | None:
    """Returns the reason if the kernel cannot run this problem, with q, k and v in FP8; None: it can."""
    x = problem
    if capability_of(x.device) != 90:
        return "it is written for Hopper, sm_90"
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(tensor.dtype).removeprefix('torch.')}"
    for has, feature in (
        (x.dropout_p > 0, "dropout"),
        (return_max_logit, "max_logit"),
        (x.softmax_scale == 0, "a softmax_scale of 0"),
    ):
        if has:
            return f"it does not support {feature}"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    tile = tile_of(x)
    errors: list[str | None] = [descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("out", out))]
    heads = (x.num_heads, x.num_heads_kv, x.num_heads_kv)
    errors += [
        scale_error(name, scale, x, h, 1 if name == "q" else tile.block_n)
        for name, scale, h in zip("qkv", scales_of(x)[:3], heads, strict=True)
    ]
    return next((error for error in errors if error), None) or unsupported_block_mask(x, (tile.block_m, tile.block_n))


def tile_of(problem: Problem) -> Fp8Tile:
    """Returns the committed tile."""
    x = problem
    return select_fp8_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def hopper_fp8_forward(
    problem: Problem,
    v_transposed: Tensor,
    scales: tuple[Scale, Scale, Scale],
    out: Tensor,
    lse: Tensor,
    tile: Fp8Tile | None = None,
) -> None:
    """Launches the FP8 forward of a call that is not `unsupported`.

    problem: q and k in FP8; only the shape of its v is read.
    v_transposed: [h_kv, blocks, d_v, BLOCK], from `quantize`.
    scales: of q, k and v.
    out: bf16 or fp16, [.., h, d_v], any layout.
    """
    x = problem
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v // tile.parts
    has_lengths = x.has_lengths
    has_idle = has_lengths or x.longest_q <= tile.block_m - ROWS.value
    meta = Fp8ForwardMeta(
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or x.window_left is not None or x.window_right is not None),
        GROUP=1,
        PINGPONG=False,
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        **x.features._asdict(),
        IS_MODIFIED=x.is_modified,
        Q_BLOCKWISE=scales[0].is_blockwise,
        K_BLOCKWISE=scales[1].is_blockwise,
        V_BLOCKWISE=scales[2].is_blockwise,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        QK0=qk0,
        QK1=qk1,
        V0=v0,
        PARTS=tile.parts,
        STAGES=tile.num_stages,
        Q_STAGES=tile.q_stages,
        CONSUMERS=tile.block_m // ROWS.value,
        REGISTERS=tile.registers,
        NUMBERS=9 if has_lengths else 6,
    )
    descriptors = Descriptors(
        q=pair_descriptor(x.q, ROWS.value, (qk0, qk1)),
        k=pair_descriptor(x.k, tile.block_n, (qk0, qk1)),
        v=transposed_descriptor(v_transposed, tile.head_dim_v, tile.block_n),
        out=ragged_descriptor(out, ROWS.value, tile.head_dim_v),
    )
    work = forward_work(x, tile.block_m)
    if has_lengths:
        zero_padding(x, out, "q", lse)
    arguments = Arguments(
        descriptors=descriptors,
        lse_ptr=lse,
        descales=Descales(q=scales[0].argument, k=scales[1].argument, v=scales[2].argument),
        softmax_offset_ptr=x.softmax_offset,
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        work=work,
        v_blocks=v_transposed.shape[1],
        band=x.band,
        steps=Steps(q=step_of(x.q), k=step_of(x.k), out=step_of(out)),
        scores=x.scores,
        lists=x.lists("kv"),
    )
    programs = min(num_processors(out.device), work.blocks * x.batch * x.num_heads)
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    launch(_attn_fwd_fp8_hopper_kernel, programs, out.device, launch_tile, (arguments, x.mods, meta))
