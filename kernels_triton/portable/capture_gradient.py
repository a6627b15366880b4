"""The gradients of a score_mod's captures: one kernel recomputes the scores, and adds to the elements that the mod read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Rows, Statistics
from flexattn.kernels_triton.common.band import visible_range_of_keys
from flexattn.kernels_triton.common.block_lists import every_tile, listed_tile
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.fp8_tiles import descaled_products
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import load_large
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.row_statistics import by_rows, load_row_statistics, statistics_row
from flexattn.kernels_triton.common.scores import ScoreTile, score_gradient
from flexattn.kernels_triton.common.sequences import program_of_queries
from flexattn.kernels_triton.common.tile_memory import load_tile
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

# elements of a capture that millions of scores may read each: n roundings in fp32 cause an error of about sqrt(n) / 2**25
FEW = 2**16


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
    num_heads = inputs.num_heads
    num_tokens_q = inputs.lengths_q.num_tokens
    own = program_of_queries(tl.program_id(0), inputs, META)
    b, h = own.b, own.h
    start_q, len_q, start_kv, len_kv = own.sequence
    first_row = own.block * BLOCK_M
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
    tiles = every_tile(visible, args.lists, b, h, first_row, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
        columns = n + tl.arange(0, BLOCK_N)
        k_pointer = k_base + tl.cast(n, tl.int64) * k_step
        v_pointer = v_base + tl.cast(n, tl.int64) * v_step
        k0 = load_tile(k_pointer, k_offsets, n, len_kv, 0, META.QK0, META.HEAD_DIM_QK, True)
        v0 = load_tile(v_pointer, v_offsets, n, len_kv, 0, META.V0, META.HEAD_DIM_V, True)
        qk = tl.dot(q0, tl.trans(k0), input_precision=META.PRECISION)  # S = Q K^T, [BLOCK_M, BLOCK_N]
        dp = tl.dot(dout0, tl.trans(v0), input_precision=META.PRECISION)  # dP = dO V^T
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
    """Writes `gradients`, contiguous, of the captures that need one, from the `statistics` that the dq kernel wrote.

    Memory is linear in the captures. Atomics compute the sums, so their order varies from run to run. Sums are in fp32, or in fp64
    for captures with few elements. With `deterministic` there are two stages that do not depend on an order: the largest addend,
    then int64 fixed-point sums in a unit derived from it. An addend is rounded to 2**-(62 - log2(batch * heads * sq * skv)) of the
    largest one.
    """
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

    if not deterministic:
        sums = [g.new_zeros(g.shape, dtype=torch.float64 if g.numel() <= FEW else torch.float32) for g in gradients]
        run("add", sums, ())
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total)
        return
    largest = [torch.zeros(1, dtype=torch.int32, device=x.device) for _ in gradients]  # the bits of a non-negative float
    run("max", largest, ())
    room = 62 - max(0, math.ceil(math.log2(x.batch * x.num_heads * x.longest_q * x.longest_kv)))
    _, exponents = torch.frexp(torch.cat(largest).view(torch.float32))
    powers = torch.clamp(room - exponents, max=126)
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    fixed = [torch.zeros(g.shape, dtype=torch.int64, device=x.device) for g in gradients]
    # each at the beginning of its memory, because plans need that
    run("fixed", fixed, [scale.clone() for scale in scales.split(1)])
    for i, gradient in enumerate(gradients):
        total = fixed[i].to(torch.float64) / scales[i].to(torch.float64)
        is_finite = largest[i][0].view(torch.float32).isfinite()
        gradient.copy_(torch.where(is_finite, total, math.nan))
