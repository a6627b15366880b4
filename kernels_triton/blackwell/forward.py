"""Forward attention on Blackwell (sm_100) in Gluon: one warp loads, one issues products, two warpgroups have the softmax.

tcgen05 products read q, k and v from shared memory and weights from tensor memory, and write scores and out to tensor memory. The
two consumer warpgroups have 128 queries each, so that the products of one overlap the softmax of the other (FlashAttention-4, arXiv
2603.05451). Work tiles, bands, masks, mods and results are those of the forward for sm_90.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.conditions import forward_tile
from flexattn.kernels_triton.blackwell.consumer import compute_partition
from flexattn.kernels_triton.blackwell.pipeline import Buffers, allocate_product_barriers
from flexattn.kernels_triton.blackwell.products import product_partition
from flexattn.kernels_triton.blackwell.tensor_memory import LANES, allocate_forward_tiles
from flexattn.kernels_triton.common.launch_order import wait_for_previous
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BlackwellTile
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Tiles
from flexattn.kernels_triton.gluon.forward_launch import Outputs, launch_forward
from flexattn.kernels_triton.gluon.forward_partition import load_partition
from flexattn.kernels_triton.gluon.operands import allocate_blocks, allocate_tiles
from flexattn.kernels_triton.gluon.pairs import allocate_key_pair, allocate_pair
from flexattn.kernels_triton.gluon.pipeline import allocate_forward_barriers
from flexattn.kernels_triton.runtime.launch import hopper_kernel


@hopper_kernel
def _attn_fwd_blackwell_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    LOADER_REGISTERS: gl.constexpr = 56
    q_tiles = allocate_pair(CONSUMERS * META.Q_STAGES, descriptors.q, META)
    out_tiles = q_tiles.first  # never used
    if not META.IS_SPLIT:
        out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    k_tiles = allocate_key_pair(descriptors.k, META)
    v_tiles = allocate_blocks(META.STAGES, descriptors.v, META.BLOCK_N)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    # One warp releases all stages after its products have read them, and it also receives work tiles.
    barriers = allocate_forward_barriers(1, CONSUMERS + 1, META)
    products = allocate_product_barriers(CONSUMERS)
    sums = allocate_forward_tiles(CONSUMERS, META.BLOCK_N, META.V0)
    buffers = Buffers(tiles=tiles, barriers=barriers, sums=sums, products=products)
    wait_for_previous(META.IS_SPLIT)
    gl.warp_specialize(
        [
            (compute_partition, (args, buffers, 0, MODS, META)),
            (compute_partition, (args, buffers, 1, MODS, META)),
            (product_partition, (args, buffers, META)),
            (load_partition, (args, buffers, META)),
        ],
        [4, 1, 1],
        [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )


def blackwell_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None = None,
    tile: BlackwellTile | None = None,
    splits: int | None = None,
) -> None:
    """Launches the forward of a call that `forward_unsupported` does not reject; for splits see `launch_forward`."""
    outputs = Outputs(out, lse, max_logit)
    launch_forward(_attn_fwd_blackwell_kernel, problem, outputs, tile or forward_tile(problem), LANES.value, splits=splits)
