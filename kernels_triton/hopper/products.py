"""Products of wgmma that several kernels share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import Pair


@gluon.constexpr_function
def product_layout(COLUMNS, WIDTH=16):
    """Returns the layout of ROWS rows of a product. WIDTH: terms of a step, 16 of 16 bits or 32 of 8 bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, WIDTH])


@gluon.jit
def zero_rows(COLUMNS: gl.constexpr):
    # Returns a sum of 16-bit products before the first; () for a part without columns
    if COLUMNS == 0:
        return ()
    else:
        return gl.zeros([ROWS, COLUMNS], gl.float32, layout=product_layout(COLUMNS))


@gluon.jit
def score_product(
    left: Pair, left_slot, right: Pair, stage, acc, COLUMNS: gl.constexpr, META: gl.constexpr, ADDS: gl.constexpr = False
):
    # Multiplies ROWS rows of q by COLUMNS of k, or rows of k by columns of q. ADDS: the product is added to acc
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    left0 = left.first.index(left_slot).reshape([ROWS, QK0])
    right0 = right.first.index(stage).reshape([COLUMNS, QK0])
    s = warpgroup_mma(left0, right0.permute([1, 0]), acc, use_acc=ADDS, is_async=True)
    if QK1 > 0:
        left1 = left.second.index(left_slot).reshape([ROWS, QK1])
        right1 = right.second.index(stage).reshape([COLUMNS, QK1])
        s = warpgroup_mma(left1, right1.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def dq_product(ds_tiles, k_tiles, buffer, k_tile, DIM: gl.constexpr, CONSUMER: gl.constexpr, META: gl.constexpr):
    # Returns this warpgroup's share of a tile of dq, from all 128 keys, whose tiles of DIM columns begin at k_tile: half of the
    # columns of 64 queries, all columns of one of two parts, or 64 of 128 queries.
    COLUMNS: gl.constexpr = DIM if META.DIM1 > 0 else DIM * META.BLOCK_M // 128
    dq = zero_rows(COLUMNS)
    for part in gl.static_range(2):
        ds = ds_tiles.index(buffer + part)
        k = k_tiles.index(k_tile + part).reshape([ROWS, DIM])
        if META.BLOCK_M == ROWS and META.DIM1 == 0:
            k = k.slice(CONSUMER * COLUMNS, COLUMNS, 1)
        elif META.BLOCK_M > ROWS:
            ds = ds.slice(CONSUMER * ROWS, ROWS, 1)
        dq = warpgroup_mma(ds.permute([1, 0]), k, dq, use_acc=part > 0, is_async=True)
    return dq
