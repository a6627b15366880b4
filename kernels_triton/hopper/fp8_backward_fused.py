"""Backward attention in FP8 on Hopper (sm_90) in Gluon, in one kernel: `backward_fused` with scores and dp from FP8 operands.

The products with p and ds are 16-bit. In FP8 each of theirs would need the largest of a tile's rows, a scale, and a sum of its own
that is added in fp32, as Hopper adds FP8 products up in some 14 bits: that takes longer than the tensor cores save. So no operand
has to come transposed, and nothing that was computed here is rounded to FP8. q, k and dout are read in both forms; the half one is
what the FP8 one stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Lengths, Scores
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.primitives import (
    LOG2E,
    is_any_large,
    logits,
    relative_to_lse,
    through_mods,
)
from flexattn.kernels_triton.common.problem import Backward, Problem, with_features
from flexattn.kernels_triton.common.work_table import zero_padding
from flexattn.kernels_triton.hopper.backward_blocks import (
    Block,
    LargeLse,
    backward_work,
    first_query_head,
    head_at,
    key_block_of_program,
    next_query_block,
)
from flexattn.kernels_triton.hopper.barriers import (
    BOTH,
    LAST,
    READ,
    TURN,
    WRITTEN,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
)
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.conditions import KEYS, fused_slower, unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import (
    Step,
    load_rows,
    load_statistics,
    ragged_descriptor,
    statistics_descriptor,
    step_of,
    store_rows,
)
from flexattn.kernels_triton.hopper.dq_sums import DqRing, add_dq, convert_dq, dq_product, hand_over_dq, write_dq
from flexattn.kernels_triton.hopper.fp8 import (
    BackwardDescales,
    allocate_factors,
    load_descale,
    read_factor,
    write_factor,
)
from flexattn.kernels_triton.hopper.fp8_backward_operands import (
    backward_descales,
    copies_in_16_bits,
    is_plain,
    unsupported_operands,
)
from flexattn.kernels_triton.hopper.masking import (
    apply_mask_mod,
    first_uncut_query,
    hide_queries_past_the_end,
    mask_queries_and_end,
)
from flexattn.kernels_triton.hopper.operands import ROWS, opaque_zero
from flexattn.kernels_triton.hopper.pairs import Origin, allocate_tiles, origin_of
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers, release, wait_empty
from flexattn.kernels_triton.hopper.tile_scheduler import Work
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch


class Fp8FusedTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in one kernel: it serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    queries: int  # of an iteration, and of a tile of statistics and of dq
    dq_stages: int  # of dq in shared memory


# bench/results/fp8_one_pass_orders_h200.json. With 128 queries modified scores would spill, and a block mask may have fewer.
FP8_FUSED = (Fp8FusedTile(64, 128, 1), Fp8FusedTile(64, 64, 2), Fp8FusedTile(128, 64, 1))


@with_features
class Fp8FusedMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DQ_STAGES: int


class Descriptors(NamedTuple):
    q: Any
    q16: Any
    dout: Any
    dout16: Any
    k: Any
    k16: Any
    v: Any
    statistics: Any
    dq: Any
    dk: Any
    dv: Any


class Steps(NamedTuple):
    q: Step
    q16: Step
    dout: Step
    dout16: Step
    k: Step
    k16: Step
    v: Step
    dk: Step
    dv: Step


class Arguments(NamedTuple):
    descriptors: Descriptors
    tiles_of_statistics: int  # of a head
    large: LargeLse
    work: Work
    descales: BackwardDescales
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: Steps
    scores: Scores
    lists: BlockMaskLists | None  # of query blocks


class Tiles(NamedTuple):
    """In shared memory: q, dout, the statistics and the factors by stage, k and v by consumer."""

    q: Any
    q16: Any
    dout: Any
    dout16: Any
    k: Any
    k16: Any
    v: Any
    statistics: Any
    factors: Any  # of each block of queries those of its scores and of its dp
    ds: Any
    dq: Any


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    dout_full: Any
    kv_full: Any
    dq_full: Any
    dq_empty: Any
    dkdv_full: Any


class Buffers(NamedTuple):
    tiles: Tiles
    barriers: Barriers


class Origins(NamedTuple):
    """First rows of a program's heads."""

    q: Origin
    q16: Origin
    dout: Origin
    dout16: Origin
    k: Origin
    k16: Origin
    v: Origin
    dk: Origin
    dv: Origin


@gluon.jit
def _load(buffers: Buffers, block: Block, args: Arguments, origins: Origins, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    full = barriers.kv_full.index(0)
    KV_BYTES: gl.constexpr = of.k.block_type.nbytes + of.v.block_type.nbytes + of.k16.block_type.nbytes
    Q_BYTES: gl.constexpr = of.q.block_type.nbytes + of.statistics.block_type.nbytes
    DOUT_BYTES: gl.constexpr = of.dout.block_type.nbytes + of.dout16.block_type.nbytes + of.q16.block_type.nbytes
    mbarrier.expect(full, 2 * KV_BYTES)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        load_rows(of.k, origins.k.token, len_kv, row, origins.k.head, 0, full, tiles.k.index(part))
        load_rows(of.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(part))
        load_rows(of.k16, origins.k16.token, len_kv, row, origins.k16.head, 0, full, tiles.k16.index(part))
    scale_row = gl.minimum(first_row, gl.maximum(len_kv - 1, 0))
    s_factor = load_descale(args.descales.k, b, h_kv, scale_row)
    dp_factor = load_descale(args.descales.v, b, h_kv, scale_row)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = m_block % STAGES
        scale_row = gl.minimum(row, len_q - 1)
        descale_q = load_descale(args.descales.q, b, h + head, scale_row)
        descale_dout = load_descale(args.descales.dout, b, h + head, scale_row)
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, m_block, STAGES)
        # A masked score is -inf, and -inf * 0 would be NaN.
        write_factor(tiles.factors, 2 * stage, gl.maximum(s_factor * descale_q, 1e-37))
        write_factor(tiles.factors, 2 * stage + 1, dp_factor * descale_dout)
        mbarrier.expect(full, Q_BYTES)
        load_rows(of.q, origins.q.token, len_q, row, origins.q.head + head, 0, full, tiles.q.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        full = barriers.dout_full.index(stage)
        mbarrier.expect(full, DOUT_BYTES)
        load_rows(of.dout, origins.dout.token, len_q, row, origins.dout.head + head, 0, full, tiles.dout.index(stage))
        load_rows(of.dout16, origins.dout16.token, len_q, row, origins.dout16.head + head, 0, full, tiles.dout16.index(stage))
        load_rows(of.q16, origins.q16.token, len_q, row, origins.q16.head + head, 0, full, tiles.q16.index(stage))
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        store_rows(of.dk, origins.dk.token, len_kv, row, origins.dk.head, 0, tiles.k16.index(part))
        # A tile's first rows are what is needed.
        store_rows(of.dv, origins.dv.token, len_kv, row, origins.dv.head, 0, tiles.dout16.index(part).slice(0, ROWS, 2))
    tma.store_wait(0)


@gluon.jit
def _score_product(buffers: Buffers, stage, phase, is_there, zero, CONSUMER: gl.constexpr, META: gl.constexpr):
    # With the block of queries in `stage`; transposed.
    BLOCK_M: gl.constexpr = META.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    mbarrier.wait(buffers.barriers.q_full.index(stage), phase, pred=is_there)
    own_k = buffers.tiles.k.index(zero + CONSUMER).reshape([ROWS, META.DIM])
    q = buffers.tiles.q.index(stage).reshape([BLOCK_M, META.DIM])
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    return warpgroup_mma(own_k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute(buffers: Buffers, block: Block, args: Arguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    b, len_q, band, large = block.b, block.sequence.len_q, block.band, block.large
    scores, group_size = args.scores, args.work.group_size
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    DTYPE: gl.constexpr = tiles.k16.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DIM: gl.constexpr = META.DIM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    dk = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    dv = gl.zeros([ROWS, DIM], gl.float32, layout=DK)
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    block_columns = gl.arange(0, BLOCK_M, layout=COLUMNS)
    uncut_from = first_uncut_query(n_start, band, META)
    # The products of an iteration, and what runs under them: dp | p | dv | ds | dk, dq of the iteration before, the next scores.
    # Half of dq is a sum over the other warpgroup's ds too, which is there an iteration later; before the first there is 0. While
    # one warpgroup computes p, the other multiplies.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named_barrier_arrive_at(WRITTEN + 2 + CONSUMER, BOTH)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    at, values = first_query_head(block, scores, MODS, META)
    iterations = block.num_blocks * group_size
    kq = zeros
    if iterations > 0:
        named_barrier_arrive_at(READ + CONSUMER, BOTH)
        if CONSUMER == 1:
            named_barrier_arrive_at(TURN, BOTH)  # the first warpgroup begins
        first = _score_product(buffers, 0, 0, iterations > 0, opaque_zero(iterations), CONSUMER, META)
        kq = warpgroup_mma_wait(0, deps=[first])
    for m_block in range(iterations):  # of all query heads
        row, is_full = query_block(at.n, block.block_range, META)
        columns = row + block_columns
        zero = opaque_zero(m_block)
        stage = m_block % STAGES
        phase = (m_block // STAGES) & 1
        here = (m_block & 1) * 2
        # Two barriers in iteration: with one, a warpgroup that is ahead could arrive twice before the other has waited once.
        last = ((m_block + 1) & 1) * 2
        own_v = tiles.v.index(zero + CONSUMER).reshape([ROWS, DIM])
        dout = tiles.dout.index(stage).reshape([BLOCK_M, DIM])
        mbarrier.wait(barriers.dout_full.index(stage), phase)
        dp = warpgroup_mma(own_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
        named_barrier_sync_at(TURN + CONSUMER + zero, BOTH)
        head = head_at(at, values, block, scores, META)
        s_factor = read_factor(tiles.factors, 2 * stage, COLUMNS)
        if not META.IS_PLAIN:
            kq = kq * s_factor
        s, factor, cap_tanh, score = logits(kq, columns[None, :], rows[:, None], args.scores.scale, head, MODS, META)
        if META.IS_PLAIN:
            factor = s_factor
        is_cut = row < uncut_from  # a scalar branch: only blocks on an edge pay for the mask
        if META.HAS_LEFT:
            is_cut = is_cut | (row + BLOCK_M > n_start - band.shift + band.left + 1)
        if is_cut | is_any_large(large, META):
            s = mask_queries_and_end(s, rows, columns, band, META)
            if META.IS_UNBOUNDED:
                of_queries = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
                s = relative_to_lse(s, of_queries[None, :], large, b, at.h, columns[None, :], len_q, META)
        s = apply_mask_mod(s, columns[None, :], rows[:, None], is_full, head, MODS, META)
        s = hide_queries_past_the_end(s, row, columns, len_q, MODS, META)
        minus_lse = tiles.statistics.index(stage).slice(0, BLOCK_M).load(COLUMNS)
        p = gl.exp2(s * factor + minus_lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), LEFT)
        if CONSUMER == 0:
            named_barrier_arrive_at(TURN + 1 + zero, BOTH)
        elif m_block + 1 < iterations:
            named_barrier_arrive_at(TURN + zero, BOTH)
        sum_of_dout = warpgroup_mma(p16, tiles.dout16.index(stage).reshape([BLOCK_M, DIM]), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        minus_delta = tiles.statistics.index(stage).slice(BLOCK_M, BLOCK_M).load(COLUMNS)
        dp_factor = read_factor(tiles.factors, 2 * stage + 1, COLUMNS)
        dlogit = p * (dp * dp_factor + minus_delta[None, :])
        dscore = through_mods(dlogit, cap_tanh, score, columns[None, :], rows[:, None], head, MODS, META)
        ds = dscore.to(DTYPE)
        # The other warpgroup's dq of the iteration before the last has read what is overwritten.
        named_barrier_sync_at(READ + 1 - CONSUMER + here, BOTH)
        tiles.ds.index(here + CONSUMER).store(ds)
        ds16 = gl.convert_layout(ds, LEFT)
        dv, p16 = warpgroup_mma_wait(0, deps=[sum_of_dout, p16])
        sum_of_q = warpgroup_mma(ds16, tiles.q16.index(stage).reshape([BLOCK_M, DIM]), dk, is_async=True)
        fence_async_shared()  # under the product
        named_barrier_arrive_at(WRITTEN + CONSUMER + here, BOTH)
        named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
        sum_of_k = dq_product(tiles.ds, tiles.k16, last, zero, CONSUMER, META)
        # The next iteration's scores under these; in the last iteration its own again, for nothing.
        is_there = m_block + 1 < iterations
        next_stage = gl.where(is_there, (m_block + 1) % STAGES, stage)
        next_phase = ((m_block + 1) // STAGES) & 1
        next_scores = _score_product(buffers, next_stage, next_phase, is_there, zero, CONSUMER, META)
        dk, ds16 = warpgroup_mma_wait(3, deps=[sum_of_q, ds16])
        release(barriers.q_empty, m_block, STAGES)
        dq = warpgroup_mma_wait(1, deps=[sum_of_k])
        if is_there:
            named_barrier_arrive_at(READ + CONSUMER + last, BOTH)
        if m_block > 0:
            write_dq(dq, ring, m_block - 1, CONSUMER, META)
            hand_over_dq(ring, m_block - 1, META)
        kq = warpgroup_mma_wait(0, deps=[next_scores])
        at, values = next_query_block(at, values, block, group_size, scores, MODS, META)
    last = ((iterations + 1) & 1) * 2
    named_barrier_sync_at(WRITTEN + 1 - CONSUMER + last, BOTH)
    if iterations > 0:
        sum_of_k = dq_product(tiles.ds, tiles.k16, last, 0, CONSUMER, META)
        dq = warpgroup_mma_wait(0, deps=[sum_of_k])
        write_dq(dq, ring, iterations - 1, CONSUMER, META)
        hand_over_dq(ring, iterations - 1, META)
    named_barrier_sync(LAST, BOTH)  # k and dout in 16 bits were the other warpgroup's too; now they are no longer needed
    tiles.k16.index(CONSUMER).reshape([ROWS, DIM]).store((dk * args.scores.scale).to(DTYPE))
    tiles.dout16.index(CONSUMER).reshape([BLOCK_M, DIM]).slice(0, ROWS, 0).store(dv.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


@hopper_kernel
def _attn_bwd_fused_fp8_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    of = args.descriptors
    DTYPE: gl.constexpr = of.k16.dtype
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    tiles = Tiles(
        q=allocate_tiles(STAGES, of.q),
        q16=allocate_tiles(STAGES, of.q16),
        dout=allocate_tiles(STAGES, of.dout),
        dout16=allocate_tiles(STAGES, of.dout16),
        k=allocate_tiles(2, of.k),
        k16=allocate_tiles(2, of.k16),
        v=allocate_tiles(2, of.v),
        statistics=gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], of.statistics.layout),
        factors=allocate_factors(STAGES),
        ds=gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE),
        dq=allocate_tiles(2 * META.DQ_STAGES, of.dq),
    )
    barriers = Barriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=allocate_barriers(STAGES, 2),
        dout_full=allocate_barriers(STAGES, 1),
        kv_full=allocate_barriers(1, 1),
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    buffers = Buffers(tiles=tiles, barriers=barriers)
    steps = args.steps
    block = key_block_of_program(args, META)
    sequence, b, h, h_kv = block.sequence, block.b, block.h, block.h_kv
    origins = Origins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        q16=origin_of(steps.q16, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        dout16=origin_of(steps.dout16, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        k16=origin_of(steps.k16, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
        dk=origin_of(steps.dk, sequence.start_kv, h_kv, b),
        dv=origin_of(steps.dv, sequence.start_kv, h_kv, b),
    )
    ring = DqRing(tiles=tiles.dq, full=barriers.dq_full, empty=barriers.dq_empty)
    gl.warp_specialize(
        [
            (_compute, (buffers, block, args, 0, MODS, META)),
            (_compute, (buffers, block, args, 1, MODS, META)),
            (_load, (buffers, block, args, origins, META)),
            (add_dq, (of.dq, ring, block, args.tiles_of_statistics, args.work.group_size, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def tile_of(problem: Problem) -> Fp8FusedTile:
    """The narrowest row that serves the head dims, which are at most 128; of 64 queries where scores are more than a product."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    width = max(x.q.shape[-1], x.v.shape[-1])
    return next(tile for tile in FP8_FUSED if width <= tile.head_dim and tile.queries <= most)


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the kernel cannot run this problem's backward; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "its accumulators hold head dims up to 128"
    return unsupported_operands(x, out, dout) or unsupported_block_mask(x, (tile_of(x).queries, KEYS))


def slower(problem: Problem) -> str | None:
    """Returns why the fused backward in 16 bits would be slower than others: this is faster where that is, as that needs a
    dequantisation first; None: it would not."""
    return fused_slower(problem)


def fp8_fused_backward(call: Backward, tile: Fp8FusedTile | None = None) -> None:
    """Launches the fused backward in FP8, of calls that are not `unsupported`.

    call: q, k, v and dout in FP8, with the descales of them; dq, dk and dv in 16 bits. The sums of dout with out
        are of what dout stands for, as dp is: else a query that sees one key would get a gradient.
    """
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    tile = tile or tile_of(x)
    dim, size = tile.head_dim, tile.queries
    head_dim = x.q.shape[-1]
    statistics, tiles, large = tiled_statistics(call, size)
    dq_sums = torch.zeros((statistics.numel() // 2, head_dim), dtype=torch.float32, device=x.device)
    has_lengths = x.cu_seqlens_q is not None
    dq_block = [ROWS.value, dim * size // KEYS]  # a warpgroup's
    dq_layout = gl.NVMMASharedLayout.get_default_for(dq_block, gl.float32)
    bytes_per_head = 12 * dim * max(x.longest_q, x.longest_kv)  # about: q and dout in both forms, dq in fp32
    work, programs = backward_work(x, KEYS, "kv", bytes_per_head)
    q16, k16, dout16 = copies_in_16_bits(x, dout, dq.dtype)
    meta = Fp8FusedMeta(
        **x.features._asdict(),
        IS_PLAIN=is_plain(x.features),
        BLOCK_M=size,
        BLOCK_N=KEYS,
        DIM=dim,
        DQ_STAGES=tile.dq_stages,
    )
    arguments = Arguments(
        descriptors=Descriptors(
            q=ragged_descriptor(x.q, size, dim),
            q16=ragged_descriptor(q16, size, dim),
            dout=ragged_descriptor(dout, size, dim),
            dout16=ragged_descriptor(dout16, size, dim),
            k=ragged_descriptor(x.k, ROWS.value, dim),
            k16=ragged_descriptor(k16, ROWS.value, dim),
            v=ragged_descriptor(x.v, ROWS.value, dim),
            statistics=statistics_descriptor(statistics, size),
            dq=TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], dq_block, dq_layout),
            dk=ragged_descriptor(dk, ROWS.value, dim),
            dv=ragged_descriptor(dv, ROWS.value, dim),
        ),
        tiles_of_statistics=tiles,
        large=LargeLse(is_any_ptr=large.is_any, lse_ptr=large.lse),
        work=work,
        descales=backward_descales(x),
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        band=x.band,
        steps=Steps(
            q=step_of(x.q),
            q16=step_of(q16),
            dout=step_of(dout),
            dout16=step_of(dout16),
            k=step_of(x.k),
            k16=step_of(k16),
            v=step_of(x.v),
            dk=step_of(dk),
            dv=step_of(dv),
        ),
        scores=x.scores,
        lists=x.lists("q"),
    )
    launch(_attn_bwd_fused_fp8_hopper_kernel, programs, x.device, Tile(size, KEYS, 4, 2), (arguments, x.mods, meta))
    convert_dq(x, dq_sums, tiles, size, dq)
    if has_lengths:
        zero_padding(x, dq, "q")
        zero_padding(x, dk, "kv")
        zero_padding(x, dv, "kv")
