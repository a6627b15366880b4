"""Forward over lists of keys on sm_90, for latent attention with v in the first columns of k: two warpgroups share out's columns.

Each warpgroup computes the scores and the weights of every second block of keys, and adds the products of all weights with its
half of v's columns to its half of out. Weights pass between the warpgroups through shared memory. If k has a second part, they are
in that of the block's own keys, which nothing reads after the scores. Each block continues from the row maximum of the block before
it. Two loaders gather one block each (the schedule of FlashMLA's sparse prefill is similar).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.operands import ROWS, keep_pairs, opaque_zero, unpack_pairs
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_barriers
from flexattn.kernels_triton.gluon.softmax import for_threads, rescaled, softmax
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch
from flexattn.kernels_triton.sparse.conditions import wide_tile, widths
from flexattn.kernels_triton.sparse.gathering import (
    Arguments,
    Item,
    Ring,
    SparseMeta,
    allocate,
    allocate_ring,
    announce,
    correction_of,
    first_statistics,
    gather_block,
    item_at,
    load_query,
    score_product,
    store_lse,
    store_out,
    visible_scores,
)
from flexattn.kernels_triton.sparse.lists import has_no_queries, key_lists, programs_of

_REGISTERS = gl.constexpr(216)  # registers of a consumer's thread


class Exchange(NamedTuple):
    """Values that a warpgroup writes for the other: weights and row maxima of each block, and at the end the row sums."""

    weights: gl.shared_memory_descriptor  # [2, rows, BLOCK_N]
    row_max: gl.shared_memory_descriptor  # [2, rows]
    row_sum: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # by warpgroup: the weights and the maximum of its block are written
    summed: gl.shared_memory_descriptor  # by warpgroup: its row sums are written


@gluon.jit
def _publish(p, row_max, tile, SIDE: gl.constexpr, exchange: Exchange):
    tile.store(p)
    exchange.row_max.index(SIDE).store(row_max)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(SIDE), count=1)


@gluon.jit
def _half_of_values(ring: Ring, slot, SIDE: gl.constexpr, META: gl.constexpr):
    HALF: gl.constexpr = META.V0 // 2
    return ring.k.first.index(slot).slice(SIDE * HALF, HALF, 1)


@gluon.jit
def _finish(acc, row_max, row_sum, SIDE: gl.constexpr, item: Item, exchange: Exchange, args: Arguments, META: gl.constexpr):
    # Adds the sums of both warpgroups, and stores half of out
    ROW: gl.constexpr = row_max.type.layout
    total = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    exchange.row_sum.index(SIDE).store(total)
    mbarrier.arrive(exchange.summed.index(SIDE), count=1)
    mbarrier.wait(exchange.summed.index(1 - SIDE), 0)
    total += exchange.row_sum.index(1 - SIDE).load(ROW)
    row_sum_or_1 = gl.where(total == 0.0, 1.0, total)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    if SIDE == 0:
        store_lse(row_max, row_sum_or_1, item, args, META)
    rescale = gl.convert_layout(1.0 / row_sum_or_1, gl.SliceLayout(1, acc.type.layout))
    store_out(acc * rescale[:, None], SIDE * (META.V0 // 2), item, args, META)


@gluon.jit
def _left_partition(args: Arguments, ring: Ring, exchange: Exchange, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    # Computes the weights of blocks 0, 2, 4, ..
    DTYPE: gl.constexpr = ring.k.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, META.V0 // 2, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    item = item_at(gl.program_id(0), args, KV_BLOCK, META)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    row_max, row_sum = first_statistics(item, zeros, True, args, META)
    acc = gl.zeros([ROWS, META.V0 // 2], gl.float32, layout=OUT)
    pipeline.wait_full(ring.q_full, Stage(0, 1))
    for pair in range(gl.cdiv(item.num_blocks, 2)):
        own, other = Stage(2 * pair, 2), Stage(2 * pair + 1, 2)
        zero = opaque_zero(pair)
        here, there = zero, zero + 1
        pipeline.wait_full(ring.full, own)
        s = score_product(ring, zero, here, zeros, META)  # S = Q K^T
        s = warpgroup_mma_wait(0, deps=[s])
        s, factor = visible_scores(s, ring, here, item, args, META)
        weights, row_max, row_sum, correction = softmax(s, row_max, row_sum, factor, 0, DTYPE, META)
        p = unpack_pairs(weights, ROWS, BLOCK_N, P, DTYPE)
        _publish(p, row_max, exchange.weights.index(here), 0, exchange)
        acc = rescaled(acc, correction, META)
        acc = warpgroup_mma(p, _half_of_values(ring, here, 0, META), acc, is_async=True)  # O += P V, half of the columns
        acc = warpgroup_mma_wait(0, deps=[acc])
        keep_pairs(weights)
        pipeline.release(ring.empty, own)
        mbarrier.wait(exchange.full.index(1), pair & 1)
        new_max = exchange.row_max.index(1).load(row_max.type.layout)
        correction = correction_of(row_max, new_max)
        row_max = new_max
        row_sum = row_sum * for_threads(correction, row_sum)
        acc = rescaled(acc, correction, META)
        p_other = exchange.weights.index(there)
        acc = warpgroup_mma(p_other, _half_of_values(ring, there, 0, META), acc, is_async=True)  # O += P V of the other's block
        acc = warpgroup_mma_wait(0, deps=[acc])
        pipeline.release(ring.empty, other)
    _finish(acc, row_max, row_sum, 0, item, exchange, args, META)


@gluon.jit
def _right_partition(args: Arguments, ring: Ring, exchange: Exchange, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    # Computes the weights of blocks 1, 3, 5, .., during the product with the weights of the block before
    DTYPE: gl.constexpr = ring.k.first.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, META.V0 // 2, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    item = item_at(gl.program_id(0), args, KV_BLOCK, META)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    row_max, row_sum = first_statistics(item, zeros, False, args, META)
    acc = gl.zeros([ROWS, META.V0 // 2], gl.float32, layout=OUT)
    pipeline.wait_full(ring.q_full, Stage(0, 1))
    for pair in range(gl.cdiv(item.num_blocks, 2)):
        own, other = Stage(2 * pair + 1, 2), Stage(2 * pair, 2)
        zero = opaque_zero(pair)
        here, there = zero + 1, zero
        pipeline.wait_full(ring.full, own)
        s = score_product(ring, zero, here, zeros, META)  # S = Q K^T
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.wait(exchange.full.index(0), pair & 1)
        new_max = exchange.row_max.index(0).load(row_max.type.layout)
        correction = correction_of(row_max, new_max)
        row_sum = row_sum * for_threads(correction, row_sum)
        acc = rescaled(acc, correction, META)
        p_other = exchange.weights.index(there)
        acc = warpgroup_mma(p_other, _half_of_values(ring, there, 1, META), acc, is_async=True)  # O += P V of the other's block
        s, factor = visible_scores(s, ring, here, item, args, META)
        weights, row_max, row_sum, correction = softmax(s, new_max, row_sum, factor, 0, DTYPE, META)
        p = unpack_pairs(weights, ROWS, BLOCK_N, P, DTYPE)
        _publish(p, row_max, exchange.weights.index(here), 1, exchange)
        acc = warpgroup_mma_wait(0, deps=[acc])
        pipeline.release(ring.empty, other)
        acc = rescaled(acc, correction, META)
        acc = warpgroup_mma(p, _half_of_values(ring, here, 1, META), acc, is_async=True)  # O += P V, half of the columns
        acc = warpgroup_mma_wait(0, deps=[acc])
        keep_pairs(weights)
        pipeline.release(ring.empty, own)
    _finish(acc, row_max, row_sum, 1, item, exchange, args, META)


@gluon.jit
def _load_partition(args: Arguments, ring: Ring, SIDE: gl.constexpr, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    # Gathers every second block. With an odd number of blocks, one follows that has no key.
    item = item_at(gl.program_id(0), args, KV_BLOCK, META)
    load_query(ring, item, SIDE, args, META)
    for pair in range(gl.cdiv(item.num_blocks, 2)):
        n = 2 * pair + SIDE
        gather_block(n, ring, item, args, KV_BLOCK, META)
        async_copy.wait_group(0)
        announce(ring, n, SIDE, META)


@hopper_kernel
def _sparse_fwd_wide_hopper_kernel(args: Arguments, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    DTYPE: gl.constexpr = args.inputs.k.ptr.dtype.element_ty
    ring = allocate_ring(DTYPE, META)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = ring.k.second
    if META.QK1 == 0:
        weights = allocate(2, ROWS, META.BLOCK_N, DTYPE)
    exchange = Exchange(
        weights=weights,
        row_max=gl.allocate_shared_memory(gl.float32, [2, ROWS], rows),
        row_sum=gl.allocate_shared_memory(gl.float32, [2, ROWS], rows),
        full=allocate_barriers(2, 1),
        summed=allocate_barriers(2, 1),
    )
    gl.warp_specialize(
        [
            (_left_partition, (args, ring, exchange, KV_BLOCK, META)),
            (_right_partition, (args, ring, exchange, KV_BLOCK, META)),
            (_load_partition, (args, ring, 0, KV_BLOCK, META)),
            (_load_partition, (args, ring, 1, KV_BLOCK, META)),
        ],
        [4, 2, 2],
        [_REGISTERS, 72, 72],
    )


def wide_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile | None = None) -> None:
    """Launches the forward of a call that `conditions.wide_unsupported` does not reject."""
    x = problem
    if has_no_queries(x):  # no program writes
        out.zero_()
        lse.fill_(float("-inf"))
        return
    tile = tile or wide_tile(x)
    meta = _sparse_meta(x, tile, out)
    items = programs_of(x, tile.block_m)
    args = Arguments(inputs=x.inputs(meta), lists=key_lists(x), out=rows(out, meta), lse_ptr=lse, items=items)
    launch(_sparse_fwd_wide_hopper_kernel, items, x.device, tile, (args, x.kv_block, meta))
    if x.has_padding_q:
        zero_padding(x, out, "q", lse)


def _sparse_meta(problem: Problem, tile: Tile, out: Tensor) -> Any:
    x = problem
    qk0, qk1, v0 = widths(x)
    return SparseMeta(
        **x.features._asdict(),
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HEAD_DIM_QK=x.q.shape[-1],
        HEAD_DIM_V=x.v.shape[-1],
        QK0=qk0,
        QK1=qk1,
        V0=v0,
        ALIGN=x.meta(tile, (out,)).ALIGN,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
    )
