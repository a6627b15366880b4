"""Tensor memory of the kernels for sm_100: the tiles of scores, weights and out, their layouts, and the products that write them.

A tile has 128 rows, one for each lane, and 32-bit columns, of which there are 512. A warpgroup loads and stores a tile so that each
thread has one row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.runtime.gluon_names import reinterpreted, tensor_rows

LANES = gl.constexpr(128)  # rows of a tile: tcgen05.mma's M
_WARPS = 4  # warps of a warpgroup, each of which accesses a quarter of the lanes


@gluon.constexpr_function
def tile_layout(columns):
    # Layout of LANES rows of `columns` columns, 32 bits each or packed
    return TensorMemoryLayout((LANES.value, columns), col_stride=1)


@gluon.constexpr_function
def row_layout(columns):
    # Layout of such a tile in registers: a thread has a row
    return tensor_rows(gl.float32, (LANES.value, columns), tile_layout(columns), _WARPS)


class ForwardTiles(NamedTuple):
    """In tensor memory, by consumer: scores, and the weights that replace them; out."""

    scores: Any
    out: Any


@gluon.jit
def allocate_forward_tiles(CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, V0: gl.constexpr):
    scores = allocate_tensor_memory(gl.float32, [CONSUMERS, LANES, BLOCK_N], tile_layout(BLOCK_N))
    out = allocate_tensor_memory(gl.float32, [CONSUMERS, LANES, V0], tile_layout(V0))
    return ForwardTiles(scores=scores, out=out)


class BackwardSums(NamedTuple):
    """Sums in tensor memory, with keys as rows: scores, and the weights that replace them; dp; dk; dv.

    dq replaces dp, with queries as rows.
    """

    scores: Any
    dp: Any
    dk: Any
    dv: Any


@gluon.jit
def allocate_backward_sums(BLOCK_M: gl.constexpr, DIM: gl.constexpr):
    scores = allocate_tensor_memory(gl.float32, [LANES, BLOCK_M], tile_layout(BLOCK_M))
    dp = allocate_tensor_memory(gl.float32, [LANES, BLOCK_M], tile_layout(BLOCK_M))
    dk = allocate_tensor_memory(gl.float32, [LANES, DIM], tile_layout(DIM))
    dv = allocate_tensor_memory(gl.float32, [LANES, DIM], tile_layout(DIM))
    return BackwardSums(scores=scores, dp=dp, dk=dk, dv=dv)


@gluon.jit
def weights_over(scores, FIRST: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    # Returns 16-bit weights in the first half of the memory of COLUMNS columns of a tile of scores. The whole tile is
    # reinterpreted, because Triton 3.8 and later cannot reinterpret a part of one
    return reinterpreted(scores, DTYPE, [LANES, 2 * BLOCK_N], tile_layout(2 * BLOCK_N)).slice(2 * FIRST, COLUMNS)


@gluon.jit
def forward_weights(tiles: ForwardTiles, CONSUMER: gl.constexpr, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, META: gl.constexpr):
    # Returns the same for a consumer's scores in the forward
    CONSUMERS: gl.constexpr = META.CONSUMERS
    wide = reinterpreted(tiles.scores, DTYPE, [CONSUMERS, LANES, 2 * BLOCK_N], tile_layout(2 * BLOCK_N))
    return wide.index(CONSUMER).slice(0, BLOCK_N)


@gluon.jit
def multiply_scores(q: Pair, q_slot, k: Pair, stage, scores, META: gl.constexpr):
    # Multiplies LANES rows of q by BLOCK_N of k, asynchronously
    QK0: gl.constexpr = META.QK0
    QK1: gl.constexpr = META.QK1
    q0 = q.first.index(q_slot).reshape([LANES, QK0])
    k0 = k.first.index(stage).reshape([META.BLOCK_N, QK0])
    tcgen05_mma(q0, k0.permute([1, 0]), scores, use_acc=False)
    if QK1 > 0:
        q1 = q.second.index(q_slot).reshape([LANES, QK1])
        k1 = k.second.index(stage).reshape([META.BLOCK_N, QK1])
        tcgen05_mma(q1, k1.permute([1, 0]), scores, use_acc=True)


# Orders two threads' accesses to tensor memory (PTX ISA, "tcgen05.fence"): one fences before it arrives at the barrier between
# them, the other after it has waited there. A commit is itself a fence. Triton 3.6 and 3.7 insert none.
@gluon.jit
def fence_before_sync():
    assembly: gl.constexpr = "tcgen05.fence::before_thread_sync; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_after_sync():
    assembly: gl.constexpr = "tcgen05.fence::after_thread_sync; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
