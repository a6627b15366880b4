"""Conversion of dq from the fp32 sums of a fused backward, in a kernel of its own."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.copies import packed_start
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.statistics_tiles import place_of_program, statistics_tile
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.gluon.dq_parts import place_in_sums
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch

_CONVERSION_TILE = Tile(32, 64, 4, 1)


class ConversionArguments(NamedTuple):
    sums_ptr: WidePointer  # fp32 [tiles * SIZE, HEAD_DIM_QK]
    dq: Rows
    lengths_q: Lengths
    scale: float
    num_heads: int
    tiles_of_statistics: int | tl.tensor  # tiles of one head


@triton.jit
def _load_cores(sums, first_row, len_q, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    # Loads columns COLUMN .. COLUMN + WIDTH of sums that are in cores of 8 queries and 8 columns, see `mma.backward`
    HEAD_DIM: tl.constexpr = META.HEAD_DIM_QK
    row = tl.arange(0, META.BLOCK_M)[:, None]
    column = COLUMN + tl.arange(0, WIDTH)[None, :]
    place = row // 8 * (8 * HEAD_DIM) + column // 8 * 64 + column % 2 * 32 + row % 8 * 4 + column % 8 // 2
    return tl.load(sums + place, mask=(first_row + row < len_q) & (column < HEAD_DIM), other=0.0)


@kernel
def _attn_bwd_dq_conversion_kernel(args: ConversionArguments, SIZE: tl.constexpr, IN_CORES: tl.constexpr, META: tl.constexpr):
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
    rows = tl.arange(0, BLOCK_M)
    sums = args.sums_ptr + tl.cast(first_tile * SIZE + first_row, tl.int64) * HEAD_DIM
    sum_offsets = rows if IN_CORES else place_in_sums(rows) * HEAD_DIM
    dq_pointer = row_pointer(args.dq, b, h, start_q + first_row, META)
    _, offsets = row_steps(args.dq.stride_s, BLOCK_M, META)
    if IN_CORES:
        dq0 = _load_cores(sums, first_row, len_q, 0, META.QK0, META)
    else:
        dq0 = load_tile(sums, sum_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM, True)
    store_tile(dq_pointer, dq0 * args.scale, offsets, first_row, len_q, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        if IN_CORES:
            dq1 = _load_cores(sums, first_row, len_q, META.QK0, META.QK1, META)
        else:
            dq1 = load_tile(sums, sum_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM, True)
        store_tile(dq_pointer, dq1 * args.scale, offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM)


def convert_dq(problem: Problem, sums: Tensor, tiles: int, size: int, dq: Tensor, *, in_cores: bool = False) -> None:
    """Converts dq from its fp32 sums, which are in tiles of `size` queries like the statistics. in_cores: see `mma.backward`."""
    x, tile = problem, _CONVERSION_TILE
    meta = x.meta(tile, (dq,))
    arguments = ConversionArguments(
        sums_ptr=sums,
        dq=rows(dq, meta),
        lengths_q=x.lengths_q,
        scale=float(x.softmax_scale),
        num_heads=x.num_heads,
        tiles_of_statistics=tiles,
    )
    programs = triton.cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    launch(_attn_bwd_dq_conversion_kernel, programs, x.device, tile, (arguments, size, in_cores, meta))
