"""FP8 backward attention on Hopper (sm_90) in Gluon: `backward` with scores and dp from FP8 operands.

The products with p and ds are 16-bit, and q, k and dout are read in both forms, for the reasons in `fp8_backward_fused`. One kernel
computes dq and one dk and dv, each bitwise repeatable, for head dims up to 256. FP8 tiles are released once dp is complete, and
16-bit tiles at the end of an iteration, so each form has its own stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tiles import HopperBackwardTile
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block_of_program
from flexattn.kernels_triton.gluon.block_ranges import key_block, query_block
from flexattn.kernels_triton.gluon.conditions import backward_unsupported_block_mask
from flexattn.kernels_triton.gluon.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.gluon.fp8_operands import load_descale
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import load_head, load_pair, origin_of, origin_of_head, pair_bytes, store_pair
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.hopper.backward_arguments import (
    DkdvArguments,
    DkdvBarriers,
    DkdvOrigins,
    DkdvTiles,
    DqArguments,
    DqBarriers,
    DqOrigins,
    DqTiles,
)
from flexattn.kernels_triton.hopper.backward_launch import Stages, launch_two_kernels
from flexattn.kernels_triton.hopper.backward_memory import allocate_dkdv, allocate_dq, rows_of_program
from flexattn.kernels_triton.hopper.dkdv_consumer import consume_dkdv
from flexattn.kernels_triton.hopper.dq_consumer import consume_dq
from flexattn.kernels_triton.hopper.fp8 import write_factors
from flexattn.kernels_triton.hopper.fp8_backward_operands import unsupported_operands
from flexattn.kernels_triton.runtime.launch import hopper_kernel


@dataclass(frozen=True, kw_only=True)
class Fp8BackwardTile(HopperBackwardTile):
    """A tile of the FP8 two-kernel backward on sm_90; no other tile was timed."""

    dq_stages: tuple[int, int] = (2, 2)  # in shared memory: of k and v in FP8, and of k in 16 bits
    # Stages of q and dout in FP8, then of dout and of q in 16 bits; the last two differ only if columns are split.
    dkdv_stages: tuple[int, int, int] = (2, 2, 2)


# With 128 keys, or at head dim 128 with 64 queries, modified scores would lack registers, and a block mask may have smaller blocks.
FP8_BACKWARD = (
    Fp8BackwardTile(head_dim_qk=64, head_dim_v=64, block_n=128, block_m=64),
    Fp8BackwardTile(head_dim_qk=64, head_dim_v=64, block_n=64, block_m=64),
    Fp8BackwardTile(head_dim_qk=128, head_dim_v=128, block_n=128, block_m=64),
    Fp8BackwardTile(head_dim_qk=128, head_dim_v=128, block_n=64, block_m=32),
    Fp8BackwardTile(head_dim_qk=192, head_dim_v=128, block_n=64, block_m=32),
    # q in 16 bits has most of an iteration to be loaded, so one stage costs least for it.
    Fp8BackwardTile(head_dim_qk=256, head_dim_v=256, block_n=64, block_m=64, dkdv_stages=(2, 2, 1), splits_columns=True),
)


@gluon.jit
def _dq_load(args: DqArguments, tiles: DqTiles, barriers: DqBarriers, block: Block, origins: DqOrigins, META: gl.constexpr):
    descriptors = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    Q_BYTES: gl.constexpr = pair_bytes(descriptors.q.first.block_type.nbytes, descriptors.q.second.block_type.nbytes, META.QK1)
    K_BYTES: gl.constexpr = pair_bytes(descriptors.k.first.block_type.nbytes, descriptors.k.second.block_type.nbytes, META.QK1)
    K16_BYTES: gl.constexpr = pair_bytes(
        descriptors.k16.first.block_type.nbytes, descriptors.k16.second.block_type.nbytes, META.QK1
    )
    full = barriers.q_full.index(0)
    mbarrier.expect(full, 2 * (Q_BYTES + descriptors.dout.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = first_row + consumer * ROWS
        load_pair(descriptors.q, origins.q, len_q, row, full, tiles.q, consumer, META)
        load_rows(descriptors.dout, origins.dout.token, len_q, row, origins.dout.head, 0, full, tiles.dout.index(consumer))
    s_factor = load_descale(args.descales.q, b, h, first_row, len_q)
    dp_factor = load_descale(args.descales.dout, b, h, first_row, len_q)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    for n_block in range(block.num_blocks):
        row = key_block(n_block, block.block_range, META)[0]
        descale_k = load_descale(args.descales.k, b, h_kv, row, len_kv)
        descale_v = load_descale(args.descales.v, b, h_kv, row, len_kv)
        stage8 = Stage(n_block, META.STAGES_SCORES)
        index8 = pipeline.index(stage8)
        full = barriers.scores_full.index(index8)
        pipeline.wait_empty(barriers.dp_empty, stage8)
        write_factors(tiles.factors, index8, s_factor * descale_k, dp_factor * descale_v)
        mbarrier.expect(full, K_BYTES + descriptors.v.block_type.nbytes)
        load_pair(descriptors.k, origins.k, len_kv, row, full, tiles.k, index8, META)
        load_rows(descriptors.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(index8))
        stage16 = Stage(n_block, META.STAGES_DS)
        index16 = pipeline.index(stage16)
        pipeline.wait_empty(barriers.ds_empty, stage16)
        mbarrier.expect(barriers.ds_full.index(index16), K16_BYTES)
        load_pair(descriptors.k16, origins.k16, len_kv, row, barriers.ds_full.index(index16), tiles.k16, index16, META)
    mbarrier.wait(barriers.dq_full.index(0), 0)
    if args.dq32.ptr is None:
        for consumer in gl.static_range(2):
            store_pair(descriptors.dq, origins.dq, len_q, first_row + consumer * ROWS, tiles.dq, consumer, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_bwd_dq_fp8_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    steps = args.steps
    tiles, barriers = allocate_dq(args, META)
    block, rows = rows_of_program(args, MODS, META)
    sequence, b, h, h_kv = block.sequence, block.b, block.h, block.h_kv
    origins = DqOrigins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        k16=origin_of(steps.k16, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
        dq=origin_of(steps.dq, sequence.start_q, h, b),
    )
    gl.warp_specialize(
        [
            (consume_dq, (args, tiles, barriers, block, rows, 0, MODS, META)),
            (consume_dq, (args, tiles, barriers, block, rows, 1, MODS, META)),
            (_dq_load, (args, tiles, barriers, block, origins, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_load(
    args: DkdvArguments, tiles: DkdvTiles, barriers: DkdvBarriers, block: Block, origins: DkdvOrigins, META: gl.constexpr
):
    descriptors = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    Q_BYTES: gl.constexpr = pair_bytes(descriptors.q.first.block_type.nbytes, descriptors.q.second.block_type.nbytes, META.QK1)
    Q16_BYTES: gl.constexpr = pair_bytes(
        descriptors.q16.first.block_type.nbytes, descriptors.q16.second.block_type.nbytes, META.QK1
    )
    K_BYTES: gl.constexpr = pair_bytes(descriptors.k.first.block_type.nbytes, descriptors.k.second.block_type.nbytes, META.QK1)
    BYTES: gl.constexpr = Q_BYTES + descriptors.dout.block_type.nbytes + descriptors.statistics.block_type.nbytes
    full = barriers.kv_full.index(0)
    mbarrier.expect(full, PARTS * (K_BYTES + descriptors.v.block_type.nbytes))
    for part in gl.static_range(PARTS):
        row = first_row + part * ROWS
        load_pair(descriptors.k, origins.k, len_kv, row, full, tiles.k, part, META)
        load_rows(descriptors.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(part))
    s_factor = load_descale(args.descales.k, b, h_kv, first_row, len_kv)
    dp_factor = load_descale(args.descales.v, b, h_kv, first_row, len_kv)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    position = first_queries(block, args.work)
    for m_block in range(block.num_blocks * block.heads):  # counts the blocks of all query heads
        row = query_block(position.n, block.block_range, META)[0]
        descale_q = load_descale(args.descales.q, b, h + position.head, row, len_q)
        descale_dout = load_descale(args.descales.dout, b, h + position.head, row, len_q)
        stage8 = Stage(m_block, META.STAGES_SCORES)
        index8 = pipeline.index(stage8)
        full = barriers.scores_full.index(index8)
        pipeline.wait_empty(barriers.dp_empty, stage8)
        write_factors(tiles.factors, index8, s_factor * descale_q, dp_factor * descale_dout)
        mbarrier.expect(full, BYTES)
        load_pair(descriptors.q, origin_of_head(origins.q, position.head), len_q, row, full, tiles.q, index8, META)
        load_head(descriptors.dout, origins.dout, position.head, len_q, row, full, tiles.dout.index(index8))
        head_statistics = block.first_statistics + position.head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, head_statistics, row, len_q, full, tiles.statistics.index(index8), META)
        stage16 = Stage(m_block, META.STAGES_P)
        index16 = pipeline.index(stage16)
        full = barriers.p_full.index(index16)
        pipeline.wait_empty(barriers.p_empty, stage16)
        mbarrier.expect(full, descriptors.dout16.block_type.nbytes + (0 if META.SPLITS_COLUMNS else Q16_BYTES))
        load_head(descriptors.dout16, origins.dout16, position.head, len_q, row, full, tiles.dout16.index(index16))
        if META.SPLITS_COLUMNS:
            stage16 = Stage(m_block, META.STAGES_DS)
            index16 = pipeline.index(stage16)
            full = barriers.ds_full.index(index16)
            pipeline.wait_empty(barriers.ds_empty, stage16)
            mbarrier.expect(full, Q16_BYTES)
        load_pair(descriptors.q16, origin_of_head(origins.q16, position.head), len_q, row, full, tiles.q16, index16, META)
        position = next_queries(position, block, args.work)
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    if args.dk32.ptr is None:
        for part in gl.static_range(PARTS):
            row = first_row + part * ROWS
            store_pair(descriptors.dk, origins.dk, len_kv, row, tiles.dk, part, META)
            store_rows(descriptors.dv, origins.dv.token, len_kv, row, origins.dv.head, 0, tiles.dv.index(part))
    tma.store_wait(0)


@hopper_kernel
def _attn_bwd_dkdv_fp8_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    steps = args.steps
    tiles, barriers = allocate_dkdv(args, META)
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
    gl.warp_specialize(
        [
            (consume_dkdv, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_dkdv, (args, tiles, barriers, block, 1, MODS, META)),
            (_dkdv_load, (args, tiles, barriers, block, origins, META)),
        ],
        [4, 1],
        [240, 24],
    )


def tile_of(problem: Problem) -> Fp8BackwardTile:
    """Returns the narrowest row for the head dims, at most 256; it has 64 keys if scores are modified."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    dim_qk, dim_v = x.q.shape[-1], x.v.shape[-1]
    return next(t for t in FP8_BACKWARD if dim_qk <= t.head_dim_qk and dim_v <= t.head_dim_v and t.block_n <= most)


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the kernels cannot run this problem's backward; None: they can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 256:
        return "its accumulators hold head dims up to 256"
    tile = tile_of(x)
    return unsupported_operands(x, out, dout) or backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def fp8_backward(call: Backward, tile: Fp8BackwardTile | None = None) -> None:
    """Launches the FP8 two-kernel backward of a call that is not `unsupported`; for the arguments see `fp8_fused_backward`."""
    tile = tile or tile_of(call.problem)
    k, k16 = tile.dq_stages
    q, dout16, q16 = tile.dkdv_stages
    dq_stages, dkdv_stages = Stages(scores=k, dp=k, p=0, ds=k16), Stages(scores=q, dp=q, p=dout16, ds=q16)
    launch_two_kernels((_attn_bwd_dq_fp8_hopper_kernel, _attn_bwd_dkdv_fp8_hopper_kernel), call, tile, dq_stages, dkdv_stages)
