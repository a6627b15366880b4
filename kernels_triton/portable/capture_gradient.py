"""The gradients of a score_mod's captures: one kernel recomputes the scores, and adds to the elements that the mod read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Rows, Statistics
from flexattn.kernels_triton.common.band import visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import all_tiles, listed_tile, load_block_lists
from flexattn.kernels_triton.common.capture_sums import sum_addends
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.fp8_tiles import descaled_products
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import load_large
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.row_statistics import by_rows, load_row_statistics, statistics_row
from flexattn.kernels_triton.common.scores import ScoreTile, score_gradient
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch


class Arguments(NamedTuple):
    inputs: Inputs
    lists: BlockMaskLists | None  # lists of key blocks
    dout: Rows
    statistics: Statistics
    sums: Any  # a tuple: for each capture that needs a gradient a tensor, by MODE
    scales: Any  # a tuple: for each of `sums` its unit in mode "fixed", otherwise empty


@kernel
def _attn_bwd_captures_kernel(args: Arguments, MODE: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    lengths_q = inputs.lengths_q
    lengths_kv = inputs.lengths_kv
    num_heads = inputs.num_heads
    num_tokens_q = lengths_q.num_tokens
    blocks = tl.cdiv(lengths_q.max_seqlen, BLOCK_M)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(lengths_kv, b, META.IS_RAGGED_KV)
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    q_pointer = row_pointer(inputs.q, b, h, start_q + first_row, META)
    dout_pointer = row_pointer(args.dout, b, h, start_q + first_row, META)
    k_base = row_pointer(inputs.k, b, h // inputs.group_size, start_kv, META)
    v_base = row_pointer(inputs.v, b, h // inputs.group_size, start_kv, META)
    _, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
    _, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    k_step, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
    v_step, v_offsets = row_steps(inputs.v.stride_s, BLOCK_N, META)
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    first_statistic = statistics_row(b, h, num_heads, num_tokens_q, start_q, META)
    large = load_large(args.statistics.large_ptr, args.statistics.large_lse_ptr, num_heads, num_tokens_q, start_q, META)
    statistics = load_row_statistics(args.statistics, first_statistic + first_row, len_q - first_row, BLOCK_M, True, META)
    q0 = load_tile(q_pointer, q_offsets, first_row, len_q, 0, META.QK0, META.HEAD_DIM_QK, True)
    dout0 = load_tile(dout_pointer, dout_offsets, first_row, len_q, 0, META.V0, META.HEAD_DIM_V, True)
    q1 = q0
    dout1 = dout0
    if META.QK1 > 0:
        q1 = load_tile(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
    if META.V1 > 0:
        dout1 = load_tile(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V, True)
    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    begin, end = visible.begin, visible.end
    listed = None
    if META.BLOCK_SIZE_Q > 0:
        row = b * args.lists.stride_b + h * args.lists.stride_h + first_row // META.BLOCK_SIZE_Q
        row_lists = load_block_lists(args.lists, row, visible, META.BLOCK_SIZE_KV, BLOCK_N, META.HAS_LEFT, META)
        listed = all_tiles(row_lists)
        begin = 0
        end = row_lists.num_tiles + row_lists.num_full_tiles
    for t in tl.range(begin, end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n = t
        is_full = False
        if META.BLOCK_SIZE_Q > 0:
            n, is_full = listed_tile(t, listed, META.BLOCK_SIZE_KV, BLOCK_N)
        columns = n + tl.arange(0, BLOCK_N)
        k_pointer = k_base + tl.cast(n, tl.int64) * k_step
        v_pointer = v_base + tl.cast(n, tl.int64) * v_step
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
        v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)
        if META.QK1 > 0:
            k1 = load_tile(k_pointer, k_offsets, n, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK, True)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision=META.PRECISION)
        if META.V1 > 0:
            v1 = load_tile(v_pointer, v_offsets, n, len_kv, META.V0, META.V1, META.HEAD_DIM_V, True)
            dp = tl.dot(dout1, tl.trans(v1), dp, input_precision=META.PRECISION)
        products = descaled_products(qk, dp, inputs, head, h // inputs.group_size, first_row, n, META)
        keep = True
        if META.HAS_DROPOUT:
            keep = dropout_keep(inputs, b, h, first_row, n, META)
        tile = ScoreTile(i=rows[:, None], j=columns[None, :], keep=keep, is_full=is_full, large=large)
        gradient = score_gradient(products, by_rows(statistics), tile, head, inputs, MODS, "keys", META)
        dlogit, score, captures = gradient.dlogit, gradient.score, head.captures
        MODS.accumulate(dlogit, score, b, h, tile.i, tile.j, captures, args.sums, args.scales, MODE)


def capture_gradients(
    problem: Problem,
    statistics: Statistics,
    dout: Tensor,
    gradients: Sequence[Tensor],
    deterministic: bool,
    tile: Tile | None = None,
) -> None:
    """Writes `gradients`, contiguous, of the captures that need one, from the `statistics` that the dq kernel wrote."""
    x = problem
    tile = tile or x.tile(BIAS_GRADIENT)
    meta = x.meta(tile, (dout,))
    programs = triton.cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch

    def run(mode: str, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        args = Arguments(
            inputs=x.inputs(meta),
            lists=x.lists("kv"),
            dout=rows(dout, meta),
            statistics=statistics,
            sums=tuple(sums),
            scales=tuple(scales),
        )
        launch(_attn_bwd_captures_kernel, programs, x.device, tile, (args, mode, x.mods, meta))

    sum_addends(run, gradients, deterministic, x.batch * x.num_heads * x.longest_q * x.longest_kv)
