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


@kernel
def _attn_bwd_dq_conversion_kernel(args: ConversionArguments, SIZE: tl.constexpr, META: tl.constexpr):
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
    sum_offsets = place_in_sums(rows) * HEAD_DIM
    dq_pointer = row_pointer(args.dq, b, h, start_q + first_row, META)
    _, dq_offsets = row_steps(args.dq.stride_s, BLOCK_M, META)
    dq0 = load_tile(sums, sum_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM, True)
    store_tile(dq_pointer, dq0 * args.scale, dq_offsets, first_row, len_q, 0, META.QK0, HEAD_DIM)
    if META.QK1 > 0:
        dq1 = load_tile(sums, sum_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM, True)
        store_tile(dq_pointer, dq1 * args.scale, dq_offsets, first_row, len_q, META.QK0, META.QK1, HEAD_DIM)


def convert_dq(problem: Problem, dq_sums: Tensor, tiles: int, size: int, dq: Tensor) -> None:
    """Converts dq from its fp32 sums, which are in tiles of `size` queries like the statistics."""
    x = problem
    portable = x.meta(_CONVERSION_TILE, (dq,))
    arguments = ConversionArguments(
        sums_ptr=dq_sums,
        dq=rows(dq, portable),
        lengths_q=x.lengths_q,
        scale=float(x.softmax_scale),
        num_heads=x.num_heads,
        tiles_of_statistics=tiles,
    )
    launch(
        _attn_bwd_dq_conversion_kernel,
        triton.cdiv(x.longest_q, _CONVERSION_TILE.block_m) * x.num_heads * x.batch,
        x.device,
        _CONVERSION_TILE,
        (arguments, size, portable),
    )
