"""Backward attention in FP8 on Hopper (sm_90) in Gluon, in one kernel: `backward_fused` with scores and dp from FP8 operands.

The products with p and ds are 16-bit. In FP8 each of theirs would need the largest of a tile's rows, a scale, and a sum of its own
that is added in fp32, as Hopper adds FP8 products up in some 14 bits: that takes longer than the tensor cores save. So no operand
has to come transposed, and nothing that was computed here is rounded to FP8. q, k and dout are read in both forms; the half one is
what the FP8 one stands for.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.primitives import LOG2E
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.hopper.backward_blocks import Block, key_block_of_program
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.conditions import KEYS, fused_slower, unsupported_block_mask
from flexattn.kernels_triton.hopper.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.hopper.dq_sums import add_dq
from flexattn.kernels_triton.hopper.fp8 import allocate_factors, load_descale, write_factors
from flexattn.kernels_triton.hopper.fp8_backward_operands import unsupported_operands
from flexattn.kernels_triton.hopper.fused_consumer import FusedArguments, FusedBarriers, FusedTiles, consume_fused
from flexattn.kernels_triton.hopper.fused_launch import finish_fused, prepare_fused
from flexattn.kernels_triton.hopper.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.hopper.pairs import Origin, origin_of
from flexattn.kernels_triton.hopper.pipeline import STAGES, allocate_barriers, wait_empty
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


class Fp8FusedTile(NamedTuple):
    """A row for the FP8 backward on sm_90 in one kernel: it serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    queries: int  # queries of an iteration, and of a tile of statistics and of dq
    dq_stages: int  # stages of dq in shared memory

    # The order of an iteration's products, as in `HopperFusedTile`
    dp_first = True
    is_ahead = True
    pingpong = True
    dv_with_dk = False
    dout_apart = False
    is_persistent = False
    converts = False


# bench/results/fp8_one_pass_orders_h200.json. With 128 queries modified scores would spill, and a block mask may have fewer.
FP8_FUSED = (Fp8FusedTile(64, 128, 1), Fp8FusedTile(64, 64, 2), Fp8FusedTile(128, 64, 1))


class Buffers(NamedTuple):
    tiles: FusedTiles
    barriers: FusedBarriers


class Origins(NamedTuple):
    """First rows of a program's heads."""

    q: Origin
    q16: Origin
    dout: Origin
    dout16: Origin
    k: Origin
    k16: Origin
    v: Origin
    dk: Origin
    dv: Origin


@gluon.jit
def _load(buffers: Buffers, block: Block, args: FusedArguments, origins: Origins, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    of = args.descriptors
    first_row, b, h, h_kv = block.first_row, block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    full = barriers.kv_full.index(0)
    KV_BYTES: gl.constexpr = of.k.block_type.nbytes + of.v.block_type.nbytes + of.k16.block_type.nbytes
    Q_BYTES: gl.constexpr = of.q.block_type.nbytes + of.statistics.block_type.nbytes
    DOUT_BYTES: gl.constexpr = of.dout.block_type.nbytes + of.dout16.block_type.nbytes + of.q16.block_type.nbytes
    mbarrier.expect(full, 2 * KV_BYTES)
    for part in gl.static_range(2):
        row = first_row + part * ROWS
        load_rows(of.k, origins.k.token, len_kv, row, origins.k.head, 0, full, tiles.k.index(part))
        load_rows(of.v, origins.v.token, len_kv, row, origins.v.head, 0, full, tiles.v.index(part))
        load_rows(of.k16, origins.k16.token, len_kv, row, origins.k16.head, 0, full, tiles.k16.index(part))
    scale_row = gl.minimum(first_row, gl.maximum(len_kv - 1, 0))
    s_factor = load_descale(args.descales.k, b, h_kv, scale_row)
    dp_factor = load_descale(args.descales.v, b, h_kv, scale_row)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    n = 0
    head = 0
    for m_block in range(block.num_blocks * args.work.group_size):  # counts the blocks of all query heads
        row = query_block(n, block.block_range, META)[0]
        stage = m_block % STAGES
        scale_row = gl.minimum(row, len_q - 1)
        descale_q = load_descale(args.descales.q, b, h + head, scale_row)
        descale_dout = load_descale(args.descales.dout, b, h + head, scale_row)
        full = barriers.q_full.index(stage)
        wait_empty(barriers.q_empty, m_block, STAGES)
        write_factors(tiles.factors, stage, s_factor * descale_q, dp_factor * descale_dout)
        mbarrier.expect(full, Q_BYTES)
        load_rows(of.q, origins.q.token, len_q, row, origins.q.head + head, 0, full, tiles.q.index(stage))
        of_head = block.first_statistics + head * args.tiles_of_statistics
        load_statistics(of.statistics, of_head, row, len_q, full, tiles.statistics.index(stage), META)
        full = barriers.dout_full.index(stage)
        mbarrier.expect(full, DOUT_BYTES)
        load_rows(of.dout, origins.dout.token, len_q, row, origins.dout.head + head, 0, full, tiles.dout.index(stage))
        load_rows(of.dout16, origins.dout16.token, len_q, row, origins.dout16.head + head, 0, full, tiles.dout16.index(stage))
        load_rows(of.q16, origins.q16.token, len_q, row, origins.q16.head + head, 0, full, tiles.q16.index(stage))
        n += 1
        if n == block.num_blocks:
            n = 0
            head += 1
    mbarrier.wait(barriers.dkdv_full.index(0), 0)
    if args.dk32.ptr is None:
        for part in gl.static_range(2):
            row = first_row + part * ROWS
            store_rows(of.dk, origins.dk.token, len_kv, row, origins.dk.head, 0, tiles.k16.index(part))
            # A tile's first rows are what is needed.
            store_rows(of.dv, origins.dv.token, len_kv, row, origins.dv.head, 0, tiles.dout16.index(part).slice(0, ROWS, 2))
    tma.store_wait(0)


@gluon.jit
def _compute(buffers: Buffers, block: Block, args: FusedArguments, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    consume_fused(args, buffers.tiles, buffers.barriers, block, CONSUMER, MODS, META)


@hopper_kernel
def _attn_bwd_fused_fp8_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    BLOCK_M: gl.constexpr = META.BLOCK_M
    of = args.descriptors
    DTYPE: gl.constexpr = of.k16.dtype
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    tiles = FusedTiles(
        q=allocate_tiles(STAGES, of.q),
        q16=allocate_tiles(STAGES, of.q16),
        dout=allocate_tiles(STAGES, of.dout),
        dout16=allocate_tiles(STAGES, of.dout16),
        k=allocate_tiles(2, of.k),
        k16=allocate_tiles(2, of.k16),
        v=allocate_tiles(2, of.v),
        statistics=gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], of.statistics.layout),
        factors=allocate_factors(STAGES),
        ds=gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], EXCHANGE),
        dq=allocate_tiles(2 * META.DQ_STAGES, of.dq),
    )
    barriers = FusedBarriers(
        q_full=allocate_barriers(STAGES, 1),
        q_empty=allocate_barriers(STAGES, 2),
        dout_full=allocate_barriers(STAGES, 1),
        dout_empty=None,
        kv_full=allocate_barriers(1, 1),
        dq_full=allocate_barriers(META.DQ_STAGES, 2),
        dq_empty=allocate_barriers(META.DQ_STAGES, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    buffers = Buffers(tiles=tiles, barriers=barriers)
    steps = args.steps
    block = key_block_of_program(args, META)
    sequence, b, h, h_kv = block.sequence, block.b, block.h, block.h_kv
    origins = Origins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        q16=origin_of(steps.q16, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        dout16=origin_of(steps.dout16, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        k16=origin_of(steps.k16, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
        dk=origin_of(steps.dk, sequence.start_kv, h_kv, b),
        dv=origin_of(steps.dv, sequence.start_kv, h_kv, b),
    )
    gl.warp_specialize(
        [
            (_compute, (buffers, block, args, 0, MODS, META)),
            (_compute, (buffers, block, args, 1, MODS, META)),
            (_load, (buffers, block, args, origins, META)),
            (add_dq, (args, tiles, barriers, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def tile_of(problem: Problem) -> Fp8FusedTile:
    """The narrowest row that serves the head dims, which are at most 128; of 64 queries where scores are more than a product."""
    x = problem
    most = 64 if x.is_modified or x.bias is not None or x.block_mask is not None else 128
    width = max(x.q.shape[-1], x.v.shape[-1])
    return next(tile for tile in FP8_FUSED if width <= tile.head_dim and tile.queries <= most)


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the kernel cannot run this problem's backward; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "its accumulators hold head dims up to 128"
    return unsupported_operands(x, out, dout) or unsupported_block_mask(x, (tile_of(x).queries, KEYS))


def slower(problem: Problem) -> str | None:
    """Returns why the fused backward in 16 bits would be slower than others: this is faster where that is, as that needs a
    dequantisation first; None: it would not."""
    return fused_slower(problem)


def fp8_fused_backward(call: Backward, tile: Fp8FusedTile | None = None) -> None:
    """Launches the fused backward in FP8, of calls that are not `unsupported`.

    call: q, k, v and dout in FP8, with the descales of them; dq, dk and dv in 16 bits. The sums of dout with out
        are of what dout stands for, as dp is: else a query that sees one key would get a gradient.
    """
    x = call.problem
    prepared = prepare_fused(call, tile or tile_of(x))
    launch(_attn_bwd_fused_fp8_hopper_kernel, prepared.programs, x.device, prepared.tile, prepared.arguments)
    finish_fused(call, prepared)
