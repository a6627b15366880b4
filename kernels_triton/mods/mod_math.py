"""Functions of lowered mods that triton.language lacks, or has with another meaning than torch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.encoded_sizes import read_size
from flexattn.kernels_triton.common.tanh import tanh, tanh_in_half

__all__ = ["read_size", "tanh", "tanh_in_half"]


@triton.jit
def floor_divide(x, y):
    # rounds down; Triton's integer division rounds toward zero
    quotient = x // y
    return quotient - ((quotient * y != x) & ((x < 0) != (y < 0))).to(quotient.dtype)


@triton.jit
def floor_remainder(x, y):
    # has the divisor's sign; Triton's remainder has the dividend's
    remainder = x % y
    return tl.where((remainder != 0) & ((remainder < 0) != (y < 0)), remainder + y, remainder)


@triton.jit
def float_remainder(x, y):
    return x - tl.floor(x / y) * y


@triton.jit
def float_fmod(x, y):
    return x - trunc(x / y) * y


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_to_even(x):
    below = tl.floor(x)
    remainder = x - below
    is_odd = below != 2.0 * tl.floor(below * 0.5)
    return below + ((remainder > 0.5) | ((remainder == 0.5) & is_odd)).to(tl.float32)


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def exp(x):
    # e^x as 2^n * e^r with |r| <= ln(2) / 2: tl.exp rounds x * log2(e), which costs a large x its last bits. ln(2) is split into
    # two parts, so that r is exact (Cody and Waite, Software Manual for the Elementary Functions, 1980).
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -1.42860677e-6, tl.fma(n, -0.693145751953125, x))
    r = tl.where(tl.abs(x) == float("inf"), x, r)
    return tl.exp2(n - 1.0) * (2.0 * tl.exp2(r * 1.4426950408889634))


@triton.jit
def expm1(x):
    # Kahan's formula: exact if exp(x) - 1 would cancel, because the logarithm undoes the rounding of exp(x).
    e = exp(x)
    small = tl.abs(x) < 0.5
    scaled = (e - 1.0) * x / tl.where(small & (e != 1.0), tl.log(e), 1.0)
    return tl.where(small, tl.where(e == 1.0, x, scaled), e - 1.0)


@triton.jit
def log1p(x):
    y = 1.0 + x
    scaled = tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0)
    return tl.where(y == 1.0, x, tl.where(tl.abs(x) < 0.5, scaled, tl.log(y)))


@triton.jit
def log10(x):
    return tl.log2(x) * 0.30102999566398120


@triton.jit
def sinh(x):
    e = expm1(tl.abs(x))
    return sign(x) * 0.5 * (e + e / (e + 1.0))


@triton.jit
def cosh(x):
    e = exp(tl.abs(x))
    return 0.5 * (e + 1.0 / e)


@triton.jit
def power(x, y):
    # A negative base has a power only for a whole exponent, whose parity gives the sign.
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    is_integer = y == tl.floor(y)
    is_odd = is_integer & (y != 2.0 * tl.floor(y * 0.5))
    negative = tl.where(is_integer, tl.where(is_odd, -magnitude, magnitude), float("nan"))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0, negative, magnitude))


class DiagonalTables(NamedTuple):
    """The tables of `diagonals` in the tuple of captures, for a mod's functions; sizes are encoded for `read_size`."""

    ptr: Any
    length: Any
    stride_table: Any
    stride_side: Any
    stride_b: Any
    stride_h: Any
    middle_of_keys: Any  # index of distance 0 in the tables in the order of keys
    middle_of_queries: Any


@triton.jit
def diagonals_of_head(b, h, captures, START: tl.constexpr, N: tl.constexpr):
    # Returns pointers to distance 0 in table N of a head, in the order of keys and in the order of queries. START: the index of a
    # `DiagonalTables` in the captures.
    tables = DiagonalTables(
        ptr=captures[START],
        length=captures[START + 1],
        stride_table=captures[START + 2],
        stride_side=captures[START + 3],
        stride_b=captures[START + 4],
        stride_h=captures[START + 5],
        middle_of_keys=captures[START + 6],
        middle_of_queries=captures[START + 7],
    )
    head = (
        N * read_size(tables.stride_table)
        + b * read_size(tables.stride_b).to(tl.int64)
        + h * read_size(tables.stride_h).to(tl.int64)
    )
    in_key_order = tables.ptr + (head + read_size(tables.middle_of_keys))
    in_query_order = tables.ptr + (head + read_size(tables.stride_side) + read_size(tables.middle_of_queries))
    return in_key_order, in_query_order


@triton.jit
def read_diagonal(in_key_order, in_query_order, length, q_idx, kv_idx):
    # Returns a table's entries for a tile.
    if q_idx.shape[1] == 1:
        return tl.load(diagonal_pointers(in_key_order, length, q_idx, kv_idx))
    else:
        return tl.load(diagonal_pointers(in_query_order, length, kv_idx, q_idx))


@triton.jit
def diagonal_pointers(middle, length, rows, columns):
    # Odd rows read the second copy, whose entries are one word earlier. So each row begins at an even word, and words are read in
    # pairs.
    odd = rows & 1
    return tl.multiple_of(middle + (odd * read_size(length) - (rows + odd)), [1, 8]) + columns


@triton.jit
def accumulate(sums, scale_ptr, offset, inside, value, OVER_Q: tl.constexpr, OVER_KV: tl.constexpr, MODE: tl.constexpr):
    # Adds a tile [queries, keys] of addends to sums[offset], after a sum over the queries, or keys, that share an offset. A whole
    # tile is reduced at once: with one axis after the other, Triton 3.7.1 fails to compile for sm_100 (its pass
    # tritongpu-optimize-tmem-layouts).
    if OVER_Q and OVER_KV:
        value = tl.sum(value)
    elif OVER_Q:
        value = tl.sum(value, 0)[None, :]
    elif OVER_KV:
        value = tl.sum(value, 1)[:, None]
    if MODE == "add":
        tl.atomic_add(sums + offset, value.to(sums.dtype.element_ty), mask=inside & (value != 0.0), sem="relaxed")
    else:
        value = tl.where(inside, value, 0.0)
        if MODE == "max":  # non-negative floats order like their bits
            largest = tl.abs(value)
            if not (OVER_Q and OVER_KV):
                largest = tl.max(tl.where(largest == largest, largest, float("inf")))
            tl.atomic_max(sums, largest.to(tl.int32, bitcast=True), sem="relaxed")
        else:
            fixed = tl.floor(value * tl.load(scale_ptr) + 0.5).to(tl.int64)
            tl.atomic_add(sums + offset, fixed, mask=inside & (value != 0.0), sem="relaxed")


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
