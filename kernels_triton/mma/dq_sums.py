"""dq of the fused backward: fp32 sums in global memory, to which warps add by atomics, and their conversion to dq.

The sums are in cores of 8 queries and 8 columns: [rows / 8, columns / 8, odd column, row, pair of columns]. So an atomic of a warp
is 128 bytes in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.statistics_tiles import place_of_program, statistics_tile
from flexattn.kernels_triton.common.tile_memory import store_tile
from flexattn.kernels_triton.gluon.dq_conversion import ConversionArguments
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(32, 64, 4, 1)


@gluon.jit
def add_to_sums(sums_ptr, dq, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    # Adds a tile of dq, its columns from FIRST on, to the sums at sums_ptr; columns past HEAD_DIM have none
    ROWS: gl.constexpr = dq.shape[0]
    WIDTH: gl.constexpr = dq.shape[1]
    cores = gl.permute(gl.reshape(dq, [ROWS // 8, 8, WIDTH // 8, 4, 2]), (0, 2, 4, 1, 3))
    values = gl.reshape(cores, [ROWS * WIDTH])
    place = gl.arange(0, ROWS * WIDTH, layout=values.type.layout)
    if WIDTH < HEAD_DIM or WIDTH > HEAD_DIM:
        core = place // 64
        column = FIRST // 8 + core % (WIDTH // 8)
        place = (core // (WIDTH // 8) * (HEAD_DIM // 8) + column) * 64 + place % 64
    if FIRST + WIDTH > HEAD_DIM:
        gl.atomic_add(sums_ptr + place, values, mask=column < HEAD_DIM // 8, sem="relaxed")
    else:
        gl.atomic_add(sums_ptr + place, values, sem="relaxed")


@triton.jit
def _load_sums(sums_ptr, first_row, len_q, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    row = tl.arange(0, META.BLOCK_M)[:, None]
    column = COLUMN + tl.arange(0, WIDTH)[None, :]
    place = row // 8 * (8 * HEAD_DIM) + column // 8 * 64 + column % 2 * 32 + row % 8 * 4 + column % 8 // 2
    return tl.load(sums_ptr + place, mask=(first_row + row < len_q) & (column < HEAD_DIM), other=0.0)


@kernel
def _attn_bwd_dq_of_cores_kernel(args: ConversionArguments, SIZE: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    blocks = tl.cdiv(args.lengths_q.max_seqlen, BLOCK_M)
    block, h, b = place_of_program(blocks, args.num_heads)
    start_q, len_q = load_sequence(args.lengths_q, b, META.IS_RAGGED_Q)
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    place_q = packed_start(args.lengths_q, b, start_q)
    first_tile = statistics_tile(b, h, args.num_heads, place_q, args.tiles_of_statistics, META, SIZE)
    sums = args.sums_ptr + tl.cast(first_tile * SIZE + first_row, tl.int64) * HEAD_DIM
    dq_pointer = row_pointer(args.dq, b, h, start_q + first_row, META)
    _, offsets = row_steps(args.dq.stride_s, BLOCK_M, META)
    dq0 = _load_sums(sums, first_row, len_q, 0, META.QK0, META)
    store_tile(dq_pointer, dq0 * args.scale, offsets, first_row, len_q, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        dq1 = _load_sums(sums, first_row, len_q, META.QK0, META.QK1, META)
        store_tile(dq_pointer, dq1 * args.scale, offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM)


def convert_dq(problem: Problem, sums: Tensor, tiles: int, size: int, dq: Tensor) -> None:
    """Converts dq from its sums, which are in tiles of `size` queries like the statistics."""
    x = problem
    meta = x.meta(_TILE, (dq,))
    arguments = ConversionArguments(
        sums_ptr=sums,
        dq=rows(dq, meta),
        lengths_q=x.lengths_q,
        scale=float(x.softmax_scale),
        num_heads=x.num_heads,
        tiles_of_statistics=tiles,
    )
    programs = triton.cdiv(x.longest_q, _TILE.block_m) * x.num_heads * x.batch
    launch(_attn_bwd_dq_of_cores_kernel, programs, x.device, _TILE, (arguments, size, meta))
