"""Fused backward attention on Blackwell (sm_100) in Gluon: dk and dv of 128 keys a program, and their contributions to dq.

One warp loads by TMA, one issues products, and two warpgroups have the softmax. Another warpgroup adds dq to fp32 sums in global
memory, in an arbitrary order. So the last bits of dq differ from run to run. All sums are in tensor memory (FlashAttention-4, arXiv
2603.05451). Blocks, bands, masks, mods, the loading warp and the sums of dq are those of the fused backward for sm_90.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell import backward_pipeline
from flexattn.kernels_triton.blackwell.backward_consumer import compute_partition
from flexattn.kernels_triton.blackwell.backward_dq import add_dq
from flexattn.kernels_triton.blackwell.backward_products import product_partition
from flexattn.kernels_triton.blackwell.conditions import backward_tile
from flexattn.kernels_triton.blackwell.tensor_memory import LANES, allocate_backward_sums
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import BlackwellBackwardTile, cdiv
from flexattn.kernels_triton.gluon.backward_blocks import key_block_of_program
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.fused_launch import finish_fused, launch_of_fused
from flexattn.kernels_triton.gluon.fused_loader import load_fused
from flexattn.kernels_triton.gluon.operands import allocate_tiles
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@hopper_kernel
def _attn_bwd_blackwell_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.q.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    Q_STAGES: gl.constexpr = META.Q_STAGES
    DOUT_STAGES: gl.constexpr = META.DOUT_STAGES
    tiles = FusedTiles(
        q=allocate_tiles(Q_STAGES, descriptors.q),
        q16=None,
        dout=allocate_tiles(DOUT_STAGES, descriptors.dout),
        dout16=None,
        k=allocate_tiles(1, descriptors.k),
        k16=None,
        v=allocate_tiles(1, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2 * BLOCK_M], descriptors.statistics.layout),
        factors=None,
        ds=gl.allocate_shared_memory(DTYPE, [META.BLOCK_N, BLOCK_M], backward_pipeline.ds_layout(META.COLUMNS, DTYPE)),
        dq=allocate_tiles(backward_pipeline.DQ_STAGES, descriptors.dq),
    )
    barriers = FusedBarriers(
        q_full=allocate_barriers(Q_STAGES, 1),
        # released by the product that reads q, and by the consumers, which read the statistics
        q_empty=allocate_barriers(Q_STAGES, 1 + backward_pipeline.CONSUMERS),
        dout_full=allocate_barriers(DOUT_STAGES, 1),
        dout_empty=allocate_barriers(DOUT_STAGES, 1),
        dq_full=allocate_barriers(1, 1),
        dq_empty=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, backward_pipeline.CONSUMERS),
    )
    products = backward_pipeline.allocate_product_barriers()
    sums = allocate_backward_sums(META.BLOCK_M, META.DIM)
    buffers = backward_pipeline.Buffers(tiles=tiles, barriers=barriers, sums=sums, products=products)
    block = key_block_of_program(args, META)
    gl.warp_specialize(
        [
            (compute_partition, (args, buffers, block, 0, MODS, META)),
            (compute_partition, (args, buffers, block, 1, MODS, META)),
            (add_dq, (args, buffers, block, META)),
            (product_partition, (args, buffers, block, META)),
            (load_fused, (args, tiles, barriers, block, META)),
        ],
        [4, 4, 1, 1],
        [168, 96, 80, 80],  # the first consumer gets the remaining 168: no role spills more than one register in its loop
    )


def blackwell_backward(call: Backward, tile: BlackwellBackwardTile | None = None) -> None:
    """Launches the backward of a call that `backward_unsupported` does not reject; the last bits of dq differ from run to run."""
    x = call.problem
    tile = tile or backward_tile(x)
    meta = backward_pipeline.BackwardMeta(
        **x.features._asdict(),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DIM=tile.head_dim,
        COLUMNS=tile.columns,
        Q_STAGES=tile.q_stages,
        DOUT_STAGES=tile.dout_stages,
        DQ_PARTS=cdiv(x.q.shape[-1], backward_pipeline.DQ_COLUMNS.value),
    )
    ready = launch_of_fused(call, meta, tile.block_n, (LANES.value, backward_pipeline.DQ_COLUMNS.value))
    launch(_attn_bwd_blackwell_kernel, ready.programs, x.device, ready.tile, ready.arguments)
    finish_fused(call, ready)
