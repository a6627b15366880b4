"""Forward attention on Blackwell (sm_100) in Gluon: a warp that loads by TMA, one that issues products, two warpgroups.

Products are tcgen05's: they read q, k and v in shared memory and weights in tensor memory, and leave scores and out there. The two
consumer warpgroups have 128 queries each, so that the products of one run under the softmax of the other (FlashAttention-4, arXiv
2603.05451). Work tiles, bands, masks, mods and results are those of the forward for sm_90.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.conditions import forward_tile
from flexattn.kernels_triton.blackwell.consumer import compute_partition
from flexattn.kernels_triton.blackwell.pipeline import Buffers, allocate_loader_barriers, allocate_product_barriers
from flexattn.kernels_triton.blackwell.products import product_partition
from flexattn.kernels_triton.blackwell.tensor_memory import LANES, allocate_forward_tiles
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import BlackwellTile
from flexattn.kernels_triton.hopper.descriptors import ragged_descriptor, step_of
from flexattn.kernels_triton.hopper.forward_arguments import (
    Arguments,
    Cut,
    Descriptors,
    Results,
    SplitKeys,
    Steps,
    Tiles,
    forward_arguments,
    forward_meta,
    number_of_tiles,
)
from flexattn.kernels_triton.hopper.forward_partition import load_partition
from flexattn.kernels_triton.hopper.operands import allocate_blocks, allocate_tiles
from flexattn.kernels_triton.hopper.pairs import allocate_key_pair, allocate_pair, pair_descriptor
from flexattn.kernels_triton.hopper.tile_scheduler import forward_work
from flexattn.kernels_triton.runtime.launch import Tile, hopper_kernel, launch, num_processors


@hopper_kernel
def _attn_fwd_blackwell_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    of = args.descriptors
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    LOADER_REGISTERS: gl.constexpr = 56
    q_tiles = allocate_pair(CONSUMERS * META.Q_STAGES, of.q, META)
    out_tiles = allocate_tiles(CONSUMERS, of.out)
    k_tiles = allocate_key_pair(of.k, META)
    v_tiles = allocate_blocks(META.STAGES, of.v, META.BLOCK_N)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    barriers = allocate_loader_barriers(META)
    products = allocate_product_barriers(CONSUMERS)
    sums = allocate_forward_tiles(CONSUMERS, META.BLOCK_N, META.V0)
    buffers = Buffers(tiles=tiles, barriers=barriers, sums=sums, products=products)
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


def blackwell_forward(problem: Problem, out: Tensor, lse: Tensor, tile: BlackwellTile | None = None) -> None:
    """Launches the forward, of calls that `forward_unsupported` does not name."""
    x = problem
    tile = tile or forward_tile(x)
    meta = forward_meta(x, tile, 1, Cut(is_split=False, is_planned=False), rows=LANES.value)
    tiles, processors = number_of_tiles(x, tile, 1), num_processors(x.device)
    keys = meta.PAGE_ROWS or tile.block_n
    arguments = forward_arguments(
        x,
        Descriptors(
            q=pair_descriptor(x.q, LANES.value, (meta.QK0, meta.QK1)),
            k=pair_descriptor(x.k, keys, (meta.QK0, meta.QK1)),
            v=ragged_descriptor(x.v, keys, tile.head_dim_v),
            out=ragged_descriptor(out, LANES.value, tile.head_dim_v // tile.out_parts),
        ),
        Steps(q=step_of(x.q), k=step_of(x.k), v=step_of(x.v), out=step_of(out)),
        Results(lse_ptr=lse, max_logit_ptr=None, parts_ptr=None, whole_lse_ptr=None, out=None),
        forward_work(x, tile.block_m, has_table=tiles > processors),
        SplitKeys(count=None, plan=None),
    )
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    launch(_attn_fwd_blackwell_kernel, min(processors, tiles), out.device, launch_tile, (arguments, x.mods, meta))
    if x.has_padding_q:
        zero_padding(x, out, "q", lse)
