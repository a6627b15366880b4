"""The forward over lists of keys: gathered tiles of keys and values, and an online softmax."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.crossovers import SPLIT_KEYS, SPLIT_MOST
from flexattn.kernels_triton.common.exponents import LN2, LOG2E
from flexattn.kernels_triton.common.fp8_tiles import load_descale
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.split_kv import PlannedTile, Splits, combine_parts
from flexattn.kernels_triton.common.split_ranges import Parts as SplitParts
from flexattn.kernels_triton.common.split_ranges import part_row, share_of_split
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import lists as sparse_lists

_PROGRAMS = 2  # programs of a multiprocessor, if keys are split


class Arguments(NamedTuple):
    inputs: Inputs
    lists: sparse_lists.KeyLists
    out: Rows
    lse_ptr: Pointer  # with splits, of the parts
    parts_ptr: Pointer  # out of the parts; None: the keys are not split
    num_splits: int | None
    latent_rows: Rows | None  # bytes of latents, instead of k and v


@kernel
def _sparse_fwd_kernel(args: Arguments, KV_BLOCK: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    inputs = args.inputs
    pid = tl.program_id(0)
    split = 0
    if args.parts_ptr is not None:
        split = pid % args.num_splits
        pid = pid // args.num_splits
    query = sparse_lists.query_at(pid, inputs, args.lists, KV_BLOCK, META)
    if META.HAS_LENGTHS:
        if args.parts_ptr is None:  # otherwise the kernel that adds the parts does it
            sparse_lists.clear_padding(args.out, args.lse_ptr, query, inputs, V0, V1, META.HEAD_DIM_V, META)
        if query.i >= query.len_q:
            return
    begin, end = 0, query.num_entries
    if args.parts_ptr is not None:
        begin, end = share_of_split(tl.cdiv(end, BLOCK_N), split, args.num_splits)
        begin, end = begin * BLOCK_N, end * BLOCK_N
    q = sparse_lists.load_heads(inputs.q, query, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    b_kv = query.b if inputs.pages.table_ptr is None else 0
    k_base = row_pointer(inputs.k, b_kv, query.h_kv, query.start_kv, META)
    v_base = row_pointer(inputs.v, b_kv, query.h_kv, query.start_kv, META)
    scale = inputs.scores.scale
    if META.IS_KV_FP8 and not META.HAS_TOKEN_SCALES_K:
        scale *= load_descale(inputs.scales.k, query.b, query.h_kv, 0, 1, META)
    head = head_of(inputs.scores, query.b, query.h, query.len_q, query.len_kv, query.shift, None, META)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = acc0
    if V1 > 0:
        acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        if args.latent_rows.ptr is not None:
            keys = sparse_lists.load_latents(query, q, args.latent_rows, first, args.lists, inputs, KV_BLOCK, META)
        else:
            keys = sparse_lists.load_keys(query, q, k_base, first, args.lists, inputs, KV_BLOCK, META)
        s, factor, _, _ = logits(keys.qk, query.i, keys.j[None, :], scale, head, None, META)
        s = tl.where(keys.is_seen[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - scaled_max)
        p = tl.exp2(tl.fma(s, factor, -scaled_max[:, None]))
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v0, v1 = sparse_lists.load_values(query, keys, v_base, inputs, META)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * correction[:, None], input_precision=META.PRECISION)
        if V1 > 0:
            acc1 = tl.dot(p, v1, acc1 * correction[:, None], input_precision=META.PRECISION)
    is_head = tl.arange(0, BLOCK_M) < query.num_heads
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    if META.HAS_SINK:
        sink = tl.zeros([BLOCK_M], tl.float32) + load_sink(
            inputs.softmax_offset_ptr, tl.where(is_head, sparse_lists.heads_of(query, META), 0), LOG2E, META
        )
        if args.parts_ptr is not None:
            sink = tl.where(split == 0, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        scaled_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - scaled_max)
        row_sum = row_sum * rescale + tl.exp2(sink - scaled_max)
        row_max = new_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    row = sparse_lists.rows_of_heads(query, inputs, META)
    rescale = rescale / row_sum
    if META.IS_KV_FP8 and not META.HAS_TOKEN_SCALES_V:
        rescale *= load_descale(inputs.scales.v, query.b, query.h_kv, 0, 1, META)
    rescale = rescale[:, None]
    lse = (row_max + tl.log2(row_sum)) * LN2
    if args.parts_ptr is not None:
        lengths = inputs.lengths_q
        row += part_row(split, lengths.batch, inputs.num_heads, lengths.num_tokens, META)
        columns = tl.arange(0, V0)
        places = args.parts_ptr + (row * (V0 + V1))[:, None] + columns[None, :]
        tl.store(places, acc0 * rescale, mask=is_head[:, None])
        if V1 > 0:
            places = args.parts_ptr + (row * (V0 + V1) + V0)[:, None] + tl.arange(0, V1)[None, :]
            tl.store(places, acc1 * rescale, mask=is_head[:, None])
    else:
        sparse_lists.store_heads(
            args.out, Parts(first=acc0 * rescale, second=acc1 * rescale), query.i, query, V0, V1, META.HEAD_DIM_V, META
        )
    tl.store(args.lse_ptr + row, lse, mask=is_head)


def num_splits(problem: Problem, tile: Tile) -> Splits:
    """Returns the number of parts of each list, and the reason. Few queries leave most of a device idle."""
    x = problem
    assert x.kv_indices is not None
    entries, programs = x.kv_indices.shape[-1] * x.kv_block, sparse_lists.programs_of(x, tile.block_m)
    if x.is_batch_invariant:
        return Splits(1, "a sequence's sum must not depend on the batch")
    room = _PROGRAMS * num_processors(x.device)
    count = max(1, min(room // max(1, programs), cdiv(entries, SPLIT_KEYS), SPLIT_MOST))
    return Splits(count, f"{programs} programs with up to {entries} keys each, on a device with room for {room}")


def sparse_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile, splits: int | None = None) -> None:
    """Writes out, in q's layout with v's head dim, and lse, fp32 [b, h, sq] or [h, total_q]. splits: None: `num_splits`"""
    x = problem
    if sparse_lists.has_no_queries(x):  # no program writes
        out.zero_()
        lse.fill_(float("-inf"))
        return
    splits = num_splits(x, tile).count if splits is None else splits
    meta = x.meta(tile, (out,))._replace(IS_LATENT=x.is_latent or x.latent_rows is not None)
    parts = SplitParts.empty(splits, lse, meta.V0 + meta.V1, False) if splits > 1 else None
    args = Arguments(
        inputs=x.inputs(meta),
        lists=sparse_lists.key_lists(x),
        out=rows(out, meta),
        lse_ptr=lse if parts is None else parts.lse,
        parts_ptr=None if parts is None else parts.out,
        num_splits=None if parts is None else splits,
        latent_rows=None if x.latent_rows is None else rows(x.latent_rows, meta),
    )
    launch(_sparse_fwd_kernel, sparse_lists.programs_of(x, tile.block_m) * splits, x.device, tile, (args, x.kv_block, meta))
    if parts is not None:
        whole = PlannedTile(heads=1, queries=1, seen=1, keys=tile.block_n, writes_whole=True)
        combine_parts(x, parts, (out, lse), None, whole)
