"""Constants and barriers of the backward for sm_100."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import BackwardSums
from flexattn.kernels_triton.common.problem import with_features
from flexattn.kernels_triton.hopper.fused_consumer import FusedBarriers, FusedTiles
from flexattn.kernels_triton.hopper.pipeline import allocate_barriers

CONSUMERS = gl.constexpr(2)  # warpgroups that share a tile of scores: half of its queries each
DQ_COLUMNS = gl.constexpr(32)  # columns of dq that leave tensor memory at a time
DQ_STAGES = gl.constexpr(2)  # tiles of so many columns on their way out


@with_features
class BackwardMeta(NamedTuple):
    """Constants that the backward is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    COLUMNS: int  # queries whose scores with a key a thread has at a time
    Q_STAGES: int
    DOUT_STAGES: int
    DQ_PARTS: int  # tiles of DQ_COLUMNS columns that dq has
    DOUT_APART: bool  # this and what follows as in `FusedMeta`
    NUMBERS: int
    K_STAGES: int
    V_STAGES: int
    CONVERTED: int


class ProductBarriers(NamedTuple):
    """Barriers between the warp that issues products and the consumers, of a block of queries but for the last one."""

    scores_full: Any  # scores are there
    weights_full: Any  # weights are there, in the place of the scores
    dp_full: Any  # dp is there, and no product reads ds of the block before
    ds_full: Any  # ds is there, and dp has been read
    sums_full: Any  # dk and dv are there


class Buffers(NamedTuple):
    tiles: FusedTiles  # in shared memory
    barriers: FusedBarriers
    sums: BackwardSums  # in tensor memory
    products: ProductBarriers


@gluon.constexpr_function
def ds_layout(columns, dtype):
    # ds of a block, of which a consumer stores so many queries at a time: whole rows of the swizzle
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=columns * bits // 8, element_bitwidth=bits, rank=2)


@gluon.jit
def allocate_product_barriers():
    return ProductBarriers(
        scores_full=allocate_barriers(1, 1),
        weights_full=allocate_barriers(1, CONSUMERS),
        dp_full=allocate_barriers(1, 1),
        ds_full=allocate_barriers(1, CONSUMERS),
        sums_full=allocate_barriers(1, 1),
    )
