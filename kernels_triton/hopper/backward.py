"""Two-kernel backward attention on Hopper (sm_90) in Gluon: one kernel for dq, one for dk and dv, each bitwise repeatable.

`backward_fused` is faster, but its dq is not deterministic. In both kernels a warp loads by TMA, and two warpgroups compute 64 rows
of the gradient each. For dk and dv at head dim 256, each computes half of the columns of 64 rows. Calls that
`conditions.backward_unsupported` rejects run on the portable kernels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HopperBackwardTile
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, key_block_of_program
from flexattn.kernels_triton.gluon.block_ranges import key_block
from flexattn.kernels_triton.gluon.descriptors import load_rows
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import load_pair, origin_of, pair_bytes, store_pair
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DqArguments, DqBarriers, DqTiles
from flexattn.kernels_triton.hopper.backward_launch import Stages, launch_two_kernels
from flexattn.kernels_triton.hopper.backward_memory import allocate_dkdv, allocate_dq, rows_of_program
from flexattn.kernels_triton.hopper.conditions import backward_tile
from flexattn.kernels_triton.hopper.dkdv_consumer import consume_dkdv
from flexattn.kernels_triton.hopper.dkdv_loader import load_dkdv
from flexattn.kernels_triton.hopper.dq_consumer import consume_dq
from flexattn.kernels_triton.runtime.launch import hopper_kernel


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
        full = barriers.scores_full.index(k_index)
        pipeline.wait_empty(barriers.ds_empty, k_stage)
        mbarrier.expect(full, K_BYTES)
        load_pair(descriptors.k, k, len_kv, row, full, tiles.k, k_index, META)
        v_stage = Stage(n_block, META.STAGES_DP)
        v_index = pipeline.index(v_stage)
        pipeline.wait_empty(barriers.dp_empty, v_stage)
        mbarrier.expect(barriers.dp_full.index(v_index), descriptors.v.block_type.nbytes)
        load_rows(descriptors.v, v.token, len_kv, row, v.head, 0, barriers.dp_full.index(v_index), tiles.v.index(v_index))
    mbarrier.wait(barriers.dq_full.index(0), 0)
    if args.dq32.ptr is None:
        for consumer in gl.static_range(2):
            store_pair(descriptors.dq, dq, len_q, block.first_row + consumer * ROWS, tiles.dq, consumer, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_bwd_dq_hopper_kernel(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = allocate_dq(args, META)
    block, rows = rows_of_program(args, MODS, META)
    gl.warp_specialize(
        [
            (consume_dq, (args, tiles, barriers, block, rows, 0, MODS, META)),
            (consume_dq, (args, tiles, barriers, block, rows, 1, MODS, META)),
            (_dq_load, (args, tiles, barriers, block, META)),
        ],
        [4, 1],
        [240, 24],
    )


@hopper_kernel
def _attn_bwd_dkdv_hopper_kernel(args: DkdvArguments, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = allocate_dkdv(args, META)
    block = key_block_of_program(args, META)
    gl.warp_specialize(
        [
            (consume_dkdv, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_dkdv, (args, tiles, barriers, block, 1, MODS, META)),
            (load_dkdv, (args, tiles, barriers, block, META)),
        ],
        [4, 1],
        [240, 24],
    )


def hopper_backward(call: Backward, tile: HopperBackwardTile | None = None) -> None:
    """Launches the two-kernel backward of a call that `backward_unsupported` does not reject.

    `score_gradients.bias_and_capture_gradients` computes the gradients of a bias and of captures.
    """
    tile = tile or backward_tile(call.problem)
    dq_stages, dkdv_stages = Stages(scores=2, dp=tile.v_stages, p=0, ds=2), Stages(scores=2, dp=2, p=2, ds=2)
    launch_two_kernels((_attn_bwd_dq_hopper_kernel, _attn_bwd_dkdv_hopper_kernel), call, tile, dq_stages, dkdv_stages)
