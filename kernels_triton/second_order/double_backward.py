"""The derivative of the backward along a direction: a kernel for the gradients of q and of the sink, another for k and v.

One program sums each element in a fixed order, so the results are bitwise repeatable. A program of the first has a block of queries,
and one of the second a block of keys with all query heads that share it. Two more kernels, for a bias and for captured tensors,
compute the same tiles: `score_gradients`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import BlockMaskLists, Head, Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.block_lists import first_loop, listed_tile
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import lse_row
from flexattn.kernels_triton.common.sequences import program_of_queries, sequence_of
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import zero_parts
from flexattn.kernels_triton.runtime.launch import kernel
from flexattn.kernels_triton.second_order.tiles import (
    Place,
    RowSums,
    Scored,
    Tangents,
    add_product,
    along,
    load_lse,
    load_qk,
    load_sink_tangent,
    load_v,
    loops_of_keys,
    loops_of_queries,
    pairs_of,
    product,
    scored,
    store_parts,
)


class Known(NamedTuple):
    """The arguments of the kernels of a double backward that determine a tile of derivatives."""

    inputs: Inputs
    tangents: Tangents
    lse_ptr: Pointer
    dout: Rows
    sums: RowSums


class QueriesArguments(NamedTuple):
    known: Known
    lists: BlockMaskLists | None  # lists of key blocks
    hq: Rows  # zeros
    dsink_ptr: Pointer  # zeros [h, b * blocks of queries]: parts of the sink's gradient


class KeysArguments(NamedTuple):
    known: Known
    lists: BlockMaskLists | None  # lists of query blocks
    hk: Rows  # zeros, and so is hv
    hv: Rows


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
    """Tiles: gradients of the logit and of the scaled score, their tangents, and a tile of `scored`."""

    dlogit: tl.tensor
    t_dlogit: tl.tensor
    dscore: tl.tensor
    t_dscore: tl.tensor
    t_weights: tl.tensor  # the tangent of the dropped weights
    scored: Scored


@triton.jit
def load_queries(args, place, CHECK: tl.constexpr, META: tl.constexpr):
    # CHECK: whether rows may be past the end.
    inputs, sums = args.inputs, args.sums
    row = lse_row(place.b, place.h, inputs.num_heads, inputs.lengths_q.num_tokens, place.start, META)
    rows = place.first + tl.arange(0, META.BLOCK_M)
    return Queries(
        q=load_qk(inputs.q, place, META.BLOCK_M, CHECK, META),
        tq=load_qk(args.tangents.q, place, META.BLOCK_M, CHECK, META),
        dout=load_v(args.dout, place, META.BLOCK_M, CHECK, META),
        lse_log2=load_lse(args.lse_ptr, row, rows, place.length),
        first_row=place.first,
        mu=_of_row(sums.mu_ptr, row, rows, place.length, CHECK),
        scale=_of_row(sums.scale_ptr, row, rows, place.length, CHECK),
        delta=_of_row(sums.delta_ptr, row, rows, place.length, CHECK),
        tangent_delta=_of_row(sums.tangent_delta_ptr, row, rows, place.length, CHECK),
    )


@triton.jit
def _of_row(pointer, row, rows, length, CHECK: tl.constexpr):
    return tl.load(pointer + row + rows, mask=rows < length, other=0.0) if CHECK else tl.load(pointer + row + rows)


@triton.jit
def load_keys(args, place, CHECK: tl.constexpr, META: tl.constexpr):
    inputs, tangents = args.inputs, args.tangents
    return Keys(
        k=load_qk(inputs.k, place, META.BLOCK_N, CHECK, META),
        tk=load_qk(tangents.k, place, META.BLOCK_N, CHECK, META),
        v=load_v(inputs.v, place, META.BLOCK_N, CHECK, META),
        tv=load_v(tangents.v, place, META.BLOCK_N, CHECK, META),
        n=place.first,
    )


@triton.jit
def derivatives(
    args,
    pairs,
    head,
    MODS: tl.constexpr,
    BENDS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BY_KEYS: tl.constexpr,
    META: tl.constexpr,
):
    queries, keys, i, j = pairs.queries, pairs.keys, pairs.i, pairs.j
    tile = scored(args, pairs, head, MODS, BENDS, IS_MASKED, BY_KEYS, META)
    p = tile.p
    if META.NORMALIZES:
        p *= along(queries.scale, BY_KEYS)
    dp = product(queries.dout, keys.v, None, META.V1 > 0, BY_KEYS, META)
    t_dp = product(queries.dout, keys.tv, None, META.V1 > 0, BY_KEYS, META)
    centred = dp * tile.drop - along(queries.delta, BY_KEYS)
    t_centred = t_dp * tile.drop - along(queries.tangent_delta, BY_KEYS)
    t_logit = tile.t_logit - along(queries.mu, BY_KEYS)
    dlogit = p * centred
    t_dlogit = p * (t_logit * centred + t_centred)
    dscore = dlogit
    t_dscore = t_dlogit
    if META.HAS_SCORE_MOD:
        dscore = MODS.gradient(dlogit, tile.score, head.b, head.h, i, j, head.captures)
        t_dscore = MODS.gradient(t_dlogit, tile.score, head.b, head.h, i, j, head.captures)
        if BENDS.gradient is not None:
            t_dscore += BENDS.gradient(dlogit, tile.t_score, tile.score, head.b, head.h, i, j, head.captures)
    if META.HAS_SOFTCAP:
        slope = 1 - tile.cap_tanh * tile.cap_tanh
        bend = (-2.0 / head.softcap) * tile.cap_tanh * slope * tile.t_raw
        t_dscore = slope * t_dscore + bend * dscore
        dscore = slope * dscore
    t_weights = p * t_logit * tile.drop
    return Derivatives(dlogit=dlogit, t_dlogit=t_dlogit, dscore=dscore, t_dscore=t_dscore, t_weights=t_weights, scored=tile)


class QueryBlock(NamedTuple):
    """A block of queries, and the place of its keys, inside a kernel."""

    head: Head
    h_kv: tl.tensor
    start_kv: tl.tensor
    queries: Queries


@triton.jit
def _queries_loop(hq, block, tiles, args, MODS: tl.constexpr, BENDS: tl.constexpr, IS_MASKED: tl.constexpr, META: tl.constexpr):
    head = block.head
    hq0, hq1 = hq.first, hq.second
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, META.BLOCK_N)
        place = Place(b=head.b, h=block.h_kv, start=block.start_kv, first=n, length=head.len_kv)
        keys = load_keys(args, place, IS_MASKED, META)
        pairs = pairs_of(block.queries, keys, is_full, False, META)
        found = derivatives(args, pairs, head, MODS, BENDS, IS_MASKED, False, META)
        hq0 = add_product(add_product(hq0, found.t_dscore, keys.k.first, META), found.dscore, keys.tk.first, META)
        if META.QK1 > 0:
            hq1 = add_product(add_product(hq1, found.t_dscore, keys.k.second, META), found.dscore, keys.tk.second, META)
    return Parts(first=hq0, second=hq1)


@kernel
def _attn_double_queries_kernel(args: QueriesArguments, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    inputs = args.known.inputs
    own = program_of_queries(tl.program_id(0), inputs, META)
    b, h, block = own.b, own.h, own.block
    start_q, len_q, start_kv, len_kv = own.sequence
    first_row = block * META.BLOCK_M
    if first_row >= len_q:
        return
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
    queries = load_queries(args.known, place, True, META)
    own_block = QueryBlock(head=head, h_kv=h // inputs.group_size, start_kv=start_kv, queries=queries)
    hq = zero_parts(META.BLOCK_M, META.QK0, META.QK1)
    loops = loops_of_queries(args.lists, head, first_row, inputs, META)
    for LOOP in tl.static_range(first_loop(META.HAS_LEFT, META.BLOCK_SIZE_Q), 3):
        hq = _queries_loop(hq, own_block, loops[LOOP], args.known, MODS, BENDS, LOOP != 1, META)
    scale = inputs.scores.scale
    hq = Parts(first=hq.first * scale, second=hq.second * scale)
    store_parts(args.hq, hq, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    if META.HAS_OFFSET:
        p_sink = tl.exp2(load_sink(inputs.softmax_offset_ptr, h, LOG2E, META) - queries.lse_log2) * queries.scale
        t_sink = load_sink_tangent(args.known.tangents.sink_ptr, h)
        part = p_sink * ((t_sink - queries.mu) * queries.delta + queries.tangent_delta)
        tl.store(args.dsink_ptr + (h * inputs.lengths_q.batch + b) * own.blocks + block, -tl.sum(part, 0))


class KeyBlock(NamedTuple):
    """A block of keys, and the place of queries that see it, inside a kernel."""

    head: Head
    start_q: tl.tensor
    keys: Keys


class KeySums(NamedTuple):
    hk: Parts
    hv: Parts


@triton.jit
def _keys_loop(sums, block, tiles, args, MODS: tl.constexpr, BENDS: tl.constexpr, IS_MASKED: tl.constexpr, META: tl.constexpr):
    head = block.head
    hk0, hk1, hv0, hv1 = sums.hk.first, sums.hk.second, sums.hv.first, sums.hv.second
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_M):
        first_row, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_Q, META.BLOCK_M)
        place = Place(b=head.b, h=head.h, start=block.start_q, first=first_row, length=head.len_q)
        queries = load_queries(args, place, IS_MASKED, META)
        pairs = pairs_of(queries, block.keys, is_full, True, META)
        found = derivatives(args, pairs, head, MODS, BENDS, IS_MASKED, True, META)
        hk0 = add_product(add_product(hk0, found.t_dscore, queries.q.first, META), found.dscore, queries.tq.first, META)
        hv0 = add_product(hv0, found.t_weights, queries.dout.first, META)
        if META.QK1 > 0:
            hk1 = add_product(add_product(hk1, found.t_dscore, queries.q.second, META), found.dscore, queries.tq.second, META)
        if META.V1 > 0:
            hv1 = add_product(hv1, found.t_weights, queries.dout.second, META)
    return KeySums(hk=Parts(first=hk0, second=hk1), hv=Parts(first=hv0, second=hv1))


@kernel
def _attn_double_keys_kernel(args: KeysArguments, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    inputs = args.known.inputs
    pid = tl.program_id(0)
    num_heads_kv = inputs.num_heads // inputs.group_size
    blocks = tl.cdiv(inputs.lengths_kv.max_seqlen, META.BLOCK_N)
    h_kv = pid // blocks % num_heads_kv
    b = pid // blocks // num_heads_kv
    start_q, len_q, start_kv, len_kv = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    n = pid % blocks * META.BLOCK_N
    if n >= len_kv:
        return
    shift = (len_kv - len_q) * inputs.band.bottom_right
    place = Place(b=b, h=h_kv, start=start_kv, first=n, length=len_kv)
    keys = load_keys(args.known, place, True, META)
    hk, hv = zero_parts(META.BLOCK_N, META.QK0, META.QK1), zero_parts(META.BLOCK_N, META.V0, META.V1)
    sums = KeySums(hk=hk, hv=hv)
    for head_of_group in range(inputs.group_size):
        head = head_of(inputs.scores, b, h_kv * inputs.group_size + head_of_group, len_q, len_kv, shift, MODS, META)
        own_block = KeyBlock(head=head, start_q=start_q, keys=keys)
        loops = loops_of_keys(args.lists, head, n, inputs, META)
        for LOOP in tl.static_range(first_loop(META.HAS_RIGHT, META.BLOCK_SIZE_Q), 3):
            sums = _keys_loop(sums, own_block, loops[LOOP], args.known, MODS, BENDS, LOOP != 1, META)
    scale = inputs.scores.scale
    hk = Parts(first=sums.hk.first * scale, second=sums.hk.second * scale)
    store_parts(args.hk, hk, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    store_parts(args.hv, sums.hv, place, META.V0, META.V1, META.HEAD_DIM_V, META)
