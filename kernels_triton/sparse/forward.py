"""The forward over lists of keys: gathered tiles of keys and values, and an online softmax."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse.lists import (
    KeyLists,
    clear_padding,
    heads_of,
    key_lists,
    load_heads,
    load_keys,
    load_values,
    programs_of,
    query_of_program,
    rows_of_heads,
    store_heads,
)


class Arguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    out: Rows
    lse_ptr: Pointer


@kernel
def _sparse_fwd_kernel(args: Arguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    inputs = args.inputs
    query = query_of_program(inputs, args.lists, KV_BLOCK, META)
    if META.HAS_LENGTHS:
        clear_padding(args.out, args.lse_ptr, query, inputs, V0, V1, META.HEAD_DIM_V, META)
        if query.i >= query.len_q:
            return
    q = load_heads(inputs.q, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    b_kv = query.b if inputs.pages.table_ptr is None else 0
    k_base = row_pointer(inputs.k, b_kv, query.h_kv, query.start_kv, META)
    v_base = row_pointer(inputs.v, b_kv, query.h_kv, query.start_kv, META)
    head = head_of(inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = acc0
    if V1 > 0:
        acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for first in tl.range(0, query.num_entries, BLOCK_N):
        keys = load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
        s, factor, _, _ = logits(keys.qk, query.i, keys.j[None, :], inputs.scores.scale, head, None, META)
        s = tl.where(keys.is_seen[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - scaled_max)
        p = tl.exp2(tl.fma(s, factor, -scaled_max[:, None]))
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v0, v1 = load_values(query, keys, v_base, inputs, META)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * correction[:, None], input_precision=META.PRECISION)
        if V1 > 0:
            acc1 = tl.dot(p, v1, acc1 * correction[:, None], input_precision=META.PRECISION)
    is_head = tl.arange(0, BLOCK_M) < query.num_heads
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    if META.HAS_SINK:
        sink = tl.zeros([BLOCK_M], tl.float32) + load_sink(
            inputs.softmax_offset_ptr, tl.where(is_head, heads_of(query, META), 0), LOG2E, META
        )
        new_max = tl.maximum(row_max, sink)
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - scaled_max)
        row_sum = row_sum * rescale + tl.exp2(sink - scaled_max)
        row_max = new_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    tl.store(args.lse_ptr + rows_of_heads(query, inputs, META), (row_max + tl.log2(row_sum)) * LN2, mask=is_head)
    rescale = (rescale / row_sum)[:, None]
    store_heads(args.out, Parts(first=acc0 * rescale, second=acc1 * rescale), query.i, query, V0, V1, META.HEAD_DIM_V, META)


def sparse_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile) -> None:
    """Writes out, in q's layout with v's head dim, and lse, fp32 [b, h, sq] or [h, total_q]."""
    x = problem
    if x.batch == 0:  # no program writes the padding
        out.zero_()
        lse.fill_(float("-inf"))
        return
    meta = x.meta(tile, (out,))._replace(IS_LATENT=x.is_latent)
    args = Arguments(inputs=x.inputs(meta), lists=key_lists(x), out=rows(out, meta), lse_ptr=lse)
    launch(_sparse_fwd_kernel, programs_of(x, tile.block_m), x.device, tile, (args, x.kv_block, meta))
