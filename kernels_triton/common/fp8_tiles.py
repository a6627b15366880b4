"""Tiles in FP8: their scales, their products, and conversions to them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.copies import load_columns


# Returns the factor of the block of rows that contains `row`. A tile of a block mask may begin past the end, without a factor.
@triton.jit
def load_descale(scale, b, h, row, length, META: tl.constexpr):
    offset = b * scale.stride_b + h * scale.stride_h
    if META.HAS_BLOCK_SCALES:
        offset += tl.maximum(tl.minimum(row, length - 1), 0) // META.SCALE_ROWS * scale.stride_block
    return tl.load(scale.ptr + offset)


@triton.jit
def load_token_descales(scale, pages, b, h, first, num_rows, ROWS: tl.constexpr):
    # Returns the factors of ROWS keys of a sequence and head, dense or in pages (page ids are clamped); 0 past the sequence's end.
    rows = first + tl.arange(0, ROWS)
    is_row = rows < num_rows
    place = tl.zeros([ROWS], tl.int64) + b
    row = rows
    if pages.table_ptr is not None:
        page = tl.load(pages.table_ptr + tl.cast(b, tl.int64) * pages.stride + rows // pages.page_size, mask=is_row, other=0)
        place = tl.cast(tl.minimum(tl.maximum(page, 0), pages.num_pages - 1), tl.int64)
        row = rows % pages.page_size
    offsets = place * scale.stride_b + tl.cast(row, tl.int64) * scale.stride_block + tl.cast(h, tl.int64) * scale.stride_h
    return tl.load(scale.ptr + offsets, mask=is_row, other=0.0)


@triton.jit
def descaled(qk, descale, softmax_scale, META: tl.constexpr):
    # Returns (product, scale), whose product is the scaled score. Only a bias that is added before the scale needs an exact
    # product.
    if META.HAS_PRE_SCALE_BIAS:
        return qk * descale, softmax_scale
    else:
        return qk, softmax_scale * descale


class Products(NamedTuple):
    """The two products of a tile that the backward computes, inside a kernel."""

    qk: tl.tensor
    dp: tl.tensor  # the product of dout and v
    scale: tl.tensor  # multiplied with qk, it gives the scaled score


@triton.jit
def descaled_products(qk, dp, inputs, head, h_kv, row, column, META: tl.constexpr):
    scale = inputs.scores.scale
    if META.IS_FP8:
        scales = inputs.scales
        descale = load_descale(scales.q, head.b, head.h, row, head.len_q, META)
        descale *= load_descale(scales.k, head.b, h_kv, column, head.len_kv, META)
        qk, scale = descaled(qk, descale, scale, META)
        dp *= load_descale(scales.dout, head.b, head.h, row, head.len_q, META)
        dp *= load_descale(scales.v, head.b, h_kv, column, head.len_kv, META)
    return Products(qk=qk, dp=dp, scale=scale)


@triton.jit
def to_fp8_rows(x, DTYPE: tl.constexpr):
    # Returns (x in FP8, a factor for each row). A row's largest value becomes the dtype's largest, so it is exact: it matters most
    # if softmax is peaked.
    TOP: tl.constexpr = 448.0 if tl.float8e4nv == DTYPE else 57344.0
    largest = tl.minimum(tl.maximum(tl.max(tl.abs(x), 1), 2.0**-100), 2.0**100)
    return (x * (TOP / largest)[:, None]).to(DTYPE), largest * (1.0 / TOP)


@triton.jit
def fp8_product(
    x, copy, first, num_rows, COLUMN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    # Returns x @ y for y in a transposed copy, in its own accumulator: the matrix instruction accumulates in about 14 bits.
    y = load_columns(copy, first, num_rows, x.shape[1], COLUMN, WIDTH, HEAD_DIM, CHECK_ROWS)
    return tl.dot(x, tl.trans(y))
