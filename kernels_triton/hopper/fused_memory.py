"""Tiles and barriers of the fused backwards for sm_90, in 16 bits and in FP8."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.gluon.backward_blocks import key_block_of_program
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments, FusedBarriers, FusedTiles, SecondTiles
from flexattn.kernels_triton.gluon.operands import allocate_tiles
from flexattn.kernels_triton.gluon.pipeline import STAGES, allocate_barriers, allocate_tile_slots
from flexattn.kernels_triton.hopper.fp8 import allocate_factors


@gluon.jit
def allocate_fused(args: FusedArguments, META: gl.constexpr):
    # Returns (tiles, barriers, the block of a program that has one). An absent part is (), as Triton 3.6 does not return None
    descriptors = args.descriptors
    BLOCK_M: gl.constexpr = META.BLOCK_M
    DTYPE: gl.constexpr = descriptors.k16.dtype if META.IS_FP8 else descriptors.k.dtype
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    second = ()
    if META.DIM1 > 0:
        parts = descriptors.second
        second = SecondTiles(
            q=allocate_tiles(STAGES, parts.q),
            dout=allocate_tiles(STAGES, parts.dout),
            k=allocate_tiles(2 * META.K_STAGES, parts.k),
            v=allocate_tiles(2 * META.V_STAGES, parts.v),
            dq=allocate_tiles(META.DQ_STAGES, parts.dq),
        )
    tiles = FusedTiles(
        q=allocate_tiles(STAGES, descriptors.q),
        q16=allocate_tiles(STAGES, descriptors.q16) if META.IS_FP8 else (),
        dout=allocate_tiles(STAGES, descriptors.dout),
        dout16=allocate_tiles(STAGES, descriptors.dout16) if META.IS_FP8 else (),
        k=allocate_tiles(2 * META.K_STAGES, descriptors.k),
        k16=allocate_tiles(2, descriptors.k16) if META.IS_FP8 else (),
        v=allocate_tiles(2 * META.V_STAGES, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], descriptors.statistics.layout),
        factors=allocate_factors(STAGES) if META.IS_FP8 else (),
        ds=gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE),
        dq=allocate_tiles((1 if META.DIM1 > 0 else 2) * META.DQ_STAGES, descriptors.dq),
        second=second,
    )
    q_empty = allocate_barriers(STAGES, 2)
    # No barrier may be unused: Triton would reuse its memory for the arguments of partitions (`CompileReport.idle_barriers`).
    dout_empty = () if META.IS_FP8 else q_empty
    if META.DOUT_APART:
        dout_empty = allocate_barriers(STAGES, 2)
    kv_full, tile_full, tile_empty, tile_slots, block = (), (), (), (), ()
    if META.NUMBERS == 0:
        block = key_block_of_program(args, META)
        if META.IS_FP8:
            kv_full = allocate_barriers(1, 1)
    else:
        tile_full = allocate_barriers(2, 1)
        tile_empty = allocate_barriers(2, 3)
        tile_slots = allocate_tile_slots(META.NUMBERS)
    barriers = FusedBarriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=q_empty,
        dout_full=allocate_barriers(STAGES, 1),
        dout_empty=dout_empty,
        kv_full=kv_full,
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(META.K_STAGES, 2),
        tile_full=tile_full,
        tile_empty=tile_empty,
        tile_slots=tile_slots,
    )
    return tiles, barriers, block
