"""Parts of both kernels: the tile of probabilities with the tangent of its logits, and the arguments that they share.

`dispatch.second_order` has the formulas. Each tile is [queries, keys].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Bias, Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import visible_keys, visible_range_of_keys, visible_range_of_queries
from flexattn.kernels_triton.common.block_lists import TileRange, all_tiles, listed_tile, load_block_lists
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.runtime.device import Tile


class Bends(NamedTuple):
    """The Triton functions of a score_mod's derivatives along tangents, which `dispatch.triton_second_order` makes.

    Their last argument is the tuple of captures, in which the tangents of captures follow.
    """

    tangent: Any  # (t_score, score, b, h, q_idx, kv_idx) -> the tangent of the modified score
    # (dscore, t_score, score, b, h, q_idx, kv_idx) -> the tangent of the score's gradient for a constant dscore; None: 0
    gradient: Any = None
    accumulate: Any = None  # the same for the captures' gradients, with (.., captures, sums, scales, MODE)


class Tangents(NamedTuple):
    """Tangents of the inputs, in the inputs' layouts."""

    q: Rows
    k: Rows
    v: Rows
    bias: Bias | None
    sink_ptr: Pointer  # [h]; None: 0


class RowSums(NamedTuple):
    """Numbers of each query, fp32 in lse's layout. The tangent kernel writes all; the two last ones only for a double backward."""

    mu_ptr: Pointer  # sum(p * tangent of the logit), the tangent of lse
    scale_ptr: Pointer  # factor that normalises the probabilities computed from lse
    delta_ptr: Pointer  # sum(out * dout) - dlse
    tangent_delta_ptr: Pointer  # sum(tangent of out * dout)


class Place(NamedTuple):
    """Some rows of a head of a sequence, inside a kernel: those from `first` on."""

    b: tl.tensor
    h: tl.tensor
    start: int | tl.tensor  # first token of the sequence
    first: tl.tensor
    length: tl.tensor  # tokens of the sequence


class ScoredQueries(NamedTuple):
    """Queries of a tile of scores, inside a kernel, and their tangents."""

    q: Parts
    tq: Parts
    lse_log2: tl.tensor
    first_row: tl.tensor


class ScoredKeys(NamedTuple):
    """Keys of a tile of scores, inside a kernel, and their tangents."""

    k: Parts
    tk: Parts
    n: tl.tensor  # the first key


class Scored(NamedTuple):
    """A tile of probabilities, before normalisation, and of tangents, inside a kernel."""

    p: tl.tensor
    t_raw: tl.tensor  # tangent of the scaled score, before softcap
    t_score: tl.tensor  # tangent of score_mod's input
    t_logit: tl.tensor
    score: tl.tensor  # score_mod's input
    cap_tanh: float | tl.tensor
    drop: float | tl.tensor  # factor of dropout for each weight


@triton.jit
def load_parts(x, place: Place, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    pointer = row_pointer(x, place.b, place.h, place.start + place.first, META)
    _, offsets = row_steps(x.stride_s, ROWS, META)
    part0 = load_tile(pointer, offsets, place.first, place.length, 0, D0, D, True)
    part1 = part0
    if D1 > 0:
        part1 = load_tile(pointer, offsets, place.first, place.length, D0, D1, D, True)
    return Parts(first=part0, second=part1)


@triton.jit
def store_parts(x, parts: Parts, place: Place, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    pointer = row_pointer(x, place.b, place.h, place.start + place.first, META)
    _, offsets = row_steps(x.stride_s, parts.first.shape[0], META)
    store_tile(pointer, parts.first, offsets, place.first, place.length, 0, D0, D)
    if D1 > 0:
        store_tile(pointer, parts.second, offsets, place.first, place.length, D0, D1, D)


@triton.jit
def load_qk(x, place: Place, ROWS: tl.constexpr, META: tl.constexpr):
    # Loads rows of q, of k or of their tangents.
    return load_parts(x, place, ROWS, META.QK0, META.QK1, META.HEAD_DIM_QK, META)


@triton.jit
def load_v(x, place: Place, ROWS: tl.constexpr, META: tl.constexpr):
    # Loads rows of v, of out or of their tangents.
    return load_parts(x, place, ROWS, META.V0, META.V1, META.HEAD_DIM_V, META)


@triton.jit
def product(a, b, total, HAS_SECOND: tl.constexpr, META: tl.constexpr):
    # Returns a b^T, added to `total` if that is a tile.
    if total is None:
        result = tl.dot(a.first, tl.trans(b.first), input_precision=META.PRECISION)
    else:
        result = tl.dot(a.first, tl.trans(b.first), total, input_precision=META.PRECISION)
    if HAS_SECOND:
        result = tl.dot(a.second, tl.trans(b.second), result, input_precision=META.PRECISION)
    return result


@triton.jit
def _tangent_of_bias(bias, head, i, j):
    entry = head.b
    if bias.group is not None:
        entry = head.b // bias.group
    offset = tl.cast(entry, tl.int64) * bias.stride_b + tl.cast(head.h, tl.int64) * bias.stride_h
    offsets = i.to(tl.int64) * bias.stride_m + j.to(tl.int64) * bias.stride_n
    return tl.load(bias.ptr + offset + offsets, mask=(i < head.len_q) & (j < head.len_kv), other=0.0).to(tl.float32)


@triton.jit
def keys_of_block(lists, head, first_row, inputs, META: tl.constexpr):
    # Returns the tiles of keys that a block of queries sees, a `TileRange`.
    visible = visible_range_of_keys(first_row, head.len_kv, head.shift, inputs.band, META)
    if META.BLOCK_SIZE_Q == 0:
        return TileRange(begin=visible.begin, end=visible.end, listed=None)
    row = head.b * lists.stride_b + head.h * lists.stride_h + first_row // META.BLOCK_SIZE_Q
    blocks = load_block_lists(lists, row, visible, META.BLOCK_SIZE_KV, META.BLOCK_N, META.HAS_LEFT, META)
    return TileRange(begin=0, end=blocks.num_tiles + blocks.num_full_tiles, listed=all_tiles(blocks))


@triton.jit
def queries_of_block(lists, head, n, inputs, META: tl.constexpr):
    # Returns the tiles of queries that see a block of keys, a `TileRange`.
    visible = visible_range_of_queries(n, head.len_q, head.shift, inputs.band, META)
    if META.BLOCK_SIZE_Q == 0:
        return TileRange(begin=visible.begin, end=visible.end, listed=None)
    row = head.b * lists.stride_b + head.h * lists.stride_h + n // META.BLOCK_SIZE_KV
    blocks = load_block_lists(lists, row, visible, META.BLOCK_SIZE_Q, META.BLOCK_M, META.HAS_RIGHT, META)
    return TileRange(begin=0, end=blocks.num_tiles + blocks.num_full_tiles, listed=all_tiles(blocks))


@triton.jit
def tile_at(t, listed, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # Returns (first row of a tile, whether its block is full).
    if SIZE == 0:
        return t, False
    else:
        return listed_tile(t, listed, SIZE, BLOCK)


@triton.jit
def scored(args, queries, keys, is_full, head, MODS: tl.constexpr, BENDS: tl.constexpr, META: tl.constexpr):
    # Returns a `Scored`. queries, keys: with the fields of `ScoredQueries` and `ScoredKeys`. args: has `inputs` and `tangents`.
    inputs, bias = args.inputs, args.tangents.bias
    first_row, n = queries.first_row, keys.n
    i = first_row + tl.arange(0, META.BLOCK_M)[:, None]
    j = n + tl.arange(0, META.BLOCK_N)[None, :]
    qk = product(queries.q, keys.k, None, META.QK1 > 0, META)
    t_raw = product(queries.tq, keys.k, None, META.QK1 > 0, META)
    t_raw = product(queries.q, keys.tk, t_raw, META.QK1 > 0, META)
    s, factor, cap_tanh, score = logits(qk, i, j, inputs.scores.scale, head, MODS, META)
    p = tl.exp2(tl.fma(s, factor, -queries.lse_log2[:, None]))
    p = tl.where(visible_keys(i, j, head.len_kv, head.shift, inputs.band, META), p, 0.0)
    if META.HAS_SCORE_MOD and not MODS.score_is_finite:  # for a query past the end
        p = tl.where(i < head.len_q, p, 0.0)
    if META.HAS_MASK_MOD:
        p = tl.where(MODS.mask(head.b, head.h, i, j, head.captures) | is_full, p, 0.0)
    if bias.ptr is not None and META.HAS_PRE_SCALE_BIAS:
        t_raw += _tangent_of_bias(bias, head, i, j)
    t_raw *= inputs.scores.scale
    t_score = t_raw
    if META.HAS_SOFTCAP:
        t_score = t_raw * (1 - cap_tanh * cap_tanh)
    t_logit = t_score
    if META.HAS_SCORE_MOD:
        t_logit = BENDS.tangent(t_score, score, head.b, head.h, i, j, head.captures)
        t_logit = tl.where(p == 0.0, 0.0, t_logit)  # it may be infinite
    if bias.ptr is not None and META.HAS_POST_SCALE_BIAS:
        t_logit += _tangent_of_bias(bias, head, i, j)
    drop = 1.0
    if META.HAS_DROPOUT:
        drop = tl.where(dropout_keep(inputs, head.b, head.h, first_row, n, META), inputs.dropout.keep_scale, 0.0)
    return Scored(p=p, t_raw=t_raw, t_score=t_score, t_logit=t_logit, score=score, cap_tanh=cap_tanh, drop=drop)


@triton.jit
def load_lse(lse_ptr, row, rows, length):
    # Returns lse in units of log2, +inf for a row that sees nothing or does not exist.
    lse = tl.load(lse_ptr + row + rows, mask=rows < length, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def load_sink_tangent(sink_ptr, h):
    t_sink = tl.zeros([], tl.float32)
    if sink_ptr is not None:
        t_sink = tl.load(sink_ptr + h).to(tl.float32)
    return t_sink


def tile_for(capability: int, row_bytes: int) -> Tile:
    """Returns the tile for rows of this many bytes: a program holds up to seven tiles of rows in shared memory."""
    if capability == 0:
        return Tile(16, 16, 4, 1)
    side = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return Tile(side, side, 8 if side == 64 else 4, 1)
