"""Fused backward for Hopper (sm_90) in Gluon for head dims above 128: 192 of q and k with 128 of v, as in DeepSeek-V3, and 160.

One kernel computes the scores once, like `backward_fused`: for dk and dv, which stay in registers, and for dq. The copy engine adds
dq to fp32 sums in an arbitrary order, so the last bits of dq differ from run to run. It supports only plain scores. Calls that
`conditions.fused_192_unsupported` rejects, and deterministic calls, run on `backward`.

A consumer has dk and dv of 64 keys, and half of each tile of dq. dk and dv of 64 keys take 160 registers a thread, which leaves
none for dp of 64 queries beside their scores. So a block of 64 queries has one product of scores, which reads k once. The later
steps process 32 queries, and then the other 32. That includes exp, because the statistics of all 64 would spill. dq of the previous
block is computed in two parts, one during each half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import HopperFused192Tile, split_head_dim
from flexattn.kernels_triton.gluon import barriers as named
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import (
    Block,
    ScorePlace,
    first_query_head,
    head_at,
    key_block_of_program,
    next_query_block,
    probabilities,
)
from flexattn.kernels_triton.gluon.block_ranges import query_block
from flexattn.kernels_triton.gluon.conditions import KEYS
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor
from flexattn.kernels_triton.gluon.dq_conversion import convert_dq
from flexattn.kernels_triton.gluon.dq_sums import DqRing, in_order_of_sums, place_of_sums
from flexattn.kernels_triton.gluon.fp32_gradients import KeyGradients, add_parts, in_parts, store_key_gradient, store_key_gradients
from flexattn.kernels_triton.gluon.masking import cuts_block, first_uncut_query
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles, opaque_zero
from flexattn.kernels_triton.gluon.pairs import allocate_pair
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.query_walk import first_queries, next_queries
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DkdvBarriers, DkdvTiles
from flexattn.kernels_triton.hopper.backward_launch import Stages, arguments_of_dkdv, backward_meta
from flexattn.kernels_triton.hopper.conditions import fused_192_tile
from flexattn.kernels_triton.hopper.dkdv_loader import load_dkdv
from flexattn.kernels_triton.hopper.fp8 import product_logits
from flexattn.kernels_triton.hopper.products import product_layout, score_product, zero_rows
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.gluon_names import reduce_add
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

HALF = gl.constexpr(32)  # half of the queries of a block
NARROW = gl.constexpr(32)  # columns of the first part of dq of a warpgroup; the second part has twice as many


class Fused192Tiles(NamedTuple):
    """Tiles in shared memory: the loaded ones, ds by parity of the block and consumer, and one tile of dq for each consumer."""

    loaded: DkdvTiles
    ds: Any
    dq: DqRing


@gluon.jit
def _dq_product(tiles: Fused192Tiles, buffer, IS_FIRST: gl.constexpr, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Returns a part of dq of 64 queries, from all 128 keys. The first consumer has columns 64 to 95, and then 0 to 63. The second
    # has columns 96 to 127, and then those from 128 on, the second part of k, which may be as narrow.
    IS_LAST: gl.constexpr = CONSUMER == 1 and not IS_FIRST
    COLUMNS: gl.constexpr = META.QK1 if IS_LAST else NARROW if IS_FIRST else 2 * NARROW
    FIRST_COLUMN: gl.constexpr = (2 + CONSUMER) * NARROW if IS_FIRST else 0
    dq = zero_rows(COLUMNS)
    for keys in gl.static_range(2):
        ds = tiles.ds.index(buffer + keys).permute([1, 0])
        k_tile = opaque_zero(buffer) + keys
        if IS_LAST:
            k = tiles.loaded.k.second.index(k_tile).reshape([ROWS, META.QK1])
        else:
            k = tiles.loaded.k.first.index(k_tile).reshape([ROWS, META.QK0]).slice(FIRST_COLUMN, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=keys > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over_dq(dq, ring: DqRing, n, CONSUMER: gl.constexpr):
    # n: the part's number, of all parts of a program
    COLUMNS: gl.constexpr = dq.shape[1]
    pipeline.wait_empty(ring.empty, Stage(n, 1))
    ring.tiles.index(CONSUMER).slice(0, COLUMNS, 1).store(in_order_of_sums(dq))
    fence_async_shared()
    mbarrier.arrive(ring.full.index(0), count=1)


@gluon.jit
def _hand_over_last_dq(tiles: Fused192Tiles, iterations, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Computes both parts of dq of the last block, which no later block computes.
    last = named.ds_slot(iterations + 1)
    named.wait_written(last, CONSUMER)
    if iterations > 0:
        for part in gl.static_range(2):
            dq = _dq_product(tiles, last, part == 0, CONSUMER, META)  # dQ = dS^T K
            dq = warpgroup_mma_wait(0, deps=[dq])
            _hand_over_dq(dq, tiles.dq, 2 * iterations - 2 + part, CONSUMER)


@gluon.jit
def _recomputed(index):
    # Returns the index. ptxas computes an address with it anew, because registers are scarce if v has two parts.
    return index + opaque_zero(index)


@gluon.jit
def _begin_dp(consumer_v, dout, loaded: DkdvTiles, v_tile, index, half: gl.constexpr, zeros, META: gl.constexpr):
    # Issues 64 keys of v by half of the queries of dout, transposed. The first two arguments are the first parts of both.
    dp = warpgroup_mma(consumer_v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)  # dP = V dO^T
    if META.V1 > 0:
        v1 = loaded.v1.index(_recomputed(v_tile)).reshape([ROWS, META.V1])
        dout1 = loaded.dout1.index(_recomputed(index)).reshape([META.BLOCK_M, META.V1]).slice(half * HALF, HALF, 0)
        dp = warpgroup_mma(v1, dout1.permute([1, 0]), dp, is_async=True)  # dP = V dO^T
    return dp


@gluon.jit
def _wait_for_sums(dv, dv1, dk, dk1, p16, ds16, META: gl.constexpr):
    # Returns dv and dk when only the product of dq is in flight. p16, ds16: the products' operands in registers
    if META.V1 > 0:
        dv, p16, dk, dk1, ds16, dv1 = warpgroup_mma_wait(2, deps=[dv, p16, dk, dk1, ds16, dv1])
    else:
        dv, p16, dk, dk1, ds16 = warpgroup_mma_wait(2, deps=[dv, p16, dk, dk1, ds16])
    return dv, dv1, dk, dk1


@gluon.jit
def add_dq_192(args, sums, ring: DqRing, block: Block, META: gl.constexpr):
    # A separate partition, which adds the parts of dq to the sums, with the descriptors in `sums`, at the columns of `_dq_product`.
    position = first_queries(block, args.work)
    for m_block in range(block.num_blocks * block.heads):
        row = query_block(position.n, block.block_range, META)[0]
        sums_row = place_of_sums(row, position.head, args, block, META)
        for part in gl.static_range(2):
            pipeline.wait_full(ring.full, Stage(2 * m_block + part, 1))
            for consumer in gl.static_range(2):
                if part == 0:
                    tile = ring.tiles.index(consumer).slice(0, NARROW, 1)
                    reduce_add(sums.narrow, [sums_row, (2 + consumer) * NARROW], tile)
                elif consumer == 1 and META.QK1 == NARROW:
                    reduce_add(sums.narrow, [sums_row, META.QK0], ring.tiles.index(consumer).slice(0, NARROW, 1))
                else:
                    reduce_add(sums.wide, [sums_row, consumer * META.QK0], ring.tiles.index(consumer))
            tma.store_wait(0)  # the engine has read the tiles
            pipeline.release(ring.empty, Stage(2 * m_block + part, 1))
        position = next_queries(position, block, args.work)


@gluon.jit
def consume_fused_192(
    args, tiles: Fused192Tiles, barriers: DkdvBarriers, block: Block, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    # args: a `DkdvArguments`, of plain scores. dq of a block is computed in the next block, so that no warpgroup waits for the
    # other in the middle of a block. `fused_consumer` does the same, by the same barriers.
    loaded = tiles.loaded
    scores = args.scores
    DTYPE: gl.constexpr = loaded.dout.dtype
    BLOCK_M: gl.constexpr = META.BLOCK_M
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    V0: gl.constexpr = META.V0
    V1: gl.constexpr = META.V1
    HALF_SCORES: gl.constexpr = product_layout(HALF)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, product_layout(QK0), 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, HALF_SCORES)
    zeros, half_zeros = zero_rows(BLOCK_M), zero_rows(HALF)
    dk, dk1 = zero_rows(QK0), zero_rows(QK1)
    dv, dv1 = zero_rows(V0), zero_rows(V1)
    PARTS: gl.constexpr = 2 if V1 > 0 else 1  # products for each of dp and dv
    n_start = block.first_row + CONSUMER * ROWS
    rows = n_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, HALF_SCORES))
    half_columns = gl.arange(0, HALF, layout=COLUMNS)
    uncut_from = first_uncut_query(n_start, ROWS, block.band, META)
    iterations = block.num_blocks * block.heads
    # Simulates a query block before the first, whose ds is 0.
    tiles.ds.index(2 + CONSUMER).store(zeros.to(DTYPE))
    fence_async_shared()
    named.announce_written(2, CONSUMER)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    position, values = first_query_head(block, args.work, scores, MODS, META)
    if iterations > 0:
        named.announce_read(0, CONSUMER)
    for m_block in range(iterations):  # counts the blocks of all query heads
        row, is_full = query_block(position.n, block.block_range, META)
        is_cut = cuts_block(row, n_start, uncut_from, block.band, META)
        k_slot = CONSUMER + opaque_zero(m_block)
        q_stage = Stage(m_block, META.STAGES_SCORES)
        index = pipeline.index(q_stage)
        current = named.ds_slot(m_block)
        last = named.ds_slot(m_block + 1)
        has_next = m_block + 1 < iterations  # whether a next iteration exists
        consumer_v = loaded.v.index(k_slot).reshape([ROWS, V0])
        q_tile = loaded.q.first.index(index).reshape([BLOCK_M, QK0])
        q1_tile = loaded.q.second.index(index).reshape([BLOCK_M, QK1])
        dout_tile = loaded.dout.index(index).reshape([BLOCK_M, V0])
        statistics = loaded.statistics.index(index)
        pipeline.wait_full(barriers.scores_full, q_stage)
        raw_s = score_product(loaded.k, k_slot, loaded.q, index, zeros, BLOCK_M, META)  # S = K Q^T
        pipeline.wait_full(barriers.dp_full, Stage(m_block, META.STAGES_DP))
        dp = _begin_dp(consumer_v, dout_tile.slice(0, HALF, 0), loaded, k_slot, index, 0, half_zeros, META)  # dP = V dO^T
        raw_s = warpgroup_mma_wait(PARTS, deps=[raw_s])
        head = head_at(position, values, block, scores, META)
        s_halves = gl.split(gl.permute(raw_s.reshape([ROWS, 2, HALF]), [0, 2, 1]))
        for half in gl.static_range(2):
            q = q_tile.slice(half * HALF, HALF, 0)
            q1 = q1_tile.slice(half * HALF, HALF, 0)
            if V1 > 0:
                q1 = loaded.q.second.index(_recomputed(index)).reshape([BLOCK_M, QK1]).slice(half * HALF, HALF, 0)
            dout = dout_tile.slice(half * HALF, HALF, 0)
            columns = row + half * HALF + half_columns
            i, j = columns[None, :], rows[:, None]
            half_of_s = gl.convert_layout(s_halves[half], HALF_SCORES)
            s, factor, _, _ = product_logits(half_of_s, i, j, head, scores.scale, None, MODS, META)
            place = ScorePlace(rows=rows, columns=columns, row=row, is_cut=is_cut, is_full=is_full)
            p = probabilities(s, factor, place, statistics.slice(half * HALF, HALF), head, block, MODS, META)
            p16 = gl.convert_layout(p.to(DTYPE), LEFT)
            dv = warpgroup_mma(p16, dout, dv, is_async=True)  # dV += P dO
            if V1 > 0:
                dout1 = loaded.dout1.index(_recomputed(index)).reshape([BLOCK_M, V1]).slice(half * HALF, HALF, 0)
                dv1 = warpgroup_mma(p16, dout1, dv1, is_async=True)  # dV += P dO
            dp = warpgroup_mma_wait(PARTS, deps=[dp])
            minus_delta = statistics.slice(BLOCK_M + half * HALF, HALF).load(COLUMNS)
            ds = (p * (dp + minus_delta[None, :])).to(DTYPE)
            if half == 0:  # the other warpgroup's dq of two blocks ago has read the buffer that is overwritten
                named.wait_read(current, CONSUMER)
            tiles.ds.index(current + CONSUMER).slice(half * HALF, HALF, 1).store(ds)
            ds16 = gl.convert_layout(ds, LEFT)
            dk = warpgroup_mma(ds16, q, dk, is_async=True)  # dK += dS Q
            dk1 = warpgroup_mma(ds16, q1, dk1, is_async=True)  # dK += dS Q
            if half == 0:
                named.wait_written(last, CONSUMER)
                dq = _dq_product(tiles, last, True, CONSUMER, META)  # dQ = dS^T K, of the last block
                dv, dv1, dk, dk1 = _wait_for_sums(dv, dv1, dk, dk1, p16, ds16, META)
                second_dout = dout_tile.slice(HALF, HALF, 0)
                dp = _begin_dp(consumer_v, second_dout, loaded, k_slot, index, 1, half_zeros, META)  # dP = V dO^T
                dq = warpgroup_mma_wait(PARTS, deps=[dq])
                if m_block > 0:
                    _hand_over_dq(dq, tiles.dq, 2 * m_block - 2, CONSUMER)
        fence_async_shared()  # during the product
        named.announce_written(current, CONSUMER)
        dq = _dq_product(tiles, last, False, CONSUMER, META)  # dQ = dS^T K, of the last block
        dv, dv1, dk, dk1 = _wait_for_sums(dv, dv1, dk, dk1, p16, ds16, META)
        pipeline.release(barriers.ds_empty, q_stage)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if has_next:
            named.announce_read(last, CONSUMER)
        if m_block > 0:
            _hand_over_dq(dq, tiles.dq, 2 * m_block - 1, CONSUMER)
        position, values = next_query_block(position, values, block, args.work, scores, MODS, META)
    _hand_over_last_dq(tiles, iterations, CONSUMER, META)
    named.named_barrier_sync(named.LAST, named.BOTH)  # k was also read by the other warpgroup, which no longer needs it
    sums = KeyGradients(dk=dk, dk1=dk1, dv=dv)
    store_key_gradients(sums, None, args, loaded.k, loaded.v, block, CONSUMER, META)
    if V1 > 0:
        if args.dk32.ptr is not None:
            store_key_gradient(args.dv32, dv1, block, CONSUMER * ROWS, V0)
        else:
            loaded.v1.index(CONSUMER).reshape([ROWS, V1]).store(dv1.to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(barriers.dkdv_full.index(0), count=1)


class DqSums(NamedTuple):
    """Descriptors of dq's fp32 sums, by the parts of `_dq_product`: tiles of 32 columns and of 64."""

    narrow: Any
    wide: Any


class Fused192Arguments(NamedTuple):
    dkdv: DkdvArguments
    sums: DqSums


@hopper_kernel
def _attn_bwd_fused_192_hopper_kernel(args: Fused192Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.dkdv.descriptors
    DTYPE: gl.constexpr = descriptors.dout.dtype
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    loaded = DkdvTiles(
        q=allocate_pair(SCORES, descriptors.q, META),
        dout=allocate_tiles(DP, descriptors.dout),
        k=allocate_pair(2, descriptors.k, META),
        v=allocate_tiles(2, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [SCORES, 2 * META.BLOCK_M], descriptors.statistics.layout),
        dout1=allocate_tiles(DP, descriptors.dout1) if META.V1 > 0 else (),
        v1=allocate_tiles(2, descriptors.v1) if META.V1 > 0 else (),
    )
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, META.BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, META.BLOCK_M], EXCHANGE)
    dq_tiles = allocate_tiles(2, args.sums.wide)
    barriers = DkdvBarriers(
        scores_full=allocate_barriers(SCORES, 1),
        ds_empty=allocate_barriers(SCORES, 2),
        dp_full=allocate_barriers(DP, 1),
        dp_empty=None,
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    ring = DqRing(tiles=dq_tiles, full=allocate_barriers(1, 2), empty=allocate_barriers(1, 1))
    tiles = Fused192Tiles(loaded=loaded, ds=ds_tiles, dq=ring)
    block = key_block_of_program(args.dkdv, META)
    gl.warp_specialize(
        [
            (consume_fused_192, (args.dkdv, tiles, barriers, block, 0, MODS, META)),
            (consume_fused_192, (args.dkdv, tiles, barriers, block, 1, MODS, META)),
            (load_dkdv, (args.dkdv, loaded, barriers, block, META)),
            (add_dq_192, (args.dkdv, args.sums, ring, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_192_backward(call: Backward, tile: HopperFused192Tile | None = None) -> None:
    """Launches the backward of a call that `fused_192_unsupported` does not reject; the last bits of dq differ from run to run."""
    x, dq = call.problem, call.dq
    tile = fused_192_tile(x) if tile is None else tile
    widths, (v0, v1), size = split_head_dim(tile.head_dim_qk), split_head_dim(tile.head_dim_v), tile.queries
    tiled = tiled_statistics(call, size, with_dq_sums=True)
    dq_sums = tiled.dq_sums
    assert dq_sums is not None
    bytes_per_head = (8 * sum(widths) + 4 * (v0 + v1)) * max(x.longest_q, x.longest_kv)  # approximate, see `fused_launch`
    parts = head_parts(x, KEYS)
    call_in_parts = in_parts(call, parts)
    work, programs = backward_work(x, KEYS, "kv", bytes_per_head, is_fused=True, parts=parts)

    def sums_descriptor(columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, columns], gl.float32)
        return TensorDescriptor(dq_sums, list(dq_sums.shape), [dq_sums.shape[1], 1], [ROWS.value, columns], layout)

    dkdv = arguments_of_dkdv(call_in_parts, tiled, work, (size, widths, v0))
    if v1:
        second = {"dout1": ragged_descriptor(call.dout, size, v1), "v1": ragged_descriptor(x.v, ROWS.value, v1)}
        second["dv1"] = None if dkdv.dv32 else ragged_descriptor(call.dv, ROWS.value, v1)
        dkdv = dkdv._replace(descriptors=dkdv.descriptors._replace(**second))
    arguments = Fused192Arguments(
        dkdv=dkdv,
        sums=DqSums(narrow=sums_descriptor(NARROW.value), wide=sums_descriptor(2 * NARROW.value)),
    )
    stages = Stages(scores=2, dp=2, p=2, ds=2)
    meta = backward_meta(x, (size, KEYS), stages, widths=widths, v0=v0, statistics=size)._replace(V1=v1)
    launch(_attn_bwd_fused_192_hopper_kernel, programs, x.device, Tile(size, KEYS, 4, 2), (arguments, x.mods, meta))
    add_parts(call, call_in_parts, parts)
    convert_dq(x, dq_sums, tiled.tiles, size, dq)
    zero_padding_of_gradients(call)
