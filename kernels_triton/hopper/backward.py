"""Two-kernel backward attention on Hopper (sm_90) in Gluon: one kernel for dq, one for dk and dv, each bitwise repeatable.

`backward_fused` is faster, but its dq is not deterministic. In both kernels a warp loads by TMA, and two warpgroups compute 64 rows
of the gradient each. For dk and dv at head dim 256, each computes half of the columns of 64 rows. Calls that
`conditions.backward_unsupported` rejects run on the portable kernels.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import HopperBackwardTile, split_head_dim
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block_of_program, query_block_of_program, statistics_of_block
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.block_ranges import key_block
from flexattn.kernels_triton.gluon.conditions import QUERIES
from flexattn.kernels_triton.gluon.descriptors import load_rows, ragged_descriptor, step_of
from flexattn.kernels_triton.gluon.fp32_gradients import add_parts, fp32_rows, in_parts
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.gluon.pairs import Pair, allocate_pair, load_pair, origin_of, pair_bytes, pair_descriptor, store_pair
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DqArguments, DqDescriptors, DqSteps
from flexattn.kernels_triton.hopper.backward_launch import Stages, backward_meta
from flexattn.kernels_triton.hopper.conditions import backward_tile
from flexattn.kernels_triton.hopper.dkdv_consumer import DkdvConsumerBarriers, DkdvOperands, consume_dkdv
from flexattn.kernels_triton.hopper.dkdv_loader import DkdvBarriers, DkdvTiles, arguments_of_dkdv, load_dkdv
from flexattn.kernels_triton.hopper.dq_consumer import DqConsumerBarriers, DqOperands, DqRows, consume_dq
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


class DqTiles(NamedTuple):
    """In shared memory: q and dout by consumer, k and v by stage."""

    q: Pair
    dout: gl.shared_memory_descriptor
    k: Pair
    v: gl.shared_memory_descriptor


class DqBarriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor


class Exchanges(NamedTuple):
    """In shared memory: results of one warpgroup for both, of the last two iterations."""

    p: gl.shared_memory_descriptor | None
    ds: gl.shared_memory_descriptor | None


@gluon.jit
def _dq_load(args: DqArguments, tiles: DqTiles, barriers: DqBarriers, block: Block, META: gl.constexpr):
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    q = origin_of(steps.q, sequence.start_q, h, b)
    dout = origin_of(steps.dout, sequence.start_q, h, b)
    k = origin_of(steps.k, sequence.start_kv, h_kv, b)
    v = origin_of(steps.v, sequence.start_kv, h_kv, b)
    dq = origin_of(steps.dq, sequence.start_q, h, b)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    full = barriers.q_full.index(0)
    Q_BYTES: gl.constexpr = pair_bytes(descriptors.q.first.block_type.nbytes, descriptors.q.second.block_type.nbytes, META.QK1)
    K_BYTES: gl.constexpr = pair_bytes(descriptors.k.first.block_type.nbytes, descriptors.k.second.block_type.nbytes, META.QK1)
    mbarrier.expect(full, 2 * (Q_BYTES + descriptors.dout.block_type.nbytes))
    for consumer in gl.static_range(2):
        row = block.first_row + consumer * ROWS
        load_pair(descriptors.q, q, len_q, row, full, tiles.q, consumer, META)
        load_rows(descriptors.dout, dout.token, len_q, row, dout.head, 0, full, tiles.dout.index(consumer))
    for n_block in range(block.num_blocks):
        row = key_block(n_block, block.block_range, META)[0]
        k_stage = Stage(n_block, META.STAGES_SCORES)
        k_index = pipeline.index(k_stage)
        full = barriers.k_full.index(k_index)
        pipeline.wait_empty(barriers.k_empty, k_stage)
        mbarrier.expect(full, K_BYTES)
        load_pair(descriptors.k, k, len_kv, row, full, tiles.k, k_index, META)
        v_stage = Stage(n_block, META.STAGES_DP)
        v_index = pipeline.index(v_stage)
        pipeline.wait_empty(barriers.v_empty, v_stage)
        mbarrier.expect(barriers.v_full.index(v_index), descriptors.v.block_type.nbytes)
        load_rows(descriptors.v, v.token, len_kv, row, v.head, 0, barriers.v_full.index(v_index), tiles.v.index(v_index))
    mbarrier.wait(barriers.dq_full.index(0), 0)
    if args.dq32.ptr is None:
        for consumer in gl.static_range(2):
            store_pair(descriptors.dq, dq, len_q, block.first_row + consumer * ROWS, tiles.q, consumer, META)
    tma.store_wait(0)


@gluon.jit
def _dq_compute(
    args: DqArguments,
    tiles: DqTiles,
    barriers: DqBarriers,
    block: Block,
    rows: DqRows,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    operands = DqOperands(q=tiles.q, dout=tiles.dout, k=tiles.k, v=tiles.v, k16=tiles.k, dq=tiles.q, factors=None)
    consumer_barriers = DqConsumerBarriers(
        q_full=barriers.q_full,
        scores_full=barriers.k_full,
        dp_full=barriers.v_full,
        dp_empty=barriers.v_empty,
        ds_full=None,
        ds_empty=barriers.k_empty,
        dq_full=barriers.dq_full,
    )
    consume_dq(args, operands, consumer_barriers, block, rows, CONSUMER, MODS, META)


@hopper_kernel
def _attn_bwd_dq_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    tiles = DqTiles(
        q=allocate_pair(2, descriptors.q, META),
        dout=allocate_tiles(2, descriptors.dout),
        k=allocate_pair(SCORES, descriptors.k, META),
        v=allocate_tiles(DP, descriptors.v),
    )
    barriers = DqBarriers(
        q_full=allocate_barriers(1, 1),
        k_full=allocate_barriers(SCORES, 1),
        k_empty=allocate_barriers(SCORES, 2),
        v_full=allocate_barriers(DP, 1),
        v_empty=allocate_barriers(DP, 2),
        dq_full=allocate_barriers(1, 2),
    )
    block = query_block_of_program(args, META)
    sequence = block.sequence
    rows = DqRows(
        head=head_of(args.scores, block.b, block.h, sequence.len_q, sequence.len_kv, block.band.shift, MODS, META),
        statistics_ptr=statistics_of_block(args, block, META),
    )
    gl.warp_specialize(
        [
            (_dq_compute, (args, tiles, barriers, block, rows, 0, MODS, META)),
            (_dq_compute, (args, tiles, barriers, block, rows, 1, MODS, META)),
            (_dq_load, (args, tiles, barriers, block, META)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkdv_compute(
    args: DkdvArguments,
    tiles: DkdvTiles,
    exchanges: Exchanges,
    barriers: DkdvBarriers,
    block: Block,
    CONSUMER: gl.constexpr,
    MODS: gl.constexpr,
    META: gl.constexpr,
):
    operands = DkdvOperands(
        q=tiles.q,
        dout=tiles.dout,
        k=tiles.k,
        v=tiles.v,
        q16=tiles.q,
        dout16=tiles.dout,
        dk=tiles.k,
        dv=tiles.v,
        statistics=tiles.statistics,
        factors=None,
        p=exchanges.p,
        ds=exchanges.ds,
    )
    consumer_barriers = DkdvConsumerBarriers(
        kv_full=barriers.kv_full,
        scores_full=barriers.q_full,
        dp_full=barriers.dout_full,
        dp_empty=barriers.dout_empty,
        p_full=None,
        p_empty=None,
        ds_full=None,
        ds_empty=barriers.q_empty,
        dkdv_full=barriers.dkdv_full,
    )
    consume_dkdv(args, operands, consumer_barriers, block, CONSUMER, MODS, META)


@hopper_kernel
def _attn_bwd_dkdv_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.dout.dtype
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    tiles = DkdvTiles(
        q=allocate_pair(SCORES, descriptors.q, META),
        dout=allocate_tiles(DP, descriptors.dout),
        k=allocate_pair(PARTS, descriptors.k, META),
        v=allocate_tiles(PARTS, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [SCORES, 2 * BLOCK_M], descriptors.statistics.layout),
    )
    barriers = DkdvBarriers(
        q_full=allocate_barriers(SCORES, 1),
        q_empty=allocate_barriers(SCORES, 2),
        dout_full=allocate_barriers(DP, 1),
        dout_empty=allocate_barriers(DP, 2),
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    block = key_block_of_program(args, META)
    exchanges = Exchanges(p=None, ds=None)
    if META.SPLITS_COLUMNS:
        HALF: gl.constexpr = BLOCK_M // 2
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], DTYPE)
        shared_p = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        shared_ds = gl.allocate_shared_memory(DTYPE, [4, 64, HALF], EXCHANGE)
        exchanges = Exchanges(p=shared_p, ds=shared_ds)
    gl.warp_specialize(
        [
            (_dkdv_compute, (args, tiles, exchanges, barriers, block, 0, MODS, META)),
            (_dkdv_compute, (args, tiles, exchanges, barriers, block, 1, MODS, META)),
            (load_dkdv, (args, tiles, barriers, block, META)),
        ],
        [4, 1],
        [240, 24],
    )


def hopper_backward(call: Backward, tile: HopperBackwardTile | None = None) -> None:
    """Launches the two-kernel backward of a call that `backward_unsupported` does not reject.

    `score_gradients.bias_and_capture_gradients` computes the gradients of a bias and of captures.
    """
    x, dout, dq = call.problem, call.dout, call.dq
    dq32 = fp32_rows(dq)
    tile = tile or backward_tile(x)
    widths, v0, size = split_head_dim(tile.head_dim_qk), tile.head_dim_v, tile.block_m
    constants = partial(backward_meta, x, widths=widths, v0=v0, statistics=size)
    tiled = tiled_statistics(call, size)
    shared = shared_arguments(x, tiled) | {"dropout": x.dropout}
    head_dims = sum(widths) + v0
    # Operands that a head reads repeatedly: k and v for dq, q and dout for dk and dv (counted twice, to leave room).
    dq_work, programs = backward_work(x, QUERIES, "q", x.longest_kv * 2 * head_dims)
    dq_arguments = DqArguments(
        descriptors=DqDescriptors(
            q=pair_descriptor(x.q, 64, widths),
            dout=ragged_descriptor(dout, 64, v0),
            k=pair_descriptor(x.k, tile.block_n, widths),
            v=ragged_descriptor(x.v, tile.block_n, v0),
            dq=pair_descriptor(dq, 64, widths) if dq32 is None else None,
        ),
        steps=DqSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dq=step_of(dq)),
        statistics_ptr=tiled.statistics,
        work=dq_work,
        lists=x.lists("kv"),
        dq32=dq32,
        **shared,
    )
    dq_meta = constants((QUERIES, tile.block_n), Stages(scores=2, dp=tile.v_stages, p=0, ds=2))
    dq_tile = Tile(QUERIES, tile.block_n, 4, 2)
    launch(_attn_bwd_dq_hopper_kernel, programs, x.device, dq_tile, (dq_arguments, x.mods, dq_meta))
    parts = head_parts(x, tile.keys)
    call_in_parts = in_parts(call, parts)
    dkdv_work, programs = backward_work(x, tile.keys, "kv", x.longest_q * 4 * head_dims, parts=parts)
    dkdv_arguments = arguments_of_dkdv(call_in_parts, tiled, dkdv_work, (size, widths, v0))
    dkdv_meta = constants((size, tile.keys), Stages(scores=2, dp=2, p=2, ds=2), splits_columns=tile.splits_columns)
    dkdv_tile = Tile(size, tile.keys, 4, 2)
    launch(_attn_bwd_dkdv_hopper_kernel, programs, x.device, dkdv_tile, (dkdv_arguments, x.mods, dkdv_meta))
    add_parts(call, call_in_parts, parts)
    zero_padding_of_gradients(call)
