"""Barriers and tiles in shared memory of the forward for sm_100."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import ForwardTiles
from flexattn.kernels_triton.gluon.forward_arguments import Tiles
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers, allocate_barriers


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
def allocate_product_barriers(CONSUMERS: gl.constexpr):
    return ProductBarriers(
        scores_full=allocate_barriers(CONSUMERS, 1),
        weights_full=allocate_barriers(CONSUMERS, 1),
        out_full=allocate_barriers(CONSUMERS, 1),
    )
