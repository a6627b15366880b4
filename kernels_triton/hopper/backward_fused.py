"""Fused backward for Hopper (sm_90) in Gluon: one kernel computes the scores once, for dq, dk and dv.

A warp loads by TMA and two warpgroups compute, 64 keys each. dk and dv stay in registers. In a persistent kernel the warp also
draws the key blocks of its program, and loads the next block's k while the previous block ends. The warpgroups' dq passes tile by
tile through shared memory. From there another warp lets the copy engine add it to fp32 sums in global memory, in an arbitrary
order. So the last bits of dq differ from run to run. Calls that `conditions.fused_unsupported` rejects, and deterministic calls,
run on `backward`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import HopperFusedTile
from flexattn.kernels_triton.gluon.backward_blocks import key_block_of_program
from flexattn.kernels_triton.gluon.dq_sums import add_dq
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.fused_launch import finish_fused
from flexattn.kernels_triton.gluon.fused_loader import load_fused
from flexattn.kernels_triton.gluon.operands import allocate_tiles
from flexattn.kernels_triton.gluon.pipeline import STAGES, allocate_barriers, allocate_tile_slots
from flexattn.kernels_triton.hopper.conditions import fused_tile
from flexattn.kernels_triton.hopper.fused_consumer import consume_fused
from flexattn.kernels_triton.hopper.fused_launch import prepare_fused
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch, num_processors


@hopper_kernel
def _attn_bwd_fused_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.q.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    q_tiles = allocate_tiles(STAGES, descriptors.q)
    dout_tiles = allocate_tiles(STAGES, descriptors.dout)
    k_tiles = allocate_tiles(2 * META.K_STAGES, descriptors.k)
    v_tiles = allocate_tiles(2 * META.V_STAGES, descriptors.v)
    statistics_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], descriptors.statistics.layout)
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE)
    dq_tiles = allocate_tiles(2 * META.DQ_STAGES, descriptors.dq)
    tiles = FusedTiles(
        q=q_tiles,
        q16=None,
        dout=dout_tiles,
        dout16=None,
        k=k_tiles,
        k16=None,
        v=v_tiles,
        statistics=statistics_tiles,
        factors=None,
        ds=ds_tiles,
        dq=dq_tiles,
    )
    q_empty = allocate_barriers(STAGES, 2)
    # No barrier may be unused: Triton would reuse its memory for the arguments of partitions (`CompileReport.idle_barriers`).
    dout_empty = q_empty
    if META.DOUT_APART:
        dout_empty = allocate_barriers(STAGES, 2)
    tile_full, tile_empty, tile_slots, block = None, None, None, None
    if META.NUMBERS == 0:
        block = key_block_of_program(args, META)
    else:
        tile_full = allocate_barriers(2, 1)
        tile_empty = allocate_barriers(2, 3)
        tile_slots = allocate_tile_slots(META.NUMBERS)
    barriers = FusedBarriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=q_empty,
        dout_full=allocate_barriers(STAGES, 1),
        dout_empty=dout_empty,
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(META.K_STAGES, 2),
        tile_full=tile_full,
        tile_empty=tile_empty,
        tile_slots=tile_slots,
    )
    gl.warp_specialize(
        [
            (consume_fused, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_fused, (args, tiles, barriers, block, 1, MODS, META)),
            (load_fused, (args, tiles, barriers, block, META)),
            (add_dq, (args, tiles, barriers, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_backward(call: Backward, tile: HopperFusedTile | None = None) -> None:
    """Launches the fused backward of a call that `fused_unsupported` does not reject; dq's last bits differ from run to run."""
    x = call.problem
    tile = tile or fused_tile(x)
    prepared = prepare_fused(call, tile)
    programs = min(prepared.programs, num_processors(x.device)) if tile.is_persistent else prepared.programs
    launch(_attn_bwd_fused_hopper_kernel, programs, x.device, prepared.tile, prepared.arguments)
    finish_fused(call, prepared)
