"""The derivative of the backward along a direction: one kernel for the gradients of q, of k and v, and of the sink.

One program sums each element in a fixed order, so the results are bitwise repeatable. Some programs of the grid have a block of
queries, and the others a block of keys with all query heads that share it. Two more kernels, for a bias and for captured tensors,
compute the same tiles: `score_gradients`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import lse_row
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.runtime.launch import kernel
from flexattn.kernels_triton.second_order.tiles import (
    Place,
    RowSums,
    Scored,
    Tangents,
    keys_of_block,
    load_lse,
    load_qk,
    load_sink_tangent,
    load_v,
    product,
    queries_of_block,
    scored,
    store_parts,
    tile_at,
)


class Known(NamedTuple):
    """The arguments of the kernels of a double backward that determine a tile of derivatives."""

    inputs: Inputs
    tangents: Tangents
    lse_ptr: Pointer
    dout: Rows
    sums: RowSums


class DoubleArguments(NamedTuple):
    known: Known
    lists_kv: BlockMaskLists | None  # lists of key blocks
    lists_q: BlockMaskLists | None  # lists of query blocks
    hq: Rows  # zeros, and so are the next two
    hk: Rows
    hv: Rows
    dsink_ptr: Pointer  # zeros [h, b * blocks of queries]: parts of the sink's gradient
    programs_of_queries: int


class Queries(NamedTuple):
    """A block of queries with its numbers, inside a kernel."""

    q: tl.tensor
    tq: tl.tensor
    dout: tl.tensor
    lse_log2: tl.tensor
    first_row: tl.tensor
    mu: tl.tensor
    scale: tl.tensor
    delta: tl.tensor
    tangent_delta: tl.tensor


class Keys(NamedTuple):
    """A block of keys and values, inside a kernel."""

    k: tl.tensor
    tk: tl.tensor
    v: tl.tensor
    tv: tl.tensor
    n: tl.tensor  # the first key


class Derivatives(NamedTuple):
    """Tiles [queries, keys]: gradients of the logit and of the scaled score, their tangents, and a tile of `scored`."""

    dlogit: tl.tensor
    t_dlogit: tl.tensor
    dscore: tl.tensor
    t_dscore: tl.tensor
    t_weights: tl.tensor  # the tangent of the dropped weights
    scored: Scored


@triton.jit
def load_queries(args, b, h, start_q, len_q, first_row, META: tl.constexpr):
    inputs, sums = args.inputs, args.sums
    row = lse_row(b, h, inputs.num_heads, inputs.lengths_q.num_tokens, start_q, META)
    rows = first_row + tl.arange(0, META.BLOCK_M)
    is_real = rows < len_q
    place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
    return Queries(
        q=load_qk(inputs.q, place, META.BLOCK_M, META),
        tq=load_qk(args.tangents.q, place, META.BLOCK_M, META),
        dout=load_v(args.dout, place, META.BLOCK_M, META),
        lse_log2=load_lse(args.lse_ptr, row, rows, len_q),
        first_row=first_row,
        mu=tl.load(sums.mu_ptr + row + rows, mask=is_real, other=0.0),
        scale=tl.load(sums.scale_ptr + row + rows, mask=is_real, other=0.0),
        delta=tl.load(sums.delta_ptr + row + rows, mask=is_real, other=0.0),
        tangent_delta=tl.load(sums.tangent_delta_ptr + row + rows, mask=is_real, other=0.0),
    )


@triton.jit
def load_keys(args, b, h_kv, start_kv, len_kv, n, META: tl.constexpr):
    inputs, tangents = args.inputs, args.tangents
    place = Place(b=b, h=h_kv, start=start_kv, first=n, length=len_kv)
    return Keys(
        k=load_qk(inputs.k, place, META.BLOCK_N, META),
        tk=load_qk(tangents.k, place, META.BLOCK_N, META),
        v=load_v(inputs.v, place, META.BLOCK_N, META),
        tv=load_v(tangents.v, place, META.BLOCK_N, META),
        n=n,
    )


@triton.jit
def derivatives(args, queries, keys, is_full, head, MODS: tl.constexpr, BENDS: tl.constexpr, META: tl.constexpr):
    tile = scored(args, queries, keys, is_full, head, MODS, BENDS, META)
    p = tile.p * queries.scale[:, None]
    centred = product(queries.dout, keys.v, None, META.V1 > 0, META) * tile.drop - queries.delta[:, None]
    t_dp = product(queries.dout, keys.tv, None, META.V1 > 0, META) * tile.drop
    t_p = p * (tile.t_logit - queries.mu[:, None])
    dlogit = p * centred
    t_dlogit = t_p * centred + p * (t_dp - queries.tangent_delta[:, None])
    dscore = dlogit
    t_dscore = t_dlogit
    if META.HAS_SCORE_MOD:
        i = queries.first_row + tl.arange(0, META.BLOCK_M)[:, None]
        j = keys.n + tl.arange(0, META.BLOCK_N)[None, :]
        dscore = MODS.gradient(dlogit, tile.score, head.b, head.h, i, j, head.captures)
        t_dscore = MODS.gradient(t_dlogit, tile.score, head.b, head.h, i, j, head.captures)
        if BENDS.gradient is not None:
            t_dscore += BENDS.gradient(dlogit, tile.t_score, tile.score, head.b, head.h, i, j, head.captures)
    if META.HAS_SOFTCAP:
        slope = 1 - tile.cap_tanh * tile.cap_tanh
        bend = (-2.0 / head.softcap) * tile.cap_tanh * slope * tile.t_raw
        t_dscore = slope * t_dscore + bend * dscore
        dscore = slope * dscore
    return Derivatives(dlogit=dlogit, t_dlogit=t_dlogit, dscore=dscore, t_dscore=t_dscore, t_weights=t_p * tile.drop, scored=tile)


@triton.jit
def _add(acc, weights, x, META: tl.constexpr):
    return tl.dot(weights.to(x.dtype), x, acc, input_precision=META.PRECISION)


@triton.jit
def _of_queries(pid, args, MODS: tl.constexpr, BENDS: tl.constexpr, META: tl.constexpr):
    inputs = args.known.inputs
    BLOCK_M: tl.constexpr = META.BLOCK_M
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    num_heads = inputs.num_heads
    blocks = tl.cdiv(inputs.lengths_q.max_seqlen, BLOCK_M)
    block = blocks - 1 - pid % blocks
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    start_q, len_q = load_sequence(inputs.lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    queries = load_queries(args.known, b, h, start_q, len_q, first_row, META)
    hq0 = tl.zeros([BLOCK_M, QK0], tl.float32)
    hq1 = hq0
    if QK1 > 0:
        hq1 = tl.zeros([BLOCK_M, QK1], tl.float32)
    tiles = keys_of_block(args.lists_kv, head, first_row, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_N):
        n, is_full = tile_at(t, tiles.listed, META.BLOCK_SIZE_KV, META.BLOCK_N)
        keys = load_keys(args.known, b, h // inputs.group_size, start_kv, len_kv, n, META)
        found = derivatives(args.known, queries, keys, is_full, head, MODS, BENDS, META)
        hq0 = _add(_add(hq0, found.t_dscore, keys.k.first, META), found.dscore, keys.tk.first, META)
        if QK1 > 0:
            hq1 = _add(_add(hq1, found.t_dscore, keys.k.second, META), found.dscore, keys.tk.second, META)
    scale = inputs.scores.scale
    place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
    hq = Parts(first=hq0 * scale, second=hq1 * scale)
    store_parts(args.hq, hq, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    if META.HAS_OFFSET:
        p_sink = tl.exp2(load_sink(inputs.softmax_offset_ptr, h, LOG2E, META) - queries.lse_log2) * queries.scale
        t_sink = load_sink_tangent(args.known.tangents.sink_ptr, h)
        part = p_sink * ((t_sink - queries.mu) * queries.delta + queries.tangent_delta)
        tl.store(args.dsink_ptr + (h * inputs.lengths_q.batch + b) * blocks + block, -tl.sum(part, 0))


@triton.jit
def _of_keys(pid, args, MODS: tl.constexpr, BENDS: tl.constexpr, META: tl.constexpr):
    inputs = args.known.inputs
    BLOCK_N: tl.constexpr = META.BLOCK_N
    QK0: tl.constexpr = META.QK0
    QK1: tl.constexpr = META.QK1
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    num_heads_kv = inputs.num_heads // inputs.group_size
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, BLOCK_N)
    h_kv = pid // blocks % num_heads_kv
    b = pid // blocks // num_heads_kv
    start_q, len_q = load_sequence(inputs.lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    n = pid % blocks * BLOCK_N
    if n >= len_kv:
        return
    shift = (len_kv - len_q) * inputs.band.bottom_right
    keys = load_keys(args.known, b, h_kv, start_kv, len_kv, n, META)
    hk0 = tl.zeros([BLOCK_N, QK0], tl.float32)
    hk1 = hk0
    if QK1 > 0:
        hk1 = tl.zeros([BLOCK_N, QK1], tl.float32)
    hv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    hv1 = hv0
    if V1 > 0:
        hv1 = tl.zeros([BLOCK_N, V1], tl.float32)
    for h in range(h_kv * inputs.group_size, (h_kv + 1) * inputs.group_size):
        head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
        tiles = queries_of_block(args.lists_q, head, n, inputs, META)
        for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_M):
            first_row, is_full = tile_at(t, tiles.listed, META.BLOCK_SIZE_Q, META.BLOCK_M)
            queries = load_queries(args.known, b, h, start_q, len_q, first_row, META)
            found = derivatives(args.known, queries, keys, is_full, head, MODS, BENDS, META)
            dscore, t_dscore = tl.trans(found.dscore), tl.trans(found.t_dscore)
            t_weights = tl.trans(found.t_weights)
            hk0 = _add(_add(hk0, t_dscore, queries.q.first, META), dscore, queries.tq.first, META)
            hv0 = _add(hv0, t_weights, queries.dout.first, META)
            if QK1 > 0:
                hk1 = _add(_add(hk1, t_dscore, queries.q.second, META), dscore, queries.tq.second, META)
            if V1 > 0:
                hv1 = _add(hv1, t_weights, queries.dout.second, META)
    scale = inputs.scores.scale
    place = Place(b=b, h=h_kv, start=start_kv, first=n, length=len_kv)
    hk = Parts(first=hk0 * scale, second=hk1 * scale)
    store_parts(args.hk, hk, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    store_parts(args.hv, Parts(first=hv0, second=hv1), place, META.V0, META.V1, META.HEAD_DIM_V, META)


@kernel
def _attn_double_backward_kernel(args: DoubleArguments, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    if tl.program_id(0) < args.programs_of_queries:
        _of_queries(tl.program_id(0), args, MODS, BENDS, META)
    else:
        _of_keys(tl.program_id(0) - args.programs_of_queries, args, MODS, BENDS, META)
