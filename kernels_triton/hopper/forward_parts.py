"""Both parts of out's columns in the forwards for sm_90: their products with v, their factors, and their stores.

The second part of a value is () if v's head dim has one part.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.descriptors import store_rows
from flexattn.kernels_triton.gluon.forward_arguments import Tiles
from flexattn.kernels_triton.gluon.pipeline import Stage
from flexattn.kernels_triton.gluon.softmax import rescaled
from flexattn.kernels_triton.hopper.products import zero_rows


@gluon.jit
def zero_parts(META: gl.constexpr):
    return zero_rows(META.VALUES0), zero_rows(META.VALUES1)


@gluon.jit
def begin_values(p, tiles: Tiles, stage: Stage, acc, acc1, META: gl.constexpr):
    # Returns the sums with a block's product of weights and v, which is in flight
    BLOCK_N: gl.constexpr = META.BLOCK_N
    v = tiles.v.index(pipeline.index(stage)).reshape([BLOCK_N, META.VALUES0])
    acc = warpgroup_mma(p, v, acc, is_async=True)  # O += P V
    if META.VALUES1 > 0:
        v1 = tiles.v1.index(pipeline.index(stage)).reshape([BLOCK_N, META.VALUES1])
        acc1 = warpgroup_mma(p, v1, acc1, is_async=True)  # O += P V
    return acc, acc1


@gluon.jit
def wait_for_values(acc, acc1, META: gl.constexpr):
    if META.VALUES1 > 0:
        acc, acc1 = warpgroup_mma_wait(0, deps=[acc, acc1])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, acc1


@gluon.jit
def rescaled_parts(acc, acc1, correction, META: gl.constexpr):
    acc = rescaled(acc, correction, META)
    if META.VALUES1 > 0:
        acc1 = rescaled(acc1, correction, META)
    return acc, acc1


@gluon.jit
def scaled_parts(acc, acc1, factor, META: gl.constexpr):
    # factor: for each row
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    if META.VALUES1 > 0:
        acc1 = acc1 * gl.convert_layout(factor, gl.SliceLayout(1, acc1.type.layout))[:, None]
    return acc, acc1


@gluon.jit
def store_out(part, COLUMN: gl.constexpr, token, length, row, head, descriptor, tile):
    # Asynchronous: the store may still be in flight on return.
    tma.store_wait(0)  # the previous store has read the buffer
    tile.reshape(part.shape).store(part.to(tile.dtype))
    fence_async_shared()
    store_rows(descriptor, token, length, row, head, COLUMN, tile)
