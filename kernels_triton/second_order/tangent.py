"""The tangent of attention: one kernel, which takes the forward's lse.

In 16 bits a small tangent of out would be lost in a large tangent of lse: t_o = (p t_s) v - mu o is a difference, and p t_s and o
are rounded to 2^-9 of themselves. So each block of keys subtracts a mean of t_s before it rounds: the mean over the keys so far,
weighted by p. It is mu after the last block. The sum p v moves the earlier blocks to a later mean.
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
from flexattn.kernels_triton.common.row_tiles import Place, keys_of_block, load_qk, load_v, store_parts
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.sinks import load_sink
from flexattn.kernels_triton.common.tile_memory import zero_parts
from flexattn.kernels_triton.runtime.launch import kernel
from flexattn.kernels_triton.second_order import tiles as second_tiles


class TangentArguments(NamedTuple):
    inputs: Inputs
    tangents: second_tiles.Tangents
    lse_ptr: Pointer
    dout: Rows | None  # None: without delta and its tangent
    dlse_ptr: Pointer
    tout: Rows  # zeros if there are rows without a token
    lists: BlockMaskLists | None  # lists of key blocks
    sums: second_tiles.RowSums


class Sums(NamedTuple):
    """Sums over keys for some columns of v, inside a kernel."""

    out: tl.tensor  # sum of p v
    tangent: tl.tensor  # sum of p (t - mean) v + p tv


@triton.jit
def _add(sums, p, weighted, step, v, tv, META: tl.constexpr):
    # step: the change of the mean, which the tangent so far is moved to
    tangent = second_tiles.add_product(sums.tangent - step[:, None] * sums.out, weighted, v, META)
    return Sums(out=second_tiles.add_product(sums.out, p, v, META), tangent=second_tiles.add_product(tangent, p, tv, META))


@kernel
def _attn_tangent_kernel(args: TangentArguments, BENDS: tl.constexpr, MODS: tl.constexpr, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    V0: tl.constexpr = META.V0
    V1: tl.constexpr = META.V1
    inputs, tangents = args.inputs, args.tangents
    lengths_q = inputs.lengths_q
    num_heads = inputs.num_heads
    blocks = tl.cdiv(lengths_q.max_seqlen, BLOCK_M)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks
    h = pid // blocks % num_heads
    b = pid // blocks // num_heads
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, b, META.IS_RAGGED_KV)
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    head = head_of(inputs.scores, b, h, len_q, len_kv, shift, MODS, META)
    place = Place(b=b, h=h, start=start_q, first=first_row, length=len_q)
    q = load_qk(inputs.q, place, BLOCK_M, META)
    tq = load_qk(tangents.q, place, BLOCK_M, META)
    row = lse_row(b, h, num_heads, lengths_q.num_tokens, start_q, META)
    lse_log2 = second_tiles.load_lse(args.lse_ptr, row, rows, len_q)
    queries = second_tiles.ScoredQueries(q=q, tq=tq, lse_log2=lse_log2, first_row=first_row)

    acc = zero_parts(BLOCK_M, V0, V1)
    sums0, sums1 = Sums(out=acc.first, tangent=acc.first), Sums(out=acc.second, tangent=acc.second)
    mu = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)
    tiles = keys_of_block(args.lists, head, first_row, inputs, META)
    for t in tl.range(tiles.begin, tiles.end, 1 if META.BLOCK_SIZE_Q > 0 else BLOCK_N):
        n, is_full = listed_tile(t, tiles.listed, META.BLOCK_SIZE_KV, BLOCK_N)
        key_place = Place(b=b, h=h // inputs.group_size, start=start_kv, first=n, length=len_kv)
        k = load_qk(inputs.k, key_place, BLOCK_N, META)
        tk = load_qk(tangents.k, key_place, BLOCK_N, META)
        pairs = second_tiles.pairs_of(queries, second_tiles.ScoredKeys(k=k, tk=tk, n=n), is_full, False, META)
        tile = second_tiles.scored(args, pairs, head, MODS, BENDS, False, META)
        v = load_v(inputs.v, key_place, BLOCK_N, META)
        tv = load_v(tangents.v, key_place, BLOCK_N, META)
        total += tl.sum(tile.p, 1)
        mu += tl.sum(tile.p * tile.t_logit, 1)
        new_mean = mu / tl.where(total == 0.0, 1.0, total)
        p = tile.p * tile.drop
        weighted = p * (tile.t_logit - new_mean[:, None])
        sums0 = _add(sums0, p, weighted, new_mean - mean, v.first, tv.first, META)
        if V1 > 0:
            sums1 = _add(sums1, p, weighted, new_mean - mean, v.second, tv.second, META)
        mean = new_mean
    if META.HAS_SINK:
        p_sink = tl.exp2(load_sink(inputs.softmax_offset_ptr, h, LOG2E, META) - lse_log2)
        total += p_sink
        mu += p_sink * second_tiles.load_sink_tangent(tangents.sink_ptr, h)
    # lse in fp32 is rounded, and all of a row's weights have that error as one factor
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    mu *= scale
    tl.store(args.sums.mu_ptr + row + rows, mu, mask=rows < len_q)
    tl.store(args.sums.scale_ptr + row + rows, scale, mask=rows < len_q)
    rest = (mean - mu)[:, None]
    tout0 = (sums0.tangent + rest * sums0.out) * scale[:, None]
    tout1 = tout0
    if V1 > 0:
        tout1 = (sums1.tangent + rest * sums1.out) * scale[:, None]
    store_parts(args.tout, Parts(first=tout0, second=tout1), place, META.V0, META.V1, META.HEAD_DIM_V, META)
    if args.dout.ptr is not None:
        dout = load_v(args.dout, place, BLOCK_M, META)
        delta = tl.sum(sums0.out * dout.first.to(tl.float32), 1)
        tangent_delta = tl.sum(tout0 * dout.first.to(tl.float32), 1)
        if V1 > 0:
            delta += tl.sum(sums1.out * dout.second.to(tl.float32), 1)
            tangent_delta += tl.sum(tout1 * dout.second.to(tl.float32), 1)
        delta *= scale
        if args.dlse_ptr is not None:
            delta -= tl.load(args.dlse_ptr + row + rows, mask=rows < len_q, other=0.0)
        tl.store(args.sums.delta_ptr + row + rows, delta, mask=rows < len_q)
        tl.store(args.sums.tangent_delta_ptr + row + rows, tangent_delta, mask=rows < len_q)
