"""The derivative of the backward along a direction: a kernel for the gradients of q and of the sink, another for k and v.

One program sums each element in a fixed order, so the results are bitwise repeatable. Programs of the first have a block of
queries, and programs of the second a block of keys with all query heads that share it. Two more kernels, for a bias and for
captured tensors, compute the same tiles: `score_gradients`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import BlockMaskLists, Inputs, Parts, Pointer, Rows
from flexattn.kernels_triton.common.block_lists import listed_tile
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.lse_rows import lse_row
from flexattn.kernels_triton.common.row_tiles import Place, keys_of_block, load_qk, load_v, product, queries_of_block, store_parts
from flexattn.kernels_triton.common.sequences import program_of_queries, sequence_of
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import zero_parts
from flexattn.kernels_triton.runtime.launch import kernel
from flexattn.kernels_triton.second_order.tiles import (
    RowSums,
    Scored,
    Tangents,
    add_product,
    along,
    load_lse,
    load_sink_tangent,
    pairs_of,
    scored,
)


class Known(NamedTuple):
    """The arguments of the kernels of a double backward that determine a tile of derivatives."""

    inputs: Inputs
    tangents: Tangents
    lse_ptr: Pointer
    dout: Rows
    sums: RowSums


class Written(NamedTuple):
    """Results of the forward with a tangent, from which the kernel for queries computes delta and its tangent."""

    out: Rows
    tout: Rows
    dlse_ptr: Pointer


class QueriesArguments(NamedTuple):
    known: Known
    lists: BlockMaskLists | None  # lists of key blocks
    written: Written | None  # None: `sums` is complete
    hq: Rows  # zeros if there are rows without a token, and so are hk and hv
    dsink_ptr: Pointer  # zeros [h, b * blocks of queries]: parts of the sink's gradient


class KeysArguments(NamedTuple):
    known: Known
    lists: BlockMaskLists | None  # lists of query blocks
    hk: Rows
    hv: Rows


class Queries(NamedTuple):
    """A block of queries with its numbers, inside a kernel."""

    q: tl.tensor
    tq: tl.tensor
    dout: tl.tensor
    lse_log2: tl.tensor
    first_row: tl.tensor
    mu: tl.tensor
    scale: float | tl.tensor
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
def _sum_of_products(left, right, META: tl.constexpr):
    total = tl.sum(left.first.to(tl.float32) * right.first.to(tl.float32), 1)
    if META.V1 > 0:
        total += tl.sum(left.second.to(tl.float32) * right.second.to(tl.float32), 1)
    return total


@triton.jit
def load_queries(args, written, place, HAS_WRITTEN: tl.constexpr, META: tl.constexpr):
    # written: if HAS_WRITTEN, a `Written`, from which the deltas are computed and stored for the kernel for keys
    inputs, sums = args.inputs, args.sums
    row = lse_row(place.b, place.h, inputs.num_heads, inputs.lengths_q.num_tokens, place.start, META)
    rows = place.first + tl.arange(0, META.BLOCK_M)
    is_real = rows < place.length
    dout = load_v(args.dout, place, META.BLOCK_M, META)
    scale = 1.0
    if sums.scale_ptr is not None:
        scale = tl.load(sums.scale_ptr + row + rows, mask=is_real, other=0.0)
    if HAS_WRITTEN:
        delta = _sum_of_products(load_v(written.out, place, META.BLOCK_M, META), dout, META)
        if written.dlse_ptr is not None:
            delta -= tl.load(written.dlse_ptr + row + rows, mask=is_real, other=0.0)
        tangent_delta = _sum_of_products(load_v(written.tout, place, META.BLOCK_M, META), dout, META)
        tl.store(sums.delta_ptr + row + rows, delta, mask=is_real)
        tl.store(sums.tangent_delta_ptr + row + rows, tangent_delta, mask=is_real)
    else:
        delta = tl.load(sums.delta_ptr + row + rows, mask=is_real, other=0.0)
        tangent_delta = tl.load(sums.tangent_delta_ptr + row + rows, mask=is_real, other=0.0)
    return Queries(
        q=load_qk(inputs.q, place, META.BLOCK_M, META),
        tq=load_qk(args.tangents.q, place, META.BLOCK_M, META),
        dout=dout,
        lse_log2=load_lse(args.lse_ptr, row, rows, place.length),
        first_row=place.first,
        mu=tl.load(sums.mu_ptr + row + rows, mask=is_real, other=0.0),
        scale=scale,
        delta=delta,
        tangent_delta=tangent_delta,
    )


@triton.jit
def load_keys(args, place, META: tl.constexpr):
    inputs, tangents = args.inputs, args.tangents
    return Keys(
        k=load_qk(inputs.k, place, META.BLOCK_N, META),
        tk=load_qk(tangents.k, place, META.BLOCK_N, META),
        v=load_v(inputs.v, place, META.BLOCK_N, META),
        tv=load_v(tangents.v, place, META.BLOCK_N, META),
        n=place.first,
    )


@triton.jit
def derivatives(args, pairs, head, MODS: tl.constexpr, BENDS: tl.constexpr, BY_KEYS: tl.constexpr, META: tl.constexpr):
    queries, keys, i, j = pairs.queries, pairs.keys, pairs.i, pairs.j
    tile = scored(args, pairs, head, MODS, BENDS, BY_KEYS, META)
    p = tile.p
    if META.NORMALIZES:
        p *= along(queries.scale, BY_KEYS)
    dp = product(queries.dout, keys.v, None, META.V1 > 0, BY_KEYS, META)
    t_dp = product(queries.dout, keys.tv, None, META.V1 > 0, BY_KEYS, META)
    centred = dp * tile.drop - along(queries.delta, BY_KEYS)
    t_centred = t_dp * tile.drop - along(queries.tangent_delta, BY_KEYS)
    t_p = p * (tile.t_logit - along(queries.mu, BY_KEYS))
    dlogit = p * centred
    t_dlogit = t_p * centred + p * t_centred
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
    return Derivatives(dlogit=dlogit, t_dlogit=t_dlogit, dscore=dscore, t_dscore=t_dscore, t_weights=t_p * tile.drop, scored=tile)


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
    HAS_WRITTEN: tl.constexpr = args.written.out.ptr is not None
    queries = load_queries(args.known, args.written, place, HAS_WRITTEN, META)
    hq0, hq1 = zero_parts(META.BLOCK_M, META.QK0, META.QK1)
    tiles = keys_of_block(args.lists, head, first_row, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, META.BLOCK_N)
        key_place = Place(b=b, h=h // inputs.group_size, start=start_kv, first=n, length=len_kv)
        keys = load_keys(args.known, key_place, META)
        found = derivatives(args.known, pairs_of(queries, keys, is_full, False, META), head, MODS, BENDS, False, META)
        hq0 = add_product(add_product(hq0, found.t_dscore, keys.k.first, META), found.dscore, keys.tk.first, META)
        if META.QK1 > 0:
            hq1 = add_product(add_product(hq1, found.t_dscore, keys.k.second, META), found.dscore, keys.tk.second, META)
    scale = inputs.scores.scale
    hq = Parts(first=hq0 * scale, second=hq1 * scale)
    store_parts(args.hq, hq, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    if META.HAS_OFFSET:
        p_sink = tl.exp2(load_sink(inputs.softmax_offset_ptr, h, LOG2E, META) - queries.lse_log2) * queries.scale
        t_sink = load_sink_tangent(args.known.tangents.sink_ptr, h)
        part = p_sink * ((t_sink - queries.mu) * queries.delta + queries.tangent_delta)
        tl.store(args.dsink_ptr + (h * inputs.lengths_q.batch + b) * own.blocks + block, -tl.sum(part, 0))


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
    keys = load_keys(args.known, place, META)
    hk0, hk1 = zero_parts(META.BLOCK_N, META.QK0, META.QK1)
    hv0, hv1 = zero_parts(META.BLOCK_N, META.V0, META.V1)
    for head_of_group in range(inputs.group_size):
        h = h_kv * inputs.group_size + head_of_group
        head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
        tiles = queries_of_block(args.lists, head, n, inputs, META)
        for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else META.BLOCK_M):
            first_row, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_Q, META.BLOCK_M)
            query_place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
            queries = load_queries(args.known, (), query_place, False, META)
            found = derivatives(args.known, pairs_of(queries, keys, is_full, True, META), head, MODS, BENDS, True, META)
            hk0 = add_product(add_product(hk0, found.t_dscore, queries.q.first, META), found.dscore, queries.tq.first, META)
            hv0 = add_product(hv0, found.t_weights, queries.dout.first, META)
            if META.QK1 > 0:
                hk1 = add_product(add_product(hk1, found.t_dscore, queries.q.second, META), found.dscore, queries.tq.second, META)
            if META.V1 > 0:
                hv1 = add_product(hv1, found.t_weights, queries.dout.second, META)
    scale = inputs.scores.scale
    hk = Parts(first=hk0 * scale, second=hk1 * scale)
    store_parts(args.hk, hk, place, META.QK0, META.QK1, META.HEAD_DIM_QK, META)
    store_parts(args.hv, Parts(first=hv0, second=hv1), place, META.V0, META.V1, META.HEAD_DIM_V, META)
