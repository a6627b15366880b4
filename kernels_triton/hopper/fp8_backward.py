"""Backward attention in FP8 on Hopper (sm_90) in Gluon: `backward` with scores and dp from FP8 operands.

As in `fp8_backward_fused` the products with p and ds are 16-bit, for the reasons that are given there, and q, k and dout are read
in both forms. One kernel for dq, one for dk and dv, each bitwise repeatable, for head dims up to 256. FP8 tiles are released
once dp is there, 16-bit tiles at the end of an iteration, so that each has stages of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    LOG2E,
    head_of,
    is_any_large,
    logits,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Backward, Problem, with_features
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.common.work_table import zero_padding
from flexattn.kernels_triton.hopper.backward_blocks import (
    Block,
    LargeLse,
    backward_work,
    first_query_head,
    head_at,
    hides_some_key,
    hides_some_query,
    key_block_of_program,
    last_key_seen_by_all,
    load_query_statistics,
    next_query_block,
    query_block_of_program,
    statistics_of_block,
)
from flexattn.kernels_triton.hopper.barriers import BOTH, DS_WRITTEN, LAST, P_WRITTEN, named_barrier_sync
from flexattn.kernels_triton.hopper.block_ranges import key_block, query_block
from flexattn.kernels_triton.hopper.conditions import QUERIES, backward_slower, backward_unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import (
    load_rows,
    load_statistics,
    ragged_descriptor,
    statistics_descriptor,
    step_of,
    store_rows,
)
from flexattn.kernels_triton.hopper.fp8 import (
    Descale,
    allocate_factors,
    load_descale,
    read_factor,
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
)
from flexattn.kernels_triton.hopper.fp8_backward_operands import (
    backward_descales,
    copies_in_16_bits,
    is_plain,
    unsupported_operands,
)
from flexattn.kernels_triton.hopper.masking import apply_mask_mod, hide_queries_past_the_end, mask_keys, mask_queries
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pairs import (
    Pair,
    allocate_pair,
    allocate_tiles,
    load_pair,
    origin_of,
    origin_of_head,
    pair_bytes,
    pair_descriptor,
    score_product,
    store_pair,
)
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers, release, wait_empty, wait_full
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


class Fp8BackwardTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in two kernels, as `HopperBackwardTile`; no other was timed."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys that dq takes at a time
    dq_stages: tuple[int, int]  # in shared memory: of k and v in FP8, and of k in 16 bits
    block_m: int  # queries that dk and dv take at a time
    # Stages of q and dout in FP8, then in 16 bits of dout and of q; the last two differ only where columns are split.
    dkdv_stages: tuple[int, int, int]
    splits_columns: bool  # of dk and dv between the warpgroups: 64 keys a program instead of 128

    @property
    def keys(self) -> int:
        """Number of keys of a program of dk and dv."""
        return 64 if self.splits_columns else 128


# With 128 keys, or at head dim 128 with 64 queries, modified scores would lack registers, and a block mask may have fewer.
FP8_BACKWARD = (
    Fp8BackwardTile(64, 64, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(64, 64, 64, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 128, (2, 2), 64, (2, 2, 2), False),
    Fp8BackwardTile(128, 128, 64, (2, 2), 32, (2, 2, 2), False),
    Fp8BackwardTile(192, 128, 64, (2, 2), 32, (2, 2, 2), False),
    # q in 16 bits has most of an iteration to come in: of all four its second stage is missed least.
    Fp8BackwardTile(256, 256, 64, (2, 2), 64, (2, 2, 1), True),
)


@with_features
class Fp8BackwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES: int  # in shared memory, of what is in FP8
    STAGES16: int  # in 16 bits, of k or of dout
    STAGES_Q16: int
    OWN_TILES: bool  # for the gradients, which else leave through tiles of 16 bits
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
def _dq_load(buffers: DqBuffers, block: Block, args: DqArguments, origins: DqOrigins, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
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
    for n_block in range(block.num_blocks):
        row = key_block(n_block, block.block_range, META)[0]
        descale_k = _clipped_descale(args.descales.k, b, h_kv, row, len_kv)
        descale_v = _clipped_descale(args.descales.v, b, h_kv, row, len_kv)
        stage = n_block % META.STAGES
        full = barriers.full8.index(stage)
        wait_empty(barriers.empty8, n_block, META.STAGES)
        write_factors(tiles.factors, stage, s_factor * descale_k, dp_factor * descale_v)
        mbarrier.expect(full, K_BYTES + of.v.block_type.nbytes)
        load_pair(of.k, origins.k, len_kv, row, full, tiles.k, stage, META)
        load_rows(of.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(stage))
        stage = n_block % META.STAGES16
        wait_empty(barriers.empty16, n_block, META.STAGES16)
        mbarrier.expect(barriers.full16.index(stage), K16_BYTES)
        load_pair(of.k16, origins.k16, len_kv, row, barriers.full16.index(stage), tiles.k16, stage, META)
    mbarrier.wait(barriers.dq_full.index(0), 0)
    for consumer in gl.static_range(2):
        store_pair(of.dq, origins.dq, len_q, first_row + consumer * ROWS, tiles.dq, consumer, META)
    tma.store_wait(0)


@gluon.jit
def _dq_compute(
    buffers: DqBuffers,
    block: Block,
    head: Head,
    statistics_ptr,
    args: DqArguments,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    tiles, barriers = buffers.tiles, buffers.barriers
    b, h, len_q, large = block.b, block.h, block.sequence.len_q, block.large
    DTYPE: gl.constexpr = tiles.k16.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK0, 16])
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([ROWS, QK0], gl.float32, layout=DQ)
    if QK1 > 0:
        DQ1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK1, 16])
        dq1 = gl.zeros([ROWS, QK1], gl.float32, layout=DQ1)
    m_start = block.first_row + CONSUMER * ROWS
    rows = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_N, layout=COLUMNS)
    statistics = load_query_statistics(statistics_ptr, rows, len_q, META)
    minus_lse = statistics.minus_lse
    last = last_key_seen_by_all(m_start, block.band, META)
    mbarrier.wait(barriers.q_full.index(0), 0)
    for n_block in range(block.num_blocks):
        column, is_full = key_block(n_block, block.block_range, META)
        columns = column + block_columns
        own = CONSUMER + opaque_zero(n_block)
        stage = n_block % META.STAGES
        wait_full(barriers.full8, n_block, META.STAGES)
        qk = score_product(tiles.q, own, tiles.k, stage, zeros, BLOCK_N, META)
        v = tiles.v.index(stage).reshape([BLOCK_N, V0])
        dp = warpgroup_mma(tiles.dout.index(own).reshape([ROWS, V0]), v.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        qk = warpgroup_mma_wait(1, deps=[qk])
        scored = _logits(qk, rows[:, None], columns[None, :], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        if hides_some_key(column, last, m_start, block, META) | is_any_large(large, META):
            s = mask_keys(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[:, None], large, b, h, rows[:, None], len_q, META)
        s = apply_mask_mod(s, rows[:, None], columns[None, :], is_full, head, MODS, META)
        p = gl.exp2(s * scored.factor + minus_lse[:, None])
        stage16 = n_block % META.STAGES16
        wait_full(barriers.full16, n_block, META.STAGES16)
        dp = warpgroup_mma_wait(0, deps=[dp])
        release(barriers.empty8, n_block, META.STAGES)
        dlogit = p * (dp * dp_factor + statistics.minus_delta[:, None])
        dscore = through_mods(dlogit, scored.cap_tanh, scored.score, rows[:, None], columns[None, :], head, MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_k = warpgroup_mma(ds, tiles.k16.first.index(stage16).reshape([BLOCK_N, QK0]), dq, is_async=True)
        if QK1 > 0:
            sum_of_k1 = warpgroup_mma(ds, tiles.k16.second.index(stage16).reshape([BLOCK_N, QK1]), dq1, is_async=True)
            dq, dq1, ds = warpgroup_mma_wait(0, deps=[sum_of_k, sum_of_k1, ds])
        else:
            dq, ds = warpgroup_mma_wait(0, deps=[sum_of_k, ds])
        release(barriers.empty16, n_block, META.STAGES16)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # k in 16 bits was the other warpgroup's too; now it is no longer needed
    tiles.dq.first.index(CONSUMER).reshape([ROWS, QK0]).store((dq * args.scores.scale).to(DTYPE))
    if QK1 > 0:
        tiles.dq.second.index(CONSUMER).reshape([ROWS, QK1]).store((dq1 * args.scores.scale).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_dq_fp8_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    STAGES: gl.constexpr = META.STAGES
    STAGES16: gl.constexpr = META.STAGES16
    of, steps = args.descriptors, args.steps
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
    block = query_block_of_program(args, META)
    sequence, b, h, h_kv = block.sequence, block.b, block.h, block.h_kv
    origins = DqOrigins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        k16=origin_of(steps.k16, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
        dq=origin_of(steps.dq, sequence.start_q, h, b),
    )
    head = head_of(args.scores, b, h, sequence.len_q, sequence.len_kv, block.band.shift, MODS, META)
    statistics_ptr = statistics_of_block(args, block, META)
    gl.warp_specialize(
        [
            (_dq_compute, (buffers, block, head, statistics_ptr, args, 0, MODS, META)),
            (_dq_compute, (buffers, block, head, statistics_ptr, args, 1, MODS, META)),
            (_dq_load, (buffers, block, args, origins, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(buffers: DkdvBuffers, block: Block, args: DkdvArguments, origins: DkdvOrigins, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
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
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # of all query heads
        row = query_block(n, block.block_range, META)[0]
        descale_q = _clipped_descale(args.descales.q, b, h + head, row, len_q)
        descale_dout = _clipped_descale(args.descales.dout, b, h + head, row, len_q)
        stage = m_block % META.STAGES
        full = barriers.full8.index(stage)
        wait_empty(barriers.empty8, m_block, META.STAGES)
        write_factors(tiles.factors, stage, s_factor * descale_q, dp_factor * descale_dout)
        mbarrier.expect(full, BYTES)
        load_pair(of.q, origin_of_head(origins.q, head), len_q, row, full, tiles.q, stage, META)
        load_rows(of.dout, origins.dout.token, len_q, row, origins.dout.head + head, 0, full, tiles.dout.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        stage = m_block % META.STAGES16
        full = barriers.full16.index(stage)
        wait_empty(barriers.empty16, m_block, META.STAGES16)
        mbarrier.expect(full, of.dout16.block_type.nbytes + (0 if META.SPLITS_COLUMNS else Q16_BYTES))
        load_rows(of.dout16, origins.dout16.token, len_q, row, origins.dout16.head + head, 0, full, tiles.dout16.index(stage))
        if META.SPLITS_COLUMNS:
            stage = m_block % META.STAGES_Q16
            full = barriers.q16_full.index(stage)
            wait_empty(barriers.q16_empty, m_block, META.STAGES_Q16)
            mbarrier.expect(full, Q16_BYTES)
        load_pair(of.q16, origin_of_head(origins.q16, head), len_q, row, full, tiles.q16, stage, META)
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        store_pair(of.dk, origins.dk, len_kv, row, tiles.dk, part, META)
        store_rows(of.dv, origins.dv.token, len_kv, row, origins.dv.head, 0, tiles.dv.index(part))
    tma.store_wait(0)


@gluon.jit
def _dkdv_compute(
    buffers: DkdvBuffers, block: Block, args: DkdvArguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    tiles, barriers = buffers.tiles, buffers.barriers
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
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
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    at, values = first_query_head(block, scores, MODS, META)
    for m_block in range(block.num_blocks * group_size):  # of all query heads
        row, is_full = query_block(at.n, block.block_range, META)
        columns = row + block_columns
        own = CONSUMER + opaque_zero(m_block)
        stage = m_block % META.STAGES
        wait_full(barriers.full8, m_block, META.STAGES)
        kq = score_product(tiles.k, own, tiles.q, stage, zeros, BLOCK_M, META)
        dout = tiles.dout.index(stage).reshape([BLOCK_M, V0])
        dp = warpgroup_mma(tiles.v.index(own).reshape([ROWS, V0]), dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        head = head_at(at, values, block, scores, META)
        scored = _logits(kq, columns[None, :], rows[:, None], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        if hides_some_query(row, n_start, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            if META.IS_UNBOUNDED:
                of_queries = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                s = relative_to_lse(s, of_queries[None, :], large, b, at.h, columns[None, :], len_q, META)
        s = apply_mask_mod(s, columns[None, :], rows[:, None], is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * scored.factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), P)
        stage16 = m_block % META.STAGES16
        wait_full(barriers.full16, m_block, META.STAGES16)
        sum_of_dout = warpgroup_mma(p16, tiles.dout16.index(stage16).reshape([BLOCK_M, V0]), dv, is_async=True)
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        dp = warpgroup_mma_wait(1, deps=[dp])
        release(barriers.empty8, m_block, META.STAGES)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(dlogit, scored.cap_tanh, scored.score, columns[None, :], rows[:, None], head, MODS, META)
        ds = gl.convert_layout(dscore.to(DTYPE), DS)
        sum_of_q = warpgroup_mma(ds, tiles.q16.first.index(stage16).reshape([BLOCK_M, QK0]), dk, is_async=True)
        if QK1 > 0:
            sum_of_q1 = warpgroup_mma(ds, tiles.q16.second.index(stage16).reshape([BLOCK_M, QK1]), dk1, is_async=True)
            dv, dk, dk1, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, sum_of_q1, p16, ds])
        else:
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q, p16, ds])
        release(barriers.empty16, m_block, META.STAGES16)
        at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in 16 bits was the other warpgroup's too; now it is no longer needed
    tiles.dk.first.index(CONSUMER).reshape([ROWS, QK0]).store((dk * args.scores.scale).to(DTYPE))
    if QK1 > 0:
        tiles.dk.second.index(CONSUMER).reshape([ROWS, QK1]).store((dk1 * args.scores.scale).to(DTYPE))
    tiles.dv.index(CONSUMER).reshape([ROWS, V0]).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@gluon.jit
def _dkdv_compute_columns(
    buffers: DkdvBuffers, block: Block, args: DkdvArguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    # Each warpgroup computes the scores of half of the queries, and half of the columns of dk and dv from all of them.
    tiles, barriers = buffers.tiles, buffers.barriers
    b, len_q, large = block.b, block.sequence.len_q, block.large
    scores, group_size = args.scores, args.work.group_size
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
    rows = block.first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = FIRST + gl.arange(0, HALF, layout=COLUMNS)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    at, values = first_query_head(block, scores, MODS, META)
    for m_block in range(block.num_blocks * group_size):  # of all query heads
        row, is_full = query_block(at.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        stage = m_block % META.STAGES
        wait_full(barriers.full8, m_block, META.STAGES)
        own_q = tiles.q.first.index(stage).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        kq = warpgroup_mma(tiles.k.first.index(zero).reshape([ROWS, DIM]), own_q, zeros, use_acc=False, is_async=True)
        own_dout = tiles.dout.index(stage).reshape([BLOCK_M, DIM]).slice(FIRST, HALF, 0).permute([1, 0])
        dp = warpgroup_mma(tiles.v.index(zero).reshape([ROWS, DIM]), own_dout, zeros, use_acc=False, is_async=True)
        minus_lse = tiles.statistics.index(stage).slice(FIRST, HALF).load(COLUMNS)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        kq = warpgroup_mma_wait(1, deps=[kq])
        head = head_at(at, values, block, scores, META)
        scored = _logits(kq, columns[None, :], rows[:, None], head, args.scores.scale, s_factor, MODS, META)
        s = scored.s
        if hides_some_query(row, block.first_row, block, META):
            s = mask_queries(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[None, :], large, b, at.h, columns[None, :], len_q, META)
        s = apply_mask_mod(s, columns[None, :], rows[:, None], is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        p = gl.exp2(s * scored.factor + minus_lse[None, :])
        buffer = (m_block & 1) * 2  # two, so that one barrier a product is enough
        tiles.p.index(buffer + CONSUMER).store(p.to(DTYPE))
        fence_async_shared()
        named_barrier_sync(P_WRITTEN, BOTH)
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M + FIRST, HALF).load(COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        dp = warpgroup_mma_wait(0, deps=[dp])
        release(barriers.empty8, m_block, META.STAGES)
        stage = m_block % META.STAGES16
        q16_stage = m_block % META.STAGES_Q16
        wait_full(barriers.full16, m_block, META.STAGES16)
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
        wait_full(barriers.q16_full, m_block, META.STAGES_Q16)
        q16 = tiles.q16.first.index(q16_stage).reshape([BLOCK_M, DIM])
        sum_of_q = dk
        for half in gl.static_range(2):
            part = q16.slice(half * HALF, HALF, 0).slice(FIRST_COLUMN, HALF_DIM, 1)
            sum_of_q = warpgroup_mma(tiles.ds.index(buffer + half), part, sum_of_q, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[sum_of_dout, sum_of_q])
        release(barriers.q16_empty, m_block, META.STAGES_Q16)
        release(barriers.empty16, m_block, META.STAGES16)
        at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    if not META.OWN_TILES:
        named_barrier_sync(LAST, BOTH)  # what is in 16 bits was the other warpgroup's too; now it is no longer needed
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
    of, steps = args.descriptors, args.steps
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
    block = key_block_of_program(args, META)
    sequence, b, h, h_kv = block.sequence, block.b, block.h, block.h_kv
    origins = DkdvOrigins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        q16=origin_of(steps.q16, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        dout16=origin_of(steps.dout16, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
        dk=origin_of(steps.dk, sequence.start_kv, h_kv, b),
        dv=origin_of(steps.dv, sequence.start_kv, h_kv, b),
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
                (_dkdv_compute_columns, (buffers, block, args, 0, MODS, META)),
                (_dkdv_compute_columns, (buffers, block, args, 1, MODS, META)),
                (_dkdv_load, (buffers, block, args, origins, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_compute, (buffers, block, args, 0, MODS, META)),
                (_dkdv_compute, (buffers, block, args, 1, MODS, META)),
                (_dkdv_load, (buffers, block, args, origins, META)),
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
    """Returns why the two kernels in 16 bits would be slower than others, which this was measured to be faster than
    (bench/results/fp8_kernels_h200.json), without what those need dequantised; None: they would not."""
    return backward_slower(problem)


def fp8_backward(call: Backward, tile: Fp8BackwardTile | None = None) -> None:
    """Launches the two kernels of a backward in FP8, of calls that are not `unsupported`; arguments as of `fp8_fused_backward`."""
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    v0 = tile.head_dim_v
    size = tile.block_m
    has_lengths = x.cu_seqlens_q is not None
    statistics, tiles, large = tiled_statistics(call, size)
    q16, k16, dout16 = copies_in_16_bits(x, dout, dq.dtype)

    def meta(stages: tuple[int, ...], rows: int, splits_columns: bool, **own: int) -> Fp8BackwardMeta:
        return Fp8BackwardMeta(
            **x.features._asdict(),
            IS_PLAIN=is_plain(x.features),
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
        return pair_descriptor(x, rows, (qk0, qk1))

    shared: dict[str, Any] = {
        "tiles_of_statistics": tiles,
        "large": LargeLse(is_any_ptr=large.is_any, lse_ptr=large.lse),
        "descales": backward_descales(x),
        "lengths_q": x.lengths_q,
        "lengths_kv": x.lengths_kv,
        "band": x.band,
        "scores": x.scores,
    }

    # As in the 16-bit backward: k in both forms and v for dq, q and dout in both for dk and dv.
    dq_work, programs = backward_work(x, QUERIES, "q", x.longest_kv * (3 * (qk0 + qk1) + v0))
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
    dq_meta = meta(tile.dq_stages, tile.block_n, False, BLOCK_M=QUERIES, BLOCK_N=tile.block_n)
    dq_tile = Tile(QUERIES, tile.block_n, 4, 2)
    launch(_attn_bwd_dq_fp8_hopper_kernel, programs, x.device, dq_tile, (dq_arguments, x.mods, dq_meta))
    dkdv_work, programs = backward_work(x, tile.keys, "kv", x.longest_q * 6 * (qk0 + qk1 + v0))
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
            statistics=statistics_descriptor(statistics, size),
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
