"""Tiles and barriers of the kernels for dq and for dk and dv for sm_90, in 16 bits and in FP8."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.gluon.backward_blocks import query_block_of_program, statistics_of_block
from flexattn.kernels_triton.gluon.operands import allocate_tiles
from flexattn.kernels_triton.gluon.pairs import allocate_pair
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers
from flexattn.kernels_triton.hopper.backward_arguments import (
    DkdvArguments,
    DkdvBarriers,
    DkdvTiles,
    DqArguments,
    DqBarriers,
    DqRows,
    DqTiles,
)
from flexattn.kernels_triton.hopper.fp8 import allocate_factors


@gluon.jit
def allocate_dq(args: DqArguments, META: gl.constexpr):
    # Returns (tiles, barriers). An absent part is (), as Triton 3.6 does not return None
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    DS: gl.constexpr = META.STAGES_DS
    descriptors = args.descriptors
    q_tiles = allocate_pair(2, descriptors.q, META)
    dout_tiles = allocate_tiles(2, descriptors.dout)
    k_tiles = allocate_pair(SCORES, descriptors.k, META)
    v_tiles = allocate_tiles(DP, descriptors.v)
    k16_tiles, dq_tiles = k_tiles, q_tiles
    if META.IS_FP8:
        k16_tiles = allocate_pair(DS, descriptors.k16, META)
        dq_tiles = k16_tiles
        if not META.SHARES_TILES and args.dq32.ptr is None:
            dq_tiles = allocate_pair(2, descriptors.dq, META)
    tiles = DqTiles(
        q=q_tiles,
        dout=dout_tiles,
        k=k_tiles,
        v=v_tiles,
        k16=k16_tiles,
        dq=dq_tiles,
        factors=allocate_factors(SCORES) if META.IS_FP8 else (),
    )
    barriers = DqBarriers(
        q_full=allocate_barriers(1, 1),
        scores_full=allocate_barriers(SCORES, 1),
        ds_empty=allocate_barriers(DS, 2),
        dp_full=() if META.IS_FP8 else allocate_barriers(DP, 1),
        dp_empty=allocate_barriers(DP, 2),
        ds_full=allocate_barriers(DS, 1) if META.IS_FP8 else (),
        dq_full=allocate_barriers(1, 2),
    )
    return tiles, barriers


@gluon.jit
def rows_of_program(args: DqArguments, MODS: gl.constexpr, META: gl.constexpr):
    # Returns the block of a program for dq, and its `DqRows`
    block = query_block_of_program(args, META)
    sequence = block.sequence
    rows = DqRows(
        head=head_of(args.scores, block.b, block.h, sequence.len_q, sequence.len_kv, block.band.shift, MODS, META),
        statistics_ptr=statistics_of_block(args, block, META),
    )
    return block, rows


@gluon.jit
def allocate_dkdv(args: DkdvArguments, META: gl.constexpr):
    # Returns (tiles, barriers), as `allocate_dq` does
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    BLOCK_M: gl.constexpr = META.BLOCK_M
    PARTS: gl.constexpr = 1 if META.SPLITS_COLUMNS else 2
    descriptors = args.descriptors
    DTYPE: gl.constexpr = descriptors.dout16.dtype if META.IS_FP8 else descriptors.dout.dtype
    q_tiles = allocate_pair(SCORES, descriptors.q, META)
    dout_tiles = allocate_tiles(DP, descriptors.dout)
    k_tiles = allocate_pair(PARTS, descriptors.k, META)
    v_tiles = allocate_tiles(PARTS, descriptors.v)
    statistics = gl.allocate_shared_memory(gl.float32, [SCORES, 2 * BLOCK_M], descriptors.statistics.layout)
    q16_tiles, dout16_tiles, dk_tiles, dv_tiles, factors = q_tiles, dout_tiles, k_tiles, v_tiles, ()
    if META.IS_FP8:
        q16_tiles = allocate_pair(META.STAGES_DS, descriptors.q16, META)
        dout16_tiles = allocate_tiles(META.STAGES_P, descriptors.dout16)
        dk_tiles, dv_tiles = q16_tiles, dout16_tiles
        if not META.SHARES_TILES and args.dk32.ptr is None:
            dk_tiles = allocate_pair(PARTS, descriptors.dk, META)
            dv_tiles = allocate_tiles(PARTS, descriptors.dv)
        factors = allocate_factors(SCORES)
    scores_full = allocate_barriers(SCORES, 1)
    ds_empty = allocate_barriers(META.STAGES_DS, 2)
    dp_full, ds_full, p_full, p_empty = (), (), (), ()
    if META.IS_FP8:
        ds_full = allocate_barriers(META.STAGES_DS, 1)
        p_full, p_empty = ds_full, ds_empty
        if META.SPLITS_COLUMNS:
            p_full = allocate_barriers(META.STAGES_P, 1)
            p_empty = allocate_barriers(META.STAGES_P, 2)
    else:
        dp_full = allocate_barriers(DP, 1)
    barriers = DkdvBarriers(
        scores_full=scores_full,
        ds_empty=ds_empty,
        dp_full=dp_full,
        dp_empty=allocate_barriers(DP, 2),
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
        p_full=p_full,
        p_empty=p_empty,
        ds_full=ds_full,
    )
    p_tiles, ds_tiles = (), ()
    if META.SPLITS_COLUMNS:
        EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M // 2], DTYPE)
        p_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M // 2], EXCHANGE)
        ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M // 2], EXCHANGE)
    tiles = DkdvTiles(
        q=q_tiles,
        dout=dout_tiles,
        k=k_tiles,
        v=v_tiles,
        statistics=statistics,
        q16=q16_tiles,
        dout16=dout16_tiles,
        dk=dk_tiles,
        dv=dv_tiles,
        factors=factors,
        p=p_tiles,
        ds=ds_tiles,
        dout1=(),
        v1=(),
    )
    return tiles, barriers
