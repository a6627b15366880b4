"""Shares of a tile's keys: the keys of a split or of a piece, and the row of its part."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.band import VisibleRange


# Returns (first block of a split, of `count` blocks, first block of the next). The last splits may be empty.
@triton.jit
def share_of_split(count, split, num_splits):
    share = tl.cdiv(count, num_splits)
    first = tl.minimum(split * share, count)
    return first, tl.minimum(first + share, count)


# Returns a split's share of a `band.VisibleRange`, or the intersection of the range with a piece of the keys.
@triton.jit
def range_of_split(visible, split, num_splits, STEP: tl.constexpr, PIECE: tl.constexpr):
    if PIECE > 0:
        end = tl.cdiv(visible.end, STEP) * STEP
        begin = tl.minimum(tl.maximum(visible.begin, split * PIECE), end)
        last = tl.maximum(tl.minimum(end, (split + 1) * PIECE), begin)
    else:
        first, last = share_of_split(tl.cdiv(visible.end - visible.begin, STEP), split, num_splits)
        last = visible.begin + last * STEP
        begin = visible.begin + first * STEP
    return _cut_range(visible, begin, last)


# Returns blocks `first` up to `end` of a `band.VisibleRange`; `end` may be past its own end.
@triton.jit
def range_of_blocks(visible, first, end, STEP: tl.constexpr):
    rounded_end = visible.begin + tl.cdiv(visible.end - visible.begin, STEP) * STEP
    begin = tl.minimum(visible.begin + first * STEP, rounded_end)
    return _cut_range(visible, begin, tl.minimum(visible.begin + end * STEP, rounded_end))


# Cuts a range to `begin` .. `last`; each is the beginning of a block or the end of the last one.
@triton.jit
def _cut_range(visible, begin, last):
    full_begin = tl.minimum(tl.maximum(visible.full_begin, begin), last)
    full_end = tl.minimum(tl.maximum(visible.full_end, full_begin), last)
    return VisibleRange(begin=begin, full_begin=full_begin, full_end=full_end, end=tl.minimum(visible.end, last))


# Returns the first row of a split's part.
@triton.jit
def part_row(split, batch, num_heads, num_tokens_q, META: tl.constexpr):
    num_rows = tl.cast(num_heads if META.IS_RAGGED_Q else batch * num_heads, tl.int64) * num_tokens_q
    return split * num_rows


class Parts(NamedTuple):
    """Partial results of the splits, with rows in the order of lse."""

    out: Tensor  # fp32 [splits, rows, width]; the first columns are v's
    lse: Tensor  # fp32 [1 or 2, splits, rows]: for unbounded logits, the second is lse's rounding error (`exponents.log_of_sum`)

    @classmethod
    def empty(cls, splits: int, lse: Tensor, width: int, is_unbounded: bool) -> Parts:
        rows = lse.numel()
        return cls(lse.new_empty((splits, rows, width)), lse.new_empty((1 + is_unbounded, splits, rows)))

    def rows(self, lse: Tensor) -> Tensor:
        """The first split's out as [b, s, h, width] or [total, h, width]."""
        return self.out[0].view(*lse.shape, self.out.shape[-1]).transpose(-2, -3)
