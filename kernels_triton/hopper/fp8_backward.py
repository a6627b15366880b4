"""FP8 backward attention on Hopper (sm_90) in Gluon: `backward` with scores and dp from FP8 operands.

The products with p and ds are 16-bit, and q, k and dout are read in both forms, for the reasons in `fp8_backward_fused`. One kernel
computes dq and one dk and dv, each bitwise repeatable, for head dims up to 256. FP8 tiles are released once dp is complete, and
16-bit tiles at the end of an iteration, so each form has its own stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block_of_program, query_block_of_program, statistics_of_block
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.block_ranges import key_block, query_block
from flexattn.kernels_triton.gluon.conditions import QUERIES, backward_unsupported_block_mask
from flexattn.kernels_triton.gluon.descales import descales_of
from flexattn.kernels_triton.gluon.descriptors import load_rows, load_statistics, ragged_descriptor, step_of, store_rows
from flexattn.kernels_triton.gluon.fp8_operands import load_descale
from flexattn.kernels_triton.gluon.fp32_gradients import add_parts, fp32_rows, in_parts
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.gluon.pairs import (
    Pair,
    allocate_pair,
    load_head,
    load_pair,
    origin_of,
    origin_of_head,
    pair_bytes,
    pair_descriptor,
    store_pair,
)
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts
from flexattn.kernels_triton.hopper.backward_arguments import (
    DkdvArguments,
    DkdvOrigins,
    DqArguments,
    DqDescriptors,
    DqOrigins,
    DqSteps,
)
from flexattn.kernels_triton.hopper.backward_launch import Stages, backward_meta
from flexattn.kernels_triton.hopper.dkdv_consumer import DkdvConsumerBarriers, DkdvOperands, consume_dkdv
from flexattn.kernels_triton.hopper.dkdv_loader import arguments_of_dkdv
from flexattn.kernels_triton.hopper.dq_consumer import DqConsumerBarriers, DqOperands, DqRows, consume_dq
from flexattn.kernels_triton.hopper.fp8 import allocate_factors, write_factors
from flexattn.kernels_triton.hopper.fp8_backward_operands import copies_in_16_bits, unsupported_operands
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@dataclass(frozen=True, kw_only=True)
class Fp8BackwardTile:
    """A tile of the FP8 two-kernel backward on sm_90, like `HopperBackwardTile`; no other tile was timed."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys of an iteration of dq
    dq_stages: tuple[int, int] = (2, 2)  # in shared memory: of k and v in FP8, and of k in 16 bits
    block_m: int  # queries of an iteration of dk and dv
    # Stages of q and dout in FP8, then of dout and of q in 16 bits; the last two differ only if columns are split.
    dkdv_stages: tuple[int, int, int] = (2, 2, 2)
    splits_columns: bool = False  # the warpgroups split columns of dk and dv: a program has 64 keys instead of 128

    @property
    def keys(self) -> int:
        """Number of keys of a program of dk and dv."""
        return 64 if self.splits_columns else 128


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
def _dq_load(
    args: DqArguments, tiles: DqOperands, barriers: DqConsumerBarriers, block: Block, origins: DqOrigins, META: gl.constexpr
):
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
    STAGES: gl.constexpr = META.STAGES_SCORES
    STAGES16: gl.constexpr = META.STAGES_DS
    descriptors, steps = args.descriptors, args.steps
    q_tiles = allocate_pair(2, descriptors.q, META)
    k_tiles = allocate_pair(STAGES, descriptors.k, META)
    k16_tiles = allocate_pair(STAGES16, descriptors.k16, META)
    dq_tiles = k16_tiles
    if not META.SHARES_TILES and args.dq32.ptr is None:
        dq_tiles = allocate_pair(2, descriptors.dq, META)
    tiles = DqOperands(
        q=q_tiles,
        k=k_tiles,
        k16=k16_tiles,
        dq=dq_tiles,
        dout=allocate_tiles(2, descriptors.dout),
        v=allocate_tiles(STAGES, descriptors.v),
        factors=allocate_factors(STAGES),
    )
    barriers = DqConsumerBarriers(
        q_full=allocate_barriers(1, 1),
        scores_full=allocate_barriers(STAGES, 1),
        dp_full=None,
        dp_empty=allocate_barriers(STAGES, 2),
        ds_full=allocate_barriers(STAGES16, 1),
        ds_empty=allocate_barriers(STAGES16, 2),
        dq_full=allocate_barriers(1, 2),
    )
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
    rows = DqRows(
        head=head_of(args.scores, b, h, sequence.len_q, sequence.len_kv, block.band.shift, MODS, META),
        statistics_ptr=statistics_of_block(args, block, META),
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
    args: DkdvArguments, tiles: DkdvOperands, barriers: DkdvConsumerBarriers, block: Block, origins: DkdvOrigins, META: gl.constexpr
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
    STAGES: gl.constexpr = META.STAGES_SCORES
    STAGES16: gl.constexpr = META.STAGES_P
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    descriptors, steps = args.descriptors, args.steps
    DTYPE: gl.constexpr = descriptors.dout16.dtype
    q_tiles = allocate_pair(STAGES, descriptors.q, META)
    q16_tiles = allocate_pair(META.STAGES_DS, descriptors.q16, META)
    k_tiles = allocate_pair(PARTS, descriptors.k, META)
    dout_tiles = allocate_tiles(STAGES, descriptors.dout)
    dout16_tiles = allocate_tiles(STAGES16, descriptors.dout16)
    v_tiles = allocate_tiles(PARTS, descriptors.v)
    dk_tiles, dv_tiles = q16_tiles, dout16_tiles
    if not META.SHARES_TILES and args.dk32.ptr is None:
        dk_tiles = allocate_pair(PARTS, descriptors.dk, META)
        dv_tiles = allocate_tiles(PARTS, descriptors.dv)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], descriptors.statistics.layout)
    factors = allocate_factors(STAGES)
    full16 = allocate_barriers(STAGES16, 1)
    empty16 = allocate_barriers(STAGES16, 2)
    q16_full, q16_empty = full16, empty16
    if META.SPLITS_COLUMNS:
        q16_full = allocate_barriers(META.STAGES_DS, 1)
        q16_empty = allocate_barriers(META.STAGES_DS, 2)
    barriers = DkdvConsumerBarriers(
        scores_full=allocate_barriers(STAGES, 1),
        dp_full=None,
        dp_empty=allocate_barriers(STAGES, 2),
        p_full=full16,
        p_empty=empty16,
        ds_full=q16_full,
        ds_empty=q16_empty,
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
    tiles = DkdvOperands(
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
    x, dout, dq = call.problem, call.dout, call.dq
    tile = tile or tile_of(x)
    widths, v0, size = split_head_dim(tile.head_dim_qk), tile.head_dim_v, tile.block_m
    constants = partial(backward_meta, x, widths=widths, v0=v0, statistics=size)
    tiled = tiled_statistics(call, size)
    shared = shared_arguments(x, tiled) | {"descales": descales_of(x), "dropout": None}
    q16, k16, dout16 = copies_in_16_bits(x, dout, call.out.dtype)
    dq32 = fp32_rows(dq)

    def pair(x: Tensor, rows: int) -> Pair:
        return pair_descriptor(x, rows, widths)

    # As in the 16-bit backward: k in both forms and v for dq, q and dout in both for dk and dv.
    dq_work, programs = backward_work(x, QUERIES, "q", x.longest_kv * (3 * sum(widths) + v0))
    dq_arguments = DqArguments(
        descriptors=DqDescriptors(
            q=pair(x.q, 64),
            k=pair(x.k, tile.block_n),
            k16=pair(k16, tile.block_n),
            dq=pair(dq, 64) if dq32 is None else None,
            dout=ragged_descriptor(dout, 64, v0),
            v=ragged_descriptor(x.v, tile.block_n, v0),
        ),
        statistics_ptr=tiled.statistics,
        work=dq_work,
        steps=DqSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), k16=step_of(k16), v=step_of(x.v), dq=step_of(dq)),
        lists=x.lists("kv"),
        dq32=dq32,
        **shared,
    )
    stages, stages16 = tile.dq_stages
    dq_meta = constants(
        (QUERIES, tile.block_n),
        Stages(scores=stages, dp=stages, p=0, ds=stages16),
        shares_tiles=tile.block_n == ROWS.value and stages16 >= 2,
    )
    dq_tile = Tile(QUERIES, tile.block_n, 4, 2)
    launch(_attn_bwd_dq_fp8_hopper_kernel, programs, x.device, dq_tile, (dq_arguments, x.mods, dq_meta))
    parts = head_parts(x, tile.keys)
    call_in_parts = in_parts(call, parts)
    dkdv_work, programs = backward_work(x, tile.keys, "kv", x.longest_q * 6 * (sum(widths) + v0), parts=parts)
    dkdv_arguments = arguments_of_dkdv(call_in_parts, tiled, dkdv_work, (size, widths, v0))
    descriptors, steps = dkdv_arguments.descriptors, dkdv_arguments.steps
    dkdv_arguments = dkdv_arguments._replace(
        descriptors=descriptors._replace(q16=pair(q16, size), dout16=ragged_descriptor(dout16, size, v0)),
        steps=steps._replace(q16=step_of(q16), dout16=step_of(dout16)),
        descales=shared["descales"],
        dropout=None,
    )
    stages, dout16_stages, q16_stages = tile.dkdv_stages
    dkdv_meta = constants(
        (size, tile.keys),
        Stages(scores=stages, dp=stages, p=dout16_stages, ds=q16_stages),
        shares_tiles=size == ROWS.value and (tile.splits_columns or min(dout16_stages, q16_stages) >= 2),
        splits_columns=tile.splits_columns,
    )
    dkdv_tile = Tile(size, tile.keys, 4, 2)
    launch(_attn_bwd_dkdv_fp8_hopper_kernel, programs, x.device, dkdv_tile, (dkdv_arguments, x.mods, dkdv_meta))
    add_parts(call, call_in_parts, parts)
    zero_padding_of_gradients(call)
