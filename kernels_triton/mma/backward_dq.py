"""Two-kernel backward attention in Gluon for GPUs with mma.sync: dq in a kernel of its own, so results are bitwise repeatable.

A program has a block of queries and visits all keys that these see, as the forward does. The scores are computed a second time:
there are seven products in place of the fused backward's five. The kernel of dk and dv is the fused backward's, without dq.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Parts, Rows, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import is_any_large, relative_to_lse
from flexattn.kernels_triton.common.preprocess import Tiled, tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.scores import logits, through_mods
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.gluon import backward_blocks
from flexattn.kernels_triton.gluon.block_ranges import key_block
from flexattn.kernels_triton.gluon.dropout import dropout_state, scaled
from flexattn.kernels_triton.gluon.masking import apply_mask_mod, mask_keys
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work
from flexattn.kernels_triton.mma.arguments import allocate_parts, product_layout
from flexattn.kernels_triton.mma.backward import arguments_of_backward, constants_of_backward, launch_key_blocks
from flexattn.kernels_triton.mma.copies import copy_block
from flexattn.kernels_triton.mma.dropout import kept
from flexattn.kernels_triton.mma.products import Destination, add_product, at, product_of_rows, store_part, zeros_of_part
from flexattn.kernels_triton.mma.tiles import MmaBackwardTile, MmaDqTile, backward_tile, dq_tile
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


@with_features
class MmaDqMeta(NamedTuple):
    """Constants that the kernel of dq is compiled for, besides `Features`."""

    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int  # widths of the one or two parts of a head dim
    QK1: int
    V0: int
    V1: int
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    WARPS: int
    STAGES: int
    GROUP: int  # heads of a tile, for dropout
    IS_FP8: bool
    ALIGN: int


class MmaDqArguments(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    dout: Rows
    dq: Rows
    statistics_ptr: Any
    tiles_of_statistics: int
    large: backward_blocks.LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    scores: Scores
    dropout: Dropout
    lists: BlockMaskLists | None  # lists of key blocks


class Tiles(NamedTuple):
    """In shared memory: q and dout, and rings of k and v."""

    q: Parts
    dout: Parts
    k: Parts
    v: Parts


@gluon.jit
def _copy_k(args: MmaDqArguments, tiles: Tiles, slot, column, block: backward_blocks.Block, META: gl.constexpr):
    base = row_pointer(args.k, block.b, block.h_kv, block.sequence.start_kv + column, META)
    copy_block(args.k, tiles.k, slot, META.QK0, META.HEAD_DIM_QK, base, block.sequence.len_kv - column, META)


@gluon.jit
def _copy_v(args: MmaDqArguments, tiles: Tiles, slot, column, block: backward_blocks.Block, META: gl.constexpr):
    base = row_pointer(args.v, block.b, block.h_kv, block.sequence.start_kv + column, META)
    copy_block(args.v, tiles.v, slot, META.V0, META.HEAD_DIM_V, base, block.sequence.len_kv - column, META)


@gluon.jit
def _copy_queries(args: MmaDqArguments, tiles: Tiles, block: backward_blocks.Block, META: gl.constexpr):
    first, left = block.sequence.start_q + block.first_row, block.sequence.len_q - block.first_row
    q_base, dout_base = row_pointer(args.q, block.b, block.h, first, META), row_pointer(args.dout, block.b, block.h, first, META)
    copy_block(args.q, tiles.q, 0, META.QK0, META.HEAD_DIM_QK, q_base, left, META)
    copy_block(args.dout, tiles.dout, 0, META.V0, META.HEAD_DIM_V, dout_base, left, META)


@gluon.jit
def _cuts_block(column, last, block: backward_blocks.Block, META: gl.constexpr):
    # Returns whether the block of keys at `column` needs a mask. last: from `last_key_seen_by_all`
    is_cut = (column + META.BLOCK_N > last) | is_any_large(block.large, META)
    if META.HAS_LEFT:
        is_cut = is_cut | (column < block.first_row + META.BLOCK_M - 1 + block.band.shift - block.band.left)
    return is_cut


@gluon.jit
def _add_blocks(args: MmaDqArguments, block: backward_blocks.Block, dq0, dq1, MODS: gl.constexpr, META: gl.constexpr):
    # Returns the two parts of dq without the softmax scale; dq0 and dq1 are zeros
    DTYPE: gl.constexpr = args.k.ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = META.BLOCK_M
    BLOCK_N: gl.constexpr = META.BLOCK_N
    STAGES: gl.constexpr = META.STAGES
    PRODUCT: gl.constexpr = dq0.type.layout
    tiles = Tiles(
        q=allocate_parts(DTYPE, 1, BLOCK_M, META.QK0, META.QK1),
        dout=allocate_parts(DTYPE, 1, BLOCK_M, META.V0, META.V1),
        k=allocate_parts(DTYPE, STAGES, BLOCK_N, META.QK0, META.QK1),
        v=allocate_parts(DTYPE, STAGES, BLOCK_N, META.V0, META.V1),
    )
    num_blocks = block.num_blocks
    first = key_block(0, block.block_range, META)[0]
    _copy_queries(args, tiles, block, META)
    _copy_k(args, tiles, 0, first, block, META)
    _copy_v(args, tiles, 0, first, block, META)
    async_copy.commit_group()
    len_q, len_kv = block.sequence.len_q, block.sequence.len_kv
    head = head_of(args.scores, block.b, block.h, len_q, len_kv, block.band.shift, MODS, META)
    rows = block.first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, PRODUCT))
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, PRODUCT))
    statistics = backward_blocks.load_query_statistics(backward_blocks.statistics_of_block(args, block, META), rows, len_q, META)
    minus_lse = statistics.minus_lse
    last = backward_blocks.last_key_seen_by_all(block.first_row, block.band, META)
    draws = dropout_state(args.dropout, 0, META)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=PRODUCT)
    q, dout = at(tiles.q, 0), at(tiles.dout, 0)
    for n in range(num_blocks):
        slot = n % STAGES
        has_next = n + 1 < num_blocks
        column, is_full = key_block(n, block.block_range, META)
        following = key_block(gl.minimum(n + 1, num_blocks - 1), block.block_range, META)[0]
        k, v = at(tiles.k, slot), at(tiles.v, slot)
        async_copy.wait_group(0)  # this block's k and v
        if STAGES == 2:
            if has_next:
                _copy_k(args, tiles, 1 - slot, following, block, META)
                _copy_v(args, tiles, 1 - slot, following, block, META)
            async_copy.commit_group()
        s = product_of_rows(q, k, zeros, False, META.QK1 > 0)
        dp = product_of_rows(dout, v, zeros, False, META.V1 > 0)
        if STAGES == 1:
            if has_next:
                _copy_v(args, tiles, slot, following, block, META)
            async_copy.commit_group()
        columns = column + block_columns
        i, j = rows[:, None], columns[None, :]
        s, factor, cap_tanh, score = logits(s, i, j, args.scores.scale, head, MODS, META)
        if _cuts_block(column, last, block, META):
            s = mask_keys(s, rows, columns, block.band, META)
            s = relative_to_lse(s, minus_lse[:, None], block.large, block.b, block.h, i, len_q, META)
        s = apply_mask_mod(s, i, j, is_full, head, MODS, META)
        p = gl.exp2(s * factor + minus_lse[:, None])
        dp = scaled(kept(dp, draws, block.first_head + block.h, block.first_row, column, META), draws, META)
        ds = through_mods(p * (dp + statistics.minus_delta[:, None]), cap_tanh, score, i, j, head, MODS, META)
        weights = gl.convert_layout(ds.to(DTYPE), gl.DotOperandLayout(0, PRODUCT, 2))
        dq0 = add_product(dq0, weights, k.first)
        if META.QK1 > 0:
            dq1 = add_product(dq1, weights, k.second)
        if STAGES == 1:
            if has_next:
                _copy_k(args, tiles, slot, following, block, META)
            async_copy.commit_group()
    return dq0, dq1


@hopper_kernel
def _attn_bwd_dq_mma_kernel(args: MmaDqArguments, MODS: gl.constexpr, META: gl.constexpr):
    PRODUCT: gl.constexpr = product_layout(META.WARPS)
    block = backward_blocks.query_block_of_program(args, META)
    dq0 = zeros_of_part(META.BLOCK_M, META.QK0, PRODUCT)
    dq1 = dq0
    if META.QK1 > 0:
        dq1 = zeros_of_part(META.BLOCK_M, META.QK1, PRODUCT)
    if block.num_blocks > 0:
        dq0, dq1 = _add_blocks(args, block, dq0, dq1, MODS, META)
    first, left = block.sequence.start_q + block.first_row, block.sequence.len_q - block.first_row
    to = Destination(x=args.dq, b=block.b, h=block.h, first=first, left=left)
    scale = args.scores.scale
    store_part(to, dq0 * scale, 0, META.HEAD_DIM_QK, META)
    if META.QK1 > 0:
        store_part(to, dq1 * scale, META.QK0, META.HEAD_DIM_QK, META)


def _launch_dq(call: Backward, tile: MmaDqTile, tiled: Tiled, statistics: int) -> None:
    x = call.problem
    meta = MmaDqMeta(
        **constants_of_backward(x),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STATISTICS=statistics,
        WARPS=tile.warps,
        STAGES=tile.num_stages,
    )
    work, programs = backward_work(x, tile.block_m, "q", 2 * (meta.QK0 + meta.QK1 + meta.V0 + meta.V1) * x.longest_kv)
    arguments = MmaDqArguments(
        q=rows_of(x.q, meta),
        k=rows_of(x.k, meta),
        v=rows_of(x.v, meta),
        dout=rows_of(call.dout, meta),
        dq=rows_of(call.dq, meta),
        **arguments_of_backward(x, tiled),
        work=work,
        lists=x.lists("kv"),
    )
    launch_tile = Tile(tile.block_m, tile.block_n, tile.warps, tile.num_stages)
    launch(_attn_bwd_dq_mma_kernel, programs, x.device, launch_tile, (arguments, x.mods, meta))


def mma_two_kernel_backward(call: Backward, tiles: tuple[MmaDqTile, MmaBackwardTile] | None = None) -> None:
    """Launches the backward of a call that `two_kernels_unsupported` does not reject; with a block mask, it has lists of keys.

    tiles: of dq, and of dk and dv.
    """
    x = call.problem
    own, key_tile = tiles or (dq_tile(x), backward_tile(x))
    tiled = tiled_statistics(call, key_tile.block_m)
    _launch_dq(call, own, tiled, key_tile.block_m)
    launch_key_blocks(call, key_tile, tiled)
    zero_padding_of_gradients(call)
