"""FP8 fused backward attention on Hopper (sm_90) in Gluon: `backward_fused` with scores and dp from FP8 operands.

The products with p and ds are 16-bit. In FP8, each of them would need the maximum of a tile's rows, a scale, and its own
accumulator. Hopper accumulates FP8 products in about 14 bits, so each accumulator would be added in fp32. That takes longer than
the tensor cores save. So no operand needs a transposed copy, and no computed value is rounded to FP8. q, k and dout are read in
both forms, and the 16-bit form equals the dequantised FP8 form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flexattn.kernels_triton.common.crossovers import fastest_tile
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.facts import facts_of
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tiles import HopperFusedTile
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block, find_key_block, key_block
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.conditions import KEYS, unsupported_block_mask
from flexattn.kernels_triton.gluon.descriptors import load_rows, load_statistics, store_rows
from flexattn.kernels_triton.gluon.dq_sums import add_dq
from flexattn.kernels_triton.gluon.fp8_operands import load_descale
from flexattn.kernels_triton.gluon.fused_arguments import Begun, FusedArguments, FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import Origin, load_head, origin_of
from flexattn.kernels_triton.gluon.pipeline import STAGES, Stage
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries, num_parts
from flexattn.kernels_triton.gluon.tile_scheduler import broadcast_end, broadcast_tile, num_work_tiles
from flexattn.kernels_triton.hopper.backward_launch import launch_fused
from flexattn.kernels_triton.hopper.fp8 import write_factors
from flexattn.kernels_triton.hopper.fp8_backward_operands import unsupported_operands
from flexattn.kernels_triton.hopper.fused_consumer import consume_fused
from flexattn.kernels_triton.hopper.fused_memory import allocate_fused
from flexattn.kernels_triton.runtime.launch import hopper_kernel


@dataclass(frozen=True, kw_only=True)
class Fp8FusedTile(HopperFusedTile):
    """A tile of the FP8 fused backward on sm_90. It serves head dims up to `head_dim`, of q and k and of v."""

    dp_first: bool = True
    is_ahead: bool = True
    pingpong: bool = True


FP8_FUSED = {
    "d64_persistent": Fp8FusedTile(head_dim=64, queries=128, dq_stages=1, is_persistent=True),
    "d64": Fp8FusedTile(head_dim=64, queries=128, dq_stages=1),
    "d64_modified": Fp8FusedTile(head_dim=64, queries=64, dq_stages=2),
    "d128": Fp8FusedTile(head_dim=128, queries=64, dq_stages=1),
}
"""Tiles by name; `crossovers` selects one for a call."""


class Origins(NamedTuple):
    """First rows of a block's heads."""

    q: Origin
    q16: Origin
    dout: Origin
    dout16: Origin
    k: Origin
    k16: Origin
    v: Origin


@gluon.jit
def _origins(args: FusedArguments, block: Block):
    steps, sequence = args.steps, block.sequence
    b, h, h_kv = block.b, block.h, block.h_kv
    return Origins(
        q=origin_of(steps.q, sequence.start_q, h, b),
        q16=origin_of(steps.q16, sequence.start_q, h, b),
        dout=origin_of(steps.dout, sequence.start_q, h, b),
        dout16=origin_of(steps.dout16, sequence.start_q, h, b),
        k=origin_of(steps.k, sequence.start_kv, h_kv, b),
        k16=origin_of(steps.k16, sequence.start_kv, h_kv, b),
        v=origin_of(steps.v, sequence.start_kv, h_kv, b),
    )


@gluon.jit
def _load_half(descriptor, origin: Origin, block: Block, full, tiles):
    # Each warpgroup loads half of a block of keys
    for part in gl.static_range(2):
        row = block.first_row + part * ROWS
        load_rows(descriptor, origin.token, block.sequence.len_kv, row, origin.head, 0, full, tiles.index(part))


@gluon.jit
def _store_gradients(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, n_tile):
    # Stores dk and dv of the program's n_tile-th block from the memory of its k and dout in 16 bits. In fp32 the consumers have
    # written them.
    descriptors, steps, sequence = args.descriptors, args.steps, block.sequence
    dk = origin_of(steps.dk, sequence.start_kv, block.h_kv, block.b)
    dv = origin_of(steps.dv, sequence.start_kv, block.h_kv, block.b)
    pipeline.wait_full(barriers.dkdv_full, Stage(n_tile, 1))
    if args.dk32.ptr is None:
        for part in gl.static_range(2):
            row = block.first_row + part * ROWS
            store_rows(descriptors.dk, dk.token, sequence.len_kv, row, dk.head, 0, tiles.k16.index(part))
            # The gradient fills only a tile's first rows.
            store_rows(descriptors.dv, dv.token, sequence.len_kv, row, dv.head, 0, tiles.dout16.index(part).slice(0, ROWS, 2))
    tma.store_wait(0)


@gluon.jit
def _load_block(
    args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, begun: Begun, previous, META: gl.constexpr
):
    # previous: in a persistent kernel, the message of the previous block. Its dk and dv are stored here, before k and dout in 16
    # bits overwrite them. The other loads of the first iteration have started by then. Loading more in advance (the next query
    # block too) made ptxas spill in the consumers' loops.
    descriptors = args.descriptors
    b, h, h_kv = block.b, block.h, block.h_kv
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    origins = _origins(args, block)
    Q_BYTES: gl.constexpr = descriptors.q.block_type.nbytes + descriptors.statistics.block_type.nbytes
    DOUT_BYTES: gl.constexpr = (
        descriptors.dout.block_type.nbytes + descriptors.dout16.block_type.nbytes + descriptors.q16.block_type.nbytes
    )
    KV_BYTES: gl.constexpr = 2 * (descriptors.k.block_type.nbytes + descriptors.v.block_type.nbytes)
    K16_BYTES: gl.constexpr = 2 * descriptors.k16.block_type.nbytes
    if META.NUMBERS == 0:
        kv_full = barriers.kv_full.index(0)
        mbarrier.expect(kv_full, KV_BYTES + K16_BYTES)
        _load_half(descriptors.k, origins.k, block, kv_full, tiles.k)
        _load_half(descriptors.v, origins.v, block, kv_full, tiles.v)
        _load_half(descriptors.k16, origins.k16, block, kv_full, tiles.k16)
    s_factor = load_descale(args.descales.k, b, h_kv, block.first_row, len_kv)
    dp_factor = load_descale(args.descales.v, b, h_kv, block.first_row, len_kv)
    if META.IS_PLAIN:
        s_factor *= args.scores.scale * LOG2E
    iterations = block.num_blocks * block.heads
    position = first_queries(block, args.work)
    for m_block in range(iterations):  # counts the blocks of all query heads
        row = query_block(position.n, block.block_range, META)[0]
        stage = Stage(begun.iterations + m_block, STAGES)
        index = pipeline.index(stage)
        descale_q = load_descale(args.descales.q, b, h + position.head, row, len_q)
        descale_dout = load_descale(args.descales.dout, b, h + position.head, row, len_q)
        full = barriers.q_full.index(index)
        pipeline.wait_empty(barriers.q_empty, stage)
        write_factors(tiles.factors, index, s_factor * descale_q, dp_factor * descale_dout)
        if META.NUMBERS == 0 or m_block > 0:
            mbarrier.expect(full, Q_BYTES)
        else:
            mbarrier.expect(full, Q_BYTES + KV_BYTES)
        load_head(descriptors.q, origins.q, position.head, len_q, row, full, tiles.q.index(index))
        head_statistics = block.first_statistics + position.head * args.tiles_of_statistics
        load_statistics(descriptors.statistics, head_statistics, row, len_q, full, tiles.statistics.index(index), META)
        if META.NUMBERS > 0:  # noqa: SIM102
            if m_block == 0:
                # The last q of the previous block has been read, and its k and v.
                pipeline.wait_empty(barriers.q_empty, Stage(begun.iterations + 1, STAGES))
                _load_half(descriptors.k, origins.k, block, full, tiles.k)
                _load_half(descriptors.v, origins.v, block, full, tiles.v)
        full = barriers.dout_full.index(index)
        if META.NUMBERS == 0 or m_block > 0:
            mbarrier.expect(full, DOUT_BYTES)
        load_head(descriptors.dout, origins.dout, position.head, len_q, row, full, tiles.dout.index(index))
        load_head(descriptors.q16, origins.q16, position.head, len_q, row, full, tiles.q16.index(index))
        if META.NUMBERS > 0:  # noqa: SIM102
            if m_block == 0:
                if begun.blocks > 0:
                    _store_gradients(args, tiles, barriers, key_block(previous, args, META), begun.blocks - 1)
                mbarrier.expect(full, DOUT_BYTES + K16_BYTES)
                _load_half(descriptors.k16, origins.k16, block, full, tiles.k16)
        load_head(descriptors.dout16, origins.dout16, position.head, len_q, row, full, tiles.dout16.index(index))
        position = next_queries(position, block, args.work)


@gluon.jit
def _load(args: FusedArguments, tiles: FusedTiles, barriers: FusedBarriers, block: Block, META: gl.constexpr):
    # block: of a program that has one
    if META.NUMBERS == 0:
        _load_block(args, tiles, barriers, block, Begun(blocks=0, iterations=0), (), META)
        _store_gradients(args, tiles, barriers, block, 0)
    else:
        work = args.work
        amount = num_work_tiles(work, num_parts(work), args.lengths_kv.batch, META)
        t = gl.program_id(0)
        n_tile = 0
        iterations = 0
        previous = (0,)
        for _ in gl.static_range(META.NUMBERS - 1):
            previous = previous + (0,)
        while t < amount:
            numbers = find_key_block(t, amount, args, META)
            drawn = key_block(numbers, args, META)
            if (drawn.num_blocks == 0) & (n_tile > 0):  # the consumers write its zeros immediately
                _store_gradients(args, tiles, barriers, key_block(previous, args, META), n_tile - 1)
            broadcast_tile(numbers, n_tile, barriers, META)
            begun = Begun(blocks=n_tile, iterations=iterations)
            _load_block(args, tiles, barriers, drawn, begun, previous, META)
            previous = numbers
            iterations += drawn.num_blocks * drawn.heads
            n_tile += 1
            # After the loads of the block: no other program takes a tile that a program has drawn, however long that is busy.
            t = gl.atomic_add(work.table_ptr, 1, sem="relaxed") + gl.num_programs(0)
        broadcast_end(n_tile, barriers, META)
        if n_tile > 0:
            _store_gradients(args, tiles, barriers, key_block(previous, args, META), n_tile - 1)


@hopper_kernel
def _attn_bwd_fused_fp8_hopper_kernel(args: FusedArguments, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers, block = allocate_fused(args, META)
    gl.warp_specialize(
        [
            (consume_fused, (args, tiles, barriers, block, 0, MODS, META)),
            (consume_fused, (args, tiles, barriers, block, 1, MODS, META)),
            (_load, (args, tiles, barriers, block, META)),
            (add_dq, (args, tiles, barriers, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def tile_of(problem: Problem) -> Fp8FusedTile:
    """Returns the committed tile, for head dims up to 128."""
    return FP8_FUSED[fastest_tile("sm_90 FP8 fused", facts_of(problem))]


def unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the kernel cannot run this problem's backward; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "its accumulators hold head dims up to 128"
    return unsupported_operands(x, out, dout) or unsupported_block_mask(x, (tile_of(x).queries, KEYS))


def fp8_fused_backward(call: Backward, tile: Fp8FusedTile | None = None) -> None:
    """Launches the FP8 fused backward of a call that is not `unsupported`.

    call: q, k, v and dout in FP8, with their descales; dq, dk and dv in 16 bits. The sums of dout with out use the dequantised
    dout, as dp does. Otherwise a query that sees one key would get a nonzero gradient.
    """
    launch_fused(_attn_bwd_fused_fp8_hopper_kernel, call, tile or tile_of(call.problem))
