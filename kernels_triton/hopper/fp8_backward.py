"""Backward attention in FP8 on Hopper (sm_90) in Gluon: `hopper_backward` with scores and dp from FP8 operands.

As in `hopper_fp8_one_pass` the products with p and ds are 16-bit, for the reasons that are given there, and q, k and dout are read
in both forms. One kernel for dq, one for dk and dv, each bitwise repeatable, for head dims up to 256. What is read in FP8 is
released once dp is there, what is read in a half type at the end of a turn, so that each has slots of its own.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.preprocess import statistics_tile, tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    LOG2E,
    head_of,
    head_values,
    is_any_large,
    load_large,
    logits,
    packed_start,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.common.work_table import work_table, zero_padding
from flexattn.kernels_triton.hopper.barriers import BOTH, DS_WRITTEN, LAST, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_keys, blocks_of_queries, key_block, query_block
from flexattn.kernels_triton.hopper.conditions import backward_slower, backward_unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import load_rows, load_statistics, ragged_descriptor, store_rows
from flexattn.kernels_triton.hopper.fp8 import (
    BackwardWork,
    Descale,
    KeyTile,
    LargeLse,
    Place,
    allocate_factors,
    head_at,
    load_descale,
    load_head_scores,
    origin_of,
    read_factor,
    sequence_of,
    step_of,
    write_factors,
)
from flexattn.kernels_triton.hopper.fp8_backward_arguments import (
    DkdvArguments,
    DkdvBarriers,
    DkdvBuffers,
    DkdvDescriptors,
    DkdvOrigins,
    DkdvSteps,
    DkdvTiles,
    DqArguments,
    DqBarriers,
    DqBuffers,
    DqDescriptors,
    DqOrigins,
    DqSteps,
    DqTiles,
    QueryTile,
)
from flexattn.kernels_triton.hopper.fp8_backward_operands import (
    backward_descales,
    copies_in_16_bits,
    is_plain,
    unsupported_operands,
)
from flexattn.kernels_triton.hopper.masking import hide_queries_past_the_end, mask_by_mod, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pairs import (
    Pair,
    allocate_pair,
    allocate_tiles,
    load_pair,
    next_head,
    pair_bytes,
    score_product,
    store_pair,
)
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers
from flexattn.kernels_triton.hopper.tile_scheduler import block_of, section_of
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch

_QUERIES = 128  # of a dq program: two warpgroups'


class Fp8BackwardTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in two kernels, as `configs.HopperBackwardTile`; no other was timed."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys that dq takes at a time
    dq_stages: tuple[int, int]  # in shared memory: of k and v in FP8, and of k in a half type
    block_m: int  # queries that dk and dv take at a time
    # Of q and dout in FP8, and in a half type of dout and of q, which are as many unless columns are split.
    dkdv_stages: tuple[int, int, int]
    splits_columns: bool  # of dk and dv between the warpgroups: 64 keys a program instead of 128

    @property
    def keys(self) -> int:
        """Of a program of dk and dv."""
        return 64 if self.splits_columns else 128


# With 128 keys, or at head dim 128 with 64 queries, modified scores would lack registers, and a block mask may have fewer.
FP8_BACKWARD = (
    Fp8BackwardTile(64, 64, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(64, 64, 64, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 64, (2, 2), 32, (2, 2, 2), False),
    Fp8BackwardTile(192, 128, 64, (2, 2), 32, (2, 2, 2), False),
    # q, in a half type, has most of a turn to come in: of all four its one slot is missed least.
    Fp8BackwardTile(256, 256, 64, (2, 2), 64, (2, 2, 1), True),
)


class Fp8BackwardMeta(NamedTuple):
    """What the kernels are compiled for."""

    IS_RAGGED_Q: bool
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_GAPS_Q: bool
    HAS_GAPS_KV: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
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
    LISTS_ARE_CUT: bool
    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES: int  # in shared memory, of what is in FP8
    STAGES16: int  # in a half type, of k or of dout
    STAGES_Q16: int
    OWN_TILES: bool  # for the gradients, which else leave through tiles of a half type
    SPLITS_COLUMNS: bool  # of dk and dv between the warpgroups, rather than rows


class Logits(NamedTuple):
    s: Any  # s * factor is the logit in units of log2, before the mask
    factor: Any
    cap_tanh: Any
    score: Any


@gluon.jit
def _clipped_descale(scale: Descale, b, h, row, length):
    # A listed block, and a program's own rows, may lie past the end.
    return load_descale(scale, b, h, gl.maximum(gl.minimum(row, length - 1), 0))


@gluon.jit
def _logits(product, i, j, head: Head, scale, s_factor, MODS: gl.constexpr, META: gl.constexpr):
    # `logits` of a product of FP8 numbers
    if not META.IS_PLAIN:
        product = product * s_factor
    s, factor, cap_tanh, score = logits(product, i, j, scale, head, MODS, META)
    if META.IS_PLAIN:
        factor = s_factor
    return Logits(s=s, factor=factor, cap_tanh=cap_tanh, score=score)


@gluon.jit
def _dq_load(buffers: DqBuffers, tile: QueryTile, args: DqArguments, origins: DqOrigins, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = tile.first_row, tile.place.b, tile.place.h, tile.h_kv
    len_q, len_kv = tile.place.len_q, tile.place.len_kv
    Q_BYTES: gl.constexpr = pair_bytes(of.q.first.block_type.nbytes, of.q.second.block_type.nbytes, META.QK1)
    K_BYTES: gl.constexpr = pair_bytes(of.k.first.block_type.nbytes, of.k.second.block_type.nbytes, META.QK1)
    K16_BYTES: gl.constexpr = pair_bytes(of.k16.first.block_type.nbytes, of.k16.second.block_type.nbytes, META.QK1)
    full = barriers.q_full.index(0)
    mbarrier.expect(full, 2 * (Q_BYTES + of.dout.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = first_row + consumer * ROWS
        load_pair(of.q, origins.q, len_q, row, full, tiles.q, consumer, META)
        load_rows(of.dout, origins.dout.token, len_q, row, origins.dout.head, 0, full, tiles.dout.index(consumer))
    s_factor = _clipped_descale(args.descales.q, b, h, first_row, len_q)
    dp_factor = _clipped_descale(args.descales.dout, b, h, first_row, len_q)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    for n_block in range(tile.num_blocks):
        row = key_block(n_block, tile.block_range, META)[0]
        descale_k = _clipped_descale(args.descales.k, b, h_kv, row, len_kv)
        descale_v = _clipped_descale(args.descales.v, b, h_kv, row, len_kv)
        stage = n_block % META.STAGES
        full = barriers.full8.index(stage)
        mbarrier.wait(barriers.empty8.index(stage), ((n_block // META.STAGES) & 1) ^ 1)
        write_factors(tiles.factors, stage, s_factor * descale_k, dp_factor * descale_v)
        mbarrier.expect(full, K_BYTES + of.v.block_type.nbytes)
        load_pair(of.k, origins.k, len_kv, row, full, tiles.k, stage, META)
        load_rows(of.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(stage))
        stage = n_block % META.STAGES16
        mbarrier.wait(barriers.empty16.index(stage), ((n_block // META.STAGES16) & 1) ^ 1)
        mbarrier.expect(barriers.full16.index(stage), K16_BYTES)
        load_pair(of.k16, origins.k16, len_kv, row, barriers.full16.index(stage), tiles.k16, stage, META)
    mbarrier.wait(barriers.dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        store_pair(of.dq, origins.dq, len_q, first_row + consumer * ROWS, tiles.dq, consumer, META)
    tma.store_wait(0)


@gluon.jit
def _dq_compute(
    buffers: DqBuffers,
    tile: QueryTile,
    head: Head,
    statistics_ptr,
    args: DqArguments,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    tiles, barriers = buffers.tiles, buffers.barriers
    first_row, large, block_range, place = tile.first_row, tile.large, tile.block_range, tile.place
    len_q, len_kv, shift, b, h = place.len_q, place.len_kv, place.shift, place.b, place.h
    window_left, window_right = args.band.left, args.band.right
    DTYPE: gl.constexpr = tiles.k16.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SIZE: gl.constexpr = META.STATISTICS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([ROWS, QK0], gl.float32, layout=DQ)
    if QK1 > 0:
        DQ1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dq1 = gl.zeros([ROWS, QK1], gl.float32, layout=DQ1)
    own_row = first_row + CONSUMER * ROWS
    rows = own_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=COLUMNS)
    pointers = statistics_ptr + (rows // SIZE).to(gl.int64) * (2 * SIZE) + rows % SIZE
    minus_lse = gl.load(pointers, mask=rows < len_q, other=float("-inf"))
    minus_delta = gl.load(pointers + SIZE, mask=rows < len_q, other=0.0)
    last_seen_by_all = len_kv  # blocks that end past it need the mask
    if META.HAS_RIGHT:
        last_seen_by_all = gl.minimum(len_kv, own_row + shift + window_right + 1)
    mbarrier.wait(barriers.q_full.index(0), 0)
    for n_block in range(tile.num_blocks):
        column, is_full = key_block(n_block, block_range, META)
        columns = column + block_columns
        own = CONSUMER + opaque_zero(n_block)
        stage = n_block % META.STAGES
        mbarrier.wait(barriers.full8.index(stage), (n_block // META.STAGES) & 1)
        qk = score_product(tiles.q, own, tiles.k, stage, zeros, BLOCK_N, META)
        v = tiles.v.index(stage).reshape([BLOCK_N, V0])
        dp = warpgroup_mma(tiles.dout.index(own).reshape([ROWS, V0]), v.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        qk = warpgroup_mma_wait(1, deps=[qk])
        scored = _logits(qk, rows[:, None], columns[None, :], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        is_cut = column + BLOCK_N > last_seen_by_all
        if META.HAS_LEFT:
            is_cut = is_cut | (column < own_row + ROWS - 1 + shift - window_left)
        if is_cut | is_any_large(large, META):
            s = mask_keys(s, rows, columns, len_kv, shift, window_left, window_right, META)
            s = relative_to_lse(s, minus_lse[:, None], large, b, h, rows[:, None], len_q, META)
        s = mask_by_mod(s, rows[:, None], columns[None, :], is_full, place, head.captures, MODS, META)
        p = gl.exp2(s * scored.factor + minus_lse[:, None])
        stage16 = n_block % META.STAGES16
        mbarrier.wait(barriers.full16.index(stage16), (n_block // META.STAGES16) & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(barriers.empty8.index(stage), count=1)
        dlogit = p * (dp * dp_factor + minus_delta[:, None])
        dscore = through_mods(dlogit, scored.cap_tanh, scored.score, rows[:, None], columns[None, :], head, MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_k = warpgroup_mma(ds, tiles.k16.first.index(stage16).reshape([BLOCK_N, QK0]), dq, is_async=True)
        if QK1 > 0:
            sum_of_k1 = warpgroup_mma(ds, tiles.k16.second.index(stage16).reshape([BLOCK_N, QK1]), dq1, is_async=True)
            dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
        else:
            dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
        mbarrier.arrive(barriers.empty16.index(stage16), count=1)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # k in a half type was the other warpgroup's too; now it is no longer needed
    tiles.dq.first.index(CONSUMER).reshape([ROWS, QK0]).store((dq * args.scores.scale).to(DTYPE))
    if QK1 > 0:
        tiles.dq.second.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * args.scores.scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_fp8_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    STAGES: gl.constexpr = META.STAGES
    STAGES16: gl.constexpr = META.STAGES16
    of, work, steps, band = args.descriptors, args.work, args.steps, args.band
    q_tiles = allocate_pair(2, of.q, META)
    k_tiles = allocate_pair(STAGES, of.k, META)
    k16_tiles = allocate_pair(STAGES16, of.k16, META)
    dq_tiles = k16_tiles
    if META.OWN_TILES:
        dq_tiles = allocate_pair(2, of.dq, META)
    tiles = DqTiles(
        q=q_tiles,
        k=k_tiles,
        k16=k16_tiles,
        dq=dq_tiles,
        dout=allocate_tiles(2, of.dout),
        v=allocate_tiles(STAGES, of.v),
        factors=allocate_factors(STAGES),
    )
    barriers = DqBarriers(
        q_full=allocate_barriers(1, 1),
        full8=allocate_barriers(STAGES, 1),
        empty8=allocate_barriers(STAGES, 2),
        full16=allocate_barriers(STAGES16, 1),
        empty16=allocate_barriers(STAGES16, 2),
        dq_full=allocate_barriers(1, 2),
    )
    buffers = DqBuffers(tiles=tiles, barriers=barriers)
    block, h, b = block_of(work.table_ptr, work.num_heads, work.blocks, work.heads_per_section, True, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    start_q, len_q, start_kv, len_kv = sequence.start_q, sequence.len_q, sequence.start_kv, sequence.len_kv
    shift = (len_kv - len_q) * band.bottom_right
    first_row = gl.minimum(block * META.BLOCK_M, len_q)
    num_blocks, block_range = blocks_of_keys(first_row, b, h, len_kv, shift, band.left, band.right, args.lists, META)
    num_blocks = gl.where(first_row < len_q, num_blocks, 0)
    h_kv = h // work.group_size
    place_q = packed_start(args.lengths_q, b, start_q)
    first_statistics = statistics_tile(b, h, work.num_heads, place_q, args.statistics_tiles, META, META.STATISTICS)
    own_statistics = args.statistics_ptr + first_statistics.to(gl.int64) * (2 * META.STATISTICS)
    origins = DqOrigins(
        q=origin_of(steps.q, start_q, h, b),
        dout=origin_of(steps.dout, start_q, h, b),
        k=origin_of(steps.k, start_kv, h_kv, b),
        k16=origin_of(steps.k16, start_kv, h_kv, b),
        v=origin_of(steps.v, start_kv, h_kv, b),
        dq=origin_of(steps.dq, start_q, h, b),
    )
    place = Place(len_q=len_q, len_kv=len_kv, shift=shift, b=b, h=h)
    head = head_of(args.scores, b, h, len_q, len_kv, shift, MODS, META)
    tile = QueryTile(
        first_row=first_row,
        place=place,
        h_kv=h_kv,
        large=load_large(args.large.any_ptr, args.large.lse_ptr, work.num_heads, args.lengths_q.num_tokens, start_q, META),
        num_blocks=num_blocks,
        block_range=block_range,
    )
    gl.warp_specialize(
        [
            (_dq_compute, (buffers, tile, head, own_statistics, args, 0, MODS, META)),
            (_dq_compute, (buffers, tile, head, own_statistics, args, 1, MODS, META)),
            (_dq_load, (buffers, tile, args, origins, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(
    buffers: DkdvBuffers, tile: KeyTile, args: DkdvArguments, origins: DkdvOrigins, first_statistics, META: gl.constexpr
):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = tile.first_row, tile.place.b, tile.place.h, tile.h_kv
    len_q, len_kv = tile.place.len_q, tile.place.len_kv
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    Q_BYTES: gl.constexpr = pair_bytes(of.q.first.block_type.nbytes, of.q.second.block_type.nbytes, META.QK1)
    Q16_BYTES: gl.constexpr = pair_bytes(of.q16.first.block_type.nbytes, of.q16.second.block_type.nbytes, META.QK1)
    K_BYTES: gl.constexpr = pair_bytes(of.k.first.block_type.nbytes, of.k.second.block_type.nbytes, META.QK1)
    BYTES: gl.constexpr = Q_BYTES + of.dout.block_type.nbytes + of.statistics.block_type.nbytes
    full = barriers.kv_full.index(0)
    mbarrier.expect(full, PARTS * (K_BYTES + of.v.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        load_pair(of.k, origins.k, len_kv, row, full, tiles.k, part, META)
        load_rows(of.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(part))
    s_factor = _clipped_descale(args.descales.k, b, h_kv, first_row, len_kv)
    dp_factor = _clipped_descale(args.descales.v, b, h_kv, first_row, len_kv)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    t = 0
    head = 0
    for iteration in range(tile.num_blocks * args.work.group_size):
        row = query_block(t, tile.block_range, META)[0]
        descale_q = _clipped_descale(args.descales.q, b, h + head, row, len_q)
        descale_dout = _clipped_descale(args.descales.dout, b, h + head, row, len_q)
        stage = iteration % META.STAGES
        full = barriers.full8.index(stage)
        mbarrier.wait(barriers.empty8.index(stage), ((iteration // META.STAGES) & 1) ^ 1)
        write_factors(tiles.factors, stage, s_factor * descale_q, dp_factor * descale_dout)
        mbarrier.expect(full, BYTES)
        load_pair(of.q, next_head(origins.q, head), len_q, row, full, tiles.q, stage, META)
        load_rows(of.dout, origins.dout.token, len_q, row, origins.dout.head + head, 0, full, tiles.dout.index(stage))
        of_head = first_statistics + head * args.statistics_tiles
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        stage = iteration % META.STAGES16
        full = barriers.full16.index(stage)
        mbarrier.wait(barriers.empty16.index(stage), ((iteration // META.STAGES16) & 1) ^ 1)
        mbarrier.expect(full, of.dout16.block_type.nbytes + (0 if META.SPLITS_COLUMNS else Q16_BYTES))
        load_rows(of.dout16, origins.dout16.token, len_q, row, origins.dout16.head + head, 0, full, tiles.dout16.index(stage))
        if META.SPLITS_COLUMNS:
            stage = iteration % META.STAGES_Q16
            full = barriers.q16_full.index(stage)
            mbarrier.wait(barriers.q16_empty.index(stage), ((iteration // META.STAGES_Q16) & 1) ^ 1)
            mbarrier.expect(full, Q16_BYTES)
        load_pair(of.q16, next_head(origins.q16, head), len_q, row, full, tiles.q16, stage, META)
        t += 1
        if t == tile.num_blocks:
            t = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        store_pair(of.dk, origins.dk, len_kv, row, tiles.dk, part, META)
        store_rows(of.dv, origins.dv.token, len_kv, row, origins.dv.head, 0, tiles.dv.index(part))
    tma.store_wait(0)


@gluon.jit
def _dkdv_compute(
    buffers: DkdvBuffers, tile: KeyTile, args: DkdvArguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    tiles, barriers = buffers.tiles, buffers.barriers
    first_row, large, block_range = tile.first_row, tile.large, tile.block_range
    len_q, len_kv, shift, b = tile.place.len_q, tile.place.len_kv, tile.place.shift, tile.place.b
    first_head = tile.place.h
    num_blocks, group_size = tile.num_blocks, args.work.group_size
    window_left, window_right = args.band.left, args.band.right
    DTYPE: gl.constexpr = tiles.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, QK0], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, V0], gl.float32, layout=DV)
    if QK1 > 0:
        DK1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dk1 = gl.zeros([ROWS, QK1], gl.float32, layout=DK1)
    own_row = first_row + CONSUMER * ROWS
    rows = own_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    t, h = 0, first_head
    own_scores = load_head_scores(args.scores, b, h, META)
    values = head_values(b, h, args.scores.captures, MODS, META)
    for iteration in range(num_blocks * group_size):
        row, is_full = query_block(t, block_range, META)
        columns = row + block_columns
        own = CONSUMER + opaque_zero(iteration)
        stage = iteration % META.STAGES
        mbarrier.wait(barriers.full8.index(stage), (iteration // META.STAGES) & 1)
        kq = score_product(tiles.k, own, tiles.q, stage, zeros, BLOCK_M, META)
        dout = tiles.dout.index(stage).reshape([BLOCK_M, V0])
        dp = warpgroup_mma(tiles.v.index(own).reshape([ROWS, V0]), dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = Place(len_q=len_q, len_kv=len_kv, shift=shift, b=b, h=h)
        head = head_at(place, args.scores, own_scores, values, META)
        scored = _logits(kq, columns[None, :], rows[:, None], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < own_row + ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > own_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                if META.IS_UNBOUNDED:
                    of_queries = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                    s = relative_to_lse(s, of_queries[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, head.captures, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * scored.factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), P)
        stage16 = iteration % META.STAGES16
        mbarrier.wait(barriers.full16.index(stage16), (iteration // META.STAGES16) & 1)
        sum_of_dout = warpgroup_mma(p16, tiles.dout16.index(stage16).reshape([BLOCK_M, V0]), dv, is_async=True)
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        dp = warpgroup_mma_wait(1, deps=[dp])
        mbarrier.arrive(barriers.empty8.index(stage), count=1)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(dlogit, scored.cap_tanh, scored.score, columns[None, :], rows[:, None], head, MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_q = warpgroup_mma(ds, tiles.q16.first.index(stage16).reshape([BLOCK_M, QK0]), dk, is_async=True)
        if QK1 > 0:
            sum_of_q1 = warpgroup_mma(ds, tiles.q16.second.index(stage16).reshape([BLOCK_M, QK1]), dk1, is_async=True)
            dv, dk, dk1, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, sum_of_q1, p16, ds])
        else:
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, p16, ds])
        mbarrier.arrive(barriers.empty16.index(stage16), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            own_scores = load_head_scores(args.scores, b, next_h, META)
            values = head_values(b, next_h, args.scores.captures, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in a half type was the other warpgroup's too; now it is no longer needed
    tiles.dk.first.index(CONSUMER).reshape([ROWS, QK0]).store((dk * args.scores.scale).to(DTYPE))
    if QK1 > 0:
        tiles.dk.second.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * args.scores.scale).to(DTYPE))
    tiles.dv.index(CONSUMER).reshape([ROWS, V0]).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def _dkdv_compute_columns(
    buffers: DkdvBuffers, tile: KeyTile, args: DkdvArguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    tiles, barriers = buffers.tiles, buffers.barriers
    first_row, large, block_range = tile.first_row, tile.large, tile.block_range
    len_q, len_kv, shift, b = tile.place.len_q, tile.place.len_kv, tile.place.shift, tile.place.b
    first_head = tile.place.h
    num_blocks, group_size = tile.num_blocks, args.work.group_size
    window_left, window_right = args.band.left, args.band.right
    DTYPE: gl.constexpr = tiles.dout16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HALF: gl.constexpr = META.BLOCK_M // 2
    DIM: gl.constexpr = META.QK0
    HALF_DIM: gl.constexpr = META.QK0 // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    FIRST: gl.constexpr = CONSUMER * HALF
    FIRST_COLUMN: gl.constexpr = CONSUMER * HALF_DIM
    zeros = gl.zeros([ROWS, HALF], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, HALF_DIM], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, HALF_DIM], gl.float32, layout=DK)
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    t, h = 0, first_head
    own_scores = load_head_scores(args.scores, b, h, META)
    values = head_values(b, h, args.scores.captures, MODS, META)
    for iteration in range(num_blocks * group_size):
        row, is_full = query_block(t, block_range, META)
        columns = row + block_columns
        zero = opaque_zero(iteration)
        stage = iteration % META.STAGES
        mbarrier.wait(barriers.full8.index(stage), (iteration // META.STAGES) & 1)
        own_q = tiles.q.first.index(stage).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(tiles.k.first.index(zero).reshape([ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        own_dout = tiles.dout.index(stage).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(tiles.v.index(zero).reshape([ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = tiles.statistics.index(stage).slice(FIRST, HALF).load(COLUMNS)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        place = Place(len_q=len_q, len_kv=len_kv, shift=shift, b=b, h=h)
        head = head_at(place, args.scores, own_scores, values, META)
        scored = _logits(kq, columns[None, :], rows[:, None], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        if META.HAS_LEFT or META.HAS_RIGHT or META.IS_UNBOUNDED:
            is_cut = is_any_large(large, META)
            if META.HAS_RIGHT:
                is_cut = is_cut | (row < first_row + ROWS - 1 - shift - window_right)
            if META.HAS_LEFT:
                is_cut = is_cut | (row + BLOCK_M > first_row - shift + window_left + 1)
            if is_cut:
                s = mask_queries(s, rows, columns, shift, window_left, window_right, META)
                s = relative_to_lse(s, minus_lse[None, :], large, b, h, columns[None, :], len_q, META)
        s = mask_by_mod(s, columns[None, :], rows[:, None], is_full, place, head.captures, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * scored.factor + minus_lse[None, :])
        buffer = (iteration & 1) * 2  # two, so that one barrier a product is enough
        tiles.p.index(buffer + CONSUMER).store(p.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(barriers.empty8.index(stage), count=1)
        stage = iteration % META.STAGES16
        q16_stage = iteration % META.STAGES_Q16
        mbarrier.wait(barriers.full16.index(stage), (iteration // META.STAGES16) & 1)
        dout16 = tiles.dout16.index(stage).reshape([BLOCK_M, DIM])
        sum_of_dout = dv
        for half in gl.static_range(2):
            part = dout16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_dout = warpgroup_mma(tiles.p.index(buffer + half), part, sum_of_dout, is_async=True)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(dlogit, scored.cap_tanh, scored.score, columns[None, :], rows[:, None], head, MODS, META)
        tiles.ds.index(buffer + CONSUMER).store(dscore.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(DS_WRITTEN, BOTH)
        mbarrier.wait(barriers.q16_full.index(q16_stage), (iteration // META.STAGES_Q16) & 1)
        q16 = tiles.q16.first.index(q16_stage).reshape([BLOCK_M, DIM])
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(tiles.ds.index(buffer + half), part, sum_of_q, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q])
        mbarrier.arrive(barriers.q16_empty.index(q16_stage), count=1)
        mbarrier.arrive(barriers.empty16.index(stage), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            h += 1
            next_h = gl.minimum(h, first_head + group_size - 1)
            own_scores = load_head_scores(args.scores, b, next_h, META)
            values = head_values(b, next_h, args.scores.captures, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in a half type was the other warpgroup's too; now it is no longer needed
    tiles.dk.first.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store((dk * args.scores.scale).to(DTYPE))
    tiles.dv.index(0).reshape([ROWS, DIM]).slice(FIRST_COLUMN, HALF_DIM, 1).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dkdv_fp8_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    STAGES: gl.constexpr = META.STAGES
    STAGES16: gl.constexpr = META.STAGES16
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    of, work, steps, band = args.descriptors, args.work, args.steps, args.band
    DTYPE: gl.constexpr = of.dout16.dtype
    q_tiles = allocate_pair(STAGES, of.q, META)
    q16_tiles = allocate_pair(META.STAGES_Q16, of.q16, META)
    k_tiles = allocate_pair(PARTS, of.k, META)
    dout_tiles = allocate_tiles(STAGES, of.dout)
    dout16_tiles = allocate_tiles(STAGES16, of.dout16)
    v_tiles = allocate_tiles(PARTS, of.v)
    dk_tiles, dv_tiles = q16_tiles, dout16_tiles
    if META.OWN_TILES:
        dk_tiles = allocate_pair(PARTS, of.dk, META)
        dv_tiles = allocate_tiles(PARTS, of.dv)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], of.statistics.layout)
    factors = allocate_factors(STAGES)
    full16 = allocate_barriers(STAGES16, 1)
    empty16 = allocate_barriers(STAGES16, 2)
    q16_full, q16_empty = full16, empty16
    if META.SPLITS_COLUMNS:
        q16_full = allocate_barriers(META.STAGES_Q16, 1)
        q16_empty = allocate_barriers(META.STAGES_Q16, 2)
    barriers = DkdvBarriers(
        full8=allocate_barriers(STAGES, 1),
        empty8=allocate_barriers(STAGES, 2),
        full16=full16,
        empty16=empty16,
        q16_full=q16_full,
        q16_empty=q16_empty,
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    block, h_kv, b = block_of(work.table_ptr, work.num_heads // work.group_size, work.blocks, work.heads_per_section, False, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    start_q, len_q, start_kv, len_kv = sequence.start_q, sequence.len_q, sequence.start_kv, sequence.len_kv
    shift = (len_kv - len_q) * band.bottom_right
    first_row = gl.minimum(block * META.BLOCK_N, len_kv)
    h = h_kv * work.group_size
    num_blocks, block_range = blocks_of_queries(first_row, b, h, len_q, shift, band.left, band.right, args.lists, META)
    num_blocks = gl.where(first_row < len_kv, num_blocks, 0)
    place_q = packed_start(args.lengths_q, b, start_q)
    first_statistics = statistics_tile(b, h, work.num_heads, place_q, args.statistics_tiles, META, BLOCK_M)
    origins = DkdvOrigins(
        q=origin_of(steps.q, start_q, h, b),
        q16=origin_of(steps.q16, start_q, h, b),
        dout=origin_of(steps.dout, start_q, h, b),
        dout16=origin_of(steps.dout16, start_q, h, b),
        k=origin_of(steps.k, start_kv, h_kv, b),
        v=origin_of(steps.v, start_kv, h_kv, b),
        dk=origin_of(steps.dk, start_kv, h_kv, b),
        dv=origin_of(steps.dv, start_kv, h_kv, b),
    )
    tile = KeyTile(
        first_row=first_row,
        place=Place(len_q=len_q, len_kv=len_kv, shift=shift, b=b, h=h),
        h_kv=h_kv,
        large=load_large(args.large.any_ptr, args.large.lse_ptr, work.num_heads, args.lengths_q.num_tokens, start_q, META),
        num_blocks=num_blocks,
        block_range=block_range,
    )
    p_tiles, ds_tiles = factors, factors  # never used
    if META.SPLITS_COLUMNS:
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M // 2], DTYPE)
        p_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M // 2], EXCHANGE)
        ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M // 2], EXCHANGE)
    tiles = DkdvTiles(
        q=q_tiles,
        q16=q16_tiles,
        k=k_tiles,
        dk=dk_tiles,
        dout=dout_tiles,
        dout16=dout16_tiles,
        v=v_tiles,
        dv=dv_tiles,
        statistics=statistics_tiles,
        factors=factors,
        p=p_tiles,
        ds=ds_tiles,
    )
    buffers = DkdvBuffers(tiles=tiles, barriers=barriers)
    if META.SPLITS_COLUMNS:
        gl.warp_specialize(
            [
                (_dkdv_compute_columns, (buffers, tile, args, 0, MODS, META)),
                (_dkdv_compute_columns, (buffers, tile, args, 1, MODS, META)),
                (_dkdv_load, (buffers, tile, args, origins, first_statistics, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_compute, (buffers, tile, args, 0, MODS, META)),
                (_dkdv_compute, (buffers, tile, args, 1, MODS, META)),
                (_dkdv_load, (buffers, tile, args, origins, first_statistics, META)),
            ],
            [4, 1],
            [240, 24],
        )


def tile_of(problem: Problem) -> Fp8BackwardTile:
    """The narrowest row that serves the head dims, which are at most 256; of 64 keys where scores are more than a product."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    dim_qk, dim_v = x.q.shape[-1], x.v.shape[-1]
    return next(t for t in FP8_BACKWARD if dim_qk <= t.head_dim_qk and dim_v <= t.head_dim_v and t.block_n <= most)


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the kernels cannot run this problem's backward; None: they can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 256:
        return "its accumulators hold head dims up to 256"
    tile = tile_of(x)
    return unsupported_operands(x, out, dout) or backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def slower(problem: Problem) -> str | None:
    """Returns why the two kernels in a half type would be slower than others, which this was measured to be faster than
    (bench/results/fp8_kernels_h200.json), without what those need dequantised; None: they would not."""
    return backward_slower(problem)


def fp8_backward(call: Backward, tile: Fp8BackwardTile | None = None) -> None:
    """`hopper_backward.hopper_backward` in FP8, for what is not `unsupported`; arguments as of
    `hopper_fp8_one_pass.fp8_one_pass_backward`.
    """
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v
    size = tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    statistics, tiles, large = tiled_statistics(call, size)
    q16, k16, dout16 = copies_in_16_bits(x, dout, dq.dtype)
    score_meta = x.score_meta()

    def meta(stages: tuple[int, ...], rows: int, splits_columns: bool, **own: int) -> Fp8BackwardMeta:
        return Fp8BackwardMeta(
            IS_RAGGED_Q=x.q.dim() == 3,
            IS_RAGGED_KV=x.k.dim() == 3,
            HAS_LENGTHS=has_lengths,
            HAS_GAPS_Q=x.cu_seqlens_q_padded is not None,
            HAS_GAPS_KV=x.cu_seqlens_kv_padded is not None,
            HAS_LEFT=x.window_left is not None,
            HAS_RIGHT=x.window_right is not None,
            **score_meta,
            IS_PLAIN=is_plain(score_meta),
            STATISTICS=size,
            QK0=qk0,
            QK1=qk1,
            V0=v0,
            STAGES=stages[0],
            STAGES16=stages[1],
            STAGES_Q16=stages[-1],
            OWN_TILES=rows != ROWS.value or (min(stages[1:]) < 2 and not splits_columns),
            SPLITS_COLUMNS=splits_columns,
            **own,
        )

    def pair(x: Tensor, rows: int) -> Pair:
        """Descriptors of the first part of the head dim and of the second; without one, anything."""
        return Pair(first=ragged_descriptor(x, rows, qk0), second=ragged_descriptor(x, rows, qk1 or qk0))

    shared: dict[str, Any] = {
        "statistics_tiles": tiles,
        "large": LargeLse(any_ptr=large.is_any, lse_ptr=large.lse),
        "descales": backward_descales(x),
        "lengths_q": x.lengths_q,
        "lengths_kv": x.lengths_kv,
        "band": x.band,
        "scores": x.scores,
    }

    def work(rows: int, side: Literal["q", "kv"], bytes_per_head: int) -> tuple[BackwardWork, int]:
        """How many programs of `rows` rows there are, and their order."""
        longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
        blocks = triton.cdiv(longest, rows)
        table = work_table(x, rows, side, by_sequence=True) if has_lengths else None
        programs = (blocks * x.batch if table is None else table.shape[0] - 2) * heads
        section = section_of(x, heads, bytes_per_head)
        order = BackwardWork(
            table_ptr=table, num_heads=x.num_heads, group_size=x.group_size, blocks=blocks, heads_per_section=section
        )
        return order, programs

    # As in the 16-bit backward: k in both forms and v for dq, q and dout in both for dk and dv.
    dq_work, programs = work(_QUERIES, "q", x.longest_kv * (3 * (qk0 + qk1) + v0))
    dq_arguments = DqArguments(
        descriptors=DqDescriptors(
            q=pair(x.q, 64),
            k=pair(x.k, tile.block_n),
            k16=pair(k16, tile.block_n),
            dq=pair(dq, 64),
            dout=ragged_descriptor(dout, 64, v0),
            v=ragged_descriptor(x.v, tile.block_n, v0),
        ),
        statistics_ptr=statistics,
        work=dq_work,
        steps=DqSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), k16=step_of(k16), v=step_of(x.v), dq=step_of(dq)),
        lists=x.lists("kv"),
        **shared,
    )
    dq_meta = meta(tile.dq_stages, tile.block_n, False, BLOCK_M=_QUERIES, BLOCK_N=tile.block_n)
    dq_tile = Tile(_QUERIES, tile.block_n, 4, 2)
    launch(_attn_bwd_dq_fp8_hopper_kernel, programs, x.device, dq_tile, (dq_arguments, x.mods, dq_meta))
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dkdv_work, programs = work(tile.keys, "kv", x.longest_q * 6 * (qk0 + qk1 + v0))
    dkdv_arguments = DkdvArguments(
        descriptors=DkdvDescriptors(
            q=pair(x.q, size),
            q16=pair(q16, size),
            k=pair(x.k, 64),
            dk=pair(dk, 64),
            dout=ragged_descriptor(dout, size, v0),
            dout16=ragged_descriptor(dout16, size, v0),
            v=ragged_descriptor(x.v, 64, v0),
            dv=ragged_descriptor(dv, 64, v0),
            statistics=TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], flat),
        ),
        work=dkdv_work,
        steps=DkdvSteps(
            q=step_of(x.q),
            q16=step_of(q16),
            dout=step_of(dout),
            dout16=step_of(dout16),
            k=step_of(x.k),
            v=step_of(x.v),
            dk=step_of(dk),
            dv=step_of(dv),
        ),
        lists=x.lists("q"),
        **shared,
    )
    dkdv_meta = meta(tile.dkdv_stages, size, tile.splits_columns, BLOCK_M=size, BLOCK_N=tile.keys)
    dkdv_tile = Tile(size, tile.keys, 4, 2)
    launch(_attn_bwd_dkdv_fp8_hopper_kernel, programs, x.device, dkdv_tile, (dkdv_arguments, x.mods, dkdv_meta))
    if has_lengths:
        zero_padding(x, dq, "q")
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
