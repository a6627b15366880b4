"""The warp of the forward for sm_100 that issues all products: of q and k, and of weights and v.

They run in the order of issue. PTX guarantees that only for products of one accumulator; kernels of Triton and FlashAttention-4
rely on it for others too. A consumer's next scores are issued after the product that reads its weights, because they overwrite
them. So while one consumer computes its softmax, the other consumer's products run. A barrier that scores are committed to also
covers that product.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tcgen05_commit, tcgen05_mma

from flexattn.kernels_triton.blackwell.pipeline import Buffers
from flexattn.kernels_triton.blackwell.tensor_memory import fence_after_sync, forward_weights, multiply_scores
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer
from flexattn.kernels_triton.gluon.forward_arguments import Arguments
from flexattn.kernels_triton.gluon.forward_work import received_tile
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile


class Share(NamedTuple):
    """The blocks of a work tile that one consumer's queries see, by their indices among all blocks that the tile's queries see."""

    begin: int | gl.tensor
    end: gl.tensor
    before: int | gl.tensor  # blocks of the consumer in earlier work tiles


@gluon.jit
def _share_of(CONSUMER: gl.constexpr, before, received, META: gl.constexpr):
    QUERIES: gl.constexpr = META.BLOCK_M // META.CONSUMERS // META.GROUP
    m_start = received.tile.first_row + CONSUMER * QUERIES
    skipped, amount, _ = blocks_of_consumer(m_start, received.num_blocks, received.block_range, received.band, META)
    return Share(begin=skipped, end=skipped + amount, before=before)


@gluon.jit
def _add_product_with_v(n, n_block, share: Share, CONSUMER: gl.constexpr, buffers: Buffers, META: gl.constexpr):
    # For the n-th block of a work tile, which is the program's n_block-th
    v = buffers.tiles.v.index(pipeline.index(Stage(n_block, META.STAGES))).reshape([META.BLOCK_N, META.V0])
    weights = forward_weights(buffers.sums, CONSUMER, v.dtype, META.BLOCK_N, META)
    mbarrier.wait(buffers.products.weights_full.index(CONSUMER), (share.before + n - share.begin) & 1)
    fence_after_sync()
    tcgen05_mma(weights, v, buffers.sums.out.index(CONSUMER), use_acc=n > share.begin)  # O += P V
    if n == share.end - 1:
        tcgen05_commit(buffers.products.out_full.index(CONSUMER))


@gluon.jit
def _issue_scores(n, n_block, share: Share, q_slot, CONSUMER: gl.constexpr, buffers: Buffers, META: gl.constexpr):
    tiles = buffers.tiles
    index = pipeline.index(Stage(n_block, META.STAGES))
    multiply_scores(tiles.q, q_slot, tiles.k, index, buffers.sums.scores.index(CONSUMER), META)  # S = Q K^T
    tcgen05_commit(buffers.products.scores_full.index(CONSUMER))
    if n == share.end - 1:
        tcgen05_commit(buffers.barriers.q_empty.index(q_slot))


@gluon.jit
def product_partition(args: Arguments, buffers: Buffers, META: gl.constexpr):
    barriers = buffers.barriers
    STAGES: gl.constexpr = META.STAGES
    CONSUMERS: gl.constexpr = META.CONSUMERS
    n_block = 0  # counts the blocks of all work tiles
    n_tile = 0
    before0, before1 = 0, 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        num_blocks = received.num_blocks
        shares = (_share_of(0, before0, received, META), _share_of(1, before1, received, META))
        q_stage = Stage(n_tile, META.Q_STAGES)
        first_slot = pipeline.index(q_stage) * CONSUMERS
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(barriers.q_full.index(first_slot + consumer), pipeline.phase(q_stage))
            is_idle = shares[consumer].end == shares[consumer].begin
            mbarrier.arrive(barriers.q_empty.index(first_slot + consumer), count=1, pred=is_idle)
        for n in range(num_blocks + 1):  # the scores of block n, and the previous block's product with v
            if n < num_blocks:
                pipeline.wait_full(barriers.k_full, Stage(n_block + n, STAGES))
            if n > 0:
                pipeline.wait_full(barriers.v_full, Stage(n_block + n - 1, STAGES))
            for consumer in gl.static_range(CONSUMERS):
                share = shares[consumer]
                if (n > share.begin) & (n <= share.end):
                    _add_product_with_v(n - 1, n_block + n - 1, share, consumer, buffers, META)
                if (n >= share.begin) & (n < share.end):
                    _issue_scores(n, n_block + n, share, first_slot + consumer, consumer, buffers, META)
            if n < num_blocks:
                tcgen05_commit(barriers.k_empty.index(pipeline.index(Stage(n_block + n, STAGES))))
            if n > 0:
                tcgen05_commit(barriers.v_empty.index(pipeline.index(Stage(n_block + n - 1, STAGES))))
        before0 += shares[0].end - shares[0].begin
        before1 += shares[1].end - shares[1].begin
        n_block += num_blocks
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    if n_block > 0:  # the last commit must arrive before the program ends
        pipeline.wait_full(barriers.v_empty, Stage(n_block - 1, STAGES))
