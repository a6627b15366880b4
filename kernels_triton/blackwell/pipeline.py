"""Barriers and tiles in shared memory of the forward for sm_100."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import ForwardTiles
from flexattn.kernels_triton.gluon.forward_arguments import Tiles
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, allocate_barriers, allocate_tile_slots


class ProductBarriers(NamedTuple):
    """Barriers between the warp that issues products and the consumers, one for each consumer."""

    scores_full: gl.shared_memory_descriptor  # a block's scores are complete, and so is the previous block's product with v
    weights_full: gl.shared_memory_descriptor  # the weights are complete, and out is rescaled for them
    out_full: gl.shared_memory_descriptor  # a work tile's last product with v is complete


class Buffers(NamedTuple):
    tiles: Tiles  # in shared memory
    barriers: ForwardBarriers
    sums: ForwardTiles  # in tensor memory
    products: ProductBarriers


@gluon.jit
def allocate_loader_barriers(META: gl.constexpr):
    # As on sm_90, but one warp releases all stages after its products have read them, and it also receives work tiles.
    CONSUMERS: gl.constexpr = META.CONSUMERS
    STAGES: gl.constexpr = META.STAGES
    Q_TILES: gl.constexpr = CONSUMERS * META.Q_STAGES
    return ForwardBarriers(
        q_full=allocate_barriers(Q_TILES, 1),
        q_empty=allocate_barriers(Q_TILES, 1),
        k_full=allocate_barriers(STAGES, 1),
        k_empty=allocate_barriers(STAGES, 1),
        v_full=allocate_barriers(STAGES, 1),
        v_empty=allocate_barriers(STAGES, 1),
        tile_full=allocate_barriers(2, 1),
        tile_empty=allocate_barriers(2, CONSUMERS + 1),
        tile_slots=allocate_tile_slots(META.NUMBERS),
    )


@gluon.jit
def allocate_product_barriers(CONSUMERS: gl.constexpr):
    return ProductBarriers(
        scores_full=allocate_barriers(CONSUMERS, 1),
        weights_full=allocate_barriers(CONSUMERS, 1),
        out_full=allocate_barriers(CONSUMERS, 1),
    )
