"""Interval arithmetic, which the generated functions of `intervals` call.

An interval is two int64 tiles, the least and the largest value. If an end is past MOST in either direction, it is open, and its
value is OPEN. So nothing overflows here, and only a value that is known exactly makes an interval of one number. An open end stands
for any int64 and may wrap in the mod. So arithmetic on it gives EVERYTHING, an interval that is open on both sides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexattn.kernels_triton.mods.mod_math import floor_divide, floor_remainder

MOST = tl.constexpr(2**40)
OPEN = tl.constexpr(2**61)
LARGEST_FACTOR = 2**20


@triton.jit
def widen(low, high):
    low = tl.where(low < -MOST, -OPEN, tl.minimum(low, MOST))
    high = tl.where(high > MOST, OPEN, tl.maximum(high, -MOST))
    return low, high


@triton.jit
def is_closed(low, high):
    return (low >= -MOST) & (high <= MOST)


@triton.jit
def unless_open(known, low, high):
    return tl.where(known, low, -OPEN), tl.where(known, high, OPEN)


@triton.jit
def added(low, high, other_low, other_high):
    low, high = unless_open(is_closed(low, high) & is_closed(other_low, other_high), low + other_low, high + other_high)
    return widen(low, high)


@triton.jit
def negated(low, high):
    return unless_open(is_closed(low, high), -high, -low)


@triton.jit
def subtracted(low, high, other_low, other_high):
    other_low, other_high = negated(other_low, other_high)
    return added(low, high, other_low, other_high)


@triton.jit
def scaled(low, high, FACTOR: tl.constexpr):
    a = tl.maximum(low, -MOST) * FACTOR
    b = tl.minimum(high, MOST) * FACTOR
    low, high = unless_open(is_closed(low, high), tl.minimum(a, b), tl.maximum(a, b))
    return widen(low, high)


@triton.jit
def absolute(low, high):
    return unless_open(is_closed(low, high), tl.maximum(tl.maximum(low, -high), 0), tl.maximum(-low, high))


@triton.jit
def floor_divided(low, high, DIVISOR: tl.constexpr):
    return widen(floor_divide(low, DIVISOR), floor_divide(high, DIVISOR))


@triton.jit
def remainder(low, high, DIVISOR: tl.constexpr):
    is_one_period = floor_divide(low, DIVISOR) == floor_divide(high, DIVISOR)
    return tl.where(is_one_period, floor_remainder(low, DIVISOR), 0), tl.where(
        is_one_period, floor_remainder(high, DIVISOR), DIVISOR - 1
    )


@triton.jit
def either(surely, possibly, low, high, other_low, other_high):
    # bounds of where(condition, x, other)
    low = tl.where(surely, low, tl.where(possibly, tl.minimum(low, other_low), other_low))
    high = tl.where(surely, high, tl.where(possibly, tl.maximum(high, other_high), other_high))
    return low, high


@triton.jit
def equal(low, high, other_low, other_high):
    surely = (low == high) & (other_low == other_high) & (low == other_low)
    return surely, (low <= other_high) & (other_low <= high)


@triton.jit
def read_one(pointer, offset, inside, known):
    # Open if one of the indices is not known.
    value = tl.load(pointer + offset, mask=inside & known, other=0).to(tl.int64)
    low, high = unless_open(known, value, value)
    return widen(low, high)


@triton.jit
def read_range(pointer, first, last, size, stride, inside, known, SPAN: tl.constexpr):
    # Returns the range of the elements first .. last of one dim, at most SPAN; elements outside of the tensor are 0. It is open if
    # there are more, if `first` counts from the end, or if an index of another dim is not known.
    positions = first[:, None] + tl.arange(0, SPAN)[None, :]
    is_wanted = positions <= last[:, None]
    exists = is_wanted & (positions >= 0) & (positions < size) & inside[:, None]
    values = tl.load(pointer[:, None] + positions * stride, mask=exists, other=0).to(tl.int64)
    low = tl.min(tl.where(is_wanted, values, OPEN), 1)
    high = tl.max(tl.where(is_wanted, values, -OPEN), 1)
    low, high = unless_open(known & (first >= 0) & (last - first < SPAN), low, high)
    return widen(low, high)
