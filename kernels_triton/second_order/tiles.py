"""Parts of all kernels: the tile of probabilities with the tangent of its logits, and the arguments that they share.

`dispatch.second_order` has the formulas. A tile is [queries, keys], or [keys, queries] if BY_KEYS: then it is the left operand of
a product that sums over queries, and needs no transposition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Bias, Parts, Pointer, Rows
from flexattn.kernels_triton.common.band import (
    visible_keys,
    visible_queries,
)
from flexattn.kernels_triton.common.dropout import dropout_keep
from flexattn.kernels_triton.common.exponents import LOG2E
from flexattn.kernels_triton.common.row_tiles import product
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.tiles import SMALL_MEMORY
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
    """Numbers of each query, fp32 in lse's layout. The tangent kernel writes all; the two last ones only for a double backward.

    After the kernel of a forward with its tangent, `scale_ptr` is None. The double backward's kernel for queries then writes the
    deltas.
    """

    mu_ptr: Pointer  # sum(p * tangent of the logit), the tangent of lse
    scale_ptr: Pointer  # factor that normalises the probabilities computed from lse; None: 1
    delta_ptr: Pointer  # sum(out * dout) - dlse
    tangent_delta_ptr: Pointer  # sum(tangent of out * dout)


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


class Pairs(NamedTuple):
    """Queries and keys of a tile, inside a kernel."""

    queries: Any  # with the fields of `ScoredQueries`
    keys: Any  # with the fields of `ScoredKeys`
    i: tl.tensor  # positions of the queries that broadcast against the tile
    j: tl.tensor  # positions of the keys
    is_full: Any  # whether the block is full, so that the mask_mod is not needed


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
def add_product(acc, weights, x, META: tl.constexpr):
    # Returns acc + weights x, with weights rounded to x's type.
    return tl.dot(weights.to(x.dtype), x, acc, input_precision=META.PRECISION)


@triton.jit
def along(values, BY_KEYS: tl.constexpr):
    # Returns values of queries in a shape that broadcasts against a tile.
    if BY_KEYS:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def pairs_of(queries, keys, is_full, BY_KEYS: tl.constexpr, META: tl.constexpr):
    rows = queries.first_row + tl.arange(0, META.BLOCK_M)
    columns = keys.n + tl.arange(0, META.BLOCK_N)
    if BY_KEYS:
        return Pairs(queries=queries, keys=keys, i=rows[None, :], j=columns[:, None], is_full=is_full)
    else:
        return Pairs(queries=queries, keys=keys, i=rows[:, None], j=columns[None, :], is_full=is_full)


@triton.jit
def _tangent_of_bias(bias, head, i, j):
    entry = head.b
    if bias.group is not None:
        entry = head.b // bias.group
    offset = tl.cast(entry, tl.int64) * bias.stride_b + tl.cast(head.h, tl.int64) * bias.stride_h
    offsets = i.to(tl.int64) * bias.stride_m + j.to(tl.int64) * bias.stride_n
    return tl.load(bias.ptr + offset + offsets, mask=(i < head.len_q) & (j < head.len_kv), other=0.0).to(tl.float32)


@triton.jit
def _shown(p, pairs, head, inputs, MODS: tl.constexpr, BY_KEYS: tl.constexpr, META: tl.constexpr):
    # Returns p, 0 for a pair that a mask hides.
    i, j = pairs.i, pairs.j
    if not BY_KEYS:
        p = tl.where(visible_keys(i, j, head.len_kv, head.shift, inputs.band, META), p, 0.0)
    elif META.HAS_LEFT or META.HAS_RIGHT:
        p = tl.where(visible_queries(i, j, head.shift, inputs.band, META), p, 0.0)
    if META.HAS_SCORE_MOD and not MODS.score_is_finite:  # for a query past the end
        p = tl.where(i < head.len_q, p, 0.0)
    if META.HAS_MASK_MOD:
        p = tl.where(MODS.mask(head.b, head.h, i, j, head.captures) | pairs.is_full, p, 0.0)
    return p


@triton.jit
def scored(args, pairs, head, MODS: tl.constexpr, BENDS: tl.constexpr, BY_KEYS: tl.constexpr, META: tl.constexpr):
    # Returns a `Scored`. args: has `inputs` and `tangents`.
    inputs, bias = args.inputs, args.tangents.bias
    queries, keys, i, j = pairs.queries, pairs.keys, pairs.i, pairs.j
    qk = product(queries.q, keys.k, None, META.QK1 > 0, BY_KEYS, META)
    t_raw = product(queries.tq, keys.k, None, META.QK1 > 0, BY_KEYS, META)
    t_raw = product(queries.q, keys.tk, t_raw, META.QK1 > 0, BY_KEYS, META)
    s, factor, cap_tanh, score = logits(qk, i, j, inputs.scores.scale, head, MODS, META)
    p = tl.exp2(tl.fma(s, factor, -along(queries.lse_log2, BY_KEYS)))
    p = _shown(p, pairs, head, inputs, MODS, BY_KEYS, META)
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
        keep = dropout_keep(inputs, head.b, head.h, queries.first_row, keys.n, META)
        drop = tl.where(tl.trans(keep) if BY_KEYS else keep, inputs.dropout.keep_scale, 0.0)
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


class Tiles(NamedTuple):
    """The tiles of the kernels of tangents and second derivatives."""

    tangent: Tile
    queries: Tile
    keys: Tile
    scores: Tile  # tile of the kernels for a bias and for captured tensors


def tiles_for(capability: int, head_dim: int, element_size: int, is_plain: bool) -> Tiles:
    """Returns the tiles for rows of this size: a program holds up to seven tiles of rows in shared memory.

    is_plain: whether nothing is loaded or computed for each score, such as a bias, dropout or a mod.
    """
    row_bytes = head_dim * element_size
    most = (160, 256) if capability in SMALL_MEMORY else (256, 512)  # bytes of a row for 64 and for 32 rows
    side = 16 if capability == 0 else 64 if row_bytes <= most[0] else 32 if row_bytes <= most[1] else 16
    scores = Tile(side, side, 8 if side == 64 else 4, 1)
    if 90 <= capability < 100 and element_size == 2 and head_dim <= 128:
        # A product of wgmma has 64 rows or more for four warps. Registers are scarce: sums, and up to four numbers for each score.
        # second_order_tiles_h200.json has the times.
        if head_dim <= 80:
            keys = Tile(64, 64, 4, 1) if head_dim <= 64 else Tile(32, 64, 4, 2)
            return Tiles(tangent=Tile(64, 64, 4, 2), queries=Tile(64, 64, 4, 2), keys=keys, scores=scores)
        if is_plain and head_dim <= 96:
            return Tiles(tangent=Tile(128, 64, 8, 2), queries=Tile(128, 64, 8, 1), keys=Tile(32, 64, 4, 2), scores=scores)
        if is_plain:
            return Tiles(tangent=Tile(128, 64, 8, 2), queries=Tile(64, 32, 4, 2), keys=Tile(32, 128, 8, 2), scores=scores)
        return Tiles(tangent=Tile(64, 32, 4, 2), queries=Tile(64, 32, 4, 2), keys=Tile(32, 64, 4, 2), scores=scores)
    return Tiles(scores, scores, scores, scores)
