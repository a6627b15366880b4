"""The warp of the backward for sm_100 that issues all products: of scores and dp, and the products that dv, dk and dq sum.

They run in the order of issue, as in `products`. For a query block that is

    scores | dq and dk of the previous block | dp | dv

So the consumers compute a block's weights during dq and dk of the previous block, and its ds during dv and the next scores. Two
tiles have two uses: weights replace their scores, and dq replaces dp. The next scores are issued after the product that reads the
weights. dp is issued after dq has left tensor memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tcgen05_commit, tcgen05_mma

from flexattn.kernels_triton.blackwell.backward_pipeline import Buffers
from flexattn.kernels_triton.blackwell.tensor_memory import fence_after_sync, weights_over
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments
from flexattn.kernels_triton.gluon.pipeline import Stage


@gluon.jit
def _issue_scores(n, buffers: Buffers, META: gl.constexpr):
    tiles = buffers.tiles
    stage = Stage(n, META.Q_STAGES)
    pipeline.wait_full(buffers.barriers.q_full, stage)  # k is loaded with the first q
    k = tiles.k.index(0).reshape([META.BLOCK_N, META.DIM])
    q = tiles.q.index(pipeline.index(stage)).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(k, q.permute([1, 0]), buffers.sums.scores, use_acc=False)  # S = K Q^T
    tcgen05_commit(buffers.products.scores_full.index(0))


@gluon.jit
def _issue_dq_and_dk(n, buffers: Buffers, META: gl.constexpr):
    tiles, barriers, sums = buffers.tiles, buffers.barriers, buffers.sums
    mbarrier.wait(buffers.products.ds_full.index(0), n & 1)
    fence_after_sync()
    k = tiles.k.index(0).reshape([META.BLOCK_N, META.DIM])
    tcgen05_mma(tiles.ds.permute([1, 0]), k, sums.dp.slice(0, META.DIM), use_acc=False)  # dQ = dS^T K
    tcgen05_commit(barriers.dq_full.index(0))
    index = pipeline.index(Stage(n, META.Q_STAGES))
    q = tiles.q.index(index).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(tiles.ds, q, sums.dk, use_acc=n > 0)  # dK += dS Q
    tcgen05_commit(barriers.q_empty.index(index))


@gluon.jit
def _issue_dp_and_dv(n, buffers: Buffers, META: gl.constexpr):
    COLUMNS: gl.constexpr = META.COLUMNS
    PARTS: gl.constexpr = META.BLOCK_M // COLUMNS
    tiles, barriers, sums = buffers.tiles, buffers.barriers, buffers.sums
    stage = Stage(n, META.DOUT_STAGES)
    pipeline.wait_full(barriers.dout_full, stage)  # v is loaded with the first dout
    pipeline.wait_empty(barriers.dq_empty, Stage(n, 1))
    fence_after_sync()
    v = tiles.v.index(0).reshape([META.BLOCK_N, META.DIM])
    dout = tiles.dout.index(pipeline.index(stage)).reshape([META.BLOCK_M, META.DIM])
    tcgen05_mma(v, dout.permute([1, 0]), sums.dp, use_acc=False)  # dP = V dO^T
    tcgen05_commit(buffers.products.dp_full.index(0))
    mbarrier.wait(buffers.products.weights_full.index(0), n & 1)
    fence_after_sync()
    for part in gl.static_range(PARTS):
        weights = weights_over(sums.scores, part * COLUMNS, COLUMNS, dout.dtype, META.BLOCK_M)
        tcgen05_mma(weights, dout.slice(part * COLUMNS, COLUMNS, 0), sums.dv, use_acc=n + part > 0)  # dV += P dO
    tcgen05_commit(barriers.dout_empty.index(pipeline.index(stage)))


@gluon.jit
def product_partition(args: FusedArguments, buffers: Buffers, block: Block, META: gl.constexpr):
    iterations = block.num_blocks * block.heads
    if iterations > 0:
        for n in range(iterations):  # counts the blocks of all query heads
            _issue_scores(n, buffers, META)
            if n > 0:
                _issue_dq_and_dk(n - 1, buffers, META)
            _issue_dp_and_dv(n, buffers, META)
        _issue_dq_and_dk(iterations - 1, buffers, META)
        tcgen05_commit(buffers.products.sums_full.index(0))
