"""Addresses of lse, and logits relative to an lse that is too large for fp32 (see `large_rows`)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.exponents import LN2, LOWEST

LARGE = tl.constexpr(8192.0)  # from this lse on, fp32 represents it, and so the probabilities computed from it, to 2**-11 at best


@triton.jit
def lse_row(b, h, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    # Returns the first index of a sequence and head in lse.
    return tl.cast(h if META.IS_RAGGED_Q else b * num_heads + h, tl.int64) * num_tokens_q + start_q


@triton.jit
def large_part(lse):
    # Returns the part of lse to subtract from the logits before exp2: all of it if it is large, otherwise 0. See `large_rows`.
    size = tl.abs(lse)
    return tl.where((size >= LARGE) & (size < float("inf")), lse, 0.0)


# Returns s - lse. Without the minimum, the compiler may fuse a multiplication that made s with the subtraction. But s must be
# rounded as in the forward, because lse is such a number. A score of -inf stays, also beside an lse that is the lowest number.
@triton.jit
def minus_lse_exactly(s, lse):
    return tl.minimum(s, -LOWEST, propagate_nan=tl.PropagateNan.ALL) - lse


class Large(NamedTuple):
    """A sequence with unbounded logits, as `relative_to_lse` reads it inside a kernel."""

    is_any: tl.tensor  # whether any lse of the call is large
    lse_ptr: tl.tensor
    num_heads: tl.tensor
    num_tokens_q: tl.tensor
    start_q: int | tl.tensor


@triton.jit
def load_large(large_ptr, lse_ptr, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    if META.IS_UNBOUNDED:
        return Large(is_any=tl.load(large_ptr), lse_ptr=lse_ptr, num_heads=num_heads, num_tokens_q=num_tokens_q, start_q=start_q)
    else:
        return ()


@triton.jit
def load_shift(large, b, h, rows, len_q, META: tl.constexpr):
    row = lse_row(b, h, large.num_heads, large.num_tokens_q, large.start_q, META)
    return large_part(tl.load(large.lse_ptr + row + rows, mask=rows < len_q, other=0.0))


@triton.jit
def is_any_large(large, META: tl.constexpr):
    if META.IS_UNBOUNDED:
        return large.is_any != 0
    else:
        return False


@triton.jit
def relative_to_lse(s, minus_lse, large, b, h, i, len_q, META: tl.constexpr):
    # Returns the logits that belong with minus_lse, in units of log2. In rows with a large lse they are relative to it, and
    # minus_lse is the remainder. A logit near a rounding boundary may have been rounded differently in the forward; the minimum
    # keeps its probability at most 1.
    if META.IS_UNBOUNDED:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if large.is_any != 0:
            shift = load_shift(large, b, h, i, len_q, META)
            s = tl.minimum(minus_lse_exactly(s, shift), minus_lse * -LN2)
    return s
