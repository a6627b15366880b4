"""Constants and barriers of the backward for sm_100."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import BackwardSums
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.gluon.fused_arguments import FusedBarriers, FusedTiles
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers

CONSUMERS = gl.constexpr(2)  # warpgroups that share a tile of scores: half of its queries each
DQ_COLUMNS = gl.constexpr(32)  # columns of dq that are read from tensor memory at a time
DQ_STAGES = gl.constexpr(2)  # tiles of these columns on their way out


@with_features
class BackwardMeta(NamedTuple):
    """Constants that the backward is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    COLUMNS: int  # queries of which a thread holds the scores with one key at a time
    Q_STAGES: int
    DOUT_STAGES: int
    DQ_PARTS: int  # tiles of DQ_COLUMNS columns of dq
    DIM1: int = 0  # 0: the head dim has one part
    DOUT_APART: bool = True  # for this and the next four see `FusedMeta`
    NUMBERS: int = 0
    K_STAGES: int = 1
    V_STAGES: int = 1
    CONVERTED: int = 0


class ProductBarriers(NamedTuple):
    """Barriers between the warp that issues products and the consumers; all but the last are for one query block."""

    scores_full: gl.shared_memory_descriptor  # scores are complete
    weights_full: gl.shared_memory_descriptor  # weights have replaced the scores
    dp_full: gl.shared_memory_descriptor  # dp is complete, and no product reads ds of the previous block
    ds_full: gl.shared_memory_descriptor  # ds is complete, and dp has been read
    sums_full: gl.shared_memory_descriptor  # dk and dv are complete


class Buffers(NamedTuple):
    tiles: FusedTiles  # in shared memory
    barriers: FusedBarriers
    sums: BackwardSums  # in tensor memory
    products: ProductBarriers


@gluon.constexpr_function
def ds_layout(columns, dtype):
    # Layout of ds of a block; a consumer stores `columns` queries at a time, which are whole rows of the swizzle
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
