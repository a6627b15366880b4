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
from flexattn.kernels_triton.gluon.dq_sums import add_dq
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments
from flexattn.kernels_triton.gluon.fused_loader import load_fused
from flexattn.kernels_triton.hopper.backward_launch import launch_fused
from flexattn.kernels_triton.hopper.conditions import fused_tile
from flexattn.kernels_triton.hopper.fused_consumer import consume_fused
from flexattn.kernels_triton.hopper.fused_memory import allocate_fused
from flexattn.kernels_triton.runtime.launch import hopper_kernel


@hopper_kernel
def _attn_bwd_fused_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers, block = allocate_fused(args, META)
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
    launch_fused(_attn_bwd_fused_hopper_kernel, call, tile or fused_tile(call.problem))
