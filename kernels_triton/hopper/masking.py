"""Scores that a query does not see become -inf: by the band, a sequence's end, a mask_mod."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Head

FAR = gl.constexpr(2**30)  # past every query


class TileBand(NamedTuple):
    """The band of one sequence, inside a kernel: its keys, the diagonal, and how far it goes to either side of that."""

    len_kv: Any
    shift: Any
    left: Any
    right: Any


@gluon.jit
def mask_keys(qk, rows, columns, len_kv, shift, window_left, window_right, META: gl.constexpr):
    last = gl.zeros_like(rows) + (len_kv - 1)
    if META.HAS_RIGHT:
        last = gl.minimum(last, rows + shift + window_right)
    visible = columns[None, :] <= last[:, None]
    if META.HAS_LEFT:
        visible = visible & (columns[None, :] >= (rows + shift - window_left)[:, None])
    return gl.where(visible, qk, float("-inf"))


@gluon.jit
def mask_queries(s, rows, columns, shift, window_left, window_right, META: gl.constexpr):
    # s is transposed: rows are keys, columns queries.
    if META.HAS_RIGHT:
        s = gl.where(columns[None, :] >= (rows - shift - window_right)[:, None], s, float("-inf"))
    if META.HAS_LEFT:
        s = gl.where(columns[None, :] <= (rows - shift + window_left)[:, None], s, float("-inf"))
    return s


@gluon.jit
def mask_band(s, rows, columns, len_kv, shift, window_left, window_right, META: gl.constexpr):
    # s is transposed: rows are keys, columns queries. Keys past the end are hidden too: of rows of zeros p may be inf, and dq is
    # a sum over them.
    first = gl.zeros_like(rows)
    if META.HAS_RIGHT:
        first = rows - shift - window_right
    first = gl.where(rows < len_kv, first, FAR)
    visible = columns[None, :] >= first[:, None]
    if META.HAS_LEFT:
        visible = visible & (columns[None, :] <= (rows - shift + window_left)[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def mask_by_mod(s, i, j, is_full, place, captures, MODS: gl.constexpr, META: gl.constexpr):
    # -inf where the mask_mod hides, which blocks that a block mask calls full do not ask
    _, _, _, b, h = place
    if META.HAS_MASK_MOD:
        if META.BLOCK_SIZE_Q > 0:
            if not is_full:
                s = gl.where(MODS.mask(b, h, i, j, captures), s, float("-inf"))
        else:
            s = gl.where(MODS.mask(b, h, i, j, captures), s, float("-inf"))
    return s


@gluon.jit
def apply_mask_mod(s, i, j, is_full, head: Head, MODS: gl.constexpr, META: gl.constexpr):
    # -inf where the mask_mod hides, which blocks that a block mask calls full do not ask
    if META.HAS_MASK_MOD:
        if META.BLOCK_SIZE_Q > 0:
            if not is_full:
                s = gl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
        else:
            s = gl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
    return s


@gluon.jit
def hide_queries_past_the_end(s, row, columns, len_q, MODS: gl.constexpr, META: gl.constexpr):
    # A score_mod may make the scores of a query past the end infinite.
    if META.HAS_SCORE_MOD and not MODS.score_is_finite:  # noqa: SIM102  # this is known when it is compiled, that at run time
        if row + META.BLOCK_M > len_q:
            s = gl.where((columns < len_q)[None, :], s, float("-inf"))
    return s
