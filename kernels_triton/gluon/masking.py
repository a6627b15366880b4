"""Masking: scores of keys that a query does not see become -inf, by the band, a sequence's end or a mask_mod."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Band, Head

FAR = gl.constexpr(2**30)  # past every query


class SequenceBand(NamedTuple):
    """The band of one sequence, inside a kernel: its lengths, the diagonal, and its extent to either side of the diagonal."""

    len_q: gl.tensor
    len_kv: gl.tensor
    shift: gl.tensor  # query i aligns with key i + shift
    left: gl.tensor
    right: gl.tensor


@gluon.jit
def band_of_sequence(band: Band, len_q, len_kv):
    return SequenceBand(len_q=len_q, len_kv=len_kv, shift=(len_kv - len_q) * band.bottom_right, left=band.left, right=band.right)


@gluon.jit
def mask_keys(s, rows, columns, band: SequenceBand, META: gl.constexpr):
    # s: rows are queries, columns keys. Keys past the sequence's end are hidden too.
    last = gl.zeros_like(rows) + (band.len_kv - 1)
    if META.HAS_RIGHT:
        last = gl.minimum(last, rows + band.shift + band.right)
    visible = columns[None, :] <= last[:, None]
    if META.HAS_LEFT:
        visible = visible & (columns[None, :] >= (rows + band.shift - band.left)[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def mask_queries(s, rows, columns, band: SequenceBand, META: gl.constexpr):
    # s is transposed: rows are keys, columns queries.
    if META.HAS_RIGHT:
        s = gl.where(columns[None, :] >= (rows - band.shift - band.right)[:, None], s, float("-inf"))
    if META.HAS_LEFT:
        s = gl.where(columns[None, :] <= (rows - band.shift + band.left)[:, None], s, float("-inf"))
    return s


@gluon.jit
def first_uncut_query(n_start, KEYS: gl.constexpr, band: SequenceBand, META: gl.constexpr):
    # Returns the first query that needs no mask: query blocks that begin before it need `mask_queries_and_end` for the KEYS keys
    # from n_start on.
    first = 0
    if META.HAS_RIGHT:
        first = n_start + KEYS - 1 - band.shift - band.right
    return gl.where(n_start + KEYS > band.len_kv, FAR, first)


@gluon.jit
def cuts_block(row, n_start, uncut_from, band: SequenceBand, META: gl.constexpr):
    # Returns whether the query block at `row` needs `mask_queries_and_end`: a scalar, so that only blocks on an edge pay for the
    # mask. uncut_from: from `first_uncut_query`
    is_cut = row < uncut_from
    if META.HAS_LEFT:
        is_cut = is_cut | (row + META.BLOCK_M > n_start - band.shift + band.left + 1)
    return is_cut


@gluon.jit
def mask_queries_and_end(s, rows, columns, band: SequenceBand, META: gl.constexpr):
    # Like `mask_queries`, but also hides keys past the sequence's end: for rows of zeros p may be inf, and dq sums over them.
    first = gl.zeros_like(rows)
    if META.HAS_RIGHT:
        first = rows - band.shift - band.right
    first = gl.where(rows < band.len_kv, first, FAR)
    visible = columns[None, :] >= first[:, None]
    if META.HAS_LEFT:
        visible = visible & (columns[None, :] <= (rows - band.shift + band.left)[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def apply_mask_mod(s, i, j, is_full, head: Head, MODS: gl.constexpr, META: gl.constexpr):
    # Writes -inf if the mask_mod hides a score. A block that the block mask calls full needs no test.
    if META.HAS_MASK_MOD:
        if META.BLOCK_SIZE_Q > 0:
            if not is_full:
                s = gl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
        else:
            s = gl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
    return s


@gluon.jit
def hide_queries_past_the_end(s, row, columns, len_q, MODS: gl.constexpr, META: gl.constexpr):
    # Needed if a score_mod may make the scores of such a query infinite.
    # the first condition is known at compile time, the second at run time
    if META.HAS_SCORE_MOD and not MODS.score_is_finite:  # noqa: SIM102
        if row + META.BLOCK_M > len_q:
            s = gl.where((columns < len_q)[None, :], s, float("-inf"))
    return s
