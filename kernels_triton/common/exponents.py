"""Exponents of softmax in units of log2, without overflow and with equal rounding for equal logits."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32 number
FAR = tl.constexpr(2.0**28 * 0.6931471805599453)  # from this logit on, neighbouring fp32 numbers are at least 16 apart
NEAR = tl.constexpr(2.0**22)  # up to this logit, its product with log2(e) is rounded by at most 1/4
# added to the exponents of softmax weights in FP8: they are at most 2**8, and E4M3 represents up to 448
FP8_OFFSET = tl.constexpr(8.0)


# Like the factor in `logits`, for FP8 products: a NaN among the descales propagates to the result.
@triton.jit
def positive_factor(factor):
    return tl.maximum(factor, 1e-37, propagate_nan=tl.PropagateNan.ALL)


# Returns the factor of a row's logits in exp2: log2(e), or 1 if the row's largest logit is very far from 0. Then the next
# smaller number has no weight. row_max * 1 is exact and never overflows, but the rounding of row_max * log2(e) could overflow
# exp2.
@triton.jit
def exponent_factor(row_max):
    return tl.where(tl.abs(row_max) < FAR, LOG2E, 1.0)


# Returns the number to subtract from the product. It is finite for a row_max of -inf too, so that exp2(-inf - scaled_max) is 0.
# Products of equal numbers are rounded equally. So weights relative to two maxima differ by exactly exp2(difference of the
# maxima), however coarse the rounding is. With an OFFSET, weights are at most 2**OFFSET. The OFFSET is 0 if rounding could lift
# weights above FP8's range.
@triton.jit
def scaled_row_max(row_max, factor, OFFSET: tl.constexpr):
    scaled_max = tl.maximum(row_max * factor, LOWEST)
    if OFFSET > 0.0:
        scaled_max -= tl.where(tl.abs(row_max) < NEAR, OFFSET, 0.0)
    return scaled_max


# Returns (lse, its rounding error) of rows with the largest logit row_max, and with the sum row_sum of exp2(logit * factor -
# scaled_max). For example, fp32 numbers near -1e9 are multiples of 64, so only the second number tells how many keys share such
# an lse.
@triton.jit
def log_of_sum(row_max, factor, scaled_max, row_sum):
    above = (tl.log2(row_sum) - tl.fma(row_max, factor, -scaled_max)) * LN2
    above = tl.where(row_max == float("-inf"), 0.0, above)
    lse = row_max + above
    return lse, tl.where(row_max == float("-inf"), 0.0, row_max - lse + above)
