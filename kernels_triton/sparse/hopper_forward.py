"""Forward over lists of keys on sm_90, for head dims up to 256: each of two consumers has a query and a loader of its own.

The consumers share a multiprocessor, so that the products of one run during the softmax of the other.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.operands import ROWS, keep_pairs, unpack_pairs
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.softmax import rescaled, softmax
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel
from flexattn.kernels_triton.sparse import gathering
from flexattn.kernels_triton.sparse.conditions import narrow_tile
from flexattn.kernels_triton.sparse.hopper_launch import launch_items

_ITEMS = gl.constexpr(2)  # items of a program


@gluon.jit
def _compute_partition(
    args: gathering.Arguments, ring: gathering.Ring, CONSUMER: gl.constexpr, KV_BLOCK: gl.constexpr, META: gl.constexpr
):
    DTYPE: gl.constexpr = ring.v.dtype
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    item = gathering.item_at(gl.program_id(0) * _ITEMS + CONSUMER, args, KV_BLOCK, META)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    row_max, row_sum = gathering.first_statistics(item, zeros, True, args, META)
    acc = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
    pipeline.wait_full(ring.q_full, Stage(0, 1))
    for n in range(item.num_blocks):
        stage = Stage(n, META.STAGES)
        slot = pipeline.index(stage)
        pipeline.wait_full(ring.full, stage)
        s = gathering.score_product(ring, 0, slot, zeros, META)  # S = Q K^T
        s = warpgroup_mma_wait(0, deps=[s])
        s, factor = gathering.visible_scores(s, ring, slot, item, args, META)
        weights, row_max, row_sum, correction = softmax(s, row_max, row_sum, factor, 0, DTYPE, META)
        p = unpack_pairs(weights, ROWS, BLOCK_N, P, DTYPE)
        acc = rescaled(acc, correction, META)
        acc = warpgroup_mma(p, ring.v.index(slot), acc, is_async=True)  # O += P V
        acc = warpgroup_mma_wait(0, deps=[acc])
        keep_pairs(weights)
        pipeline.release(ring.empty, stage)
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    row_sum_or_1 = gl.where(total == 0.0, 1.0, total)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    gathering.store_lse(row_max, row_sum_or_1, item, args, META)
    gathering.store_out(acc * gl.convert_layout(1.0 / row_sum_or_1, gl.SliceLayout(1, OUT))[:, None], 0, item, args, META)


@gluon.jit
def _load_partition(
    args: gathering.Arguments, ring: gathering.Ring, CONSUMER: gl.constexpr, KV_BLOCK: gl.constexpr, META: gl.constexpr
):
    # With several stages, a block is announced after the copies of the next one are issued.
    item = gathering.item_at(gl.program_id(0) * _ITEMS + CONSUMER, args, KV_BLOCK, META)
    gathering.load_query(ring, item, 2, CONSUMER, args, META)
    for n in range(item.num_blocks):
        gathering.gather_block(n, ring, item, False, args, KV_BLOCK, META)
        if META.STAGES > 1:
            async_copy.wait_group(1)
            gathering.announce(ring, gl.maximum(n - 1, 0), n > 0, CONSUMER, META)
        else:
            async_copy.wait_group(0)
            gathering.announce(ring, n, True, CONSUMER, META)
    if META.STAGES > 1:
        async_copy.wait_group(0)
        gathering.announce(ring, gl.maximum(item.num_blocks - 1, 0), item.num_blocks > 0, CONSUMER, META)


@hopper_kernel
def _sparse_fwd_hopper_kernel(args: gathering.Arguments, KV_BLOCK: gl.constexpr, META: gl.constexpr):
    DTYPE: gl.constexpr = args.inputs.k.ptr.dtype.element_ty
    REGISTERS: gl.constexpr = META.REGISTERS
    first = gathering.allocate_ring(DTYPE, False, 1, 1, META)
    second = gathering.allocate_ring(DTYPE, False, 1, 1, META)
    gl.warp_specialize(
        [
            (_compute_partition, (args, first, 0, KV_BLOCK, META)),
            (_compute_partition, (args, second, 1, KV_BLOCK, META)),
            (_load_partition, (args, first, 0, KV_BLOCK, META)),
            (_load_partition, (args, second, 1, KV_BLOCK, META)),
        ],
        [4, 2, 2],
        [REGISTERS, 72, 72],
    )


def narrow_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile | None = None) -> None:
    """Launches the forward of a call that `conditions.narrow_unsupported` does not reject."""
    launch_items(_sparse_fwd_hopper_kernel, problem, (out, lse), tile or narrow_tile(problem), _ITEMS.value)
