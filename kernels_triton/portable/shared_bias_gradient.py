"""The gradient of a dense bias that many batch entries share: a program keeps a tile of the bias and of its gradient.

`bias_gradient` computes the same for every call. This kernel loads its tile of the bias once, not once for each entry, and its loop
has no branches, so that the compiler issues the loads of the next entry ahead. Both write each tile once and use no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Inputs, Pointer, Rows, Statistics
from flexattn.kernels_triton.common.band import visible_keys
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import captures_of_head, head_of
from flexattn.kernels_triton.common.lse_rows import load_large, relative_to_lse
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.row_statistics import by_rows, load_row_statistics, statistics_row
from flexattn.kernels_triton.common.scores import load_bias
from flexattn.kernels_triton.common.tile_memory import load_parts
from flexattn.kernels_triton.common.tiles import SHARED_BIAS_GRADIENT
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.launch import kernel, launch

PROGRAMS = 4  # for each multiprocessor, if entries of the batch can be divided between programs
LEAST_ENTRIES = 8  # batch entries of a program, if they are divided


class Arguments(NamedTuple):
    inputs: Inputs
    dout: Rows
    parts_ptr: Pointer  # fp32 [num_splits, entries of the bias, h, sq, skv], contiguous
    statistics: Statistics
    group: int  # batch entries that share an entry of the bias
    num_splits: int


@kernel
def _attn_bwd_shared_dbias_kernel(args: Arguments, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    inputs = args.inputs
    scale = inputs.scores.scale
    num_heads = inputs.num_heads
    len_q = inputs.lengths_q.max_seqlen
    len_kv = inputs.lengths_kv.max_seqlen
    num_splits = args.num_splits
    blocks_m = tl.cdiv(len_q, BLOCK_M)
    blocks_n = tl.cdiv(len_kv, BLOCK_N)
    pid = tl.program_id(0)
    first_column = pid % blocks_n * BLOCK_N
    first_row = pid // blocks_n % blocks_m * BLOCK_M
    split = pid // blocks_n // blocks_m % num_splits
    h = pid // blocks_n // blocks_m // num_splits % num_heads
    entry = pid // blocks_n // blocks_m // num_splits // num_heads
    first_b = entry * args.group
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    j = first_column + tl.arange(0, BLOCK_N)[None, :]
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, first_b, h, len_q, len_kv, shift, MODS, META)
    bias = load_bias(head, i, j, META)
    is_visible = visible_keys(i, j, len_kv, shift, inputs.band, META)
    large = load_large(args.statistics.large_ptr, args.statistics.large_lse_ptr, num_heads, len_q, 0, META)

    _q_step, q_offsets = row_steps(inputs.q.stride_s, BLOCK_M, META)
    _dout_step, dout_offsets = row_steps(args.dout.stride_s, BLOCK_M, META)
    _k_step, k_offsets = row_steps(inputs.k.stride_s, BLOCK_N, META)
    _v_step, v_offsets = row_steps(inputs.v.stride_s, BLOCK_N, META)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in range(split, args.group, num_splits):
        b = first_b + n
        q_pointer = row_pointer(inputs.q, b, h, first_row, META)
        k_pointer = row_pointer(inputs.k, b, h // inputs.group_size, first_column, META)
        v_pointer = row_pointer(inputs.v, b, h // inputs.group_size, first_column, META)
        dout_pointer = row_pointer(args.dout, b, h, first_row, META)
        q = load_parts(q_pointer, q_offsets, first_row, len_q, META.QK0, META.QK1, META.HEAD_DIM_QK)
        k = load_parts(k_pointer, k_offsets, first_column, len_kv, META.QK0, META.QK1, META.HEAD_DIM_QK)
        dout = load_parts(dout_pointer, dout_offsets, first_row, len_q, META.V0, META.V1, META.HEAD_DIM_V)
        v = load_parts(v_pointer, v_offsets, first_column, len_kv, META.V0, META.V1, META.HEAD_DIM_V)
        row = statistics_row(b, h, num_heads, len_q, 0, META) + first_row
        statistics = by_rows(load_row_statistics(args.statistics, row, len_q - first_row, BLOCK_M, True, META))
        qk = tl.dot(q.first, tl.trans(k.first), input_precision=META.PRECISION)  # S = Q K^T
        if META.QK1 > 0:
            qk = tl.dot(q.second, tl.trans(k.second), qk, input_precision=META.PRECISION)
        dp = tl.dot(dout.first, tl.trans(v.first), input_precision=META.PRECISION)  # dP = dO V^T
        if META.V1 > 0:
            dp = tl.dot(dout.second, tl.trans(v.second), dp, input_precision=META.PRECISION)
        s = (qk + bias) * scale if META.HAS_PRE_SCALE_BIAS else qk * scale + bias
        s = relative_to_lse(s, -statistics.lse_log2, large, b, h, i, len_q, META)
        p = tl.exp2(tl.fma(s, LOG2E, -statistics.lse_log2))
        if META.NORMALIZES:
            p *= statistics.p_scale
        if META.HAS_MASK_MOD:
            captures = captures_of_head(b, h, inputs.scores.captures, MODS, META)
            p = tl.where(MODS.mask(b, h, i, j, captures), p, 0.0)
        total += tl.where(is_visible, p * (dp - statistics.delta), 0.0)
    if META.HAS_PRE_SCALE_BIAS:
        total *= scale
    entries = inputs.lengths_q.batch // args.group
    base = args.parts_ptr + ((tl.cast(split, tl.int64) * entries + entry) * num_heads + h) * len_q * len_kv
    tl.store(base + i.to(tl.int64) * len_kv + j, total, mask=(i < len_q) & (j < len_kv))


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot compute the gradient of a problem's bias. None: it can."""
    x, meta = problem, problem.features
    if x.bias is None or tuple(x.bias.shape[1:]) != (x.num_heads, x.q.shape[1], x.k.shape[1]):
        return "it supports only a bias with all heads, queries and keys"
    if x.has_lengths or x.q.dim() == 3 or x.k.dim() == 3:
        return "it supports only dense sequences of equal lengths"
    if x.batch < 2 * x.bias.shape[0]:
        return "each entry of the batch has a bias of its own"
    modified = meta.HAS_SOFTCAP, meta.HAS_SCORE_MOD, meta.HAS_DROPOUT, meta.BLOCK_SIZE_Q > 0, x.is_fp8
    if any(modified):
        return "it supports no softcap, score_mod, dropout, block mask and FP8"
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return f"it supports head dims up to 128, not {x.q.shape[-1]} and {x.v.shape[-1]}"
    return None


def shared_bias_gradient(
    problem: Problem, statistics: Statistics, dout: Tensor, dbias: Tensor, tile: Tile | None = None, splits: int | None = None
) -> None:
    """Writes `dbias`, in the bias's shape, from the `statistics` that the dq kernel wrote. Deterministic.

    splits: number of programs that divide the batch entries of a tile. Their sums are added in a fixed order. None: as many as the
    device needs.
    """
    x = problem
    if (reason := unsupported(x)) is not None or x.bias is None:
        raise ValueError(f"shared_bias_gradient cannot run this problem: {reason}")
    tile = tile or x.tile(SHARED_BIAS_GRADIENT)
    meta = x.meta(tile, (dout,))
    entries, heads, len_q, len_kv = x.bias.shape
    group = x.batch // entries
    tiles = entries * heads * triton.cdiv(len_q, tile.block_m) * triton.cdiv(len_kv, tile.block_n)
    if splits is None:
        splits = max(1, min(group // LEAST_ENTRIES, triton.cdiv(PROGRAMS * num_processors(x.device), max(1, tiles))))
    parts = torch.empty((splits, *x.bias.shape), dtype=torch.float32, device=x.device)
    args = Arguments(
        inputs=x.inputs(meta),
        dout=rows(dout, meta),
        parts_ptr=parts,
        statistics=statistics,
        group=group,
        num_splits=splits,
    )
    launch(_attn_bwd_shared_dbias_kernel, tiles * splits, x.device, tile, (args, x.mods, meta))
    dbias.copy_(parts.sum(0) if splits > 1 else parts[0])
