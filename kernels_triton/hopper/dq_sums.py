"""dq of the backward in one kernel: fp32 sums in global memory, to which the copy engine adds tiles, and what makes dq of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.preprocess import statistics_tile
from flexattn.kernels_triton.common.primitives import load_sequence, load_tile, packed_start, row_pointer, row_steps, store_tile
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.hopper.block_ranges import query_block
from flexattn.kernels_triton.hopper.descriptors import reduce_add
from flexattn.kernels_triton.hopper.operands import ROWS
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_CONVERSION_TILE = Tile(64, 64, 4, 1)


@gluon.jit
def dq_product(ds_tiles, k_tiles, buffer, zero, CONSUMER: gl.constexpr, META: gl.constexpr):
    # This warpgroup's half of a tile of dq, from all 128 keys: half of the columns of 64 queries, or of 128 queries 64.
    COLUMNS: gl.constexpr = META.DIM * META.BLOCK_M // 128
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout=DQ)
    for part in gl.static_range(2):
        ds = ds_tiles.index(buffer + part)
        k = k_tiles.index(zero + part).reshape([ROWS, META.DIM])
        if META.BLOCK_M == ROWS:
            k = k.slice(CONSUMER * COLUMNS, COLUMNS, 1)
        else:
            ds = ds.slice(CONSUMER * ROWS, ROWS, 1)
        dq = warpgroup_mma(ds.permute([1, 0]), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def write_dq(dq, dq_tiles, dq_empty, turn, CONSUMER: gl.constexpr, META: gl.constexpr):
    slot = turn % META.DQ_STAGES
    mbarrier.wait(dq_empty.index(slot), ((turn // META.DQ_STAGES) & 1) ^ 1)
    # Rows r of eight go to 2 * (r % 4) + r // 4: rows that follow one another would be swizzled into the same banks.
    COLUMNS: gl.constexpr = dq.shape[1]
    dq = gl.permute(dq.reshape([ROWS // 8, 2, 4, COLUMNS]), [0, 2, 1, 3]).reshape([ROWS, COLUMNS])
    dq_tiles.index(2 * slot + CONSUMER).store(dq)


@gluon.jit
def hand_over(dq_full, turn, META: gl.constexpr):
    fence_async_shared()
    mbarrier.arrive(dq_full.index(turn % META.DQ_STAGES), count=1)


@gluon.jit
def add_dq(dq_descriptor, dq_tiles, dq_full, dq_empty, place, group_size, num_blocks, found, META: gl.constexpr):
    len_q, first_tile, tiles_of_a_head = place
    t = 0
    head = 0
    for turn in range(num_blocks * group_size):
        slot = turn % META.DQ_STAGES
        row = query_block(t, found, META)[0]
        at = (first_tile + head * tiles_of_a_head) * META.BLOCK_M + row
        mbarrier.wait(dq_full.index(slot), (turn // META.DQ_STAGES) & 1)
        # A listed block may lie past the end: no row of this head's. (The engine has no addition to rows outside of a tensor.)
        if META.BLOCK_SIZE_Q == 0 or row < len_q:
            for part in gl.static_range(2):
                if META.BLOCK_M == ROWS:
                    reduce_add(dq_descriptor, [at, part * (META.DIM // 2)], dq_tiles.index(2 * slot + part))
                else:
                    reduce_add(dq_descriptor, [at + part * ROWS, 0], dq_tiles.index(2 * slot + part))
        tma.store_wait(0)  # the engine has read the tile
        mbarrier.arrive(dq_empty.index(slot), count=1)
        t += 1
        if t == num_blocks:
            t = 0
            head += 1


@kernel
def _attn_bwd_dq_conversion_kernel(
    dq_sums_ptr,  # fp32 [tiles * SIZE, HEAD_DIM_QK]
    dq_ptr,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    cu_seqlens_q_ptr,
    cu_seqlens_q_padded_ptr,
    softmax_scale,
    batch,
    num_heads,
    num_tokens_q,
    max_seqlen_q,
    tiles,
    SIZE: tl.constexpr,
    META: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % num_heads
    b = tl.program_id(0) // blocks // num_heads
    start_q, len_q = load_sequence(
        Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, META.IS_RAGGED_Q
    )
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    place_q = packed_start(Lengths(cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, batch, num_tokens_q, max_seqlen_q), b, start_q)
    first_sum = statistics_tile(b, h, num_heads, place_q, tiles, META, SIZE) * SIZE + first_row
    rows = tl.arange(0, BLOCK_M)
    sums = dq_sums_ptr + tl.cast(first_sum, tl.int64) * HEAD_DIM
    sum_offsets = (rows // 8 * 8 + rows % 4 * 2 + rows // 4 % 2) * HEAD_DIM  # where `write_dq` put them
    dq_pointer = row_pointer(Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh), b, h, start_q + first_row, META)
    _, dq_offsets = row_steps(stride_dqs, BLOCK_M, META)
    dq0 = load_tile(sums, sum_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM, True)
    store_tile(dq_pointer, dq0 * softmax_scale, dq_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        dq1 = load_tile(sums, sum_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM, True)
        store_tile(dq_pointer, dq1 * softmax_scale, dq_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM)


def convert_dq(problem: Problem, dq_sums: Tensor, tiles: Tensor | None, size: int, dq: Tensor) -> None:
    """dq from its fp32 sums, in tiles of `size` queries as the statistics are."""
    x = problem
    portable = x.meta(_CONVERSION_TILE, (dq,))
    launch(
        _attn_bwd_dq_conversion_kernel,
        triton.cdiv(x.longest_q, _CONVERSION_TILE.block_m) * x.num_heads * x.batch,
        x.device,
        _CONVERSION_TILE,
        (
            *(dq_sums, dq, *row_strides(dq, portable), x.cu_seqlens_q, x.cu_seqlens_q_padded, float(x.softmax_scale)),
            *(x.batch, x.num_heads, x.q.shape[-3], x.longest_q, tiles, size, portable),
        ),
    )
